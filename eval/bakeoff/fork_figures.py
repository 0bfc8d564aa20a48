"""Figures of a family of comparisons: each difference with its interval, after one length or over lengths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib.figure import Figure

from .fork_lengths import Course
from .fork_lines import LOSSES
from .fork_tables import EFFECT, Tested

_INCHES_PER_ROW = 0.28
# After Holm's correction.
_SIGNIFICANT, _NOT_SIGNIFICANT = "#b2182b", "#4d4d4d"


def write_family_figure(tested: Sequence[Tested], steps: int, path: Path) -> None:
    """Writes the differences of a family with their 95% intervals, the first on top; nothing without any.

    Args:
        tested: the comparisons.
        steps: of the forks.
        path: of the PNG file.
    """
    if not tested:
        return
    figure = Figure(figsize=(8, 1.4 + _INCHES_PER_ROW * len(tested)), layout="constrained")
    axes = figure.subplots()
    axes.axvspan(-EFFECT, EFFECT, color="#eeeeee", zorder=0)
    axes.axvline(0, color="black", linewidth=0.8)
    for row, test in enumerate(tested):
        half = test.main.half_width if test.main.forks > 1 else 0.0
        colour = _SIGNIFICANT if test.reading in ("higher", "lower") else _NOT_SIGNIFICANT
        axes.errorbar(test.main.mean, row, xerr=half, fmt="o", color=colour, capsize=3, markersize=4)
    axes.set_yticks(range(len(tested)), [f"{test.one}\nagainst {test.other}" for test in tested], fontsize=6)
    axes.set_ylim(len(tested) - 0.5, -0.5)
    axes.set_xlabel(f"difference of the loss {LOSSES[tested[0].outcome]!r} after {steps} steps (%)")
    axes.set_title(
        f"mean and 95% interval; red: significant at 5% after Holm's correction; grey band: ± {EFFECT}%", fontsize=8
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def write_length_figure(courses: Sequence[Course], path: Path) -> None:
    """Writes the differences of a family over the lengths of its forks, with their 95% intervals; nothing without any.

    Args:
        courses: the comparisons.
        path: of the PNG file.
    """
    if not courses:
        return
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    axes.axhline(0, color="black", linewidth=0.8)
    apart = 0.01 * max(max(course.at) for course in courses)
    for place, course in enumerate(courses):
        known = {steps: found for steps, found in course.at.items() if found.forks > 1}
        steps = [number + apart * (place - (len(courses) - 1) / 2) for number in known]
        means, halves = ([getattr(found, name) for found in known.values()] for name in ("mean", "half_width"))
        label = f"{course.one} against {course.other}"
        axes.errorbar(steps, means, yerr=halves, fmt="o-", capsize=3, markersize=4, linewidth=1, label=label)
    axes.set_xticks(sorted({steps for course in courses for steps in course.at}))
    axes.set_xlabel("steps of the fork")
    axes.set_ylabel(f"difference of the loss {LOSSES[courses[0].outcome]!r} (%)")
    axes.set_title("mean and 95% interval, uncorrected, of the same forks after each length", fontsize=8)
    axes.legend(fontsize=6)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
