"""A training step's passes as one CUDA graph: forward, backward and clipping, launched together.

The optimizer stays outside: it takes a handful of launches, its hooks tell the controller of steps, and its learning
rate stays a number of the host in double precision. So the kernels and their arguments are those of a step without a
graph, and so are the numbers, except where a backend sums otherwise in a graph (docs/tensor_scaled.md).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from snip_hf.estimation.replayed_sums import Capture
from snip_hf.planning.plan import PrecisionPlan

Passes = Callable[[Tensor], Tensor]
"""Tokens (B, L) -> loss, after which gradients are complete and clipped."""


@dataclass(frozen=True)
class _Captured:
    ids: Tensor
    """The graph's own, that each step's tokens are copied to."""
    loss: Tensor
    gradients: Sequence[Tensor | None]
    replay: Callable[[], Any]


class StepGraphs:
    """Runs the passes of steps: the first ones after a change as they are, all others from a graph.

    A change is another plan, batch size, or state of the training (`forget`). Steps that are watched for a probe run as
    they are, too, since hooks look at them. In the first step after a change, kernels are compiled and tuned.

    Args:
        passes: what is captured. It waits for the device nowhere, and reads what differs between steps from the same
            addresses.
        parameters: whose gradients it leaves in `grad`.
        capture: captures work, which it runs or not; returns what does it again, or None where it cannot.
    """

    def __init__(self, passes: Passes, parameters: Sequence[nn.Parameter], capture: Capture) -> None:
        self._passes, self._parameters, self._capture = passes, parameters, capture
        self._seen: Hashable = None
        """What the last steps had in common; None: nothing has run."""
        self._captured: _Captured | None = None

    def forget(self) -> None:
        """To be called when weights, layers or their states were replaced."""
        self._seen = self._captured = None

    def run(self, ids: Tensor, plan: PrecisionPlan | None, is_watched: bool) -> Tensor:
        """Returns the loss of a step, detached; the parameters have its gradients.

        Args:
            ids: (B, L), on the device.
            plan: in force; None: nothing is quantized.
            is_watched: whether hooks look at the step's passes.

        Raises:
            torch.OutOfMemoryError: too little memory is free for a graph.
        """
        seen = ids.shape, None if plan is None else _formats(plan)
        if seen != self._seen:
            self._captured = None  # before the step, which needs the memory
        is_first, self._seen = seen != self._seen, seen
        if is_first or is_watched:
            return self._passes(ids)
        self._captured = self._captured or self._capture_passes(ids)
        self._captured.ids.copy_(ids)
        self._captured.replay()
        for parameter, gradient in zip(self._parameters, self._captured.gradients, strict=True):
            parameter.grad = gradient
        return self._captured.loss.clone()

    def _capture_passes(self, ids: Tensor) -> _Captured:
        own, loss = ids.clone(), torch.zeros((), device=ids.device)
        replay = self._capture(lambda: loss.copy_(self._passes(own)))
        if replay is None:
            raise torch.OutOfMemoryError(
                "forks.cuda_graph: the GPU has less than 3 GiB free, or less than a graph of the step takes. Run fewer "
                "processes on it (--workers)."
            )
        gradients = [parameter.grad for parameter in self._parameters]
        return _Captured(own, loss, gradients, replay)


def _formats(plan: PrecisionPlan) -> Hashable:
    return tuple((layer, tuple(formats.items())) for layer, formats in plan.assignment.items())
