"""The quantities of a run that trackers plot: of the plan in force, and of each event. Every tracker gets these names.

Shares, whose names begin with `fp4_`, stand beside the loss; all other names are under `snip/`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..estimation.coverage import Coverage
from ..planning.forward_shares import forward_shares
from ..planning.plan import PrecisionPlan
from ..records.coverage import Counted
from ..records.events import Event, Refresh, Start
from ..records.interventions import Alarm, Retarget

PREFIX = "snip/"


def quantities_in_force(plan: PrecisionPlan, coverage: Coverage | None) -> dict[str, float]:
    """Returns the FP4 share of a plan.

    Beside it stand the share of the forward GEMMs, if plans decide on these alone, and, where it is known, the
    coverage, and its product with the FP4 share, the one of the whole model. Nothing where the share is not known.
    """
    if not plan.is_share_known:
        return {}
    found = {"fp4_share": plan.fp4_fraction}
    forward = forward_shares(plan)
    if forward is not None:
        found["fp4_share_of_forward"] = forward.fp4_fraction
    if coverage is not None:
        found["fp4_coverage"] = coverage.share
        found["fp4_share_of_model"] = coverage.share * plan.fp4_fraction
    return {name: round(value, 4) for name, value in found.items()}


def quantities_of(event: Event) -> dict[str, float]:
    """Returns the numbers of an event by their names; those that are not known, or not finite, are left out."""
    if isinstance(event, Start):
        plan = event.plan
        found: dict[str, float | None] = {"fp4_share": round(plan.fp4_fraction, 4) if plan.is_share_known else None}
    elif isinstance(event, Counted):
        found = {"fp4_coverage": round(event.coverage.share, 4), "gemms_changed_by_tokens": len(event.changes)}
    elif isinstance(event, Alarm):
        found = {
            "fp4_share": None if event.fp4_fraction is None else round(event.fp4_fraction, 4),
            "guard_failures": float(event.failures),
            "guard_value": event.value,
            "guard_limit": event.limit,
            "guard_left_out_steps": float(event.left_out),
        }
    elif isinstance(event, Retarget):
        found = {f"new_{name}": now for name, (_, now) in event.fields.items() if isinstance(now, float)}
    else:
        found = _of_refresh(event)
    named = {name if name.startswith("fp4_") else PREFIX + name: value for name, value in found.items()}
    return {name: value for name, value in named.items() if value is not None and math.isfinite(value)}


def step_of(event: Event) -> int:
    """Returns the optimizer step at which an event is known."""
    return event.decided_step if isinstance(event, Refresh) else event.step


def settings(config: Mapping[str, Any], backend: str) -> dict[str, Any]:
    """Returns what a run's configuration in a tracker says of SNIP: the fields of `SnipConfig`, and the backend.

    Args:
        config: as `SnipConfig.to_dict` has it.
        backend: the one in use.
    """
    return {**config, "backend_in_use": backend}


def _of_refresh(event: Refresh) -> dict[str, float | None]:
    found: dict[str, float | None] = {
        "fp4_share": None if event.fp4_fraction is None else round(event.fp4_fraction, 4),
        "applied": float(event.applied_step is not None),
        "probed_step": event.step,
        "probed_loss": event.loss,
        "target_fp4_fraction": event.target_fp4_fraction,
        "forward_fp4_fraction": event.forward_fp4_fraction,
        "fp4_time_fraction": event.fp4_time_fraction,
        "linear_speedup": event.linear_speedup,
        "layers_changed": event.layers_changed,
        "gemms_changed": len(event.changes),
        "objective": event.objective,
        "gap": event.gap,
    }
    for format, totals in event.divergence.items():
        found |= {f"{kind}_divergence_{format}": value for kind, value in totals.items()}
    found |= {f"{part}_seconds": value for part, value in event.seconds.items()}
    found |= {f"memory_mib_{part}": value for part, value in event.memory_mib.items()}
    found |= dict(event.kernels)
    if len(event.stage_fp4_fractions) > 1:
        found |= {f"fp4_share_of_stage_{index}": value for index, value in enumerate(event.stage_fp4_fractions)}
    return found
