"""snip_state.json of a Trainer's checkpoints: written into each of them, found and read by a run that resumes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from transformers import Trainer, TrainerState, TrainingArguments

from ..json_io import read_json, remove_temporaries, write_json_atomic
from ..records.checkpoints import STATE_NAME
from ..text import printable
from ..training.controller import SnipController
from .trainer_loss import Wrapped, find_call

logger = logging.getLogger(__name__)


class StateFiles:
    """The state files of one run.

    Args:
        resume: as `SnipCallback` takes it.
        callback: name of the callback's class, under which trainer_state.json says that a checkpoint was trained with
            it. The entry is empty, so that `restore_callback_states_from_checkpoint` knows it and restores nothing.
    """

    def __init__(self, resume: bool, callback: str) -> None:
        self._resume = resume
        self._callback = callback
        self._saving: Wrapped | None = None
        self._controller: SnipController | None = None
        self._last: dict[str, Any] | Exception | None = None
        """The state with which training ended, for checkpoints that are asked for later, or why there is none."""

    def follow(self, trainer: Trainer, controller: SnipController, end_step: Callable[..., None]) -> None:
        """Puts the state into every checkpoint that the Trainer saves in this run, whoever asks for it, until `close`.

        Args:
            trainer: is about to train.
            controller: of the run.
            end_step: ends the controller's step, if that is due: a callback before SNIP's may save at its end.
        """
        self._controller = controller
        self._saving = Wrapped(trainer, "save_model", partial(self._save, trainer, trainer.state, end_step))

    def keep_last(self) -> None:
        """To be called when training ends, also by an error, before the controller is closed."""
        try:
            self._last = None if self._controller is None else self._controller.state_dict()
        except Exception as error:  # in the middle of a step, or of a device that failed
            self._last = error

    def close(self) -> None:
        """Leaves the Trainer."""
        if self._saving is not None:
            self._saving.close()
        self._saving = self._controller = self._last = None

    def unmark(self, state: TrainerState) -> None:
        """Lets later checkpoints be ones that were trained without SNIP."""
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
        """Writes the state into a checkpoint's folder, and the mark into the Trainer's, which is saved next."""
        _marks(state)[self._callback] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            remove_temporaries(folder, STATE_NAME)
            # Ties the state to the weights next to it.
            if isinstance(self._last, Exception):
                raise ValueError(str(self._last))
            weights = {"weights": controller.weights_fingerprint()}
            write_json_atomic(folder / STATE_NAME, (self._last or controller.state_dict()) | weights)
        except (OSError, ValueError) as error:  # ValueError: in mid-step, or larger than what a resumed run would read
            logger.warning(
                "snip-hf: could not write %s; resuming there will fail: %s",
                printable(folder / STATE_NAME, 1000),
                printable(error, 1000),
            )

    def read(self, args: TrainingArguments, state: TrainerState) -> dict[str, Any] | None:
        """Returns the path and the content of the file to resume from, None to start a new plan."""
        path = self._find_state(args, state)
        if path is None:
            return None
        try:
            return {"path": str(path), "state": read_json(path)}
        except ValueError as error:
            raise cannot_resume(path, error) from error

    def _folder(self, args: TrainingArguments, state: TrainerState) -> Path:
        """Returns the folder to resume from."""
        call = find_call(state)
        if call is not None and isinstance(call.resumes_from, str | os.PathLike):
            return Path(call.resumes_from)
        return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"  # in a `train` of the user's own

    def _find_state(self, args: TrainingArguments, state: TrainerState) -> Path | None:
        """Returns the file to resume from, None to start a new plan; says which in the log."""
        if state.global_step == 0 or not self._resume:
            return None
        folder = self._folder(args, state)
        if (folder / STATE_NAME).is_file():
            logger.info("snip-hf: resuming from %s.", printable(folder / STATE_NAME, 1000))
            return folder / STATE_NAME
        if self._callback in _marks(state):
            raise ValueError(
                f"The checkpoint of step {state.global_step} was trained with SNIP, but there is no {STATE_NAME} in "
                f"{folder}. Restore the file, or start a new plan with SnipCallback(resume=False)."
            )
        logger.warning(
            "snip-hf: resuming at step %d without a SNIP state (looked for %s in %s): taken for a checkpoint trained "
            "without SNIP, the plan starts anew.",
            state.global_step,
            STATE_NAME,
            printable(folder, 1000),
        )
        return None


def load_state(controller: SnipController, saved: Mapping[str, Any], state: TrainerState) -> None:
    """Lets a run go on from what `StateFiles.read` returned.

    Raises:
        ValueError: it does not fit; names the file.
    """
    try:
        controller.load_state_dict(saved["state"], state.global_step, controller.weights_fingerprint())
    except (KeyError, ValueError) as error:
        raise cannot_resume(saved["path"], error) from error


def cannot_resume(path: Path | str, error: Exception) -> ValueError:
    return ValueError(f"Cannot resume from {path}: {error.args[0]}")


def _marks(state: TrainerState) -> dict[str, Any]:
    """Returns the dict that the Trainer keeps in trainer_state.json for what callbacks have to say."""
    return cast("dict[str, Any]", state.stateful_callbacks)


def _checkpoint(output_dir: str | None = None, _internal_call: bool = False, *rest: Any, **more: Any) -> Path | None:
    """Returns the folder of the checkpoint that a call of `Trainer.save_model` begins; None if it begins none."""
    return Path(output_dir) if _internal_call and output_dir is not None else None


def output_folder(args: TrainingArguments, state: TrainerState) -> str:
    """Returns the folder of a run: OUTPUT, or in a hyperparameter search the trial's folder in it."""
    call = find_call(state)
    return str(args.output_dir if call is None else call.trainer._get_output_dir(call.trial))
