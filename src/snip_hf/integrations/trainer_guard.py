"""The guard under a Trainer: the raw loss of each micro-batch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import Trainer

from ..training.controller import SnipController
from .trainer_loss import Wrapped

logger = logging.getLogger(__name__)


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
