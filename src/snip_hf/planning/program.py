"""The integer program of a refresh: turns a table of divergences into a problem for the solver."""

from __future__ import annotations

import math
from typing import Any

from ..config import POLICIES
from ..estimation.table import LAYER, DivergenceTable
from ..policies.registry import Policy
from ..policies.setting import Setting, tied_groups
from ..policies.target import check_attainable, contributions, least_sum
from .solver.process import solver_of

# The solver may stop at this relative gap between the best plan and its bound.
_RELATIVE_GAP = 1e-4


def problem(setting: Setting, table: DivergenceTable) -> dict[str, Any]:
    """Returns the integer program (`solver.ilp`) of a policy that needs a probe.

    Args:
        setting: config, FLOPs, stages and measured costs of the run.
        table: the divergences, with a row for every layer, GEMM and format.

    Raises:
        ValueError: the policy cannot price the table, or the measured times show that no plan meets the target.
    """
    config = setting.config
    check_attainable(setting, config.formats)
    policy: Policy = POLICIES[config.policy]
    assert policy.cost is not None
    cost = policy.cost(config, table)
    rows = {(row.layer, row.gemm, row.format): row for row in table.rows}
    groups, constraints = [], []
    for index, stage in enumerate(setting.stages):
        counted = contributions(setting, stage)
        for group, count_of in counted.items():
            layer, gemm = setting.members(group)[0] if config.granularity == "gemm" else (group, LAYER)
            options = []
            for fmt in reversed(config.formats):
                # BF16 has no row and costs nothing; neither do layers that saw no token in the probe.
                try:
                    damage = float(cost(rows[layer, gemm, fmt])) if (layer, gemm, fmt) in rows else 0.0
                except Exception as error:  # a policy may raise anything
                    raise ValueError(
                        f"policy={config.policy!r} cannot price {group!r} in {fmt}: {type(error).__name__}: {error}"
                    ) from error
                if not math.isfinite(damage):
                    raise ValueError(
                        f"policy={config.policy!r} prices {group!r} in {fmt} at {damage}; expected a finite number."
                    )
                options.append({"name": fmt, "cost": damage + policy.spare * count_of[fmt], "weight": count_of[fmt]})
            groups.append({"name": group, "options": options})
        constraints.append({"name": f"stage {index}", "groups": list(counted), "minimum": least_sum(setting)})
    return {
        "groups": groups,
        "constraints": constraints,
        "ties": tied_groups(setting),
        "solver": solver_of(config),
        "time_limit": config.solver_time_limit,
        "relative_gap": _RELATIVE_GAP,
    }
