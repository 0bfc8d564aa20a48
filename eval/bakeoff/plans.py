"""How much ran in 4-bit formats over a run of a bake-off, and how far its plans moved.

A run's `plans` are those that came into force, with one letter per GEMM; its `letters` say which format each stands
for.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping
from itertools import pairwise

from snip_hf.numerics.formats import FORMATS

from .gaps import diverged
from .lines import Row

# Of the formats that there were first; lines without `letters` have these.
_FIRST = {"fp4": "4", "fp8": "8", "bf16": "b"}
_OTHERS = [letter for letter in string.ascii_letters + string.digits if letter not in _FIRST.values()]


def letters_of(formats: Iterable[str]) -> dict[str, str]:
    """Returns format -> letter, for the formats of one run, in the registry's order.

    Raises:
        ValueError: there are more formats than letters.
    """
    used = set(formats)
    ordered = [name for name in FORMATS if name in used]
    others = [name for name in ordered if name not in _FIRST]
    if len(others) > len(_OTHERS):
        raise ValueError(f"A run has {len(ordered)} formats; a line has letters for {len(_OTHERS) + len(_FIRST)}.")
    own = dict(zip(others, _OTHERS, strict=False))
    return {name: _FIRST.get(name) or own[name] for name in ordered}


def format_letters(line: Row) -> Mapping[str, str]:
    """Returns format -> letter as a line's plans have them."""
    letters: Mapping[str, str] = line.get("letters") or _FIRST
    return letters


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
    """Returns the formats strings of the plans in force, from the first with 4 bits in it: before that is warm-up."""
    plans = line["plans"]
    first = next((index for index, plan in enumerate(plans) if _has_4_bits(plan)), len(plans))
    return [plan["formats"] for plan in plans[first:]]


def _has_4_bits(plan: Row) -> bool:
    fraction = plan.get("fp4_fraction")
    return _FIRST["fp4"] in plan["formats"] if fraction is None else bool(fraction > 0)


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
