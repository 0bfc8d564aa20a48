"""How much ran in FP4 over a run of a bake-off, and how far its plans moved.

A run's `plans` are those that came into force, with one letter per GEMM.
"""

from __future__ import annotations

from itertools import pairwise

from .gaps import diverged
from .lines import Row


def fp4_over_run(line: Row) -> float | None:
    """Returns the share of FP4 in force, mean over the optimizer steps from start_step on.

    Returns: None for a run that diverged, has no plan, or whose plans' shares are not known.
    """
    plans, spec = line["plans"], line["spec"]
    if diverged(line) or not plans or any(plan.get("fp4_fraction") is None for plan in plans):
        return None
    edges = [spec["start_step"], *(plan["step"] for plan in plans[1:]), spec["steps"]]
    spans = zip(plans, pairwise(edges), strict=True)
    return sum(plan["fp4_fraction"] * (end - start) for plan, (start, end) in spans) / (edges[-1] - edges[0])


def decided_plans(line: Row) -> list[str]:
    """Returns the formats strings of the plans in force, from the first that has FP4 in it: before that is warm-up."""
    formats = [plan["formats"] for plan in line["plans"]]
    first = next((index for index, text in enumerate(formats) if "4" in text), len(formats))
    return formats[first:]


def hamming(one: str, other: str) -> float:
    """Returns the share of (layer, GEMM) pairs whose formats differ, each pair counted the same.

    Raises:
        ValueError: the strings have different lengths.
    """
    return sum(a != b for a, b in zip(one, other, strict=True)) / len(one)


def changed_per_refresh(line: Row) -> float | None:
    """Returns the mean share of pairs that a refresh after the first changed; None if there was none after it."""
    plans, later = decided_plans(line), len(line["refresh_seconds"]) - 1
    return None if later < 1 else sum(map(hamming, plans, plans[1:])) / later


def total_drift(line: Row) -> float | None:
    """Returns the share of pairs in which the last plan differs from the first; None without a plan with FP4."""
    plans = decided_plans(line)
    return hamming(plans[0], plans[-1]) if plans else None
