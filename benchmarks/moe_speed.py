"""Does a mixture of experts train faster in low precision than in BF16 with transformers' grouped products?

    python benchmarks/moe_speed.py --profile --output runs/moe_speed.jsonl

Trains a Qwen3-MoE of 1.1B parameters from a config, decoder layers compiled one by one, AdamW fused, in BF16 first and
last and under snip-hf's formats between, through the same loop. Weights are BF16 in all of them, since transformers
runs experts whose weights are FP32 one by one where they are compiled. Prints milliseconds per step, peak memory and
the ratio to BF16, and with --profile the milliseconds of each kind of kernel. Ends within 150 s on one H200.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from shared.origin import origin_of
from speed_parts import setting
from speed_parts.measuring import (
    allocated,
    autocast,
    compared,
    compiler,
    guarded,
    mark,
    milliseconds_between,
    peak,
    release,
)
from speed_parts.setting import BF16, FOLDED, WARM_UP, Row
from speed_parts.training_steps import graph_counts
from step_profile import by_kind
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from snip_hf import SnipConfig, SnipController
from snip_hf.kernels.emulated import EMULATED
from snip_hf.layers.state import snip_linears

IMPLEMENTATION = "grouped_mm"
# Recipe -> fields of its SnipConfig. Of "75%", any three quarters of the FLOPs are in 4 bits, by GEMM.
RECIPES: dict[str, dict[str, Any]] = {
    "snip-hf MXFP4": {"policy": "uniform-mxfp4"},
    "snip-hf MXFP4 75%": {"policy": "random", "target_fp4_fraction": 0.75, "granularity": "gemm"},
}
TIES = (("q_proj", "k_proj", "v_proj"),)
PROFILED_STEPS = 2


@dataclass(frozen=True)
class Size:
    """Of a model and its micro-batch."""

    hidden: int = 2048
    inner: int = 768
    layers: int = 6
    experts: int = 32
    experts_per_token: int = 4
    heads: int = 16
    rows: int = 8
    length: int = 2048
    vocabulary: int = setting.VOCABULARY


TINY = Size(hidden=64, inner=32, layers=2, experts=4, experts_per_token=2, heads=2, rows=2, length=64, vocabulary=128)


class Training:
    """A model in training under a recipe, always on the same micro-batch."""

    def __init__(self, size: Size, recipe: str, seed: int, device: torch.device) -> None:
        self.model = build_model(size, seed, device)
        fused = {"fused": True} if device.type == "cuda" else {}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, **fused)
        self.controller = None
        if recipe != BF16:
            backend = "tensor-scaled" if device.type == "cuda" else "emulated"
            config = SnipConfig(**RECIPES[recipe], formats=FOLDED, ties=TIES, backend=backend, seed=seed)
            self.controller = SnipController(self.model, self.optimizer, config)
        for layer in self.model.model.layers:
            layer.compile(**compiler("default"))
        ids = torch.randint(size.vocabulary, (size.rows, size.length), device=device)
        self.batch = {"input_ids": ids, "labels": ids}
        self.device, self.number = device, 0

    def step(self) -> Tensor:
        """Does one optimizer step, and returns its loss."""
        self.number += 1
        if self.controller is not None:
            self.controller.capture(self.batch)
        with autocast(self.device):
            loss = self.model(**self.batch).loss
        loss.backward()
        if self.controller is not None:
            self.controller.before_optimizer_step(self.number)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.controller is not None:
            self.controller.after_step(self.number)
        return loss.detach()

    def emulated(self) -> int:
        """Returns how many layers run emulated."""
        return sum(layer.snip_backend is EMULATED for layer in snip_linears(self.model).values())


def build_model(
    size: Size, seed: int, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> Qwen3MoeForCausalLM:
    """Returns a Qwen3-MoE in training mode, its weights in a dtype."""
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
        return Qwen3MoeForCausalLM(config).to(dtype).train()


def measure(recipe: str, options: argparse.Namespace) -> Iterator[Row]:
    """Times steps without waiting for any; memory and losses are those of the timed steps."""
    device = options.device
    release(device)
    before, began = allocated(device), time.monotonic()
    training = Training(options.size, recipe, options.seed, device)
    for _ in range(WARM_UP):
        loss = training.step()
    float(loss)
    first = time.monotonic() - began
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    marks = [mark(device)]
    for _ in range(options.steps):
        loss = training.step()
        marks.append(mark(device))
    value = float(loss)
    taken = sorted(map(milliseconds_between, marks, marks[1:]))[options.steps // 2]
    row = {
        "step_ms": taken,
        "tokens_per_s": 1e3 * options.size.rows * options.size.length / taken,
        "peak_gib": (peak(device) - before) / 2**30,
        "loss": value,
        "warm_up_s": first,
        "emulated_layers": training.emulated() if training.controller else None,
        **graph_counts(),
    }
    if options.profile and device.type == "cuda":
        row["profile"] = profiled(training)
    yield row


def profiled(training: Training) -> Row:
    """Returns milliseconds and launches per step by kind of kernel, and the longest kernels."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_STEPS):
            training.step()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == torch._C._autograd.DeviceType.CUDA
    )
    return by_kind(spans, PROFILED_STEPS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--steps", type=int, default=10, help=f"steps to time, after {WARM_UP} more (default 10)")
    parser.add_argument("--profile", action="store_true", help="add the time of each kind of kernel")
    parser.add_argument("--tiny", action="store_true", help="a model that a CPU trains too")
    parser.add_argument("--minutes", type=float, default=2.3, help="begin no measurement later than this")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSONL file; lines are added")
    options = parser.parse_args()
    options.device = torch.device(options.device)
    options.size = TINY if options.tiny else Size()
    options.deadline = time.monotonic() + 60 * options.minutes
    source = origin_of(str(options.device))
    rows: list[Row] = []
    with torch._dynamo.config.patch(recompile_limit=64):
        for recipe in (BF16, *options.recipes, BF16):
            rows += guarded({"recipe": recipe, **asdict(options.size)}, partial(measure, recipe, options), options)
    for row in compared(rows, "step_ms"):
        if "speedup" in row:
            print(f"{row['recipe']}: {row['step_ms']:.1f} ms, {row['speedup']:.3f} times BF16's speed", flush=True)
        if options.output:
            with options.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**row, **source}) + "\n")


if __name__ == "__main__":
    main()
