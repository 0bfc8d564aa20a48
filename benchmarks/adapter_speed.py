"""Does LoRA on a frozen base train faster with the base's products in low precision than in BF16?

    python benchmarks/adapter_speed.py --output runs/adapter_speed.jsonl
    python benchmarks/adapter_speed.py --shape 64 160 2 4 2 --rows 2 --length 64 --device cpu

Trains LoRA of rank 16 on all linears of a Llama (by default 8 blocks of the 8B shape) whose frozen weights are in BF16,
with compiled decoder layers and AdamW fused: in BF16 first and last and under snip-hf's formats between, through the
same loop. A frozen weight has a forward and a grad_input GEMM. Ends within 90 s on one H200.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import peft
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
from speed_parts.setting import BF16, OURS, WARM_UP, Row
from speed_parts.training_steps import build_model, graph_counts
from torch import Tensor

from snip_hf import SnipConfig, SnipController
from snip_hf.kernels.emulated import EMULATED
from snip_hf.layers.state import snip_linears

RECIPES = ("snip-hf MXFP4, ties", "snip-hf MXFP4 75%, ties")
RANK = 16


class Training:
    """Adapters in training under a recipe, always on the same micro-batch."""

    def __init__(
        self, shape: Sequence[int], batch: tuple[int, int], recipe: str, seed: int, device: torch.device
    ) -> None:
        model = build_model(shape, batch[1], seed, device).to(torch.bfloat16)
        adapters = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        self.model = peft.get_peft_model(model, adapters)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        fused = {"fused": True} if device.type == "cuda" else {}
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4, **fused)
        self.controller = None
        if recipe != BF16:
            backend = "tensor-scaled" if device.type == "cuda" else "emulated"
            config = SnipConfig(**OURS[recipe], backend=backend, seed=seed)
            self.controller = SnipController(self.model, self.optimizer, config)
        for layer in self.model.get_base_model().model.layers:
            layer.compile(**compiler("default"))
        ids = torch.randint(model.config.vocab_size, batch, device=device)
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


def measure(recipe: str, options: argparse.Namespace) -> Iterator[Row]:
    """Times steps without waiting for any; memory and losses are those of the timed steps."""
    device = options.device
    release(device)
    before, began = allocated(device), time.monotonic()
    training = Training(options.shape, (options.rows, options.length), recipe, options.seed, device)
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
    yield {
        "step_ms": statistics.median(map(milliseconds_between, marks, marks[1:])),
        "peak_gib": (peak(device) - before) / 2**30,
        "loss": value,
        "warm_up_s": first,
        "share": training.controller.plan.fp4_fraction if training.controller else None,
        "emulated_layers": training.emulated() if training.controller else None,
        **graph_counts(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES), metavar="RECIPE")
    parser.add_argument("--shape", type=int, nargs=5, default=setting.MODELS["8B, 8 layers"], metavar="N")
    parser.add_argument("--rows", type=int, default=8, help="sequences per step (default 8)")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence (default 2048)")
    parser.add_argument("--steps", type=int, default=10, help=f"steps to time, after {WARM_UP} more (default 10)")
    parser.add_argument("--minutes", type=float, default=1.5, help="begin no measurement later than this")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSONL file; lines are added")
    options = parser.parse_args()
    options.device = torch.device(options.device)
    options.deadline = time.monotonic() + 60 * options.minutes
    source = {"shape": list(options.shape), "rows": options.rows, "length": options.length}
    source |= origin_of(str(options.device)) | {"peft": peft.__version__, "lora_rank": RANK, "seed": options.seed}
    rows: list[Row] = []
    with torch._dynamo.config.patch(recompile_limit=64):
        for recipe in (BF16, *options.recipes, BF16):
            rows += guarded({"recipe": recipe}, partial(measure, recipe, options), options)
    for row in compared(rows, "step_ms"):
        if "speedup" in row:
            print(f"{row['recipe']}: {row['step_ms']:.1f} ms, {row['speedup']:.3f} times BF16's speed", flush=True)
        if options.output:
            with options.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**row, **source}) + "\n")


if __name__ == "__main__":
    main()
