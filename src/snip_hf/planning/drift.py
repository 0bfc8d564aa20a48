"""The drift of the layers' ranking since the plan in force was made, found by one cheap pass (ours).

Layers are ranked by their cost in the least precise format, under the policy's own objective. Only figures that need no
derivative of the model are used: the loss divergence, the part of the weight divergence that comes from grad_weight,
and the errors. A refresh finds the same figures among others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ..budget_checks import FORWARD
from ..estimation.pending import LAYER
from ..estimation.table import DivergenceTable
from ..numerics.gemms import GEMMS
from ..policies.registry import cost_of
from ..policies.setting import Setting


def ranking(setting: Setting, table: DivergenceTable) -> dict[str, float]:
    """Returns layer -> its cost in the least precise format by the policy's objective, as far as one pass knows it.

    It is the cost of what plans decide on: of all GEMMs, or of the forward ones.

    Args:
        setting: the run's setting, with a policy that needs a probe. Its granularity and switching cost do not count.
        table: what `divergences_at` returned, with any number of probes.
    """
    low = setting.config.least_precise
    if setting.config.decides == FORWARD:
        return _ranking_of_forward(setting, table)
    grad_weight = {row.layer: row for row in table.rows if (row.gemm, row.format) == ("grad_weight", low)}
    rows = []
    for row in (row for row in table.rows if (row.gemm, row.format) == (LAYER, low)):
        part = grad_weight.get(row.layer)  # which a frozen weight does not have
        divergence, bias = (0.0, 0.0) if part is None else (part.weight_divergence, part.weight_bias)
        rows.append(replace(row, weight_divergence=divergence, weight_bias=bias))
    cost = cost_of(setting.config, replace(table, rows=tuple(rows)))
    costs = {row.layer: cost(row) for row in rows}
    return {layer: costs.get(layer, 0.0) for layer in setting.flops}


def _ranking_of_forward(setting: Setting, table: DivergenceTable) -> dict[str, float]:
    low = setting.config.least_precise
    found = (row for row in table.rows if (row.gemm, row.format) == (GEMMS[0], low))
    # Their weight divergence takes a derivative of the model. As rows of layers, they are what totals are made of.
    rows = tuple(replace(row, gemm=LAYER, weight_divergence=0.0, weight_bias=0.0) for row in found)
    cost = cost_of(setting.config, replace(table, rows=rows))
    costs = {row.layer: cost(row) for row in rows}
    return {layer: costs.get(layer, 0.0) for layer in setting.flops}


def rank_correlation(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Returns Spearman's rank correlation, -1..1, of two rankings of the same layers; equal costs share a rank.

    Equal rankings correlate to 1, also where all their costs are equal; a ranking of equal costs and another to 0.

    Raises:
        ValueError: the layers are not the same, or a cost is not finite.
    """
    if set(one) != set(other):
        raise ValueError(f"The rankings are of {len(one)} and {len(other)} layers; expected the same layers in both.")
    from scipy.stats import rankdata  # 0.2 s, which importing the package should not take

    costs = np.array([[costs[layer] for layer in one] for costs in (one, other)])
    if not np.isfinite(costs).all():
        raise ValueError("The cost of a layer is not finite; expected finite activations and gradients.")
    ranks = rankdata(costs, axis=1)
    if np.array_equal(ranks[0], ranks[1]):
        return 1.0
    if any(np.ptp(row) == 0 for row in ranks):
        return 0.0
    return float(np.corrcoef(ranks)[0, 1])
