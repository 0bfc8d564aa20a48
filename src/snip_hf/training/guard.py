"""The guard of a run: watches loss and gradient norm, raises formats when training goes wrong, stops it when it must.

At the gradients of each step, all ranks put their figures together and so find the same. After an alarm the layers
concerned run one format more precise from the next step on, for `guard_patience` steps; then the plan is refreshed.
Layers are concerned whose own gradients are not finite, if these are some and not all; otherwise every layer is.

A third trigger belongs to the refresh (`guard_noise`): a layer whose gradient is small against the noise of its
quantization is raised before a new plan is put in force. Quantized training is reported to become less effective once
the gradient norm falls below about sqrt(3) times the quantization noise (Chmiel et al., "FP4 All the Way: Fully
Quantized Training of LLMs", arXiv:2505.19115, abstract). Here the ratio is taken layer by layer, at the GEMM of the
weight's gradient (ours).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from ..layers.state import GRAD_WEIGHT
from ..numerics.gemms import GEMMS
from ..parallel.ranks import Processes
from ..planning.forward_shares import forward_shares
from ..planning.plan import PrecisionPlan
from ..planning.raised import raised_plan
from ..policies.registry import needs_probe
from ..policies.ties import siblings
from ..records.event_writer import EventWriter
from ..records.interventions import GRADIENT_NOISE, GRADIENT_NORM, LOSS, NOTED, RAISED, ROLL_BACK, STOPPED, Alarm
from .assembly import RunParts
from .checkpoint import PendingRefresh
from .plans import describe_plan
from .schedule import Schedule
from .spikes import Finding, Health
from .step_figures import StepFigures

# Steps with a saved state that is remembered as good; a Trainer keeps fewer checkpoints than that.
_MOST_GOOD = 1000


class TrainingDiverged(RuntimeError):
    """Training has to go on from an earlier state (`guard="roll-back"`).

    Under a Trainer `checkpoint` names the folder: `trainer.train(resume_from_checkpoint=error.checkpoint)` goes on,
    in the same process or in a new one. In a loop of one's own, load model, optimizer and state of one of `good_steps`,
    and give the controller `after_roll_back(state, error.step)`.
    """

    def __init__(self, message: str, step: int, good_steps: list[int], checkpoint: str | None = None) -> None:
        super().__init__(message)
        self.step = step
        """The optimizer step of the last alarm."""
        self.good_steps = good_steps
        """Steps whose state was saved while nothing was wrong, the last one first."""
        self.checkpoint = checkpoint
        """The Trainer's checkpoint to go back to; None: there is none, or no Trainer."""


def after_roll_back(state: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Returns a `state_dict` from which a run goes on with all formats raised by one, until `step` is well behind it.

    Args:
        state: of a step before training went wrong. Each time that training goes back to it raises once more.
        step: where it went wrong.
    """
    guard = dict(state.get("guard") or {})
    return {**state, "guard": guard | {"roll_backs": int(guard.get("roll_backs", 0)) + 1, "failed_at": step}}


class Guard:
    """Watches one run; `config.guard` is not "off".

    Args:
        run: its parts.
        schedule: of refreshes.
        processes: those of the run.
        events: are told of alarms.
        log: is told of alarms.
    """

    def __init__(
        self, run: RunParts, schedule: Schedule, processes: Processes, events: EventWriter, log: logging.Logger
    ) -> None:
        self._config, self._schedule, self._processes = run.config, schedule, processes
        self._in_force, self._refresher = run.in_force, run.refresher
        self._events, self._log = events, log
        self._figures = StepFigures(run.model, run.layers.all, run.source.scaling, processes)
        self._health = Health(run.config)
        self._found: tuple[Finding, list[str], bool] | None = None
        """What is wrong with the step that is running, the layers concerned, and whether it is left out."""
        self._good: list[int] = []
        if run.config.guard_noise is not None:
            run.refresher.after_plan = self._raise_noisy

    def note_loss(self, loss: Tensor | float) -> None:
        """Notes what a micro-batch adds to the loss of its step."""
        self._figures.note_loss(loss)

    def leaves_out(self, step: int) -> bool:
        """Judges a step whose gradients are complete. Collective.

        Returns: True if its gradients were taken away, since they are not finite.
        """
        self._processes.note(f"at the guard's look at step {step}")
        figures = self._figures.take()
        finding = self._health.look(step, {LOSS: figures.loss, GRADIENT_NORM: figures.norm})
        if finding is None:
            self._found = None
            return False
        is_left_out = not finding.is_finite and self._config.guard != "watch" and self._figures.leave_out()
        self._found = finding, figures.broken, is_left_out
        return is_left_out

    def act(self, step: int) -> None:
        """Does what the step that has ended asks for.

        Raises:
            TrainingDiverged: on all ranks.
        """
        self._health.note_calm(step)
        found, self._found = self._found, None
        if found is None:
            return
        finding, broken, is_left_out = found
        self._health.note_alarm(step)
        alarm = Alarm(
            step=step,
            figure=finding.figure,
            value=finding.value if finding.is_finite else None,
            limit=finding.limit,
            action=NOTED,
            reason=finding.reason[0].upper() + finding.reason[1:],
            failures=self._health.failures,
            left_out=is_left_out,
        )
        if self._config.guard == "watch":
            self._tell(alarm)
        elif self._config.guard == "roll-back" and self._health.failures >= self._config.guard_failures:
            self._stop(alarm)
        else:
            self._raise(alarm, self._concerned(broken), step + self._config.guard_patience)

    def state(self, step: int) -> dict[str, Any]:
        """Returns JSON data for `restore`; a state that is saved while nothing is wrong is one to go back to."""
        if self._health.alarmed is None and step not in self._good:
            self._good = [step, *self._good][:_MOST_GOOD]
        return self._health.to_dict()

    def restore(self, saved: Mapping[str, Any], step: int) -> None:
        """Goes on from the state of this step (`read_guard`). Where training came back to it, formats are raised."""
        self._health.load(saved)
        self._found, self._good = None, []
        if self._health.alarmed is None:
            self._good = [step]
        times = saved.get("roll_backs", 0)
        if not times or self._config.guard == "watch":
            return
        failed_at = max(step, saved["failed_at"])
        self._health.alarmed = failed_at
        reason = f"Training went wrong at step {failed_at} and went back to step {step}"
        alarm = Alarm(
            step=step + 1, figure=ROLL_BACK, value=None, limit=None, action=NOTED, reason=reason, failures=times
        )
        self._raise(alarm, list(self._in_force.plan.assignment), failed_at + self._config.guard_patience, times)

    def close(self) -> None:
        self._figures.end()

    def _concerned(self, broken: Collection[str]) -> list[str]:
        """Returns the layers to raise: those that are broken and what shares their formats, or all."""
        layers = list(self._in_force.plan.assignment)
        return layers if not broken or len(broken) == len(layers) else self._with_ties(broken)

    def _with_ties(self, chosen: Collection[str]) -> list[str]:
        """Returns layers, and those that share their formats with one of them."""
        groups = [group for group in siblings(self._in_force.setting) if not set(chosen).isdisjoint(group)]
        tied = {name for group in groups for name in group}
        return [layer for layer in self._in_force.plan.assignment if layer in chosen or layer in tied]

    def _raise_noisy(self, pending: PendingRefresh, step: int) -> None:
        """Raises the layers of a new plan whose gradients are small against their noise in it."""
        config, plan = self._config, self._in_force.plan
        gemms = GEMMS if config.granularity == "layer" else (GRAD_WEIGHT,)
        least: dict[str, float] = {}
        for _ in (*config.formats, None):  # as often as there is a more precise one
            noisy = _noisy(plan, pending.noise, config.guard_noise or 0.0)
            least = {**noisy, **least}
            plan = raised_plan(plan, self._with_ties(noisy), config.formats, gemms)
        changes = self._in_force.plan.changes(plan)
        if not changes:
            return
        layer = min(least, key=lambda name: least[name])
        reason = (
            f"The gradients of {len(least)} layers are less than {config.guard_noise:.4g} times the noise of their "
            f"quantization, at the probe of step {pending.step} (least: {least[layer]:.4g} in {layer})"
        )
        self._in_force.put(plan, self._in_force.ranking)
        self._in_force.save()
        alarm = Alarm(
            step=step,
            figure=GRADIENT_NOISE,
            value=least[layer],
            limit=config.guard_noise,
            action=NOTED,
            reason=reason,
            failures=self._health.failures,
        )
        self._tell(alarm, RAISED, changes)

    def _raise(self, alarm: Alarm, layers: Collection[str], until: int, times: int = 1) -> None:
        """Raises layers by `times` formats, for the steps up to `until`, after which the plan is refreshed."""
        plan = before = self._in_force.plan
        for _ in range(times):
            plan = raised_plan(plan, layers, self._config.formats)
        changes = before.changes(plan)
        if changes:
            self._in_force.put(plan, self._in_force.ranking)
            self._in_force.save()
            self._refresher.drop(alarm.step, f"the guard raised formats after step {alarm.step}")
            if needs_probe(self._config):
                first = 0 if self._schedule.last_probe is not None else self._config.first_refresh
                self._schedule.postponed = max(until + 1, first)
        self._tell(alarm, RAISED if changes else NOTED, changes)

    def _stop(self, alarm: Alarm) -> None:
        good: list[int] = self._processes.everyone.by_first(lambda: self._good)
        self._tell(alarm, STOPPED, good_step=good[0] if good else None)
        back = f"Go back to step {good[0]}" if good else "No state was saved while nothing was wrong: start anew"
        raise TrainingDiverged(
            f"The guard stops training at step {alarm.step}, after {alarm.failures} alarms in a row: {alarm.reason}. "
            f"{back}. Formats are then raised by one until this step is passed.",
            alarm.step,
            good,
        )

    def _tell(
        self, alarm: Alarm, action: str = NOTED, changes: Mapping[str, Any] | None = None, good_step: int | None = None
    ) -> None:
        """Writes the event and the line of the log."""
        plan = self._in_force.plan
        forward = forward_shares(plan)
        pairs = {cell: (old, new) for cell, (old, new) in (changes or {}).items()}
        self._events.add(
            Alarm(
                **{name: getattr(alarm, name) for name in _OF_FINDING},
                action=action,
                good_step=good_step,
                changes=pairs,
                fp4_fraction=plan.fp4_fraction,
                forward_fp4_fraction=None if forward is None else forward.fp4_fraction,
            )
        )
        what = "nothing is changed"
        if action == RAISED:
            what = f"the formats of {len(pairs)} GEMMs are raised by one: {describe_plan(plan)}"
        elif action == STOPPED:
            what = "training stops"
        elif self._config.guard != "watch":
            what = (
                "everything that could be raised is unquantized already. If this goes on, the weights are lost: go "
                "back to an earlier checkpoint (guard='roll-back' stops and names one)"
            )
        left_out = "; the step was left out" if alarm.left_out else ""
        self._log.warning("snip-hf: guard, step %d: %s; %s%s.", alarm.step, alarm.reason, what, left_out)


_OF_FINDING = ("step", "figure", "value", "limit", "reason", "failures", "left_out")


def guard_of(
    run: RunParts, schedule: Schedule, processes: Processes, events: EventWriter, log: logging.Logger
) -> Guard | None:
    """Returns the guard that a run asks for; None: it asks for none."""
    return None if run.config.guard == "off" else Guard(run, schedule, processes, events, log)


def _noisy(plan: PrecisionPlan, noise: Mapping[str, Mapping[str, float]], limit: float) -> dict[str, float]:
    """Returns layer -> ratio of gradient to noise in the format of a plan, where that is below a limit."""
    found = {}
    for layer, row in plan.assignment.items():
        ratio = noise.get(layer, {}).get(row.get(GRAD_WEIGHT, ""))
        if ratio is not None and ratio < limit:
            found[layer] = ratio
    return found
