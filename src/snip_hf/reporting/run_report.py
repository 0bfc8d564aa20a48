"""Prints the report on a run: refreshes, losses, the last plan, and the reasons for it."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..config import FORWARD, POLICIES, SnipConfig, mean_share, read_shares, shares_text
from ..estimation.table import LAYER
from ..json_io import short
from ..layers.labels import LayerLabels
from ..numerics.formats import FORMATS
from ..planning.program import problem
from ..planning.solver.ilp import solve
from ..policies.registry import criterion_cost
from ..policies.setting import Setting
from ..policies.target import describe_target, least_sum
from ..records.events import RAISED, Alarm, Retarget
from ..records.load import Run, load_recorded, thinned
from .figures import write_figures
from .tables import name_text, new_table, number, plan_table, print_cost, print_stages, say

_MOST_ROWS = 20
_MOST_REFRESHES = 200
_MOST_REASONS = 64
_SHARES = (0.25, 0.5, 0.666, 0.75, 0.9)

Content = Table | Text
"""A table, or a sentence."""


def run_report(
    run_dir: str | os.PathLike[str], out_dir: str | os.PathLike[str] | None = None, micro_batches: int | None = None
) -> list[Path]:
    """Prints the tables of a run and writes its figures; returns the files written.

    Args:
        run_dir: output folder of a run, or folder of a checkpoint.
        out_dir: folder for the figures. None: RUN_DIR/snip.
        micro_batches: micro-batches per step, for the predicted times of a pipeline.

    Raises the errors of `load_recorded`.
    """
    run = load_recorded(run_dir)
    print_run(run, Console(), micro_batches)
    return write_figures(run, out_dir)


def run_contents(run: Run) -> list[Content]:
    """Returns the tables and sentences of `print_run`, for a page."""
    console = _CollectingConsole()
    print_run(run, console)
    return console.contents


class _CollectingConsole(Console):
    """A console that collects tables and sentences instead of printing them."""

    def __init__(self) -> None:
        super().__init__(file=io.StringIO())
        self.contents: list[Content] = []

    def print(self, *objects: Any, **options: Any) -> None:
        self.contents.extend(objects)


def print_run(run: Run, console: Console, micro_batches: int | None = None) -> None:
    """Prints the refreshes, the losses and the last plan."""
    config = run.last_config
    policy, plan = policy_text(config), run.plans[-1][1]
    by_time = config.get("budget") == "measured"
    target = describe_target(config)
    granularity = "" if config.get("fixed_plan") else f"granularity {config.get('granularity')}, "
    say(
        console,
        f"{policy[0].upper()}{policy[1:]}, {granularity}"
        f"{'no target' if target is None else f'target {target}'}, attained {plan.describe()}. Model: "
        f"{plan.provenance.model_name or 'not named'}.",
    )
    if target is not None and isinstance(config.get("target_fp4_fraction"), list):
        _say_some(console, mean_shares_text(run))
    if run.counted:
        coverage = run.counted[-1].coverage
        share = coverage.share * plan.fp4_fraction
        say(console, f"The plan decides on {coverage.describe()}. FP4 share of all of them: {share:.4f}.")
    if run.refreshes:
        console.print(refresh_table(run))
    elif config.get("fixed_plan"):
        say(console, "The plan is fixed, so there are no refreshes.")
    elif makes_plans_without_probe(config):
        say(console, "The policy does not probe, so there are no refreshes.")
    elif run.pending is None and plan.provenance.solver is None:  # a checkpoint alone has the plan of a refresh
        say(
            console,
            f"No refresh was recorded ({policy}, first refresh due at step "
            f"{config.get('first_refresh') or '100 or earlier'}): the initial plan is in force.",
        )
    if run.pending is not None:
        say(console, f"Step {run.pending[0]} was probed; its plan is due after step {run.pending[1]}.")
    kept = [refresh for refresh in run.refreshes if refresh.applied_step is None]
    _say_some(console, [f"Step {refresh.step}: plan kept. {refresh.reason}" for refresh in kept])
    _say_some(console, [alarm_sentence(alarm) for alarm in run.alarms])
    _say_some(console, [retarget_sentence(event) for event in run.retargets])
    if run.losses:
        console.print(loss_table(run))
    console.print(plan_table(plan))
    print_stages(plan, console, micro_batches)
    if plan.measured is not None:
        print_cost(plan, console)
    elif by_time:
        say(console, "plan.json has no times of GEMMs: no plan was decided by them yet, or the file is lost.")
    notes = list(run.notes)
    try:
        reasons, shares = reason_table(run), other_shares(run)
    except (ValueError, TypeError) as error:  # a config of another version, or an invalid one
        notes.append(f"The table of reasons is missing: {error}")
    else:
        if reasons is not None:
            console.print(reasons)
        _say_some(console, shares)
    _say_some(console, [f"Note: {note}" for note in notes])


def _say_some(console: Console, sentences: list[str]) -> None:
    for sentence in sentences[:_MOST_ROWS]:
        say(console, sentence)
    if len(sentences) > _MOST_ROWS:
        say(console, f"... and {len(sentences) - _MOST_ROWS:,} more.")


def policy_text(config: Mapping[str, Any]) -> str:
    """Names the policy or the fixed plan that decided."""
    if config.get("fixed_plan"):
        return f"fixed plan {config['fixed_plan']}"
    return f"policy {config.get('policy')}"


def makes_plans_without_probe(config: Mapping[str, Any]) -> bool:
    """Returns True for a known policy that does not probe."""
    policy = POLICIES.get(config.get("policy", ""))
    return policy is not None and not policy.needs_probe


def mean_shares_text(run: Run) -> list[str]:
    """Returns a sentence on the mean share of a run with a changing target; [] if its steps are unknown, or a resume
    replaced the target."""
    mean, shares = run.mean_fp4_fraction, read_shares(run.config.get("target_fp4_fraction"))
    if mean is None or shares is None or run.retargets:
        return []
    steps = run.last_step
    of = "forward" if run.config.get("decides") == FORWARD else "linear"
    target = mean_share(shares, steps)
    return [
        f"Mean up to step {steps:,}, the last in the files of the run: {mean:.4f} of the {of} FLOPs in FP4, with a "
        f"target of {target:.4f}."
    ]


def alarm_sentence(alarm: Alarm) -> str:
    """Describes an alarm and its consequences."""
    raised = f"; raised the formats of {len(alarm.changes)} GEMMs" if alarm.action == RAISED else ""
    left_out = ", and skipped the step" if alarm.left_out else ""
    return f"Step {alarm.step}: guard. {alarm.reason}{raised}{left_out}."


def retarget_sentence(event: Retarget) -> str:
    """Describes a resume with another target."""
    changes = (f"{name} was {_value(old)} and is {_value(new)}" for name, (old, new) in event.fields.items())
    return f"Step {event.step}: resumed with another target. {'; '.join(changes)}."


def _value(value: object) -> str:
    shares = read_shares(value)
    return short(value) if shares is None else shares_text(shares)


def refresh_table(run: Run) -> Table:
    title, step = ("New plans", "step") if makes_plans_without_probe(run.config) else ("Refreshes", "probe\nstep")
    table = new_table(title)
    has_forward = any(refresh.forward_fp4_fraction is not None for refresh in run.refreshes)
    # Only the share that plans aim at, because two would not fit into 80 characters.
    share = "FP4 of\nforward" if has_forward else "FP4\nshare"
    for heading in (step, "applied\nafter", share, "layers\nchanged", "objective", "gap"):
        table.add_column(heading, justify="right")
    for part in ("probe", "solver", "waited"):
        table.add_column(Text(f"{part}\n[s]"), justify="right")
    for refresh in thinned(run.refreshes, _MOST_REFRESHES):
        table.add_row(
            str(refresh.step),
            "kept" if refresh.applied_step is None else str(refresh.applied_step),
            number(refresh.forward_fp4_fraction if has_forward else refresh.fp4_fraction, ".4f"),
            str(refresh.layers_changed),
            number(refresh.objective, ".4g"),
            number(refresh.gap, ".1e"),
            *(number(refresh.seconds.get(part), ".2f") for part in ("probe", "solver", "waited")),
        )
    if len(run.refreshes) > _MOST_REFRESHES:
        table.caption = f"{_MOST_REFRESHES} of {len(run.refreshes):,} rows."
    return table


def loss_table(run: Run) -> Table:
    """Returns a table of the losses at up to `_MOST_ROWS` steps: those with a validation loss, if there are any."""
    table = new_table("Losses")
    for heading in ("step", "training", "validation"):
        table.add_column(heading, justify="right")
    steps = [step for step, row in run.losses.items() if "eval_loss" in row] or list(run.losses)
    shown, training = set(thinned(steps, _MOST_ROWS)), None
    for step, row in run.losses.items():
        training = row.get("loss", training)
        if step in shown:
            table.add_row(str(step), number(training, ".4f"), number(row.get("eval_loss"), ".4f"))
    return table


def _price(tie: list[list[dict[str, Any]]]) -> float:
    """Returns the price of tied groups, given the options of each, the most precise first."""
    gain = sum(options[-1]["weight"] - options[0]["weight"] for options in tie)
    cost = sum(options[-1]["cost"] - options[0]["cost"] for options in tie)
    return float(cost / gain) if gain > 0 else 0.0


def _last_decision(run: Run) -> tuple[int, Setting, dict[str, Any]] | None:
    """Returns probe step, input and integer program of the last applied refresh; None if there is none, or its table of
    divergences or the times behind it are missing."""
    step = max((refresh.step for refresh in run.refreshes if refresh.applied_step is not None), default=None)
    if step is None or step not in run.divergences:
        return None
    plan = run.plans[-1][1]
    if plan.measured is None and run.config.get("budget") == "measured":
        return None
    config, table = SnipConfig.from_dict(run.config_at(step)), run.divergences[step]
    setting = Setting(config, plan.flops, plan.stages, plan.measured, plan.tokens, table.ties).at_step(step)
    return step, setting, problem(setting, table)


def other_shares(run: Run) -> list[str]:
    """Returns a sentence on what other shares would cost by the last estimates: the objective of the best plan, less
    that at 0%, in percent of the same at 100% (ours). [] without a `_last_decision` or under another kind of target.

    Raises:
        ValueError, TypeError: the run's config is not a valid `SnipConfig`.
    """
    if (decision := _last_decision(run)) is None or decision[1].config.target_linear_speedup is not None:
        return []
    step, setting, program = decision
    found, own = {}, least_sum(setting)
    for share in sorted({0.0, *(share for share in _SHARES if abs(share - own) > 0.005), own, 1.0}):
        constraints = [{**stage, "minimum": share} for stage in program["constraints"]]
        found[share] = solve({**program, "constraints": constraints, "solver": "greedy"})["objective"]
    least, whole = found.pop(0.0), found.pop(1.0)
    if whole is None or whole <= least:  # no format has 4 bits, or nothing costs anything
        return []
    costs = ", ".join(f"{100 * (cost - least) / (whole - least):.1f} at {share:.1%}" for share, cost in found.items())
    return [
        f"Estimated cost of other targets, in percent of the cost at 100% (probe of step {step}): {costs} "
        "(docs/choosing.md)."
    ]


def reason_table(run: Run) -> Table | None:
    """Returns a table with the price of the least precise format for each group, per share of FLOPs or time.

    The price is the extra cost over the most precise format. With two formats, the groups of a stage with the lowest
    prices get the least precise format, as far as whole groups fit the target. Returns None without a `_last_decision`.

    Raises:
        ValueError, TypeError: the run's config is not a valid `SnipConfig`.
    """
    if (decision := _last_decision(run)) is None:
        return None
    step, setting, program = decision
    plan, config = run.plans[-1][1], setting.config
    divergences = {(row.layer, row.gemm): row for row in run.divergences[step].rows if row.format == run.formats[0]}
    stage_of = {group: row["name"] for row in program["constraints"] for group in row["groups"]}
    options, work = {group["name"]: group["options"] for group in program["groups"]}, setting.executed
    running = [group for group in options if any(work[layer][gemm] > 0 for layer, gemm in setting.members(group))]
    tie_of = {group: tie for tie in program["ties"] for group in tie}
    first_of = {group: next(one for one in tie_of.get(group, [group]) if one in running) for group in running}
    ties = {first: [group for group in running if first_of[group] == first] for first in first_of.values()}
    prices = {first: _price([options[group] for group in tie]) for first, tie in ties.items()}
    weight = "FLOPs" if plan.measured is None else "measured time"
    if config.target_linear_speedup is not None:
        weight = "time in BF16 that it saves"
    if config.decides == FORWARD:
        weight = f"forward {weight}"
    label = FORMATS[config.least_precise].label
    table = new_table(f"Why (probe of step {step}; price: extra cost of {label} per share of the stage's {weight})")
    by_criterion = POLICIES[config.policy].cost is criterion_cost
    figures = ["criterion"] if by_criterion else ["loss_divergence", "weight_divergence"]
    for heading in ("stage", "layer", *(figure.replace("_", "\n") for figure in figures), "price", "format"):
        table.add_column(heading, justify="left" if heading == "layer" else "right")
    labels = LayerLabels(plan.assignment)
    order = sorted(prices, key=lambda group: (stage_of[group], prices[group]))
    shown = thinned(order, _MOST_REASONS)
    for group in shown:
        layer, gemm = setting.members(group)[0]
        tied = [setting.members(member)[0] for member in ties[group]]
        keys = [(name, kind if setting.config.granularity == "gemm" else LAYER) for name, kind in tied]
        # None for layers without tokens in the probe, such as an idle expert.
        rows = [divergences[key] for key in keys if key in divergences]
        damages = [sum(getattr(row, figure) or 0.0 for row in rows) for figure in figures]
        numbers = (number(value if rows else None, ".1e") for value in damages)
        formats = Text(plan.assignment[layer][gemm], style=FORMATS[plan.assignment[layer][gemm]].style)
        name = labels.layer(layer) + group.removeprefix(layer)  # includes the GEMM at granularity "gemm"
        if len(tied) > 1:
            name = f"{name} x {len(tied)}"
        stage, price = stage_of[group].removeprefix("stage "), number(prices[group] if rows else None, ".3f")
        table.add_row(stage, name_text(name), *numbers, price, formats)
    captions = []
    if len(shown) < len(order):
        captions.append(f"{len(shown):,} of {len(order):,} rows, evenly spaced in the order of stages and prices.")
    if any(len(tie) > 1 for tie in ties.values()):
        captions.append("x N: N tied rows, named after the first, that share a format; estimates are their sums.")
    if idle := len(options) - len(running):
        captions.append(f"{idle:,} rows are left out: layers that saw no token, and GEMMs that do not run.")
    table.caption = " ".join(captions) or None
    return table
