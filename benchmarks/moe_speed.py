"""The speed of a mixture of experts in low precision, against BF16 with transformers' grouped products.

    python benchmarks/moe_speed.py --profile --output runs/moe_speed.jsonl

Trains an untrained Qwen3-MoE of 1.1B parameters by a plain loop, with compiled decoder layers and fused AdamW: in BF16
first and last, and under snip-hf's formats between. Weights are BF16 in all runs, because a compiled transformers runs
experts with FP32 weights one by one. Prints milliseconds per step, peak memory and the ratio to BF16, and with
--profile the milliseconds of each kind of kernel. Ends within 150 s on one H200.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from shared import llamas
from shared.lines import Line, append_line, origin_of, table
from shared.timing import (
    BF16,
    WARM_UP,
    allocated,
    compared,
    graph_counts,
    guarded,
    mark,
    milliseconds_between,
    peak,
    release,
    reset_peak,
    wait,
)
from step_profile import by_kind, spans_of
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from snip_hf.kernels.emulated import EMULATED
from snip_hf.layers.state import snip_linears

IMPLEMENTATION = "grouped_mm"
RECIPES = ("snip-hf MXFP4", "snip-hf 75%")
PROFILED_STEPS = 2
COLUMNS = {
    "recipe": ("recipe", "{}"),
    "step_ms": ("step, ms", "{:.1f}"),
    "tokens_per_s": ("tokens/s", "{:,.0f}"),
    "speedup": ("speed / BF16", "{:.3f}"),
    "peak_gib": ("peak, GiB", "{:.2f}"),
    "peak_ratio": ("/ BF16", "{:.3f}"),
    "emulated_layers": ("emulated layers", "{}"),
    "loss": ("loss", "{:.4f}"),
}


@dataclass(frozen=True)
class Size:
    """The shape of a model and of its micro-batch."""

    hidden: int = 2048
    inner: int = 768
    layers: int = 6
    experts: int = 32
    experts_per_token: int = 4
    heads: int = 16
    rows: int = 8
    length: int = 2048
    vocabulary: int = llamas.VOCABULARY


TINY = Size(hidden=64, inner=32, layers=2, experts=4, experts_per_token=2, heads=2, rows=2, length=64, vocabulary=128)


def build_model(size: Size, seed: int, device: torch.device) -> Qwen3MoeForCausalLM:
    """Returns an untrained Qwen3-MoE in training mode, with BF16 weights."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        moe_intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_experts=size.experts,
        num_experts_per_tok=size.experts_per_token,
        num_attention_heads=size.heads,
        num_key_value_heads=max(1, size.heads // 4),
        head_dim=size.hidden // size.heads,
        vocab_size=size.vocabulary,
        max_position_embeddings=size.length,
        norm_topk_prob=True,
        use_cache=False,
        attn_implementation="sdpa",
        experts_implementation=IMPLEMENTATION,
    )
    with device:
        return Qwen3MoeForCausalLM(config).to(torch.bfloat16).train()


def measure(recipe: str, options: argparse.Namespace) -> Iterator[Line]:
    """Times steps without waiting for any of them."""
    device, size = options.device, options.size
    release(device)
    before, began = allocated(device), time.monotonic()
    model = build_model(size, options.seed, device)
    training = llamas.LoopTraining(model, (size.rows, size.length), recipe, options.seed, device)
    for _ in range(WARM_UP):
        loss = training.step()
    float(loss)
    warm_up = time.monotonic() - began
    reset_peak(device)
    marks = [mark(device)]
    for _ in range(options.steps):
        loss = training.step()
        marks.append(mark(device))
    wait(device)
    step = statistics.median(map(milliseconds_between, marks, marks[1:]))
    emulated = sum(layer.snip_backend is EMULATED for layer in snip_linears(model).values())
    row: Line = {
        "step_ms": step,
        "tokens_per_s": 1e3 * size.rows * size.length / step,
        "peak_gib": (peak(device) - before) / 2**30,
        "loss": float(loss),
        "warm_up_s": warm_up,
        "emulated_layers": emulated if training.controller else None,
        **graph_counts(),
    }
    if options.profile and device.type == "cuda":
        row["profile"] = profiled(training)
    yield row


def profiled(training: llamas.LoopTraining) -> Line:
    """Returns milliseconds and launches per step by kind of kernel, and the longest kernels."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_STEPS):
            training.step()
        torch.cuda.synchronize()
    return by_kind(spans_of(profiler), PROFILED_STEPS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--steps", type=int, default=10, help=f"steps to time, after {WARM_UP} others (default 10)")
    parser.add_argument("--profile", action="store_true", help="add the time of each kind of kernel")
    parser.add_argument("--tiny", action="store_true", help="a model that also trains on a CPU")
    parser.add_argument("--minutes", type=float, default=2.3, help="begin no measurement later than this")
    parser.add_argument("--device", default="cuda", type=torch.device)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSONL file; lines are added")
    options = parser.parse_args()
    options.size = TINY if options.tiny else Size()
    deadline, source = time.monotonic() + 60 * options.minutes, origin_of(options.device)
    rows: list[Line] = []
    with torch._dynamo.config.patch(recompile_limit=64):
        for recipe in (BF16, *options.recipes, BF16):
            rows += guarded({"recipe": recipe, **asdict(options.size)}, partial(measure, recipe, options), deadline)
    rows = compared(rows)
    for row in rows:
        append_line(options.output, {**row, **source})
    print(f"\n{table(COLUMNS, rows)}")


if __name__ == "__main__":
    main()
