"""Events of a run as tests write them into a history, and the rows of a file of divergences as tests read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from snip_hf.estimation.coverage import Coverage, Uncovered
from snip_hf.numerics.gemms import GEMMS
from snip_hf.planning.plan import PlanProvenance, PrecisionPlan
from snip_hf.records.events import Counted, Refresh, Start


def small_plan(format: str = "fp4") -> PrecisionPlan:
    """A plan of one layer, "a"."""
    provenance = PlanProvenance(step=0, policy="snip")
    return PrecisionPlan.uniform({"a": dict.fromkeys(GEMMS, 1.0)}, format, [["a"]], provenance)


def start_event(plan: PrecisionPlan | None = None, **changes: Any) -> Start:
    config = {"policy": "snip", "formats": ["fp4", "fp8"], "ties": []}
    values = {"step": 0, "config": config, "plan": plan or small_plan(), "model_name": "tiny"}
    return Start(**values | changes)


def refresh_event(step: int, **changes: Any) -> Refresh:
    """A refresh that kept its plan at the step that it probed."""
    values = {"applied_step": None, "decided_step": step, "reason": "no", "fp4_fraction": 1.0}
    return Refresh(step=step, **values | changes)


def counted_event(step: int = 1, **changes: Any) -> Counted:
    """A count that found 40% covered, all by one layer, "a"."""
    rest = [
        Uncovered("layers.*.experts.down_proj", "MoE experts", 0.5, "no registered layer kind handles [Bank]"),
        Uncovered("layers.*.gate", "router", 0.1, "router"),
    ]
    values: dict[str, Any] = {"coverage": Coverage(200.0, 80.0, rest, {"output head": 50.0}), "tokens": None}
    return Counted(step=step, **values | changes)


def records_of(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a file of divergences as objects."""
    return [dict(zip(document["columns"], row, strict=True)) for row in document["rows"]]
