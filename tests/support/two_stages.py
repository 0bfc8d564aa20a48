"""Four layers in two pipeline stages: their plan, divergences and measured times."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from configs import fp4_config

from snip_hf.costs.timing import Machine, MeasuredCost
from snip_hf.estimation.table import Divergence, DivergenceTable
from snip_hf.numerics.gemms import GEMMS
from snip_hf.planning.plan import PlanProvenance, PrecisionPlan

# Stage 0 holds a and c, stage 1 b and d; FLOPs of a whole layer: 30, 10, 20, 40.
FLOPS = {
    "a": {"forward": 10.0, "grad_input": 10.0, "grad_weight": 10.0},
    "b": {"forward": 5.0, "grad_input": 5.0, "grad_weight": 0.0},
    "c": {"forward": 5.0, "grad_input": 5.0, "grad_weight": 10.0},
    "d": {"forward": 10.0, "grad_input": 10.0, "grad_weight": 20.0},
}
STAGES = (("a", "c"), ("b", "d"))


def plan(in_fp4: str, config: Mapping[str, Any] | None = None, **changes: Any) -> PrecisionPlan:
    """The plan with these layers in FP4, made by minimum absolute error unless `config` says otherwise."""
    values = fp4_config(policy="min-abs-err", granularity="layer", target_fp4_fraction=0.2).to_dict() | dict(
        config or {}
    )
    provenance = PlanProvenance(step=10, policy=values["policy"], config=values)
    assignment = {layer: dict.fromkeys(GEMMS, "fp4" if layer in in_fp4 else "fp8") for layer in FLOPS}
    return dataclasses.replace(PrecisionPlan(assignment, FLOPS, STAGES, provenance), **changes)


def table(errors: Mapping[str, float], gemms: Sequence[str] = ("layer",)) -> DivergenceTable:
    rows = [
        Divergence(layer, gemm, fmt, 0.0, 0.0, 1.0, absolute_error=error * (fmt == "fp4"))
        for layer, error in errors.items()
        for gemm in gemms
        for fmt in ("fp8", "fp4")
    ]
    return DivergenceTable(0.0, tuple(rows))


def measured(high: Mapping[str, float], formats: tuple[str, str] = ("fp4", "fp8")) -> MeasuredCost:
    """Every GEMM takes as long as its layer has in the second format, twice that in BF16, 0.8 of it in the first."""
    low, reference = formats
    seconds = {
        layer: {
            gemm: {
                "bf16": 2 * high[layer] * (FLOPS[layer][gemm] > 0),
                reference: high[layer] * (FLOPS[layer][gemm] > 0),
                low: 0.8 * high[layer] * (FLOPS[layer][gemm] > 0),
            }
            for gemm in GEMMS
        }
        for layer in FLOPS
    }
    machine = Machine("a GPU", "2.11.0", "hopper", "bfloat16")
    return MeasuredCost(machine=machine, tokens=512, seconds=seconds, reference=reference)
