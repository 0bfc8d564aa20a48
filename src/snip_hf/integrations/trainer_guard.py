"""The guard under a Trainer: the raw loss of each micro-batch, and the way back to the last good checkpoint.

A Trainer cannot go back by itself: weights, optimizer, schedule, data order and random numbers are put back where it
resumes from a checkpoint. So training stops with an error that names the checkpoint; whoever starts it again resumes
there, by name or by `resume_from_checkpoint=True`, since what was saved after it is moved aside.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerState, TrainingArguments

from ..json_io import read_json, write_json_atomic
from ..records.checkpoints import STATE_NAME
from ..text import printable
from ..training.controller import SnipController
from ..training.guard import TrainingDiverged, after_roll_back
from .trainer_loss import Wrapped

logger = logging.getLogger(__name__)

_CHECKPOINT = re.compile(r"checkpoint-([0-9]{1,18})")


def watch_losses(trainer: Trainer | None, controller: SnipController) -> Wrapped | None:
    """Tells a run's guard what each micro-batch adds to the loss of its step, until what it returns is closed.

    It is what `Trainer.training_step` returns: before the Trainer averages it, or hides what is not finite from its
    log (`logging_nan_inf_filter`). None without a guard, or where the Trainer is not known.
    """
    if controller.config.guard == "off":
        return None
    if trainer is None:
        logger.warning("snip-hf: the guard cannot find the Trainer, and watches the gradients alone, not the loss.")
        return None
    return Wrapped(trainer, "training_step", partial(_noted, controller))


def _noted(controller: SnipController, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    loss = inner(*args, **kwargs)
    controller.note_loss(loss)
    return loss


def end_step(controller: SnipController, args: TrainingArguments, state: TrainerState) -> None:
    """Tells the controller that the Trainer's step is done.

    Raises:
        TrainingDiverged: the guard stops training. The way back is prepared then: checkpoints after the last good one
            are moved aside to `_snip-diverged-...`, and its state asks for raised formats. Without a good one, nothing
            is moved.
    """
    try:
        controller.after_step(state.global_step)
    except TrainingDiverged as error:
        prepare = partial(_way_back, error, Path(str(args.output_dir)))
        found: list[str] = controller.processes.everyone.by_first(prepare)
        if not found:
            raise
        checkpoint, *moved = found
        aside = f" Later checkpoints were moved aside: {', '.join(moved)}." if moved else ""
        message = (
            f"{error} Train again with trainer.train(resume_from_checkpoint={checkpoint!r}), here or in a new "
            f"process.{aside}"
        )
        raise TrainingDiverged(message, error.step, error.good_steps, checkpoint) from None


def _way_back(error: TrainingDiverged, output: Path) -> list[str]:
    """Returns the good checkpoint, and what was moved aside; nothing without one."""
    folders = (output / f"checkpoint-{step}" for step in error.good_steps)
    good = next((folder for folder in folders if (folder / STATE_NAME).is_file()), None)
    if good is None:
        return []
    number = int(good.name.rpartition("-")[2])
    moved = []
    try:
        state = good / STATE_NAME
        write_json_atomic(state, after_roll_back(read_json(state), error.step))
        for folder in sorted(output.iterdir()):
            match = _CHECKPOINT.fullmatch(folder.name)
            if match and int(match[1]) > number and folder.is_dir():
                folder.rename(_free(output, folder.name))
                moved.append(folder.name)
    except (OSError, ValueError) as problem:
        logger.warning(
            "snip-hf: the way back to %s could not be prepared; formats are not raised there, or later checkpoints "
            "stay: %s",
            printable(good, 1000),
            printable(problem, 1000),
        )
    return [str(good), *moved]


def _free(output: Path, name: str) -> Path:
    """Returns a name that is free, which neither the Trainer's search nor a push to the Hub looks at."""
    target, number = output / f"_snip-diverged-{name}", 1
    while target.exists():
        number += 1
        target = output / f"_snip-diverged-{name}-{number}"
    return target
