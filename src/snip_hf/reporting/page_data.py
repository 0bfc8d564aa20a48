"""The numbers behind the page of runs, as JSON data: curves, plans and divergences over steps, a table of the runs.

A page stays small: a plan takes one letter per GEMM, a divergence two, and of more than can be seen some are left out.
"""

from __future__ import annotations

import math
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..config import FORWARD, read_shares
from ..estimation.pending import LAYER
from ..numerics.formats import FORMATS
from ..numerics.gemms import GEMMS
from ..planning.plan import PrecisionPlan
from ..records.events import Refresh
from ..records.load import Run, thinned
from ..text import printable
from .facts import has_target
from .interventions import alarms_told, retargets_told
from .series import MOST_ROWS, curve, divergence_panels, edges, shown_layers

# Of all runs of a page together: letters of plans, divergences, points of a curve.
_MOST_LETTERS, _MOST_DIVERGENCES, _MOST_POINTS = 600_000, 400_000, 4000
LETTERS = string.ascii_uppercase + string.ascii_lowercase + string.digits + "-_"
"""A letter for each format, and the digits that divergences are written in."""
NONE = "."
"""A GEMM that a layer does not have, and a divergence that was not measured."""
# Steps of the scale of divergences, the highest of which two letters hold.
_LEVELS = len(LETTERS) ** 2 - 1
# Stages that have a curve.
_MOST_STAGES = 16
# Characters of a name and of a sentence, and sentences about one run.
_NAME, _SENTENCE, _MOST_TOLD = 200, 400, 40

Losses = Mapping[int, Mapping[str, float]]
Points = Sequence[tuple[float, float | None]]


@dataclass(frozen=True)
class Shown:
    """A run as the page shows it."""

    data: dict[str, Any]
    notes: list[str]
    """What was left out of it, one sentence each."""


def page_data(runs: Mapping[str, Run], bf16: tuple[str, Losses] | None) -> dict[str, Any]:
    """Returns what the page draws.

    Args:
        runs: name -> run.
        bf16: name and losses of a run in BF16 to compare with.
    """
    data = [shown_run(run, len(runs)) for run in runs.values()]
    used = {name for run in runs.values() for name in _formats(run)}
    formats = [{"name": name, "label": FORMATS[name].label, "colour": FORMATS[name].colour} for name in FORMATS]
    return {
        "letters": LETTERS,
        "formats": {entry["name"]: entry for entry in formats if entry["name"] in used},
        "charts": [chart for chart in (_loss_chart(runs, bf16), _share_chart(runs)) if chart["series"]],
        "runs": [
            {"name": printable(name, _NAME)} | shown.data | {"notes": [*_told(run), *shown.notes]}
            for (name, run), shown in zip(runs.items(), data, strict=True)
        ],
    }


def _told(run: Run) -> list[str]:
    """Returns what the guard did, and other targets, in sentences, the last ones of many."""
    told = [*alarms_told(run.alarms), *retargets_told(run.retargets)]
    return [printable(sentence, _SENTENCE) for sentence in told[-_MOST_TOLD:]]


def _loss_chart(runs: Mapping[str, Run], bf16: tuple[str, Losses] | None) -> dict[str, Any]:
    losses: dict[str, Losses] = {name: run.losses for name, run in runs.items()}
    if bf16 is not None:
        losses[bf16[0]] = bf16[1]
    most = _MOST_POINTS // len(losses)
    series = [
        _series(f"{name}, {label}", colour, curve(rows, key, most), faint=key == "loss")
        for colour, (name, rows) in enumerate(losses.items())
        for key, label in (("loss", "training"), ("eval_loss", "validation"))
    ]
    return {
        "title": "Loss",
        "unit": "loss",
        "series": [one for one in series if one["x"]],
        "marks": [
            mark
            for colour, (name, run) in enumerate(runs.items())
            for mark in _marks(run, "" if len(runs) == 1 else f"{name}: ", colour)
        ],
    }


def _marks(run: Run, prefix: str, colour: int) -> list[dict[str, Any]]:
    """Returns the steps of a run's refreshes, which put a plan in force or kept it, and of the guard's alarms."""
    applied = [refresh.applied_step for refresh in run.refreshes if refresh.applied_step is not None]
    kept = [refresh.decided_step for refresh in run.refreshes if refresh.applied_step is None]
    alarms = [alarm.step for alarm in run.alarms]
    return [
        {
            "name": printable(prefix + label, _NAME),
            "colour": colour,
            "kept": steps is not applied,
            "steps": thinned(steps, _MOST_POINTS // 4),
        }
        for label, steps in (("new plan in force", applied), ("plan kept", kept), ("alarm of the guard", alarms))
        if steps
    ]


def _share_chart(runs: Mapping[str, Run]) -> dict[str, Any]:
    series = []
    for colour, (name, run) in enumerate(runs.items()):
        shares = [(step, 100 * share) for step, share in run.fp4_fractions]
        series.append(_series(name, colour, _until(shares, run.last_step), step=True))
        if target := _targets(run):
            series.append(_series(f"{name}, target", colour, _until(target, run.last_step), step=True, dashed=True))
    forward = any(run.config.get("decides") == FORWARD for run in runs.values())
    of = "of what plans decide on (forward GEMMs alone, where they decide on these)" if forward else "of linear FLOPs"
    return {"title": "FP4 share over time", "unit": f"% {of}", "series": series, "marks": []}


def _targets(run: Run) -> list[tuple[int, float]]:
    """Returns (step, share) that plans of a run were to reach, of their FLOPs."""
    config = run.config
    if not has_target(config) or config.get("budget") == "measured" or config.get("target_linear_speedup") is not None:
        return []
    share = config.get("target_fp4_fraction")
    if isinstance(share, float | int) and not isinstance(share, bool):
        return [(run.plans[0][0], 100.0 * share)]
    return [(step, 100.0 * one) for step, one in read_shares(share) or ()]


def _until(points: list[tuple[int, float]], last_step: int) -> list[tuple[int, float]]:
    """Returns the points with one more where the last value ends."""
    last, value = points[-1]
    return [*points, (last_step, value)] if last_step > last else points


def _series(
    name: str, colour: int, points: Points, *, faint: bool = False, step: bool = False, dashed: bool = False
) -> dict[str, Any]:
    shown = thinned(points, _MOST_POINTS)
    return {
        "name": printable(name, _NAME),
        "colour": colour,
        "x": [x for x, _ in shown],
        "y": [_rounded(y) for _, y in shown],
        "faint": faint,
        "step": step,
        "dashed": dashed,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def shown_run(run: Run, count: int = 1) -> Shown:
    """Returns the data of one of `count` runs of a page."""
    notes: list[str] = []
    layers = shown_layers(run, MOST_ROWS // count)
    _note(notes, "layers", len(layers), len(run.plans[0][1].assignment))
    return Shown(
        {
            "layers": [printable(layer, _NAME) for layer in layers],
            "last": int(max(run.last_step, run.plans[-1][0] + 1)),
            "plan": _plan(run, layers, _MOST_LETTERS // count, notes),
            "divergence": _divergence(run, layers, _MOST_DIVERGENCES // count, notes),
            "charts": [chart for chart in _own_charts(run) if chart["series"]],
        },
        notes,
    )


def _plan(run: Run, layers: Sequence[str], most: int, notes: list[str]) -> dict[str, Any]:
    """Returns a text for each plan: a letter for each GEMM of each layer."""
    plans = thinned(run.plans, max(2, most // (len(layers) * len(GEMMS))))
    _note(notes, "plans", len(plans), len(run.plans))
    formats = _formats(run)
    if len(formats) > len(LETTERS):
        raise ValueError(f"The run has {len(formats)} formats, expected at most {len(LETTERS)}.")
    letters = dict(zip(formats, LETTERS, strict=False))
    # A history may go back; time does not.
    steps = np.maximum.accumulate([step for step, _ in plans])
    return {
        "formats": formats,
        "gemms": list(GEMMS),
        "mixed": any(len(set(row.values())) > 1 for _, plan in plans for row in plan.assignment.values()),
        "steps": [int(step) for step in steps],
        "codes": [_codes(plan, layers, letters) for _, plan in plans],
    }


def _formats(run: Run) -> list[str]:
    """Returns what any plan of the run names, the least precise first."""
    used = {name for _, plan in run.plans for row in plan.assignment.values() for name in row.values()}
    return sorted(used, key=lambda name: (FORMATS[name].bits, name))


def _codes(plan: PrecisionPlan, layers: Iterable[str], letters: Mapping[str, str]) -> str:
    rows = [plan.assignment[layer] for layer in layers]
    return "".join(letters[row[gemm]] if gemm in row else NONE for row in rows for gemm in GEMMS)


def _divergence(run: Run, layers: Sequence[str], most: int, notes: list[str]) -> dict[str, Any] | None:
    """Returns a text for each probe and panel: two letters for each layer, on a logarithmic scale."""
    steps = thinned(list(run.divergences), max(2, most // (6 * len(layers))))  # six panels at most
    panels = divergence_panels(run, layers, steps)
    if not panels:
        return None
    _note(notes, "probes", len(steps), len(run.divergences))
    return {
        "format": FORMATS[run.formats[0]].label,
        "steps": steps,
        "last": int(edges(steps, run.last_step)[-1]),
        "panels": [
            {"name": f"{quantity}, {'whole layer' if gemm == LAYER else gemm}"} | encoded(values)
            for (quantity, gemm), values in panels.items()
        ],
    }


def encoded(values: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Returns a panel of positive numbers as texts, one per column, with the ends of their scale."""
    logs = np.log(values)
    low, high = float(np.nanmin(logs)), float(np.nanmax(logs))
    levels = np.nan_to_num(np.round((logs - low) / max(high - low, 1e-9) * _LEVELS), nan=-1).astype(int)
    pairs = [first + second for first in LETTERS for second in LETTERS] + [2 * NONE]
    return {
        "low": math.exp(low),
        "high": math.exp(high),
        "codes": ["".join(pairs[level] for level in column) for column in levels.T],
    }


def _own_charts(run: Run) -> list[dict[str, Any]]:
    """Returns the curves of one run's refreshes: what they took, what the solver found."""
    refreshes = run.refreshes

    def of(name: str, colour: int, points: Iterable[tuple[int, float | None]]) -> list[dict[str, Any]]:
        found = [(step, value) for step, value in points if value is not None]
        return [_series(name, colour, found)] if found else []

    seconds = [
        one
        for colour, part in enumerate(("probe", "solver", "waited"))
        for one in of(part, colour, ((refresh.step, refresh.seconds.get(part)) for refresh in refreshes))
    ]
    stages = [
        one
        for stage in range(min(len(run.plans[0][1].stages), _MOST_STAGES))
        for one in of(f"stage {stage}", stage, ((refresh.step, _stage_share(refresh, stage)) for refresh in refreshes))
    ]
    charts = (
        ("FP4 share of each stage", "%", stages if len(stages) > 1 else []),
        ("Seconds of each refresh", "s", seconds),
        ("Objective of the solver", "", of("objective", 0, ((one.step, one.objective) for one in refreshes))),
        ("Gap to the solver's bound", "", of("gap", 0, ((one.step, one.gap) for one in refreshes))),
        ("Layers changed", "layers", of("changed", 0, ((one.step, float(one.layers_changed)) for one in refreshes))),
        ("Speed of the linears", "times BF16", of("linears", 0, ((x.step, x.linear_speedup) for x in refreshes))),
    )
    return [{"title": title, "unit": unit, "series": series, "marks": []} for title, unit, series in charts]


def _stage_share(refresh: Refresh, stage: int) -> float | None:
    shares = refresh.stage_forward_fp4_fractions or refresh.stage_fp4_fractions
    share = shares[stage] if stage < len(shares) else None
    return None if share is None else 100 * share


def _note(notes: list[str], what: str, kept: int, count: int) -> None:
    if kept < count:
        notes.append(f"The page shows {kept:,} of {count:,} {what}.")
