"""A run as PNG files: its plan over layers and time, its divergences, its losses."""

from __future__ import annotations

import io
import math
import os
import warnings
from collections.abc import Callable
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

from ..json_io import write_atomic
from ..numerics.formats import FORMATS
from ..numerics.gemms import GEMMS
from ..planning.forward_shares import forward_shares
from ..policies.stages import split_layer
from ..records.load import Run, thinned
from ..records.run_folder import FOLDER
from ..text import printable

# Grey, and sky blue and vermilion of Okabe and Ito's palette: colour-blind readers, and print, keep them apart.
# More rows than this are labelled by block instead of by layer.
_MOST_NAMED_ROWS = 64
# What can be told apart: rows, some of the model's layers if it has more; and points of a curve.
_MOST_SHOWN_ROWS, _MOST_POINTS = 2000, 20_000
# Lines between blocks; with more blocks there is nothing but lines.
_MOST_LINES = 250
# Characters of a name.
_NAME = 60


def write_figures(run: Run, out_dir: str | os.PathLike[str] | None = None) -> list[Path]:
    """Writes plan.png, divergence.png and losses.png, as far as there is data for them; by default to RUN_DIR/snip.

    Returns: the files written.
    """
    folder = run.folder / FOLDER if out_dir is None else Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    draw: dict[str, Callable[[Run], Figure]] = {"plan.png": plan_figure}
    if _divergence_panels(run):
        draw["divergence.png"] = divergence_figure
    if run.losses:
        draw["losses.png"] = loss_figure
    for name, function in draw.items():
        image = io.BytesIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from font")  # a name in a script that it lacks
            FigureCanvasAgg(function(run)).print_png(image)
        write_atomic(folder / name, image.getvalue())  # in place of a link, not through it
    return [folder / name for name in draw]


def plan_figure(run: Run) -> Figure:
    """Layers over optimizer steps, coloured by format; three panels if any layer's GEMMs are in different formats."""
    layers = _shown_layers(run)
    mixed = any(len(set(formats.values())) > 1 for _, plan in run.plans for formats in plan.assignment.values())
    panels = GEMMS if mixed else GEMMS[:1]
    figure, axes = _layer_panels(layers, len(panels))
    starts = [step for step, _ in run.plans]
    # A history may go back; time does not.
    edges = np.maximum.accumulate([*starts, max(run.last_step, max(starts) + 1)])
    rows = np.arange(len(layers) + 1) - 0.5
    kept = thinned([refresh.step for refresh in run.refreshes if refresh.applied_step is None], _MOST_POINTS)
    marks: list[Line2D] = []
    used = {name for _, plan in run.plans for formats in plan.assignment.values() for name in formats.values()}
    shown = [name for name in FORMATS if name in used or name in run.formats]  # a config may name anything
    shown.sort(key=lambda name: FORMATS[name].bits)
    colours = ListedColormap([FORMATS[name].colour for name in shown])
    for panel, gemm in zip(axes, panels, strict=True):
        # A frozen weight has no grad_weight, and so no colour there.
        formats = [[plan.assignment[layer].get(gemm) for _, plan in run.plans] for layer in layers]
        codes = np.array([[np.nan if name is None else shown.index(name) for name in row] for row in formats])
        panel.pcolormesh(edges, rows, codes, cmap=colours, vmin=-0.5, vmax=len(shown) - 0.5)
        panel.set_title(gemm if mixed else "all three GEMMs", fontsize=10)
        panel.set_xlabel("optimizer step")
        panel.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        if kept:
            marks = panel.plot(kept, [-0.5] * len(kept), "kx", clip_on=False, label="refresh that kept the plan")
    entries = [FORMATS[name] for name in shown]
    handles: list[Artist] = [Patch(facecolor=x.colour, edgecolor="0.4", label=x.label) for x in entries]
    figure.legend(handles=[*handles, *marks], loc="outside lower center", ncols=4, frameon=False)
    plan = run.plans[-1][1]
    forward = forward_shares(plan)
    of_forward = "" if forward is None else f" ({forward.fp4_fraction:.1%} of the forward ones)"
    _title(figure, f"Precision plan: {plan.fp4_fraction:.1%} of the linear FLOPs in FP4{of_forward} at the end", run)
    return figure


def divergence_figure(run: Run) -> Figure:
    """Layers over probes, coloured by the divergences in the least precise format on a logarithmic scale."""
    layers = _shown_layers(run)
    steps = list(run.divergences)
    panels = _divergence_panels(run)
    figure, axes = _layer_panels(layers, len(panels))
    for panel, ((quantity, gemm), values) in zip(axes, panels.items(), strict=True):
        extent = (-0.5, len(steps) - 0.5, len(layers) - 0.5, -0.5)
        # At least a factor of 2 from end to end: equal values have no scale, and nearly equal ones endless tick labels.
        low = float(np.nanmin(values))
        high = max(float(np.nanmax(values)), 2 * low)
        norm = LogNorm(low, high)
        image = panel.imshow(values, norm=norm, cmap="viridis", aspect="auto", interpolation="nearest", extent=extent)
        label = f"{quantity}, {'all three GEMMs' if gemm == 'layer' else gemm}"
        pad = 0.1 / figure.get_figheight()
        # Three ticks: a logarithmic scale of less than a decade would print its labels over each other.
        ticks = np.geomspace(low, high, 3)
        bar = figure.colorbar(image, ax=panel, location="top", label=label, pad=pad, aspect=30, ticks=ticks)
        bar.minorticks_off()
        bar.ax.set_xticklabels([f"{tick:.0e}" for tick in ticks])
        shown = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), 4)).round().astype(int))
        panel.set_xticks(shown, [str(steps[index]) for index in shown])
        panel.set_xlabel("step of the probe")
    _title(figure, f"Divergence of each layer in {FORMATS[run.formats[0]].label} (white: zero or not measured)", run)
    return figure


def _divergence_panels(run: Run) -> dict[tuple[str, str], np.ndarray[Any, Any]]:
    """(quantity, gemm) -> (layers, probes); whole layers where they were measured, else single GEMMs; NaN for none."""
    rows = {layer: row for row, layer in enumerate(_shown_layers(run))}
    panels: dict[tuple[str, str], np.ndarray[Any, Any]] = {}
    for column, records in enumerate(run.divergences.values()):
        for record in records:
            if record["format"] != run.formats[0] or record["layer"] not in rows:
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
    for key, label, colour in (("loss", "training", "#0072b2"), ("eval_loss", "validation", "#d55e00")):
        # Beyond 1e100 axes overflow.
        points = [
            (step, row[key] if abs(row[key]) < 1e100 else math.nan) for step, row in run.losses.items() if key in row
        ]
        points = thinned(points, _MOST_POINTS)
        if points:
            marker = "o" if len(points) <= 50 else ""  # A single point has no line to be seen by.
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, label=label, linewidth=1.2, markersize=4)
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
        labels = [f"{block.rpartition('.')[2]} {kind}" for block, kind in names]
        shown = list(range(len(layers)))
    else:
        shown = firsts[:: math.ceil(len(firsts) / 40)]
        labels = [names[row][0] or names[row][1] for row in shown]
    # A name with two dollar signs is no formula.
    axes[0].set_yticks(shown, [printable(label, _NAME) for label in labels], fontsize=7, parse_math=False)
    for panel in axes:
        for row in firsts[1:] if len(firsts) <= _MOST_LINES else ():
            panel.axhline(row - 0.5, color="white", linewidth=1.5 if len(layers) <= _MOST_NAMED_ROWS else 0.4)
    return figure, axes


def _shown_layers(run: Run) -> list[str]:
    return thinned(list(run.plans[0][1].assignment), _MOST_SHOWN_ROWS)


def _title(figure: Figure, title: str, run: Run | None = None) -> None:
    layers = 0 if run is None else len(run.plans[0][1].assignment)
    part = f" ({_MOST_SHOWN_ROWS:,} of {layers:,} layers)" if layers > _MOST_SHOWN_ROWS else ""
    figure.suptitle(title + part, fontsize=11, parse_math=False)
