"""Where does the time of a training step, or of a refresh, go: which kernels, and which functions of the host?

    python benchmarks/step_profile.py --refresh --host 40
    python benchmarks/step_profile.py --model TinyLlama-1.1B --recipes BF16 "snip-hf MXFP4, ties" "torchao tensorwise"
    python benchmarks/step_profile.py --trainer --recipes BF16 "snip-hf MXFP4, ties" "snip-hf MXFP4 75%, ties"

Trains a few steps of a shape of `speed.py` under each recipe, in a plain loop or through the Trainer, first without and
then with torch's profiler. Prints, per recipe: the time of a step without the profiler; the milliseconds per step of
each kind of kernel and how many it launches; those of the folds by operand, with the time that their bytes take; the
time in which the device has nothing to do, and between which kernels it waits longest. With `--refresh` BF16 comes
first, and the second step that probes and the one that applies its plan are timed without the profiler too:
"refresh_ms" and "apply_ms". "extra_ms" is what they take beyond two ordinary steps, and "bf16_steps" that in steps of
BF16, as `speed.py` counts them.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import re
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from speed_parts.measuring import compiler, mark, milliseconds_between, release
from speed_parts.setting import MODELS, OURS, WITH_CHANGES
from speed_parts.switches import CHANGES, turn_on
from speed_parts.torchao_recipes import TORCHAO
from speed_parts.trainer_runs import arguments, compiled_by_regions, texts
from speed_parts.training_steps import Training, build_model
from torch.profiler import ProfilerActivity, profile
from transformers import Trainer, TrainerCallback

from snip_hf import SnipCallback, SnipConfig
from snip_hf.kernels.tensor_scaled import gated_operators, operators
from snip_hf.numerics.gemms import OPERANDS

WARM_UP, TIMED = 4, 8
# Of the preset's 20 steps of delay so many that the solver is done in them: it takes 0.7 to 1.5 s beside training.
FIRST, EVERY, DELAY = 4, 12, 10
BACKEND = "tensor-scaled" if torch.cuda.is_available() else "emulated"
REFRESHING = SnipConfig.preset(
    "hopper",
    formats=("mxfp4", "fp8-tensor"),
    backend=BACKEND,
    target_fp4_fraction=0.75,
    first_refresh=FIRST,
    refresh_every=EVERY,
    apply_delay=DELAY,
)
# Kind -> what the names of its kernels hold; the first that fits.
KINDS = {
    "communication": r"^nccl",
    "fold an operand": r"fold_kernel|fold_gated",
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
COPY_RATE = 4.25e9  # bytes per millisecond of an H200, read and written (docs/hopper.md)
LONGEST = 16
FOLDING = ("fold_kernel", "scales_kernel", "fold_gated_kernel", "fold_gated_gradients_kernel")
Span = tuple[float, float, str]
"""Microseconds at which a kernel begins and ends, and its name."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="TinyLlama-1.1B")
    parser.add_argument("--recipes", nargs="+", default=["BF16", "snip-hf MXFP4, ties"])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--trainer", action="store_true", help="through the Trainer, with its defaults")
    parser.add_argument("--refresh", action="store_true", help="a step that probes, of the preset for Hopper in MXFP4")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--host", type=int, default=0, help="print so many functions that take the host longest")
    parser.add_argument("--note", default="", help="a word for the lines, such as the version that is measured")
    parser.add_argument("--output", type=Path, help="gets a line per recipe")
    options = parser.parse_args()
    options.device = torch.device("cuda")
    recipes: list[str | SnipConfig] = ["BF16", REFRESHING] if options.refresh else options.recipes
    bf16_ms = 0.0
    for recipe in recipes:
        name = recipe if isinstance(recipe, str) else "refresh"
        release(options.device)
        window = Window(options, refreshes=isinstance(recipe, SnipConfig))
        (in_trainer if options.trainer else in_loop)(recipe, window, options)
        line = {"model": options.model, "recipe": name, "trainer": options.trainer, "note": options.note}
        line |= window.figures()
        bf16_ms = line["alone_ms"] if recipe == "BF16" else bf16_ms
        if "refresh_ms" in line:
            line["bf16_steps"] = round(line["extra_ms"] / bf16_ms, 2)
        print(json.dumps(line), flush=True)
        if options.output:
            with options.output.open("a") as file:
                file.write(json.dumps(line) + "\n")


class Window:
    """Which steps of a run are timed without the profiler, which with it, and in which the host's functions are.

    Args:
        options: of the command line.
        refreshes: whether the steps in question are those that probe. The first of these compiles its kernels, the
            second is timed without the profiler.
    """

    def __init__(self, options: argparse.Namespace, refreshes: bool = False) -> None:
        self.steps = 1 if refreshes else options.steps
        self._refreshes = refreshes
        self._start = FIRST + 2 * EVERY - 1 if refreshes else WARM_UP + TIMED
        """Steps before the first one with the profiler."""
        self._stop = self._start + self.steps
        self._host_start = self._start + EVERY if refreshes else self._stop
        self.total = self._host_start + self.steps if options.host else self._stop
        """Steps of the run."""
        self._device, self._functions = options.device, options.host
        self._profiler, self._host = profile(activities=[ProfilerActivity.CUDA]), cProfile.Profile()
        self._marks: list[Any] = []
        self._folds = Folds()

    def reach(self, number: int) -> None:
        """To be called when so many steps are done."""
        if WARM_UP <= number <= self._start:
            self._marks.append(mark(self._device))
        if number == self._start:
            torch.cuda.synchronize()
            self._folds.note()
            self._profiler.start()
        if number == self._stop:
            torch.cuda.synchronize()
            self._profiler.stop()
            self._folds.end()
        # One profiler takes the other's time.
        if self._functions and number == self._host_start:
            torch.cuda.synchronize()
            self._host.enable()
        if self._functions and number == self.total:
            self._host.disable()
            pstats.Stats(self._host).sort_stats("tottime").print_stats(self._functions)

    def figures(self) -> dict[str, Any]:
        """Returns what a line has."""
        spans = spans_of(self._profiler)
        times = of_steps(list(map(milliseconds_between, self._marks, self._marks[1:])), self._refreshes)
        return {**times, **by_kind(spans, self.steps), **self._folds.figures(spans, self.steps)}


def of_steps(times: Sequence[float], refreshes: bool = False) -> dict[str, float]:
    """Returns the median of the milliseconds of steps, and what the second refresh took.

    Args:
        times: of each step after the first `WARM_UP`.
        refreshes: whether there are refreshes.
    """
    step = statistics.median(times)
    found = {"alone_ms": step}
    if refreshes:
        second = FIRST + EVERY - WARM_UP - 1
        probe, due = times[second], times[second + DELAY]
        found |= {"refresh_ms": probe, "apply_ms": due, "extra_ms": probe + due - 2 * step}
    return {name: round(time, 3) for name, time in found.items()}


class Folds:
    """What the kernels of the backend "tensor-scaled" are launched for, in the order of their launches."""

    def __init__(self) -> None:
        self._launched: dict[str, list[tuple[str, int]]] = {name: [] for name in FOLDING}
        """Kernel -> of each launch the operand, and the bytes that it reads and writes."""
        self._now = ("", 0, 0)
        """Of the operand that is being folded: what it is, the bytes that are read, and those that are written."""
        self._inner: dict[tuple[Any, str], Any] = {}

    def note(self) -> None:
        """Takes notice of launches, until `end`."""
        for name in ("fold_into", "launch_fold", "find_scales"):
            self._inner[operators, name] = getattr(operators, name)
            setattr(operators, name, getattr(self, f"_{name.lstrip('_')}"))
        for name in ("launch_forward", "launch_backward"):
            self._inner[gated_operators, name] = getattr(gated_operators, name)
            setattr(gated_operators, name, getattr(self, f"_{name}"))

    def end(self) -> None:
        for (module, name), inner in self._inner.items():
            setattr(module, name, inner)

    def _fold_into(self, x: Any, state: Any, tensors: Any, operand: int, gemms: Any, *rest: Any) -> None:
        layouts = " and ".join(name for name, gemm in zip(("rows", "columns"), gemms, strict=True) if gemm >= 0)
        written = x.numel() * sum(gemm >= 0 for gemm in gemms)
        self._now = f"{OPERANDS[operand]} {x.shape[0]}x{x.shape[1]}, {layouts}", x.nbytes, written
        self._inner[operators, "fold_into"](x, state, tensors, operand, gemms, *rest)

    def _launch_fold(self, *given: Any, **more: Any) -> None:
        name, read, written = self._now
        self._launched["fold_kernel"].append((name, read + written))
        self._inner[operators, "launch_fold"](*given, **more)

    def _find_scales(self, *given: Any) -> None:
        name, read, _ = self._now
        self._launched["scales_kernel"].append((f"scales of {name}", read))
        self._inner[operators, "find_scales"](*given)

    def _launch_forward(self, gate: Any, up: Any, one: Any, *rest: Any) -> Any:
        return self._launch_gated("forward", (gate, up), [one], gate, up, one, *rest)

    def _launch_backward(self, inputs: Any, operands: Any, *rest: Any) -> Any:
        return self._launch_gated("backward", inputs, operands, inputs, operands, *rest)

    def _launch_gated(self, direction: str, inputs: Any, operands: Any, *given: Any) -> Any:
        values = self._inner[gated_operators, f"launch_{direction}"](*given)
        plain = [values] if direction == "forward" else values
        written = [
            sum(layout.nbytes for layout in one.outputs[::2]) if of_one is None else of_one.nbytes
            for one, of_one in zip(operands, plain, strict=True)
        ]
        shape, in_bf16 = inputs[0].shape, sum(of_one is not None for of_one in plain)
        name = f"gate {direction} {shape[0]}x{shape[1]}, {in_bf16} of {len(plain)} in BF16"
        kernel = "fold_gated_kernel" if direction == "forward" else "fold_gated_gradients_kernel"
        self._launched[kernel].append((name, sum(one.nbytes for one in inputs) + sum(written)))
        return values

    def figures(self, spans: Sequence[Span], steps: int) -> dict[str, Any]:
        """Returns, per operand, launches and milliseconds per step, and those in which the bytes could be moved."""
        found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        for kernel, launched in self._launched.items():
            times = [end - start for start, end, name in spans if kernel in name]
            if len(times) != len(launched):  # a captured graph launches more than the host does
                return {"folds": None}
            for (name, moved), time in zip(launched, times, strict=True):
                for index, amount in enumerate((1, 1e-3 * time, moved / COPY_RATE)):
                    found[name][index] += amount / steps
        ordered = sorted(found.items(), key=lambda pair: -pair[1][1])
        names = ("launches", "ms", "bound_ms")
        rows = {name: dict(zip(names, [round(one, 3) for one in row], strict=True)) for name, row in ordered}
        return {"folds": rows}


def spans_of(profiler: profile) -> list[Span]:
    """Returns what the GPU did, in the order in which it began."""
    return sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == torch._C._autograd.DeviceType.CUDA
    )


def milliseconds_alone(spans: Sequence[Span], kind: str) -> float:
    """Returns for how long kernels of this kind run, and no others."""
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
    """Returns milliseconds and launches per step by kind, the longest kernels, and where the device waits."""
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
        # Milliseconds without work, after so many of the profile, and between which kernels.
        "waits": [[round(1e-3 * wait, 3), round(1e-3 * at, 1), *names] for wait, at, *names in waits[:LONGEST]],
        # Those of at most so many microseconds, per step: gaps between kernels that are in the queue.
        "idle_ms_up_to": {
            most: round(sum(wait[0] for wait in waits if wait[0] <= most) * scale, 3) for most in (2, 5, 20, 100, 1000)
        },
    }


def in_loop(recipe: str | SnipConfig, window: Window, options: argparse.Namespace) -> None:
    """Trains as a loop of one's own does."""
    batch = (options.rows, options.length)
    training = Training(MODELS[options.model], batch, recipe, options.seed, options.device, **compiler("default"))
    for number in range(window.total):
        window.reach(number)
        training.step()
    window.reach(window.total)


class Steps(TrainerCallback):
    """Tells a window of the Trainer's steps."""

    def __init__(self, window: Window) -> None:
        self._window = window

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._window.reach(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._window.reach(state.global_step)


def in_trainer(recipe: str | SnipConfig, window: Window, options: argparse.Namespace) -> None:
    """Trains as a user of the Trainer does who names nothing but precision and compilation."""
    options.trainer_steps = window.total
    model = build_model(MODELS[options.model], options.length, options.seed, options.device)
    if recipe in TORCHAO:
        TORCHAO[recipe](model)
    if isinstance(recipe, str):
        turn_on(WITH_CHANGES.get(recipe, CHANGES))
    if recipe in OURS:
        recipe = SnipConfig(**OURS[recipe], backend=BACKEND, seed=options.seed)
    ours = [SnipCallback(recipe)] if isinstance(recipe, SnipConfig) else []
    with tempfile.TemporaryDirectory() as folder, compiled_by_regions():
        given = arguments(folder, options)
        trainer = Trainer(model, given, train_dataset=texts(options), callbacks=[*ours, Steps(window)])
        trainer.train()
    trainer.accelerator.free_memory()  # Accelerate's state outlives the Trainer.


if __name__ == "__main__":
    main()
