"""Gradient clipping, as a user's loop or Trainer does it: what it multiplied the gradients of a step by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from ..estimation.samples import read
from ..layers.layer import SnipLayer
from ..parallel.ranks import Ranks
from ..parallel.sharding import own_part
from .backward_end import BackwardEnd


class Clipping(BackwardEnd):
    """Notes the size of gradients at the end of each backward pass, before anybody clips them.

    Args:
        layers: the swapped layers, whose weights' gradients are noted.
        parameters: all that get a gradient; none where nothing is to be noted.
        others: other parameters whose gradients are noted, by name.
    """

    def __init__(
        self, layers: Mapping[str, SnipLayer], parameters: Iterable[nn.Parameter], others: Mapping[str, Tensor]
    ) -> None:
        self._layers, self._others = layers, others
        self._squares: dict[str, Tensor] = {}
        super().__init__(parameters)

    def factor(self, gradients: Mapping[str, Tensor], everyone: Ranks) -> float:
        """Returns what clipping multiplied the gradients by: their norm after it / before it, over what was noted.

        Args:
            gradients: layer, or name of another parameter -> clipped gradient.
            everyone: all ranks; each may hold a part of the gradients.
        """
        noted = {name: square for name, square in self._squares.items() if name in gradients}
        unclipped = sum(read(list(noted.values())))
        clipped = sum(read([_square(gradient) for name, gradient in gradients.items() if name in noted]))
        before, after = (sum(parts) for parts in zip(*everyone.gather([unclipped, clipped]), strict=True))
        return (after / before) ** 0.5 if before > 0 else 1.0

    def note(self) -> None:
        weights = {name: layer.weight for name, layer in self._layers.items()}
        for name, weight in {**weights, **self._others}.items():
            if weight.grad is not None:
                self._squares[name] = _square(weight.grad.detach())


def _square(gradient: Tensor) -> Tensor:
    return own_part(gradient).to(torch.float32).square().sum()
