"""Prints the differences between runs or plans as tables: shares, settings, formats of layers, losses."""

from __future__ import annotations

import math
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..layers.labels import LayerLabels
from ..planning.plan import PrecisionPlan
from ..records.load import STATE_NAME, Run, load_recorded, read_log, thinned
from ..records.run_folder import FOLDER
from ..text import printable
from .tables import listed, name_text, new_table, number, say

MOST_COMPARED = len(string.ascii_uppercase)
_MOST_ROWS = 12
_MOST_LAYERS = 20
# Maximum length of a field's value.
_VALUE = 200
# Kind of loss in the files of a run -> its name in tables.
_KINDS = {"eval_loss": "validation", "loss": "training"}


@dataclass(frozen=True)
class Compared:
    """A run or a plan to compare. A run without SNIP, such as a baseline, has only losses."""

    letter: str
    name: str
    """The path or repository that the user gave."""
    plan: PrecisionPlan | None
    """The plan; the last one of a run."""
    run: Run | None
    losses: Mapping[int, Mapping[str, float]]
    """Step -> {"loss", "eval_loss"}."""

    @property
    def config(self) -> Mapping[str, Any]:
        if self.run is not None:
            return self.run.last_config
        return {} if self.plan is None else self.plan.provenance.config or {}

    def losses_of(self, kind: str) -> dict[int, float]:
        """Returns step -> finite loss of a kind."""
        found = {step: row[kind] for step, row in self.losses.items() if kind in row}
        return {step: loss for step, loss in found.items() if math.isfinite(loss)}


def read_compared(sources: Sequence[tuple[str, Path]]) -> list[Compared]:
    """Reads runs (output folders or checkpoints) and plans (files), given as (displayed name, path).

    Raises the errors of `load_recorded` and `PrecisionPlan.load`, and:
        ValueError: there are fewer than two sources, or more than letters.
    """
    if not 2 <= len(sources) <= MOST_COMPARED:
        raise ValueError(f"Got {len(sources)} to compare, expected 2 to {MOST_COMPARED} runs or plans.")
    return [_read(letter, *source) for letter, source in zip(string.ascii_uppercase, sources, strict=False)]


def _read(letter: str, name: str, path: Path) -> Compared:
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; expected a run's folder or a plan, e.g. OUTPUT_DIR.")
    if not path.is_dir():
        return Compared(letter, name, PrecisionPlan.load(path), None, {})
    if not (path / FOLDER / "history.jsonl").exists() and not (path / STATE_NAME).exists():
        losses, _ = read_log(path, [])
        if losses:
            return Compared(letter, name, None, None, losses)
    run = load_recorded(path)
    return Compared(letter, name, run.plans[-1][1], run, run.losses)


def print_differences(compared: Sequence[Compared], console: Console) -> None:
    """Prints shares, settings that differ, changes between plans, and losses."""
    for one in compared:
        say(console, f"{one.letter}: {one.name}{_origin(one)}")
    console.print(share_table(compared))
    settings = settings_table(compared)
    if settings is not None:
        console.print(settings)
    planned = [one for one in compared if one.plan is not None]
    for other in planned[1:]:
        _print_changes(planned[0], other, console)
    for one in compared:
        if one.run is not None and one.run.alarms:
            say(
                console,
                f"{one.letter}: alarms of the guard: {len(one.run.alarms)}, the last at step "
                f"{one.run.alarms[-1].step} (`snip-hf report`). The Trainer's log has 0 for non-finite losses.",
            )
    _print_losses(compared, console)


def _origin(one: Compared) -> str:
    if one.plan is None:
        return " (a run without snip-hf, which has only losses)"
    model = one.plan.provenance.model_name
    return "" if model is None else f" (model {model})"


def share_table(compared: Sequence[Compared]) -> Table:
    """Returns a table with one row per run or plan: policy, FP4 shares, numbers of new plans."""
    table = new_table("FP4 shares (of the linear FLOPs; mean: up to the last step that the run logged)")
    for heading in ("", "policy", "step", "share", "mean", "smallest\nof a stage", "speed", "new\nplans", "kept"):
        table.add_column(heading, justify="left" if heading in ("", "policy") else "right")
    for one in compared:
        plan, run = one.plan, one.run
        if plan is None:
            table.add_row(one.letter, "-", str(max(one.losses)), *["-"] * 6)
            continue
        policy = "fixed plan" if one.config.get("fixed_plan") else plan.provenance.policy
        known = plan.is_share_known
        applied = 0 if run is None else sum(refresh.applied_step is not None for refresh in run.refreshes)
        table.add_row(
            one.letter,
            name_text(policy),
            str(plan.provenance.step if run is None else run.last_step),
            number(plan.fp4_fraction if known else None, ".4f"),
            number(None if run is None else run.mean_fp4_fraction, ".4f"),
            number(min(plan.stage_fp4_fractions) if known else None, ".4f"),
            number(plan.linear_speedup(), ".3f"),
            *("-", "-") if run is None else (str(applied), str(len(run.refreshes) - applied)),
        )
    return table


def settings_table(compared: Sequence[Compared]) -> Table | None:
    """Returns a table of the `SnipConfig` fields that differ; None without such fields or without two configs."""
    configured = [one for one in compared if one.config]
    fields = list(dict.fromkeys(name for one in configured for name in one.config))
    values = {name: [repr(one.config.get(name)) for one in configured] for name in fields}
    differing = [name for name in fields if len(set(values[name])) > 1]
    if not differing:
        return None
    table = new_table("Settings that differ")
    for heading in ("field", *(one.letter for one in configured)):
        table.add_column(heading, overflow="fold")
    for name in differing:
        table.add_row(name_text(name), *(Text(printable(value, _VALUE)) for value in values[name]))
    return table


def _print_changes(first: Compared, other: Compared, console: Console) -> None:
    """Prints the GEMMs whose formats differ between two plans."""
    assert first.plan is not None and other.plan is not None
    try:
        changes = first.plan.changes(other.plan)
    except ValueError as error:
        say(console, f"The formats of {first.letter} and {other.letter} cannot be compared: {error}")
        return
    gemms = sum(map(len, first.plan.assignment.values()))
    if not changes:
        say(console, f"The plans of {first.letter} and {other.letter} agree in all {gemms:,} GEMMs.")
        return
    work = first.plan.executed
    layers: dict[str, dict[str, tuple[str, str]]] = {}
    for cell, formats in changes.items():
        layer, _, gemm = cell.rpartition(":")
        layers.setdefault(layer, {})[gemm] = formats
    moved = math.fsum(work[layer][gemm] for layer, row in layers.items() for gemm in row)
    share = moved / math.fsum(flops for row in work.values() for flops in row.values())
    kinds = Counter(" -> ".join(formats) for formats in changes.values())
    say(
        console,
        f"From {first.letter} to {other.letter}, {len(changes):,} of {gemms:,} GEMMs in {len(layers):,} of "
        f"{len(work):,} layers change, {share:.4f} of the FLOPs: "
        f"{listed([f'{count:,} {kind}' for kind, count in kinds.most_common()])}.",
    )
    console.print(_layer_table(first, other, layers, LayerLabels(work)))


def _layer_table(
    first: Compared, other: Compared, layers: Mapping[str, Mapping[str, tuple[str, str]]], labels: LayerLabels
) -> Table:
    table = new_table(f"Layers that change from {first.letter} to {other.letter}")
    for heading in ("layer", "GEMMs", first.letter, other.letter):
        table.add_column(heading)
    for layer in list(layers)[:_MOST_LAYERS]:
        for gemms, formats in _alike(layers[layer]):
            table.add_row(name_text(labels.layer(layer)), ", ".join(gemms), *formats)
    if len(layers) > _MOST_LAYERS:
        table.caption = f"The first {_MOST_LAYERS} of {len(layers):,} layers."
    return table


def _alike(row: Mapping[str, tuple[str, str]]) -> Iterator[tuple[list[str], tuple[str, str]]]:
    """Yields groups of GEMMs with equal changes, and their formats before and after."""
    for formats in dict.fromkeys(row.values()):
        yield [gemm for gemm, found in row.items() if found == formats], formats


def _print_losses(compared: Sequence[Compared], console: Console) -> None:
    """Prints the losses at common steps, and their differences at the last one."""
    runs = [one for one in compared if one.losses]
    if len(runs) < 2:
        if any(one.run is not None for one in compared):
            say(console, "Losses cannot be compared: fewer than two runs have any. The Trainer records them.")
        return
    for kind, name in _KINDS.items():
        found = {one.letter: one.losses_of(kind) for one in runs}
        with_any = {letter: losses for letter, losses in found.items() if losses}
        if len(with_any) < 2:
            continue
        steps = sorted(set.intersection(*map(set, with_any.values())))
        letters = listed(list(with_any))
        if not steps:
            say(console, f"{letters} have no {name} losses at a common step.")
            continue
        table = new_table(f"{name.capitalize()} losses at common steps")
        for heading in ("step", *with_any):
            table.add_column(heading, justify="right")
        for step in thinned(steps, _MOST_ROWS):
            table.add_row(str(step), *(number(losses[step], ".4f") for losses in with_any.values()))
        console.print(table)
        say(console, _last_differences(name, steps[-1], with_any))


def _last_differences(name: str, step: int, losses: Mapping[str, Mapping[int, float]]) -> str:
    """Describes the differences from the loss of the first run."""
    first, *others = losses
    base = losses[first][step]
    differences = []
    for other in others:
        gap = losses[other][step] - base
        percent = f" ({gap / base:+.2%})" if base > 0 else ""
        differences.append(f"{other} {gap:+.4f}{percent}")
    return f"At step {step}, {name} loss against {first}: {listed(differences)}."
