"""The refresh of a plan: probe, integer program, a solver beside training, and a new plan at a fixed step.

The planner may fail, training may not: after any failure the plan in force stays, with a warning and an event.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..estimation.divergence import divergences_at
from ..estimation.memory import measured_peak
from ..estimation.optimizer_step import compared_parameters
from ..estimation.table import DivergenceTable
from ..estimation.ties import Ties
from ..parallel.ranks import Processes
from ..planning.program import problem
from ..planning.solver.process import FALLBACK, SolverError, SolverProcess, SolverResult, solver_of
from ..policies.registry import policy_of
from ..python_state import collecting_no_garbage
from ..records.events import RefreshBegun
from ..records.run_folder import RunRecord
from .gradients import LATE, Clipping, GradientSource
from .micro_batches import NOT_CAPTURED, StepWatch
from .plan_in_force import PlanInForce, solved_plan
from .swapped_layers import SwappedLayers

# Failures that every solver would have. With solver="auto", any other failure leads to the next solver.
_OF_PROBLEM = ("infeasible", "bad problem")
# A possible reason why ranks wait for each other.
_RUNS_OUT = "a rank that runs out of batches, as under DDP's Join, never comes to it"
_UNTRAINED = (
    "the optimizer holds no trained parameter of the model (make it from those of the prepared or sharded model)"
)
# Seconds that training waits for a solver beyond its time limit before the plan in force is kept.
GRACE = 30.0


@dataclass
class PendingRefresh:
    """A refresh between its probe and its application."""

    step: int
    due: int
    """The step after which its plan is applied."""
    problem: dict[str, Any]
    begun: RefreshBegun
    """Its event so far."""
    process: SolverProcess | None = None

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> PendingRefresh:
        """Reads the result of `to_dict`; raises KeyError, TypeError or ValueError if it is damaged."""
        begun = replace(RefreshBegun.from_record(saved["record"]), step=int(saved["step"]))
        return cls(begun.step, int(saved["due"]), dict(saved["problem"]), begun)

    def to_dict(self) -> dict[str, Any]:
        return {"step": self.step, "due": self.due, "problem": self.problem, "record": self.begun.to_record()}


def _check_table(table: DivergenceTable) -> None:
    for row in table.rows:
        if not all(map(math.isfinite, (row.loss_divergence, row.weight_divergence, row.criterion or 0.0))):
            raise ValueError(
                f"The divergences of layer {row.layer!r} are not finite; expected finite activations and gradients."
            )
    if table.rows and not any(row.loss_divergence or row.weight_divergence for row in table.rows):
        raise ValueError(
            "The loss of the probed micro-batch has no gradient, so all divergences are 0 and do not tell the layers "
            "apart. In reinforcement learning, all advantages of the micro-batch are 0 if all completions of a prompt "
            "have the same reward."
        )


class Refresher:
    """Runs the refreshes of one run, one at a time. Collective.

    Args:
        model: the model, or the parts of it that this process holds.
        in_force: the plan that a refresh replaces.
        layers: the swapped ones.
        source: of the gradients.
        processes: those of the run.
        record: gets refreshes and divergences.
        solver: the first one to ask.
    """

    def __init__(
        self,
        model: nn.Module,
        in_force: PlanInForce,
        layers: SwappedLayers,
        source: GradientSource,
        processes: Processes,
        record: RunRecord,
        solver: str,
    ) -> None:
        self.pending: PendingRefresh | None = None
        """The refresh whose plan is not applied yet."""
        self._model, self._in_force, self._layers, self._source = model, in_force, layers, source
        self._processes, self._everyone, self._record = processes, processes.everyone, record
        self._log, self._config = record.log, in_force.setting.config
        self._solver = solver
        """The solver in use; it changes after a failure."""
        self._was_trained = False
        """True if the optimizer trained the model when training began."""

    def watch(self) -> StepWatch:
        """Begins to watch a step that is to be probed."""
        layers = self._layers.present
        tokens = self._config.probe_batch_tokens
        if tokens is not None:  # this rank's part; a pipeline runs whole batches
            tokens = None if self._processes.run else max(1, tokens // self._processes.data.size)
        # As far as this process knows: stages of a pipeline decide together only when the gradients are read.
        beside = compared_parameters(self._model, layers, self._source.trains(), self._config).others or {}
        clipping = Clipping(layers, self._source.unclipped(self._model), beside)
        return StepWatch(tokens, clipping, self._processes.context)

    def is_planned(self, step: int) -> bool:
        """Returns True if a probe has led, or is about to lead, to a plan for the target of a step."""
        made = self._in_force.plan.provenance.step
        is_current = made > 0 and self._config.target_at(made) == self._config.target_at(step)
        return self.pending is not None or is_current

    def begin(self, step: int, watch: StepWatch | None) -> None:
        """Probes the step and starts the solver.

        Args:
            step: the optimizer step that is about to be taken, from 1.
            watch: of the step; None: nobody captured it, and the refresh fails.
        """
        self.note(f"at the refresh of step {step}")
        with self._in_force.keeping(step):
            with self._everyone.together():
                if watch is None:
                    raise ValueError(NOT_CAPTURED)
                _ = watch.batch
                self._layers.check()
                if self._source.is_late:
                    raise ValueError(LATE)
            self._begin(step, watch)

    def end_step(self, step: int) -> None:
        """Applies a plan that is due, or follows a target by rule. Called after each optimizer step."""
        self.apply_due(step)
        self._in_force.follow_target(step)

    def apply_due(self, step: int) -> None:
        """Applies the pending plan if it is due at this step; waits for the solver if it must."""
        pending = self.pending
        if pending is not None and step >= pending.due:
            self.pending = None
            self.note(f"at the application of the plan of step {pending.step}")
            with self._in_force.keeping(step, lambda: pending.begun):
                self._apply(pending, step)

    def resume(self, pending: PendingRefresh, step: int) -> None:
        """Solves the program of a refresh from a checkpoint of this step again."""
        with self._in_force.keeping(step, lambda: pending.begun):
            pending.problem = pending.problem | {"solver": self._solver}
            pending.process = self._start_solver(pending.problem)
            self.pending = pending

    def tie(self, ties: Ties) -> None:
        """Ties layers by the last parts of their names, in decisions and in kernels."""
        if self._in_force.tie(ties):
            text = "; ".join(", ".join(tie) for tie in ties) or "none"
            self._log.info("snip-hf: linears that take the same input, and so share their formats: %s.", text)
            self._layers.share_inputs(self._in_force.setting)

    def stop(self) -> PendingRefresh | None:
        """Ends a running solver; returns the refresh that is lost."""
        pending, self.pending = self.pending, None
        if pending is not None and pending.process is not None:
            pending.process.kill()
        return pending

    def drop(self, step: int, reason: str) -> None:
        """Drops the pending refresh, if there is one, with an event."""
        pending = self.stop()
        if pending is not None:
            reason = f"{reason}, before step {pending.due} at which its plan was due"
            self._in_force.keep(step, pending.begun, reason, "was not applied")

    def warn_if_untrained(self) -> None:
        """Warns if no rank has a weight divergence to measure. Collective."""
        self._was_trained = any(self._everyone.gather(self._is_trained()))
        if not self._was_trained:
            self._log.warning("snip-hf: %s, so only the loss divergence decides.", _UNTRAINED)

    def _begin(self, step: int, watch: StepWatch) -> None:
        config, layers = self._config, self._layers.present
        if self._was_trained and not any(self._everyone.gather(self._is_trained())):
            raise ValueError(
                f"{_UNTRAINED}, unlike when training began. To continue with another optimizer, close the controller "
                "and build a new one."
            )
        if config.budget == "measured" and self._in_force.setting.measured is None:
            self._in_force.measure_cost(config.timing_tokens or watch.counts.tokens)
        began = time.perf_counter()
        with measured_peak(next(iter(layers.values())).weight) as peak:
            table = self._divergences(step, watch)
        self.tie(table.ties)
        program = problem(self._in_force.setting.at_step(step), table) | {"solver": self._solver}
        begun = replace(
            self._in_force.begun(step),
            loss=table.loss,
            divergence={fmt: table.totals(fmt) for fmt in reversed(config.formats)},
            memory_mib={"measured": peak[0]},
            seconds={"probe": time.perf_counter() - began, "solver": None, "waited": None},
            kernels=self._layers.counters,
        )
        self._record.write_divergences(step, table)
        process = self._start_solver(program)
        self.pending = PendingRefresh(step, step + config.apply_delay, program, begun, process)

    def _divergences(self, step: int, watch: StepWatch) -> DivergenceTable:
        """Returns the divergences of the running step.

        Raises:
            ValueError: anything is not finite, or everything is 0.
        """
        layers = self._layers.present
        with collecting_no_garbage():
            table = divergences_at(
                self._model,
                batch=watch.batch,
                optimizer_step=self._source.read(self._model, layers, self._config, watch, self._everyone),
                config=self._config,
                step=step,
                processes=self._processes,
            )
        _check_table(table)
        # The stages that one process of a pipeline holds need not be neighbours.
        order = {layer: index for index, layer in enumerate(self._in_force.setting.flops)}
        return replace(table, rows=tuple(sorted(table.rows, key=lambda row: order[row.layer])))

    def note(self, place: str) -> None:
        """Names the point at which the ranks exchange data next, for messages about waiting."""
        self._processes.note(f"{place} ({_RUNS_OUT})")

    def _is_trained(self) -> bool:
        """Returns False if this rank has no weight divergence to measure, and the policy needs it."""
        return not policy_of(self._config).weighs_updates or self._source.is_trained(self._model)

    def _start_solver(self, program: dict[str, Any]) -> SolverProcess | None:
        """Starts solving on the first rank; raises on all of them if that fails."""
        started: list[SolverProcess] = []
        self._everyone.by_first(lambda: started.append(SolverProcess.start(program)))
        return started[0] if started else None

    def _solution(self, pending: PendingRefresh) -> SolverResult:
        """Returns the answer of the solver, or of HiGHS if solver="auto" and CBC fails; on the first rank."""
        while True:
            assert pending.process is not None
            try:
                return pending.process.result(self._config.solver_time_limit + GRACE)
            except SolverError as error:
                can_go_on = solver_of(self._config) == "auto" and error.reason not in _OF_PROBLEM
                if not can_go_on or self._solver == FALLBACK:
                    raise
                self._solver = FALLBACK
                self._log.warning("snip-hf: from now on solver='auto' uses %r, because: %s", self._solver, error)
                if error.reason == "timeout":  # other ranks would not wait that long twice
                    raise
                pending.process = SolverProcess.start(pending.problem | {"solver": self._solver})

    def _apply(self, pending: PendingRefresh, step: int) -> None:
        began = time.perf_counter()
        result = self._everyone.by_first(lambda: self._solution(pending))
        with self._everyone.together():
            self._layers.check()
        seconds = {**pending.begun.seconds, "solver": result.seconds, "waited": time.perf_counter() - began}
        pending.begun = replace(pending.begun, seconds=seconds)
        plan = solved_plan(self._in_force.setting, self._in_force.model_name, pending.step, result)
        changes = self._in_force.plan.changes(plan)
        self._in_force.put(plan)
        applied = pending.begun.applied(step, plan, changes, result)
        self._record.add(applied)
        self._log.info(
            "snip-hf: plan of step %d applied after step %d: %s, %d layers changed; the probe took %.1f s, the solver "
            "%.1f s, waiting for it %.1f s.",
            pending.step,
            step,
            plan.describe(),
            applied.layers_changed,
            *(seconds[part] for part in ("probe", "solver", "waited")),
        )
