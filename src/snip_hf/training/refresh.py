"""The refresh of a plan: probe, integer program, a solver beside training, and the application at a fixed step.

The planner may fail, training may not: whatever goes wrong keeps the plan in force, with a warning and an event
that says so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..estimation.memory import measured_peak
from ..estimation.shared_inputs import Ties
from ..planning.program import problem
from ..planning.solver.process import FALLBACK, SolverError, SolverProcess, SolverResult, solver_of
from ..policies.registry import weighs_updates
from ..records.event_writer import EventWriter
from .checkpoint import PendingRefresh
from .micro_batches import StepWatch
from .plans import PlanInForce, describe_plan, solved_plan
from .step_probe import StepProbe

# Failures that are the problem's and no solver's: with solver="auto", any other one leads to the next solver.
_OF_PROBLEM = ("infeasible", "bad problem")


def start_solver(program: dict[str, Any]) -> SolverProcess:
    """Starts solving in a process of its own."""
    return SolverProcess.start(program)


@dataclass(frozen=True)
class Solving:
    """How refreshes have their programs solved."""

    start: Callable[[dict[str, Any]], SolverProcess] = start_solver
    """Starts to solve a program and returns at once."""
    grace: float = 30.0
    """Seconds that training waits for a solver beyond its time limit before the plan in force is kept."""
    rank_grace: float = 660.0
    """Seconds that a rank waits for the others beyond the solver's time limit before training ends with an error."""
    clock: Callable[[], float] = time.perf_counter
    """Seconds, for the history."""


class Refresher:
    """Runs the refreshes of one run, one at a time.

    Args:
        in_force: the plan that a refresh replaces.
        probe: measures the step.
        events: are told of refreshes that were applied; their folder gets the divergences.
        solving: how programs are solved.
        log: is told what becomes of refreshes.
        solver: the one to ask.
        finds_ties: whether each probe decides which layers are tied: those that receive the same tensor.
    """

    def __init__(
        self,
        in_force: PlanInForce,
        probe: StepProbe,
        events: EventWriter,
        solving: Solving,
        log: logging.Logger,
        solver: str,
        finds_ties: bool,
    ) -> None:
        self.pending: PendingRefresh | None = None
        """The refresh whose plan is not applied yet."""
        self._in_force = in_force
        self._probe = probe
        self._events = events
        self._solving = solving
        self._log = log
        self._finds_ties = finds_ties
        self._config = in_force.setting.config
        self._solver = solver
        """The one that programs are given to; another one after a failure."""

    @property
    def is_idle(self) -> bool:
        """Whether no refresh is under way."""
        return self.pending is None

    def is_planned(self, step: int) -> bool:
        """Returns True if a plan for the target of a step was made from a probe, or is about to be made."""
        made = self._in_force.plan.provenance.step
        return not self.is_idle or (made > 0 and self._config.target_at(made) == self._config.target_at(step))

    def begin(self, step: int, watch: StepWatch | None) -> None:
        """Probes the step and starts the solver.

        Args:
            step: the optimizer step that is about to be taken, from 1.
            watch: what was noted of it; None: nobody captured it, which fails.
        """
        self._probe.note(f"at the refresh of step {step}")
        with self._in_force.keeping(step):
            self._begin(step, self._probe.ready(watch))

    def end_step(self, step: int) -> None:
        """Does what is due after an optimizer step: applies a plan, or lets a policy without a probe make its own."""
        self.apply_due(step)
        self._in_force.follow_target(step)

    def apply_due(self, step: int) -> None:
        """Applies the plan of the pending refresh if it is due at this step; waits for the solver if it must."""
        pending = self.pending
        if pending is not None and step >= pending.due:
            self.pending = None
            self._probe.note(f"at the application of the plan of step {pending.step}")
            with self._in_force.keeping(step, lambda: pending.begun):
                self._apply(pending, step)

    def resume(self, pending: PendingRefresh, step: int) -> None:
        """Solves the program of a refresh from a checkpoint of this step once more."""
        with self._in_force.keeping(step, lambda: pending.begun):
            pending.problem = pending.problem | {"solver": self._solver}
            pending.process = self._start_solver(pending.problem)
            self.pending = pending

    def tie(self, ties: Ties) -> None:
        """Ties the layers of these last names from now on, in decisions and in what kernels share."""
        if self._in_force.tie(ties):
            text = "; ".join(", ".join(tie) for tie in ties) or "none"
            self._log.info("snip-hf: linears that take the same input, and so share their formats: %s.", text)
            self._probe.layers.share_inputs(self._in_force.setting, self._log)

    def stop(self) -> PendingRefresh | None:
        """Ends the solver that still runs; returns the refresh that comes to nothing by it."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.stop()
        return pending

    def drop(self, step: int, why: str) -> None:
        """Ends the refresh whose plan waits for its application, if there is one, and says why."""
        pending = self.stop()
        if pending is not None:
            reason = f"{why}, before step {pending.due} at which its plan was due"
            self._in_force.keep(step, pending.begun, reason, "was not applied")

    def say_if_untrained(self) -> None:
        """Says that there is no weight divergence to measure, if that is so on all ranks. Collective."""
        reasons = self._probe.processes.everyone.gather(self._why_untrained())
        if None not in reasons:
            self._log.info("snip-hf: %s, so that the loss divergence alone decides.", reasons[0])

    def _begin(self, step: int, watch: StepWatch) -> None:
        config, setting = self._config, self._in_force.setting
        if config.budget == "measured" and setting.measured is None:
            self._in_force.measure_cost(config.timing_tokens or watch.counts.tokens)
            setting = self._in_force.setting
        began = self._solving.clock()
        predicted = self._probe.memory(watch)
        with measured_peak(next(iter(self._probe.layers.present.values())).weight) as peak:
            table = self._probe.divergences(step, watch)
        if not any(table.totals(fmt)["weight"] for fmt in config.quantized_formats) and weighs_updates(config):
            self._say_no_update(step)
        if self._finds_ties:
            self.tie(table.ties)
            setting = self._in_force.setting
        program = problem(setting.at_step(step), table) | {"solver": self._solver}
        memory = {"predicted": predicted, "measured": peak[0]}
        seconds = {"probe": self._solving.clock() - began, "solver": None, "waited": None}
        self._events.folder.write_divergences(step, table)
        divergence = {fmt: table.totals(fmt) for fmt in reversed(config.formats)}
        begun = self._in_force.begun(step)
        begun = replace(begun, loss=table.loss, divergence=divergence, memory_mib=memory, seconds=seconds)
        begun = replace(begun, kernels=self._probe.layers.figures)
        process = self._start_solver(program)
        self._probe.source.expect_gradients()
        self.pending = PendingRefresh(step, step + config.apply_delay, program, begun, process)

    def _say_no_update(self, step: int) -> None:
        if self._why_untrained():  # as the log has it since the start
            return
        self._log.warning(
            "snip-hf: all weight divergences of step %d are 0, since %s; the loss divergence alone decides.",
            step,
            self._probe.source.why_no_update(self._probe.layers.present.values()),
        )

    def _why_untrained(self) -> str | None:
        """Returns why this rank has no weight divergence to measure, where the policy goes by it; None if it has."""
        if not weighs_updates(self._config):
            return None
        return self._probe.why_untrained()

    def _start_solver(self, program: dict[str, Any]) -> SolverProcess | None:
        """Starts solving on the first rank; raises on all of them if that fails."""
        started: list[SolverProcess] = []
        self._probe.processes.everyone.by_first(lambda: started.append(self._solving.start(program)))
        return started[0] if started else None

    def _solution(self, pending: PendingRefresh) -> SolverResult:
        """Returns the solver's answer, or that of HiGHS if solver="auto" and CBC fails; on the first rank."""
        while True:
            assert pending.process is not None
            try:
                return pending.process.result(self._config.solver_time_limit + self._solving.grace)
            except SolverError as error:
                can_go_on = solver_of(self._config) == "auto" and error.reason not in _OF_PROBLEM
                if not can_go_on or self._solver == FALLBACK:
                    raise
                self._solver = FALLBACK
                self._log.warning("snip-hf: from now on solver='auto' takes %r, since: %s", self._solver, error)
                if error.reason == "timeout":  # other ranks would not wait as long again
                    raise
                pending.process = self._solving.start(pending.problem | {"solver": self._solver})

    def _apply(self, pending: PendingRefresh, step: int) -> None:
        began = self._solving.clock()

        def solution() -> dict[str, Any]:
            return asdict(self._solution(pending))

        result = SolverResult(**self._probe.processes.everyone.by_first(solution))
        self._probe.check_applied()
        pending.begun = pending.begun.with_seconds(solver=result.seconds, waited=self._solving.clock() - began)
        plan = solved_plan(self._in_force.setting, self._in_force.model_name, pending.step, result)
        changes = self._in_force.plan.changes(plan)
        self._in_force.put(plan)
        self._in_force.save()
        applied = pending.begun.applied(step, plan, changes, result)
        self._events.add(applied)
        self._log.info(
            "snip-hf: plan of step %d applied after step %d: %s, %d layers changed; the probe took %.1f s, the solver "
            "%.1f s, waiting for it %.1f s.",
            pending.step,
            step,
            describe_plan(plan),
            applied.layers_changed,
            *(pending.begun.seconds[part] for part in ("probe", "solver", "waited")),
        )
