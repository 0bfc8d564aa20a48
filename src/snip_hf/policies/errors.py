"""The paper's baselines "min-abs-err" and "min-rel-err", which use only local quantization errors."""

from __future__ import annotations

from .registry import Policy, register_policy

register_policy(Policy(name="min-abs-err", cost=lambda config, table: lambda row: row.absolute_error or 0.0))
register_policy(Policy(name="min-rel-err", cost=lambda config, table: lambda row: row.relative_error or 0.0))
