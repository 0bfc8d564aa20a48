"""Files of JSON lines that a killed run may have left unfinished: one line per measurement, read back and continued."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a file, none if there is no file; half a line at its end is left out.

    Raises:
        ValueError: a line is not JSON.
    """
    if not path.exists():
        return []
    complete = path.read_text(encoding="utf-8").rpartition("\n")[0]
    return [_parsed(path, number, text) for number, text in enumerate(complete.splitlines(), 1)]


def drop_unfinished_line(path: Path) -> None:
    """Cuts what a killed run left at the end of a file, so that new lines begin as lines."""
    if path.exists():
        with path.open("r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


def _parsed(path: Path, number: int, text: str) -> dict[str, Any]:
    try:
        line: dict[str, Any] = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}: line {number} is not JSON ({error.msg}): {text[:40]!r}. Take it out of the file; the same "
            "command measures again what it held."
        ) from error
    return line
