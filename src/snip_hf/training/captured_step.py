"""The optimizer step that is to be probed, as noted while it runs: its first micro-batch, and what clipping does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..estimation.batch import Batch, BatchCounts
from ..estimation.samples import read
from ..layers.layer import SnipLayer
from ..layers.run_hooks import RunHook
from ..numerics.random_state import RandomState
from ..parallel.ranks import Ranks
from ..parallel.sharding import own_part


@dataclass
class TrainingPass:
    """A forward pass whose loss may be backpropagated. Only then is it one of the step's micro-batches."""

    batch: Mapping[str, Any]
    """Keyword arguments of the model's forward; empty if nothing will read them."""
    random_state: RandomState | None
    """With which it began; None unless the probe may run it again."""
    counted: bool = False


class StepWatch:
    """The step of a refresh or a check.

    Args:
        probe_tokens: tokens that the probe may run on (`Batch.part`); None: all.
        layers: the swapped layers, whose gradients' size is noted before clipping.
        parameters: all that get a gradient; none where nothing is to be noted.
    """

    def __init__(
        self, probe_tokens: int | None, layers: Mapping[str, SnipLayer], parameters: Iterable[nn.Parameter]
    ) -> None:
        self._batch: Batch | Exception = ValueError("No micro-batch of it was given to capture().")
        self.counts = BatchCounts(0, 0)
        """Of the whole micro-batch."""
        self.micro_batches = 0
        """Of the step, known when it ends."""
        self._probe_tokens = probe_tokens
        self._layers = layers
        self._squares: dict[str, Tensor] = {}
        self._is_queued = False
        # All parameters, since the last one to get its gradient may be none of the layers'.
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(RunHook(self._queue))
            for parameter in parameters
            if parameter.requires_grad
        ]

    def take(self, first: TrainingPass) -> None:
        """Takes the step's first micro-batch. One that cannot be probed raises when `batch` is asked for."""
        try:
            complete = Batch.of(first.batch)
            if first.random_state is not None:
                complete = replace(complete, random_state=first.random_state)
            self._batch = complete.part(self._probe_tokens)
            self.counts = complete.counts
        except Exception as error:  # raised again, and dealt with, when the probe needs it
            self._batch = error

    @property
    def batch(self) -> Batch:
        """The part of the first micro-batch that the probe runs."""
        if isinstance(self._batch, Exception):
            raise self._batch
        return self._batch

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def clip_factor(self, gradients: Mapping[str, Tensor], everyone: Ranks) -> float:
        """Returns what clipping multiplied the gradients by: their norm after it / before it, over the swapped layers.

        Args:
            gradients: layer -> clipped gradient.
            everyone: all ranks; each may hold a part of the gradients.
        """
        unclipped = sum(read(list(self._squares.values())))
        clipped = sum(read([_square(gradient) for gradient in gradients.values()]))
        before, after = (sum(parts) for parts in zip(*everyone.gather([unclipped, clipped]), strict=True))
        return (after / before) ** 0.5 if before > 0 else 1.0

    def _queue(self, parameter: Tensor) -> None:
        """Has the gradients noted at the end of the backward pass.

        DDP reduces them over the ranks in a callback of that end; ours comes after it, queued by a callback itself.
        """
        if not self._is_queued:
            self._is_queued = True
            queue = torch.autograd.Variable._execution_engine.queue_callback  # type: ignore[attr-defined]
            queue(lambda: queue(self._note))

    def _note(self) -> None:
        self._is_queued = False
        for name, layer in self._layers.items():
            if layer.weight.grad is not None:
                self._squares[name] = _square(layer.weight.grad.detach())


def _square(gradient: Tensor) -> Tensor:
    return own_part(gradient).to(torch.float32).square().sum()
