"""The chunks that a pipeline runs through the parts of a model in one step: each has random numbers of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from ..layers.run_hooks import RunHook
from ..layers.state import set_step, snip_linears


class ChunkNumbers:
    """Keys the random numbers of the layers before each pass through a part, until `close`.

    Args:
        parts: the model, or the parts of it that this process holds.
        seed: of the run.
        step: returns the optimizer step under way.
    """

    def __init__(self, parts: Iterable[nn.Module], seed: int, step: Callable[[], int]) -> None:
        self._seed = seed
        self._step = step
        self._chunks: Counter[nn.Module] = Counter()
        before = RunHook(self._before)
        self._hooks = [part.register_forward_pre_hook(before) for part in parts]

    def end_step(self) -> None:
        """To be called after each optimizer step: the numbers begin anew."""
        self._chunks.clear()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before(self, part: nn.Module, args: tuple[Any, ...]) -> None:
        set_step(snip_linears(part), self._seed, self._step(), self._chunks[part])
        self._chunks[part] += 1
