"""Part `trainer`: runs of the Hugging Face Trainer as a user starts them, with refreshes of the plan in them.

A run has two refreshes, whose own steps are kept apart: the first one also loads and compiles what only a probe needs.
Steps are timed from the application of the first plan on, in all runs alike.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import probe_cost
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from snip_hf import SnipCallback, SnipConfig

from . import setting
from .measuring import allocated, compared, guarded, mark, milliseconds_between, peak, release
from .setting import BF16, IN_TRAINER, TORCHAO_IN_TRAINER, WARM_UP, Row
from .torchao_recipes import TORCHAO
from .training_steps import build_model, graph_counts

# Compiles decoder layers one by one where the Trainer is told torch_compile=True.
REGIONS = "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"


class Marks(TrainerCallback):
    """Notes when each step begins on the device, its peak of memory, and how long the first one takes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made, self._began = time.perf_counter(), 0.0
        self._marks: list[Any] = []
        self._peaks: list[int] = []
        self.first_s = 0.0
        """Seconds of the first step, with all that is compiled in it."""
        self.start_s = 0.0
        """Seconds before it: from the making of this, before the Trainer's, to its beginning."""
        self.graphs = 0
        """Graphs compiled in the first steps."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began = time.perf_counter()
        self.start_s = self.start_s or self._began - self._made
        self._marks.append(mark(self._device))
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._peaks.append(peak(self._device))
        if state.global_step == 1:
            probe_cost.wait(self._device)
            self.first_s = time.perf_counter() - self._began
        if state.global_step == WARM_UP:
            self.graphs = graph_counts()["graphs"]

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._marks.append(mark(self._device))

    def milliseconds(self) -> dict[int, float]:
        """Returns step -> time to the beginning of the next one."""
        probe_cost.wait(self._device)
        return dict(enumerate(map(milliseconds_between, self._marks, self._marks[1:]), start=1))

    def peaks(self) -> dict[int, int]:
        """Returns step -> bytes."""
        return dict(enumerate(self._peaks, start=1))


class Plan:
    """When a run of so many steps refreshes, and when that is applied."""

    def __init__(self, steps: int) -> None:
        self.first, self.every, self.delay = steps // 6 + 1, steps // 2, steps // 6
        self.refreshes = (self.first, self.first + self.every)
        if self.first <= WARM_UP or self.refreshes[1] + self.delay >= steps:
            raise ValueError(f"{steps} steps are too few for two refreshes; expected at least 18.")
        self.applications = tuple(step + self.delay for step in self.refreshes)
        apart = {*self.refreshes, *self.applications, steps}
        self.ordinary = [step for step in range(self.applications[0] + 1, steps) if step not in apart]


def trainer_part(options: argparse.Namespace, found: Sequence[Row]) -> Iterator[Row]:
    logged()
    recipes = [recipe for recipe in (*IN_TRAINER, *TORCHAO_IN_TRAINER) if recipe in options.recipes]
    for name in options.models:
        rows = []
        for recipe in (BF16, *recipes, BF16):
            rows += guarded({"model": name, "recipe": recipe}, partial(run, name, recipe, options), options)
        yield from in_units_of_others(compared(rows, "step_ms"))


def logged() -> None:
    """Prints what a user's log says: kernels, compilation, what to expect, what a probe does twice."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("snip_hf").setLevel(logging.INFO)


def in_units_of_others(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows with what only a Trainer's run has, in the units of BF16 and of torchao."""
    ours = [row for row in rows if "step_ms" in row]
    bf16, torchao = ([row for row in ours if row["recipe"] in names] for names in ((BF16,), TORCHAO_IN_TRAINER))
    result = []
    for row in rows:
        if bf16 and "step_ms" in row:
            row = row | {"first_ratio": row["first_s"] / bf16[0]["first_s"]}
            step = statistics.median(other["step_ms"] for other in bf16)
            for which in ("first_refresh", "refresh"):
                row[f"{which}_steps"] = row[f"{which}_ms"] / step
            if row["refresh_peak_gib"]:
                row["refresh_peak_ratio"] = row["refresh_peak_gib"] / bf16[0]["peak_gib"]
        if torchao and "step_ms" in row:
            row = row | {"against_torchao": torchao[0]["step_ms"] / row["step_ms"]}
        result.append(row)
    return result


def run(name: str, recipe: str, options: argparse.Namespace) -> Iterator[Row]:
    """Trains once. The memory is that of steps, with that of refreshes beside it."""
    device, plan = options.device, Plan(options.trainer_steps)
    release(device)
    before = allocated(device)
    model = build_model(setting.MODELS[name], options.length, options.seed, device)
    if recipe in TORCHAO:
        TORCHAO[recipe](model)
    marks = Marks(device)
    ours = [SnipCallback(config_of(recipe, plan, options))] if recipe in IN_TRAINER else []
    with tempfile.TemporaryDirectory() as folder, compiled_by_regions():
        trainer = Trainer(model, arguments(folder, options), train_dataset=texts(options), callbacks=[*ours, marks])
        loss = trainer.train().training_loss
        lines = refreshes_in(Path(folder)) if ours else []
    trainer.accelerator.free_memory()  # Accelerate's state outlives the Trainer.
    if wrong := [line["reason"] for line in lines if line["status"] != "applied"]:
        raise RuntimeError(f"a refresh came to nothing: {wrong[0]}")
    times, peaks, counts = marks.milliseconds(), marks.peaks(), graph_counts()
    step = statistics.median(times[step] for step in plan.ordinary)
    gib = {step: (most - before) / 2**30 for step, most in peaks.items()}
    extra = [times[probe] + times[due] - 2 * step for probe, due in zip(plan.refreshes, plan.applications, strict=True)]
    yield {
        "formats": ours[0].config.formats if ours else None,
        "backend": ours[0].controller.backend if ours else None,
        "steps": options.trainer_steps,
        "step_ms": step,
        "slowest_ms": max(times[step] for step in plan.ordinary),
        "tokens_per_s": 1e3 * options.tokens / step,
        "first_refresh_ms": extra[0],
        "refresh_ms": extra[1],
        "peak_gib": max(gib[step] for step in plan.ordinary),
        "refresh_peak_gib": max(gib[step] for step in plan.refreshes),
        "reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30 if device.type == "cuda" else 0.0,
        "start_s": marks.start_s,
        "first_s": marks.first_s,
        "graphs": marks.graphs,
        "breaks": counts["breaks"],
        "recompilations": counts["graphs"] - marks.graphs,
        "loss": loss,
        "share": ours[0].controller.plan.fp4_fraction if ours else None,
        "seconds": [line["seconds"] for line in lines],
        "memory_mib": [line["memory_mib"] for line in lines],
    }


def config_of(recipe: str, plan: Plan, options: argparse.Namespace) -> SnipConfig:
    """Returns the preset for Hopper under a schedule that is short enough; "100%" begins where its plans end."""
    share = IN_TRAINER[recipe]
    changes: dict[str, Any] = {"backend": options.backend}
    if options.formats:
        changes["formats"] = tuple(options.formats)
    config = SnipConfig.preset(
        "hopper",
        target_fp4_fraction=share,
        first_refresh=plan.first,
        refresh_every=plan.every,
        apply_delay=plan.delay,
        seed=options.seed,
        **changes,
    )
    return config if share < 1 else SnipConfig.from_dict(config.to_dict() | {"start_format": config.least_precise})


def arguments(folder: str, options: argparse.Namespace) -> TrainingArguments:
    """Returns what a user gives: all that is not named here is the Trainer's default."""
    on_gpu = options.device.type == "cuda"
    return TrainingArguments(
        folder,
        max_steps=options.trainer_steps,
        per_device_train_batch_size=options.rows,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        torch_compile=True,
        torch_compile_backend=setting.COMPILER,
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
    with patch.dict(os.environ, {REGIONS: "true"}):
        yield


def texts(options: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    """Returns as many sequences of random tokens as a run takes."""
    generator = torch.Generator().manual_seed(options.seed)
    shape = (options.rows * options.trainer_steps, options.length)
    tokens = torch.randint(setting.VOCABULARY, shape, generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def refreshes_in(folder: Path) -> list[Row]:
    lines = [json.loads(line) for line in (folder / "snip" / "history.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == "refresh"]
