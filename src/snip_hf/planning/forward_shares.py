"""The FP4 shares of a plan's forward GEMMs, which are what it is judged by if it decides on these alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ..config import FORWARD
from ..costs.flops import Work
from ..numerics.formats import FORMATS
from ..numerics.gemms import GEMMS
from .plan import PrecisionPlan


@dataclass(frozen=True)
class ForwardShares:
    """Shares (0..1) of the forward GEMMs alone that run in FP4."""

    fp4_fraction: float
    """Of their FLOPs."""
    stage_fp4_fractions: tuple[float, ...]
    """Of their FLOPs in each stage."""
    fp4_time_fraction: float | None
    """Of their measured time; None: nothing was measured."""

    def describe(self) -> str:
        """Returns them as the log shows them, after the shares of all GEMMs."""
        stages = ", ".join(f"{share:.1%}" for share in self.stage_fp4_fractions)
        time = "" if self.fp4_time_fraction is None else f" and {self.fp4_time_fraction:.1%} of their time"
        return f"{self.fp4_fraction:.1%} of the forward GEMMs alone (per stage: {stages}){time}"


def forward_shares(plan: PrecisionPlan) -> ForwardShares | None:
    """Returns the shares of a plan that decides on forward GEMMs alone (`SnipConfig.decides`); None for any other."""
    if (plan.provenance.config or {}).get("decides") != FORWARD:
        return None
    work, times = plan.executed, plan.times
    return ForwardShares(
        forward_fraction(plan, plan.assignment, work),
        tuple(forward_fraction(plan, stage, work) for stage in plan.stages),
        None if times is None else forward_fraction(plan, plan.assignment, times.work),
    )


def forward_fraction(plan: PrecisionPlan, layers: Iterable[str], work: Work) -> float:
    """Returns the share of these layers' forward work that a plan has in FP4; 0 if there is no such work."""
    gemm = GEMMS[0]
    numbers = {layer: work[layer][gemm] for layer in layers}
    low = [number for layer, number in numbers.items() if FORMATS[plan.assignment[layer][gemm]].counts_as_fp4]
    whole = math.fsum(numbers.values())
    return math.fsum(low) / whole if whole > 0 else 0.0
