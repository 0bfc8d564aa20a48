"""The end of a backward pass, where gradients are complete and not clipped yet."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..layers.run_hooks import RunHook


class BackwardEnd(ABC):
    """Has something noted at the end of each backward pass, before anybody clips the gradients, until `end`.

    Args:
        parameters: all that get a gradient, since the last one to get it may be any; none where nothing is noted.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._is_queued = False
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(RunHook(self._queue))
            for parameter in parameters
            if parameter.requires_grad
        ]

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @abstractmethod
    def note(self) -> None:
        """Called at the end of a backward pass."""

    def _queue(self, parameter: Tensor) -> None:
        """Has the gradients noted at the end of the backward pass.

        DDP reduces them over the ranks in a callback of that end; ours comes after it, queued by a callback itself.
        """
        if not self._is_queued:
            self._is_queued = True
            queue = torch.autograd.Variable._execution_engine.queue_callback  # type: ignore[attr-defined]
            queue(lambda: queue(self._noted))

    def _noted(self) -> None:
        self._is_queued = False
        self.note()
