"""Part `crossing`: from which size of a model on low precision is faster than BF16."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from functools import partial

import probe_cost

from snip_hf import SnipConfig

from . import setting
from .measuring import compared, compiler, guarded, mark, milliseconds_between, release
from .setting import BF16, TIES, WARM_UP, Row
from .training_steps import Training


def crossing_part(options: argparse.Namespace, found: Sequence[Row]) -> Iterator[Row]:
    config = uniform(options)
    for hidden, tokens in setting.CROSSING:
        if options.quick and tokens != setting.CROSSING[0][1]:
            continue
        rows = []
        for recipe, arm in ((BF16, BF16), (f"snip-hf {config.formats[0]}, ties", config)):
            identity = {"recipe": recipe, "hidden": hidden, "tokens": tokens}
            rows += guarded(identity, partial(one_layer, arm, hidden, tokens, options), options)
        yield from compared(rows, "ms")


def uniform(options: argparse.Namespace) -> SnipConfig:
    """Returns the configuration that runs everything in the least precise of --formats, by default FP4."""
    formats = tuple(options.formats or SnipConfig().formats)
    return SnipConfig(
        policy=f"uniform-{formats[0]}", formats=formats, backend=options.backend, ties=TIES, seed=options.seed
    )


def one_layer(arm: str | SnipConfig, hidden: int, tokens: int, options: argparse.Namespace) -> Iterator[Row]:
    """Times whole steps of a model of one decoder layer: forward, backward and AdamW; nearly no words around it."""
    device, length = options.device, min(tokens, options.length)
    release(device)
    heads = max(1, hidden // 128)
    shape = (hidden, 3 * hidden, 1, heads, max(1, heads // 4), 128)
    training = Training(shape, (tokens // length, length), arm, options.seed, device, **compiler("default"))
    first = probe_cost.clocked(device, training.step)
    for _ in range(WARM_UP - 1):
        training.step()
    marks = [mark(device)]
    for _ in range(options.steps):
        training.step()
        marks.append(mark(device))
    probe_cost.wait(device)
    yield {"ms": statistics.median(map(milliseconds_between, marks, marks[1:])), "first_s": first}
