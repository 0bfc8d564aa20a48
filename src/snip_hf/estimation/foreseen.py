"""The first step and probe as they can be foreseen, and the kernels that they and the plan after them launch.

They are found by their own code on tensors without memory.

Legend: I in_features, O out_features, T tokens that a process probes, n sampled ones of all processes; B sequences of L
tokens in H heads, of which some share the keys of one; D channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..kernels import adam_slopes
from ..kernels.backend import BACKENDS
from ..kernels.split_attention import Attention, attend, attention_gradients, takes
from ..numerics.formats import FORMATS
from .criterion import LayerCriterion
from .extrapolation import BatchSizes
from .optimizer_step import UpdateChange
from .products import product
from .samples import LayerSample, Recorder, SamplePlan
from .whole_layer import Task, WholeLayer

_META = torch.device("meta")


@dataclass(frozen=True)
class Foreseen:
    """What decides which kernels a probe launches; JSON data."""

    layers: list[dict[str, Any]]
    """`layer_of` each kind of layer that the model has."""
    tokens: list[int]
    """Data rank -> T."""
    attention: list[int] | None
    """B, L, H, heads of keys, D of torch's causal attention; None: the model has another one, or it is not known."""
    formats: list[str]
    probes: int
    probe_tokens: int | None
    loss_estimator: str
    backend: str
    micro_batch: int
    """Tokens that a process trains on at once."""
    response: str
    """How the optimizer answers to gradients: "adam" by `kernels.adam_slopes`, "elementwise", or "other"."""
    gates: list[int]
    """Each width of the gated MLPs that run as one."""


def layer_of(matrix: Tensor, dtype: torch.dtype, is_trained: bool) -> dict[str, Any]:
    """Returns what is to be known of a layer of one matrix, (O, I).

    Args:
        matrix: its weight as a matrix.
        dtype: of the parameter.
        is_trained: whether the optimizer updates it.
    """
    return {
        "shape": list(matrix.shape),
        "stride": list(matrix.stride()),
        "dtype": str(dtype).removeprefix("torch."),
        "is_trained": is_trained,
    }


def parts(foreseen: Foreseen) -> Iterator[tuple[str, Callable[[], object]]]:
    """Gives the parts of a probe, and of the steps under its plan: name and what to call on tensors without memory.

    Attention comes first: its kernels take longest to compile, and the pass that counts the first step launches them.
    Formats that a user registered are not known here; what they need, the probe compiles.
    """
    foreseen = replace(foreseen, formats=[name for name in foreseen.formats if name in FORMATS])
    if foreseen.attention is not None:
        yield "attention", partial(_attend, *foreseen.attention)
    for layer in foreseen.layers:
        yield f"products of {layer}", partial(_multiply, foreseen.tokens[0], layer)
    for layer in foreseen.layers:
        if layer["is_trained"] and foreseen.response == "adam":
            yield f"Adam's slopes of {layer}", partial(_slopes, layer)
    for layer in foreseen.layers:
        yield f"sums of {layer}", partial(_sums, foreseen, layer)
    if foreseen.backend in BACKENDS:  # not one that a user registered, or that has no part here
        yield from BACKENDS[foreseen.backend].kernels_of_plans(foreseen.layers, foreseen.micro_batch, foreseen.formats)


def _slopes(layer: Mapping[str, Any]) -> None:
    gradient = torch.empty(layer["shape"], device=_META)
    first, second = (torch.empty_like(gradient, dtype=getattr(torch, layer["dtype"])) for _ in range(2))
    numbers = adam_slopes.AdamNumbers(*[1.0] * len(adam_slopes.AdamNumbers._fields))
    for tangent in (torch.empty_like(gradient), gradient.new_empty(()).expand_as(gradient)):
        if adam_slopes.takes(gradient, first, second, tangent):
            adam_slopes.adam_slopes(gradient, first, second, tangent, numbers)


def _attend(batch: int, length: int, heads: int, shared_heads: int, channels: int) -> None:
    # Projections give (B, L, H, D).
    query, key, value = (
        torch.empty(batch, length, count, channels, device=_META).transpose(1, 2)
        for count in (heads, shared_heads, shared_heads)
    )
    if takes(query, key, value, is_causal=True):
        task = Attention(channels**-0.5, is_causal=True)
        out, logs = attend(query, key, value, task)
        attention_gradients(torch.empty_like(out), (query, key, value), out, logs, task)


def _multiply(tokens: int, layer: Mapping[str, Any]) -> None:
    """The passes of one layer."""
    moved = torch.empty_strided(layer["shape"], layer["stride"], device=_META)  # in FP32
    x, grad_output = _inputs(tokens, layer)
    product(x, moved.t())
    product(grad_output, moved)


def _inputs(tokens: int, layer: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Returns X (T, I) and G (T, O) of a layer, in FP32."""
    outputs, inputs = layer["shape"]
    return torch.empty(tokens, inputs, device=_META), torch.empty(tokens, outputs, device=_META)


def _sums(foreseen: Foreseen, layer: Mapping[str, Any]) -> None:
    """The sums over what the passes of one layer show."""
    laid_out = partial(torch.empty_strided, layer["shape"], layer["stride"], device=_META)
    moved = laid_out()  # in FP32
    x, grad_output = _inputs(foreseen.tokens[0], layer)
    sample = _sample(foreseen, x, grad_output)
    weight = laid_out(dtype=getattr(torch, layer["dtype"]))
    push: UpdateChange | tuple[Tensor, ...] | None = None
    if layer["is_trained"]:
        push = UpdateChange(torch.clone, torch.clone) if foreseen.response == "other" else (moved,)
    batch = BatchSizes.complete(sample.tokens, sample.tokens)
    task = Task(LayerCriterion, foreseen.loss_estimator, foreseen.formats, 1, batch)
    WholeLayer("", (weight,), None, push).figures(sample, task, (0, 1), None)


def _sample(foreseen: Foreseen, x: Tensor, grad_output: Tensor) -> LayerSample:
    """Returns the sample of all processes, where each keeps its part of such X (T, I) and G (T, O)."""
    whole_amax = any(FORMATS[name].has_tensor_scale for name in foreseen.formats)
    plan = SamplePlan(foreseen.probe_tokens, 0, 0, 0, tuple(foreseen.tokens), whole_amax)
    recorder = Recorder(plan)
    recorder.keep("", x, grad_output)
    amaxes = recorder.records[""].amaxes
    count = sum(len(plan._replace(rank=rank).kept(tokens)) for rank, tokens in enumerate(foreseen.tokens))
    x, grad_output = (one.new_empty(count, one.shape[1]) for one in (x, grad_output))
    return LayerSample(
        sum(foreseen.tokens),
        x,
        grad_output,
        [torch.empty_like(x) for _ in range(foreseen.probes)],
        [torch.empty_like(grad_output) for _ in range(foreseen.probes)],
        amaxes=(amaxes[0], amaxes[1].clone()) if len(amaxes) else None,
    )
