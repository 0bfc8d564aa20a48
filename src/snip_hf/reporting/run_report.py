"""What happened in a run, as tables: which plan was in force when, what each refresh cost, how the losses went."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..config import SnipConfig
from ..estimation.layer_sums import LAYER
from ..estimation.table import Divergence, DivergenceTable
from ..numerics.formats import FORMATS
from ..planning.plan import Assignment, PrecisionPlan
from ..planning.program import problem
from ..policies.setting import Setting, split_layer
from ..records.load import Run, load_run
from ..records.run_folder import FOLDER
from .figures import write_figures
from .tables import new_table, number, plan_table, print_cost, print_stages

T = TypeVar("T")

_MOST_ROWS = 20
_MOST_REASONS = 64


def run_report(
    run_dir: str | os.PathLike[str], out_dir: str | os.PathLike[str] | None = None, micro_batches: int | None = None
) -> list[Path]:
    """Prints the tables and writes the figures; returns the files written.

    Raises as `load_run` and `stages.pipeline_times` do, whose `micro_batches` it takes.
    """
    run = load_run(run_dir)
    _print_run(run, Console(), micro_batches)
    return write_figures(run, out_dir)


def print_report(run_dir: str | os.PathLike[str], console: Console | None = None) -> None:
    """Prints the refreshes, the losses and the plan in force at the end. Raises as `load_run` does."""
    _print_run(load_run(run_dir), console or Console())


def _print_run(run: Run, console: Console, micro_batches: int | None = None) -> None:
    config = run.config
    policy = f"plan file {config['plan']}, held fixed" if config.get("plan") else f"policy {config.get('policy')}"
    plan = _in_force(run)
    by_time = config.get("cost") == "measured"
    target = f"{config.get('target_fp4_fraction')}{' of the measured time' * by_time}"
    time = "" if plan.measured is None else f" and {plan.fp4_time_fraction:.4f} of their measured time"
    console.print(
        f"{policy[0].upper()}{policy[1:]}, granularity {config.get('granularity')}, target FP4 share {target}, "
        f"attained {plan.fp4_fraction:.4f} of the linear FLOPs (not a reduction of FLOPs){time}. Model: "
        f"{plan.provenance.model_name or 'not named'}.",
        markup=False,
        highlight=False,
    )
    if run.refreshes:
        console.print(refresh_table(run))
    else:
        console.print(
            f"No refresh was recorded ({policy}, first refresh due at step "
            f"{config.get('first_refresh')} if it probes): the plan of the start is in force.",
            markup=False,
            highlight=False,
        )
    for refresh in run.refreshes:
        if refresh.applied_step is None:
            console.print(f"Step {refresh.step}: plan kept. {refresh.reason}", markup=False, highlight=False)
    if run.checks:
        console.print(drift_table(run))
        early = ", ".join(str(check.step) for check in run.checks if check.refresh) or "none"
        console.print(f"Early refreshes, because the ranking had moved, at steps: {early}.", highlight=False)
    for check in run.checks:
        if check.reason is not None:
            console.print(f"Step {check.step}: check failed. {check.reason}", markup=False, highlight=False)
    if run.losses:
        console.print(loss_table(run))
    console.print(plan_table(plan))
    _print_run_stages(run, plan, console, micro_batches)
    if plan.measured is not None:
        print_cost(plan, console)
    elif by_time:
        console.print("The times of the GEMMs are not in plan.json (nothing was decided by them yet, or it is lost).")
    reasons = reason_table(run)
    if reasons is not None:
        console.print(reasons)
    for note in run.notes:
        console.print(f"Note: {note}", markup=False, highlight=False)


def _in_force(run: Run) -> PrecisionPlan:
    """Returns the plan of the end, with the measured times of plan.json: the history does not hold them."""
    plan = run.plans[-1][1]
    try:
        saved = PrecisionPlan.load(run.folder / FOLDER / "plan.json")
        return dataclasses.replace(plan, measured=saved.measured)
    except (OSError, ValueError):  # there is no such file of this plan; the run's notes say so
        return plan


def _print_run_stages(run: Run, plan: PrecisionPlan, console: Console, micro_batches: int | None) -> None:
    decided = _last_decided(run)
    if decided is None:
        print_stages(plan, console, micro_batches)
    else:
        step, before = decided
        print_stages(plan, console, micro_batches, run.divergences.get(step), before)


def refresh_table(run: Run) -> Table:
    table = new_table("Refreshes")
    for heading in ("probe\nstep", "applied\nafter", "FP4\nshare", "layers\nchanged", "objective", "gap"):
        table.add_column(heading, justify="right")
    for part in ("probe", "solver", "waited"):
        table.add_column(f"{part}\n[s]".replace("[", "\\["), justify="right")
    for refresh in run.refreshes:
        table.add_row(
            str(refresh.step),
            "kept" if refresh.applied_step is None else str(refresh.applied_step),
            number(refresh.fp4_fraction, ".4f"),
            str(refresh.layers_changed),
            number(refresh.objective, ".4g"),
            number(refresh.gap, ".1e"),
            *(number(refresh.seconds.get(part), ".2f") for part in ("probe", "solver", "waited")),
        )
    return table


def drift_table(run: Run) -> Table:
    """Rank correlations of the checks with the refresh before them, at no more than `_MOST_ROWS` checks."""
    table = new_table("Checks of the ranking")
    for heading in ("step", "rank\ncorrelation", "refresh"):
        table.add_column(heading, justify="right")
    for check in _thinned(run.checks):
        table.add_row(str(check.step), number(check.correlation, ".3f"), "early" if check.refresh else "-")
    return table


def loss_table(run: Run) -> Table:
    """Validation losses (or, without any, training losses) at no more than `_MOST_ROWS` steps."""
    table = new_table("Losses")
    for heading in ("step", "training", "validation"):
        table.add_column(heading, justify="right")
    steps = [step for step, row in run.losses.items() if "eval_loss" in row] or list(run.losses)
    for step in _thinned(steps):
        training = [row["loss"] for logged, row in run.losses.items() if logged <= step and "loss" in row]
        validation = run.losses[step].get("eval_loss")
        table.add_row(str(step), number(training[-1] if training else None, ".4f"), number(validation, ".4f"))
    return table


def reason_table(run: Run) -> Table | None:
    """Why the last applied plan is as it is: what FP4 would cost each group of the program per share of FLOPs or time.

    Within a stage FP4 goes to the groups with the lowest price, as far as whole groups fit the target. None if the run
    has no table of divergences for its last applied refresh, or lacks the times that it was decided by.
    """
    decided = _last_decided(run)
    if decided is None or decided[0] not in run.divergences:
        return None
    (step, before), plan = decided, _in_force(run)
    if plan.measured is None and run.config.get("cost") == "measured":
        return None
    setting = Setting(SnipConfig.from_dict(run.config), plan.flops, plan.stages, plan.measured)
    rows = tuple(Divergence(**record) for record in run.divergences[step])
    divergences = {(row.layer, row.gemm): row for row in rows if row.format == run.formats[0]}
    program = problem(setting, DivergenceTable(0.0, rows), before)
    stage_of = {group: row["name"] for row in program["constraints"] for group in row["groups"]}
    prices = {}
    for group in program["groups"]:
        high, *_, low = group["options"]  # the most precise first
        prices[group["name"]] = (low["cost"] - high["cost"]) / low["weight"] if low["weight"] > 0 else 0.0
    weight = "FLOPs" if plan.measured is None else "measured time"
    table = new_table(f"Why (probe of step {step}; price: extra cost of FP4 per share of the stage's {weight})")
    for heading in ("stage", "layer", "loss\ndivergence", "weight\ndivergence", "price", "format"):
        table.add_column(heading, justify="left" if heading == "layer" else "right")
    order = sorted(prices, key=lambda group: (stage_of[group], prices[group]))
    for index, group in enumerate(order):
        if _MOST_REASONS // 2 <= index < len(order) - _MOST_REASONS // 2:
            continue  # of a large model the cheapest and the dearest
        layer, gemm = setting.members(group)[0]
        row = divergences[layer, gemm if setting.config.granularity == "gemm" else LAYER]
        numbers = (f"{row.loss_divergence:.1e}", f"{row.weight_divergence:.1e}", f"{prices[group]:.3f}")
        formats = Text(plan.assignment[layer][gemm], style=FORMATS[plan.assignment[layer][gemm]].style)
        table.add_row(stage_of[group].removeprefix("stage "), Text(_short_name(group)), *numbers, formats)
    return table


def _last_decided(run: Run) -> tuple[int, Assignment] | None:
    """Returns the probe step of the last applied refresh, and the assignment that it replaced."""
    applied = [refresh for refresh in run.refreshes if refresh.applied_step is not None]
    return (applied[-1].step, run.plans[-2][1].assignment) if applied else None


def _short_name(group: str) -> str:
    """ "model.layers.3.mlp.up_proj:forward" -> "3 up_proj:forward"."""
    block, kind = split_layer(group)
    return f"{block.rpartition('.')[2]} {kind.rpartition('.')[2]}"


def _thinned(items: Sequence[T]) -> list[T]:
    """Returns no more than `_MOST_ROWS` of the items, evenly spaced, the first and the last among them."""
    return [
        items[i] for i in np.unique(np.linspace(0, len(items) - 1, min(len(items), _MOST_ROWS)).round().astype(int))
    ]
