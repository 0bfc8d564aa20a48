"""Statistics of paired differences: mean and interval, tests of difference and of equivalence, Holm's correction."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.stats import chi2, norm
from scipy.stats import t as student_t

LEVEL = 0.05
POWER = 0.8
# Points of the numerical integral over standard deviations.
_POINTS = 4_000
# Standard errors below this are rounding errors of equal runs.
_TINY = 1e-12


@dataclass(frozen=True)
class Paired:
    """The mean of n paired differences."""

    mean: float
    error: float
    """Standard error of the mean; NaN for n < 2."""
    count: int

    @classmethod
    def of(cls, differences: Sequence[float]) -> Paired:
        """Returns the mean of differences.

        Raises:
            ValueError: there are none.
        """
        if not differences:
            raise ValueError("A comparison needs at least one pair; got none.")
        count = len(differences)
        error = statistics.stdev(differences) / math.sqrt(count) if count > 1 else math.nan
        return cls(statistics.fmean(differences), error, count)

    @property
    def half_width(self) -> float:
        """Half of the 95% interval, by Student's t; NaN for n < 2."""
        return float(student_t.isf(LEVEL / 2, self.count - 1)) * self.error if self.count > 1 else math.nan

    @property
    def p(self) -> float | None:
        """The two-sided test that the mean is 0; None for n < 2."""
        if self.count < 2:
            return None
        if self.error < _TINY:
            return float(abs(self.mean) < _TINY)
        return float(2 * student_t.sf(abs(self.mean) / self.error, self.count - 1))

    def equivalence_p(self, margin: float) -> float | None:
        """The two one-sided tests (TOST) that the mean is beyond -margin or margin; None for n < 2.

        A p below 0.05 shows that the true difference lies within the margin.
        """
        if self.count < 2:
            return None
        room = margin - abs(self.mean)
        if self.error < _TINY:
            return float(room <= 0)
        return float(student_t.sf(room / self.error, self.count - 1))

    @property
    def detectable(self) -> float | None:
        """The smallest true difference that the test finds with power 0.8, if the spread found is the true one."""
        if self.count < 2:
            return None
        if self.error < _TINY:
            return 0.0
        high = self.error
        while self.power(high) < POWER:
            high *= 2
        return float(brentq(lambda effect: self.power(effect) - POWER, 0.0, high, rtol=1e-6))

    def power(self, effect: float) -> float:
        """Returns the probability that the test at 5% rejects 0 if the true difference is `effect`.

        Integrates the normal distribution of the mean over the chi-square distribution of the estimated variance:
        scipy's noncentral t is NaN for large effects.
        """
        freedom = self.count - 1
        spreads = np.sqrt(chi2.ppf((np.arange(_POINTS) + 0.5) / _POINTS, freedom) / freedom)
        bound, shift = student_t.isf(LEVEL / 2, freedom), abs(effect) / self.error
        return float(np.mean(norm.sf(bound * spreads - shift) + norm.sf(bound * spreads + shift)))

    def __str__(self) -> str:
        return f"{self.mean:+.3f}" + (f" ± {self.half_width:.3f}" if self.count > 1 else "")


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """Returns the p values of one family of tests after Holm's correction; None stays None and is not counted.

    Holm (1979): the k-th smallest of m is multiplied by m - k + 1, is at least its predecessor, and at most 1.
    """
    order = sorted((p, place) for place, p in enumerate(ps) if p is not None)
    corrected: list[float | None] = [None] * len(ps)
    largest = 0.0
    for rank, (p, place) in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p))
        corrected[place] = largest
    return corrected
