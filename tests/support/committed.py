"""Pages and lines of results as they are committed, for tests that compare the two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def text_of(page: str) -> str:
    """A page, each run of white space as one space."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def lines_of(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / path).read_text(encoding="utf-8").splitlines()]
