"""How measurements become a plan: `snip` and every baseline, behind one small interface.

A policy either needs a probe, and gives every choice a cost for the integer program, or is a rule, and gives the
assignment outright. Both meet the target share, of FLOPs or of measured time, in every stage, never from below. What
the program decides, or a rule orders, are groups: linears at granularity "layer", (linear, GEMM) pairs at granularity
"gemm".
"""

from __future__ import annotations

from collections.abc import Callable

from ..config import SnipConfig
from ..estimation.criteria import CRITERIA
from ..estimation.layer_sums import LAYER
from ..estimation.table import Divergence, DivergenceTable
from .rules import ORDERS


def needs_probe(config: SnipConfig) -> bool:
    """Tells whether the policy decides from measurements (and refreshes), or is a rule or a file (and stays)."""
    return config.plan is None and config.policy in _COSTS


def needs_weights(config: SnipConfig) -> bool:
    """Tells whether the policy aims at a share of FLOPs or time; the uniform ones and a plan file do not."""
    return config.plan is None and (config.policy in _COSTS or config.policy in ORDERS)


def cost_of(config: SnipConfig, table: DivergenceTable) -> Callable[[Divergence], float]:
    """Returns what a row of the table costs under a policy that needs a probe."""
    return _COSTS[config.policy](config, table)


def _snip_cost(config: SnipConfig, table: DivergenceTable) -> Callable[[Divergence], float]:
    """Both divergences, each divided by its total under "everything in FP4" (docs/method.md, section 4)."""
    parts: list[tuple[float, Callable[[Divergence], float]]] = [
        (config.loss_weight, lambda row: row.loss_divergence),
        (config.weight_weight * _WEIGHT_SHARES[config.objective], _WEIGHT_PARTS[config.objective]),
    ]
    whole = [row for row in table.rows if row.format == "fp4" and row.gemm == LAYER]
    # Divergences in the form "taylor" may be below 0.
    totals = [sum(abs(part(row)) for row in whole) for _, part in parts]
    scaled = [(weight / total, part) for (weight, part), total in zip(parts, totals, strict=True) if total > 0]
    return lambda row: sum(weight * part(row) for weight, part in scaled)


def _over_steps(row: Divergence) -> float:
    """The square of what `_HORIZON` steps add up to: the bias grows with their number, the rest with its root."""
    square, bias = row.weight_divergence**2, (row.weight_bias or 0.0) ** 2
    return _HORIZON**2 * bias + _HORIZON * max(0.0, square - bias)


def _absolute_cost(config: SnipConfig, table: DivergenceTable) -> Callable[[Divergence], float]:
    return lambda row: row.absolute_error or 0.0


def _relative_cost(config: SnipConfig, table: DivergenceTable) -> Callable[[Divergence], float]:
    return lambda row: row.relative_error or 0.0


def _criterion_cost(config: SnipConfig, table: DivergenceTable) -> Callable[[Divergence], float]:
    """The criterion of `criteria`, divided by its total under "everything in FP4": some are of the size of 1e-9."""
    criteria = {(row.layer, row.gemm, row.format): row.criterion for row in table.rows}
    total = sum(value or 0.0 for (_, gemm, fmt), value in criteria.items() if gemm == LAYER and fmt == "fp4")
    missing = sum(value is None for value in criteria.values())
    if missing or total <= 0:
        raise ValueError(
            f"policy={config.policy!r} cannot decide: its criterion is missing in {missing} of {len(criteria)} rows, "
            f"and sums to {total} in FP4. Expected a table that was made under this policy, and a sum above 0."
        )
    return lambda row: (row.criterion or 0.0) / total


_HORIZON = 100
_WEIGHT_PARTS: dict[str, Callable[[Divergence], float]] = {
    "additive": lambda row: row.weight_divergence**2,
    "horizon": _over_steps,
    "paper": lambda row: row.weight_divergence,
}
# Measured (docs/fidelity.md): over 100 and 1,000 steps the loss divergence alone ranks plans best. A tenth of the
# weight divergence changes next to nothing there and decides between GEMMs that the loss divergence does not see.
_WEIGHT_SHARES = {"additive": 0.1, "horizon": 0.1, "paper": 1.0}
_COSTS = {
    "snip": _snip_cost,
    "min-abs-err": _absolute_cost,
    "min-rel-err": _relative_cost,
    **dict.fromkeys(CRITERIA, _criterion_cost),
}
