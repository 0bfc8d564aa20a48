"""The sums of layers of one shape, launched together from a CUDA graph (ours).

The sums of a layer take some 200 launches. In models of many small layers the host takes longer for them than the
device. So they are captured for the second layer of a shape, or in later refreshes for the first one, and replayed for
all that follow, on copies of what differs from layer to layer. The kernels are the same, and so are the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Elements of the largest weight whose sums are captured: launches of larger ones take the device longer than the host.
MOST_ELEMENTS = 2**24
# Bytes that a capture takes at most, beside the layer's own: what is free on the device has to be more.
_LEAST_FREE = 3 * 2**30

# Of this process, whose kernels stay compiled.
_known: set[Hashable] = set()

Work = Callable[[Sequence[Tensor]], list[Tensor]]
Capture = Callable[[Callable[[], None]], Callable[[], Any] | None]


class Replays:
    """The captured sums of one estimate.

    Args:
        capture: captures some work; returns what does it again, or None where it cannot now.
        known: keys that were captured before, by other estimates, too; grows.
    """

    def __init__(self, capture: Capture, known: set[Hashable] | None = None) -> None:
        self._capture, self._known = capture, set[Hashable]() if known is None else known
        self._seen = set[Hashable]()
        self._captured: dict[Hashable, _Captured] = {}

    @classmethod
    def on_cuda(cls, weights: Sequence[Tensor]) -> Replays | None:
        """Returns those of an estimate of layers with these weights; None elsewhere."""
        is_cuda = torch.version.cuda is not None and all(weight.is_cuda for weight in weights)
        return cls(cuda_graph, _known) if is_cuda else None

    def run(self, key: Hashable, inputs: Sequence[Tensor], work: Work) -> list[Tensor]:
        """Returns work(inputs).

        Args:
            key: the same for layers whose work differs in the values of its inputs only.
            inputs: all that differs; of the same shapes and dtypes for a key.
            work: returns tensors of one dimension, and does not wait for the device.
        """
        captured = self._captured.get(key)
        if captured is not None:
            torch._foreach_copy_(captured.inputs, list(inputs))
        elif key in self._seen or key in self._known:
            captured = self._try(inputs, work)
        if captured is None:
            # The first of its shape compiles and tunes what is captured with the next one.
            self._seen.add(key)
            return work(inputs)
        self._captured[key] = captured
        self._known.add(key)
        captured.replay()
        return list(captured.result[0].clone().split(captured.lengths))

    def _try(self, inputs: Sequence[Tensor], work: Work) -> _Captured | None:
        own, lengths, result = [one.clone() for one in inputs], list[int](), list[Tensor]()

        def captured() -> None:
            found = work(own)
            lengths[:] = [len(one) for one in found]
            result[:] = [torch.cat(found)]

        replay = self._capture(captured)
        return None if replay is None else _Captured(own, replay, result, lengths)


class _Captured(NamedTuple):
    inputs: list[Tensor]
    replay: Callable[[], Any]
    result: list[Tensor]
    """One tensor, that every replay writes."""
    lengths: list[int]


class _Home(NamedTuple):
    """Where a thread's graphs of a device are captured, from one refresh to the next."""

    stream: torch.cuda.Stream
    pool: Any
    keeper: torch.cuda.CUDAGraph
    """Lets the pool live: what one refresh held, the next one takes."""


def cuda_graph(work: Callable[[], None]) -> Callable[[], None] | None:
    """Captures work as a graph of the current device; returns its replay, or None where too little memory is free."""
    device = torch.device("cuda", torch.cuda.current_device())
    if torch.cuda.mem_get_info(device)[0] < _LEAST_FREE:
        return None
    home, graph = _home(device, get_ident()), torch.cuda.CUDAGraph()
    try:
        _capture(home.stream, home.pool, graph, work)
    except torch.OutOfMemoryError:
        # Of many formats more is held than was asked for. Single launches need what the pool keeps from them.
        _home.cache_clear()
        return None
    return graph.replay


def _capture(stream: torch.cuda.Stream, pool: Any, graph: torch.cuda.CUDAGraph, work: Callable[[], None]) -> None:
    before = torch.cuda.current_stream(stream.device)
    stream.wait_stream(before)
    with torch.cuda.stream(stream):
        # "relaxed": kernels may be loaded, and memory be taken for the pool.
        graph.capture_begin(pool=pool, capture_error_mode="relaxed")
        try:
            work()
        finally:
            graph.capture_end()
    before.wait_stream(stream)


@cache
def _home(device: torch.device, thread: int) -> _Home:
    stream, pool, keeper = torch.cuda.Stream(device), torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
    one = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        torch.mm(one, one, out_dtype=torch.float32)  # its workspace, which belongs to the stream, not to a graph

    def fill() -> None:
        one.zero_()

    _capture(stream, pool, keeper, fill)
    return _Home(stream, pool, keeper)
