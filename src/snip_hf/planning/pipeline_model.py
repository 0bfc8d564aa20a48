"""The predicted time of a pipeline's stages under a plan.

Everything here is predicted from the linears' GEMMs only. With measured times (`budget="measured"`) it is in
seconds on the machine of the plan; otherwise on a modelled one, whose FP4 runs at twice FP8's rate
(`NumberFormat.speed`). Times are compared with those of a plan that has everything in one format, the reference.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ..costs.rates import linear_times
from ..numerics.formats import REFERENCE
from .plan import PrecisionPlan

MICRO_BATCHES_PER_STAGE = 4


@dataclass(frozen=True)
class StageTimes:
    """One stage under a plan; the unit of the times is that of `PipelineTimes`."""

    time: float
    """Time of its linears for one micro-batch, forward and backward."""
    reference_time: float
    """The same with all of them in the reference format (`PipelineTimes.reference`)."""

    @property
    def relative_time(self) -> float:
        return self.time / self.reference_time


@dataclass(frozen=True)
class PipelineTimes:
    """Predicted times of a pipelined training step under one plan."""

    stages: tuple[StageTimes, ...]
    micro_batches: int
    measured: bool
    """True: times are in seconds. False: 1 is the time of all linears in the reference, for one micro-batch."""
    reference: str = REFERENCE.name
    """The format that times are compared with: that of the measured budget (`MeasuredCost.reference`), or FP8."""

    @property
    def work(self) -> float:
        """Time of all stages for one micro-batch."""
        return math.fsum(stage.time for stage in self.stages)

    @property
    def reference_work(self) -> float:
        return math.fsum(stage.reference_time for stage in self.stages)

    @property
    def step_time(self) -> float:
        """(m - 1) * max_s t_s + sum_s t_s, for m micro-batches and stages that take t_s for one, forward and backward.

        Assumes that the linears are all that a stage does (no attention, norms, embeddings, optimizer step) and that
        sending activations and gradients takes no time. Under these it is exact for stages of one duration, in GPipe
        as in 1F1B, and in GPipe if the same stage is the slowest both forward and backward. If the slowest stage
        differs between passes, GPipe takes longer. 1F1B with unequal stages takes less (simulated, two to six stages
        whose times differ by up to a factor of 2: 0.8 to 1 times this): a slow stage works while others fill.
        """
        return (self.micro_batches - 1) * max(stage.time for stage in self.stages) + self.work

    @property
    def bubble(self) -> float:
        """Share (0..1) of a step that stages spend waiting: 1 - m * mean_s t_s / step_time."""
        return 1.0 - self.micro_batches * self.work / len(self.stages) / self.step_time


def pipeline_times(plan: PrecisionPlan, micro_batches: int | None = None) -> PipelineTimes:
    """Predicts the times of a plan's stages, from measured times if all formats of the plan were timed.

    Args:
        micro_batches: per step; None means four times the number of stages.
    """
    count = MICRO_BATCHES_PER_STAGE * len(plan.stages) if micro_batches is None else micro_batches
    measured = plan.times if plan.is_timed else None
    reference = REFERENCE.name if measured is None else measured.reference
    times = linear_times(plan.executed, plan.formats | {reference}, "ideal", measured)

    def total(layers: Iterable[str], format: str | None = None) -> float:
        return math.fsum(times[x][gemm][format or name] for x in layers for gemm, name in plan.assignment[x].items())

    unit = total(plan.assignment, reference) if measured is None else 1.0
    stages = tuple(StageTimes(total(stage) / unit, total(stage, reference) / unit) for stage in plan.stages)
    return PipelineTimes(stages, count, measured is not None, reference)
