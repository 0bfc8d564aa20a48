"""snip_state.json of a Trainer's checkpoints: written into each of them, found and read by a run that resumes."""

from __future__ import annotations

import logging
import os
import uuid
from pathlib import Path
from typing import Any, cast

from transformers import TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from ..json_io import read_json, remove_temporaries, write_json_atomic
from ..records.checkpoints import STATE_NAME
from ..text import printable
from ..training.controller import SnipController

logger = logging.getLogger(__name__)

# In trainer_state.json: tells a checkpoint trained with SNIP, and its run, wherever it is moved.
_MARK = "snip-hf"


class StateFiles:
    """The state files of one run.

    Args:
        resume: as `SnipCallback` takes it.
    """

    def __init__(self, resume: bool | str | os.PathLike[str]) -> None:
        self._resume = resume
        self._run = ""

    def begin(self, state: TrainerState, is_resumed: bool) -> None:
        """Marks the checkpoints of the run from here on as trained with SNIP."""
        if not is_resumed:
            self.end(state)
        self._run = _marks(state).setdefault(_MARK, {"run": uuid.uuid4().hex})["run"]

    def end(self, state: TrainerState) -> None:
        """Marks them as trained without."""
        _marks(state).pop(_MARK, None)

    def write(
        self, args: TrainingArguments, state: TrainerState, controller: SnipController, weights: str | None
    ) -> None:
        """Writes the state of this step into its checkpoint, if there is one.

        Args:
            args: the Trainer's.
            state: as above.
            controller: the run's.
            weights: fingerprint of the weights that the checkpoint may hold, besides those of now.
        """
        folder = _checkpoint(args, state)
        if folder.is_dir():
            try:
                remove_temporaries(folder, STATE_NAME)
                # Ties the state to the weights next to it.
                found = dict.fromkeys([weights, controller.weights_fingerprint()])
                own = {"run": self._run, "weights": [one for one in found if one is not None]}
                write_json_atomic(folder / STATE_NAME, controller.state_dict() | own)
            except (OSError, ValueError) as error:  # ValueError: larger than what a resumed run would read
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
        run = self._marked_run(args, state)
        try:
            saved = read_json(path)
            if run is not None and isinstance(saved, dict) and saved.get("run", run) != run:
                raise ValueError(
                    "it belongs to another run than the weights. Name the folder of the checkpoint in "
                    "SnipCallback(resume=FOLDER), or say SnipCallback(resume=False) to start a new plan."
                )
        except ValueError as error:
            raise cannot_resume(path, error) from error
        return {"path": str(path), "state": saved}

    def _marked_run(self, args: TrainingArguments, state: TrainerState) -> str | None:
        """Returns the run that the checkpoint's trainer_state.json names, None if it names none.

        Raises:
            ValueError: the mark is damaged.
        """
        if _MARK not in _marks(state):
            return None
        mark = _marks(state)[_MARK]
        run = mark.get("run") if isinstance(mark, dict) else None
        if not isinstance(run, str):
            folder = self._folders(args, state)[0]
            raise ValueError(
                f"{folder / TRAINER_STATE_NAME}: stateful_callbacks[{_MARK!r}] is {str(mark)[:80]!r}, expected "
                "{'run': NAME}: the file is damaged. Restore it from another copy of the checkpoint, or say "
                "SnipCallback(resume=False) to start a new plan."
            )
        return run

    def _folders(self, args: TrainingArguments, state: TrainerState) -> list[Path]:
        """Returns the folders that may be the checkpoint's, in the order in which they are looked into."""
        if not isinstance(self._resume, bool):
            return [Path(self._resume)]
        folders = [_checkpoint(args, state)]
        if isinstance(args.resume_from_checkpoint, str) and os.path.isdir(args.resume_from_checkpoint):
            folders.insert(0, Path(args.resume_from_checkpoint))
        return folders

    def _find_state(self, args: TrainingArguments, state: TrainerState) -> Path | None:
        """Returns the file to resume from, None to start a new plan; says which in the log."""
        if state.global_step == 0 and not isinstance(self._resume, bool):
            raise ValueError(
                f"SnipCallback(resume={str(self._resume)!r}) names a checkpoint, but the Trainer starts at step 0. "
                "Give the same folder to trainer.train(resume_from_checkpoint=...)."
            )
        if state.global_step == 0 or self._resume is False:
            return None
        self._marked_run(args, state)
        folders = self._folders(args, state)
        found = [folder / STATE_NAME for folder in folders if (folder / STATE_NAME).is_file()]
        if found:
            logger.info("snip-hf: resuming from %s.", printable(found[0], 1000))
            return found[0]
        if self._resume is not True:
            raise ValueError(f"There is no {STATE_NAME} in {self._resume}, which SnipCallback(resume=...) names.")
        if _MARK in _marks(state):
            raise ValueError(
                f"The checkpoint of step {state.global_step} was trained with SNIP, but there is no {STATE_NAME} in "
                f"{', '.join(map(str, folders))}. Name its folder in SnipCallback(resume=FOLDER), or say "
                "SnipCallback(resume=False) to start a new plan."
            )
        logger.warning(
            "snip-hf: resuming at step %d without a SNIP state (looked for %s in %s): taken for a checkpoint trained "
            "without SNIP, the plan starts anew. If the checkpoint lies elsewhere, name its folder in "
            "SnipCallback(resume=...).",
            state.global_step,
            STATE_NAME,
            printable(", ".join(map(str, folders)), 1000),
        )
        return None


def cannot_resume(path: Path | str, error: Exception) -> ValueError:
    return ValueError(f"Cannot resume from {path}: {error.args[0]}")


def _marks(state: TrainerState) -> dict[str, Any]:
    """Returns the dict that the Trainer keeps in trainer_state.json for what callbacks have to say."""
    return cast("dict[str, Any]", state.stateful_callbacks)


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
