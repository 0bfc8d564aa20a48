"""The sums of dense layers of one shape, launched together from a CUDA graph (ours).

The sums of a layer take some 200 launches, for which the host takes longer than the device unless layers are large.
They are captured for the second layer of a shape, in later refreshes for the first one, and replayed for all that
follow, on copies of the tensors that differ. The kernels are the same, and so are the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.rounding import fake_quantize
from ..numerics.formats import FORMATS
from ..parallel.sharding import compute_device
from .extrapolation import BatchSizes, Squares
from .layer_sums import OPERANDS, Deferred, LayerSums, finish_errors, finish_loss, finish_squares, pieces_of, sizes_of
from .samples import LayerSample

# Elements of the largest weight whose sums are captured: launches of larger ones take the device longer than the host.
MOST_ELEMENTS = 2**24
# Most bytes of a capture beside the layer's own: more must be free on the device.
_LEAST_FREE = 3 * 2**30

# Keys of all captures of this process, whose kernels stay compiled.
_known: set[Hashable] = set()

Work = Callable[[Sequence[Tensor]], list[Tensor]]
Capture = Callable[[Callable[[], None]], Callable[[], Any] | None]


class DenseLayer(NamedTuple):
    """A layer of one matrix."""

    weight: Tensor
    """(O, I)"""
    pushforward: Sequence[Tensor] | None
    sample: LayerSample
    keys: tuple[int, int]
    """Keys of the random rounding of G, along O and along T."""


def can_be_replayed(matrices: Sequence[Tensor], sample: LayerSample) -> bool:
    """Returns True if a layer is dense and its weight small."""
    return sample.rows is None and matrices[0].numel() <= MOST_ELEMENTS


def replayed_sums(
    replays: Replays, layer: DenseLayer, micro_batches: int, batch: BatchSizes, *, formats: Sequence[str], form: str
) -> dict[str, tuple[Deferred[dict[str, Squares]], Deferred[float], Deferred[dict[str, tuple[float, float]]]]]:
    """Returns format -> weight divergences, loss divergence and errors of operands, as `LayerSums` returns them.

    Args:
        replays: of the estimate.
        layer: the layer.
        micro_batches, batch, formats: as of `LayerSums`.
        form: one of `SnipConfig.loss_estimator`.
    """
    sample, pushes, keys = layer.sample, layer.pushforward or (), layer.keys
    amaxes, probes = sample.amaxes or (), len(sample.x_dot)
    random = [name for name in formats if FORMATS[name].gradient.stochastic]
    # Random numbers depend on the layer's name and are no function of tensors.
    rounded = [one for name in random for one in _rounded_gradient(sample, name, keys)]
    dots = [*sample.x_dot, *sample.grad_output_dot]
    inputs = [layer.weight, *pushes, sample.x, sample.grad_output, *dots, *amaxes, *rounded]

    def work(given: Sequence[Tensor]) -> list[Tensor]:
        left = iter(given)

        def take(count: int) -> list[Tensor]:
            return list(islice(left, count))

        weight, push = take(1), take(len(pushes))
        x, grad_output = take(2)
        own = replace(sample, x=x, grad_output=grad_output, x_dot=take(probes), grad_output_dot=take(probes))
        if amaxes:
            of_x, of_g = take(2)
            own = replace(own, amaxes=(of_x, of_g))
        sums = LayerSums(own, weight, push or None, micro_batches, batch, formats=formats)
        for name in random:
            sums.take_rounded_gradient(name, keys, take(2))
        return [one for name in formats for one in _sums_of(sums, name, keys, form)]

    shapes = ((one.shape, one.stride(), one.dtype, one.device) for one in inputs)
    key = (form, sample.tokens, probes, micro_batches, batch, *shapes, *formats)
    with torch.cuda.device_of(layer.weight):
        found = iter(replays.run(key, inputs, work))
    sizes = sizes_of(sample, micro_batches, batch, pieces_of(sample.x.shape[0]))
    return {
        name: (
            Deferred(next(found), finish_squares(name, sizes, probes)),
            Deferred(next(found), finish_loss(form, sizes, batch)),
            Deferred(next(found), finish_errors(sizes, batch)),
        )
        for name in formats
    }


def _sums_of(sums: LayerSums, name: str, keys: tuple[int, int], form: str) -> Iterator[Tensor]:
    yield sums.weight_divergences(name, keys).sums
    yield sums.loss_divergence(name, form).sums
    yield sums.errors(name).sums


def _rounded_gradient(sample: LayerSample, name: str, keys: Sequence[int]) -> list[Tensor]:
    """Returns G along O and along T, as `LayerSums` rounds it by these keys."""
    amax = sample.amaxes[1] if sample.is_part and sample.amaxes else None
    return [
        fake_quantize(sample.grad_output, FORMATS[name], OPERANDS["g"], contracts, key, 0, 1, amax)
        for contracts, key in zip((1, 0), keys, strict=True)
    ]


class Replays:
    """The captures of one estimate.

    Args:
        capture: captures some work; returns what repeats it, or None if it cannot now.
        known: keys that earlier estimates captured; grows.
    """

    def __init__(self, capture: Capture, known: set[Hashable]) -> None:
        self._capture, self._known = capture, known
        self._seen = set[Hashable]()
        self._captured: dict[Hashable, _Captured] = {}

    @classmethod
    def on_cuda(cls, weights: Sequence[Tensor]) -> Replays | None:
        """Returns those of an estimate of layers with these weights; None on other devices."""
        is_cuda = torch.version.cuda is not None and all(compute_device(weight).type == "cuda" for weight in weights)
        return cls(cuda_graph, _known) if is_cuda else None

    def run(self, key: Hashable, inputs: Sequence[Tensor], work: Work) -> list[Tensor]:
        """Returns work(inputs).

        Args:
            key: the same for layers whose work differs only in the values of its inputs.
            inputs: of the same shapes and dtypes for a key.
            work: returns tensors of one dimension, and does not wait for the device.
        """
        captured = self._captured.get(key)
        if captured is not None:
            torch._foreach_copy_(captured.inputs, list(inputs))
        elif key in self._seen or key in self._known:
            captured = self._try(inputs, work)
        if captured is None:
            # The first of its shape compiles kernels for the capture of the next one.
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
    """One tensor, which every replay overwrites."""
    lengths: list[int]


class _Home(NamedTuple):
    """Stream and memory of a device's captures, from one refresh to the next."""

    stream: torch.cuda.Stream
    pool: Any
    keeper: torch.cuda.CUDAGraph
    """Keeps the pool alive, so that refreshes take the same memory."""


def cuda_graph(work: Callable[[], None]) -> Callable[[], None] | None:
    """Captures work as a graph of the current device; returns its replay, or None if too little memory is free."""
    device = torch.device("cuda", torch.cuda.current_device())
    if torch.cuda.mem_get_info(device)[0] < _LEAST_FREE:
        return None
    graph = torch.cuda.CUDAGraph()
    try:
        home = _home(device)
        _capture(home.stream, home.pool, graph, work)
    except torch.OutOfMemoryError:
        _home.cache_clear()  # single launches need the pool's memory
        return None
    return graph.replay


def _capture(stream: torch.cuda.Stream, pool: Any, graph: torch.cuda.CUDAGraph, work: Callable[[], None]) -> None:
    # Not `torch.cuda.graph`, which collects garbage and empties caches.
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
def _home(device: torch.device) -> _Home:
    stream, pool, keeper = torch.cuda.Stream(device), torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
    one = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        torch.mm(one, one, out_dtype=torch.float32)  # its workspace belongs to the stream, not to a graph

    def fill() -> None:
        one.zero_()

    _capture(stream, pool, keeper, fill)
    return _Home(stream, pool, keeper)
