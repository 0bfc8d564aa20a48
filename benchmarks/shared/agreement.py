"""How well two figures per layer agree: rank correlations with intervals, ratios, and the reliability of a truth.

Legend: N layers, R resamples of the layers, P independent parts of a measurement (draws, batches).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from snip_hf.config import SnipConfig

from .loss_estimators import LOSS_BASELINES
from .weight_estimators import WEIGHT_BASELINES

Array = npt.NDArray[np.float64]
Record = dict[str, Any]
# (layer, row, format) -> squared weight divergence, (batches, halves of the draws)
WeightTruth = dict[tuple[str, str, str], Array]
RESAMPLES = 200
# Ways of cutting P parts in two halves that a reliability is averaged over.
SPLITS = 20


def rank_figures(estimate: Array, truth: Array, seed: int = 0) -> dict[str, float | list[float]]:
    """Returns Spearman's rho and Kendall's tau-b over N layers, each with the 5% and 95% quantiles of a bootstrap."""
    resampled = np.random.default_rng(seed).multinomial(len(truth), [1 / len(truth)] * len(truth), RESAMPLES)
    counts = np.concatenate([np.ones((1, len(truth))), resampled])  # how often each layer is in, (1 + R, N)
    above = _above(estimate), _above(truth)
    figures: dict[str, float | list[float]] = {}
    for name, values in (("spearman", _spearman(*above, counts)), ("kendall", _kendall(*above, counts))):
        figures[name] = float(values[0])
        figures[f"{name}_90"] = [float(x) for x in np.nanquantile(values[1:], [0.05, 0.95])]
    return figures


def _above(x: Array) -> Array:
    """Returns 1 where the row's figure is above the column's, -1 where it is below, (N, N)."""
    signs: Array = np.sign(x[:, None] - x[None, :])
    return signs


def _spearman(above_x: Array, above_y: Array, counts: Array) -> Array:
    """Correlation of the ranks that layers have within each resample, (R,)."""
    total = counts.sum(1, keepdims=True)
    x, y = (counts @ above.T for above in (above_x, above_y))  # twice the rank, but for a constant
    x, y = (ranks - (counts * ranks).sum(1, keepdims=True) / total for ranks in (x, y))
    with np.errstate(invalid="ignore"):
        correlation: Array = (counts * x * y).sum(1) / np.sqrt((counts * x * x).sum(1) * (counts * y * y).sum(1))
    return correlation


def _kendall(above_x: Array, above_y: Array, counts: Array) -> Array:
    """Pairs in the same order less pairs in the other, by the pairs without ties, (R,)."""

    def pairs(matrix: Array) -> Array:
        total: Array = ((counts @ matrix) * counts).sum(1)
        return total

    with np.errstate(invalid="ignore"):
        correlation: Array = pairs(above_x * above_y) / np.sqrt(pairs(above_x**2) * pairs(above_y**2))
    return correlation


def ratio_figures(estimate: Array, truth: Array) -> dict[str, float | list[float]]:
    """Returns the median and 90th percentile of |estimate / truth - 1|, and the quartiles of estimate / truth."""
    ratio = estimate / truth
    error = np.abs(ratio - 1)
    return {
        "median_error": float(np.median(error)),
        "error_90": float(np.quantile(error, 0.9)),
        "ratio_quartiles": [float(x) for x in np.quantile(ratio, [0.25, 0.5, 0.75])],
    }


def variation(truth: Array) -> float:
    """Returns the coefficient of variation over layers."""
    return float(truth.std() / truth.mean())


def reliability(parts: Array, root: bool) -> dict[str, float] | None:
    """Returns the split-half reliability of the mean of P parts, Spearman's and Pearson's, None for P < 2.

    That is how two halves of the measurement correlate over layers, corrected to its full length (Spearman-Brown). No
    other figure can be expected to correlate with the truth by more than its square root.

    Args:
        parts: (P, N).
        root: whether the figure is the square root of the mean.
    """
    if len(parts) < 2:
        return None
    generator = np.random.default_rng(0)
    found = []
    for _ in range(1 if len(parts) == 2 else SPLITS):
        order = generator.permutation(len(parts))
        halves = [parts[order[start::2]].mean(0) for start in (0, 1)]
        one, other = (np.sqrt(half) if root else half for half in halves)
        found.append((_spearman(_above(one), _above(other), np.ones((1, len(one))))[0], np.corrcoef(one, other)[0, 1]))
    spearman, pearson = (float(2 * r / (1 + r)) for r in np.mean(found, axis=0))
    return {"spearman": spearman, "pearson": pearson}


# ------------------------------------------------------------------------------------------------ records of a case


def raw_record(
    weight_truth: WeightTruth,
    weight: dict[str, list[Any]],
    loss_truth: dict[tuple[str, str], Array],
    loss: dict[str, list[Any]],
) -> Record:
    """Returns every layer's figures: lists over "cells" (layer, row, format) or "loss_cells" (layer, format)."""

    def per_batch(estimates: dict[str, list[Any]], cells: Any) -> Record:
        return {name: [[table.get(cell) for cell in cells] for table in tables] for name, tables in estimates.items()}

    return {
        "kind": "raw",
        "cells": ["|".join(cell) for cell in weight_truth],
        "weight_truth_squares": [values.tolist() for values in weight_truth.values()],
        "weight_estimates": per_batch(weight, weight_truth),
        "loss_cells": ["|".join(cell) for cell in loss_truth],
        "loss_truth": [values.tolist() for values in loss_truth.values()],
        "loss_estimates": per_batch(loss, loss_truth),
    }


def weight_records(truth: WeightTruth, estimates: dict[str, list[Any]]) -> Iterator[Record]:
    """Yields a line per format and row for the truth, and one per scope and estimator.

    Scopes: "one" is the estimate from the first micro-batch against the truth over all of them, "own" the same against
    the truth of that micro-batch, "all" the root mean square of the estimates against that of the truths.
    """
    for row, fmt in dict.fromkeys((row, fmt) for _, row, fmt in truth):
        layers = [layer for layer, *rest in truth if rest == [row, fmt]]
        counted = [layer for layer in layers if truth[layer, row, fmt].mean() > 0]
        if not counted:
            continue
        squares = np.stack([truth[layer, row, fmt] for layer in counted], -1)  # (batches, halves, layers)
        true = {"own": np.sqrt(squares[0].mean(0)), "all": np.sqrt(squares.mean((0, 1)))}
        true["one"] = true["all"]
        where = {"format": fmt, "row": row, "layers": len(counted)}
        yield {
            "kind": "weight-truth",
            **where,
            "layers_without": len(layers) - len(counted),
            "variation": variation(true["all"]),
            "reliability_draws": reliability(squares.mean(0), root=True),
            "reliability_batches": reliability(squares.mean(1), root=True),
        }
        for name, tables in estimates.items():
            if (counted[0], row, fmt) not in tables[0]:
                continue
            values = np.array([[table[layer, row, fmt] for layer in counted] for table in tables])
            combined = values.mean(0) if name in WEIGHT_BASELINES else np.sqrt((values**2).mean(0))
            for scope, estimate in {"one": values[0], "own": values[0], "all": combined}.items():
                figures: Record = rank_figures(estimate, true[scope])
                if name not in WEIGHT_BASELINES:
                    figures.update(ratio_figures(estimate, true[scope]))
                    figures["ratio_of_kind"] = by_kind(counted, estimate / true[scope])
                yield {"kind": "weight", "estimator": name, **where, "scope": scope, **figures}


def by_kind(layers: Sequence[str], ratio: Array) -> dict[str, float]:
    """Returns the median ratio of the layers of each kind, such as down_proj."""
    kinds = np.array([layer.rsplit(".", 1)[-1] for layer in layers])
    return {str(kind): float(np.median(ratio[kinds == kind])) for kind in dict.fromkeys(kinds.tolist())}


def loss_records(truth: dict[tuple[str, str], Array], estimates: dict[str, list[Any]]) -> Iterator[Record]:
    """Yields a line per format for the truth, and one per scope and estimator: scopes "one" and "all" as above."""
    for fmt in SnipConfig().formats[::-1]:
        layers = [layer for layer, other in truth if other == fmt]
        rises = np.stack([truth[layer, fmt] for layer in layers], -1)  # (batches, layers)
        true = rises.mean(0)
        count = len(rises)
        errors = rises.std(0, ddof=1) / count**0.5 if count > 1 else np.full(len(layers), np.nan)
        yield {
            "kind": "loss-truth",
            "format": fmt,
            "layers": len(layers),
            "batches": count,
            "median": float(np.median(true)),
            "median_standard_error": float(np.median(errors)),
            "variation": variation(true),
            "reliability": reliability(rises, root=False),
        }
        for key, tables in estimates.items():
            name, _, tokens = key.partition("/")
            values = np.array([[table.get((layer, fmt), np.nan) for layer in layers] for table in tables])
            for scope, estimate in {"one": values[0], "all": values.mean(0)}.items():
                figures: Record = rank_figures(estimate, true)
                if name not in LOSS_BASELINES:
                    risen = true > 0
                    figures["median_ratio"] = float(np.median((estimate / true)[risen])) if risen.any() else None
                    figures["ratio_of_sums"] = float(estimate.sum() / true.sum())
                where = {"format": fmt, "layers": len(layers), "scope": scope}
                yield {"kind": "loss", "estimator": name, "tokens": int(tokens), **where, **figures}
