"""Statistics of paired differences: the interval of a mean, its test, Holm's correction, and the power of the test.

The unit is the fork; forks of one base count as what they have in common lets them (`mixed_model`). Differences are in
percent of the loss.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import brentq
from scipy.stats import chi2, norm
from scipy.stats import t as student_t

from .mixed_model import mixed_mean
from .significance import SIGNIFICANCE, TINY

_CONFIDENCE = 0.95
# Points of the integral that a test's power is.
_DEVIATIONS = 20_000
# A difference that a test finds with this probability is called detectable, as is usual.
DETECTION = 0.8
# More forks than anybody will run.
_MOST_FORKS = 10_000


@dataclass(frozen=True)
class Difference:
    """Mean of paired differences."""

    mean: float
    deviation: float
    """Standard deviation of the paired differences (n - 1); NaN for fewer than two."""
    forks: int
    error: float
    """Standard error of the mean."""
    freedom: float
    """Degrees of freedom of the standard error."""
    between: float = math.nan
    """Standard deviation of what forks of one base have in common; NaN where it cannot be estimated."""

    @classmethod
    def of(cls, differences: Sequence[float], bases: Sequence[Hashable] | None = None) -> Difference:
        """Returns the mean of differences.

        Args:
            differences: one per fork.
            bases: that of each fork; None: they have nothing in common.
        """
        count = len(differences)
        if count < 2:
            return cls.independent(float(differences[0]) if count else math.nan, math.nan, count)
        found = mixed_mean(differences, range(count) if bases is None else bases)
        deviation = float(np.std(differences, ddof=1))
        return cls(found.mean, deviation, count, found.error, found.freedom, found.between)

    @classmethod
    def independent(cls, mean: float, deviation: float, forks: int) -> Difference:
        """Returns the mean of forks that have nothing in common."""
        return cls(mean, deviation, forks, deviation / math.sqrt(forks) if forks else math.nan, forks - 1)

    @property
    def half_width(self) -> float:
        """Of the 95% interval of the mean, by Student's t."""
        if self.forks < 2:
            return math.nan
        return float(student_t.ppf((1 + _CONFIDENCE) / 2, self.freedom)) * self.error

    @property
    def p(self) -> float | None:
        """Two-sided test that the mean is 0, uncorrected; None for fewer than two forks."""
        if self.forks < 2:
            return None
        if self.error < TINY:  # The t statistic would be 0 / 0 or infinite.
            return float(abs(self.mean) < TINY)
        return float(2 * student_t.sf(abs(self.mean) / self.error, self.freedom))

    def power(self, effect: float, level: float = SIGNIFICANCE) -> float | None:
        """Returns the probability that the test at this level rejects 0 if `effect` is true.

        The deviation found is taken for the true one. None for fewer than two forks.
        """
        if self.forks < 2:
            return None
        if self.error < TINY:
            return 1.0
        freedom = self.freedom
        bound, shift = student_t.isf(level / 2, freedom), abs(effect) / self.error
        # Given the deviation that an experiment finds, relative to the true one, t is normal: the mean over deviations.
        # scipy's noncentral t is NaN for large shifts.
        found = _relative_deviations(freedom)
        return float(np.mean(norm.sf(bound * found - shift) + norm.sf(bound * found + shift)))

    def detectable(self, level: float = SIGNIFICANCE) -> float | None:
        """Returns the smallest true difference that the test at this level finds with the power `DETECTION`.

        The deviation found is taken for the true one. None for fewer than two forks.
        """
        if self.forks < 2:
            return None
        if self.error < TINY:
            return 0.0

        def excess(effect: float) -> float:
            power = self.power(effect, level)
            assert power is not None
            return power - DETECTION

        # The power at 0 is the level, which is below.
        above = self.error
        while excess(above) < 0:
            above *= 2
        return float(brentq(excess, 0.0, above, rtol=1e-6))

    def forks_for(self, effect: float, level: float = SIGNIFICANCE) -> int | None:
        """Returns how many forks, of as many bases in proportion, find `effect` with the power `DETECTION`.

        The error shrinks with the root of their number. None for fewer than two forks, or above 10,000.
        """
        if self.forks < 2:
            return None
        few, many = 2, _MOST_FORKS
        if not self._finds(effect, level, many):
            return None
        while few < many:
            middle = (few + many) // 2
            few, many = (few, middle) if self._finds(effect, level, middle) else (middle + 1, many)
        return few

    def _finds(self, effect: float, level: float, forks: int) -> bool:
        """Returns True if so many forks find `effect` with the power `DETECTION`."""
        factor = forks / self.forks
        # n forks of one kind have n - 1 degrees of freedom; those of a mixed model grow as the forks do.
        freedom = max(1.0, (self.freedom + 1) * factor - 1)
        power = replace(self, forks=forks, error=self.error / math.sqrt(factor), freedom=freedom).power(effect, level)
        return power is not None and power >= DETECTION

    def __str__(self) -> str:
        if not self.forks:
            return "-"
        return f"{self.mean:+.3f}" + (f" ± {self.half_width:.3f}" if self.forks > 1 else "")


@functools.lru_cache(maxsize=512)
def _relative_deviations(freedom: float) -> np.ndarray:
    """Returns deviations that experiments find, relative to the true one, all equally likely."""
    deviations: np.ndarray = np.sqrt(chi2.ppf((np.arange(_DEVIATIONS) + 0.5) / _DEVIATIONS, freedom) / freedom)
    return deviations


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """Returns the p-values of one family of tests after Holm's correction; None stays and is not counted.

    Holm (1979): the k-th smallest of m is multiplied by m - k + 1, is at least the one before it, and at most 1.
    """
    order = sorted((p, place) for place, p in enumerate(ps) if p is not None)
    corrected: list[float | None] = [None] * len(ps)
    largest = 0.0
    for rank, (p, place) in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p))
        corrected[place] = largest
    return corrected
