"""Brings SNIP's quantities to the trackers of a loop of one's own: those of an Accelerator, or any log function."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from accelerate import Accelerator

from ..records.events import Event, Refresh
from ..reporting.quantities import quantities_of, settings, step_of
from ..training.controller import SnipController
from .tracker_runs import FIGURES, Drawing, Guard, LoggedRun, TensorBoardRun, TrackerRun, write_settings


class Log(Protocol):
    """Logs numbers at a step, as `Accelerator.log` and `wandb.log` do."""

    def __call__(self, values: dict[str, Any], *, step: int) -> object: ...


def log_to(controller: SnipController, target: Accelerator | Log) -> None:
    """Logs the events of a controller's run: shares, divergences, changes of the plan, times (docs/trackers.md).

    Call it once, after `accelerator.init_trackers` and before the first step. Steps are those that `after_step` gets.
    W&B leaves out what is logged at an earlier step than the last one, so log your own figures at the same steps.

    With an Accelerator, the runs of TensorBoard, W&B and Trackio also get SNIP's configuration, and, where the
    controller has an `output_dir`, the figures. One without trackers gets nothing, and nothing is computed for it.

    Args:
        controller: of the run.
        target: an Accelerator, or a function that is called with `(values, step=step)` on the first process.

    Raises:
        TypeError: the target is neither.
    """
    if isinstance(target, Accelerator):
        if not target.trackers:
            return
        log: Log = target.log
        runs = [run for run in map(_run_of, target.trackers) if run is not None]
    elif callable(target):
        log, runs = target, []
    else:
        raise TypeError(
            f"Got a {type(target).__name__} to log to; expected an Accelerator, or a function of (values, step=...)."
        )
    guard = Guard()
    controller.add_tracker(_LoopLog(log, runs, controller.output_dir, guard))
    if controller.processes.everyone.is_first:
        write_settings(runs, settings(controller.config.to_dict(), controller.backend), guard)


class _LoopLog:
    """Is told of the events of a run, on the first process.

    Args:
        log: gets the numbers.
        runs: get the figures.
        folder: where the run records its plans; None: nowhere.
        guard: of writing to the runs.
    """

    def __init__(self, log: Log, runs: list[TrackerRun], folder: Path | None, guard: Guard) -> None:
        self._log, self._runs, self._folder, self._guard = log, runs, folder, guard
        self._drawing = Drawing()

    def __call__(self, event: Event) -> None:
        found, step = quantities_of(event), step_of(event)
        if found:
            self._log(found, step=step)
        is_new_plan = isinstance(event, Refresh) and event.applied_step is not None
        folder, runs = self._folder, [run for run in self._runs if run.name not in self._guard.failed]
        if runs and folder is not None and is_new_plan and self._drawing.is_due():
            self._guard(FIGURES, lambda: self._drawing.draw(folder, runs, step))


def _run_of(tracker: Any) -> TrackerRun | None:
    """Returns the run of one of Accelerate's trackers, if it takes settings and images."""
    if tracker.name == "tensorboard":
        return TensorBoardRun(tracker.tracker)
    if tracker.name in ("wandb", "trackio"):
        return LoggedRun(tracker.name, tracker.tracker, counts_steps=True)
    return None
