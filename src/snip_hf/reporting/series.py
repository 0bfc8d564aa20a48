"""What the figures of a run show, as numbers: its layers, its divergences over probes, its losses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..estimation.pending import LAYER
from ..numerics.gemms import GEMMS
from ..records.load import Run, thinned

# Rows that can be told apart: some of the model's layers, if it has more.
MOST_ROWS = 2000

Panels = dict[tuple[str, str], np.ndarray[Any, Any]]
"""(quantity, GEMM) -> (layers, probes)."""


def shown_layers(run: Run, most: int = MOST_ROWS) -> list[str]:
    """Returns the names of the layers, in the plan's order; of very many some."""
    return thinned(list(run.plans[0][1].assignment), most)


def divergence_panels(run: Run, layers: Sequence[str], steps: Sequence[int]) -> Panels:
    """Returns the divergences in the least precise format; NaN for those that are zero or were not measured.

    A panel is there if it has any number, those of whole layers first.
    """
    rows = {layer: row for row, layer in enumerate(layers)}
    panels: Panels = {}
    for column, step in enumerate(steps):
        for record in run.divergences[step]:
            if record["format"] != run.formats[0] or record["layer"] not in rows:
                continue
            for quantity in ("loss divergence", "weight divergence"):
                value = record[quantity.replace(" ", "_")]
                key = (quantity, record["gemm"])
                if 0 < value < math.inf and key not in panels:
                    panels[key] = np.full((len(rows), len(steps)), math.nan)
                if 0 < value < math.inf:
                    panels[key][rows[record["layer"]], column] = value
    return {key: panels[key] for key in sorted(panels, key=lambda key: ((LAYER, *GEMMS).index(key[1]), key[0]))}


def edges(steps: Sequence[int], last_step: int) -> np.ndarray[Any, Any]:
    """Returns where the time of each step begins, and where that of the last one ends; it never goes back."""
    return np.maximum.accumulate([*steps, max(last_step, max(steps) + 1)])


def curve(losses: Mapping[int, Mapping[str, float]], key: str, most: int) -> list[tuple[int, float]]:
    """Returns (step, loss), with NaN for what is no real number.

    Of more than `most` points, the lowest and the highest of each stretch of steps, so that spikes stay.
    """
    # Beyond 1e100 axes overflow.
    points = [(step, row[key] if abs(row[key]) < 1e100 else math.nan) for step, row in losses.items() if key in row]
    if len(points) <= most:
        return points
    size = math.ceil(len(points) / (most // 2 - 1))
    kept = {points[0], points[-1]}
    for start in range(0, len(points), size):
        stretch = sorted(points[start : start + size], key=lambda point: (math.isnan(point[1]), point[1]))
        kept |= {stretch[0], stretch[-1]}
    return sorted(kept, key=lambda point: point[0])
