"""Values of the files that a run leaves, checked one by one; a refusal names the field and what was expected of it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from ..layers.state import plain_name
from ..numerics.formats import check_format
from ..numerics.gemms import GEMMS
from ..text import printable

# Above it, not every whole number is a float any more.
_LARGEST_STEP = 2**53
# Sums of squares of such numbers are finite.
_LARGEST_NUMBER = 1e100


def entry_of(mapping: Mapping[str, Any], key: str, where: str = "it") -> Any:
    if key not in mapping:
        raise ValueError(f"{where} has no entry {key!r}.")
    return mapping[key]


def mapping_of(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {short(value)}, expected a JSON object.")
    return value


def list_of(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{where} is {short(value)}, expected a list.")
    return value


def text_of(value: object, where: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{where} is {short(value)}, expected text or null.")
    return value


def is_step(value: object) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST_STEP


def step_of(value: object, where: str) -> int:
    if not isinstance(value, int) or not is_step(value):
        raise ValueError(f"{where} is {short(value)}, expected an integer from 0 to {_LARGEST_STEP}.")
    return value


def number_of(value: object, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST_NUMBER:
        return float(value)
    raise ValueError(f"{where} is {short(value)}, expected a number up to {_LARGEST_NUMBER:g} in size.")


def short(value: object) -> str:
    """`repr`, cut to a length that fits in a message; of a container only what it is."""
    if isinstance(value, dict | list):
        return f"a {'JSON object' if isinstance(value, dict) else 'list'} of {len(value)}"
    return printable(repr(value), 60)


def check_event(record: Mapping[str, Any], expected: str) -> None:
    if entry_of(record, "event") != expected:
        raise ValueError(f"event is {short(record['event'])}, expected {expected!r}.")


def changes_of(value: object, cells: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    changes: dict[str, tuple[str, str]] = {}
    for cell, pair in mapping_of(value, "changes").items():
        where = f"changes[{printable(cell)!r}]"
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(f"{where} is {short(pair)}, expected the old and the new format.")
        for name in pair:
            check_format(name, where)
        if cell.rpartition(":")[2] not in GEMMS:
            raise ValueError(f"{where} names no GEMM; expected one of {', '.join(GEMMS)} after the layer.")
        # The same objects as everywhere else: a history names each layer very often.
        changes[cells.get(cell) or plain_name(cell)] = _pair(*pair)
    return changes


@functools.cache
def _pair(old: str, new: str) -> tuple[str, str]:
    return old, new
