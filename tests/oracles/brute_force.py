"""The best map of a small integer program, found by trying every map."""

from __future__ import annotations

import itertools
from typing import Any


def best_map(problem: dict[str, Any]) -> tuple[float, dict[str, str]] | None:
    """Cost and choices of the cheapest map that meets every constraint and tie, or None if there is none.

    Constraints are compared without any tolerance, so give it weights that add up exactly (eighths, say).
    """
    groups = problem["groups"]
    best: tuple[float, dict[str, str]] | None = None
    for options in itertools.product(*(group["options"] for group in groups)):
        taken = {group["name"]: option for group, option in zip(groups, options, strict=True)}
        if any(len({taken[name]["name"] for name in tie}) > 1 for tie in problem.get("ties", [])):
            continue
        if any(
            sum(taken[name]["weight"] for name in (row["groups"] if row["groups"] is not None else taken))
            < row["minimum"]
            for row in problem["constraints"]
        ):
            continue
        cost = sum(option["cost"] for option in options)
        if best is None or cost < best[0]:
            best = cost, {name: option["name"] for name, option in taken.items()}
    return best
