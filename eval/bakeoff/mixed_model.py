"""The mean of differences whose forks share bases: a mixed model, in which the bases are a random sample.

difference of a fork = mean + effect of its base + noise, both normal. A contender that does better than another on one
base may do so on all forks of it: these forks are then less than so many independent ones. Variances are estimated by
restricted maximum likelihood (REML), degrees of freedom after Satterthwaite. With one fork per base, or where the bases
explain nothing, this is the paired t-test.

Legend: N forks, G bases, n_g forks of a base; `ratio` is the variance of the bases' effects by that of the noise.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize_scalar

# Natural logarithms of the ratios between which the likelihood is searched.
_RATIOS = (-12.0, 24.0)


@dataclass(frozen=True)
class MixedMean:
    """A mean with its standard error."""

    mean: float
    error: float
    freedom: float
    """Degrees of freedom of the error."""
    between: float
    """Standard deviation of the bases' effects; NaN where each base has one fork, or there is one base."""
    within: float
    """Standard deviation of the noise of one fork."""


def mixed_mean(differences: Sequence[float], bases: Sequence[Hashable]) -> MixedMean:
    """Returns the mean over bases and forks.

    Args:
        differences: of each fork.
        bases: of each fork.

    Raises:
        ValueError: fewer than two forks, or not as many bases as differences.
    """
    values = np.array(differences, dtype=float)
    if len(values) < 2 or len(values) != len(bases):
        raise ValueError(f"got {len(values)} differences and {len(bases)} bases; expected as many, and at least 2.")
    _, group = np.unique([str(base) for base in bases], return_inverse=True)
    sizes = np.bincount(group)
    if len(sizes) == len(values) or len(sizes) == 1:
        return _independent(values, math.nan)
    means = np.bincount(group, values) / sizes
    inside = float(((values - means[group]) ** 2).sum())

    def fitted(ratio: float) -> tuple[float, float, float]:
        """Returns mean, sum of weights and weighted sum of squares."""
        weights = sizes / (1 + sizes * ratio)
        mean = float((weights * means).sum() / weights.sum())
        return mean, float(weights.sum()), inside + float((weights * (means - mean) ** 2).sum())

    def deviance(ratio: float) -> float:
        """Returns -2 times the restricted log likelihood, up to a constant."""
        _, weight, squares = fitted(ratio)
        return float((len(values) - 1) * math.log(squares) + np.log(1 + sizes * ratio).sum() + math.log(weight))

    if inside == 0:  # forks of one base are all the same
        return _independent(means, float(means.std(ddof=1)))
    found = minimize_scalar(lambda log: deviance(math.exp(log)), bounds=_RATIOS, method="bounded")
    if found.fun >= deviance(0.0) - 1e-9:
        return _independent(values, 0.0)
    ratio = math.exp(found.x)
    mean, weight, squares = fitted(ratio)
    noise = squares / (len(values) - 1)
    freedom = _satterthwaite(group, noise, ratio * noise)
    return MixedMean(mean, math.sqrt(noise / weight), freedom, math.sqrt(ratio * noise), math.sqrt(noise))


def _independent(values: np.ndarray, between: float) -> MixedMean:
    """Returns the mean of values that have nothing in common."""
    deviation = float(values.std(ddof=1))
    return MixedMean(float(values.mean()), deviation / math.sqrt(len(values)), len(values) - 1, between, deviation)


def _satterthwaite(group: np.ndarray, noise: float, between: float) -> float:
    """Returns the degrees of freedom of the mean's variance.

    They are 2 variance^2 by the variance of its estimate, from the information on the two variance components.

    Args:
        group: number of each fork's base, (N,).
        noise, between: variances of the noise and of the bases' effects.
    """
    shared = (group[:, None] == group).astype(float)
    inverse = np.linalg.inv(noise * np.eye(len(group)) + between * shared)
    row = inverse.sum(0)
    projection = inverse - np.outer(row, row) / row.sum()
    parts = [projection, projection @ shared]
    information = np.array([[0.5 * np.trace(one @ other) for other in parts] for one in parts])
    variance = 1 / row.sum()
    slope = variance**2 * np.array([row @ row, row @ shared @ row])
    return float(2 * variance**2 / (slope @ np.linalg.solve(information, slope)))
