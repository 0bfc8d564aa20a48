"""Writes snip_state.json to each checkpoint of a Trainer, and reads it when a run resumes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from transformers import Trainer, TrainerState

from ..json_io import read_json, write_json_atomic
from ..python_state import Wrapped
from ..records.load import STATE_NAME
from ..text import printable
from ..training.controller import SnipController
from .trainer_loss import find_call

logger = logging.getLogger(__name__)


class StateFiles:
    """The state files of one run.

    Args:
        resume: as in `SnipCallback`.
        callback: name of the callback's class. An empty entry with this name in trainer_state.json marks checkpoints
            trained with SNIP; `restore_callback_states_from_checkpoint` restores nothing from it.
    """

    def __init__(self, resume: bool, callback: str) -> None:
        self._resume = resume
        self._callback = callback
        self._saving: Wrapped | None = None
        self._controller: SnipController | None = None
        self._last: dict[str, Any] | Exception | None = None
        """The state at the end of training, for later checkpoints; or the error that prevented it."""

    def follow(self, trainer: Trainer, controller: SnipController, end_step: Callable[..., None]) -> None:
        """Adds the state to every checkpoint that the Trainer saves in this run, until `close`.

        Args:
            trainer: the Trainer, before its first step.
            controller: the controller of the run.
            end_step: ends the controller's step, because an earlier callback may save before SNIP's `on_step_end`.
        """
        self._controller = controller
        self._saving = Wrapped(trainer, "save_model", partial(self._save, trainer, trainer.state, end_step))

    def keep_last(self) -> None:
        """Keeps the state at the end of training, even after an error. Call it before the controller is closed."""
        try:
            self._last = None if self._controller is None else self._controller.state_dict()
        except Exception as error:  # in the middle of a step, or after a device failure
            self._last = error

    def close(self) -> None:
        """Lets go of the Trainer."""
        if self._saving is not None:
            self._saving.remove()
        self._saving = self._controller = self._last = None

    def unmark(self, state: TrainerState) -> None:
        """Removes the mark, so that later checkpoints count as trained without SNIP."""
        _marks(state).pop(self._callback, None)

    def _save(
        self,
        trainer: Trainer,
        state: TrainerState,
        end_step: Callable[..., None],
        inner: Callable[..., None],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        folder = _checkpoint(*args, **kwargs) if trainer.state is state else None
        if folder is not None and self._last is None:
            end_step(trainer.args, state, trainer.control)  # on all ranks
        inner(*args, **kwargs)
        if folder is not None and self._controller is not None and state.is_world_process_zero:
            self._write(folder, state, self._controller)

    def _write(self, folder: Path, state: TrainerState, controller: SnipController) -> None:
        """Writes the state to the folder of a checkpoint, and the mark to the Trainer's state, which is saved next."""
        _marks(state)[self._callback] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if isinstance(self._last, Exception):
                raise ValueError(str(self._last))
            weights = {"weights": controller.weights_fingerprint()}  # ties the state to the weights beside it
            write_json_atomic(folder / STATE_NAME, (self._last or controller.state_dict()) | weights)
        except (OSError, ValueError) as error:  # ValueError: in the middle of a step, or too large to be read
            logger.warning(
                "snip-hf: could not write %s; resuming there will fail: %s",
                printable(folder / STATE_NAME),
                printable(error),
            )

    def read(self, state: TrainerState) -> dict[str, Any] | None:
        """Returns path and content of the state to resume from, or None to start a new plan; logs the choice."""
        if state.global_step == 0 or not self._resume:
            return None
        call = find_call(state)
        assert call is not None
        folder = Path(call.resumes_from)
        path = folder / STATE_NAME
        if path.is_file():
            logger.info("snip-hf: resuming from %s.", printable(path))
            try:
                return {"path": str(path), "state": read_json(path)}
            except ValueError as error:
                raise cannot_resume(path, error) from error
        if self._callback in _marks(state):
            raise ValueError(
                f"The checkpoint of step {state.global_step} was trained with SNIP, but {folder} has no {STATE_NAME}. "
                "Restore the file, or start a new plan with SnipCallback(resume=False)."
            )
        logger.warning(
            "snip-hf: resuming at step %d with a new plan, because there is no %s in %s: the checkpoint was trained "
            "without SNIP.",
            state.global_step,
            STATE_NAME,
            printable(folder),
        )
        return None


def load_state(controller: SnipController, saved: Mapping[str, Any], state: TrainerState) -> None:
    """Continues a run from the result of `StateFiles.read`.

    Raises:
        ValueError: the state does not fit; names the file.
    """
    try:
        controller.load_state_dict(saved["state"], state.global_step, controller.weights_fingerprint())
    except (KeyError, ValueError) as error:
        raise cannot_resume(saved["path"], error) from error


def cannot_resume(path: Path | str, error: Exception) -> ValueError:
    return ValueError(f"Cannot resume from {path}: {error.args[0]}")


def _marks(state: TrainerState) -> dict[str, Any]:
    """Returns the entries of callbacks in trainer_state.json."""
    return cast("dict[str, Any]", state.stateful_callbacks)


def _checkpoint(output_dir: str | None = None, _internal_call: bool = False, *rest: Any, **more: Any) -> Path | None:
    """Returns the folder of the checkpoint that `Trainer.save_model` is called for; None for other calls."""
    return Path(output_dir) if _internal_call and output_dir is not None else None


def output_folder(state: TrainerState) -> str:
    """Returns the output folder of a run; in a hyperparameter search, the trial's."""
    call = find_call(state)
    assert call is not None
    return str(call.trainer._get_output_dir(call.trial))
