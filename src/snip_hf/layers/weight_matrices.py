"""The weights of a model that may be operands of matrix products: of what kind each is, and whether it is swapped."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import is_lazy

from ..config import SnipConfig
from ..text import printable
from .adapters import ADAPTER, adapter_reasons
from .kinds import known_weights
from .labels import without_numbers
from .layer import SnipLayer
from .routers import Routers
from .selection import ROUTER, head_of, skip_reasons
from .state import plain_name, snip_linears

EXPERTS = "MoE experts"
# Of the groups that a line of the log names; the rest is counted.
_MOST_NAMED = 20
# Between the name of a module and that of its parameters from which torch computes another one.
_PARAMETRIZED = ".parametrizations."


@dataclass(frozen=True)
class WeightMatrix:
    """A parameter with two dimensions or more, or a scalar product's one, in the module that multiplies with it."""

    parameter: nn.Parameter
    name: str
    """Of the module, or of the parameter if it is not called "weight"; `*` stands for a number."""
    kind: str
    """`EXPERTS`, `ROUTER` or the module's class."""
    reason: str | None
    """Why no plan decides on it; None: one does."""
    is_aside: bool
    """Whether it is the output head's or an embedding's."""

    @property
    def size(self) -> int:
        """Elements, on all ranks that share it."""
        return math.prod(_shape(self.parameter))


def weight_matrices(model: nn.Module, config: SnipConfig | None) -> list[WeightMatrix]:
    """Returns every floating-point parameter that is not a module's mere bias, once.

    A weight that several modules share belongs to the one that a plan decides on, or else to the first one. Reads
    shapes only: weights may be sharded or on the meta device.

    Args:
        model: a model, converted or not.
        config: says what is swapped; None: what is, or the defaults in a model that is not converted.
    """
    reasons, routers, adapters = layer_reasons(model, config), Routers(model), adapter_reasons(model)
    head = head_of(model)
    tables = [one for one in model.modules() if one is head or isinstance(one, nn.Embedding | nn.EmbeddingBag)]
    aside = {id(parameter) for table in tables for parameter in table.parameters(recurse=False)}
    found: dict[int, WeightMatrix] = {}
    for long_name, module in model.named_modules():
        name = plain_name(long_name)
        for own_name, parameter in module.named_parameters(recurse=False):
            if is_lazy(parameter) or not parameter.is_floating_point() or own_name.endswith("bias"):
                continue
            reason: str | None = f"no layer kind takes a {type(module).__name__}"
            if any(parameter is weight for weight in known_weights(module)):
                # A module of several layers has one for each parameter, of its name.
                reason = reasons[name] if name in reasons else reasons[f"{name}.{own_name}"]
            elif f"{name}.{own_name}" in reasons:  # of a layer of the module around this one
                reason = reasons[f"{name}.{own_name}"]
            elif reasons.get(name.partition(_PARAMETRIZED)[0]) is not None:  # such as what the weight is computed from
                reason = reasons[name.partition(_PARAMETRIZED)[0]]
            elif adapters.get(id(module)) == ADAPTER:
                reason = ADAPTER
            elif routers.is_of_class(module, (*_shape(parameter), 0)[0]):
                reason = ROUTER
            place = without_numbers(name if own_name == "weight" else f"{name}.{own_name}".lstrip("."))
            kind = ROUTER if reason == ROUTER else _kind(name, module, parameter)
            one = WeightMatrix(parameter, place, kind, reason, id(parameter) in aside and reason is not None)
            if id(parameter) not in found or (reason is None and found[id(parameter)].reason is not None):
                found[id(parameter)] = one
    return list(found.values())


def layer_reasons(model: nn.Module, config: SnipConfig | None) -> Mapping[str, str | None]:
    """Returns, for every layer of a known kind, why no plan decides on it, or None if one does; `config` as above."""
    reasons, swapped = skip_reasons(model, config or SnipConfig()), snip_linears(model)
    if config is not None or not swapped:
        return reasons
    return {name: None if name in swapped else reason or "not swapped" for name, reason in reasons.items()}


def _kind(name: str, module: nn.Module, parameter: nn.Parameter) -> str:
    described, last = type(module).__name__, name.rpartition(".")[2]
    if len(_shape(parameter)) > 2 and "expert" in f"{described}.{last}".lower():
        return EXPERTS
    if "router" in f"{described}.{last}".lower() or last == "gate":
        return ROUTER
    return class_name(module)


def class_name(module: nn.Module) -> str:
    """Returns the class of a module, that which a swapped one had."""
    return (module.snip_original_class if isinstance(module, SnipLayer) else type(module)).__name__


def describe_unswapped(matrices: list[WeightMatrix]) -> str:
    """Returns names, kinds and reasons of weight matrices that no plan decides on, the largest first; "" if none.

    Those of adapters, of which every adapted layer has some, are only counted.
    """
    groups: dict[tuple[str, str, str], list[int]] = {}
    of_adapters = 0
    for one in matrices:
        if one.reason is None or one.is_aside or len(_shape(one.parameter)) < 2:
            continue
        if one.reason == ADAPTER:
            of_adapters += 1
        else:
            groups.setdefault((one.name, one.kind, one.reason), []).append(one.size)
    ordered = sorted(groups, key=lambda group: -sum(groups[group]))
    texts = [
        f"{printable(name)}{f' x {len(groups[name, kind, reason])}' * (len(groups[name, kind, reason]) > 1)} "
        f"({printable(kind)}{f', {reason}' * (reason != kind)})"
        for name, kind, reason in ordered[:_MOST_NAMED]
    ]
    more = [f"and {len(ordered) - _MOST_NAMED} more"] * (len(ordered) > _MOST_NAMED)
    adapters = [f"{of_adapters} {'matrix' if of_adapters == 1 else 'matrices'} of adapters"] * (of_adapters > 0)
    return ", ".join(texts + more + adapters)


def _shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Returns the shape of the whole parameter; none for one that has no shape yet."""
    if is_lazy(parameter):
        return ()
    # DeepSpeed's ZeRO-3 leaves an empty tensor on each rank.
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
