"""Pages and lines of results as they are committed, for tests that compare the two."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from scipy.stats import binomtest

from eval.bakeoff import fork_tables

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


def shown(test: fork_tables.Tested) -> str:
    """A difference with the detectable one, bold if it is significant."""
    difference = f"**{test.main}**" if test.reading != fork_tables.NOT_SIGNIFICANT else str(test.main)
    return f"{difference} ({test.main.detectable(test.level):.3f})"


def row_of(*cells: object) -> str:
    """A row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def share_of(count: int, forks: int) -> str:
    """A count with its Clopper-Pearson interval."""
    found = binomtest(count, forks).proportion_ci(method="exact")
    return f"{100 * found.low:.0f} to {100 * found.high:.0f}%"


def detectable_of(test: fork_tables.Tested) -> float:
    """The smallest true difference that a test would find with power 0.8."""
    found = test.main.detectable(test.level)
    assert found is not None
    return found
