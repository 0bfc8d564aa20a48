"""What happened in a run: which plan was in force when, what each refresh cost, and how the losses went.

Everything is read back from the files that a run leaves (docs/method.md): OUTPUT/snip/history.jsonl, plan.json and
divergence-<step>.json, and the Trainer's trainer_state.json. What is missing is said in a sentence and left out.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .formats import FORMAT_CODES, FORMAT_NAMES, GEMMS
from .plan import PlanProvenance, PrecisionPlan, parse_json, read_json

# Grey, and sky blue and vermilion of Okabe and Ito's palette: colour-blind readers, and print, keep them apart.
COLOURS = {"bf16": "#dddddd", "fp8": "#56b4e9", "fp4": "#d55e00"}
_STYLES = {"bf16": "dim", "fp8": "cyan", "fp4": "bold red"}
# More rows than this are labelled by block instead of by layer.
_MOST_NAMED_ROWS = 64
_MOST_LOSS_ROWS = 20


@dataclass(frozen=True)
class Refresh:
    """One line of the history: a probe, and what came of it."""

    step: int
    applied_step: int | None
    """None: the plan in force was kept, for `reason`."""
    reason: str | None
    fp4_fraction: float | None
    layers_changed: int
    objective: float | None
    gap: float | None
    seconds: Mapping[str, float | None]
    changes: Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Run:
    """What a run folder holds."""

    folder: Path
    plans: list[tuple[int, PrecisionPlan]]
    """(step after which it was in force, plan), the start's plan first."""
    refreshes: list[Refresh]
    divergences: dict[int, list[dict[str, Any]]]
    """Probe step -> records (layer, gemm, format, loss_divergence, weight_divergence, flops)."""
    losses: dict[int, dict[str, float]]
    """Step -> {"loss": training loss, "eval_loss": validation loss}, either may be absent; in order of the steps."""
    notes: list[str]
    """What is missing or cannot be read, one sentence each."""

    @property
    def config(self) -> Mapping[str, Any]:
        return self.plans[0][1].provenance.config or {}

    @property
    def last_step(self) -> int:
        steps = [*self.losses, *(refresh.applied_step or refresh.step for refresh in self.refreshes)]
        return max(steps, default=0)


def load_run(run_dir: str | os.PathLike[str]) -> Run:
    """Reads a run folder (the Trainer's output_dir).

    Raises:
        FileNotFoundError: there is no snip/history.jsonl in it.
        ValueError: the history is no history; names the line and what is wrong.
    """
    folder = Path(run_dir)
    notes: list[str] = []
    start, refreshes = _read_history(folder / "snip" / "history.jsonl", notes)
    plans = [(start.provenance.step, start)]
    for refresh in refreshes:
        if refresh.applied_step is not None:
            plans.append((refresh.applied_step, _changed(plans[-1][1], refresh)))
    _compare_with_file(folder / "snip" / "plan.json", plans[-1][1], notes)
    divergences = _read_divergences(folder / "snip", notes)
    return Run(folder, plans, refreshes, divergences, _read_losses(folder, notes), notes)


def _read_history(path: Path, notes: list[str]) -> tuple[PrecisionPlan, list[Refresh]]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; expected the output folder of a run with SnipCallback.")
    lines = path.read_bytes().splitlines()
    if not lines:
        raise ValueError(f"{path} is empty; expected a line with the start of the run.")
    refreshes = []
    for number, line in enumerate(lines, 1):
        try:
            if number == 1:
                start = _start_plan(parse_json(line))
            else:
                refreshes.append(_refresh(parse_json(line)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number == len(lines) > 1:  # A killed run may leave half a line.
                notes.append(f"The last line of {path.name} is not complete and is left out.")
                continue
            problem = f"it has no entry {error}." if isinstance(error, KeyError) else error
            raise ValueError(f"Line {number} of {path} is not a line of a snip-hf history: {problem}") from error
    return start, refreshes


def _start_plan(record: Mapping[str, Any]) -> PrecisionPlan:
    _check_event(record, "start")
    config = record["config"]
    provenance = PlanProvenance(
        step=record["step"], policy=config["policy"], config=config, model_name=record["model_name"] or None
    )
    return PrecisionPlan(record["plan"], record["flops"], record["stages"], provenance)


def _refresh(record: Mapping[str, Any]) -> Refresh:
    _check_event(record, "refresh")
    # A refresh that failed early has no objective, gap or seconds yet.
    given = {"objective": None, "gap": None, "seconds": {}} | dict(record)
    return Refresh(**{field.name: given[field.name] for field in dataclasses.fields(Refresh)})


def _check_event(record: Mapping[str, Any], expected: str) -> None:
    if record["event"] != expected:
        raise ValueError(f"event is {record['event']!r}, expected {expected!r}.")


def _changed(plan: PrecisionPlan, refresh: Refresh) -> PrecisionPlan:
    assignment = {layer: dict(formats) for layer, formats in plan.assignment.items()}
    for key, (_, new) in refresh.changes.items():
        layer, _, gemm = key.rpartition(":")
        if layer not in assignment:
            raise ValueError(
                f"The refresh of step {refresh.step} changes layer {layer!r}, which the start does not have."
            )
        assignment[layer][gemm] = new
    return dataclasses.replace(plan, assignment=assignment)


def _compare_with_file(path: Path, plan: PrecisionPlan, notes: list[str]) -> None:
    try:
        differences = plan.changes(PrecisionPlan.load(path))
    except (OSError, ValueError) as error:
        notes.append(f"plan.json cannot be used: {error}")
    else:
        if differences:
            key, (ours, theirs) = next(iter(differences.items()))
            notes.append(
                f"plan.json differs from the history in {len(differences)} GEMMs ({key} is {theirs}, by the history "
                f"{ours}); the tables and figures follow the history."
            )


def _read_divergences(folder: Path, notes: list[str]) -> dict[int, list[dict[str, Any]]]:
    divergences = {}
    for path in folder.glob("divergence-*.json"):
        try:
            document = read_json(path)
            records = [
                {"layer": r["layer"], "gemm": r["gemm"], "format": r["format"]}
                | {key: float(r[key]) for key in ("loss_divergence", "weight_divergence")}
                for r in document["records"]
            ]
            divergences[int(document["step"])] = records
        except (OSError, ValueError, KeyError, TypeError) as error:
            notes.append(f"{path.name} cannot be used and is left out: {error}")
    if not divergences:
        notes.append("There are no divergence files, so there is no figure of the divergences.")
    return dict(sorted(divergences.items()))


def _read_losses(folder: Path, notes: list[str]) -> dict[int, dict[str, float]]:
    """The training and validation losses of the trainer_state.json that got furthest."""
    states = []
    for path in [folder / "trainer_state.json", *folder.glob("checkpoint-*/trainer_state.json")]:
        if not path.is_file():
            continue
        try:
            state = json.loads(path.read_bytes())  # Not read_json: the Trainer writes a NaN loss as NaN.
            states.append((int(state["global_step"]), list(state["log_history"])))
        except (ValueError, KeyError, TypeError) as error:
            notes.append(f"{path.relative_to(folder)} cannot be used and is left out: {error}")
    losses: dict[int, dict[str, float]] = {}
    for entry in max(states, key=lambda state: state[0])[1] if states else []:
        for key in ("loss", "eval_loss"):
            if isinstance(entry.get(key), int | float):
                losses.setdefault(int(entry["step"]), {})[key] = float(entry[key])
    if not losses:
        notes.append("There is no trainer_state.json with losses (saved with a checkpoint or by trainer.save_state()).")
    return dict(sorted(losses.items()))


# Tables


def print_report(run_dir: str | os.PathLike[str], console: Console | None = None) -> None:
    """Prints the refreshes, the losses and the plan in force at the end. Raises as `load_run` does."""
    _print_run(load_run(run_dir), console or Console())


def _print_run(run: Run, console: Console) -> None:
    config = run.config
    plan = run.plans[-1][1]
    target = config.get("target_fp4_fraction")
    console.print(
        f"Policy {config.get('policy')}, granularity {config.get('granularity')}, target FP4 share {target}, "
        f"attained {plan.fp4_fraction:.4f} of the linear FLOPs (not a reduction of FLOPs). "
        f"Model: {plan.provenance.model_name or 'not named'}.",
        markup=False,
        highlight=False,
    )
    if run.refreshes:
        console.print(refresh_table(run))
    else:
        console.print(
            f"No refresh was recorded (policy {config.get('policy')}, first refresh due at step "
            f"{config.get('first_refresh')} if it probes): the plan of the start is in force.",
            markup=False,
            highlight=False,
        )
    for refresh in run.refreshes:
        if refresh.applied_step is None:
            console.print(f"Step {refresh.step}: plan kept. {refresh.reason}", markup=False, highlight=False)
    if run.losses:
        console.print(loss_table(run))
    console.print(plan_table(plan))
    for note in run.notes:
        console.print(f"Note: {note}", markup=False, highlight=False)


def refresh_table(run: Run) -> Table:
    table = _table("Refreshes")
    for heading in ("probe\nstep", "applied\nafter", "FP4\nshare", "layers\nchanged", "objective", "gap"):
        table.add_column(heading, justify="right")
    for part in ("probe", "solver", "waited"):
        table.add_column(f"{part}\n[s]".replace("[", "\\["), justify="right")
    for refresh in run.refreshes:
        table.add_row(
            str(refresh.step),
            "kept" if refresh.applied_step is None else str(refresh.applied_step),
            _number(refresh.fp4_fraction, ".4f"),
            str(refresh.layers_changed),
            _number(refresh.objective, ".4g"),
            _number(refresh.gap, ".1e"),
            *(_number(refresh.seconds.get(part), ".2f") for part in ("probe", "solver", "waited")),
        )
    return table


def loss_table(run: Run) -> Table:
    """Validation losses (or, without any, training losses) at no more than `_MOST_LOSS_ROWS` steps."""
    table = _table("Losses")
    for heading in ("step", "training", "validation"):
        table.add_column(heading, justify="right")
    steps = [step for step, row in run.losses.items() if "eval_loss" in row] or list(run.losses)
    for index in np.unique(np.linspace(0, len(steps) - 1, min(len(steps), _MOST_LOSS_ROWS)).round().astype(int)):
        step = steps[index]
        training = [row["loss"] for logged, row in run.losses.items() if logged <= step and "loss" in row]
        validation = run.losses[step].get("eval_loss")
        table.add_row(str(step), _number(training[-1] if training else None, ".4f"), _number(validation, ".4f"))
    return table


def plan_table(plan: PrecisionPlan) -> Table:
    """One row per block, one column per kind of linear; `4/8/8` is forward/grad_input/grad_weight."""
    cells = {split_layer(layer): formats for layer, formats in plan.assignment.items()}
    kinds = list(dict.fromkeys(kind for _, kind in cells))
    table = _table("Plan (one format: all three GEMMs; a/b/c: forward/grad_input/grad_weight)")
    table.add_column("block", justify="right")
    for kind in kinds:
        table.add_column(Text(kind.rpartition(".")[2]))
    for block in dict.fromkeys(block for block, _ in cells):
        row = [_plan_cell(cells[block, kind]) if (block, kind) in cells else Text("") for kind in kinds]
        table.add_row(Text(block.rpartition(".")[2] or block), *row)
    return table


def stage_table(plan: PrecisionPlan) -> Table:
    table = _table("Stages")
    for heading in ("stage", "layers", "FP4 share of its linear FLOPs"):
        table.add_column(heading, justify="right")
    for index, (stage, share) in enumerate(zip(plan.stages, plan.stage_fp4_fractions, strict=True)):
        table.add_row(str(index), str(len(stage)), f"{share:.4f}")
    table.add_row("all", str(len(plan.assignment)), f"{plan.fp4_fraction:.4f}")
    return table


def _plan_cell(formats: Mapping[str, str]) -> Text:
    names = [formats[gemm] for gemm in GEMMS]
    if len(set(names)) == 1:
        return Text(names[0], style=_STYLES[names[0]])
    bits = ((name.lstrip("bfp"), _STYLES[name]) for name in names)
    return Text("/").join(Text(*pair) for pair in bits)


def split_layer(layer: str) -> tuple[str, str]:
    """`model.layers.3.mlp.up_proj` -> (`model.layers.3`, `mlp.up_proj`); without a number, ("", layer)."""
    match = re.match(r"(.*?(?:^|\.)\d+)\.(.+)", layer)
    return (match[1], match[2]) if match else ("", layer)


def _table(title: str) -> Table:
    # No vertical lines and no padding twice, so that nine columns of refreshes fit into 80 characters.
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, collapse_padding=True)
    table.pad_edge = False
    return table


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


# Figures


def write_figures(run_dir: str | os.PathLike[str], out_dir: str | os.PathLike[str] | None = None) -> list[Path]:
    """Writes plan.png, divergence.png and losses.png, as far as there is data for them; by default to RUN_DIR/snip.

    Raises as `load_run` does. Returns: the files written.
    """
    return _write_figures(load_run(run_dir), out_dir)


def run_report(run_dir: str | os.PathLike[str], out_dir: str | os.PathLike[str] | None = None) -> list[Path]:
    """`print_report` and `write_figures`. Returns: the files written."""
    run = load_run(run_dir)
    _print_run(run, Console())
    return _write_figures(run, out_dir)


def _write_figures(run: Run, out_dir: str | os.PathLike[str] | None) -> list[Path]:
    folder = run.folder / "snip" if out_dir is None else Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    draw: dict[str, Callable[[Run], Figure]] = {"plan.png": plan_figure}
    if _divergence_panels(run):
        draw["divergence.png"] = divergence_figure
    if run.losses:
        draw["losses.png"] = loss_figure
    for name, function in draw.items():
        FigureCanvasAgg(function(run)).print_png(str(folder / name))
    return [folder / name for name in draw]


def plan_figure(run: Run) -> Figure:
    """Layers over optimizer steps, coloured by format; three panels if any layer's GEMMs are in different formats."""
    layers = list(run.plans[0][1].assignment)
    mixed = any(len(set(formats.values())) > 1 for _, plan in run.plans for formats in plan.assignment.values())
    panels = GEMMS if mixed else GEMMS[:1]
    figure, axes = _layer_panels(layers, len(panels))
    starts = [step for step, _ in run.plans]
    edges = [*starts, max(run.last_step, starts[-1] + 1)]
    rows = np.arange(len(layers) + 1) - 0.5
    kept = [refresh.step for refresh in run.refreshes if refresh.applied_step is None]
    marks: list[Line2D] = []
    colours = ListedColormap([COLOURS[name] for name in FORMAT_NAMES])
    for panel, gemm in zip(axes, panels, strict=True):
        codes = [[FORMAT_CODES[plan.assignment[layer][gemm]] for _, plan in run.plans] for layer in layers]
        panel.pcolormesh(edges, rows, np.array(codes), cmap=colours, vmin=-0.5, vmax=len(FORMAT_NAMES) - 0.5)
        panel.set_title(gemm if mixed else "all three GEMMs", fontsize=10)
        panel.set_xlabel("optimizer step")
        panel.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        if kept:
            marks = panel.plot(kept, [-0.5] * len(kept), "kx", clip_on=False, label="refresh that kept the plan")
    handles: list[Artist] = [Patch(facecolor=COLOURS[name], edgecolor="0.4", label=name) for name in FORMAT_NAMES]
    figure.legend(handles=[*handles, *marks], loc="outside lower center", ncols=4, frameon=False)
    plan = run.plans[-1][1]
    _title(figure, f"Precision plan: {plan.fp4_fraction:.1%} of the linear FLOPs in FP4 at the end")
    return figure


def divergence_figure(run: Run) -> Figure:
    """Layers over probes, coloured by the divergences in FP4 on a logarithmic scale."""
    layers = list(run.plans[0][1].assignment)
    steps = list(run.divergences)
    panels = _divergence_panels(run)
    figure, axes = _layer_panels(layers, len(panels))
    for panel, ((quantity, gemm), values) in zip(axes, panels.items(), strict=True):
        extent = (-0.5, len(steps) - 0.5, len(layers) - 0.5, -0.5)
        # At least a factor of 2 from end to end: equal values have no scale, and nearly equal ones endless tick labels.
        norm = LogNorm(np.nanmin(values), max(np.nanmax(values), np.nanmin(values) * 2))
        image = panel.imshow(values, norm=norm, cmap="viridis", aspect="auto", interpolation="nearest", extent=extent)
        label = f"{quantity}, {'all three GEMMs' if gemm == 'layer' else gemm}"
        figure.colorbar(image, ax=panel, location="top", label=label, pad=0.1 / figure.get_figheight(), aspect=30)
        ticks = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), 4)).round().astype(int))
        panel.set_xticks(ticks, [str(steps[tick]) for tick in ticks])
        panel.set_xlabel("step of the probe")
    _title(figure, "Divergence of each layer in FP4 (white: zero or not measured)")
    return figure


def _divergence_panels(run: Run) -> dict[tuple[str, str], np.ndarray[Any, Any]]:
    """(quantity, gemm) -> (layers, probes); whole layers where they were measured, else single GEMMs; NaN for none."""
    rows = {layer: row for row, layer in enumerate(run.plans[0][1].assignment)}
    panels: dict[tuple[str, str], np.ndarray[Any, Any]] = {}
    for column, records in enumerate(run.divergences.values()):
        for record in records:
            if record["format"] != "fp4" or record["layer"] not in rows:
                continue
            for quantity in ("loss divergence", "weight divergence"):
                value = record[quantity.replace(" ", "_")]
                key = (quantity, record["gemm"])
                if 0 < value < math.inf and key not in panels:
                    panels[key] = np.full((len(rows), len(run.divergences)), math.nan)
                if 0 < value < math.inf:
                    panels[key][rows[record["layer"]], column] = value
    whole = {key: values for key, values in panels.items() if key[1] == "layer"}
    return whole or panels


def loss_figure(run: Run) -> Figure:
    """Training and validation loss over optimizer steps; a mark below wherever a plan came into force."""
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for key, label, style, colour in (
        ("loss", "training", "-", "#0072b2"),
        ("eval_loss", "validation", "o-", "#d55e00"),
    ):
        points = [(step, row[key]) for step, row in run.losses.items() if key in row]
        if points:
            axes.plot(*zip(*points, strict=True), style, color=colour, label=label, linewidth=1.2, markersize=4)
    applied = [step for step, _ in run.plans[1:]]
    if applied:
        axes.plot(applied, [0.0] * len(applied), "k|", transform=axes.get_xaxis_transform(), label="new plan in force")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss")
    axes.legend(frameon=False)
    axes.grid(axis="y", color="0.92")
    _title(figure, "Losses")
    return figure


def _layer_panels(layers: list[str], count: int) -> tuple[Figure, list[Axes]]:
    """A figure with `count` panels side by side whose rows are the layers, first on top, labelled on the left."""
    height = 2.2 + min(max(0.19 * len(layers), 2.0), 14.0)
    figure = Figure(figsize=(2.8 + max(2.8 * count, 4.5), height), dpi=150, layout="constrained")
    axes = list(figure.subplots(1, count, sharey=True, squeeze=False)[0])
    axes[0].set_ylim(len(layers) - 0.5, -0.5)
    for panel in axes[1:]:
        panel.tick_params(left=False)
    names = [split_layer(layer) for layer in layers]
    firsts = [row for row, name in enumerate(names) if row == 0 or name[0] != names[row - 1][0]]
    if len(layers) <= _MOST_NAMED_ROWS:
        axes[0].set_yticks(
            range(len(layers)), [f"{block.rpartition('.')[2]} {kind}" for block, kind in names], fontsize=7
        )
    else:
        shown = firsts[:: math.ceil(len(firsts) / 40)]
        axes[0].set_yticks(shown, [names[row][0] or names[row][1] for row in shown], fontsize=7)
    for panel in axes:
        for row in firsts[1:]:
            panel.axhline(row - 0.5, color="white", linewidth=1.5 if len(layers) <= _MOST_NAMED_ROWS else 0.4)
    return figure, axes


def _title(figure: Figure, title: str) -> None:
    figure.suptitle(title, fontsize=11, parse_math=False)
