"""Where does the time of a training step, or of a refresh, go: which kernels, and which functions of the host?

    python benchmarks/step_profile.py --refresh --host 40
    python benchmarks/step_profile.py --model TinyLlama-1.1B --recipes BF16 "snip-hf MXFP4, ties" "torchao tensorwise"

Trains a few steps of a shape of `speed.py` under each recipe with torch's profiler and prints, per recipe, the
milliseconds per step of each kind of kernel, how many it launches, and the time in which the device has nothing to do.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from speed_parts.measuring import compiler, release
from speed_parts.setting import MODELS
from speed_parts.training_steps import Training
from torch.profiler import ProfilerActivity, profile

from snip_hf import SnipConfig

WARM_UP, FIRST, EVERY = 4, 4, 6
REFRESHING = SnipConfig.preset(
    "hopper",
    formats=("mxfp4", "fp8-tensor"),
    backend="tensor-scaled" if torch.cuda.is_available() else "emulated",
    target_fp4_fraction=0.75,
    first_refresh=FIRST,
    refresh_every=EVERY,
    apply_delay=2,
)
# Kind -> what the names of its kernels hold; the first that fits.
KINDS = {
    "fold an operand": r"fold_kernel",
    "find its scales": r"scales_kernel",
    "FP8 product": r"nvjet_sm90_qq|e4m3|fp8",
    "attention": r"flash|fmha|attention",
    "BF16 product": r"gemm|nvjet|cutlass|xmma|cublas",
    "optimizer": r"multi_tensor|adam",
    "fused by Inductor": r"^triton",
    "sort, gather and scatter": r"index|scatter|gather|[Ss]ort",
}
OTHER = "other"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="TinyLlama-1.1B")
    parser.add_argument("--recipes", nargs="+", default=["BF16", "snip-hf MXFP4, ties"])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--refresh", action="store_true", help="a step that probes, of the preset for Hopper in MXFP4")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--host", type=int, default=0, help="print so many functions that take the host longest")
    parser.add_argument("--output", type=Path, help="gets a line per recipe")
    options = parser.parse_args()
    recipes: list[str | SnipConfig] = [REFRESHING] if options.refresh else options.recipes
    for recipe in recipes:
        name = recipe if isinstance(recipe, str) else "refresh"
        line = {"model": options.model, "recipe": name, **measure(recipe, options)}
        print(json.dumps(line), flush=True)
        if options.output:
            with options.output.open("a") as file:
                file.write(json.dumps(line) + "\n")


def measure(recipe: str | SnipConfig, options: argparse.Namespace) -> dict[str, object]:
    """Returns milliseconds and launches per step by kind, the device's idle milliseconds, and the longest kernels."""
    device = torch.device("cuda")
    release(device)
    batch = (options.rows, options.length)
    training = Training(MODELS[options.model], batch, recipe, options.seed, device, **compiler("default"))
    steps = 1 if options.refresh else options.steps
    for _ in range(FIRST + EVERY - 1 if options.refresh else WARM_UP):
        training.step()
    torch.cuda.synchronize()
    host = cProfile.Profile()
    found = profiled(training.step, steps)
    if options.host:  # of the steps that follow, since one profiler takes the other's time
        for _ in range(EVERY - 1 if options.refresh else 0):
            training.step()
        torch.cuda.synchronize()
        with host:
            for _ in range(steps):
                training.step()
        pstats.Stats(host).sort_stats("tottime").print_stats(options.host)
    return found


def profiled(step: Callable[[], object], steps: int) -> dict[str, object]:
    """Returns milliseconds and launches per step by kind, the device's idle milliseconds, and the longest kernels."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    times: dict[str, float] = defaultdict(float)
    launches: dict[str, int] = defaultdict(int)
    names: dict[str, float] = defaultdict(float)
    busy, reached = 0.0, spans[0][0]
    for start, end, name in spans:
        kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), OTHER)
        times[kind] += end - start
        launches[kind] += 1
        names[name[:80]] += end - start
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    whole, scale = spans[-1][1] - spans[0][0], 1e-3 / steps
    longest = sorted(names.items(), key=lambda pair: -pair[1])[:16]
    return {
        "step_ms": whole * scale,
        "idle_ms": (whole - busy) * scale,
        "ms": {kind: round(time * scale, 3) for kind, time in times.items()},
        "launches": {kind: count / steps for kind, count in launches.items()},
        "longest": {name: round(time * scale, 3) for name, time in longest},
    }


if __name__ == "__main__":
    main()
