"""What SNIP costs and gains per step in runs of 7B and 70B models on 8 to 1,024 GPUs: arithmetic from measured parts.

    python benchmarks/scale_on_paper.py notes --output benchmarks/results/scale_notes.jsonl
    python benchmarks/scale_on_paper.py report --output docs/scale.md

No such run was made. `report` takes the parts from the committed lines of this folder, each named in the page that it
writes. `notes` measures the one part that grows with the number of ranks, and has no line elsewhere: the JSON text by
which ranks tell each other which samples they hold.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scale_lines import PRICE_COLUMNS, PROGRAM_COLUMNS, RESULTS, price_rows, program_rows
from scale_page import INPUT_COLUMNS, INPUTS, PAGE, filled, table
from shared.json_lines import read_lines
from shared.origin import origin_of

from snip_hf import SnipConfig
from snip_hf.estimation.pooling import _note
from snip_hf.estimation.samples import LayerSample
from snip_hf.numerics.gemms import TILE

GIB = 2**30
FP32 = 4
# FP32 weight and gradient, and AdamW's two moments.
TRAINED = 4 * FP32
# Bytes per second and GPU: NVLink of an H200 within a host of 8, InfiniBand of 400 Gb/s beyond. Datasheets.
NVLINK, NETWORK = 450e9, 50e9
HOST = 8
# Of the time of a probe in one process at 1.1B: passes 0.70 s, sums 0.80 s (docs/hopper.md).
OF_PASSES = 0.70 / (0.70 + 0.80)
# Seconds per linear to apply a plan: 0.01 s for the 154 linears of TinyLlama (docs/hopper.md).
APPLIED = 0.01 / 154
# Gathers of a weight in a probe under FSDP2: forward and backward of two passes.
GATHERS = 4
# Sequence length, and tokens per GPU and step: as many as in the timed steps.
LENGTH, TOKENS = 4096, 16384
# GiB of an H200.
CAPACITY = 139
# Part of a BF16 step that waits for communication and does not get faster.
EXPOSED = (0.0, 0.2)


@dataclass(frozen=True)
class Model:
    name: str
    hidden: int
    inner: int
    blocks: int
    keys: int
    """Features of keys and of values."""
    vocabulary: int

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(O, I) of the linears of a block: q, k, v, o, gate, up, down."""
        h, i = self.hidden, self.inner
        return [(h, h), (self.keys, h), (self.keys, h), (h, h), (i, h), (i, h), (h, i)]

    @property
    def linears(self) -> int:
        return self.blocks * len(self.shapes)

    @property
    def weights(self) -> float:
        """Elements of the linears of the blocks."""
        return self.blocks * sum(out * into for out, into in self.shapes)

    @property
    def features(self) -> int:
        """Into and out of the linears."""
        return self.blocks * sum(out + into for out, into in self.shapes)

    @property
    def others(self) -> float:
        """Elements of embedding and head."""
        return 2 * self.vocabulary * self.hidden

    def step_flops(self, tokens: int, length: int) -> float:
        """Of forward and backward: linears, head, and causal attention."""
        attention = 3 * 2 * length * self.hidden * self.blocks
        return tokens * (6 * (self.weights + self.others / 2) + attention)


TINY = Model("TinyLlama-1.1B", 2048, 5632, 22, 256, 32000)
SHAPE_8B = Model("8B, 8 layers", 4096, 14336, 8, 1024, 32000)
SEVEN = Model("7B", 4096, 11008, 32, 4096, 32000)
SEVENTY = Model("70B", 8192, 28672, 80, 1024, 128256)
TIMED = {model.name: model for model in (TINY, SHAPE_8B)}


@dataclass(frozen=True)
class Layout:
    """How a model lies on GPUs."""

    model: Model
    gpus: int
    stages: int = 1
    """Of a pipeline; 1: FSDP2 over all GPUs."""

    @property
    def ranks(self) -> int:
        """That see different data."""
        return self.gpus // self.stages

    @property
    def name(self) -> str:
        return "FSDP2" if self.stages == 1 else f"{self.stages} stages x {self.ranks}"

    @property
    def owned(self) -> float:
        """Share of a stage's linears whose sums one rank computes."""
        linears = self.model.linears / self.stages
        return math.ceil(linears / self.ranks) / linears

    @property
    def rate(self) -> float:
        """Bytes per second between its GPUs."""
        return NVLINK if self.gpus <= HOST else NETWORK

    @property
    def micro_batches(self) -> int:
        """Of a pipeline, of one sequence each."""
        return TOKENS * self.stages // LENGTH

    @property
    def bubble(self) -> float:
        """A step's time by that without waiting for other stages."""
        return (self.micro_batches + self.stages - 1) / self.micro_batches

    @property
    def kept(self) -> tuple[int, int]:
        """Tokens of a layer that one rank keeps at most, and all ranks together (`samples.SamplePlan`)."""
        tokens = SnipConfig().probe_tokens or 0
        if self.stages == 1:
            return max(TILE, math.ceil(tokens / self.ranks)), tokens
        own = self.micro_batches * max(TILE, tokens // (self.ranks * self.micro_batches))
        return own, own * self.ranks


# ------------------------------------------------------------------------------------------------ measured parts


@dataclass(frozen=True)
class Parts:
    """What the arithmetic starts from."""

    flops: float
    """Per second, of a BF16 step at the 8B shape."""
    speedups: dict[str, float]
    """Formats -> speed of a step under a plan of 75% in 4 bits, by BF16's, at the 8B shape."""
    per_linear: float
    """Seconds of a probe in one process that each linear takes, whatever its size."""
    per_weight: float
    """Seconds of a probe per 1e9 weights, with 4,096 tokens."""
    per_gather: float
    """Seconds per gathered weight that FSDP2 adds on two GPUs."""
    two_gpus: tuple[float, float]
    """Seconds of a refresh under DDP on two GPUs: by this arithmetic, and measured."""
    note_bytes: float
    """Of JSON, per linear and rank."""
    note_seconds: float
    """To read one."""


def parts() -> Parts:
    """Reads them from the committed lines."""
    trainer, found = read_lines(RESULTS / "speed_trainer.jsonl"), {}
    for formats in ("fp4", "mxfp4"):
        *_, line = [  # the newest
            line
            for line in trainer
            if line["model"] == SHAPE_8B.name and line["recipe"] == "snip-hf 75%" and line["formats"][0] == formats
        ]
        found[formats] = line["speedup"]
    steps = [line["step_ms"] for line in trainer if (line["model"], line["recipe"]) == (SHAPE_8B.name, "BF16")]
    flops = SHAPE_8B.step_flops(TOKENS, 2048) / (statistics.median(steps) / 1000)
    probes = {name: statistics.median(_probes(trainer, name)) for name in TIMED}
    # Two models, two unknowns: linears a + weights b = seconds.
    (m, s), (n, t) = ((TIMED[name], seconds) for name, seconds in probes.items())
    per_weight = (s * n.linears - t * m.linears) / (m.weights * n.linears - n.weights * m.linears)
    per_linear = (s - per_weight * m.weights) / m.linears
    lines = read_lines(RESULTS / "multi_gpu_speed.jsonl")
    # One run: a later one has no FSDP2.
    run = next(line["commit"] for line in reversed(lines) if line["case"] == "2:fsdp2")
    many = {(line["case"], line["recipe"]): line["refresh_s"] for line in lines if line["commit"] == run}
    ddp, fsdp2, alone = (many[case, "SNIP 75%"] for case in ("2:ddp", "2:fsdp2", "1:none"))
    # That run's refresh in one process was faster than the Trainer's: the ratio of two to one is compared.
    passes = OF_PASSES * (per_linear * TINY.linears + per_weight * TINY.weights / 2)
    sums = (1 - OF_PASSES) * probes[TINY.name] / 2
    [note] = read_lines(RESULTS / "scale_notes.jsonl")
    return Parts(
        flops=flops,
        speedups=found,
        per_linear=per_linear,
        per_weight=1e9 * per_weight,
        per_gather=(fsdp2 - ddp) / (GATHERS * TINY.linears),
        two_gpus=(alone * (passes + sums) / probes[TINY.name], ddp),
        note_bytes=note["bytes"],
        note_seconds=note["seconds"],
    )


def other_mxfp4() -> dict[str, float]:
    """Returns the speeds by BF16's of 75% in MXFP4 that the arithmetic does not take, by their places in the page."""
    trainer, folding, later = (read_lines(RESULTS / f"speed_{name}.jsonl") for name in ("trainer", "folding", "mxfp4"))
    other = {line["model"]: line["speedup"] for line in folding if line.get("recipe") == "snip-hf MXFP4 75%, ties"}
    large, tiny = (
        [line["speedup"] for line in lines if line["recipe"] == "snip-hf 75%" and line["model"] == model.name]
        for lines, model in ((later, SHAPE_8B), (trainer, TINY))
    )
    return {"mxfp4_other": other[SHAPE_8B.name], "mxfp4_later": large[-1], "mxfp4_tiny": tiny[-1]}


def _probes(lines: list[dict[str, Any]], model: str) -> Iterator[float]:
    """Yields seconds of probes with FP4 and FP8, but for each process's first one, which compiles kernels."""
    for line in lines:
        if line["model"] == model and line["formats"] == ["fp4", "fp8"]:
            yield from (part["probe"] for part in line["seconds"][1:])


def measured_note() -> dict[str, Any]:
    """Measures how long the text of a note is, and how long reading it takes: a rank reads those of all ranks."""
    x = torch.zeros(TILE, 8)
    sample = LayerSample(TOKENS, x, x, [x], [x], (1.2345678901234567, 0.12345678901234568))
    notes = {f"model.layers.{index}.gate_proj": _note(sample, 0.123456789) for index in range(SEVENTY.linears)}
    text = json.dumps(["samples", notes])
    seconds = []
    for _ in range(20):
        began = time.perf_counter()
        json.loads(text)
        seconds.append(time.perf_counter() - began)
    return {"bytes": len(text) / len(notes), "seconds": statistics.median(seconds) / len(notes), "notes": len(notes)}


# ------------------------------------------------------------------------------------------------ the arithmetic


def step_seconds(layout: Layout, part: Parts) -> float:
    """Returns the seconds of a BF16 step whose communication is hidden."""
    return layout.model.step_flops(TOKENS, LENGTH) / part.flops * layout.bubble


def refresh(layout: Layout, part: Parts) -> dict[str, float]:
    """Returns the seconds of a refresh, by part."""
    model, ranks = layout.model, layout.ranks
    fixed, per_token = part.per_linear * model.linears, part.per_weight * model.weights / 1e9 / 4096
    if layout.stages == 1:
        # A rank takes at least one whole sequence.
        passes = fixed + per_token * max(LENGTH, 4096 // ranks)
        gathers = GATHERS * (part.per_gather * model.linears + FP32 * model.weights * (ranks - 1) / ranks / layout.rate)
    else:
        # A pipeline's probe runs whole batches, through all stages at once.
        passes = (layout.micro_batches * fixed + per_token * TOKENS * layout.stages) / layout.stages * layout.bubble
        gathers = 0.0
    own, owned = model.linears / layout.stages, layout.owned
    _, tokens = layout.kept
    holders = min(ranks, tokens // TILE)
    sent = FP32 * 2 * tokens * model.features / layout.stages
    # Products of the sums grow with the tokens that are kept.
    of_sums = fixed + per_token * 4096 * tokens / (SnipConfig().probe_tokens or 0)
    return {
        "passes": OF_PASSES * passes,
        "gathers": gathers,
        "exchange": 0.0 if ranks == 1 else max(1 / holders, owned) * sent / layout.rate,
        "notes": 0.0 if ranks == 1 else ranks * own * (part.note_seconds + part.note_bytes / layout.rate),
        "sums": (1 - OF_PASSES) * owned * of_sums / layout.stages,
        "apply": APPLIED * own,
    }


def memory(layout: Layout) -> tuple[float, float]:
    """Returns GiB per GPU: weights, gradients and moments; what a probe holds beyond them, but for activations."""
    model, shards = layout.model, layout.gpus if layout.stages == 1 else layout.stages
    trained = TRAINED * (model.weights + model.others) / shards
    own, pooled = layout.kept
    kept = own if layout.ranks == 1 else own + pooled * layout.owned
    # The embedding has a gradient, and is not taken as sharded; the head is frozen in a pass.
    others = FP32 * model.others / 2
    samples = FP32 * 2 * kept * model.features / layout.stages
    return trained / GIB, (FP32 * model.weights / shards + others + samples) / GIB


def speedup(layout: Layout, part: Parts, formats: str, exposed: float, every: int) -> float:
    """Returns the speed by BF16's of training with a refresh every so many steps."""
    step = step_seconds(layout, part) / (1 - exposed)
    under_plan = step * (exposed + (1 - exposed) / part.speedups[formats])
    return every * step / (every * under_plan + sum(refresh(layout, part).values()))


LAYOUTS = (
    *(Layout(SEVEN, gpus) for gpus in (8, 64, 256, 1024)),
    *(Layout(SEVENTY, gpus) for gpus in (HOST, 16, 64, 256, 1024)),
    *(Layout(SEVENTY, 8 * ranks, 8) for ranks in (8, 128)),
    *(Layout(SEVENTY, 80 * ranks, 80) for ranks in (1, 12)),
)


def page(part: Parts) -> str:
    """Returns docs/scale.md."""
    every = SnipConfig().refresh_every or 0
    costs, gains = [], []
    for layout in LAYOUTS:
        of_refresh, step = refresh(layout, part), step_seconds(layout, part)
        total, where = sum(of_refresh.values()), [layout.model.name, f"{layout.gpus:,}", layout.name]
        trained, probe = memory(layout)
        seconds = [f"{seconds:.2f}" for seconds in of_refresh.values()]
        costs.append([*where, f"{step:.1f}", *seconds, f"{total:.1f}", f"{total / step:.1f}"])
        figures = [f"{speedup(layout, part, *which, every):.2f}" for which in CASES]
        share = total / (every * step / part.speedups["fp4"] + total)
        gains.append(
            [*where, f"{100 * share:.1f}%", *figures, f"{trained:.1f}", f"{probe:.1f}", _fits(trained + probe)]
        )
    model, measured = part.two_gpus
    trained, probe = memory(Layout(SEVENTY, HOST))
    values = {
        "host_trained": f"{trained:.1f}",
        "host_probe": f"{probe:.1f}",
        "host_both": f"{trained + probe:.1f}",
        "host_left": f"{CAPACITY - trained:.1f}",
        "teraflops": f"{part.flops / 1e12:.0f}",
        "fp4": f"{part.speedups['fp4']:.3f}",
        "mxfp4": f"{part.speedups['mxfp4']:.3f}",
        **{name: f"{speed:.3f}" for name, speed in other_mxfp4().items()},
        "delay": str(SnipConfig().apply_delay),
        "capacity": str(CAPACITY),
        "linear": f"{1000 * part.per_linear:.1f}",
        "weight": f"{part.per_weight:.2f}",
        "gather": f"{1000 * part.per_gather:.2f}",
        "bytes": f"{part.note_bytes:.0f}",
        "microseconds": f"{1e6 * part.note_seconds:.1f}",
        "model": f"{model:.2f}",
        "measured": f"{measured:.2f}",
        "every": str(every),
    }
    return filled(
        PAGE,
        {
            "inputs": table(INPUT_COLUMNS, [[cell.format_map(values) for cell in row] for row in INPUTS]),
            **values,
            "costs": table([*WHERE, "BF16 step, s", *refresh(LAYOUTS[0], part), "refresh, s", "in steps"], costs),
            "gains": table(
                [*WHERE, "refreshes' share", *map(_head, CASES), "training, GiB", "probe, GiB", "fits"], gains
            ),
            "program": table(PROGRAM_COLUMNS, program_rows()),
            "prices": table(PRICE_COLUMNS, price_rows()),
        },
    )


WHERE = ("model", "GPUs", "layout")
CASES = tuple((formats, exposed) for formats in ("fp4", "mxfp4") for exposed in EXPOSED)


def _head(case: tuple[str, float]) -> str:
    formats, exposed = case
    return f"speed, {formats.upper()}, {exposed:.0%} waiting"


def _fits(gib: float) -> str:
    return "yes" if gib <= CAPACITY else "no"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["notes", "report"])
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    made: dict[str, Callable[[], str]] = {
        "notes": lambda: json.dumps({**measured_note(), **origin_of("cpu")}) + "\n",
        "report": lambda: page(parts()),
    }
    options.output.write_text(made[options.what](), encoding="utf-8")


if __name__ == "__main__":
    main()
