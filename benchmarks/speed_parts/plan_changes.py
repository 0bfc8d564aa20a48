"""Part `compile`: graphs, recompilations and losses while plans change."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from snip_hf.layers.state import snip_linears
from snip_hf.numerics.gemms import GEMMS

from . import setting
from .measuring import (
    compiler,
    guarded,
    release,
)
from .setting import FOLDED, TIES, Row
from .training_steps import Training, graph_counts

# Formats of --formats -> recipe that runs them, on the backend that "auto" takes.
_RECIPES = {("fp4", "fp8"): "snip-hf FP4, no ties", FOLDED: "snip-hf MXFP4, ties"}


def compile_part(options: argparse.Namespace, found: Sequence[Row]) -> Iterator[Row]:
    runs = [("layers", "default"), ("layers", "reduce-overhead"), ("whole", "reduce-overhead")]
    # The first once more: how far two equal runs come apart, since attention's backward sums in any order.
    runs = runs if options.quick else [runs[0], *runs]
    expected: list[float] | None = None
    for compiled, mode in runs:
        for row in guarded({"compiled": compiled, "mode": mode}, partial(changing, compiled, mode, options), options):
            if "losses" in row:
                expected = expected or row["losses"]
                difference = max(abs(a - b) for a, b in zip(row["losses"], expected, strict=True))
                row = row | {"loss": row["losses"][-1], "difference": difference}
            yield row


def changing(compiled: str, mode: str, options: argparse.Namespace) -> Iterator[Row]:
    """Trains under another random plan in every step, and counts what is compiled after the first two."""
    device = options.device
    release(device)
    whole = compiled == "whole"
    formats = tuple(options.formats or ("fp4", "fp8"))
    arguments = (setting.SMALL, setting.SMALL_BATCH, _RECIPES[formats], options.seed, device, whole)
    training = Training(*arguments, fullgraph=True, **compiler(mode))
    assert training.controller is not None
    layers, draws = snip_linears(training.model), random.Random(options.seed)
    losses = [training.step(), training.step()]
    before = graph_counts()
    for _ in range(setting.CHANGES):
        draw_plan(layers, draws, formats)
        losses.append(training.step())
    after = graph_counts()
    yield {
        "backend": training.controller.backend,
        "graphs": before["graphs"],
        "breaks": after["breaks"],
        "changes": setting.CHANGES,
        "recompilations": after["graphs"] - before["graphs"],
        "losses": [float(loss) for loss in losses],
    }


def draw_plan(layers: dict[str, Any], draws: random.Random, formats: Sequence[str]) -> None:
    """Gives every GEMM one of the formats; tied layers get the same."""
    drawn: dict[tuple[str, Any], dict[str, str]] = {}
    for name, layer in layers.items():
        module, _, last = name.rpartition(".")
        tie = next((tie for tie in TIES if last in tie), last)
        layer.set_formats(drawn.setdefault((module, tie), {gemm: draws.choice(formats) for gemm in GEMMS}))
