"""The memory of a probe, and the parts that its passes recompute to stay within a bound.

A pass in FP32 holds the activations of every block and an FP32 copy of every parameter that moves. A block that is
recomputed (activation checkpointing) holds its input only; if all blocks are, their moved weights can be made again
each time they are read. Either changes no number.

By default a probe stays within the memory that a training step of this model and micro-batch needs while its loss is
computed, less the gradients, which exist beside a probe. So it needs no more than the step that it belongs to.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..config import SnipConfig
from ..layers.layer import SnipLayer
from ..layers.selection import head_of
from ..layers.state import block_of
from ..numerics.gemms import TILE
from ..parallel.sharding import compute_device, is_sharded
from .passes import recomputes_already

MIB = 2**20
# Any GPU that trains has this much free; below it, recomputing is not worth its time.
LEAST_BOUND = 1024 * MIB
_FP32 = 4  # bytes
# Bytes per token and feature into or out of a swapped layer, in a pass, beside the samples of inputs: for norms,
# attention and activation functions (4.55 measured for Llamas on a GPU, less 1.31 for inputs that only layers kept).
_IN_A_PASS = 3.24
# The same in a compiled BF16 training step (Llamas: 1.34 if quantized operands are not saved, 1.67 if they are).
_IN_A_STEP = 4 / 3
# Per token and word of the vocabulary: FP32 logits, their logarithms and their gradients.
_PER_WORD = 12


@dataclass(frozen=True)
class Savings:
    """The parts that the passes of a probe recompute to save memory."""

    recomputed: tuple[str, ...] = ()
    """Blocks (named as in plans) whose activations are recomputed in the backward pass."""
    remade: frozenset[str] = frozenset()
    """Layers whose moved weights are made again each time they are read."""


NO_SAVINGS = Savings()


class PassSizes(NamedTuple):
    """The sizes of a probe's passes."""

    tokens: int
    sampled: int
    """Sampled tokens per layer."""
    probes: int
    """Number of random directions; 0: a single pass."""
    ranks: int = 1
    """Ranks that share sharded weights."""
    noisy: int = 0
    """Passes with noise; the differences that each shows are kept."""


def step_memory(model: nn.Module, layers: Mapping[str, SnipLayer], tokens: int, ranks: int = 1) -> float:
    """Returns the bytes that a training step holds while its loss is computed, less the gradients.

    A function of sizes only, so that equal runs do equal work.

    Args:
        model: a converted model, without wrappers.
        layers: the swapped layers.
        tokens: tokens of the micro-batch that is trained on.
        ranks: number of ranks that share sharded weights.
    """
    features = dict.fromkeys(map(block_of, layers), 0.0)
    for name, layer in layers.items():
        features[block_of(name)] += _features(layer)
    per_token = sum(features.values()) * _IN_A_STEP
    if recomputes_already(model):  # inputs of blocks, in FP32 under autocast, and one block
        inputs = {block_of(name): layers[name].in_features for name in reversed(list(layers))}
        per_token = sum(inputs.values()) * _FP32 + max(features.values()) * _IN_A_STEP
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    gradients = sum(_elements(parameter, ranks) * parameter.element_size() for parameter in trained)
    return max(LEAST_BOUND, tokens * (per_token + _PER_WORD * _vocabulary(model)) - gradients)


def find_savings(
    model: nn.Module,
    layers: Mapping[str, SnipLayer],
    remakeable: Collection[str],
    bound: float,
    sizes: PassSizes,
    others: Sequence[Tensor] = (),
) -> Savings:
    """Returns the parts to recompute so that a probe stays within `bound` bytes, or comes as near as it can.

    The first blocks are recomputed, as few as are needed: their backward passes come last, when the activations of all
    others are gone.

    Args:
        model: a converted model, without wrappers.
        layers: the swapped layers.
        remakeable: layers whose directions can be computed within a pass.
        bound: bytes.
        sizes: sizes of the passes.
        others: parameters that move beside the swapped weights.
    """
    members: dict[str, list[str]] = {}
    for name in layers:
        members.setdefault(block_of(name), []).append(name)
    features = [sum(_features(layers[name]) for name in names) for names in members.values()]
    sampled_inputs = [
        sum(_FP32 * sizes.sampled * layers[name].in_features * layers[name].rows_per_token for name in names)
        for names in members.values()
    ]
    activations = [
        _IN_A_PASS * sizes.tokens * one + sampled for one, sampled in zip(features, sampled_inputs, strict=True)
    ]
    inputs = [_FP32 * sizes.tokens * layers[names[0]].in_features for names in members.values()]
    samples = _FP32 * sizes.sampled * sum(features)
    # Samples of the passes before: of this direction's first side, of the directions before, and of noise.
    sides = sizes.probes + (sizes.probes > 1) + sizes.noisy
    moving = (
        [*(layer.weight for layer in layers.values() if layer.weight.requires_grad), *others] if sizes.probes else []
    )
    moved = sum(_elements(weight, sizes.ranks) for weight in moving)
    logits = _PER_WORD * sizes.tokens * _vocabulary(model)
    most = 0 if recomputes_already(model) else len(members)

    def peak(recomputed: int) -> float:
        """Returns the larger number of bytes held: at the loss, or in the first block's backward pass."""
        count = recomputed if most else len(members)
        at_loss = sides * samples + sum(activations[count:]) + logits
        # Half as much again for the gradients within a block.
        at_end = (sides + 1) * samples + 1.5 * max(activations[:count], default=0.0)
        return _FP32 * moved + sum(inputs[:count]) + max(at_loss, at_end)

    for recomputed in range(most + 1):
        if peak(recomputed) <= bound:
            return Savings(tuple(members)[:recomputed])
    return Savings(tuple(members)[:most], frozenset(remakeable if sizes.probes else ()))


def kept_tokens(config: SnipConfig, tokens: int, ranks: int = 1) -> int:
    """Returns how many tokens per layer a rank holds at most, of those that its part of the probe runs on.

    With several ranks, each keeps its own part and receives the others' parts for the layers that it owns.
    """
    if ranks > 1:
        own = tokens if config.probe_tokens is None else min(tokens, math.ceil(config.probe_tokens / ranks))
        return 2 * own
    if config.probe_tokens is None or tokens <= config.probe_tokens:
        return tokens
    return min(config.probe_tokens, tokens) // TILE * TILE


@contextmanager
def measured_peak(weight: Tensor) -> Iterator[list[float | None]]:
    """Yields a list that afterwards holds the peak of allocated CUDA memory within the context, beyond what was
    allocated before, in MiB.

    Nothing is reset, so that the program's own peak statistics stay as they are: if the process had reached a higher
    peak before, the context's peak is unknown and the list holds None. It also holds None if passes do not use `weight`
    on CUDA.
    """
    peak: list[float | None] = [None]
    device = compute_device(weight)
    if device.type != "cuda":
        yield peak
        return
    allocated, before = (f(device) for f in (torch.cuda.memory_allocated, torch.cuda.max_memory_allocated))
    yield peak
    after = torch.cuda.max_memory_allocated(device)
    if after > before:
        peak[0] = (after - allocated) / MIB


def _features(layer: SnipLayer) -> float:
    """Returns the features into and out of a layer, per token with all its rows."""
    return (layer.in_features + layer.out_features) * layer.rows_per_token


def _elements(parameter: Tensor, ranks: int) -> int:
    """Returns how many elements a rank holds; the same number on all ranks, so that they decide equally."""
    return math.ceil(parameter.numel() / ranks) if is_sharded(parameter) else parameter.numel()


def _vocabulary(model: nn.Module) -> int:
    """Returns the size of the output head's vocabulary; 0 if it is not known."""
    # Not from its weight, which may be computed whenever it is read (parametrizations).
    return int(getattr(head_of(model), "out_features", 0))
