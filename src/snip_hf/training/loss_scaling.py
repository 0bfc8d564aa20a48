"""The loss scale of FP16 training: where a torch GradScaler is, what its scale is, and which steps it leaves out.

A GradScaler multiplies the loss, divides the gradients by the same scale before the optimizer's step, and leaves out a
step in which one of them is not finite.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..estimation.samples import read
from ..optimizers.parts import groups_of
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
        self._optimizer = optimizer

    def check(self) -> None:
        """Raises ValueError for trained weights in FP16, whose gradients a GradScaler cannot unscale."""
        groups = groups_of(self._optimizer) if self.is_on else []
        weights = [weight for group in groups for weight in group["params"] if weight.requires_grad]
        halves = sum(weight.dtype == torch.float16 for weight in weights)
        if halves:
            raise ValueError(
                f"{halves} of the {len(weights)} trained parameters are in FP16, whose gradients a GradScaler does not "
                "unscale. Load the model in FP32 (from_pretrained(..., dtype=torch.float32)); fp16=True still "
                "multiplies in FP16."
            )

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
