"""What a file of lines holds: one JSON object per run; the last with an id counts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.shared.json_lines import read_lines
from snip_hf.field_names import current_names

Row = dict[str, Any]

SCHEMA_VERSION = 1


def read_runs(path: Path) -> list[Row]:
    """Returns the lines of a file, none if there is no file; half a line at its end is left out.

    Lines keep the names of settings of their time; they are returned with those of now.
    """
    return [line | {"spec": current_names(line["spec"])} for line in read_lines(path)]


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
