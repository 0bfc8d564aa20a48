"""Markdown: tables, lines of at most 120 characters, and parts of a document that are renewed between two markers."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

_MARKS = re.compile(r" (?=[-+*>=#|]|\d+[.)] )")
_AT_SPACES: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table; bars inside cells are escaped."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def wrapped(text: str) -> str:
    """Breaks lines of Markdown above 120 characters, tables aside; no new line begins with what Markdown would read."""
    lines = []
    for line in text.split("\n"):
        indent = "  " * line.startswith("- ")
        # Glued to the word before: signs and numbers that would begin a list, a quotation or a heading.
        glued = _MARKS.sub("\0", line)
        folds = [glued] if line.startswith("|") else textwrap.wrap(glued, 120, subsequent_indent=indent, **_AT_SPACES)
        lines += [fold.replace("\0", " ") for fold in folds or [""]]
    return "\n".join(lines)


def replace_between(path: str | os.PathLike[str], marker: str, text: str) -> None:
    """Puts `text` between `<!-- MARKER -->` and `<!-- /MARKER -->`; the rest of the file stays.

    Raises:
        ValueError: not exactly one of each, or in the wrong order.
    """
    path = Path(path)
    content = path.read_text(encoding="utf-8")
    first, last = f"<!-- {marker} -->", f"<!-- /{marker} -->"
    if content.count(first) != 1 or content.count(last) != 1 or content.index(first) > content.index(last):
        raise ValueError(
            f"{path} has {content.count(first)} lines {first!r} and {content.count(last)} lines {last!r}; expected one "
            f"of each, in this order. Put them where the table {marker!r} belongs."
        )
    before, rest = content.split(first)
    after = rest.split(last)[1]
    path.write_text(f"{before}{first}\n{text}\n{last}{after}", encoding="utf-8")


def marked_names(path: Path, prefix: str, sections: Mapping[str, object]) -> list[str]:
    """Returns the names of the markers with the prefix in a file."""
    names = re.findall(rf"<!-- {re.escape(prefix)}:(\S+) -->", path.read_text(encoding="utf-8"))
    if not names:
        raise ValueError(f"{path} has no marker '<!-- {prefix}:NAME -->'; put one where a table belongs.")
    unknown = sorted(set(names) - sections.keys())
    if unknown:
        raise ValueError(f"{path} has markers for unknown tables {unknown}; expected some of {sorted(sections)}.")
    return list(dict.fromkeys(names))
