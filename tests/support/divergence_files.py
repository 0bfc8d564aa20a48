"""The rows of a file of divergences, as the tests read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def records_of(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows as objects."""
    return [dict(zip(document["columns"], row, strict=True)) for row in document["rows"]]
