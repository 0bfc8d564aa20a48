"""The stages that each have to meet the budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..config import DoesNotFit, SnipConfig
from ..layers.state import block_of


def find_stages(layers: Sequence[str], config: SnipConfig) -> tuple[tuple[str, ...], ...]:
    """Returns the layer names of each stage; the order of `layers` is kept.

    Raises:
        DoesNotFit: more stages than blocks, or explicit stages that do not hold every layer exactly once.
    """
    if config.stages is None:
        return (tuple(layers),)
    if isinstance(config.stages, int):
        blocks = list(dict.fromkeys(block_of(layer) for layer in layers))
        if config.stages > len(blocks):
            raise DoesNotFit(
                f"stages={config.stages} but the model has {len(blocks)} blocks; expected at most one stage each."
            )
        stage_of = {block: index * config.stages // len(blocks) for index, block in enumerate(blocks)}
        return tuple(
            tuple(layer for layer in layers if stage_of[block_of(layer)] == stage) for stage in range(config.stages)
        )
    named = Counter(layer for stage in config.stages for layer in stage)
    swapped = set(layers)
    wrong = [layer for layer in (*named, *layers) if named[layer] != 1 or layer not in swapped]
    if wrong:
        raise DoesNotFit(
            f"stages: layer {wrong[0]!r} is named {named[wrong[0]]} times and is "
            f"{'a' if wrong[0] in layers else 'no'} swapped layer; expected every swapped layer in exactly one stage."
        )
    return config.stages
