"""A difference of two contenders, in percentage points, with the p of the test that it is more than noise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import ttest_rel

# Two-sided. No correction for the number of comparisons: the tables say so.
SIGNIFICANCE = 0.05
# Fewer seeds are not enough for the best or for the short table, fewer pairs not for a paired test.
LEAST_PAIRS = 3
# Percentage points. Losses have six decimals: what is smaller is rounding.
TINY = 1e-9


@dataclass(frozen=True)
class Comparison:
    """One against another."""

    difference: float
    """The one minus the other, in percentage points; NaN without a pair."""
    p: float | None
    """Two-sided, uncorrected; None if there is too little to test."""

    @property
    def beyond_noise(self) -> bool:
        """Returns True if the test rejects that the one and the other are the same."""
        return self.p is not None and self.p < SIGNIFICANCE

    def verdict(self, above: str = "worse", below: str = "better") -> str:
        """Returns `above`, `below` or "within noise", with p; "-" without a test."""
        if self.p is None:
            return "-"
        p = "p < 0.001" if self.p < 0.001 else f"p = {self.p:.3f}"
        return f"{(above if self.difference > 0 else below) if self.beyond_noise else 'within noise'} ({p})"


@dataclass(frozen=True)
class PairedComparison(Comparison):
    """Mean difference over what both have, with the p of the paired t-test if there are LEAST_PAIRS pairs."""

    pairs: int
    deviation: float
    """Standard deviation of the differences (n - 1); NaN with fewer than 2 pairs."""


def compare(first: Mapping[Any, float], second: Mapping[Any, float]) -> PairedComparison:
    """Compares gaps, `first` minus `second`, over the keys that both have."""
    keys = [key for key in first if key in second]
    ours, theirs = (np.array([gaps[key] for key in keys]) for gaps in (first, second))
    differences = ours - theirs
    mean = float(differences.mean()) if keys else math.nan
    deviation = float(differences.std(ddof=1)) if len(keys) > 1 else math.nan
    if len(keys) < LEAST_PAIRS:
        p = None
    elif deviation < TINY:  # The t statistic would be 0 / 0 or infinite.
        p = float(abs(mean) < TINY)
    else:
        p = float(ttest_rel(ours, theirs).pvalue)
    return PairedComparison(mean, p, len(keys), deviation)
