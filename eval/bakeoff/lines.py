"""What a file of lines holds: one JSON object per run; the last with an id counts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]

SCHEMA_VERSION = 1


def latest(lines: Iterable[Row]) -> dict[str, Row]:
    """Returns id -> line, the last one of each id.

    Raises:
        ValueError: a line is of another schema version.
    """
    found = {}
    for line in lines:
        if line.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(
                f"The line of run {line.get('id')!r} has schema_version {line.get('schema_version')!r}, expected "
                f"{SCHEMA_VERSION}. Use the report of the commit that wrote it ({line.get('commit')!r})."
            )
        found[line["id"]] = line
    return found
