"""The speed of training with snip-hf, BF16 and torchao's FP8 on this machine, through the Hugging Face Trainer.

    python benchmarks/speed.py --output runs/speed.jsonl
    python benchmarks/speed.py --models TinyLlama-1.1B --share 0 0.75 1 --length 512 --checkpointing
    python benchmarks/speed.py --combinations --steps 24 --output runs/combinations.jsonl
    accelerate launch --config_file recipes/accelerate/fsdp2.yaml benchmarks/speed.py --output runs/fsdp2.jsonl

Needs one GPU; with the defaults it took 280 s on an H200. A recipe trains a Llama with torch.compile (decoder layers
one by one), fused AdamW and BF16 autocast over FP32 weights (--lora: frozen BF16 weights). snip-hf refreshes its plan
twice. Steps count from the first plan on, without those that probe or apply; speeds are those of their median, and the
mean includes steps that compile kernels. "wait" recipes read the loss in every step, as many callbacks do. BF16 runs
first and last, because clocks drift, and speeds are relative to the median of both. Prints a Markdown block for reports
and issues. With the kernels "emulated" it shows no speed of snip-hf: `snip-hf doctor` says what is missing. On several
GPUs each rank has its own micro-batches; times and peaks are those of the first.

With CUDA graphs (--mode) peaks are of reserved memory, since torch does not count tensors inside of graphs as
allocated. Memory that a refresh needed stays reserved, and so counts for later steps.

With --combinations it measures what users combine, on more models: a row of the table per case, a line per run, about
70 s per case (an estimate for an H200 and 24 steps). The same command continues a run that was cut off. With
--empty-caches nothing that an earlier run compiled is found, so that "first step" is that of a fresh machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from shared import llamas
from shared.lines import Line, append_line, drop_unfinished_line, origin_of, read_lines, table
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
from transformers import Trainer, TrainerCallback, TrainingArguments

from snip_hf import SnipCallback, SnipConfig
from snip_hf.training.gradients import GRAPH_MODES

LARGE, SMALL = "8B, 8 layers", "TinyLlama-1.1B"
# Model, and options that differ. The most useful first: --minutes cuts off the end.
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    (LARGE, {}),
    (LARGE, {"lora": True, "checkpointing": True}),
    (LARGE, {"rows": 1, "accumulate": 8}),
    ("Qwen3-4B, 12 layers", {}),
    (LARGE, {"checkpointing": True}),
    ("Qwen3-0.6B", {}),
    (LARGE, {"rows": 2, "length": 8192}),
    (SMALL, {"rows": 1}),
    (LARGE, {"lora": True}),
    ("Qwen2.5-7B, 8 layers", {}),
    ("70B, 2 layers", {}),
    (LARGE, {"rows": 32, "length": 512}),
    (SMALL, {}),
)
OURS, TORCHAO = "snip-hf 75%", "torchao tensorwise"
RANKS = int(os.environ.get("WORLD_SIZE", 1))
COLUMNS = {
    "model": ("model", "{}"),
    "case": ("step", "{}"),
    "recipe": ("recipe", "{}"),
    "backend": ("kernels", "{}"),
    "step_ms": ("median step, ms", "{:.1f}"),
    "mean_step_ms": ("mean", "{:.1f}"),
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
# The fields of `by_case`.
CASE_COLUMNS = {
    "model": ("model", "{}"),
    "case": ("step", "{}"),
    f"{BF16} step_ms": ("BF16, ms", "{:.1f}"),
    f"{TORCHAO} speedup": ("torchao / BF16", "{:.3f}"),
    f"{OURS} speedup": ("snip-hf / BF16", "{:.3f}"),
    f"{BF16} peak_gib": ("peak, GiB", "{:.2f}"),
    f"{TORCHAO} peak_ratio": ("torchao / BF16", "{:.3f}"),
    f"{OURS} peak_ratio": ("snip-hf / BF16", "{:.3f}"),
    f"{OURS} refresh_steps": ("refresh, BF16 steps", "{:.1f}"),
    f"{OURS} recompilations": ("recompilations", "{}"),
    f"{OURS} backend": ("kernels", "{}"),
}


def main() -> None:
    """Measures, prints and writes a line per run, then prints the table."""
    options = parse()
    if options.device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("speed.py: torch finds no GPU that it can use. `snip-hf doctor` says what is missing.")
    source = {**origin_of(options.device), "formats": options.formats}
    with ExitStack() as stack:
        if int(os.environ.get("RANK", 0)):
            options.output = None
            stack.enter_context(redirect_stdout(StringIO()))
        if options.device.type == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        if options.empty_caches:
            stack.enter_context(empty_caches())
        # With torch's default of 8, a kernel that compiles anew for each layer would end up uncompiled.
        stack.enter_context(torch._dynamo.config.patch(recompile_limit=64))
        if options.combinations:
            printed = table(CASE_COLUMNS, by_case(combine(options, source)))
        else:
            rows: list[Line] = []
            for model in options.models:
                found = measure(model, options)
                for row in found:
                    append_line(options.output, {**row, **source})
                rows += found
            printed = table(COLUMNS, rows)
        host = f"{source['machine']}, {os.cpu_count()} CPU cores, torch {source['torch']}"
        used = [name for name in ("triton", "torchao", "transformers") if name in sys.modules]
        versions = "".join(f", {name} {sys.modules[name].__version__}" for name in used)
        print(f"\n{host}{versions}, commit {source['commit']}, {source['command']}\n")
        print(printed)
        if options.mode in GRAPH_MODES:
            print("\nPeaks are of reserved memory, which includes the memory of CUDA graphs and of earlier refreshes.")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=llamas.SHAPES, default=[LARGE, SMALL], metavar="MODEL")
    parser.add_argument("--share", nargs="+", type=float, help="least shares in 4 bits (default 0.5 0.75)")
    parser.add_argument("--combinations", action="store_true", help="the cases of CASES in place of --models")
    parser.add_argument("--formats", nargs=2, default=list(llamas.FORMATS), metavar="FORMAT")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--rows", type=int, default=8, help="sequences per micro-batch (default 8)")
    parser.add_argument("--length", type=int, default=2048, help="tokens per sequence (default 2048)")
    parser.add_argument("--shortest", type=int, help="draw each length from this one to --length (with --rows 1)")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step (default 1)")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations of decoder layers")
    parser.add_argument("--lora", action="store_true", help="adapters of rank 16 on all linears of a frozen model")
    parser.add_argument("--liger", action="store_true", help="Liger's kernels for all recipes (needs liger-kernel)")
    parser.add_argument("--steps", type=int, default=36, help="steps of a run (default 36, at least 18)")
    parser.add_argument("--wait", action="store_true", help="also run each recipe with a callback that reads the loss")
    parser.add_argument("--mode", help='of torch.compile, such as "reduce-overhead" for CUDA graphs')
    parser.add_argument("--empty-caches", action="store_true", help="find nothing compiled by earlier runs")
    parser.add_argument("--minutes", type=float, default=30.0, help="begin no run later than this (default 30)")
    parser.add_argument("--device", default="cuda", type=torch.device)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSONL file; lines are added")
    options = parser.parse_args(arguments)
    given = [name for name in ("models", "share", "wait") if getattr(options, name) != parser.get_default(name)]
    if options.combinations and given:
        parser.error(f"--{given[0]} has no effect with --combinations, which lists its own cases; leave it out")
    options.share = options.share or ([0.75] if options.combinations else [0.5, 0.75])
    if options.shortest and options.rows > 1:
        parser.error("--shortest needs --rows 1, since the sequences of a micro-batch have one length")
    options.deadline = time.monotonic() + 60 * options.minutes
    return options


@contextmanager
def empty_caches() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        places = {name: f"{folder}/{name}" for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
        with patch.dict(os.environ, places):
            yield


def measure(model: str, options: argparse.Namespace) -> list[Line]:
    """Returns a row per recipe, with its speed and memory relative to BF16 and torchao."""
    recipes = [BF16, *(f"snip-hf {100 * share:g}%" for share in options.share), TORCHAO, BF16]
    rows: list[Line] = []
    for waits in (False, True)[: 1 + options.wait]:
        found: list[Line] = []
        for recipe in recipes:
            identity = {"model": model, "case": describe(options), "recipe": recipe}
            found += guarded(identity, partial(train, model, recipe, options, waits), options.deadline)
        found = in_other_units(compared(found))
        rows += [row | {"recipe": f"{row['recipe']}, wait", "waits": True} for row in found] if waits else found
    return rows


def combine(options: argparse.Namespace, source: Line) -> list[Line]:
    """Measures the cases that the output does not have yet, with a line per run; returns the lines of all cases."""
    if options.output:
        drop_unfinished_line(options.output)
    known = [line for line in read_lines(options.output) if "error" not in line] if options.output else []
    rows: list[Line] = []
    for model, changes in CASES:
        case = argparse.Namespace(**vars(options) | changes)
        identity = {"model": model, "case": describe(case)}
        same = identity | {field: source[field] for field in ("machine", "commit", "torch", "formats")}
        found = [line for line in known if same.items() <= line.items()]
        # Hosts differ, so a case that is not complete is measured anew.
        if len({line["recipe"] for line in found}) < 3 and time.monotonic() < options.deadline:
            found = []
            for recipe in (BF16, OURS, TORCHAO):
                found += guarded(identity | {"recipe": recipe}, partial(train, model, recipe, case), options.deadline)
                append_line(options.output, {**found[-1], **source})
        rows += found
    return rows


def describe(options: argparse.Namespace) -> str:
    """Returns what a step computes."""
    lengths = f"{options.shortest:,} to {options.length:,}" if options.shortest else f"{options.length:,}"
    parts = {
        f"{options.rows} x {lengths} tokens": True,
        f"{options.accumulate} micro-batches": options.accumulate > 1,
        "checkpointing": options.checkpointing,
        "LoRA": options.lora,
        "Liger": options.liger,
        f"compiled in the mode {options.mode}": options.mode is not None,
        f"{RANKS} ranks by {'FSDP2' if os.environ.get('ACCELERATE_USE_FSDP') == 'true' else 'DDP'}": RANKS > 1,
    }
    return ", ".join(text for text, holds in parts.items() if holds)


def by_case(rows: Sequence[Line]) -> list[Line]:
    """Returns a row per case with the figures of each recipe ("RECIPE FIELD"), and a row per failure."""
    cases: dict[tuple[str, str], list[Line]] = defaultdict(list)
    for row in rows:
        cases[row["model"], row["case"]].append(row)
    result = []
    for (model, case), found in cases.items():
        merged = {"model": model, "case": case}
        for row in in_other_units(compared(found)):
            merged |= {f"{row['recipe']} {field}": value for field, value in row.items()}
        result.append(merged)
    return result + [row | {"case": f"{row['case']}, {row['recipe']}"} for row in rows if "error" in row]


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

    def __init__(self, device: torch.device, waits: bool = False, reserved: bool = False) -> None:
        self._device, self._waits, self._reserved = device, waits, reserved
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
        self.peaks[state.global_step] = peak(self._device, self._reserved)
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


def train(model_name: str, recipe: str, options: argparse.Namespace, waits: bool = False) -> Iterator[Line]:
    """Trains once through the Trainer, with two refreshes under snip-hf."""
    device, schedule = options.device, Schedule(options.steps)
    reserved = options.mode in GRAPH_MODES
    release(device)
    before = allocated(device, reserved)
    model = llamas.build_model(llamas.SHAPES[model_name], options.length, options.seed, device)
    if options.checkpointing:
        # transformers 5.24 renamed it.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    if options.lora:
        model.to(torch.bfloat16)
    if recipe in llamas.TORCHAO:
        llamas.TORCHAO[recipe](model)
    if options.lora:
        from peft import LoraConfig, get_peft_model  # only needed here

        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
    clock = Clock(device, waits, reserved)
    ours = [SnipCallback(snip_config(recipe, schedule, options))] if recipe.startswith("snip-hf") else []
    loss, refreshes = train_by(partial(trainer_for, model, options, [*ours, clock]))
    times = clock.milliseconds()
    step = statistics.median(times[number] for number in schedule.ordinary)
    mean_length = (options.length + (options.shortest or options.length)) / 2
    gib = {number: (most - before) / 2**30 for number, most in clock.peaks.items()}
    row: Line = {
        "steps": options.steps,
        "step_ms": step,
        "mean_step_ms": statistics.fmean(times[number] for number in schedule.ordinary),
        "slowest_ms": max(times[number] for number in schedule.ordinary),
        "tokens_per_s": 1e3 * RANKS * options.rows * mean_length * options.accumulate / step,
        "peak_gib": max(gib[number] for number in schedule.ordinary),
        "memory": "reserved" if reserved else "allocated",
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


def train_by(make_trainer: Callable[[str], Trainer]) -> tuple[float, list[Line]]:
    """Trains in a folder that is deleted afterwards, and returns the mean loss and the refreshes.

    Raises:
        RuntimeError: a refresh failed.
    """
    with tempfile.TemporaryDirectory() as folder, compiled_by_regions():
        trainer = make_trainer(folder)
        loss = trainer.train().training_loss
        history = read_lines(Path(folder) / "snip" / "history.jsonl")
    trainer.accelerator.free_memory()  # Accelerate's state outlives the Trainer.
    refreshes = [line for line in history if line["event"] == "refresh"]
    if failed := [line["reason"] for line in refreshes if line["status"] != "applied"]:
        raise RuntimeError(f"a refresh failed: {failed[0]}")
    return loss, refreshes


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


def trainer_for(model: Any, options: argparse.Namespace, callbacks: list[TrainerCallback], folder: str) -> Trainer:
    """Returns a Trainer with the arguments that a user would give; all others are the defaults."""
    on_gpu = options.device.type == "cuda"
    arguments = TrainingArguments(
        folder,
        max_steps=options.steps,
        per_device_train_batch_size=options.rows,
        gradient_accumulation_steps=options.accumulate,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        torch_compile=True,
        torch_compile_backend=llamas.COMPILER,
        torch_compile_mode=options.mode,
        use_liger_kernel=options.liger,
        optim="adamw_torch_fused",
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        seed=options.seed,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=on_gpu,
        ddp_bucket_cap_mb=200 if RANKS > 1 else None,
        ddp_find_unused_parameters=False if RANKS > 1 else None,
    )
    trainer = Trainer(model, arguments, train_dataset=random_texts(options), callbacks=callbacks)
    trainer.accelerator.ddp_handler.gradient_as_bucket_view = True  # docs/distributed.md, "DDP"
    return trainer


@contextmanager
def compiled_by_regions() -> Iterator[None]:
    """Makes `torch_compile=True` compile decoder layers one by one."""
    with patch.dict(os.environ, {"ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "true"}):
        yield


def random_texts(options: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    """Returns as many sequences of random tokens as a run reads."""
    generator = torch.Generator().manual_seed(options.seed)
    shape = (RANKS * options.rows * options.accumulate * options.steps, options.length)
    tokens = torch.randint(llamas.VOCABULARY, shape, generator=generator)
    shortest = options.shortest or options.length
    lengths = torch.randint(shortest, options.length + 1, shape[:1], generator=generator).tolist()
    return [{"input_ids": row[:end], "labels": row[:end]} for row, end in zip(tokens, lengths, strict=True)]


if __name__ == "__main__":
    main()
