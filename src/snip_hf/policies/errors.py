"""The paper's baselines "min-abs-err" and "min-rel-err", which use only local quantization errors."""

from __future__ import annotations

from ..config import SnipConfig
from ..estimation.table import DivergenceTable
from .registry import Cost, Policy, register_policy


def _absolute(config: SnipConfig, table: DivergenceTable) -> Cost:
    return lambda row: row.absolute_error or 0.0


def _relative(config: SnipConfig, table: DivergenceTable) -> Cost:
    return lambda row: row.relative_error or 0.0


register_policy(Policy(name="min-abs-err", cost=_absolute))
register_policy(Policy(name="min-rel-err", cost=_relative))
