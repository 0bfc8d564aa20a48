"""The figures of a bake-off, as PNG files: gap against FP4 share, losses, plans, learning rates and refreshes."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from snip_hf.layers.labels import LayerLabels, split_layer
from snip_hf.numerics.formats import FORMATS
from snip_hf.numerics.gemms import GEMMS

from .contenders import Contender, contenders
from .gaps import diverged
from .linear_model import GapModel
from .lines import Row
from .plans import format_letters
from .ranking import beating_snip
from .significance import LEAST_PAIRS
from .tables import share_name

Lines = Sequence[Row]
Style = dict[str, Any]

# Okabe and Ito's palette first (colour-blind readers), without its yellow, which is too pale for a line.
_COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#9467bd", "#a5b300", "#17becf",
)  # fmt: skip
_MARKERS = "osD^vP*X<>"
# What has no target share is a reference in grey or black.
_REFERENCES: dict[str, Style] = {
    "bf16": {"color": "0.35", "marker": ".", "linestyle": ":"},
    "uniform-fp8": {"color": "0.6", "marker": "h", "linestyle": "-"},
    "uniform-fp4": {"color": "black", "marker": "p", "linestyle": "-"},
}
_RING: Style = {"s": 130, "facecolors": "none", "edgecolors": "black", "zorder": 5}
_MOST_CONTENDERS = 12
_CHOICE = (
    f"Uniform formats, and contenders with at least {LEAST_PAIRS} seeds at a share or {LEAST_PAIRS} shares, in all at "
    f"most {_MOST_CONTENDERS}. The tables have all."
)
_ADJUSTED = "Effects of seeds taken out, bars: standard error (uniform formats: mean, standard deviation over seeds)"
_MAIN_SHARE = 0.75
# Before this part of the training the losses of all runs fall too steeply for differences to be read.
_SKIPPED_PART = 0.2
# How much of a share's slot on the axis its points fill, side by side so as not to hide each other.
_FILLED = 0.76
# What is worse than the median contender by this factor is named instead of drawn.
_FAR = 8.0
_MOST_NAMED_ROWS = 64


def write_figures(experiments: Mapping[str, Lines], folder: Path) -> list[Path]:
    """Writes pareto.png, loss_curves.png, plan.png, stability.png and frequency.png, as far as there is data for them.

    Args:
        experiments: name -> paired lines (`gaps.with_gaps`).

    Returns: the files written.
    """
    shares = [*experiments.get("shares", ()), *experiments.get("sizes", ())]
    order = main_contenders(shares)
    drawn: dict[str, Callable[[], Figure | None]] = {
        "pareto.png": lambda: pareto_figure(shares, order),
        "loss_curves.png": lambda: loss_figure(shares, order),
        "plan.png": lambda: plan_figure(shares),
        "stability.png": lambda: stability_figure(experiments.get("stability", ()), order),
        "frequency.png": lambda: frequency_figure(experiments.get("frequency", ()), order),
    }
    figures = {folder / name: figure for name, draw in drawn.items() if (figure := draw()) is not None}
    for path, figure in figures.items():
        FigureCanvasAgg(figure).print_png(str(path))
    return list(figures)


def main_contenders(lines: Iterable[Row]) -> list[str]:
    """Returns the names of the contenders that _CHOICE describes, those with most runs if more; SNIP's come first."""
    found: dict[str, list[Contender]] = {}
    for point in contenders(line for line in lines if not _is_bf16(line)):
        found.setdefault(point.name, []).append(point)
    references = sorted(name for name in found if name in _REFERENCES)
    others = {name: points for name, points in found.items() if name not in _REFERENCES and _is_main(points)}
    most = sorted(others, key=lambda name: (-sum(len(point.runs) for point in others[name]), name))
    kept = most[: _MOST_CONTENDERS - len(references)]
    return sorted(kept, key=lambda name: (others[name][0].spec["policy"] != "snip", name)) + references


def _is_main(points: Sequence[Contender]) -> bool:
    seeds = max(len(point.gaps()) for point in points)
    return max(seeds, len({point.spec["share"] for point in points})) >= LEAST_PAIRS


def _is_bf16(line: Row) -> bool:
    return bool(line["spec"]["policy"] == "bf16")


def _styles(names: Iterable[str], order: Sequence[str]) -> dict[str, Style]:
    """Returns name -> colour, marker and line: the places of `order` first, then free ones; dashed if colours recur."""
    names = sorted(set(names))
    coloured = [name for name in order if name not in _REFERENCES]
    places = {name: coloured.index(name) for name in names if name in coloured}
    free = (place for place in itertools.count() if place not in places.values())
    places |= {name: next(free) for name in names if name not in places and name not in _REFERENCES}
    styles = {}
    for name, place in sorted(places.items(), key=lambda item: item[1]):
        again, index = divmod(place, len(_COLOURS))
        styles[name] = {"color": _COLOURS[index], "marker": _MARKERS[index], "linestyle": "--" if again else "-"}
    return styles | {name: style for name, style in _REFERENCES.items() if name in names}


def _series(points: Sequence[Contender]) -> dict[str, list[Contender]]:
    """Groups contenders by name; the share is part of the name where points of one label have several targets."""
    labels = Counter(label for label, _ in {(point.runs[0]["label"], point.spec["share"]) for point in points})
    found: dict[str, list[Contender]] = {}
    for point in points:
        several = labels[point.runs[0]["label"]] > 1
        found.setdefault(point.name + f", {share_name(point.spec['share'])}" * several, []).append(point)
    return found


def _panels(lines: Iterable[Row]) -> tuple[Figure, dict[str, Axes]]:
    """A figure with one panel per model, smallest first."""
    sizes = {line["spec"]["model"]: line.get("parameters") or 0 for line in lines}
    models = sorted(sizes, key=lambda model: (sizes[model], model))
    figure = Figure(figsize=(4.0 + 4.8 * len(models), 4.6), dpi=150, layout="constrained")
    axes = dict(zip(models, figure.subplots(1, len(models), squeeze=False)[0], strict=True))
    for model, panel in axes.items():
        panel.set_title(model, fontsize=10)
        panel.grid(axis="y", color="0.92")
    return figure, axes


def _finish(figure: Figure, axes: Mapping[str, Axes], y_label: str, title: str) -> Figure:
    """Labels, title, and one legend for all panels, outside on the right."""
    next(iter(axes.values())).set_ylabel(y_label)
    # Of this size about 12 letters go into an inch.
    width = int(12 * figure.get_figwidth())
    figure.suptitle("\n".join(textwrap.fill(line, width) for line in title.split("\n")), fontsize=10)
    named = [pair for panel in axes.values() for pair in zip(*panel.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in named}
    rows = sum(1 + label.count("\n") for label in handles)
    figure.set_figheight(max(figure.get_figheight(), 0.6 + 0.2 * rows))  # So that no entry is cut off.
    figure.legend(list(handles.values()), list(handles), loc="outside right center", frameon=False, fontsize=8)
    return figure


def _bars(panel: Axes, bars: Iterable[tuple[float, float, float]], label: str, style: Style) -> None:
    """Draws (place, height, error either way)."""
    if drawn := list(bars):
        size: Style = {"linewidth": 1.2, "markersize": 5, "capsize": 2, "elinewidth": 0.8}
        places, heights, errors = zip(*drawn, strict=True)
        panel.errorbar(places, heights, errors, label=label, **size, **style)


def _spread(values: Iterable[float]) -> tuple[float, float]:
    """Returns mean and standard deviation; 0 for one value."""
    own = list(values)
    return float(np.mean(own)), float(np.std(own, ddof=len(own) > 1))


def _estimate(point: Contender, model: GapModel) -> tuple[float, float]:
    """Returns the adjusted gap and its standard error; where there is none, mean and deviation over seeds."""
    adjusted = model.adjusted(point)
    return _spread(point.gaps().values()) if adjusted is None else (adjusted[0], adjusted[1] or 0.0)


def pareto_figure(lines: Lines, order: Sequence[str]) -> Figure | None:
    """Adjusted gap against target FP4 share of the contenders in `order`; rings where SNIP is beaten beyond noise."""
    lines = [line for line in lines if not _is_bf16(line)]
    points = [point for point in contenders(lines) if point.gaps() and point.name in order]
    if not points:
        return None
    figure, axes = _panels(point.runs[0] for point in points)
    styles = _styles((point.name for point in points), order)
    gap_model = GapModel(lines)
    slots = sorted({point.share for point in points})
    leads = {(lead.spec["model"], lead.name, lead.share) for lead, _, test in beating_snip(lines) if test.beyond_noise}
    for model, panel in axes.items():
        own = [point for point in points if point.spec["model"] == model]
        names = [name for name in styles if any(point.name == name for point in own)]
        several = [name for name in names if name not in _REFERENCES]
        for name in names:
            # References are alone at their shares.
            side = ((several.index(name) + 0.5) / len(several) - 0.5) * _FILLED if name in several else 0.0
            series = sorted((point for point in own if point.name == name), key=lambda point: point.share)
            bars = [(slots.index(point.share) + side, *_estimate(point, gap_model)) for point in series]
            _bars(panel, bars, name, styles[name])
            for point, (place, gap, _) in zip(series, bars, strict=True):
                if (model, name, point.share) in leads:
                    panel.scatter(place, gap, label="beats a SNIP point\n(p < 0.05)", **_RING)
        panel.axhline(0, color="0.4", linewidth=0.8)
        for slot in range(1, len(slots)):
            panel.axvline(slot - 0.5, color="0.9", linewidth=0.8)
        panel.set_xticks(range(len(slots)), [f"{100 * share:.4g}" for share in slots])
        panel.set_xlim(-0.5, len(slots) - 0.5)
        panel.set_xlabel("target share of the linear FLOPs in FP4 [%], contenders side by side")
        named = {f"{point.name}, {100 * point.share:.3g}%:": point for point in own}
        _clip(panel, {name: [_estimate(point, gap_model)[0]] for name, point in named.items()}, "%")
    title = f"Final validation loss over BF16's. {_ADJUSTED}"
    return _finish(figure, axes, "adjusted gap to BF16 [%]", f"{title}\n{_CHOICE}")


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
    """Validation loss minus the paired BF16 run's at the target share next to 75%, of the contenders in `order`."""
    targets = {line["spec"]["share"] for line in lines} - {None}
    if not targets:
        return None
    share = min(targets, key=lambda target: (abs(target - _MAIN_SHARE), target))
    shown = [line for line in lines if line["spec"]["share"] in (share, None) and not _is_bf16(line)]
    points = [point for point in contenders(shown) if point.name in order]
    if not points:
        return None
    figure, axes = _panels(point.runs[0] for point in points)
    styles = _styles((point.name for point in points), order)
    marks: dict[Axes, dict[str, list[float]]] = {}
    for point in sorted(points, key=lambda point: list(styles).index(point.name)):
        if curve := _difference(point):
            panel, losses = axes[point.spec["model"]], list(curve.values())
            panel.plot(list(curve), losses, label=point.name, linewidth=1.2, markersize=4, **styles[point.name])
            marks.setdefault(panel, {})[point.name] = losses
    for panel in axes.values():
        _clip(panel, marks.get(panel, {}), " at the end")
        panel.axhline(0, color="0.4", linewidth=0.8)
        panel.set_xlabel("optimizer step")
    title = f"Validation loss under the plan minus BF16's, mean over seeds, target FP4 share {share_name(share)}"
    return _finish(figure, axes, "validation loss minus BF16's", f"{title}\n{_CHOICE}")


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
    line = min(snip, key=_plan_preference)
    layers, plans, spec = line["layers"], line["plans"], line["spec"]
    edges = [plan["step"] for plan in plans] + [max(spec["steps"], plans[-1]["step"] + 1)]
    height = 2.0 + min(max(0.16 * len(layers), 2.0), 12.0)
    figure = Figure(figsize=(12, height), dpi=150, layout="constrained")
    axes = figure.subplots(1, len(GEMMS), sharey=True)
    letters = format_letters(line)
    names = sorted(letters, key=lambda name: -FORMATS[name].bits)
    colours = ListedColormap([FORMATS[name].colour for name in names])
    codes = {letters[name]: code for code, name in enumerate(names)}
    for column, (panel, gemm) in enumerate(zip(axes, GEMMS, strict=True)):
        image = np.array([[codes[letter] for letter in plan["formats"][column :: len(GEMMS)]] for plan in plans]).T
        rows = np.arange(len(layers) + 1) - 0.5
        panel.pcolormesh(edges, rows, image, cmap=colours, vmin=-0.5, vmax=len(names) - 0.5)
        panel.set_title(gemm, fontsize=10)
        panel.set_xlabel("optimizer step")
    _name_layers(axes, layers)
    handles = [Patch(facecolor=FORMATS[name].colour, edgecolor="0.4", label=name) for name in names]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    title = f"{line['label']}, {spec['model']}, target FP4 share {share_name(spec['share'])}, seed {spec['seed']}"
    figure.suptitle(f"Plans over time: {title}", fontsize=11)
    return figure


def _plan_preference(line: Row) -> tuple[bool, float, int, int]:
    spec = line["spec"]
    share = line["fp4_fraction"] if spec["share"] is None else spec["share"]
    return spec["granularity"] != "gemm", abs(share - _MAIN_SHARE), -len(line["plans"]), spec["seed"]


def _name_layers(axes: Sequence[Axes], layers: Sequence[str]) -> None:
    """First layer on top, every layer named, or every block if there are many; white lines between blocks."""
    names, label = [split_layer(layer) for layer in layers], LayerLabels(layers)
    firsts = [row for row, name in enumerate(names) if row == 0 or name[0] != names[row - 1][0]]
    axes[0].set_ylim(len(layers) - 0.5, -0.5)
    if len(layers) <= _MOST_NAMED_ROWS:
        labels = [f"{label.block(block)} {kind}".lstrip() for block, kind in names]
        axes[0].set_yticks(range(len(layers)), labels, fontsize=6.5)
    else:
        axes[0].set_yticks(firsts, [names[row][0] or names[row][1] for row in firsts], fontsize=6.5)
    for panel in axes:
        for row in firsts[1:]:
            panel.axhline(row - 0.5, color="white", linewidth=1)


def stability_figure(lines: Lines, order: Sequence[str]) -> Figure | None:
    """Final loss against the learning rate; crosses in a grey band on top, one row per contender, for diverged runs."""
    if len({line["spec"]["learning_rate"] for line in lines}) < 2:
        return None
    figure, axes = _panels(lines)
    series = _series(contenders(lines, shown=["learning_rate"]))
    styles = _styles(series, order)
    for model, panel in axes.items():
        panel.set_xscale("log")
        rates = sorted({line["spec"]["learning_rate"] for line in lines if line["spec"]["model"] == model})
        panel.set_xticks(rates, [f"{rate:g}" for rate in rates])
        panel.set_xticks([], minor=True)
        panel.set_xlabel("learning rate")
        lost = {}
        for name in styles:
            own = [point for point in series[name] if point.spec["model"] == model]
            own.sort(key=lambda point: point.spec["learning_rate"])
            bars = [(point.spec["learning_rate"], *_spread(point.losses())) for point in own if point.losses()]
            _bars(panel, bars, name, styles[name])
            lost[name] = [point.spec["learning_rate"] for point in own if point.diverged]
        _mark_lost(panel, {name: rates for name, rates in lost.items() if rates}, styles)
    title = "Final loss against learning rate, mean over the seeds that did not diverge"
    return _finish(figure, axes, "final validation loss", title)


def _mark_lost(panel: Axes, lost: Mapping[str, Sequence[float]], styles: Mapping[str, Style]) -> None:
    """Puts a grey band above the data, with a row of crosses for each contender that has diverged runs."""
    if not lost:
        return
    low, high = panel.get_ylim()
    row = 0.05 * (high - low)
    top = high + row * (len(lost) + 1.5)
    panel.axhspan(high, top, color="0.94")
    left: Style = {"transform": panel.get_yaxis_transform(), "fontsize": 8, "va": "center"}
    panel.text(0.02, top - 0.7 * row, "learning rates with a diverged run", **left)
    for place, (name, rates) in enumerate(lost.items()):
        heights = [high + (place + 0.5) * row] * len(rates)
        panel.plot(rates, heights, "x", color=styles[name]["color"], markeredgewidth=1.6)
    panel.set_ylim(low, top)


def frequency_figure(lines: Lines, order: Sequence[str]) -> Figure | None:
    """Adjusted gap against the steps between refreshes; evenly spaced, "once" for a plan that is made once."""
    lines = [line for line in lines if not _is_bf16(line)]
    points = [point for point in contenders(lines, shown=["refresh_every"]) if point.gaps()]
    if not points:
        return None
    figure, axes = _panels(lines)
    series = _series(points)
    styles = _styles(series, order)
    gap_model = GapModel(lines)
    periods = sorted({_period(point) for point in points})
    for model, panel in axes.items():
        for name in styles:
            own = sorted((point for point in series[name] if point.spec["model"] == model), key=_period)
            bars = [(periods.index(_period(point)), *_estimate(point, gap_model)) for point in own]
            _bars(panel, bars, name, styles[name])
        panel.set_xticks(range(len(periods)), ["once" if math.isinf(period) else f"{period:g}" for period in periods])
        panel.set_xlabel("steps between refreshes")
    title = f"Gap against the refresh period. {_ADJUSTED}"
    return _finish(figure, axes, "adjusted gap to BF16 [%]", title)


def _period(point: Contender) -> float:
    every = point.spec["refresh_every"]
    return math.inf if every is None else float(every)
