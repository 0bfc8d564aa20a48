"""How far behind BF16 each run ends, in percent of the loss of the BF16 run of the same seed.

`with_gaps` pairs each line with its BF16 run; contenders, tables and figures take lines so paired.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from .lines import Row, latest

ARITHMETICS = ("plan", "high_precision")
LAYOUT_BY = ("model", "learning_rate", "steps")
PAIRED_BY = (*LAYOUT_BY, "seed")


def with_gaps(lines: Iterable[Row]) -> dict[str, Row]:
    """Returns id -> copy of the last line, with `bf16` (the paired BF16 line or None) and `gap` (percent or None).

    A BF16 run does not depend on start_step, share or policy options: of several that pair, the one whose spec agrees
    most with the run's is taken.
    """
    found = latest(lines)
    baselines: dict[tuple[Any, ...], list[Row]] = {}
    for line in found.values():
        if line["spec"]["policy"] == "bf16":
            baselines.setdefault(_pair_key(line), []).append(line)
    return {key: _with_gap(line, baselines.get(_pair_key(line), [])) for key, line in found.items()}


def _pair_key(line: Row) -> tuple[Any, ...]:
    return tuple(line["spec"][name] for name in PAIRED_BY)


def _with_gap(line: Row, baselines: Sequence[Row]) -> Row:
    spec = line["spec"]

    def agreement(baseline: Row) -> int:
        return sum(baseline["spec"].get(name) == value for name, value in spec.items())

    bf16 = max(baselines, key=agreement, default=None)
    gaps: dict[str, float | None] = {}
    for arithmetic in ARITHMETICS:
        loss, base = final_loss(line, arithmetic), None if bf16 is None else final_loss(bf16, arithmetic)
        gaps[arithmetic] = None if loss is None or base is None else 100 * (loss / base - 1)
    return {**line, "bf16": bf16, "gap": gaps}


def final_loss(line: Row, arithmetic: str = "plan") -> float | None:
    """Returns the final validation loss; None for a run that diverged."""
    loss = (line["loss"] or {}).get(arithmetic)
    return None if line["diverged"] or loss is None or not math.isfinite(loss) else float(loss)


def diverged(line: Row) -> bool:
    """Returns True if the run has no finite final loss under its own arithmetic."""
    return final_loss(line) is None
