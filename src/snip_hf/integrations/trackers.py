"""Brings figures to the trackers that a Trainer reports to. Its own reports read the logs before later callbacks do."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import TensorBoardCallback, rewrite_logs

from ..estimation.coverage import Coverage
from ..planning.forward_shares import forward_shares
from ..planning.plan import PrecisionPlan

logger = logging.getLogger(__name__)


class Trackers:
    """TensorBoard, W&B and Trackio, as far as `report_to` names them and the Trainer's own report has begun there."""

    def __init__(self) -> None:
        self._failed: set[str] = set()
        self._end: Callable[[], None] | None = None
        self._tensorboard: TensorBoardCallback | None = None

    def add(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None,
        plan: PrecisionPlan,
        coverage: Coverage | None,
    ) -> None:
        """Adds the FP4 share to logs with a loss, to the last entry of `state.log_history`, and to the trackers.

        Beside it stand the share of the forward GEMMs, if plans decide on these alone, and, where it is known, the
        coverage, and its product with the FP4 share, the one of the whole model.
        """
        if logs is None or "loss" not in logs:
            return
        figures = {"fp4_share": round(plan.fp4_fraction, 4)}
        forward = forward_shares(plan)
        if forward is not None:
            figures["fp4_share_of_forward"] = round(forward.fp4_fraction, 4)
        if coverage is not None:
            figures["fp4_coverage"] = round(coverage.share, 4)
            figures["fp4_share_of_model"] = round(coverage.share * plan.fp4_fraction, 4)
        logs.update(figures)
        last = state.log_history[-1] if state.log_history else {}
        if "loss" in last and last.get("step") == state.global_step:
            last.update(figures)
        self.log(args, state, control, figures)

    def log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, figures: Mapping[str, float]
    ) -> None:
        """Writes the figures at the current step. A tracker that fails is left out from then on, with a warning."""
        if not state.is_world_process_zero:
            return
        logged = rewrite_logs(dict(figures)) | {"train/global_step": state.global_step}

        def tensorboard() -> None:
            self._log_to_tensorboard(args, state, control, figures)

        writers = {
            "tensorboard": tensorboard,
            "wandb": lambda: _log_to_wandb(logged),
            "trackio": lambda: _log_to_trackio(logged),
        }
        for name in writers.keys() & set(args.report_to or ()) - self._failed:
            try:
                writers[name]()
            except Exception as error:  # a tracker may fail; training may not
                self._failed.add(name)
                logger.warning("snip-hf: %s gets no more figures of SNIP's: %r", name, error)

    def close(self) -> None:
        """Closes what was opened for a run; the next one begins anew."""
        if self._end is not None:
            self._end()
        self._end, self._tensorboard = None, None
        self._failed.clear()

    def _log_to_tensorboard(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, figures: Mapping[str, float]
    ) -> None:
        if self._tensorboard is None:
            own = TensorBoardCallback()
            folder = own.logging_dir or _newest_run(Path(str(args.output_dir)) / "runs")
            if folder is None:
                return
            own.logging_dir = folder
            self._tensorboard, self._end = own, lambda: own.on_train_end(args, state, control)
        self._tensorboard.on_log(args, state, control, logs=dict(figures))


def _newest_run(folder: Path) -> str | None:
    """Returns where the Trainer's report writes its events: its folder's name has the time at which it began."""
    events = list(folder.rglob("events.out.tfevents.*"))
    return str(max(events, key=lambda path: path.stat().st_mtime_ns).parent) if events else None


def _log_to_wandb(logged: Mapping[str, float]) -> None:
    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is not None:
        wandb.log(dict(logged))


def _log_to_trackio(logged: Mapping[str, float]) -> None:
    trackio = sys.modules.get("trackio")
    if trackio is not None and trackio.context_vars.current_run.get() is not None:
        trackio.log(dict(logged))
