"""Draws a run as PNG files: its plan over layers and time, its divergences, its losses."""

from __future__ import annotations

import io
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ..estimation.table import LAYER
from ..json_io import write_atomic
from ..layers.labels import LayerLabels, split_layer
from ..numerics.formats import FORMATS
from ..numerics.gemms import GEMMS
from ..planning.plan import forward_shares
from ..records.load import Run
from ..records.run_folder import FOLDER
from ..text import printable

# The palette of Okabe and Ito, which stays distinguishable for colour-blind readers and in print.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9", "#6b4fbb", "#555555", "#000000")
# Models with more layers are labelled by block instead of by layer. A model of 140 blocks has 980 linears.
_MOST_NAMED_ROWS = 1000
# Inches. Higher figures also show the steps at the top.
_MOST_HEIGHT = 16.2
# Maximum length of a name.
_NAME = 60

Panels = dict[tuple[str, str], np.ndarray[Any, Any]]
"""(quantity, GEMM) -> (layers, probes)."""
Losses = Mapping[int, Mapping[str, float]]
"""Step -> {"loss", "eval_loss"}."""


def write_figures(run: Run, out_dir: str | os.PathLike[str] | None = None) -> list[Path]:
    """Writes plan.png and, if there is data, divergence.png and losses.png, by default to RUN_DIR/snip.

    Returns: the files written.
    """
    folder = run.folder / FOLDER if out_dir is None else Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    figures = figures_of(run)
    for name, data in figures.items():
        write_atomic(folder / name, data)  # replaces a link instead of writing through it
    return [folder / name for name in figures]


def figures_of(run: Run) -> dict[str, bytes]:
    """Returns file name -> PNG of each figure that has data."""
    found = {"plan.png": png(plan_figure(run))}
    if _panels(run):
        found["divergence.png"] = png(divergence_figure(run))
    if run.losses:
        found["losses.png"] = png(loss_figure({"": run.losses}, [step for step, _ in run.plans[1:]]))
    return found


def png(figure: Figure) -> bytes:
    """Draws the figure as a PNG."""
    data = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # a name in a script that the font lacks
        figure.savefig(data, format="png")
    return data.getvalue()


def plan_figure(run: Run) -> Figure:
    """Draws layers over steps, coloured by format; with one panel per GEMM if formats differ within any layer."""
    layers = list(run.plans[0][1].assignment)
    mixed = any(len(set(formats.values())) > 1 for _, plan in run.plans for formats in plan.assignment.values())
    panels = GEMMS if mixed else GEMMS[:1]
    figure, axes = _layer_panels(layers, len(panels))
    starts = [step for step, _ in run.plans]
    rows = np.arange(len(layers) + 1) - 0.5
    kept = [refresh.step for refresh in run.refreshes if refresh.applied_step is None]
    marks: list[Line2D] = []
    used = {name for _, plan in run.plans for formats in plan.assignment.values() for name in formats.values()}
    shown = [name for name in FORMATS if name in used or name in run.formats]
    shown.sort(key=lambda name: FORMATS[name].bits)
    colours = ListedColormap([FORMATS[name].colour for name in shown])
    for panel, gemm in zip(axes, panels, strict=True):
        # A frozen weight has no grad_weight, so it has no colour there.
        formats = [[plan.assignment[layer].get(gemm) for _, plan in run.plans] for layer in layers]
        codes = np.array([[np.nan if name is None else shown.index(name) for name in row] for row in formats])
        panel.pcolormesh(edges(starts, run.last_step), rows, codes, cmap=colours, vmin=-0.5, vmax=len(shown) - 0.5)
        panel.set_title(gemm if mixed else "all three GEMMs", fontsize=10)
        if kept:
            marks = panel.plot(kept, [-0.5] * len(kept), "kx", clip_on=False, label="plan kept")
    entries = [FORMATS[name] for name in shown]
    handles: list[Artist] = [Patch(facecolor=x.colour, edgecolor="0.4", label=x.label) for x in entries]
    figure.legend(handles=[*handles, *marks], loc="outside lower center", ncols=4, frameon=False)
    plan = run.plans[-1][1]
    forward = forward_shares(plan)
    of_forward = "" if forward is None else f" ({forward.fp4_fraction:.1%} of the forward ones)"
    share = (
        f": {plan.fp4_fraction:.1%} of the linear FLOPs in FP4{of_forward} at the end" if plan.is_share_known else ""
    )
    _title(figure, f"Precision plan{share}")
    return figure


def divergence_figure(run: Run) -> Figure:
    """Draws layers over probes, coloured by the divergence in the least precise format on a logarithmic scale."""
    layers, steps = list(run.plans[0][1].assignment), list(run.divergences)
    panels = _panels(run)
    figure, axes = _layer_panels(layers, len(panels))
    rows = np.arange(len(layers) + 1) - 0.5
    for panel, ((quantity, gemm), values) in zip(axes, panels.items(), strict=True):
        # At least a factor of 2: equal values have no scale, and nearly equal ones too many tick labels.
        low = float(np.nanmin(values))
        high = max(float(np.nanmax(values)), 2 * low)
        norm = LogNorm(low, high)
        # Each probe holds until the next one.
        image = panel.pcolormesh(edges(steps, run.last_step), rows, values, norm=norm, cmap="viridis")
        label = f"{quantity}, {'all three GEMMs' if gemm == 'layer' else gemm}"
        pad = 0.1 / figure.get_figheight()
        # Three ticks, because the labels of a logarithmic scale below one decade would overlap.
        ticks = np.geomspace(low, high, 3)
        bar = figure.colorbar(image, ax=panel, location="top", label=label, pad=pad, aspect=30, ticks=ticks)
        bar.minorticks_off()
        bar.ax.set_xticklabels([f"{tick:.0e}" for tick in ticks])
    _title(figure, f"Divergence of each layer in {FORMATS[run.formats[0]].label} (white: zero or not measured)")
    return figure


def _panels(run: Run) -> Panels:
    """Returns the divergences in the least precise format; NaN if zero or not measured. Leaves out empty panels.

    The panels are of whole layers if these were measured, else of single GEMMs.
    """
    rows = {layer: row for row, layer in enumerate(run.plans[0][1].assignment)}
    panels: Panels = {}
    for column, table in enumerate(run.divergences.values()):
        for row in table.rows:
            if row.format != run.formats[0] or row.layer not in rows:
                continue
            for quantity in ("loss divergence", "weight divergence"):
                value, key = getattr(row, quantity.replace(" ", "_")), (quantity, row.gemm)
                if 0 < value < math.inf:
                    if key not in panels:
                        panels[key] = np.full((len(rows), len(run.divergences)), math.nan)
                    panels[key][rows[row.layer], column] = value
    whole = [key for key in panels if key[1] == LAYER]
    return {
        key: panels[key] for key in sorted(whole or panels, key=lambda key: ((LAYER, *GEMMS).index(key[1]), key[0]))
    }


def loss_figure(losses: Mapping[str, Losses], applied: Sequence[int] = ()) -> Figure:
    """Draws training and validation losses over optimizer steps.

    Args:
        losses: name of a run -> its losses; the name of a single run may be empty.
        applied: steps at which a new plan came into force, marked on the axis.
    """
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    kinds = (("loss", "training"), ("eval_loss", "validation"))
    for number, (name, rows) in enumerate(losses.items()):
        for index, (key, kind) in enumerate(kinds):
            points = [(step, row[key]) for step, row in rows.items() if key in row]
            if not points:
                continue
            colour = _COLOURS[index if len(losses) == 1 else number % len(_COLOURS)]
            axes.plot(
                *zip(*points, strict=True),
                color=colour,
                marker="o" if len(points) <= 50 else "",  # a single point would be invisible without a marker
                label=printable(f"{name}, {kind}" if name else kind, _NAME),
                linestyle="-" if len(losses) == 1 or key == "eval_loss" else ":",
                linewidth=1.2,
                markersize=4,
            )
    if applied:
        axes.plot(applied, [0.0] * len(applied), "k|", transform=axes.get_xaxis_transform(), label="new plan in force")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss")
    for text in axes.legend(frameon=False).get_texts():
        text.set_parse_math(False)
    axes.grid(axis="y", color="0.92")
    _title(figure, "Losses")
    return figure


def _layer_panels(layers: list[str], count: int) -> tuple[Figure, list[Axes]]:
    """Returns a figure with `count` panels over steps, side by side. Rows are layers, first on top, labelled left."""
    is_named = len(layers) <= _MOST_NAMED_ROWS
    # The letters of a name are 0.1 inches high.
    height = 2.2 + (max(0.13 * len(layers), min(0.19 * len(layers), 12.0), 2.0) if is_named else 14.0)
    figure = Figure(figsize=(2.8 + max(2.8 * count, 4.5), height), dpi=150, layout="constrained")
    axes = list(figure.subplots(1, count, sharey=True, squeeze=False)[0])
    axes[0].set_ylim(len(layers) - 0.5, -0.5)
    for panel in axes[1:]:
        panel.tick_params(left=False)
    names, label = [split_layer(layer) for layer in layers], LayerLabels(layers)
    firsts = [row for row, name in enumerate(names) if row == 0 or name[0] != names[row - 1][0]]
    if is_named:
        labels = [f"{label.block(block)} {kind}".lstrip() for block, kind in names]
        shown = list(range(len(layers)))
    else:
        shown = firsts[:: math.ceil(len(firsts) / 40)]
        labels = [names[row][0] or names[row][1] for row in shown]
    # `parse_math=False`, because a name with two dollar signs is not a formula.
    axes[0].set_yticks(shown, [printable(label, _NAME) for label in labels], fontsize=7, parse_math=False)
    for panel in axes:
        panel.set_xlabel("optimizer step")
        panel.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        panel.tick_params(labeltop=height > _MOST_HEIGHT)
        for row in firsts[1:]:
            panel.axhline(row - 0.5, color="white", linewidth=1.5 if is_named else 0.4)
    return figure, axes


def _title(figure: Figure, title: str) -> None:
    figure.suptitle(title, fontsize=11, parse_math=False)


def edges(steps: Sequence[int], last_step: int) -> np.ndarray[Any, Any]:
    """Returns the edges of the intervals that begin at each step and end at the last step, in non-decreasing order."""
    return np.maximum.accumulate([*steps, max(last_step, max(steps) + 1)])
