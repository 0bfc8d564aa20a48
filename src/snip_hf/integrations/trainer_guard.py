"""The guard under a Trainer: the raw loss of each micro-batch."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from transformers import Trainer

from ..training.controller import SnipController

logger = logging.getLogger(__name__)

_NAME = "training_step"


class StepLosses:
    """Tells a run's guard what each micro-batch adds to the loss of its step, until `close`.

    It is what `Trainer.training_step` returns: before the Trainer averages it, or hides what is not finite from its
    log (`logging_nan_inf_filter`).

    Args:
        trainer: whose losses these are.
        controller: of the run.
    """

    def __init__(self, trainer: Trainer, controller: SnipController) -> None:
        self._trainer, self._controller = trainer, controller
        self._inner: Any = trainer.training_step
        self._before = vars(trainer).get(_NAME)
        self._put = partial(_noted, self)
        vars(trainer)[_NAME] = self._put

    def close(self) -> None:
        """Gives the Trainer its own function back."""
        if vars(self._trainer).get(_NAME) is self._put:
            del vars(self._trainer)[_NAME]
            if self._before is not None:
                vars(self._trainer)[_NAME] = self._before

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a micro-batch of training."""
        loss = self._inner(*args, **kwargs)
        self._controller.note_loss(loss)
        return loss


def _noted(losses: StepLosses, *args: Any, **kwargs: Any) -> Any:
    return losses.call(*args, **kwargs)


def watch_losses(trainer: Trainer | None, controller: SnipController) -> StepLosses | None:
    """Returns what tells the guard of losses; None without a guard, or where the Trainer is not known."""
    if controller.config.guard == "off":
        return None
    if trainer is None:
        logger.warning("snip-hf: the guard cannot find the Trainer, and watches the gradients alone, not the loss.")
        return None
    return StepLosses(trainer, controller)
