r"""What averaging gradients in FP8 costs in loss and saves in bytes, with two ranks over gloo, on a CPU.

    python benchmarks/gradient_compression_loss.py --output runs/gradient_compression_loss.jsonl
    python benchmarks/gradient_compression_loss.py --ways bf16 "fp8 nearest without feedback" --seeds 0
    python benchmarks/gradient_compression_loss.py --report runs/gradient_compression_loss.jsonl

The same tiny Llama on the same batches, once per seed and way of averaging: "exact" (DDP's all-reduce in FP32), "bf16"
(an all-reduce in BF16), and `snip_hf.parallel.gradient_compression` with rounding to nearest (its default) or
stochastic, with error feedback (its default) or without. "bf16" also shows how far runs part that differ by little.
Drift: the sum over all steps of (gradient applied - exact mean), as a norm, by that of the sum of the exact means.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from shared import small_models, texts
from shared.origin import origin_of
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from snip_hf import SnipConfig, convert_model
from snip_hf.layers.state import snip_linears
from snip_hf.numerics.gemms import GEMMS
from snip_hf.parallel.gradient_compression import GradientCompression

WAYS = (
    "exact",
    "bf16",
    "fp8 nearest",
    "fp8 nearest without feedback",
    "fp8 stochastic",
    "fp8 stochastic without feedback",
)
ARITHMETICS = ("fp32", "bf16", "snip-fp8", "snip-fp4")
RANKS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="text (.txt, .xz) or token ids (.npy); default: Python's own source")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["exact", "fp8 nearest"])
    parser.add_argument("--arithmetic", choices=ARITHMETICS, default="fp32", help="of the linears (default fp32)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--rows", type=int, default=2, help="sequences per rank and step (default 2)")
    default = Path("runs/gradient_compression_loss.jsonl")
    parser.add_argument("--output", type=Path, default=default, help="lines are added")
    parser.add_argument("--report", type=Path, nargs="+", help="print a Markdown table of these files instead")
    options = parser.parse_args()
    if options.report:
        print(report([json.loads(line) for path in options.report for line in path.read_text().splitlines()]))
        return
    options.output.parent.mkdir(parents=True, exist_ok=True)
    text = texts.load_text(options.text, "cpu")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(options, text, f"file://{folder}/store", origin_of("cpu")), nprocs=RANKS)


def run(rank: int, options: argparse.Namespace, text: texts.Text, store: str, origin: dict[str, Any]) -> None:
    """Trains all ways of all seeds as one rank; rank 0 adds a line per run to the output."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store, rank=rank, world_size=RANKS)
    for seed in options.seeds:
        for way in options.ways:
            line = {"way": way, "arithmetic": options.arithmetic, "seed": seed, **train(rank, options, text, seed, way)}
            if rank == 0:
                with options.output.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps(line | origin) + "\n")
                print(line, flush=True)
    dist.destroy_process_group()


def train(rank: int, options: argparse.Namespace, text: texts.Text, seed: int, way: str) -> dict[str, Any]:
    """Returns the validation loss, the bytes that a rank sent per step, seconds, and the drift."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(small_models.config("llama", options.hidden, options.blocks))
    if options.arithmetic.startswith("snip"):
        convert_model(model, SnipConfig(seed=seed))
        for layer in snip_linears(model).values():
            layer.set_formats(dict.fromkeys(GEMMS, options.arithmetic.removeprefix("snip-")))
    ddp = nn.parallel.DistributedDataParallel(model)
    averaging = Averaging(ddp, seed, way)
    (optimizer,) = small_models.optimizers("adamw", model)
    warmup, first = options.steps // 10, seed * options.steps
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * step / options.steps)),
    )
    autocast = partial(torch.autocast, "cpu", torch.bfloat16, enabled=options.arithmetic == "bf16")
    began = time.perf_counter()
    for step in range(options.steps):
        with autocast():
            loss = ddp(**text.batch((first + step) * RANKS + rank, options.rows)).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    seconds = time.perf_counter() - began - averaging.measuring
    return {
        "steps": options.steps,
        "parameters": sum(p.numel() for p in model.parameters()),
        "loss": validate(rank, model, text, autocast),
        "bytes_per_step": averaging.bytes_sent / options.steps,
        "seconds": seconds,
        "seconds_averaging": averaging.seconds,
        "drift": averaging.drift(),
    }


def validate(rank: int, model: nn.Module, text: texts.Text, autocast: Any, batches: int = 8) -> float:
    """Returns the mean loss over `batches` held-out batches of 8 per rank."""
    model.eval()
    total = torch.zeros(())
    with torch.no_grad(), autocast():
        for index in range(batches):
            total += model(**text.batch(index * RANKS + rank, 8, held_out=True)).loss.float()
    dist.all_reduce(total)
    return total.item() / (batches * RANKS)


class Averaging:
    """A way of averaging as a communication hook, with the exact mean beside it; bytes and seconds are its own."""

    def __init__(self, ddp: nn.parallel.DistributedDataParallel, seed: int, way: str) -> None:
        self.way = way
        self.bytes_sent = 0.0
        self.seconds = self.measuring = 0.0
        self._sums: dict[Tensor, tuple[Tensor, Tensor]] = {}
        self._compression = GradientCompression(ddp, seed, "without" not in way, "stochastic" in way)
        ddp.register_comm_hook(None, lambda state, bucket: self.hook(bucket))

    def hook(self, bucket: Any) -> Any:
        began = time.perf_counter()
        exact = bucket.buffer().clone()
        dist.all_reduce(exact.div_(RANKS))
        middle = time.perf_counter()
        averaged = self._reduce(bucket, exact)
        # The exact all-reduce that measures is also the way "exact".
        self.seconds += (middle - began) if self.way == "exact" else time.perf_counter() - middle
        measuring = time.perf_counter()
        sizes = [p.numel() for p in bucket.parameters()]
        for p, applied, true in zip(bucket.parameters(), averaged.split(sizes), exact.split(sizes), strict=True):
            error, total = self._sums.setdefault(p, (torch.zeros(p.numel()), torch.zeros(p.numel())))
            error += applied - true
            total += true
        self.measuring += time.perf_counter() - measuring + (0 if self.way == "exact" else middle - began)
        future = torch.futures.Future()
        future.set_result(averaged)
        return future

    def _reduce(self, bucket: Any, exact: Tensor) -> Tensor:
        """Returns the averaged gradients, and counts the bytes; an all-reduce is taken to be a ring's."""
        if self.way == "exact":
            self.bytes_sent += 2 * (RANKS - 1) / RANKS * exact.numel() * exact.element_size()
            return exact
        if self.way == "bf16":
            half = bucket.buffer().div(RANKS).to(torch.bfloat16)
            dist.all_reduce(half)
            self.bytes_sent += 2 * (RANKS - 1) / RANKS * half.numel() * half.element_size()
            return half.float()
        averaged = self._compression.reduce(bucket)
        self.bytes_sent = self._compression.bytes_sent
        return averaged

    def drift(self) -> float:
        error, total = (math.hypot(*(sums[i].norm().item() for sums in self._sums.values())) for i in (0, 1))
        return error / total


def report(lines: list[dict[str, Any]]) -> str:
    """Returns a Markdown table: differences to "exact" of the same arithmetic and seed, mean and standard deviation."""
    exact = {(line["arithmetic"], line["seed"]): line for line in lines if line["way"] == "exact"}
    rows = [
        "| arithmetic | gradients | seeds | loss | against exact, % | each seed, % | bytes per step | drift |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups = sorted({(ARITHMETICS.index(line["arithmetic"]), WAYS.index(line["way"])) for line in lines})
    for arithmetic, way in ((ARITHMETICS[i], WAYS[j]) for i, j in groups):
        group = [line for line in lines if (line["arithmetic"], line["way"]) == (arithmetic, way)]
        losses = np.array([line["loss"] for line in group])
        percent = 100 * (losses / [exact[arithmetic, line["seed"]]["loss"] for line in group] - 1)
        spread = f" ± {np.std(percent, ddof=1):.3f}" if len(group) > 1 else ""
        figures = [f"{losses.mean():.4f}", f"{percent.mean():+.3f}{spread}"]
        figures += [" ".join(f"{p:+.2f}" for p in percent), f"{group[0]['bytes_per_step']:,.0f}"]
        drift = np.mean([line["drift"] for line in group])
        rows.append(f"| {arithmetic} | {way} | {len(group)} | " + " | ".join(figures) + f" | {drift:.1e} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
