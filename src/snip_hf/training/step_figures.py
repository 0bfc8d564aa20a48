"""The raw loss and gradient norm of a step, as the guard sees them: before clipping, and before a Trainer's log.

Gradients that are finite then, and not when the optimizer is about to take them, count as they are.

The Trainer's `logging_nan_inf_filter` leaves losses that are not finite out of its log; nothing is left out here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..estimation.samples import read
from ..layers.layer import SnipLayer
from ..parallel.ranks import Processes
from ..parallel.sharding import is_sharded, own_part
from .gradients import BackwardEnd, LossScaling


class Figures(NamedTuple):
    """Of a step, on all ranks together."""

    loss: float | None
    """None: nobody noted it."""
    norm: float | None
    """Of all gradients before clipping; None: there are none, or a GradScaler is about to leave the step out."""
    broken: list[str]
    """Layers whose gradients are not finite."""


class StepFigures(BackwardEnd):
    """Notes what one step after the other has, until `end`.

    Args:
        model: whose gradients are noted.
        layers: the swapped ones, to name those that are not finite.
        scaling: by what the loss is scaled.
        processes: those of the run.
    """

    def __init__(
        self, model: nn.Module, layers: Mapping[str, SnipLayer], scaling: LossScaling, processes: Processes
    ) -> None:
        self._model, self._scaling, self._processes = model, scaling, processes
        self._layers: dict[int, list[str]] = {}
        for name, layer in layers.items():
            self._layers.setdefault(id(layer.weight), []).append(name)
        self._losses: list[Tensor] = []
        self._norms: Tensor | None = None
        """Parameter -> norm of what this rank holds of its gradient."""
        self._of: list[Tensor] = []
        super().__init__(model.parameters())

    def note_loss(self, loss: Tensor | float) -> None:
        """Notes what a micro-batch adds to the loss of its step."""
        self._losses.append(loss.detach().to(torch.float32) if isinstance(loss, Tensor) else torch.tensor(float(loss)))

    @torch.no_grad()
    def note(self) -> None:
        self._of = [parameter for parameter in self._model.parameters() if parameter.grad is not None]
        self._norms = _norms(self._of) if self._of else None

    def take(self) -> Figures:
        """Returns the figures of the step whose gradients are complete, and forgets them. Collective."""
        loss, square, broken = self._own()
        gathered = self._processes.everyone.gather([loss, square, broken], "the guard's figures")
        losses = [one for one, _, _ in gathered if one is not None]
        squares = [one for _, one, _ in gathered if one is not None]
        names = dict.fromkeys(name for _, _, own in gathered for name in own)
        norm = math.sqrt(sum(squares)) if squares else None
        if norm is not None and self._scaling.is_on:
            norm = norm / self._scaling.scale if math.isfinite(norm) else None
        return Figures(sum(losses) / len(losses) if losses else None, norm, list(names))

    def leave_out(self) -> bool:
        """Takes the gradients away, so that the optimizer has nothing to do; returns True if it has nothing.

        With a GradScaler nothing is taken away: it leaves such a step out itself.
        """
        if self._scaling.is_on:
            return False
        for parameter in self._model.parameters():
            parameter.grad = None
        return True

    def _own(self) -> tuple[float | None, float | None, list[str]]:
        """Returns this rank's loss, its share of the squared norm, and its layers that are not finite."""
        if self._norms is None and self._hooks:  # a loop that gives gradients without a backward pass
            self.note()
        losses, norms, of = self._losses, self._norms, self._of
        self._losses, self._norms, self._of = [], None, []
        total = [torch.stack([one.to(losses[0].device).reshape(()) for one in losses]).sum()] if losses else []
        if norms is None:
            return next(iter(read(total)), None), None, []
        copies = self._processes.data.size
        # What all ranks hold counts once.
        weights = torch.tensor([1.0 if is_sharded(parameter) else 1.0 / copies for parameter in of])
        square = (norms.square() * weights.to(norms.device)).sum()
        now = _norms(of)  # clipped, or whatever else was done to them
        *loss, found, after = read([*total, square, now.sum()])
        if math.isfinite(found) and not math.isfinite(after):
            norms, found = now, after
        broken = []
        if not math.isfinite(found):
            flags = torch.isfinite(norms).tolist()
            broken = [
                name
                for is_finite, parameter in zip(flags, of, strict=True)
                if not is_finite
                for name in self._layers.get(id(parameter), [])
            ]
        return next(iter(loss), None), found, broken


def _norms(parameters: Sequence[Tensor]) -> Tensor:
    """Returns the norms of what this rank holds of gradients; 0 for one that was taken away."""
    parts = [one.new_zeros(1) if one.grad is None else own_part(one.grad) for one in parameters]
    norms = torch._foreach_norm(parts, 2, dtype=torch.float32)
    return torch.stack([norm.to(norms[0].device) for norm in norms])
