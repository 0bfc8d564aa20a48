"""Profiles a training step or a refresh: the time of each kernel, and of each function of the host.

    python benchmarks/step_profile.py --refresh --host 40
    python benchmarks/step_profile.py --model TinyLlama-1.1B --recipes BF16 "snip-hf MXFP4" "torchao tensorwise"
    python benchmarks/step_profile.py --trainer --recipes BF16 "snip-hf MXFP4" "snip-hf 75%"

Trains a few steps of a shape of `speed.py` under each recipe, in a plain loop or through the Trainer, first without and
then with torch's profiler. Prints a JSON line per recipe:

    alone_ms           a step without the profiler
    ms, launches       per step and kind of kernel, under the profiler
    idle_ms, waits     the time without a running kernel, and the longest gaps with the kernels around them
    refresh_ms         with --refresh: the second step that probes; apply_ms: the one that applies its plan; extra_ms:
                       what both take beyond two ordinary steps; bf16_steps: the same in steps of BF16

With --host N the functions that take most of the host's time are printed too.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import speed
import torch
from shared import llamas
from shared.lines import append_line, origin_of
from shared.timing import BF16, mark, milliseconds_between, release
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

from snip_hf import SnipCallback, SnipConfig

WARM_UP, TIMED = 4, 8
# The delay leaves the solver, which works beside training for 0.7 to 1.5 s, time to end.
FIRST, EVERY, DELAY = 4, 12, 10
# Kind -> pattern of its kernels' names; the first match counts.
KINDS = {
    "communication": r"^nccl",
    "fold an operand": r"(encode|fold)_(kernel|gated)",
    "find its scales": r"scales_kernel",
    "FP8 product": r"nvjet_sm90_qq|e4m3|fp8",
    "attention": r"flash|fmha|attention",
    "BF16 product": r"gemm|nvjet|cutlass|xmma|cublas",
    "optimizer": r"multi_tensor|adam",
    "fused by Inductor": r"^triton",
    "sort, gather and scatter": r"index|scatter|gather|[Ss]ort",
    "copied": r"^Mem",
}
OTHER = "other"
LONGEST = 16
Span = tuple[float, float, str]
"""Microseconds at which a kernel begins and ends, and its name."""


def main() -> None:
    options = parse()
    recipes = [BF16, refreshing(options)] if options.refresh else options.recipes
    source, bf16_ms = origin_of(options.device), 0.0
    for recipe in recipes:
        name = recipe if isinstance(recipe, str) else "refresh"
        release(options.device)
        window = Window(options, refreshes=isinstance(recipe, SnipConfig))
        (in_trainer if options.trainer else in_loop)(recipe, window, options)
        line = {"model": options.model, "recipe": name, "trainer": options.trainer, **window.figures()}
        bf16_ms = line["alone_ms"] if recipe == BF16 else bf16_ms
        if "refresh_ms" in line and bf16_ms:
            line["bf16_steps"] = round(line["extra_ms"] / bf16_ms, 2)
        print(json.dumps(line), flush=True)
        append_line(options.output, {**line, **source})


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the options, and beside them the defaults of `speed.py`, which its `trainer_for` reads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=llamas.SHAPES, default="TinyLlama-1.1B")
    parser.add_argument("--recipes", nargs="+", choices=llamas.RECIPES, default=[BF16, "snip-hf MXFP4"])
    parser.add_argument("--rows", type=int, default=8, help="sequences per step (default 8)")
    parser.add_argument("--length", type=int, default=2048, help="tokens per sequence (default 2048)")
    parser.add_argument("--profiled", type=int, default=3, help="steps under the profiler (default 3)")
    parser.add_argument("--trainer", action="store_true", help="through the Trainer, with its defaults")
    parser.add_argument("--mode", help='with --trainer: of torch.compile, such as "reduce-overhead" for CUDA graphs')
    parser.add_argument("--refresh", action="store_true", help="a step that probes, at 75%% by SNIP")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--host", type=int, default=0, help="print this many functions of the host")
    parser.add_argument("--output", type=Path, help="JSONL file; lines are added")
    return parser.parse_args(arguments, namespace=speed.parse([]))


def refreshing(options: argparse.Namespace) -> SnipConfig:
    """Returns SNIP at 75% with refreshes at the steps that a `Window` expects."""
    schedule = {"first_refresh": FIRST, "refresh_every": EVERY, "apply_delay": DELAY}
    changes = {"policy": "snip", "start_format": llamas.FORMATS[-1], **schedule}
    return llamas.recipe_config("snip-hf 75%", options.device, options.seed, **changes)


class Window:
    """Decides which steps of a run are timed without the profiler, and which run under it.

    Args:
        options: of the command line.
        refreshes: whether the steps in question are those that probe. The first of these compiles its kernels; the
            second is timed without the profiler.
    """

    def __init__(self, options: argparse.Namespace, refreshes: bool = False) -> None:
        self.steps = 1 if refreshes else options.profiled
        self._refreshes = refreshes
        self._start = FIRST + 2 * EVERY - 1 if refreshes else WARM_UP + TIMED
        """Steps before the first one under the profiler."""
        self._stop = self._start + self.steps
        self._host_start = self._start + EVERY if refreshes else self._stop
        self.total = self._host_start + self.steps if options.host else self._stop
        """Steps of the run."""
        self._device, self._functions = options.device, options.host
        self._profiler, self._host = profile(activities=[ProfilerActivity.CUDA]), cProfile.Profile()
        self._marks: list[Any] = []

    def reach(self, number: int) -> None:
        """Must be called when `number` steps are done."""
        if WARM_UP <= number <= self._start:
            self._marks.append(mark(self._device))
        if number == self._start:
            torch.cuda.synchronize()
            self._profiler.start()
        if number == self._stop:
            torch.cuda.synchronize()
            self._profiler.stop()
        # Separate steps, because each profiler slows the other's.
        if self._functions and number == self._host_start:
            torch.cuda.synchronize()
            self._host.enable()
        if self._functions and number == self.total:
            self._host.disable()
            pstats.Stats(self._host).sort_stats("tottime").print_stats(self._functions)

    def figures(self) -> dict[str, Any]:
        """Returns the figures of a line."""
        times = list(map(milliseconds_between, self._marks, self._marks[1:]))
        return {**of_steps(times, self._refreshes), **by_kind(spans_of(self._profiler), self.steps)}


def of_steps(times: Sequence[float], refreshes: bool = False) -> dict[str, float]:
    """Returns the median milliseconds of a step, and those of the second refresh.

    Args:
        times: of each step after the first `WARM_UP`.
        refreshes: whether the run refreshes.
    """
    step = statistics.median(times)
    found = {"alone_ms": step}
    if refreshes:
        second = FIRST + EVERY - WARM_UP - 1
        probe, due = times[second], times[second + DELAY]
        found |= {"refresh_ms": probe, "apply_ms": due, "extra_ms": probe + due - 2 * step}
    return {name: round(time, 3) for name, time in found.items()}


def spans_of(profiler: profile) -> list[Span]:
    """Returns the kernels and copies of the GPU, ordered by their start."""
    return sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == torch._C._autograd.DeviceType.CUDA
    )


def milliseconds_alone(spans: Sequence[Span], kind: str) -> float:
    """Returns the time in which kernels of this kind run and no others."""
    alone = reached = 0.0
    others = sorted(span[:2] for span in spans if kind_of(span[2]) != kind)
    for start, end, name in spans:
        if kind_of(name) != kind or end <= reached:
            continue
        start, reached = max(start, reached), end
        covered, at = 0.0, start
        for begin, stop in others:
            covered += max(min(stop, end) - max(begin, at), 0.0)
            at = max(at, min(stop, end))
        alone += end - start - covered
    return 1e-3 * alone


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), OTHER)


def by_kind(spans: Sequence[Span], steps: int) -> dict[str, Any]:
    """Returns milliseconds and launches per step by kind, the longest kernels, and the gaps between kernels."""
    times: dict[str, float] = defaultdict(float)
    launches: dict[str, int] = defaultdict(int)
    names: dict[str, float] = defaultdict(float)
    waits: list[tuple[float, float, str, str]] = []
    begin, reached, before = spans[0][0], spans[0][0], ""
    for start, end, name in spans:
        times[kind_of(name)] += end - start
        launches[kind_of(name)] += 1
        names[name[:80]] += end - start
        if start > reached:
            waits.append((start - reached, reached - begin, before[:40], name[:40]))
        if end > reached:
            reached, before = end, name
    scale = 1e-3 / steps
    longest = sorted(names.items(), key=lambda pair: -pair[1])[:LONGEST]
    waits.sort(reverse=True)
    return {
        "step_ms": round((reached - begin) * scale, 3),
        "idle_ms": round(sum(wait[0] for wait in waits) * scale, 3),
        "ms": {kind: round(time * scale, 3) for kind, time in times.items()},
        "launches": {kind: count / steps for kind, count in launches.items()},
        "longest": {name: round(time * scale, 3) for name, time in longest},
        # (milliseconds without work, milliseconds since the profile's start, kernel before, kernel after)
        "waits": [[round(1e-3 * wait, 3), round(1e-3 * at, 1), *names] for wait, at, *names in waits[:LONGEST]],
        # Most microseconds of a gap -> milliseconds per step. Short gaps lie between kernels that are queued.
        "idle_ms_up_to": {
            most: round(sum(wait[0] for wait in waits if wait[0] <= most) * scale, 3) for most in (2, 5, 20, 100, 1000)
        },
    }


def in_loop(recipe: str | SnipConfig, window: Window, options: argparse.Namespace) -> None:
    """Trains by a plain loop."""
    model = llamas.build_model(llamas.SHAPES[options.model], options.length, options.seed, options.device)
    training = llamas.LoopTraining(model, (options.rows, options.length), recipe, options.seed, options.device)
    for number in range(window.total):
        window.reach(number)
        training.step()
    window.reach(window.total)


class Steps(TrainerCallback):
    """Tells a window which step the Trainer has reached."""

    def __init__(self, window: Window) -> None:
        self._window = window

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._window.reach(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._window.reach(state.global_step)


def in_trainer(recipe: str | SnipConfig, window: Window, options: argparse.Namespace) -> None:
    """Trains through the Trainer, with its defaults except for precision and compilation."""
    options.steps = window.total
    model = llamas.build_model(llamas.SHAPES[options.model], options.length, options.seed, options.device)
    if isinstance(recipe, str) and recipe in llamas.TORCHAO:
        llamas.TORCHAO[recipe](model)
    if isinstance(recipe, str) and recipe in llamas.OURS:
        recipe = llamas.recipe_config(recipe, options.device, options.seed)
    ours = [SnipCallback(recipe)] if isinstance(recipe, SnipConfig) else []
    speed.train_by(partial(speed.trainer_for, model, options, [*ours, Steps(window)]))


if __name__ == "__main__":
    main()
