"""Values of a plan, checked one by one; a refusal names the field and what was expected of it."""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Mapping
from typing import Any

# Of a name or a path: what is longer is no name, and would fill terminals and logs.
MAX_TEXT = 4096


def check_keys(mapping: Mapping[Any, Any], expected: tuple[str, ...], where: str) -> None:
    for key in expected:
        if key not in mapping:
            raise ValueError(f"{where} has no entry {key!r}; expected exactly {', '.join(expected)}.")
    for key in mapping:
        if key not in expected:
            raise ValueError(f"{where} has an unknown entry {short(key)}; expected exactly {', '.join(expected)}.")


def check_type(value: object, kind: type | tuple[type, ...], where: str, expected: str) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{where} is {short(value)}, expected {expected}.")


def check_text(value: object, where: str) -> None:
    # Odd spaces and letters of all kinds occur in names. Control characters do not, unless a file from elsewhere wants
    # to send them to a terminal; the rest is shown escaped (`text.printable`).
    if not isinstance(value, str) or not value or any(unicodedata.category(letter) == "Cc" for letter in value):
        raise ValueError(f"{where} is {short(value)}, expected text without control characters.")
    if len(value) > MAX_TEXT:
        raise ValueError(f"{where} has {len(value)} characters, expected at most {MAX_TEXT}.")


def finite(value: object, where: str, minimum: float = -math.inf) -> float:
    # 1e300 and not infinity, so that sums of such numbers stay finite too; NaN fails both comparisons.
    if isinstance(value, (int, float)) and not isinstance(value, bool) and minimum <= value and abs(value) <= 1e300:
        return float(value)
    bound = "" if minimum == -math.inf else f" of at least {minimum:g}"
    raise ValueError(f"{where} is {short(value)}, expected a finite number{bound}.")


def json_copy(value: Mapping[str, Any], where: str) -> dict[str, Any]:
    check_type(value, Mapping, where, "a JSON object")
    try:
        copy = json.loads(json.dumps(dict(value), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON data: {error}.") from error
    assert isinstance(copy, dict)
    return copy


def short(value: object) -> str:
    """`repr`, cut to a length that fits in a message."""
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
