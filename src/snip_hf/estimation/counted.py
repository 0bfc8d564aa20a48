"""The parameters whose next updates the weight divergence compares, and what the size of a change is relative to.

Where the optimizer trains every swapped weight, these weights count, each change relative to the weight. Where it
leaves some of them alone, as under adapters, every parameter that it trains counts, each change relative to the next
update of that parameter (docs/method.md, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from ..layers.layer import SnipLayer
from ..layers.state import plain_name
from ..parallel.ranks import Ranks


@dataclass(frozen=True)
class Counted:
    """The parameters that count, by name: the swapped weights under their layers' names, others under their own."""

    weights: Mapping[str, Tensor]
    others: Mapping[str, Tensor] | None = None
    """Parameters that are no swapped weights; None where they do not count, since every swapped weight is trained."""

    @property
    def parameters(self) -> dict[str, Tensor]:
        """All of them."""
        return {**self.weights, **(self.others or {})}


def find_counted(
    model: nn.Module,
    layers: Mapping[str, SnipLayer],
    is_trained: Callable[[Tensor], bool],
    stages: Ranks | None = None,
) -> Counted:
    """Returns what counts. Collective over the stages of a pipeline, which decide together.

    Args:
        model: a converted model, without wrappers.
        layers: its swapped layers.
        is_trained: returns True for a parameter that the optimizer updates.
        stages: of a pipeline; None: this process holds the whole model.
    """
    weights = {name: layer.weight for name, layer in layers.items()}
    is_full = all(map(is_trained, weights.values()))
    if all((stages or Ranks()).gather(is_full)):
        return Counted(weights)
    return Counted(weights, trained_beside(model, layers, is_trained))


def trained_beside(
    model: nn.Module, layers: Mapping[str, SnipLayer], is_trained: Callable[[Tensor], bool]
) -> dict[str, Tensor]:
    """Returns the parameters that are trained and no swapped weights, by their names in the bare model."""
    swapped = {id(layer.weight) for layer in layers.values()}
    return {
        plain_name(name): parameter
        for name, parameter in model.named_parameters()
        if id(parameter) not in swapped and parameter.is_floating_point() and is_trained(parameter)
    }
