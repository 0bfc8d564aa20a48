"""Prices that are a policy's own criterion."""

from __future__ import annotations

from typing import Any

from ..config import SnipConfig
from ..estimation.criterion import LayerCriterion
from ..estimation.table import DivergenceTable
from .registry import Cost, Policy, register_policy
from .totals import first_total

# Criteria give some groups no cost at all: see `Policy.spare`. A thousandth of all cost per stage (ours).
_SPARE = 1e-3


def criterion_cost(config: SnipConfig, table: DivergenceTable) -> Cost:
    """The criterion by its total with everything in the least precise format: some are of the size of 1e-9."""
    criteria = {(row.layer, row.gemm, row.format): row.criterion for row in table.rows}
    total = first_total(config, table, lambda row: row.criterion or 0.0)
    missing = sum(value is None for value in criteria.values())
    if missing or total <= 0:
        raise ValueError(
            f"policy={config.policy!r} cannot decide: its criterion is missing in {missing} of {len(criteria)} rows, "
            f"and sums to {total} in {config.least_precise.upper()}. Expected a table made under this policy, and a "
            "sum above 0."
        )
    return lambda row: (row.criterion or 0.0) / total


def register_criterion(name: str, criterion: type[LayerCriterion], **facts: Any) -> Policy:
    """Registers the policy that decides by a criterion, and returns it."""
    return register_policy(Policy(name=name, cost=criterion_cost, criterion=criterion, spare=_SPARE, **facts))
