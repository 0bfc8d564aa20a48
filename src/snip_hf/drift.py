"""Has the ranking of the layers moved since the plan in force was made? One cheap pass tells (ours).

A layer's rank is that of what it costs in FP4 by the policy's own objective, with the figures that need no derivative
of the model: the loss divergence, the part of the weight divergence that comes from grad_weight, and the errors. A
refresh has the same figures among its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from .divergence import DivergenceTable
from .formats import GEMMS
from .policies import Setting, problem
from .terms import LAYER


def ranking(setting: Setting, table: DivergenceTable) -> dict[str, float]:
    """Returns layer -> its cost in FP4 by the policy's objective, as far as one pass knows it.

    Args:
        setting: of the policy, which has to be one that needs a probe. Its granularity and switching cost do not count.
        table: of `divergences_at`, with any number of probes.
    """
    grad_weight = {row.layer: row for row in table.rows if (row.gemm, row.format) == ("grad_weight", "fp4")}
    rows = []
    for row in table.rows:
        if (row.gemm, row.format) == (LAYER, "fp4"):
            part = grad_weight.get(row.layer, row)
            rows.append(replace(row, weight_divergence=part.weight_divergence, weight_bias=part.weight_bias))
    whole_layers = replace(setting, config=replace(setting.config, granularity="layer", switching_cost=0.0))
    in_force = {layer: dict.fromkeys(GEMMS, "fp4") for layer in setting.flops}
    program = problem(whole_layers, replace(table, rows=tuple(rows)), in_force)
    return {
        group["name"]: option["cost"]
        for group in program["groups"]
        for option in group["options"]
        if option["name"] == "fp4"
    }


def rank_correlation(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Returns Spearman's rank correlation, -1..1, of two rankings of the same layers; equal costs share a rank.

    Equal rankings correlate to 1, also where all their costs are equal; a ranking of equal costs and another to 0.

    Raises:
        ValueError: the layers are not the same, or a cost is not finite.
    """
    if set(one) != set(other):
        raise ValueError(f"The rankings are of {len(one)} and {len(other)} layers; expected the same layers in both.")
    costs = np.array([[costs[layer] for layer in one] for costs in (one, other)])
    if not np.isfinite(costs).all():
        raise ValueError("The cost of a layer is not finite; expected finite activations and gradients.")
    ranks = np.array([_ranks(row) for row in costs])
    if np.array_equal(ranks[0], ranks[1]):
        return 1.0
    centred = ranks - ranks.mean(axis=1, keepdims=True)
    norms = np.linalg.norm(centred, axis=1)
    return float(centred[0] @ centred[1] / norms.prod()) if norms.all() else 0.0


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the rank of each value, from 1; equal values get the mean of their ranks."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    means: NDArray[np.float64] = np.cumsum(counts) - (counts - 1) / 2
    return means[which]
