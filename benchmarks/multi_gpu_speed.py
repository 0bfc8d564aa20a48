"""The speed-up of SNIP over BF16 on several GPUs, and the cost of a refresh there.

    python benchmarks/multi_gpu_speed.py --cases 1:none 2:ddp 2:fsdp2 --output runs/multi_gpu_speed.jsonl

A case is a number of processes and how they share the model: "none" (one process), "ddp", "ddp-views" (gradients are
views of large buckets), "fsdp2" or "fsdp2-pairs" (two decoder layers are gathered together). Each case trains a Llama
by a plain loop with compiled decoder layers, in BF16 and under SNIP (75%, by GEMM, siblings tied). Steps are timed
under the plan of the second refresh, and so is that refresh. Tokens per process are the same in all cases. Master
weights are FP32; the compute dtype is BF16 on CUDA (FSDP2 gathers BF16) and FP32 on a CPU.

With --profile, which needs a GPU, there are no refreshes, and a random 75% of the FLOPs runs in 4 bits. A line then
has, per step: milliseconds by kind of kernel, milliseconds of communication that no other kernel covers, idle
milliseconds, and milliseconds that the host takes to launch the step (including waits for room in the GPU's queue).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from shared import llamas, timing
from shared.lines import append_line, origin_of
from step_profile import by_kind, milliseconds_alone, spans_of
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaForCausalLM

from snip_hf import SnipConfig, SnipController, convert_model

RECIPES = ("BF16", "SNIP 75%")
# Steps from a probe to the application of its plan, and from there to the first timed step.
DELAY, SETTLED = 2, 3
# Bucket size of "ddp-views".
BUCKET_MB = 200
# With --profile: steps before the timed ones, and steps under the profiler.
WARM_UP, PROFILED = 8, 2


def main() -> None:
    """Starts the processes of each case and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["1:none", "2:ddp", "2:fsdp2"], metavar="PROCESSES:KIND")
    parser.add_argument("--model", choices=llamas.SHAPES, default="TinyLlama-1.1B")
    parser.add_argument("--rows", type=int, default=8, help="sequences per process and step (default 8)")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence (default 2048)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps (default 10)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", action="store_true", help="profile steps by kind of kernel")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--mode", default="default", help='of torch.compile, such as "reduce-overhead" for CUDA graphs')
    parser.add_argument("--output", type=Path, help="JSONL file; lines are added")
    parser.add_argument("--worker", metavar="KIND", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    print(", ".join(f"{name} {value}" for name, value in origin_of("cuda" if on_cuda() else "cpu").items()))
    rows = [row for case in options.cases for row in run_case(case, options)]
    if options.profile:
        return
    print("\n| processes | kind | recipe | step, ms | speed-up | refresh, s | BF16 steps |\n|" + "---|" * 7)
    for row in rows:
        bf16 = next(x for x in rows if (x["case"], x["recipe"]) == (row["case"], RECIPES[0]))
        seconds, step = row["refresh_s"], bf16["step_ms"]
        refresh = ("-", "-") if seconds is None else (f"{seconds:.3f}", f"{1e3 * seconds / step:.2f}")
        values = [*row["case"].split(":"), row["recipe"], f"{row['step_ms']:.1f}"]
        print("|", " | ".join([*values, f"{step / row['step_ms']:.3f}", *refresh]), "|")


def on_cuda() -> bool:
    return torch.cuda.is_available()


def run_case(case: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs the processes of a case and returns the lines of rank 0."""
    processes, kind = case.split(":")
    given = [
        "--model",
        options.model,
        *(f"--{name}={getattr(options, name)}" for name in ("rows", "length", "steps", "mode")),
    ]
    given += [f"--seed={options.seed}", "--worker", kind]
    given += [f"--{name}" for name in ("eager", "profile") if getattr(options, name)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.jsonl")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        subprocess.run([*launcher, __file__, *given, "--output", str(path)], check=True)
        rows = [json.loads(line) | {"case": case} for line in path.read_text().splitlines()]
    for row in rows:
        print(json.dumps(row), flush=True)
        append_line(options.output, {**row, **origin_of("cuda" if on_cuda() else "cpu")})
    return rows


def work(options: argparse.Namespace) -> None:
    """Runs one process of a case."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_cuda() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if options.worker != "none":
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    for recipe in RECIPES:
        row = (profiled if options.profile else train)(recipe, options.worker, options, device)
        if int(os.environ["RANK"]) == 0:
            append_line(options.output, row)
        timing.release(device)
    if dist.is_initialized():
        dist.destroy_process_group()


def train(recipe: str, kind: str, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Trains; returns the median milliseconds of a step and the seconds of the second refresh."""
    config = snip_config(options, device)
    training = begin(recipe, kind, options, device, config)
    controller = training.controller
    second = 1 + config.refresh_every
    first_timed = second + DELAY + SETTLED
    refresh = sum(training.step(number, number in (second, second + DELAY)) for number in range(1, first_timed))
    median = median_step(training, first_timed, options.steps)
    return {
        "recipe": recipe,
        "mode": options.mode,
        "step_ms": median,
        "refresh_s": refresh if controller else None,
        "fp4_fraction": controller.plan.fp4_fraction if controller else None,
        "backend": controller.backend if controller else None,
        "peak_gib": timing.peak(device) / 2**30,
    }


def begin(recipe: str, kind: str, options: argparse.Namespace, device: torch.device, config: SnipConfig) -> Training:
    """Returns a training before its first step."""
    model = llamas.build_model(llamas.SHAPES[options.model], options.length, options.seed, device)
    if recipe != RECIPES[0]:
        convert_model(model, config)
    if not options.eager:
        for layer in model.model.layers:
            layer.compile(mode=options.mode)
    wrapped, optimizer = wrap(model, kind, device)
    controller = None if recipe == RECIPES[0] else SnipController(wrapped, optimizer, config)
    return Training(wrapped, optimizer, controller, batch_of_rank(options, device), device)


def median_step(training: Training, first: int, steps: int) -> float:
    """Does `steps` steps and returns the median of their milliseconds."""
    marks = [timing.mark(training.device)]
    for number in range(first, first + steps):
        training.step(number)
        marks.append(timing.mark(training.device))
    timing.wait(training.device)
    return statistics.median(map(timing.milliseconds_between, marks, marks[1:]))


def profiled(recipe: str, kind: str, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Trains without refreshes and returns the profile of a step."""
    config = llamas.recipe_config("snip-hf 75%", device, options.seed)
    training = begin(recipe, kind, options, device, config)
    for number in range(1, WARM_UP):
        training.step(number)
    median = median_step(training, WARM_UP, options.steps)
    number = WARM_UP + options.steps
    timing.wait(device)
    start = time.perf_counter()
    training.step(number)
    host = 1e3 * (time.perf_counter() - start)
    timing.wait(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for later in range(1, PROFILED + 1):
            training.step(number + later)
        timing.wait(device)
    spans = spans_of(profiler)
    return {
        "recipe": recipe,
        "step_ms": median,
        "host_ms": round(host, 1),
        "communication_alone_ms": round(milliseconds_alone(spans, "communication") / PROFILED, 3),
        **{
            f"profiled_{name}" if name == "step_ms" else name: value for name, value in by_kind(spans, PROFILED).items()
        },
    }


def snip_config(options: argparse.Namespace, device: torch.device) -> SnipConfig:
    """Returns SNIP at 75%, with a second refresh before the steps that are timed."""
    schedule = {"first_refresh": 1, "refresh_every": DELAY + SETTLED + options.steps, "apply_delay": DELAY}
    changes = {"policy": "snip", "start_format": llamas.FORMATS[-1], "solver": "highs", **schedule}
    return llamas.recipe_config("snip-hf 75%", device, options.seed, **changes)


def batch_of_rank(options: argparse.Namespace, device: torch.device) -> dict[str, torch.Tensor]:
    """Returns random tokens, (rows, length), different in each process."""
    generator = torch.Generator(device).manual_seed(int(os.environ["RANK"]))
    tokens = torch.randint(llamas.VOCABULARY, (options.rows, options.length), device=device, generator=generator)
    return {"input_ids": tokens, "labels": tokens}


@dataclass(frozen=True)
class Training:
    """The training of one process, always on the same batch."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    controller: SnipController | None
    batch: dict[str, torch.Tensor]
    device: torch.device

    def step(self, number: int, refreshing: bool = False) -> float:
        """Does one step. Returns the controller's seconds if the step is `refreshing` (probes or applies), else 0."""
        taken = 0.0
        if self.controller is not None:
            self.controller.capture(self.batch)
        with timing.autocast(self.device):
            loss = self.model(**self.batch).loss
        loss.backward()
        if self.controller is not None:
            taken += self._seconds_of(partial(self.controller.before_optimizer_step, number), refreshing)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.controller is not None:
            taken += self._seconds_of(partial(self.controller.after_step, number), refreshing)
        return taken

    def _seconds_of(self, call: Callable[[], Any], clocked: bool) -> float:
        """Calls `call` and returns its seconds; returns 0 without waiting for the device if not `clocked`."""
        if clocked:
            return timing.clocked(self.device, call)
        call()
        return 0.0


def wrap(model: LlamaForCausalLM, kind: str, device: torch.device) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Returns the model, wrapped for this kind of sharing, and its optimizer."""
    wrapped: torch.nn.Module = model
    if kind.startswith("fsdp2"):
        policy = MixedPrecisionPolicy(torch.bfloat16 if device.type == "cuda" else None, torch.float32)
        together, layers = 2 if kind == "fsdp2-pairs" else 1, list(model.model.layers)
        for first in range(0, len(layers), together):
            fully_shard(layers[first : first + together], mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        # Explicit prefetching makes gathers independent of how far the host is ahead of the device.
        for layer, following in itertools.pairwise(layers[::together]):
            layer.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([layer])
    elif kind.startswith("ddp"):
        views = {"gradient_as_bucket_view": True, "bucket_cap_mb": BUCKET_MB} if kind == "ddp-views" else {}
        ids = [device.index] if device.type == "cuda" else None
        wrapped = DistributedDataParallel(model, device_ids=ids, **views)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    return wrapped, optimizer


if __name__ == "__main__":
    main()
