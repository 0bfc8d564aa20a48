"""Gaps with the effects of seeds taken out: a linear model of contenders and seeds.

Contenders have different seeds, and seeds differ by more than contenders do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import t as student_t

from .contenders import Contender, contender_key
from .gaps import LAYOUT_BY
from .lines import Row
from .significance import TINY, Comparison


@dataclass(frozen=True)
class Layout:
    """Least squares of gap = effect of the contender + effect of the seed + noise, for runs that differ in these two.

    C contenders and S seeds have C + S effects, of which only contrasts and sums of a contender's and a seed's effect
    are determined, and these only if the layout is connected.
    """

    contenders: tuple[str, ...]
    """Their keys."""
    seeds: tuple[int, ...]
    runs: int
    effects: np.ndarray
    """(C + S,), in percentage points."""
    covariance: np.ndarray
    """(C + S, C + S), of the effects for noise of variance 1."""
    freedom: int
    """Residual degrees of freedom."""
    deviation: float | None
    """Residual standard deviation, the noise of one run, in percentage points; None without degrees of freedom."""
    connected: bool
    """Whether every contender can be compared with every other through common seeds."""

    @classmethod
    def fit(cls, runs: Sequence[Row]) -> Layout:
        """Fits runs that all have a gap."""
        keys = tuple(dict.fromkeys(map(contender_key, runs)))
        seeds = tuple(sorted({run["spec"]["seed"] for run in runs}))
        gaps = np.array([run["gap"]["plan"] for run in runs])
        rows = [
            [contender_key(run) == key for key in keys] + [run["spec"]["seed"] == seed for seed in seeds]
            for run in runs
        ]
        design = np.array(rows, dtype=float)
        inverse, rank = np.linalg.pinv(design), int(np.linalg.matrix_rank(design))
        effects, freedom = inverse @ gaps, len(runs) - rank
        squares = float(((gaps - design @ effects) ** 2).sum())
        deviation = math.sqrt(squares / freedom) if freedom else None
        connected = rank == len(keys) + len(seeds) - 1  # Each separate part costs one rank more.
        return cls(keys, seeds, len(runs), effects, inverse @ inverse.T, freedom, deviation, connected)

    def combination(self, weights: np.ndarray) -> tuple[float, float | None]:
        """Returns the weighted sum of effects and its standard error, None without degrees of freedom."""
        spread = math.sqrt(max(float(weights @ self.covariance @ weights), 0.0))
        return float(weights @ self.effects), None if self.deviation is None else self.deviation * spread

    def unit(self, key: str) -> np.ndarray:
        """Returns weights that pick one contender's effect."""
        return np.array([float(own == key) for own in self.contenders] + [0.0] * len(self.seeds))


class GapModel:
    """The layouts of lines, one per LAYOUT_BY, over the runs that have a target share and a gap under the plan."""

    def __init__(self, lines: Iterable[Row]) -> None:
        groups: dict[tuple[Any, ...], list[Row]] = {}
        for line in lines:
            if line["spec"]["share"] is not None and line["gap"]["plan"] is not None:
                groups.setdefault(tuple(line["spec"][name] for name in LAYOUT_BY), []).append(line)
        self.layouts = {values: Layout.fit(runs) for values, runs in groups.items()}

    def _connected(self, *points: Contender) -> Layout | None:
        """Returns the layout in which all points can be estimated."""
        found = [self.layouts.get(tuple(point.spec[name] for name in LAYOUT_BY)) for point in points]
        layout = found[0]
        if layout is None or not layout.connected or any(other is not layout for other in found):
            return None
        return layout if all(point.key in layout.contenders for point in points) else None

    def adjusted(self, point: Contender) -> tuple[float, float | None] | None:
        """Returns the gap that all seeds of the layout, weighted equally, would give, and its standard error.

        Returns: None outside a connected layout; no error without degrees of freedom.
        """
        layout = self._connected(point)
        if layout is None:
            return None
        weights = layout.unit(point.key)
        weights[len(layout.contenders) :] = 1 / len(layout.seeds)
        return layout.combination(weights)

    def gap(self, point: Contender) -> float | None:
        """Returns the adjusted gap; where there is none, the mean over seeds."""
        adjusted = self.adjusted(point)
        return point.mean_gap() if adjusted is None else adjusted[0]

    def compare(self, one: Contender, other: Contender) -> Comparison | None:
        """Returns the contrast, `one` minus `other`, with its t-test; None if they are not in one connected layout."""
        layout = self._connected(one, other)
        if layout is None:
            return None
        difference, error = layout.combination(layout.unit(one.key) - layout.unit(other.key))
        if error is None:
            p = None
        elif error < TINY:
            p = float(abs(difference) < TINY)
        else:
            p = float(2 * student_t.sf(abs(difference) / error, layout.freedom))
        return Comparison(difference, p)
