"""TODO."""

from __future__ import annotations

from typing import Any

from ..estimation.criteria import CRITERIA
from ..estimation.layer_sums import LAYER
from ..estimation.table import CHOICES, DivergenceTable
from ..policies.criteria import cost_of
from ..policies.setting import Assignment, Setting, tied_groups


def problem(setting: Setting, table: DivergenceTable, in_force: Assignment) -> dict[str, Any]:
    """Returns the integer program (`snip_hf.ilp`) of a policy that needs a probe.

    Args:
        setting: as above.
        table: the measurements, with a row for every layer, GEMM and choice.
        in_force: the assignment in force, for the switching cost.
    """
    config = setting.config
    cost = cost_of(config, table)
    rows = {(row.layer, row.gemm, row.format): row for row in table.rows}
    groups, constraints = [], []
    count = sum(len(setting.groups(stage)) for stage in setting.stages)
    spare = _SPARE if config.policy in CRITERIA else 0.0
    for index, stage in enumerate(setting.stages):
        shares = setting.shares(stage)
        for group in shares:
            members = setting.members(group)
            layer, gemm = members[0] if config.granularity == "gemm" else (group, LAYER)
            options = []
            for fmt in CHOICES:
                changes = any(in_force[name][part] != fmt for name, part in members)
                # A layer that took no part in the probe (an expert without tokens) has no row and costs nothing.
                damage = cost(rows[layer, gemm, fmt]) if (layer, gemm, fmt) in rows else 0.0
                weight = shares[group] if fmt == "fp4" else 0.0
                extra = config.switching_cost / count * changes + spare * weight
                options.append({"name": fmt, "cost": damage + extra, "weight": weight})
            groups.append({"name": group, "options": options})
        constraints.append({"name": f"stage {index}", "groups": list(shares), "minimum": config.target_fp4_fraction})
    return {
        "groups": groups,
        "constraints": constraints,
        "ties": tied_groups(setting),
        "solver": "greedy" if config.policy == "greedy" else config.solver,
        "time_limit": config.solver_time_limit,
        "relative_gap": config.solver_gap,
    }


# Criteria give some groups no cost at all. That these do not go to FP4 beyond the target, what is in FP4 costs a
# thousandth of all cost per stage (ours); among plans that meet the target exactly it decides nothing.
_SPARE = 1e-3
