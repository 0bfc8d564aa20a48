"""One run of a grid from its spec to its line: trained, scored if that was asked for, and signed with its origin."""

from __future__ import annotations

import argparse
import math
import platform
import shlex
import sys
import traceback
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from eval.scoring.evaluate import Settings, evaluate
from eval.scoring.rows import git_commit

from .grid import Grid, Spec
from .lines import SCHEMA_VERSION
from .text import Text
from .training import Run

# Of a row of eval/run.py; a group's members are left out.
_SCORE_FIELDS = ("task", "group", "metrics", "chance", "num_fewshot", "num_samples", "task_version")


@dataclass(frozen=True)
class Job:
    """What every worker is told."""

    grid: Grid
    todo: dict[str, Spec]
    options: argparse.Namespace
    deadline: float | None
    """Seconds since the epoch."""
    parent: int
    """Id of the process that started the workers."""


def one_line(job: Job, name: str, text: Text, device: torch.device) -> dict[str, Any]:
    """Trains one run, scores it if that was asked for, and returns its line."""
    grid, spec = job.grid, job.todo[name]
    state = job.options.cache / f"state-{grid.state_of(spec)}.pt"
    run = Run(spec, grid.models[spec.model].model, grid.training, text, device, state)
    found = run.train()
    if name in grid.benchmarked:
        found["benchmarks"] = _benchmarks(run, grid, job.options)
    return {
        "schema_version": SCHEMA_VERSION,
        "id": name,
        "spec": spec.to_dict(),
        "label": spec.label,
        **found,
        **_machine(device, job.options.workers),
        "torch": torch.__version__,
        "commit": job.options.commit or git_commit(),
        "command": _command(job.options),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _command(options: argparse.Namespace) -> str:
    """Returns what to type for these lines again, without what differs between machines: folders, files, time."""
    overrides = ["--override", *options.override] if options.override else []
    output = Path("runs", f"{options.grid.stem}.jsonl")
    return shlex.join(["python", "-m", "eval.bakeoff", "run", str(options.grid), "--output", str(output), *overrides])


def _machine(device: torch.device, workers: int) -> dict[str, Any]:
    if device.type == "cuda":
        count = math.ceil(workers / torch.cuda.device_count())
        return {"device": torch.cuda.get_device_name(device), "processes_per_device": count}
    name = f"{platform.machine()}, {torch.get_num_threads()} threads"
    return {"device": name, "processes_per_device": workers}


def _benchmarks(run: Run, grid: Grid, options: argparse.Namespace) -> list[dict[str, Any]] | None:
    """Scores the trained model, unquantized, in BF16; None after a failure, which costs the scores but not the run."""
    try:
        model = run.model.to(torch.bfloat16).eval()
        rows = evaluate(model, run.text.tokenizer, grid.benchmarks, options.data_dir, Settings(batch_size=64))
    except Exception:
        print(f"benchmarks of {run.spec.label}: failed\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        return None
    return [{name: row[name] for name in _SCORE_FIELDS} for row in rows if row["group"] is None]
