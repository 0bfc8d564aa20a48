"""A figure of a family of comparisons: each difference with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib.figure import Figure

from .fork_lines import LOSSES
from .fork_tables import EFFECT, Tested

_INCHES_PER_ROW = 0.28
# After Holm's correction.
_TOLD, _NOT_TOLD = "#b2182b", "#4d4d4d"


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
        colour = _TOLD if test.reading in ("higher", "lower") else _NOT_TOLD
        axes.errorbar(test.main.mean, row, xerr=half, fmt="o", color=colour, capsize=3, markersize=4)
    axes.set_yticks(range(len(tested)), [f"{test.one}\nagainst {test.other}" for test in tested], fontsize=6)
    axes.set_ylim(len(tested) - 0.5, -0.5)
    axes.set_xlabel(f"difference of the loss {LOSSES[tested[0].outcome]!r} after {steps} steps (%)")
    axes.set_title(
        f"mean and 95% interval; red: told apart after Holm's correction; grey band: ± {EFFECT}%", fontsize=8
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
