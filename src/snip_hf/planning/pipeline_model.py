"""The cost of a pipeline's stages, and what one constraint per stage saves against one global constraint.

Everything here is a prediction from the linears' GEMMs alone. With measured times (`budget="measured"`) it is in
seconds on the machine of the plan; otherwise on a modelled one, whose FP4 runs at twice FP8's rate
(`NumberFormat.speed`). Times are compared with those of a plan that has everything in one format, the reference.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..config import SnipConfig
from ..costs.measured_cost import predicted_times
from ..estimation.table import DivergenceTable
from ..numerics.formats import REFERENCE
from ..policies.registry import needs_probe
from ..policies.setting import Setting
from ..policies.ties import names_of
from .plan import PrecisionPlan
from .program import problem
from .solver.ilp import evaluate
from .solver.process import SolverProcess

MICRO_BATCHES_PER_STAGE = 4
# Comparisons of names that a config from elsewhere may ask for: a few seconds' worth.
MOST_COMPARISONS = 10**7
# Seconds that a comparison may take, whatever limit the run's own solver had.
_TIME_LIMIT = 10.0


@dataclass(frozen=True)
class StageTimes:
    """One stage under a plan; the unit of the times is that of `PipelineTimes`."""

    layers: tuple[str, ...]
    fp4_fraction: float
    """Share (0..1) of the stage's linear FLOPs that run in FP4."""
    time: float
    """Of its linears for one micro-batch, forward and backward."""
    reference_time: float
    """The same with all of them in the reference format (`PipelineTimes.reference`)."""

    @property
    def relative_time(self) -> float:
        return self.time / self.reference_time


@dataclass(frozen=True)
class PipelineTimes:
    """A training step that sends micro-batches through the stages one after the other, under one plan."""

    stages: tuple[StageTimes, ...]
    fp4_fraction: float
    """Of all stages together."""
    micro_batches: int
    measured: bool
    """Whether times are in seconds; otherwise 1 is the time of all linears in the reference, for one micro-batch."""
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
        as in 1F1B, and in GPipe wherever the same stage is the slowest both forward and backward; where different
        ones are, GPipe takes longer. 1F1B with unequal stages takes less (simulated, two to six stages whose times
        differ by up to a factor of 2: 0.8 to 1 times this): a slow stage works while others fill.
        """
        return (self.micro_batches - 1) * max(stage.time for stage in self.stages) + self.work

    @property
    def bubble(self) -> float:
        """Share (0..1) of the stages' time in a step that they wait: 1 - m * mean_s t_s / step_time."""
        return 1.0 - self.micro_batches * self.work / len(self.stages) / self.step_time


@dataclass(frozen=True)
class ConstraintComparison:
    """A plan that meets its target in every stage, and the best one that meets it only over all layers together."""

    per_stage: PipelineTimes
    single: PipelineTimes
    """The other plan's, in the same stages."""
    per_stage_objective: float
    single_objective: float

    @property
    def time_saved(self) -> float:
        """Part of the step time that the constraints per stage save; below 0, they lengthen the step."""
        return 1.0 - self.per_stage.step_time / self.single.step_time

    @property
    def bubble_saved(self) -> float:
        """Difference of the two bubbles; below 0, the constraints per stage enlarge it."""
        return self.single.bubble - self.per_stage.bubble


def pipeline_times(plan: PrecisionPlan, micro_batches: int | None = None) -> PipelineTimes:
    """Predicts what the stages of a plan take, from measured times where all formats of the plan were timed.

    Args:
        micro_batches: per step; None means four times the number of stages.

    Raises:
        ValueError: fewer than one micro-batch, or a stage whose time is negligible beside the others'.
    """
    count = MICRO_BATCHES_PER_STAGE * len(plan.stages) if micro_batches is None else micro_batches
    if count < 1:
        raise ValueError(f"micro_batches is {count}, expected at least 1; it is the number per optimizer step.")
    measured = plan.times if plan.is_timed else None
    times = predicted_times(plan.executed, measured)
    reference = REFERENCE.name if measured is None else measured.reference

    def total(stage: Iterable[str], format: str | None = None) -> float:
        return math.fsum(times[x][gemm][format or name] for x in stage for gemm, name in plan.assignment[x].items())

    stages = tuple(
        StageTimes(stage, share, total(stage), total(stage, reference))
        for stage, share in zip(plan.stages, plan.stage_fp4_fractions, strict=True)
    )
    for index, stage_times in enumerate(stages):
        if not (stage_times.time > 0 and stage_times.reference_time > 0):
            raise ValueError(f"stage {index} takes no time next to the others; its FLOPs or times cannot be real.")
    return PipelineTimes(stages, plan.fp4_fraction, count, measured is not None, reference)


def compare_constraints(
    plan: PrecisionPlan, table: DivergenceTable, micro_batches: int | None = None
) -> ConstraintComparison:
    """Solves the plan's problem again with one constraint over all layers in place of one per stage.

    Target, costs and ties stay. The solver runs in a process of its own, for 10 s at most.

    Args:
        plan: with the config that it was made under in its provenance.
        table: the divergences that it was decided from (divergence-<step>.json).
        micro_batches: as in `pipeline_times`.

    Raises:
        ValueError: there is nothing to compare: one stage, a plan made without divergences or from others than these,
            or a part of its problem is not known any more; the message says which.
        SolverError: the solver found no other plan.
    """
    config = _config_of(plan)
    foreign = [row.layer for row in table.rows if row.layer not in plan.assignment]
    if foreign:
        raise ValueError(f"the divergences are of another model: the plan has no layer {foreign[0]!r}.")
    check_ties_are_few(config, len(plan.assignment))
    everything = tuple(layer for stage in plan.stages for layer in stage)
    setting = Setting(config, plan.flops, (everything,), plan.measured, plan.tokens)
    program = problem(setting.at_step(plan.provenance.step), table)
    program["time_limit"] = min(program["time_limit"], _TIME_LIMIT)
    decided = {}
    for group in setting.groups(everything):
        layer, gemm = setting.members(group)[0]
        decided[group] = plan.assignment[layer][gemm]
    if not set(decided.values()) <= set(config.formats) or setting.assignment(decided) != plan.to_dict()["assignment"]:
        raise ValueError(
            f"the plan was not decided by {config.granularity} between {' and '.join(reversed(config.formats))}."
        )
    with SolverProcess.start(program) as process:
        result = process.result()
    other = replace(plan, assignment=setting.assignment(result.choices))
    return ConstraintComparison(
        pipeline_times(plan, micro_batches),
        pipeline_times(other, micro_batches),
        evaluate(program, decided)[0],
        result.objective,
    )


def check_ties_are_few(config: SnipConfig, layers: int) -> None:
    """Raises ValueError if the config ties so many names that looking for them would take minutes."""
    names = sum(map(len, names_of(config)))
    if names * layers > MOST_COMPARISONS:
        raise ValueError(f"ties has {names:,} names, which are too many to look for among {layers:,} layers.")


def _config_of(plan: PrecisionPlan) -> SnipConfig:
    """Returns the config of the plan's problem; raises as `compare_constraints` where there was no problem."""
    if len(plan.stages) == 1:
        raise ValueError("there is one stage, whose constraint is the global one.")
    if plan.provenance.config is None:
        raise ValueError("the plan does not say under which config it was made.")
    config = SnipConfig.from_dict(plan.provenance.config)
    if not needs_probe(config):
        how = f"policy {config.policy!r} decides" if config.fixed_plan is None else "a plan file was held"
        raise ValueError(f"{how} without divergences.")
    if config.budget == "measured" and plan.measured is None:
        raise ValueError("the times that the plan was decided by are not known (nothing was timed yet, or it is lost).")
    return config
