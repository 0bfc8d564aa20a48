"""The room that the passes of a probe have on the device, and what they do twice in order to stay within it.

A pass in FP32 holds the activations of every block and a moved copy of every swapped weight. A block that is recomputed
holds its input alone, since its forward runs once more in the backward pass; then its moved weights can be made again
whenever it runs, too. Both are done to the first blocks, to as few as are needed: theirs is the last part of the
backward pass, when the activations of all others are gone. No number depends on it, to the bit.

The default room follows from the sizes of model and micro-batch, so that equal runs do equal work. It is what a
training step of these sizes holds while its loss is computed, less the gradients, which exist beside a probe and not
there. A probe then takes no more than the step that it is in.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import nn

from ..layers.layer import SnipLayer
from ..layers.selection import head_of
from ..layers.state import block_of, one_per_weight
from ..parallel.sharding import is_sharded
from .moved_weights import can_be_remade, users_of_weights
from .recomputation import recomputes_already

MIB = 2**20
# Less is not worth a second forward pass: any GPU that trains has it.
LEAST_ROOM = 1024 * MIB
_FP32 = 4
# Bytes per token, and feature into or out of a swapped layer. A pass in FP32: 5.0 was measured for Llamas on a GPU, 4
# for the feature itself, the rest for norms, attention and activation functions. Since then norms hold two tensors less
# of each block, by counting 0.46.
_IN_A_PASS = 4.55
# A compiled training step in BF16 (Llamas: 1.34 where quantized operands are not saved, 1.67 where they are).
_IN_A_STEP = 4 / 3
# Per token and word of the vocabulary: logits in FP32, their logarithms and their gradients.
_PER_WORD = 12
# Tensors of a weight's size that the derivative of an optimizer's update is computed with.
_AT_ONCE = 6


@dataclass(frozen=True)
class Thrift:
    """What the passes of a probe do twice."""

    recomputed: tuple[str, ...] = ()
    """Blocks, by their names in plans, whose activations are computed again."""
    remade: frozenset[str] = frozenset()
    """Layers whose moved weights are made again, if that can be done (`moved_weights.can_be_remade`)."""


NO_THRIFT = Thrift()


@dataclass(frozen=True)
class _Block:
    name: str
    layers: tuple[str, ...]
    inputs: int
    """Features of its first layer's input."""
    features: float
    """Into and out of its layers, of a token in all its rows."""
    remade: int
    """Elements of the moved weights that can be made again."""
    held: int
    """Elements of the others."""
    largest: int
    """Elements of its largest weight."""


def default_room(model: nn.Module, layers: Mapping[str, SnipLayer], tokens: int, ranks: int = 1) -> float:
    """Returns the bytes that a probe may take without its step's peak getting higher, roughly.

    Args:
        model: a converted model, without wrappers.
        layers: the swapped layers.
        tokens: of the micro-batch that is trained on.
        ranks: that share what is sharded.
    """
    features = dict.fromkeys(map(block_of, layers), 0.0)
    for name, layer in layers.items():
        features[block_of(name)] += _features(layer)
    per_token = sum(features.values()) * _IN_A_STEP
    if recomputes_already(model):  # inputs of blocks, in FP32 under autocast, and one block
        firsts = {block_of(name): layers[name].in_features for name in reversed(list(layers))}
        per_token = sum(firsts.values()) * _FP32 + max(features.values()) * _IN_A_STEP
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    gradients = sum(_elements(parameter, ranks) * parameter.element_size() for parameter in trained)
    return max(LEAST_ROOM, tokens * (per_token + _PER_WORD * _words(model)) - gradients)


@dataclass(frozen=True)
class Passes:
    """How large the passes of a probe are."""

    tokens: int
    """That they run on."""
    kept: int
    """Tokens per layer that samples are kept of."""
    probes: int
    """Number of random directions; 0: a single pass."""
    ranks: int = 1
    """That share what is sharded."""
    noisy: int = 0
    """Passes with noise, each of whose differences is kept."""


def find_thrift(
    model: nn.Module, layers: Mapping[str, SnipLayer], elementwise: Collection[str], room: float, passes: Passes
) -> Thrift:
    """Returns what a probe's passes have to do twice in order to stay within so many bytes, or to come near.

    Args:
        model: a converted model, without wrappers.
        layers: the swapped layers.
        elementwise: those that move along a direction that can be made within a pass; others' are held.
        room: bytes.
        passes: their sizes.
    """
    blocks = _blocks_of(layers, elementwise, passes)
    demand = _Demand(blocks, passes, _PER_WORD * passes.tokens * _words(model), recomputes_already(model))
    recomputed, remade = demand.within(room)
    names = [layer for block in blocks[:remade] for layer in block.layers if passes.probes and layer in elementwise]
    return Thrift(tuple(block.name for block in blocks[:recomputed]), frozenset(names))


def _blocks_of(layers: Mapping[str, SnipLayer], elementwise: Collection[str], passes: Passes) -> list[_Block]:
    members: dict[str, list[str]] = {}
    for name in layers:
        members.setdefault(block_of(name), []).append(name)
    blocks, users = [], users_of_weights(layers)
    for block, names in members.items():
        own = one_per_weight({name: layers[name] for name in names}) if passes.probes else {}
        sizes = {name: _elements(layer.weight, passes.ranks) for name, layer in own.items()}
        remade = sum(size for name, size in sizes.items() if name in elementwise and can_be_remade(name, layers, users))
        features = sum(_features(layers[name]) for name in names)
        inputs, largest = layers[names[0]].in_features, max(sizes.values(), default=0)
        blocks.append(_Block(block, tuple(names), inputs, features, remade, sum(sizes.values()) - remade, largest))
    return blocks


class _Demand:
    """The bytes that passes hold at once at most, by how many of the first blocks do what twice.

    Args:
        blocks: all of them.
        passes: their sizes.
        words: bytes of the logits and of what is computed from them.
        is_checkpointed: whether the model recomputes every block by itself.
    """

    def __init__(self, blocks: Sequence[_Block], passes: Passes, words: float, is_checkpointed: bool) -> None:
        self._count, self._is_checkpointed, self._words = len(blocks), is_checkpointed, words
        # Of the pass before, and of the directions before: X, G and their derivatives.
        self._sides = passes.probes + (passes.probes > 1) + passes.noisy
        self._samples = _FP32 * passes.kept * sum(block.features for block in blocks)
        self._held = _FP32 * sum(block.held for block in blocks)
        inputs = [_FP32 * passes.tokens * block.inputs for block in blocks]
        activations = [_IN_A_PASS * passes.tokens * block.features for block in blocks]
        # Of the first blocks, so many as the index says.
        self._inputs = [0.0, *accumulate(inputs)]
        self._activations = [0.0, *accumulate(activations)]
        self._moved = [0.0, *accumulate(_FP32 * block.remade for block in blocks)]
        # Half as much again for the gradients within the block; then what makes the moved weights.
        self._again = [0.0, *accumulate((1.5 * one for one in activations), max)]
        self._made = [0.0, *accumulate((_FP32 * (block.remade + _AT_ONCE * block.largest) for block in blocks), max)]

    def peak(self, recomputed: int, remade: int) -> float:
        """Returns the most that is held: when the loss is computed, or when the first block's backward pass runs."""
        again = self._count if self._is_checkpointed else recomputed
        moved = self._held + self._moved[-1] - self._moved[remade]
        activations = self._activations[-1] - self._activations[again]
        at_loss = self._sides * self._samples + activations + self._words
        at_end = (self._sides + 1) * self._samples + self._again[again]
        return moved + self._inputs[again] + max(at_loss, at_end) + self._made[remade]

    def within(self, room: float) -> tuple[int, int]:
        """Returns how many blocks to recompute and how many to make the weights of again, for as little work as can be.

        If nothing fits, all of them: the least that can be held.
        """
        most = 0 if self._is_checkpointed else self._count
        if self.peak(most, self._count) > room:
            return most, self._count
        for work in range(most + self._count + 1):
            for remade in range(min(work, self._count) + 1):
                recomputed = work - remade
                is_possible = recomputed <= most and (remade <= recomputed or self._is_checkpointed)
                if is_possible and self.peak(recomputed, remade) <= room:
                    return recomputed, remade
        return most, self._count


def _features(layer: SnipLayer) -> float:
    """Returns the features into and out of a layer, of a token in all its rows."""
    return (layer.in_features + layer.out_features) * layer.rows_per_token


def _elements(parameter: nn.Parameter, ranks: int) -> int:
    """Returns how many elements a rank holds; the same number on all of them, who have to decide alike."""
    return math.ceil(parameter.numel() / ranks) if is_sharded(parameter) else parameter.numel()


def _words(model: nn.Module) -> int:
    """Returns how many words the output head tells apart; 0 where it is not known."""
    # Not from its weight, which may be computed whenever it is read (parametrizations).
    return int(getattr(head_of(model), "out_features", 0))
