"""What does a bake-off look like: gap against FP4 share, losses, plans, learning rates and refreshes, as PNG files?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bakeoff_tables import Contender, Row, beating_snip, contenders, diverged, final_loss, share_name
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from snip_hf.figures import COLOURS
from snip_hf.formats import FORMAT_NAMES, GEMMS
from snip_hf.policies import split_layer

Lines = Sequence[Row]
Style = dict[str, Any]

# Okabe and Ito's palette first (colour-blind readers), without its yellow, which is too pale for a line.
_COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9",
    "#000000", "#8c564b", "#9467bd", "#7f7f7f", "#a5b300", "#17becf",
)  # fmt: skip
_MARKERS = "osD^vP*X<>ph"
_MAIN_SHARE = 0.75
# Before this part of the training the losses of all runs fall too steeply for differences to be read.
_SKIPPED_PART = 0.2
# How far points of one share are drawn from it, in percentage points, so as not to hide each other.
_ASIDE = 1.5
# What is worse than the median contender by this factor is named instead of drawn.
_FAR = 4.0
_LETTERS = {"bf16": "b", "fp8": "8", "fp4": "4"}
_MOST_NAMED_ROWS = 64


def write_figures(experiments: Mapping[str, Lines], folder: Path) -> list[Path]:
    """Writes pareto.png, loss_curves.png, plan.png, stability.png and frequency.png, as far as there is data for them.

    Args:
        experiments: name -> paired lines (`bakeoff_tables.with_gaps`).

    Returns: the files written.
    """
    shares = [*experiments.get("shares", ()), *experiments.get("sizes", ())]
    order = _label_order([shares, *experiments.values()])
    drawn: dict[str, Callable[[], Figure | None]] = {
        "pareto.png": lambda: pareto_figure(shares, order),
        "loss_curves.png": lambda: loss_figure(shares, order),
        "plan.png": lambda: plan_figure(shares),
        "stability.png": lambda: stability_figure(experiments.get("stability", ()), order),
        "frequency.png": lambda: frequency_figure(experiments.get("frequency", ()), order),
    }
    written = []
    for name, draw in drawn.items():
        figure = draw()
        if figure is not None:
            FigureCanvasAgg(figure).print_png(str(folder / name))
            written.append(folder / name)
    return written


def _label_order(groups: Iterable[Iterable[Row]]) -> list[str]:
    """Returns all labels, SNIP's first within each group, so that a label has one colour in all figures."""
    labels = []
    for lines in groups:
        labels += sorted({(line["spec"]["policy"] != "snip", line["label"]) for line in lines if not _is_bf16(line)})
    return list(dict.fromkeys(label for _, label in labels))


def _is_bf16(line: Row) -> bool:
    return bool(line["spec"]["policy"] == "bf16")


def _styles(names: Iterable[str], order: Sequence[str]) -> dict[str, Style]:
    """Returns name -> colour, marker and line, dashed from the 13th on; the places of `order` first, then free ones."""
    names = sorted(set(names))
    places = {name: order.index(name) for name in names if name in order}
    free = (place for place in itertools.count() if place not in places.values())
    places |= {name: next(free) for name in names if name not in order}
    styles = {}
    for name, place in sorted(places.items(), key=lambda item: item[1]):
        index, again = place % len(_COLOURS), place >= len(_COLOURS)
        styles[name] = {"color": _COLOURS[index], "marker": _MARKERS[index], "linestyle": "--" if again else "-"}
    return styles


def _series(points: Iterable[Contender]) -> dict[str, list[Contender]]:
    """Groups contenders by name; the share is part of the name where points of one label have several targets."""
    points = list(points)
    shares: dict[str, set[float | None]] = {}
    for point in points:
        shares.setdefault(point.runs[0]["label"], set()).add(point.spec["share"])
    found: dict[str, list[Contender]] = {}
    for point in points:
        several = len(shares[point.runs[0]["label"]]) > 1
        found.setdefault(point.name + f", {share_name(point.spec['share'])}" * several, []).append(point)
    return found


def _panels(lines: Iterable[Row], height: float = 4.6) -> tuple[Figure, dict[str, Axes]]:
    """A figure with one panel per model, smallest first."""
    sizes = {line["spec"]["model"]: line.get("parameters") or 0 for line in lines}
    models = sorted(sizes, key=lambda model: (sizes[model], model))
    figure = Figure(figsize=(4.0 + 4.8 * len(models), height), dpi=150, layout="constrained")
    axes = dict(zip(models, figure.subplots(1, len(models), squeeze=False)[0], strict=True))
    for model, panel in axes.items():
        panel.set_title(model, fontsize=10)
        panel.grid(axis="y", color="0.92")
    return figure, axes


def _legend(figure: Figure, axes: Iterable[Axes]) -> None:
    """One legend for all panels, outside on the right."""
    named = [pair for panel in axes for pair in zip(*panel.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in named}
    figure.legend(list(handles.values()), list(handles), loc="outside right center", frameon=False, fontsize=8)


def _gap_bars(panel: Axes, points: Sequence[Contender], places: Sequence[float], label: str, style: Style) -> None:
    """Mean gaps with a standard deviation over seeds either way."""
    gaps = [list(point.gaps().values()) for point in points]
    spread = [np.std(values, ddof=1) if len(values) > 1 else 0.0 for values in gaps]
    means = [float(np.mean(values)) for values in gaps]
    panel.errorbar(places, means, spread, label=label, linewidth=1.2, markersize=5, capsize=2, elinewidth=0.8, **style)


def pareto_figure(lines: Lines, order: Sequence[str]) -> Figure | None:
    """Gap against attained FP4 share per contender; rings around points that beat SNIP beyond noise."""
    lines = [line for line in lines if not _is_bf16(line)]
    points = [point for point in contenders(lines) if point.gaps()]
    if not points:
        return None
    figure, axes = _panels(lines)
    styles = _styles((point.name for point in points), order)
    for model, panel in axes.items():
        own = [point for point in points if point.spec["model"] == model]
        names = sorted({point.name for point in own}, key=list(styles).index)
        aside = dict(zip(names, np.linspace(-_ASIDE, _ASIDE, len(names)), strict=True))
        for name in names:
            series = sorted((point for point in own if point.name == name), key=lambda point: point.fp4_fraction)
            _gap_bars(panel, series, [100 * point.fp4_fraction + aside[name] for point in series], name, styles[name])
        leads = [lead for lead, _, comparison in beating_snip(lines) if comparison.beyond_noise]
        leads = [lead for lead in leads if lead.spec["model"] == model]
        ringed = [(100 * lead.fp4_fraction + aside[lead.name], lead.mean_gap()) for lead in leads]
        if ringed:
            ring = {"s": 130, "facecolors": "none", "edgecolors": "black", "zorder": 5}
            panel.scatter(*zip(*ringed, strict=True), label="beats a SNIP point\n(p < 0.05)", **ring)
        panel.axhline(0, color="0.4", linewidth=0.8)
        panel.set_xlabel(f"linear FLOPs in FP4 [%], contenders drawn side by side within ± {_ASIDE:g}")
        named = {f"{point.name}, {100 * point.fp4_fraction:.3g}%:": point for point in own}
        _clip(panel, {name: [point.mean_gap() or 0.0] for name, point in named.items()}, "%")
    next(iter(axes.values())).set_ylabel("gap to BF16 [%]")
    figure.suptitle("Final validation loss over BF16's (bars: standard deviation over seeds)", fontsize=11)
    _legend(figure, axes.values())
    return figure


def _clip(panel: Axes, marks: Mapping[str, Sequence[float]], unit: str) -> None:
    """Cuts the axis above the contenders that lie together, and names the others with their last value.

    Args:
        marks: what is shown, by name; far off is what rises above _FAR times the median of all last values.
    """
    limit = _FAR * float(np.median([abs(values[-1]) for values in marks.values()])) if marks else 0.0
    far = {name: values[-1] for name, values in marks.items() if max(values) > limit}
    if limit == 0 or not far:
        return
    near = [0.0, *(value for name, values in marks.items() if name not in far for value in values)]
    height = max(near) - min(near)
    panel.set_ylim(min(near) - 0.12 * height, max(near) + (0.2 + 0.06 * len(far)) * height)
    text = "\n".join(["off the scale:", *(f"{name} {value:+.2f}{unit}" for name, value in far.items())])
    panel.text(0.02, 0.98, text, transform=panel.transAxes, va="top", fontsize=8, parse_math=False)


def loss_figure(lines: Lines, order: Sequence[str]) -> Figure | None:
    """Validation loss minus that of the paired BF16 run, mean over seeds, at the target share next to 75%."""
    targets = {line["spec"]["share"] for line in lines} - {None}
    if not targets:
        return None
    share = min(targets, key=lambda target: (abs(target - _MAIN_SHARE), target))
    shown = [line for line in lines if line["spec"]["share"] in (share, None) and not _is_bf16(line)]
    figure, axes = _panels(shown)
    points = contenders(shown)
    styles = _styles((point.name for point in points), order)
    marks: dict[Axes, dict[str, list[float]]] = {}
    for point in sorted(points, key=lambda point: list(styles).index(point.name)):
        curve = _difference(point)
        if curve:
            panel = axes[point.spec["model"]]
            style = styles[point.name]
            panel.plot(list(curve), list(curve.values()), label=point.name, linewidth=1.2, markersize=4, **style)
            marks.setdefault(panel, {})[point.name] = list(curve.values())
    for panel in axes.values():
        _clip(panel, marks.get(panel, {}), " at the end")
        panel.axhline(0, color="0.4", linewidth=0.8)
        panel.set_xlabel("optimizer step")
    next(iter(axes.values())).set_ylabel("validation loss minus BF16's")
    title = f"Validation loss under the plan minus BF16's, mean over seeds, target FP4 share {share_name(share)}"
    figure.suptitle(title, fontsize=11)
    _legend(figure, axes.values())
    return figure


def _difference(contender: Contender) -> dict[int, float]:
    """Returns step -> mean difference over the seeds, from the steps that all of them share."""
    curves = []
    for run in contender.runs:
        if run["bf16"] is not None and not diverged(run):
            base = dict(run["bf16"]["validation_curve"])
            late = _SKIPPED_PART * run["spec"]["steps"]
            pairs = ((step, loss) for step, loss in run["validation_curve"] if step >= late)
            curves.append({step: loss - base[step] for step, loss in pairs if loss and base.get(step)})
    steps = [step for step in curves[0] if all(step in curve for curve in curves)] if curves else []
    return {step: float(np.mean([curve[step] for curve in curves])) for step in steps}


def plan_figure(lines: Lines) -> Figure | None:
    """Layers over steps, coloured by format, for one SNIP run: single GEMMs if any, next to 75%, most plans."""
    snip = [line for line in lines if line["spec"]["policy"] == "snip" and len(line["plans"]) > 1]
    if not snip:
        return None

    def preference(line: Row) -> tuple[bool, float, int, int]:
        spec = line["spec"]
        return spec["granularity"] != "gemm", abs(spec["share"] - _MAIN_SHARE), -len(line["plans"]), spec["seed"]

    line = min(snip, key=preference)
    layers, plans, spec = line["layers"], line["plans"], line["spec"]
    edges = [plan["step"] for plan in plans] + [max(spec["steps"], plans[-1]["step"] + 1)]
    height = 2.0 + min(max(0.16 * len(layers), 2.0), 12.0)
    figure = Figure(figsize=(12, height), dpi=150, layout="constrained")
    axes = figure.subplots(1, len(GEMMS), sharey=True)
    colours = ListedColormap([COLOURS[name] for name in FORMAT_NAMES])
    codes = {_LETTERS[name]: code for code, name in enumerate(FORMAT_NAMES)}
    for column, (panel, gemm) in enumerate(zip(axes, GEMMS, strict=True)):
        image = np.array([[codes[letter] for letter in plan["formats"][column :: len(GEMMS)]] for plan in plans]).T
        rows = np.arange(len(layers) + 1) - 0.5
        panel.pcolormesh(edges, rows, image, cmap=colours, vmin=-0.5, vmax=len(FORMAT_NAMES) - 0.5)
        panel.set_title(gemm, fontsize=10)
        panel.set_xlabel("optimizer step")
    _name_layers(axes, layers)
    handles = [Patch(facecolor=COLOURS[name], edgecolor="0.4", label=name) for name in FORMAT_NAMES]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    title = f"{line['label']}, {spec['model']}, target FP4 share {share_name(spec['share'])}, seed {spec['seed']}"
    figure.suptitle(f"Plans over time: {title}", fontsize=11)
    return figure


def _name_layers(axes: Sequence[Axes], layers: Sequence[str]) -> None:
    """First layer on top, every layer named, or every block if there are many; white lines between blocks."""
    names = [split_layer(layer) for layer in layers]
    firsts = [row for row, name in enumerate(names) if row == 0 or name[0] != names[row - 1][0]]
    axes[0].set_ylim(len(layers) - 0.5, -0.5)
    if len(layers) <= _MOST_NAMED_ROWS:
        labels = [f"{block.rpartition('.')[2]} {kind}" for block, kind in names]
        axes[0].set_yticks(range(len(layers)), labels, fontsize=6.5)
    else:
        axes[0].set_yticks(firsts, [names[row][0] or names[row][1] for row in firsts], fontsize=6.5)
    for panel in axes:
        for row in firsts[1:]:
            panel.axhline(row - 0.5, color="white", linewidth=1)


def stability_figure(lines: Lines, order: Sequence[str]) -> Figure | None:
    """Final loss against the learning rate; crosses in a grey band on top, one row per contender, for diverged runs."""
    if not lines:
        return None
    figure, axes = _panels(lines)
    series = _series(contenders(lines, shown=["learning_rate"]))
    styles = _styles(series, order)
    for name, points in series.items():
        if _is_bf16(points[0].runs[0]):
            styles[name] = {"color": "0.35", "marker": "", "linestyle": ":"}
    for model, panel in axes.items():
        panel.set_xscale("log")
        rates = sorted({line["spec"]["learning_rate"] for line in lines if line["spec"]["model"] == model})
        panel.set_xticks(rates, [f"{rate:g}" for rate in rates], minor=False)
        panel.set_xticks([], minor=True)
        panel.set_xlabel("learning rate")
        lost = {}
        for name in sorted(series, key=list(styles).index):
            own = [point for point in series[name] if point.spec["model"] == model]
            own.sort(key=lambda point: point.spec["learning_rate"])
            losses = [(point.spec["learning_rate"], _spread_losses(point)) for point in own]
            held = [(rate, np.mean(values), np.std(values, ddof=len(values) > 1)) for rate, values in losses if values]
            bars = {"linewidth": 1.2, "markersize": 5, "capsize": 2, "elinewidth": 0.8, **styles[name]}
            if held:
                panel.errorbar(*zip(*held, strict=True), label=name, **bars)
            lost[name] = [point.spec["learning_rate"] for point in own if point.diverged]
        _mark_lost(panel, {name: rates for name, rates in lost.items() if rates}, styles)
    next(iter(axes.values())).set_ylabel("final validation loss")
    figure.suptitle("Final loss against learning rate, mean over the seeds that did not diverge", fontsize=11)
    _legend(figure, axes.values())
    return figure


def _mark_lost(panel: Axes, lost: Mapping[str, Sequence[float]], styles: Mapping[str, Style]) -> None:
    """Puts a grey band above the data, with a row of crosses for each contender that has diverged runs."""
    if not lost:
        return
    low, high = panel.get_ylim()
    row = 0.05 * (high - low)
    top = high + row * (len(lost) + 1.5)
    panel.axhspan(high, top, color="0.94")
    left = {"transform": panel.get_yaxis_transform(), "fontsize": 8, "va": "center"}
    panel.text(0.02, top - 0.7 * row, "learning rates with a diverged run", **left)
    for place, (name, rates) in enumerate(lost.items()):
        heights = [high + (place + 0.5) * row] * len(rates)
        panel.plot(rates, heights, "x", color=styles[name]["color"], markeredgewidth=1.6)
    panel.set_ylim(low, top)


def _spread_losses(contender: Contender) -> list[float]:
    return [loss for run in contender.runs if (loss := final_loss(run)) is not None]


def frequency_figure(lines: Lines, order: Sequence[str]) -> Figure | None:
    """Gap against the steps between refreshes; evenly spaced, "once" for a plan that is made once."""
    lines = [line for line in lines if not _is_bf16(line)]
    points = [point for point in contenders(lines, shown=["refresh_every"]) if point.gaps()]
    if not points:
        return None
    figure, axes = _panels(lines)
    series = _series(points)
    styles = _styles(series, order)
    periods = sorted({_period(point) for point in points})
    for model, panel in axes.items():
        for name in sorted(series, key=list(styles).index):
            own = sorted((point for point in series[name] if point.spec["model"] == model), key=_period)
            _gap_bars(panel, own, [periods.index(_period(point)) for point in own], name, styles[name])
        panel.set_xticks(range(len(periods)), ["once" if math.isinf(period) else f"{period:g}" for period in periods])
        panel.set_xlabel("steps between refreshes")
    next(iter(axes.values())).set_ylabel("gap to BF16 [%]")
    figure.suptitle("Gap against the refresh period (bars: standard deviation over seeds)", fontsize=11)
    _legend(figure, axes.values())
    return figure


def _period(point: Contender) -> float:
    every = point.spec["refresh_every"]
    return math.inf if every is None else float(every)
