"""The speed of training with snip-hf, BF16 and torchao's FP8 on this machine, through the Hugging Face Trainer.

    python benchmarks/speed.py --output runs/speed.jsonl
    python benchmarks/speed.py --models TinyLlama-1.1B --share 0 0.75 1 --length 512
    python benchmarks/speed.py --loop --recipes "snip-hf 75%" "torchao tensorwise"

Needs one GPU; with the defaults it ends within 5 minutes on an H100 or H200. A recipe trains a Llama with torch.compile
(decoder layers one by one), fused AdamW and BF16 autocast over FP32 weights. snip-hf refreshes its plan twice. Steps
count from the first plan on, without those that probe or apply. "wait" recipes read the loss in every step, as many
callbacks do. BF16 runs first and last, because clocks drift, and speeds are relative to the median of both. Prints a
Markdown block for reports and issues.

With --loop a plain training loop with one plan and no refreshes takes the Trainer's place. With --empty-caches nothing
that an earlier run compiled is found, so that "first step" is that of a fresh machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from shared import llamas
from shared.lines import Line, append_line, origin_of, table
from shared.timing import (
    BF16,
    WARM_UP,
    allocated,
    clocked,
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
from transformers import Trainer, TrainerCallback, TrainingArguments

from snip_hf import SnipCallback, SnipConfig

TORCHAO = "torchao tensorwise"
WAITING = ", wait"
COLUMNS = {
    "model": ("model", "{}"),
    "recipe": ("recipe", "{}"),
    "step_ms": ("step, ms", "{:.1f}"),
    "tokens_per_s": ("tokens/s", "{:,.0f}"),
    "speedup": ("speed / BF16", "{:.3f}"),
    "against_torchao": ("/ torchao", "{:.3f}"),
    "peak_gib": ("peak of a step, GiB", "{:.2f}"),
    "peak_ratio": ("/ BF16", "{:.3f}"),
    "refresh_peak_gib": ("peak of a refresh, GiB", "{:.2f}"),
    "first_refresh_steps": ("first refresh, BF16 steps", "{:.1f}"),
    "refresh_steps": ("second", "{:.1f}"),
    "first_s": ("first step, s", "{:.1f}"),
    "recompilations": ("recompilations", "{}"),
    "share": ("in 4 bits", "{:.2f}"),
    "loss": ("mean loss", "{:.4f}"),
}


def main() -> None:
    """Measures, prints and writes a line per run, then prints the table."""
    options = parse()
    source = origin_of(options.device)
    with ExitStack() as stack:
        if options.empty_caches:
            stack.enter_context(empty_caches())
        # With torch's default of 8, a kernel that compiles anew for each layer would end up uncompiled.
        stack.enter_context(torch._dynamo.config.patch(recompile_limit=64))
        rows = [row for model in options.models for row in measure(model, options)]
    for row in rows:
        append_line(options.output, {**row, **source, "formats": options.formats})
    print(f"\n{source['machine']}, torch {source['torch']}, commit {source['commit']}, {source['command']}\n")
    print(table(COLUMNS, rows))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = ["8B, 8 layers", "TinyLlama-1.1B"]
    parser.add_argument("--models", nargs="+", choices=llamas.SHAPES, default=models, metavar="MODEL")
    parser.add_argument("--share", nargs="+", type=float, default=[0.75], help="least shares in 4 bits (default 0.75)")
    parser.add_argument("--recipes", nargs="+", choices=llamas.RECIPES, metavar="RECIPE", help="with --loop (all)")
    parser.add_argument("--formats", nargs=2, default=list(llamas.FORMATS), metavar="FORMAT")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--rows", type=int, default=8, help="sequences per step (default 8)")
    parser.add_argument("--length", type=int, default=2048, help="tokens per sequence (default 2048)")
    parser.add_argument("--steps", type=int, default=60, help="steps of a run (default 60, at least 18)")
    parser.add_argument("--wait", action="store_true", help="also run each recipe with a callback that reads the loss")
    parser.add_argument("--mode", help='of torch.compile, such as "reduce-overhead" for CUDA graphs')
    parser.add_argument("--loop", action="store_true", help="a plain loop in place of the Trainer")
    parser.add_argument("--empty-caches", action="store_true", help="find nothing compiled by earlier runs")
    parser.add_argument("--minutes", type=float, default=30.0, help="begin no run later than this (default 30)")
    parser.add_argument("--device", default="cuda", type=torch.device)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSONL file; lines are added")
    options = parser.parse_args(arguments)
    options.deadline = time.monotonic() + 60 * options.minutes
    options.tokens = options.rows * options.length
    return options


@contextmanager
def empty_caches() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        places = {name: f"{folder}/{name}" for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
        with patch.dict(os.environ, places):
            yield


def measure(model: str, options: argparse.Namespace) -> list[Line]:
    """Returns a row per recipe, with its speed and memory relative to BF16 and torchao."""
    if options.loop:
        recipes = options.recipes or [*llamas.OURS, TORCHAO]
        run = train_in_loop
    else:
        recipes = [*(f"snip-hf {share:.0%}" for share in options.share), TORCHAO]
        run = train_by_trainer
    recipes = [BF16, *(recipe for recipe in recipes if recipe != BF16), BF16]
    groups = [[f"{recipe}{ending}" for recipe in recipes] for ending in ("", WAITING)[: 1 + options.wait]]
    rows: list[Line] = []
    for group in groups:
        found: list[Line] = []
        for recipe in group:
            identity = {"model": model, "recipe": recipe.removesuffix(WAITING)}
            found += guarded(identity, partial(run, model, recipe, options), options.deadline)
        found = in_other_units(compared(found))
        waits = {} if group is groups[0] else {"waits": True}
        rows += [row | waits | {"recipe": row["recipe"] + (WAITING if waits else "")} for row in found]
    return rows


def in_other_units(rows: Sequence[Line]) -> list[Line]:
    """Adds refreshes in steps of BF16, and the speed relative to torchao's."""
    timed = [row for row in rows if "step_ms" in row]
    steps = {name: [row["step_ms"] for row in timed if row["recipe"] == name] for name in (BF16, TORCHAO)}
    result = []
    for row in rows:
        if "step_ms" in row and steps[TORCHAO]:
            row = row | {"against_torchao": steps[TORCHAO][0] / row["step_ms"]}
        if "refresh_ms" in row and steps[BF16]:
            step = statistics.median(steps[BF16])
            row = row | {f"{name}_steps": row[f"{name}_ms"] / step for name in ("first_refresh", "refresh")}
        result.append(row)
    return result


class Schedule:
    """The steps of a run that refresh, and the ordinary ones that are timed."""

    def __init__(self, steps: int) -> None:
        self.first, self.every, self.delay = steps // 6 + 1, steps // 2, steps // 6
        self.refreshes = (self.first, self.first + self.every)
        if self.first <= WARM_UP or self.refreshes[1] + self.delay >= steps:
            raise ValueError(f"{steps} steps are too few for two refreshes; expected at least 18.")
        self.applications = tuple(step + self.delay for step in self.refreshes)
        apart = {*self.refreshes, *self.applications, steps}
        self.ordinary = [step for step in range(self.applications[0] + 1, steps) if step not in apart]


class Clock(TrainerCallback):
    """Records when each step begins on the device, its peak memory, and the seconds of the first step."""

    def __init__(self, device: torch.device, waits: bool = False) -> None:
        self._device, self._waits = device, waits
        self._began = 0.0
        self._marks: list[Any] = []
        self.peaks: dict[int, int] = {}
        """Step -> bytes."""
        self.first_s = 0.0
        self.graphs = 0
        """Graphs compiled in the first steps."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began = time.perf_counter()
        self._marks.append(mark(self._device))
        reset_peak(self._device)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.peaks[state.global_step] = peak(self._device)
        if self._waits or state.global_step == 1:
            wait(self._device)
        if state.global_step == 1:
            self.first_s = time.perf_counter() - self._began
        if state.global_step == WARM_UP:
            self.graphs = graph_counts()["graphs"]

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._marks.append(mark(self._device))

    def milliseconds(self) -> dict[int, float]:
        """Returns step -> time until the next one begins."""
        wait(self._device)
        return dict(enumerate(map(milliseconds_between, self._marks, self._marks[1:]), start=1))


def train_by_trainer(model_name: str, recipe: str, options: argparse.Namespace) -> Iterator[Line]:
    """Trains once through the Trainer, with two refreshes under snip-hf."""
    device, schedule = options.device, Schedule(options.steps)
    waits, recipe = recipe.endswith(WAITING), recipe.removesuffix(WAITING)
    release(device)
    before = allocated(device)
    model = llamas.build_model(llamas.SHAPES[model_name], options.length, options.seed, device)
    if recipe in llamas.TORCHAO:
        llamas.TORCHAO[recipe](model)
    clock = Clock(device, waits)
    ours = [SnipCallback(snip_config(recipe, schedule, options))] if recipe.startswith("snip-hf") else []
    with tempfile.TemporaryDirectory() as folder, compiled_by_regions():
        arguments = training_arguments(folder, options)
        trainer = Trainer(model, arguments, train_dataset=random_texts(options), callbacks=[*ours, clock])
        loss = trainer.train().training_loss
        refreshes = refreshes_in(Path(folder)) if ours else []
    trainer.accelerator.free_memory()  # Accelerate's state outlives the Trainer.
    if failed := [line["reason"] for line in refreshes if line["status"] != "applied"]:
        raise RuntimeError(f"a refresh failed: {failed[0]}")
    times = clock.milliseconds()
    step = statistics.median(times[number] for number in schedule.ordinary)
    gib = {number: (most - before) / 2**30 for number, most in clock.peaks.items()}
    row: Line = {
        "steps": options.steps,
        "step_ms": step,
        "mean_step_ms": statistics.fmean(times[number] for number in schedule.ordinary),
        "slowest_ms": max(times[number] for number in schedule.ordinary),
        "tokens_per_s": 1e3 * options.tokens / step,
        "peak_gib": max(gib[number] for number in schedule.ordinary),
        "first_s": clock.first_s,
        "graphs": clock.graphs,
        "recompilations": graph_counts()["graphs"] - clock.graphs,
        "loss": loss,
    }
    if ours:
        probes = zip(schedule.refreshes, schedule.applications, strict=True)
        extra = [times[probe] + times[due] - 2 * step for probe, due in probes]
        row |= {
            "backend": ours[0].controller.backend,
            "share": ours[0].controller.plan.fp4_fraction,
            "first_refresh_ms": extra[0],
            "refresh_ms": extra[1],
            "refresh_peak_gib": max(gib[number] for number in schedule.refreshes),
            "seconds": [line["seconds"] for line in refreshes],
        }
    yield row


def snip_config(recipe: str, schedule: Schedule, options: argparse.Namespace) -> SnipConfig:
    """Returns the configuration of "snip-hf SHARE%". At 100% the first step is in 4 bits already."""
    share = float(recipe.removeprefix("snip-hf ").rstrip("%")) / 100
    narrow, wide = options.formats
    return SnipConfig(
        target_fp4_fraction=share,
        formats=(narrow, wide),
        start_format=narrow if share == 1 else wide,
        granularity="gemm",
        ties="auto",
        first_refresh=schedule.first,
        refresh_every=schedule.every,
        apply_delay=schedule.delay,
        backend=options.backend,
        seed=options.seed,
    )


def training_arguments(folder: str, options: argparse.Namespace) -> TrainingArguments:
    """Returns the arguments that a user would give; all others are the Trainer's defaults."""
    on_gpu = options.device.type == "cuda"
    return TrainingArguments(
        folder,
        max_steps=options.steps,
        per_device_train_batch_size=options.rows,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        torch_compile=True,
        torch_compile_backend=llamas.COMPILER,
        torch_compile_mode=options.mode,
        optim="adamw_torch_fused",
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        seed=options.seed,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=on_gpu,
    )


@contextmanager
def compiled_by_regions() -> Iterator[None]:
    """Makes `torch_compile=True` compile decoder layers one by one."""
    with patch.dict(os.environ, {"ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "true"}):
        yield


def random_texts(options: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    """Returns as many sequences of random tokens as a run reads."""
    generator = torch.Generator().manual_seed(options.seed)
    shape = (options.rows * options.steps, options.length)
    tokens = torch.randint(llamas.VOCABULARY, shape, generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def refreshes_in(folder: Path) -> list[Line]:
    lines = [json.loads(line) for line in (folder / "snip" / "history.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == "refresh"]


def train_in_loop(model_name: str, recipe: str, options: argparse.Namespace) -> Iterator[Line]:
    """Times steps of a plain loop without waiting for any of them, unless the recipe waits."""
    device = options.device
    waits, recipe = recipe.endswith(WAITING), recipe.removesuffix(WAITING)
    release(device)
    before = allocated(device)
    model = llamas.build_model(llamas.SHAPES[model_name], options.length, options.seed, device)
    training = llamas.LoopTraining(model, (options.rows, options.length), recipe, options.seed, device)
    first = clocked(device, training.step)
    for _ in range(WARM_UP - 1):
        training.step()
    reset_peak(device)
    graphs = graph_counts()["graphs"]
    marks = [mark(device)]
    for _ in range(options.steps):
        loss = training.step()
        if waits:
            wait(device)
        marks.append(mark(device))
    wait(device)
    step = statistics.median(map(milliseconds_between, marks, marks[1:]))
    yield {
        "steps": options.steps,
        "step_ms": step,
        "tokens_per_s": 1e3 * options.tokens / step,
        "peak_gib": (peak(device) - before) / 2**30,
        "first_s": first,
        "graphs": graphs,
        "recompilations": graph_counts()["graphs"] - graphs,
        "loss": float(loss),
        "backend": None if training.controller is None else training.controller.backend,
        "share": None if training.controller is None else training.controller.plan.fp4_fraction,
    }


if __name__ == "__main__":
    main()
