"""Pages and lines of results as they are committed, for tests that compare the two."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@cache
def text_of(page: str) -> str:
    """A page without the tables that reports write into it, each run of white space as one space.

    A figure of such a table would stand in for one that the prose has wrong.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    return " ".join(re.sub(r"<!-- (forks\S*) -->.*?<!-- /\1 -->", "", text, flags=re.DOTALL).split())


@cache
def prose_of(page: str) -> str:
    """As `text_of`, without any table."""
    rows = (ROOT / page).read_text(encoding="utf-8").splitlines()
    return " ".join(" ".join(row for row in rows if not row.startswith(("|", "<!--"))).split())


def lines_of(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / path).read_text(encoding="utf-8").splitlines()]
