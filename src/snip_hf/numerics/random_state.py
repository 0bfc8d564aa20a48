"""The state of all random generators that a forward pass may draw from, saved and restored."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomState:
    """The state of every generator that a forward pass may draw from: torch (CPU, CUDA), numpy, python."""

    cpu: Tensor
    cuda: list[Tensor]
    numpy: Any
    python: Any

    @classmethod
    def now(cls) -> RandomState:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return cls(torch.get_rng_state(), cuda, np.random.get_state(), random.getstate())

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)
        np.random.set_state(self.numpy)
        random.setstate(self.python)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restores the state of all generators after the context."""
    before = RandomState.now()
    try:
        yield
    finally:
        before.restore()
