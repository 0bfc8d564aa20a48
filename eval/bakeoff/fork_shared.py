"""What the workers of forks have in common: which forks and bases are taken, and how many workers are left."""

from __future__ import annotations

from collections.abc import Sequence

import torch.multiprocessing as mp

from .fork_recipe import ForkRun

# Of a base: nobody trains it; somebody does or did; that failed; lines that are there began with other weights.
FREE, TAKEN, FAILED, APART = range(4)


class Shared:
    """What workers have in common. What is free is taken and given back under the lock of `is_taken`.

    Args:
        todo: forks, as in `Job`.
        workers: how many there are.
        devices: on which they take turns.
    """

    def __init__(self, todo: Sequence[ForkRun], workers: int = 1, devices: int = 1) -> None:
        context = mp.get_context("spawn")
        self._left = context.Array("i", [len(range(device, workers, devices)) for device in range(devices)])
        """Device -> how many workers have not ended."""
        self.failed = context.Value("i", 0)
        """How many forks, bases and compilations failed."""
        self.is_taken = context.Array("b", len(todo))
        """Place in `todo` -> whether a worker took it."""
        self.bases = {run.fork.base_seed: context.Value("i", FREE) for run in todo}
        """Seed -> whether a worker trains the base."""
        self.lock = context.Lock()
        """Of the output."""

    def end(self, worker: int) -> None:
        """Notes that a worker takes nothing any more."""
        with self.is_taken.get_lock():
            self._left[worker % len(self._left)] -= 1

    def leave(self, worker: int, fork: int | None = None, base: int | None = None) -> bool:
        """Gives back what a worker has taken, and returns True, unless it is the last one of its device.

        Args:
            worker: is to end then.
            fork: place in `todo`.
            base: seed.
        """
        with self.is_taken.get_lock():
            if self._left[worker % len(self._left)] == 1:
                return False
            self._left[worker % len(self._left)] -= 1
            if fork is not None:
                self.is_taken[fork] = False
            if base is not None:
                self.bases[base].value = FREE
            return True
