"""A run as PNG files: its plan over layers and time, its divergences, its losses."""

from __future__ import annotations

import io
import math
import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ..estimation.pending import LAYER
from ..json_io import write_atomic
from ..layers.labels import LayerLabels, split_layer
from ..numerics.formats import FORMATS
from ..numerics.gemms import GEMMS
from ..planning.forward_shares import forward_shares
from ..records.load import Run, thinned
from ..records.run_folder import FOLDER
from ..text import printable
from .series import MOST_ROWS, Panels, curve, divergence_panels, edges, shown_layers

# Grey, and sky blue and vermilion of Okabe and Ito's palette: colour-blind readers, and print, keep them apart.
# More rows than this are labelled by block instead of by layer: a model of 140 blocks has 980 linears.
_MOST_NAMED_ROWS = 1000
# Points of a curve that can be told apart.
_MOST_POINTS = 20_000
# Lines between blocks; with more blocks there is nothing but lines.
_MOST_LINES = 250
# Inches; a higher figure tells the steps at its top too.
_MOST_HEIGHT = 16.2
# Characters of a name.
_NAME = 60


def write_figures(
    run: Run, out_dir: str | os.PathLike[str] | None = None, most_named: int = _MOST_NAMED_ROWS
) -> list[Path]:
    """Writes plan.png, divergence.png and losses.png, as far as there is data for them; by default to RUN_DIR/snip.

    Args:
        run: what they show.
        out_dir: the folder that they are written to.
        most_named: layers that a figure names at most; of a model with more it names blocks, and is drawn faster.

    Returns: the files written.
    """
    folder = run.folder / FOLDER if out_dir is None else Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    draw: dict[str, Callable[[Run], Figure]] = {"plan.png": partial(plan_figure, most_named=most_named)}
    if _panels(run):
        draw["divergence.png"] = partial(divergence_figure, most_named=most_named)
    if run.losses:
        draw["losses.png"] = loss_figure
    for name, function in draw.items():
        image = io.BytesIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from font")  # a name in a script that it lacks
            FigureCanvasAgg(function(run)).print_png(image)
        write_atomic(folder / name, image.getvalue())  # in place of a link, not through it
    return [folder / name for name in draw]


def plan_figure(run: Run, most_named: int = _MOST_NAMED_ROWS) -> Figure:
    """Layers over optimizer steps, coloured by format; three panels if any layer's GEMMs are in different formats."""
    layers = shown_layers(run)
    mixed = any(len(set(formats.values())) > 1 for _, plan in run.plans for formats in plan.assignment.values())
    panels = GEMMS if mixed else GEMMS[:1]
    figure, axes = _layer_panels(layers, len(panels), most_named)
    starts = [step for step, _ in run.plans]
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
        panel.pcolormesh(edges(starts, run.last_step), rows, codes, cmap=colours, vmin=-0.5, vmax=len(shown) - 0.5)
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


def divergence_figure(run: Run, most_named: int = _MOST_NAMED_ROWS) -> Figure:
    """Layers over probes, coloured by the divergences in the least precise format on a logarithmic scale."""
    layers = shown_layers(run)
    steps = list(run.divergences)
    panels = _panels(run)
    figure, axes = _layer_panels(layers, len(panels), most_named)
    rows = np.arange(len(layers) + 1) - 0.5
    for panel, ((quantity, gemm), values) in zip(axes, panels.items(), strict=True):
        # At least a factor of 2 from end to end: equal values have no scale, and nearly equal ones endless tick labels.
        low = float(np.nanmin(values))
        high = max(float(np.nanmax(values)), 2 * low)
        norm = LogNorm(low, high)
        # Each probe holds until the next one.
        image = panel.pcolormesh(edges(steps, run.last_step), rows, values, norm=norm, cmap="viridis")
        label = f"{quantity}, {'all three GEMMs' if gemm == 'layer' else gemm}"
        pad = 0.1 / figure.get_figheight()
        # Three ticks: a logarithmic scale of less than a decade would print its labels over each other.
        ticks = np.geomspace(low, high, 3)
        bar = figure.colorbar(image, ax=panel, location="top", label=label, pad=pad, aspect=30, ticks=ticks)
        bar.minorticks_off()
        bar.ax.set_xticklabels([f"{tick:.0e}" for tick in ticks])
        panel.set_xlabel("optimizer step")
        panel.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    _title(figure, f"Divergence of each layer in {FORMATS[run.formats[0]].label} (white: zero or not measured)", run)
    return figure


def _panels(run: Run) -> Panels:
    """Returns whole layers where they were measured, else single GEMMs."""
    panels = divergence_panels(run, shown_layers(run), list(run.divergences))
    whole = {key: values for key, values in panels.items() if key[1] == LAYER}
    return whole or panels


def loss_figure(run: Run) -> Figure:
    """Training and validation loss over optimizer steps; a mark below wherever a plan came into force."""
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for key, label, colour in (("loss", "training", "#0072b2"), ("eval_loss", "validation", "#d55e00")):
        points = curve(run.losses, key, _MOST_POINTS)
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


def _layer_panels(layers: list[str], count: int, most_named: int) -> tuple[Figure, list[Axes]]:
    """A figure with `count` panels side by side whose rows are the layers, first on top, labelled on the left."""
    is_named = len(layers) <= most_named
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
    # A name with two dollar signs is no formula.
    axes[0].set_yticks(shown, [printable(label, _NAME) for label in labels], fontsize=7, parse_math=False)
    for panel in axes:
        panel.tick_params(labeltop=height > _MOST_HEIGHT)
        for row in firsts[1:] if len(firsts) <= _MOST_LINES else ():
            panel.axhline(row - 0.5, color="white", linewidth=1.5 if is_named else 0.4)
    return figure, axes


def _title(figure: Figure, title: str, run: Run | None = None) -> None:
    layers = 0 if run is None else len(run.plans[0][1].assignment)
    part = f" ({MOST_ROWS:,} of {layers:,} layers)" if layers > MOST_ROWS else ""
    figure.suptitle(title + part, fontsize=11, parse_math=False)
