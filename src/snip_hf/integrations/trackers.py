"""Brings SNIP's quantities to whatever a Trainer logs to: its state, and every tracker that `report_to` names.

What belongs to each log, such as the FP4 share, is put into the Trainer's own logs before its reports read them. What
happens now and then, such as a refresh, gets an entry of its own, at the optimizer step at which it happened.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    TensorBoardCallback,
    TrackioCallback,
    WandbCallback,
)

from ..estimation.coverage import Coverage
from ..planning.plan import PrecisionPlan
from ..records.events import Event, Refresh, Start
from ..reporting.quantities import quantities_in_force, quantities_of, settings, step_of
from ..training.controller import SnipController
from .tracker_runs import FIGURES, Drawing, Guard, LoggedRun, TensorBoardRun, TrackerRun, write_settings

_NAMES = {report: name for name, report in INTEGRATION_TO_CALLBACK.items()}


class Trackers:
    """What one run of a Trainer tells of SNIP, on the first process. Without a tracker, its state alone is told."""

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._folder: str | None = None
        self._first: _First | None = None
        self._events: list[Event] = []
        self._drawing = Drawing()
        self._guard = Guard()
        self._has_settings = False

    def open(self, trainer: Trainer | None, owner: TrainerCallback, folder: str | None) -> None:
        """Begins to tell of a run.

        Args:
            trainer: runs it; its reports are the trackers. None: it has none.
            owner: the callback that adds to the logs, which is put in front of the reports.
            folder: where the run records its plans; None: nowhere, so that there are no figures.
        """
        self._trainer, self._folder = trainer, folder
        if trainer is not None:
            self._first = _First(trainer.state, owner, self)
            handler = trainer.callback_handler
            # A new list: the Trainer is going through the old one.
            handler.callbacks = [self._first, *handler.callbacks]

    def close(self) -> None:
        """Takes away what `open` put in front of the reports, which are told nothing from here on."""
        if self._trainer is not None:
            handler = self._trainer.callback_handler
            handler.callbacks = [one for one in handler.callbacks if one is not self._first]
        self._trainer = None

    def note(self, event: Event) -> None:
        """Takes an event of the run; it is told at the end of the optimizer step."""
        if not isinstance(event, Start):
            self._events.append(event)

    def begin(self, controller: SnipController) -> None:
        """Writes SNIP's configuration to the trackers that take one; once, when their runs have begun."""
        if not self._has_settings and self._is_first_process:
            self._has_settings = True
            write_settings(self._runs(), settings(controller.config.to_dict(), controller.backend), self._guard)

    def add(
        self, state: TrainerState, logs: dict[str, Any] | None, plan: PrecisionPlan, coverage: Coverage | None
    ) -> None:
        """Adds the plan's quantities to logs with a loss, and to their entry in `state.log_history`."""
        if logs is None or "loss" not in logs:
            return
        found = quantities_in_force(plan, coverage)
        logs.update(found)
        last = state.log_history[-1] if state.log_history else {}
        if "loss" in last and last.get("step") == state.global_step:
            last.update(found)

    def flush(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        """Tells of the events since the last call: an entry of `state.log_history` each, and one in every tracker."""
        events, self._events = self._events, []
        for event in events:
            found = quantities_of(event)
            state.log_history.append({**found, "epoch": state.epoch, "step": step_of(event)})
            for report in self._reports():
                self._guard(_name_of(report), partial(report.on_log, args, state, control, logs=dict(found)))
            if isinstance(event, Refresh) and event.applied_step is not None and self._drawing.is_due():
                self.draw(state)

    def draw(self, state: TrainerState) -> None:
        """Draws the figures of the run so far for the trackers that take images."""
        runs, folder = self._runs(), self._folder
        if runs and folder is not None and self._drawing.is_behind:
            self._guard(FIGURES, lambda: self._drawing.draw(folder, runs, state.global_step))

    @property
    def _is_first_process(self) -> bool:
        return self._trainer is not None and self._trainer.state.is_world_process_zero

    def _reports(self) -> list[TrainerCallback]:
        """Returns the Trainer's reports."""
        if self._trainer is None:
            return []
        callbacks: list[TrainerCallback] = self._trainer.callback_handler.callbacks
        return [one for one in callbacks if isinstance(one, tuple(_NAMES))]

    def _runs(self) -> list[TrackerRun]:
        """Returns the runs of reports that take settings and images, as far as they have begun."""
        found = (_run_of(report) for report in self._reports())
        return [run for run in found if run is not None and run.name not in self._guard.failed]


class _First(TrainerCallback):
    """Stands in front of the Trainer's reports, which read the logs that it adds to.

    Args:
        state: of the run; other runs of the same Trainer are none of its business.
        owner: adds to logs.
        trackers: draw the last figures while the reports are open.
    """

    def __init__(self, state: TrainerState, owner: TrainerCallback, trackers: Trackers) -> None:
        self._state, self._owner, self._trackers = state, owner, trackers

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state is self._state:
            self._owner.on_log(args, state, control, **kwargs)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state is self._state:
            self._trackers.draw(state)


def _name_of(report: TrainerCallback) -> str:
    """Returns what `report_to` calls a report."""
    return next(name for kind, name in _NAMES.items() if isinstance(report, kind))


def _run_of(report: TrainerCallback) -> TrackerRun | None:
    """Returns the run that a report writes to, if it takes settings and images and has begun."""
    if isinstance(report, TensorBoardCallback):
        return None if report.tb_writer is None else TensorBoardRun(report.tb_writer)
    if isinstance(report, WandbCallback):
        run = getattr(sys.modules.get("wandb"), "run", None)
        return None if run is None else LoggedRun("wandb", run, counts_steps=False)
    if isinstance(report, TrackioCallback):
        module = sys.modules.get("trackio")
        run = None if module is None else module.context_vars.current_run.get()
        return None if run is None else LoggedRun("trackio", run, counts_steps=False)
    return None
