"""The coverage of a plan: which weight matrices it leaves out, of what kind, why, and how large they are."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn
from torch.nn.parameter import is_lazy

from ..text import printable
from .kinds import known_weights

# Numbers in names: `layers.0.gate` and `layers.1.gate` are one group, `layers.*.gate`.
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
# Of the groups that a line of the log names; the rest is counted.
_MOST_NAMED = 20
_NO_LINEAR = "not an nn.Linear"


@dataclass(frozen=True)
class Uncovered:
    """Weight matrices of one kind that no plan decides the format of; they stay in high precision."""

    name: str
    """Of the module, or of the parameter if it is not called "weight"; `*` stands for a number."""
    kind: str
    """The module's class."""
    reason: str
    count: int
    """Matrices that the name stands for."""
    parameters: int
    """Of all of them, on all ranks that share them."""
    share: float
    """Of `Coverage.parameters`, 0..1."""

    def __str__(self) -> str:
        times = f" x {self.count}" if self.count > 1 else ""
        return f"{printable(self.name)}{times} ({printable(self.kind)}, {self.reason}: {self.share:.1%})"


@dataclass(frozen=True)
class Coverage:
    """How much of a model its plan covers."""

    parameters: int
    """Of all floating-point weights with two dimensions or more, without embeddings and the output head; a weight with
    several names counts once."""
    covered: int
    """Those among them that are weights of swapped layers."""
    uncovered: tuple[Uncovered, ...]
    """The others, the largest share first."""

    def describe(self, most: int = _MOST_NAMED) -> str:
        """Returns share, name, kind and reason of what is not covered, at most so many names."""
        named, rest = self.uncovered[:most], self.uncovered[most:]
        more = f", and {len(rest)} more ({sum(group.share for group in rest):.1%})" if rest else ""
        share = sum(group.share for group in self.uncovered)
        return (
            f"{share:.1%} of the parameters in weight matrices (embeddings and output head aside): "
            f"{', '.join(map(str, named))}{more}"
        )


def find_coverage(
    model: nn.Module, head: object, reasons: Mapping[str, str | None], names: Mapping[int, str]
) -> Coverage:
    """Returns what of a model's weight matrices is covered if the linears without a reason are.

    Reads shapes only: weights may be sharded or on the meta device.

    Args:
        model: the model.
        head: its output head, or None.
        reasons: name of a linear -> why it is not swapped; None: it is.
        names: id of a module -> its name in `reasons`.
    """
    # Of those first: a tied weight belongs to the embedding, wherever else it is.
    seen = {
        id(parameter)
        for module in model.modules()
        if module is head or isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for parameter in module.parameters(recurse=False)
    }
    total = covered = 0
    groups: dict[tuple[str, str, str], Uncovered] = {}
    for module in model.modules():
        name, kind = names[id(module)], type(module).__name__
        for own_name, parameter in module.named_parameters(recurse=False):
            shape = _shape(parameter)
            if id(parameter) in seen or len(shape) < 2 or not parameter.is_floating_point():
                continue
            seen.add(id(parameter))
            size = math.prod(shape)
            total += size
            reason = reasons.get(f"{name}.{own_name}", reasons.get(name, _NO_LINEAR))
            if reason is None and any(parameter is weight for weight in known_weights(module)):
                covered += size
                continue
            key = _NUMBER.sub("*", name if own_name == "weight" else f"{name}.{own_name}"), kind, reason or _NO_LINEAR
            before = groups.get(key, Uncovered(*key, 0, 0, 0.0))
            groups[key] = replace(before, count=before.count + 1, parameters=before.parameters + size)
    shared = (replace(group, share=group.parameters / max(total, 1)) for group in groups.values())
    return Coverage(total, covered, tuple(sorted(shared, key=lambda group: -group.parameters)))


def _shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Returns the shape of the whole parameter; none for one that has no shape yet."""
    if is_lazy(parameter):
        return ()
    # DeepSpeed's ZeRO-3 leaves an empty tensor on each rank.
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
