"""The guard of a run: watches loss and gradient norm, and raises formats when training goes wrong.

At the gradients of each step, all ranks put their figures together and so find the same. After an alarm the layers
concerned run one format more precise from the next step on, for `guard_patience` steps; then the plan is refreshed.
Layers are concerned whose own gradients are not finite, if these are some and not all; otherwise every layer is.

"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from ..parallel.ranks import Processes
from ..planning.forward_shares import forward_shares
from ..planning.raised import raised_plan
from ..policies.registry import needs_probe
from ..policies.ties import siblings
from ..records.event_writer import EventWriter
from ..records.interventions import GRADIENT_NORM, LOSS, NOTED, RAISED, Alarm
from .assembly import RunParts
from .plans import describe_plan
from .schedule import Schedule
from .spikes import Finding, Health
from .step_figures import StepFigures


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
        is_left_out = not finding.is_finite and self._figures.leave_out()
        self._found = finding, figures.broken, is_left_out
        return is_left_out

    def act(self, step: int) -> None:
        """Does what the step that has ended asks for."""
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
        self._raise(alarm, self._concerned(broken), step + self._config.guard_patience)

    def state(self) -> dict[str, Any]:
        """Returns JSON data for `restore`."""
        return self._health.to_dict()

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Goes on from a state (`read_guard`)."""
        self._health.load(saved)
        self._found = None

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

    def _raise(self, alarm: Alarm, layers: Collection[str], until: int) -> None:
        """Raises layers by one format, for the steps up to `until`, after which the plan is refreshed."""
        before = self._in_force.plan
        plan = raised_plan(before, layers, self._config.formats)
        changes = before.changes(plan)
        if changes:
            self._in_force.put(plan)
            self._in_force.save()
            self._refresher.drop(alarm.step, f"the guard raised formats after step {alarm.step}")
            if needs_probe(self._config):
                first = 0 if self._schedule.last_probe is not None else self._config.first_refresh
                self._schedule.postponed = max(until + 1, first)
        self._tell(alarm, RAISED if changes else NOTED, changes)

    def _tell(self, alarm: Alarm, action: str, changes: Mapping[str, Any]) -> None:
        """Writes the event and the line of the log."""
        plan = self._in_force.plan
        forward = forward_shares(plan)
        pairs = {cell: (old, new) for cell, (old, new) in changes.items()}
        self._events.add(
            Alarm(
                **{name: getattr(alarm, name) for name in _OF_FINDING},
                action=action,
                changes=pairs,
                fp4_fraction=plan.fp4_fraction,
                forward_fp4_fraction=None if forward is None else forward.fp4_fraction,
            )
        )
        if action == RAISED:
            what = f"the formats of {len(pairs)} GEMMs are raised by one: {describe_plan(plan)}"
        else:
            what = (
                "everything that could be raised is unquantized already. If this goes on, stop and resume from a "
                "checkpoint of before the first alarm (docs/reliability.md, Rolling back)"
            )
        left_out = "; the step was left out" if alarm.left_out else ""
        self._log.warning("snip-hf: guard, step %d: %s; %s%s.", alarm.step, alarm.reason, what, left_out)


_OF_FINDING = ("step", "figure", "value", "limit", "reason", "failures", "left_out")


def guard_of(
    run: RunParts, schedule: Schedule, processes: Processes, events: EventWriter, log: logging.Logger
) -> Guard | None:
    """Returns the guard that a run asks for; None: it asks for none."""
    return None if run.config.guard == "off" else Guard(run, schedule, processes, events, log)
