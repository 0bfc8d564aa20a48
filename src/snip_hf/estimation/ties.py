"""Ties: linears that receive the same tensor, found in the passes of a probe."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from torch import Tensor

Ties = tuple[tuple[str, ...], ...]
# Last names of linears that receive the same input in families of transformers: the ties until a pass has run.
_USUAL: Ties = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("wi_0", "wi_1"),
)


class SharedInputs:
    """Groups the layers of one pass by the tensor that they receive. Holds none of the tensors."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._groups: list[list[str]] = []
        self._latest: dict[int, tuple[weakref.ref[Tensor], int, list[str]]] = {}
        """id of a tensor -> the tensor, its version then, and the layers that received it."""

    def add(self, layer: str, input: Tensor) -> None:
        """Records that a layer is called with a tensor. One that was written to since is another tensor."""
        self._calls[layer] += 1
        known = self._latest.get(id(input))
        if known is None or known[0]() is not input or known[1] != input._version:
            known = weakref.ref(input), input._version, []
            self._latest[id(input)] = known
            self._groups.append(known[2])
        known[2].append(layer)

    def groups(self) -> list[list[str]]:
        """Returns the layers by the tensor that they received, without those that were called more than once."""
        return [[layer for layer in group if self._calls[layer] == 1] for group in self._groups]


def ties_of(groups: Iterable[Sequence[str]], layers: Collection[str]) -> Ties:
    """Returns the last names of siblings that receive the same tensor in every block, as `SnipConfig.ties` has them.

    Args:
        groups: names of layers that received the same tensor (`SharedInputs.groups`).
        layers: names of all layers.
    """
    found: dict[tuple[str, ...], None] = {}
    for group in groups:
        siblings: dict[str, list[str]] = {}
        for name in group:
            siblings.setdefault(_parent(name), []).append(_last(name))
        found |= {tuple(names): None for names in siblings.values() if len(names) > 1}
    return _consistent(list(found), layers)


def usual_ties(layers: Collection[str]) -> Ties:
    """Returns the usual names among those of a model's layers, for plans that are made before any pass."""
    return _consistent(_USUAL, layers)


def _consistent(ties: Sequence[tuple[str, ...]], layers: Collection[str]) -> Ties:
    """Returns those ties that occur, and whose names are tied alike wherever they occur."""
    parents: dict[str, set[str]] = {}
    for name in layers:
        parents.setdefault(_parent(name), set()).add(_last(name))

    def is_everywhere(tie: set[str]) -> bool:
        others = [set(other) for other in ties if set(other) != tie]
        having = [names for names in parents.values() if not tie.isdisjoint(names)]
        return all(map(tie.isdisjoint, others)) and bool(having) and all(tie <= names for names in having)

    return tuple(tie for tie in ties if is_everywhere(set(tie)))


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _last(name: str) -> str:
    return name.rpartition(".")[2]
