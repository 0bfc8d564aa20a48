"""The mean of a model's weights over some steps, at which its loss has less of the noise of single steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


class WeightMeans:
    """The mean of the weights over the steps that were added.

    Args:
        model: whose weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self._weights = list(model.parameters())
        self._sums: list[Tensor] = []
        self.steps = 0
        """How many were added."""

    @torch.no_grad()
    def add(self) -> None:
        """Adds the weights of now."""
        if self.steps == 0:
            self._sums = [weight.detach().clone() for weight in self._weights]
        else:
            torch._foreach_add_(self._sums, self._weights)
        self.steps += 1

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Puts the mean in the weights' place inside.

        Raises:
            ValueError: nothing was added.
        """
        if self.steps == 0:
            raise ValueError("no weights were added; expected those of at least one step.")
        kept = [weight.detach().clone() for weight in self._weights]
        self._put([total / self.steps for total in self._sums])
        try:
            yield
        finally:
            self._put(kept)

    @torch.no_grad()
    def _put(self, values: list[Tensor]) -> None:
        torch._foreach_copy_(self._weights, values)
