"""The loss scale of FP16 training: where a torch GradScaler is, what its scale is, and which steps it leaves out.

A GradScaler multiplies the loss, divides the gradients by the same scale before the optimizer's step, and leaves out a
step in which one of them is not finite.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..estimation.samples import read
from ..parallel.ranks import Ranks
from ..parallel.sharding import own_part


class LossScaling:
    """The loss scaling of one run.

    Args:
        optimizer: as the controller was given it; Accelerate's wrapper has the GradScaler that it steps with.
        accelerator: the Accelerate object of the loop, if there is one.
    """

    def __init__(self, optimizer: Any, accelerator: Any = None) -> None:
        self.scaler: Any = _scaler_of(optimizer) or _scaler_of(accelerator)
        """None where nothing is scaled, or where a loop of one's own has not said by what."""

    @property
    def is_on(self) -> bool:
        return self.scaler is not None and bool(self.scaler.is_enabled())

    @property
    def scale(self) -> float:
        """What the loss of the running step is multiplied by; 1 where nothing is scaled, as far as is known."""
        return float(self.scaler.get_scale()) if self.is_on else 1.0

    def leaves_out(self, parameters: Iterable[Tensor], everyone: Ranks) -> bool:
        """Returns True if the step is about to be left out. Collective where the loss is scaled.

        Args:
            parameters: all that are trained, with the gradients of the step.
            everyone: all ranks.
        """
        if not self.is_on:
            return False
        gradients = [own_part(one.grad.detach()) for one in parameters if one.grad is not None]
        figures = read([torch.isfinite(gradient).all() for gradient in gradients])
        return not all(everyone.gather(all(figures)))


def say_if_off(optimizer: Any, accelerator: Any, device: torch.device, log: logging.Logger) -> None:
    """Warns of FP16 that was asked for on a CPU, where Accelerate neither scales the loss nor casts.

    Args:
        optimizer: as `LossScaling` takes it.
        accelerator: as above.
        device: of the weights.
        log: gets the warning.
    """
    is_asked = getattr(accelerator, "mixed_precision", None) == "fp16"
    if is_asked and device.type == "cpu" and not LossScaling(optimizer, accelerator).is_on:
        log.warning(
            "snip-hf: mixed precision in FP16 was asked for on a CPU, where Accelerate gives no GradScaler and no "
            "autocast: the model runs in the precision of its weights. Train on a GPU, or in BF16."
        )


def _scaler_of(holder: Any) -> Any:
    """Returns the GradScaler that an object, or one that it wraps, holds as `.scaler`; None if there is none."""
    if isinstance(holder, list | tuple | dict):
        several = holder.values() if isinstance(holder, dict) else holder
        return next((found for one in several if (found := _scaler_of(one)) is not None), None)
    while holder is not None:
        scaler = getattr(holder, "scaler", None)
        if hasattr(scaler, "get_scale"):
            return scaler
        holder = getattr(holder, "optimizer", None)
    return None
