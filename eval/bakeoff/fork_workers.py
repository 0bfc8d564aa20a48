"""The forks of a recipe that have no line yet, shared out among worker processes, several on each GPU.

Workers first train the bases whose states are missing, then take forks in the recipe's order. A fork waits for its
base.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import platform
import shlex
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

import torch
import torch.multiprocessing as mp

from benchmarks.shared.json_lines import drop_unfinished_line, read_lines
from eval.scoring.rows import git_commit

from .fork_base import check_length, state_path, train_base
from .fork_recipe import Contender, Fork, ForkRecipe
from .fork_run import run_fork
from .fork_text import ForkText, read_text

SCHEMA_VERSION = 1
# Between two looks whether a base is there.
_WAIT_SECONDS = 0.2


@dataclass(frozen=True)
class Job:
    """What every worker is told."""

    recipe: ForkRecipe
    todo: dict[str, tuple[Contender, Fork]]
    bases: list[int]
    """Seeds of those to train."""
    options: argparse.Namespace
    deadline: float
    """Seconds since the epoch."""
    parent: int
    """Id of the process that started the workers."""


class Shared:
    """What workers have in common.

    Args:
        bases: how many are to be trained.
    """

    def __init__(self, bases: int) -> None:
        context = mp.get_context("spawn")
        self.bases, self.forks, self.failed = (context.Value("i", 0) for _ in range(3))
        self.no_base = context.Array("i", bases)
        """Of each base in their order: 1 if it failed."""
        self.lock = context.Lock()


def run_forks(recipe: ForkRecipe, options: argparse.Namespace) -> int:
    """Runs what has no line yet; returns 1 if something failed."""
    began = time.time()
    text = read_text(options.text)
    check_length(recipe, text)
    runs = recipe.runs(text.digest)
    done = {line["id"] for line in read_lines(options.output)}
    todo = {name: run for name, run in runs.items() if name not in done}
    print(f"{len(runs)} forks, {len(runs) - len(todo)} of them done, {len(todo)} to do", flush=True)
    if options.list or not todo:
        for name, (contender, fork) in todo.items():
            print(name, contender.name, fork.name)
        return 0
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.cache.mkdir(parents=True, exist_ok=True)
    drop_unfinished_line(options.output)
    missing = [fork for _, fork in todo.values() if not state_path(recipe, text, fork, options.cache).exists()]
    bases = list(dict.fromkeys(fork.base_seed for fork in missing))
    deadline = math.inf if options.minutes is None else began + 60 * options.minutes
    job, shared = Job(recipe, todo, bases, options, deadline, os.getpid()), Shared(len(bases))
    # Workers end with this process, also when it is told to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    count = min(options.workers, len(todo))
    mp.start_processes(work, (job, shared), nprocs=count, daemon=True, start_method="spawn")
    left = len(todo.keys() - {line["id"] for line in read_lines(options.output)})
    print(f"{shared.failed.value} failed, {left} forks have no line yet, {time.time() - began:.0f} s")
    return 1 if shared.failed.value else 0


def work(index: int, job: Job, shared: Shared) -> None:
    """Trains bases and runs forks that no other worker took; what fails is reported and left."""
    device = _device(index, job.options.device)
    logging.getLogger("snip_hf").setLevel(logging.WARNING)
    text = read_text(job.options.text)
    while (position := _next(shared.bases)) < len(job.bases):
        seed, began = job.bases[position], time.time()
        try:
            train_base(job.recipe, text, seed, device, job.options.cache)
        except Exception:
            _report_failure(f"base of seed {seed}", shared)
            shared.no_base[position] = 1
            if not _is_usable(device):
                return
            continue
        print(f"base of seed {seed}: {time.time() - began:.0f} s", flush=True)
    longest = 0.0
    while (position := _next(shared.forks)) < len(job.todo) and os.getppid() == job.parent:
        name, (contender, fork) = list(job.todo.items())[position]
        if not _has_base(job, shared, text, fork) or time.time() + longest > job.deadline:
            continue
        began = time.time()
        try:
            found = run_fork(job.recipe, text, contender, fork, device, job.options.cache)
        except Exception:
            _report_failure(f"{contender.name}, {fork.name}", shared)
            if not _is_usable(device):
                return
            continue
        longest = max(longest, time.time() - began)
        line = _signed(job, name, text, device) | found
        with shared.lock, job.options.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
        print(f"{contender.name}, {fork.name}: {found['loss']}, {time.time() - began:.1f} s", flush=True)


def _device(index: int, kind: str) -> torch.device:
    """Returns the device of a worker; on GPUs they take turns."""
    if kind != "cuda":
        return torch.device(kind)
    device = torch.device("cuda", index % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.set_num_threads(2)
    # So that the same command gives the same bases on the same kind of machine, and a run can be continued there.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it fills what is written anyway
    return device


def _is_usable(device: torch.device) -> bool:
    """Returns True if anything can still run here; after some CUDA errors nothing can, until the process ends."""
    try:
        torch.zeros(1, device=device).item()
    except RuntimeError:
        print(f"{device} is not usable any more; this worker ends.", file=sys.stderr, flush=True)
        return False
    return True


def _next(counter: Any) -> int:
    """Returns a number that no other worker gets."""
    with counter.get_lock():
        counter.value += 1
        return int(counter.value) - 1


def _has_base(job: Job, shared: Shared, text: ForkText, fork: Fork) -> bool:
    """Waits for the state in which a fork starts; returns False if there will be none in time."""
    path = state_path(job.recipe, text, fork, job.options.cache)
    while not path.exists():
        if shared.no_base[job.bases.index(fork.base_seed)] or time.time() > job.deadline or os.getppid() != job.parent:
            return path.exists()
        time.sleep(_WAIT_SECONDS)
    return True


def _report_failure(what: str, shared: Shared) -> None:
    print(f"{what}: failed\n{traceback.format_exc()}", file=sys.stderr, flush=True)
    _next(shared.failed)


def _command(options: argparse.Namespace) -> str:
    """Returns what to type for these lines again, without what differs between machines: folders, files, time."""
    overrides = ["--override", *options.override] if options.override else []
    return shlex.join(["python", "-m", "eval.bakeoff.forks", "run", str(options.recipe), *overrides])


def _signed(job: Job, name: str, text: ForkText, device: torch.device) -> dict[str, Any]:
    """Returns what a line says of its origin."""
    contender, fork = job.todo[name]
    is_cuda = device.type == "cuda"
    per_device = math.ceil(job.options.workers / torch.cuda.device_count()) if is_cuda else job.options.workers
    cpu = f"{platform.machine()}, {torch.get_num_threads()} threads"
    return {
        "schema_version": SCHEMA_VERSION,
        "id": name,
        "setting": job.recipe.setting(text.digest),
        "contender": contender.name,
        "spec": contender.to_dict(),
        "fork": asdict(fork),
        "seed": fork.seed,
        "steps": job.recipe.steps,
        "machine": torch.cuda.get_device_name(device) if is_cuda else cpu,
        "processes_per_device": per_device,
        "torch": torch.__version__,
        "commit": job.options.commit or git_commit(),
        "command": _command(job.options),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
