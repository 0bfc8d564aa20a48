"""Short unambiguous labels of layers, for tables, figures and messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise, takewhile
from operator import eq

from .state import block_of

# Numbers that are whole parts of names, such as the indices of blocks and experts.
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
# PEFT's copy of a layer for an adapter (`modules_to_save`); no other copy of the layer runs.
_COPY = re.compile(r"\.modules_to_save\.[^.]+$")


def split_layer(layer: str) -> tuple[str, str]:
    """Returns block and rest: "a.layers.3.mlp.up_proj" -> ("a.layers.3", "mlp.up_proj"); ("", layer) if none."""
    block = block_of(layer)
    return ("", layer) if block == layer else (block, layer[len(block) + 1 :])


def without_numbers(name: str) -> str:
    """Returns a name with `*` for each number: `layers.0.gate` and `layers.1.gate` are both `layers.*.gate`."""
    return _NUMBER.sub("*", name)


def endings(names: Sequence[str], separator: str = ".") -> list[str]:
    """Returns the shortest ending of each name that no other name has; the whole name if others end with it.

    Args:
        names: equal ones are returned as they are.
        separator: stands between the parts of a name.
    """
    parts = [name.split(separator)[::-1] for name in names]
    counts = [1] * len(parts)
    # In this order a name has most of its last parts in common with the one before or after it.
    for one, other in pairwise(sorted(range(len(parts)), key=parts.__getitem__)):
        common = sum(takewhile(bool, map(eq, parts[one], parts[other])))
        counts[one], counts[other] = max(counts[one], common + 1), common + 1
    return [separator.join(own[:count][::-1]) for own, count in zip(parts, counts, strict=True)]


class LayerLabels:
    """Labels of a model's blocks, of the layers within a block, and of both: "3", "up_proj" and "3 up_proj".

    Each is the shortest ending that tells it from the others of the model (`endings`): "up_proj", but
    "experts.down_proj" beside "shared_expert.down_proj". Blocks are numbers. If two blocks of a model have the
    same number, all blocks are named with their stack: "encoder 3" and "decoder 3", and also a lone "decoder 4".

    Args:
        layers: the names of all layers of the model, or of its plan.
    """

    def __init__(self, layers: Iterable[str]) -> None:
        pairs = [split_layer(layer) for layer in layers]
        blocks = list(dict.fromkeys(block for block, _ in pairs))
        kinds = list(dict.fromkeys(kind for _, kind in pairs))
        self._blocks: dict[str, str] = dict(zip(blocks, _block_labels(blocks), strict=True))
        self._kinds: dict[str, str] = dict(zip(kinds, endings([_COPY.sub("", kind) for kind in kinds]), strict=True))

    def block(self, block: str) -> str:
        """Returns the label of a block, as `split_layer` gives it; "" of layers outside blocks."""
        return self._blocks[block]

    def kind(self, kind: str) -> str:
        """Returns the label of the part of a name behind the block, as `split_layer` gives it."""
        return self._kinds[kind]

    def layer(self, layer: str) -> str:
        """Returns the label of a layer."""
        block, kind = split_layer(layer)
        return f"{self.block(block)} {self.kind(kind)}".lstrip()


def _block_labels(blocks: Sequence[str]) -> list[str]:
    """Returns "0" for "encoder.block.0", or "encoder 0" for it and so for all blocks if two have the same number."""
    pairs = [block.rpartition(".")[::2] for block in blocks]
    if len({number for _, number in pairs}) == len(pairs):
        return [number for _, number in pairs]
    stacks = list(dict.fromkeys(stack for stack, _ in pairs))
    names = endings(stacks)
    first_parts = [name.partition(".")[0] for name in names]
    label = dict(zip(stacks, first_parts if len(set(first_parts)) == len(names) else names, strict=True))
    return [f"{label[stack]} {number}".strip() for stack, number in pairs]
