"""Single values of a config's fields: checked against their annotations, and as plain data."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from typing import Any

from .numerics.formats import FORMATS, UNQUANTIZED, check_format

# Ties that are found in the model.
FOUND = "auto"
# Bits of the integers that files and random numbers are made of.
_INTEGER_BITS = 63


def check_type(name: str, value: object, annotation: str, advice: str = "") -> None:
    """Raises TypeError unless value fits the field's annotation (numbers, strings, None; sequences for tuples)."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = (
        ("None" in annotation and value is None)
        or ("float" in annotation and is_number)
        or ("int" in annotation and is_number and isinstance(value, int))
        or (annotation.startswith("str") and isinstance(value, str))
        or ("tuple" in annotation and isinstance(value, list | tuple))
    )
    if not fits:
        raise TypeError(f"{name}={value!r} has type {type(value).__name__}; expected {annotation}.{advice}")


def is_none(text: str) -> bool:
    """Returns True if a text stands for None."""
    return text.strip().lower() in ("none", "null", "~")


def as_meant(value: Any, annotation: str) -> Any:
    """Returns what a value of YAML means in a field: None, "off" or a number that YAML does not read as such."""
    if value is False and annotation == "Guard":
        return "off"
    if not isinstance(value, str):
        return value
    if "None" in annotation and is_none(value):
        return None
    if "float" in annotation:
        with contextlib.suppress(ValueError):
            return float(value)
    return value


def check_bits(name: str, value: object) -> None:
    """Raises ValueError if an integer is too large for what it ends up in, or even to be shown."""
    if isinstance(value, int) and value.bit_length() > _INTEGER_BITS:
        # Python refuses to write out integers of thousands of digits.
        shown = str(value) if value.bit_length() < 1000 else f"an integer of {value.bit_length()} bits"
        raise ValueError(f"{name}={shown} is too large; expected less than 2**{_INTEGER_BITS}, in size.")


def check_seconds(name: str, value: float, longest: float) -> None:
    """Raises ValueError unless a number of seconds is above 0 and no longer than so many."""
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name}={value!r} is not a number of seconds above 0.")
    if value > longest:
        days = f"{longest:g} seconds ({longest / (24 * 3600):g} days)"
        raise ValueError(f"{name}={value!r} is too long; expected at most {days}.")


def as_ties(ties: object) -> str | tuple[tuple[str, ...], ...]:
    """Returns ties as tuples of names, or `FOUND`.

    Raises:
        TypeError: they are neither.
        ValueError: a name is in more than one tie.
    """
    if ties == FOUND:
        return FOUND
    if not isinstance(ties, list | tuple):
        raise TypeError(f"ties={ties!r} has type {type(ties).__name__}; expected {FOUND!r} or lists of names.")
    found = tuple(as_names("ties", tie) for tie in ties)
    counts = Counter(name for tie in found for name in dict.fromkeys(tie))
    for name, count in counts.items():
        if count > 1:
            raise ValueError(f"ties: {name!r} is in more than one tie; put all names that share a format into one.")
    return found


def check_stages(stages: int | tuple[tuple[str, ...], ...] | None) -> None:
    """Raises ValueError if a stage has no layer."""
    for index, stage in enumerate(() if isinstance(stages, int) else stages or ()):
        if not stage:
            raise ValueError(f"stages: stage {index} names no layer; expected at least one in every stage.")


def check_formats(formats: tuple[str, ...], example: object) -> None:
    """Raises ValueError unless these are registered formats, each once, the least precise first."""
    if not formats:
        raise ValueError(f"formats=() names no format; expected e.g. {example!r}.")
    for name in formats:
        check_format(name, "formats")
    ordered = tuple(sorted(dict.fromkeys(formats), key=lambda name: FORMATS[name].bits))
    if len(ordered) < len(formats):
        raise ValueError(f"formats={formats!r} names a format twice; expected {ordered!r}.")
    bits = [FORMATS[name].bits for name in formats]
    if bits != sorted(bits):
        raise ValueError(f"formats={formats!r} is not in order, the least precise first; expected {ordered!r}.")


def check_start(start: str, formats: tuple[str, ...]) -> None:
    """Raises ValueError unless a run in these formats may start in this one."""
    starts = dict.fromkeys([*formats, UNQUANTIZED.name])
    if start not in starts:
        raise ValueError(
            f"start_format={check_format(start, 'start_format')!r} is not among formats={formats!r}; expected one of "
            f"{', '.join(starts)}, or None for the last of formats."
        )


def as_names(field: str, names: object) -> tuple[str, ...]:
    """Returns a list of names as a tuple; raises TypeError if it is none."""
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{field}: got {names!r}; expected a list of names.")
    return tuple(names)


def as_plain(value: Any) -> Any:
    """Returns tuples as lists, at every depth."""
    return [as_plain(item) for item in value] if isinstance(value, tuple) else value
