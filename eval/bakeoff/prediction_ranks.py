"""How well a predictor orders formats by the loss that forks measured: rank correlations with their uncertainty.

Two questions, two figures. Would other forks give another order? The interval: forks are drawn anew, the same ones for
all formats. Could the order be luck, with so few formats? The p: formats swap their predictions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import rankdata

from snip_hf.numerics.formats import FORMATS, UNQUANTIZED

Array = np.ndarray[Any, Any]
ForkKey = tuple[Any, ...]

# Fewer have too few orders for a correlation to say anything.
LEAST_FORMATS = 4
_RESAMPLES, _PERMUTATIONS = 2000, 10000
_TINY = 1e-9


@dataclass(frozen=True)
class Agreement:
    """Rank correlations of a predictor with measured losses, each with the 2.5% and 97.5% quantiles over forks."""

    formats: int
    spearman: tuple[float, float, float] | None
    """None for fewer than LEAST_FORMATS formats."""
    kendall: tuple[float, float, float] | None
    p: float | None
    """Share of the orders of formats with at least this Spearman correlation."""


def paired_differences(lines: Sequence[Mapping[str, Any]], loss: str) -> dict[str, dict[ForkKey, float]]:
    """Returns format -> fork -> difference to BF16 in percent, of contenders whose GEMMs all run in one format.

    Raises:
        ValueError: no line is of BF16.
    """
    losses: dict[str, dict[ForkKey, float]] = {}
    for line in lines:
        format, fork = line["spec"].get("format"), line["fork"]
        if format in FORMATS and line["spec"]["gemms"] == "all" and not line["diverged"]:
            key = (fork["base_seed"], fork["point"], fork["data_seed"], line["state"])
            losses.setdefault(format, {})[key] = line["loss"][loss]
    bf16 = losses.pop(UNQUANTIZED.name, None)
    if not bf16:
        raise ValueError(f"No line is of the contender {UNQUANTIZED.name!r}, to which differences are taken.")
    found = {
        name: {key: 100 * (value / bf16[key] - 1) for key, value in own.items() if key in bf16}
        for name, own in losses.items()
    }
    return {name: own for name, own in found.items() if own}


def agreement(predicted: Mapping[str, float], measured: Mapping[str, Mapping[ForkKey, float]]) -> Agreement:
    """Returns how well predictions order the measured means, over the formats that both have."""
    names = [name for name in measured if name in predicted]
    if len(names) < LEAST_FORMATS:
        return Agreement(len(names), None, None, None)
    forks = sorted({key for name in names for key in measured[name]}, key=repr)
    table = np.array([[measured[name].get(key, math.nan) for key in forks] for name in names])
    values, truth = np.array([predicted[name] for name in names]), np.nanmean(table, axis=1)
    draws = np.random.default_rng(0).integers(len(forks), size=(_RESAMPLES, len(forks)))
    parts = table[:, draws].transpose(1, 0, 2)
    resampled = np.nanmean(parts[~np.isnan(parts).all(axis=2).any(axis=1)], axis=2)
    return Agreement(
        len(names),
        _with_interval(spearman(values, truth), spearman(values, resampled)),
        _with_interval(kendall(values, truth), kendall(values, resampled)),
        _share_above(values, truth),
    )


def spearman(x: Array, y: Array) -> Array:
    """Returns Spearman's rank correlation of x (N,) with each row of y (..., N); NaN where one is constant."""
    first, second = (ranks - ranks.mean(-1, keepdims=True) for ranks in (rankdata(x), rankdata(y, axis=-1)))
    with np.errstate(invalid="ignore"):
        return np.asarray((first * second).sum(-1) / np.sqrt((first**2).sum(-1) * (second**2).sum(-1)))


def kendall(x: Array, y: Array) -> Array:
    """Returns Kendall's tau-b, as `spearman`."""
    first, second = (np.sign(values[..., :, None] - values[..., None, :]) for values in (x, y))
    with np.errstate(invalid="ignore"):
        product, squares = first * second, (first**2).sum((-2, -1)) * (second**2).sum((-2, -1))
        return np.asarray(product.sum((-2, -1)) / np.sqrt(squares))


def _with_interval(value: Array, resampled: Array) -> tuple[float, float, float]:
    low, high = np.nanquantile(resampled, [0.025, 0.975])
    return float(value), float(low), float(high)


def _share_above(values: Array, truth: Array) -> float:
    """Returns the share of the orders of `values` with at least this correlation, of all or of random ones."""
    count = len(values)
    if math.factorial(count) <= _PERMUTATIONS:
        orders = np.array(list(itertools.permutations(range(count))))
    else:  # with the order that is there
        random = np.random.default_rng(0)
        orders = np.concatenate(
            [[np.arange(count)], random.permuted(np.tile(np.arange(count), (_PERMUTATIONS, 1)), axis=1)]
        )
    return float(np.mean(spearman(truth, values[orders]) >= spearman(values, truth) - _TINY))
