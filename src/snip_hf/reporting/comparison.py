"""The runs of a page side by side: what they aimed at, what they attained, what they cost, how their losses ended."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ..records.events import Refresh
from ..records.load import Run
from ..text import printable
from .facts import attained_text, plan_in_force, policy_text, target_text
from .page_data import Losses

_NAME = 200
_NOTHING = "-"


def comparison(runs: Mapping[str, Run], bf16: tuple[str, Losses] | None = None) -> dict[str, Any]:
    """Returns the headings and the rows of the table; the last loss is compared with BF16's, or with the first run's.

    Args:
        runs: name -> run.
        bf16: name and losses of a run in BF16.
    """
    losses: dict[str, Losses] = {name: run.losses for name, run in runs.items()}
    if bf16 is not None:
        losses[bf16[0]] = bf16[1]
    rows = [(label, [text(run) for run in runs.values()]) for label, text in _ROWS]
    rows = [(label, cells) for label, cells in rows if any(cell != _NOTHING for cell in cells)]
    if bf16 is not None:
        rows = [(label, [*cells, _NOTHING]) for label, cells in rows]
    for key, label in (("loss", "Training loss"), ("eval_loss", "Validation loss")):
        if any(key in row for one in losses.values() for row in one.values()):
            rows.append((f"{label}, last", [_last(one, key) for one in losses.values()]))
    against = None if len(losses) < 2 else list(losses)[0 if bf16 is None else -1]
    if against is not None:
        rows.append((f"Loss against {against}", [_against(one, losses[against]) for one in losses.values()]))
    shown = [(printable(label, _NAME), [printable(cell, _NAME) for cell in cells]) for label, cells in rows]
    return {"headings": [printable(name, _NAME) for name in losses], "rows": shown}


def _last(losses: Losses, key: str) -> str:
    steps = [step for step, row in losses.items() if key in row]
    return f"{losses[steps[-1]][key]:.4g} (step {steps[-1]:,})" if steps else _NOTHING


def _against(losses: Losses, other: Losses) -> str:
    """Returns the difference at the last step that both have a loss of, validation before training."""
    if losses is other:
        return _NOTHING
    for key, label in (("eval_loss", "validation"), ("loss", "training")):
        common = [step for step in losses if key in losses[step] and key in other.get(step, {})]
        if common:
            mine, theirs = losses[common[-1]][key], other[common[-1]][key]
            relative = f", {(mine - theirs) / theirs:+.2%}" if theirs and math.isfinite(theirs) else ""
            return f"{mine - theirs:+.4g}{relative} ({label}, step {common[-1]:,})"
    return "no step in common"


def _coverage(run: Run) -> str:
    if not run.counted:
        return _NOTHING
    share = run.counted[-1].coverage.share
    return f"{share:.1%} of the model's matmul FLOPs, {share * plan_in_force(run).fp4_fraction:.1%} of all in FP4"


def _speed(run: Run) -> str:
    plan = plan_in_force(run)
    speedup = plan.linear_speedup()
    return _NOTHING if speedup is None else f"{speedup:.3f} times BF16's ({plan.speed_source})"


def _refreshes(run: Run) -> str:
    applied = sum(refresh.applied_step is not None for refresh in run.refreshes)
    return f"{applied:,} applied, {len(run.refreshes) - applied:,} kept" if run.refreshes else _NOTHING


def _seconds(run: Run) -> str:
    def total(part: str) -> float:
        return math.fsum(refresh.seconds.get(part) or 0.0 for refresh in run.refreshes)

    parts = [f"{part} {total(part):,.1f}" for part in ("probe", "solver", "waited")]
    return ", ".join(parts) if any(refresh.seconds for refresh in run.refreshes) else _NOTHING


def _solvers(run: Run) -> str:
    names = dict.fromkeys(map(_solver, run.refreshes))
    return ", ".join(name for name in names if name) or _NOTHING


def _solver(refresh: Refresh) -> str:
    return "" if refresh.solver is None else f"{refresh.solver} {refresh.solver_version or ''}".strip()


def _mean(run: Run) -> str:
    mean = run.mean_fp4_fraction
    return _NOTHING if mean is None else f"{mean:.4f}"


_ROWS: tuple[tuple[str, Callable[[Run], str]], ...] = (
    ("Model", lambda run: run.plans[-1][1].provenance.model_name or _NOTHING),
    ("Decided by", lambda run: policy_text(run.config)),
    ("Target", lambda run: target_text(run.config)),
    ("FP4 share at the end", lambda run: attained_text(plan_in_force(run))),
    ("FP4 share, mean over the steps", _mean),
    ("Coverage", _coverage),
    ("Speed of the linears", _speed),
    ("Last step", lambda run: f"{run.last_step:,}"),
    ("Refreshes", _refreshes),
    ("Seconds in all", _seconds),
    ("Solver", _solvers),
)
