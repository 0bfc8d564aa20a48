"""Logs SNIP's quantities to the reports of a Trainer, the trackers of an Accelerator, or a function.

FP4 shares, whose names begin with `fp4_`, are logged with each loss. Each event, such as a refresh, gets its own entry
at its optimizer step. docs/reports.md lists the names.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    TensorBoardCallback,
    TrackioCallback,
    WandbCallback,
)

from ..estimation.coverage import Coverage
from ..planning.plan import PrecisionPlan, forward_shares
from ..python_state import Wrapped
from ..records.events import Alarm, Counted, Event, Refresh, Retarget, Start
from ..text import printable
from ..training.controller import SnipController

logger = logging.getLogger(__name__)

_PREFIX = "snip/"
# The entry for SNIP's config in the configuration of a tracker's run.
_KEY = _PREFIX.removesuffix("/")


class Trackers:
    """Logs the quantities of one Trainer run, on the first process."""

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._logging: Wrapped | None = None
        self._events: list[Event] = []
        self._has_settings = False
        self._failed: set[TrainerCallback] = set()

    def open(self, trainer: Trainer, controller: SnipController) -> None:
        """Starts logging to the reports of a Trainer, and adds the FP4 shares to its logs with a loss."""
        self._trainer = trainer

        def log(inner: Callable[..., None], logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            if "loss" in logs:
                logs.update(quantities_in_force(controller.plan, controller.coverage))
            inner(logs, *args, **kwargs)

        self._logging = Wrapped(trainer, "log", log)

    def close(self) -> None:
        """Undoes `open`."""
        if self._logging is not None:
            self._logging.remove()
        self._trainer = self._logging = None

    def note(self, event: Event) -> None:
        """Keeps an event until `flush`, at the end of the optimizer step."""
        if not isinstance(event, Start):
            self._events.append(event)

    def begin(self, controller: SnipController) -> None:
        """Writes SNIP's config to TensorBoard, W&B and Trackio once their runs have begun."""
        if self._has_settings:
            return
        self._has_settings = True
        for report in self._reports():
            name, run = _run_of(report)
            if run is not None:
                self._try(report, lambda name=name, run=run: _write_settings(name, run, controller))

    def flush(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        """Logs the events since the last call to `state.log_history` and to every tracker."""
        events, self._events = self._events, []
        for event in events:
            found = quantities_of(event)
            state.log_history.append({**found, "epoch": state.epoch, "step": step_of(event)})
            for report in self._reports():
                self._try(
                    report, lambda report=report, found=found: report.on_log(args, state, control, logs=dict(found))
                )

    def _reports(self) -> list[TrainerCallback]:
        """Returns the Trainer's reports on the first process, except those that have failed."""
        if self._trainer is None or not self._trainer.state.is_world_process_zero:
            return []
        kinds = tuple(INTEGRATION_TO_CALLBACK.values())
        callbacks: list[TrainerCallback] = self._trainer.callback_handler.callbacks
        return [one for one in callbacks if isinstance(one, kinds) and one not in self._failed]

    def _try(self, report: TrainerCallback, write: Any) -> None:
        """Calls a tracker, and ignores it for the rest of the run after its first failure."""
        try:
            write()
        except Exception as error:  # a tracker may raise anything
            self._failed.add(report)
            logger.warning(
                "snip-hf: %s failed, and gets no more events of SNIP: %s",
                type(report).__name__,
                printable(repr(error)),
            )


Log = Callable[..., object]
"""A function that logs numbers at a step, (values, step=...), such as `Accelerator.log` or `wandb.log`."""


def log_to(controller: SnipController, target: Accelerator | Log) -> None:
    """Logs the events of a run: shares, divergences, changes of the plan, times (docs/reports.md).

    Call it once, after `accelerator.init_trackers` and before the first step. Steps are the arguments of `after_step`.
    W&B drops values logged at an earlier step than the last one, so log your own values at the same steps. With an
    Accelerator, the runs of TensorBoard, W&B and Trackio also get SNIP's config.

    Args:
        controller: the controller of the run.
        target: an Accelerator, or a function that is called with `(values, step=step)` on the first process.
    """
    trackers = target.trackers if isinstance(target, Accelerator) else []
    if isinstance(target, Accelerator) and not trackers:
        return
    log: Log = target.log if isinstance(target, Accelerator) else target

    def track(event: Event) -> None:
        if found := quantities_of(event):
            log(found, step=step_of(event))

    controller.add_tracker(track)
    if controller.processes.everyone.is_first:
        for tracker in trackers:
            _write_settings(tracker.name, getattr(tracker, "tracker", None), controller)


def _run_of(report: TrainerCallback) -> tuple[str, Any]:
    """Returns the name and the run of a report's tracker; the run is None if unsupported or not yet begun."""
    if isinstance(report, TensorBoardCallback):
        return "tensorboard", report.tb_writer
    if isinstance(report, WandbCallback):
        return "wandb", getattr(sys.modules.get("wandb"), "run", None)
    if isinstance(report, TrackioCallback) and "trackio" in sys.modules:
        return "trackio", sys.modules["trackio"].context_vars.current_run.get()
    return "", None


def _write_settings(name: str, run: Any, controller: SnipController) -> None:
    """Writes the fields of `SnipConfig` and the backend in use to the run of a tracker."""
    settings = {**controller.config.to_dict(), "backend_in_use": controller.backend}
    if name == "tensorboard":  # as text, because TensorBoard keeps hyperparameters in a separate run
        lines = json.dumps(settings, indent=2).splitlines()
        run.add_text("snip_config", "\n".join(f"    {line}" for line in lines))
        run.flush()
    elif name == "wandb":
        run.config.update({_KEY: settings}, allow_val_change=True)
    elif name == "trackio":
        run.config.update({_KEY: settings})


def quantities_in_force(plan: PrecisionPlan, coverage: Coverage | None) -> dict[str, float]:
    """Returns the known FP4 shares of a plan: of the linear FLOPs, of the forward GEMMs, and of the whole model."""
    if not plan.is_share_known:
        return {}
    found = {"fp4_share": plan.fp4_fraction}
    forward = forward_shares(plan)
    if forward is not None:
        found["fp4_share_of_forward"] = forward.fp4_fraction
    if coverage is not None:
        found["fp4_coverage"] = coverage.share
        found["fp4_share_of_model"] = coverage.share * plan.fp4_fraction
    return {name: round(value, 4) for name, value in found.items()}


def quantities_of(event: Event) -> dict[str, float]:
    """Returns the numbers of an event by name, without unknown and non-finite ones."""
    if isinstance(event, Start):
        plan = event.plan
        found: dict[str, float | None] = {"fp4_share": round(plan.fp4_fraction, 4) if plan.is_share_known else None}
    elif isinstance(event, Counted):
        found = {"fp4_coverage": round(event.coverage.share, 4), "gemms_changed_by_tokens": len(event.changes)}
    elif isinstance(event, Alarm):
        found = {
            "fp4_share": None if event.fp4_fraction is None else round(event.fp4_fraction, 4),
            "guard_failures": float(event.failures),
            "guard_value": event.value,
            "guard_limit": event.limit,
            "guard_left_out_steps": float(event.left_out),
        }
    elif isinstance(event, Retarget):
        found = {f"new_{name}": now for name, (_, now) in event.fields.items() if isinstance(now, float)}
    else:
        found = _of_refresh(event)
    named = {name if name.startswith("fp4_") else _PREFIX + name: value for name, value in found.items()}
    return {name: value for name, value in named.items() if value is not None and math.isfinite(value)}


def step_of(event: Event) -> int:
    """Returns the optimizer step at which the result of an event is known."""
    return event.decided_step if isinstance(event, Refresh) else event.step


def _of_refresh(event: Refresh) -> dict[str, float | None]:
    found: dict[str, float | None] = {
        "fp4_share": None if event.fp4_fraction is None else round(event.fp4_fraction, 4),
        "applied": float(event.applied_step is not None),
        "probed_step": event.step,
        "probed_loss": event.loss,
        "target_fp4_fraction": event.target_fp4_fraction,
        "forward_fp4_fraction": event.forward_fp4_fraction,
        "fp4_time_fraction": event.fp4_time_fraction,
        "linear_speedup": event.linear_speedup,
        "layers_changed": event.layers_changed,
        "gemms_changed": len(event.changes),
        "objective": event.objective,
        "gap": event.gap,
    }
    for format, totals in event.divergence.items():
        found |= {f"{kind}_divergence_{format}": value for kind, value in totals.items()}
    found |= {f"{part}_seconds": value for part, value in event.seconds.items()}
    found |= {f"memory_mib_{part}": value for part, value in event.memory_mib.items()}
    found |= dict(event.kernels)
    if len(event.stage_fp4_fractions) > 1:
        found |= {f"fp4_share_of_stage_{index}": value for index, value in enumerate(event.stage_fp4_fractions)}
    return found
