"""All runs of a grid that have no line yet, shared out among worker processes.

A run is one item of work: what it needs is in its `Job`, and its line is added to the output when it ends.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from benchmarks.shared.json_lines import drop_unfinished_line, read_lines
from eval.scoring.evaluate import set_environment
from eval.scoring.local_tasks import EvaluationError, known_tasks, stock_tasks

from .grid import Grid
from .one_run import Job, one_line
from .text import load_text, prepare_text


def run_grid(grid: Grid, options: argparse.Namespace) -> int:
    """Trains the grid's runs that have no line yet."""
    runs = grid.runs()
    done = {line["id"]: line for line in read_lines(options.output)}
    todo = {name: spec for name, spec in runs.items() if not _is_done(done.get(name), name in grid.benchmarked)}
    print(f"{len(runs)} runs, {len(runs) - len(todo)} of them done, {len(todo)} to do", flush=True)
    if options.list or not todo:
        for name, spec in todo.items():
            print(name, spec.label, json.dumps(spec.to_dict()))
        return 0
    if todo.keys() & grid.benchmarked:
        _check_benchmarks(grid, options.data_dir)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    drop_unfinished_line(options.output)
    prepare_text(grid, options.cache)
    set_environment(options.data_dir, model_is_local=True)  # for the workers, which import anew
    deadline = None if options.minutes is None else time.time() + 60 * options.minutes
    job = Job(grid, todo, options, deadline, os.getpid())
    context = mp.get_context("spawn")
    taken, failed, lock = context.Value("i", 0), context.Value("i", 0), context.Lock()
    # Workers end with this process, also when it is told to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    count = min(options.workers, len(todo))
    mp.start_processes(work, (job, taken, failed, lock), nprocs=count, daemon=True, start_method="spawn")
    left = len(todo.keys() - {line["id"] for line in read_lines(options.output)})
    print(f"{failed.value} runs failed, {left} have no line yet")
    return 1 if failed.value else 0


def _check_benchmarks(grid: Grid, data_dir: Path | None) -> None:
    """Refuses benchmarks that could not be run, before anything is trained."""
    known = known_tasks(stock_tasks())
    unknown = [name for name in grid.benchmarks if name not in known]
    if unknown or not grid.benchmarks:
        raise ValueError(f"benchmarks: got {unknown or 'no task'}; expected some of {', '.join(known[:10])}, ...")
    if data_dir is not None and not data_dir.is_dir():
        raise EvaluationError(f"--data-dir {data_dir} is not a folder; see eval/README.md for its layout.")


def _is_done(line: Mapping[str, Any] | None, benchmarked: bool) -> bool:
    return line is not None and (line.get("benchmarks") is not None or not benchmarked)


def work(index: int, job: Job, taken: Any, failed: Any, lock: Any) -> None:
    """Does the runs that no other worker took; one that fails is reported and left."""
    count = torch.cuda.device_count() if job.options.device == "cuda" else 0
    device = torch.device("cuda", index % count) if count else torch.device(job.options.device)
    if count:
        torch.cuda.set_device(device)
        torch.set_num_threads(2)
    # Each model's layers are one graph, and each arithmetic has its own.
    torch._dynamo.config.recompile_limit = 64
    logging.getLogger("snip_hf").setLevel(logging.WARNING)
    text = load_text(job.grid, job.options.cache)
    pace: dict[str, float] = {}
    while True:
        with taken.get_lock():
            position, taken.value = taken.value, taken.value + 1
        if position >= len(job.todo) or os.getppid() != job.parent:
            return
        name = list(job.todo)[position]
        spec = job.todo[name]
        began = time.time()
        if job.deadline is not None and began + pace.get(spec.model, 0.0) * spec.steps > job.deadline:
            continue
        try:
            line = one_line(job, name, text, device)
        except Exception:
            print(f"{spec.describe()}: failed\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            with failed.get_lock():
                failed.value += 1
            if not _is_usable(device):
                return
            continue
        pace[spec.model] = (time.time() - began) / spec.steps
        with lock, job.options.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
        if name in job.grid.benchmarked and line["benchmarks"] is None:
            with failed.get_lock():
                failed.value += 1
        print(f"{spec.describe()}: {line['loss']}, {line['seconds']:.0f} s", flush=True)


def _is_usable(device: torch.device) -> bool:
    """Returns True if anything can still run here; after some CUDA errors nothing can, until the process ends."""
    try:
        torch.zeros(1, device=device).item()
    except RuntimeError:
        print(f"{device} is not usable any more; this worker ends.", file=sys.stderr, flush=True)
        return False
    return True
