"""The torch optimizers inside what a user or a launcher made of them: wrappers, and several that share the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def parts_of(optimizer: Any) -> list[Any]:
    """Returns the optimizers that take the steps; what is no torch optimizer is returned as it is.

    Looked through are wrappers (`.optimizer`, as Accelerate's), lists, tuples and dicts of optimizers, and objects that
    hold such a collection as `.optimizers`, as users combine Muon for matrices and AdamW for the rest.
    """
    return list(_parts(optimizer))


def _parts(optimizer: Any) -> Iterator[Any]:
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    several = optimizer if isinstance(optimizer, list | tuple | dict) else getattr(optimizer, "optimizers", None)
    if isinstance(several, Mapping):
        several = list(several.values())
    if not isinstance(several, list | tuple) or not several:
        yield optimizer
        return
    for one in several:
        yield from _parts(one)


def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    """Returns the parameter groups of all parts."""
    return [group for part in parts_of(optimizer) for group in part.param_groups]
