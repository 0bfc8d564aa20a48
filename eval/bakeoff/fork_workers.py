"""The forks of a recipe that have no line yet, shared out among worker processes, several on each GPU.

Workers take forks in the recipe's order, those first whose base has come to their point. A base without a state is
trained by the first worker that finds nothing else to do.
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
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from typing import Any

import torch
import torch.multiprocessing as mp

from benchmarks.shared.json_lines import drop_unfinished_line, read_lines
from eval.scoring.evaluate import set_environment
from eval.scoring.rows import git_commit
from snip_hf.cli import import_modules
from snip_hf.numerics.formats import UNQUANTIZED

from .fork_base import Trainee, check_length, check_state, state_path, train_base
from .fork_cells import Contender, Fork
from .fork_device import check_graphs, set_up_device
from .fork_lines import SCHEMA_VERSION
from .fork_pace import Pace, overview
from .fork_recipe import ForkRecipe, ForkRun
from .fork_run import in_force, make_plan, run_fork
from .fork_shared import APART, FAILED, FREE, TAKEN, Shared
from .fork_text import ForkText, read_text

# Between two looks whether a base is there.
_WAIT_SECONDS = 0.2
# By how many of its last forks a worker knows how long the next one takes.
_FORKS_OF_PACE = 5
# What messages say of a device's memory; the first is in the reason of a refresh that came to nothing.
_OF_MEMORY = (torch.OutOfMemoryError.__name__, "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


@dataclass(frozen=True)
class Job:
    """What every worker is told."""

    recipe: ForkRecipe
    todo: list[ForkRun]
    """Who trains on where, as far as there is no line yet."""
    states: Mapping[tuple[int, int], set[str]]
    """Seed and point of a base -> its weights where lines of the recipe began, as they have them."""
    options: argparse.Namespace
    deadline: float
    """Seconds since the epoch."""
    parent: int
    """Id of the process that started the workers."""


def run_forks(recipe: ForkRecipe, options: argparse.Namespace) -> int:
    """Runs what has no line yet; returns 1 if something failed."""
    began = time.time()
    lines = read_lines(options.output)
    asked = replace(recipe, cells=recipe.cells[: options.cells])
    if options.list and not options.text.is_file():
        runs = asked.runs("")
        print(overview(recipe, runs, runs, _pace_of(lines, options), in_full=True))
        print(f"{options.text} does not exist, and says which lines are done: all are taken as left.")
        return 0
    text = read_text(options.text)
    check_length(recipe, text)
    if not options.list:
        check_graphs(recipe.cuda_graph, options.device)
    runs = asked.runs(text.digest)
    done = {line["id"] for line in lines}
    todo = [left for run in runs if (left := run.without(done)).ids]
    print(overview(recipe, runs, todo, _pace_of(lines, options), options.list), flush=True)
    if options.list or not todo:
        return 0
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.cache.mkdir(parents=True, exist_ok=True)
    drop_unfinished_line(options.output)
    deadline = math.inf if options.minutes is None else began + 60 * options.minutes
    job = Job(recipe, todo, _states_of(recipe.runs(text.digest), lines), options, deadline, os.getpid())
    count = min(options.workers, len(todo))
    shared = Shared(todo, count, torch.cuda.device_count() if options.device == "cuda" else 1)
    # Workers end with this process, also when it is told to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # The workers are processes enough. What one has compiled the others find in inductor's cache.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    print(f"{count} workers on {options.device}", flush=True)
    mp.start_processes(work, (job, shared), nprocs=count, daemon=True, start_method="spawn")
    done = {line["id"] for line in read_lines(options.output)}
    left = sum(len(run.without(done).ids) for run in runs)
    print(f"{shared.failed.value} failed, {left} lines are missing, {time.time() - began:.0f} s")
    return 1 if shared.failed.value else 0


def _states_of(runs: Sequence[ForkRun], lines: Sequence[Mapping[str, Any]]) -> dict[tuple[int, int], set[str]]:
    """Returns `Job.states`."""
    ids = {id for run in runs for id in run.ids.values()}
    found: dict[tuple[int, int], set[str]] = {}
    for line in lines:
        if line["id"] in ids:
            found.setdefault((line["fork"]["base_seed"], line["fork"]["point"]), set()).add(line["state"])
    return found


def _pace_of(lines: list[dict[str, Any]], options: argparse.Namespace) -> Pace | None:
    return Pace.of([*lines, *(line for path in options.pace for line in read_lines(path))])


def work(index: int, job: Job, shared: Shared) -> None:
    """Trains bases and runs forks that no other worker took; what fails is reported and left.

    Ends when nothing is left to do, or when its device has no memory for it while other workers go on.
    """
    import_modules(job.options.modules)
    device = set_up_device(index, job.options.device)
    logging.getLogger("snip_hf").setLevel(logging.WARNING)
    logging.getLogger("snip_hf").addHandler(_WARNINGS)
    text = read_text(job.options.text)
    pace, own = _OwnPace(), OwnTrainee(job.recipe, text, device)
    while (run := _take(index, job, shared, text, device, own)) is not None:
        if _is_late(job, pace.seconds(run)):
            continue
        began, is_untouched = time.time(), True
        try:
            score = _score_of(job, run)
            for steps, found in run_fork(job.recipe, text, run, device, job.options.cache, score, own.get()):
                _write(job, shared, _signed(job, run, steps, text, device) | found)
                is_untouched = False
        except Exception as error:
            if is_untouched and _lacks_memory(error) and _leaves(shared, index, fork=job.todo.index(run)):
                return
            _report_failure(run.name, shared)
            if not _is_usable(device):
                shared.end(index)
                return
            own.drop()  # the failure may have left anything in it
            continue
        pace.note(run, time.time() - began)


def _score_of(job: Job, run: ForkRun) -> Callable[[Trainee], dict[str, Any]] | None:
    """Returns what scores the model of a fork; None if it is not benchmarked."""
    if not run.benchmarked:
        return None
    set_environment(job.options.data_dir, model_is_local=True)
    # lm-eval is needed here alone, and not there on every machine that runs forks.
    from .fork_scores import scores

    given = {"tasks": job.recipe.benchmarks, "text": job.options.text, "data_dir": job.options.data_dir}
    return partial(scores, **given)


class OwnTrainee:
    """The one model of a worker, which takes the state of each fork.

    Args:
        recipe: model and training.
        text: what it is trained and evaluated on.
        device: where.
        make: makes it, with the weights of a seed.
    """

    def __init__(
        self,
        recipe: ForkRecipe,
        text: ForkText,
        device: torch.device,
        make: Callable[[ForkRecipe, ForkText, torch.device, int], Trainee] = Trainee,
    ) -> None:
        self._given, self._make = (recipe, text, device), make
        self._trainee: Trainee | None = None
        self._is_warm = not recipe.base.compile

    def get(self) -> Trainee:
        """Returns it, made with any weights when it is first asked for."""
        self._trainee = self._trainee or self._make(*self._given, 0)
        return self._trainee

    def drop(self) -> None:
        """Lets go of it."""
        self._trainee = None

    def warm(self) -> None:
        """Compiles, once, what plain linears and those in the base's format need in training and in evaluation."""
        if self._is_warm:
            return
        self._is_warm = True
        (recipe, text, _), trainee = self._given, self.get()
        (ids,) = trainee.put([text.train[: recipe.base.sequences]])
        fork = Fork(base_seed=0, point=0, data_seed=0)
        for format in dict.fromkeys((UNQUANTIZED.name, recipe.base.format)):
            contender = Contender(format, "all", {})
            planned = make_plan(trainee, contender, fork, recipe.backend, ids)
            with in_force(trainee, planned, contender.config(fork, recipe.backend), fork) as controller:
                trainee.step(1, ids, controller)
                trainee.evaluate()


class _OwnPace:
    """How long the forks of one worker take: seconds per step of the slowest of the last ones.

    Not of all: the first one of a kind may be compiled.
    """

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=_FORKS_OF_PACE)

    def note(self, run: ForkRun, seconds: float) -> None:
        self._last.append(seconds / run.lengths[-1])

    def seconds(self, run: ForkRun) -> float:
        return max(self._last, default=0.0) * run.lengths[-1]


class _Once(logging.Filter):
    """Lets each message pass once: all forks of a worker have the same ones."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        is_new = text not in self._said
        self._said.add(text)
        return is_new


_WARNINGS = logging.StreamHandler()
_WARNINGS.addFilter(_Once())


def _write(job: Job, shared: Shared, line: dict[str, Any]) -> None:
    """Adds a line to the output, at once, so that a run that is cut off keeps it."""
    with shared.lock, job.options.output.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, allow_nan=False) + "\n")
    fork = Fork.of_dict(line["fork"])
    print(f"{line['contender']}, {fork.name}, {line['steps']} steps: {line['loss']}", flush=True)


def _is_usable(device: torch.device) -> bool:
    """Returns True if anything can still run here; after some CUDA errors nothing can, until the process ends."""
    try:
        torch.zeros(1, device=device).item()
    except RuntimeError:
        print(f"{device} is not usable any more; this worker ends.", file=sys.stderr, flush=True)
        return False
    return True


def _lacks_memory(error: BaseException | None) -> bool:
    """Returns True if an error, or what caused it, is for want of a device's memory."""
    if error is None:
        return False
    told = any(text in str(error) for text in _OF_MEMORY)
    return told or isinstance(error, torch.OutOfMemoryError) or _lacks_memory(error.__cause__)


def _leaves(shared: Shared, index: int, **taken: int) -> bool:
    """As `Shared.leave`, and says so."""
    leaves = shared.leave(index, **taken)
    if leaves:
        print("This worker leaves memory and work to others; run fewer (--workers).", file=sys.stderr, flush=True)
    return leaves


def _take(
    index: int, job: Job, shared: Shared, text: ForkText, device: torch.device, own: OwnTrainee
) -> ForkRun | None:
    """Returns the first fork that no worker took and whose base is there; None if this worker is to end.

    Until then it trains a base that no worker trains, or waits for one and compiles.
    """
    while os.getppid() == job.parent and not _is_late(job, 0.0):
        untrained, is_coming = None, False
        with shared.is_taken.get_lock():
            for position, run in enumerate(job.todo):
                if shared.is_taken[position]:
                    continue
                base = shared.bases[run.fork.base_seed]
                if base.value != APART and _can_fork(job, shared, text, run.fork):
                    shared.is_taken[position] = True
                    return run
                is_coming |= base.value == TAKEN
                if base.value == FREE and untrained is None:
                    untrained = run.fork.base_seed
            if untrained is not None:
                shared.bases[untrained].value = TAKEN
            elif not is_coming:
                shared.end(index)  # before anything can be given back
                return None
        if untrained is not None:
            if not _goes_on_after_base(index, job, shared, text, untrained, device):
                return None
            continue
        try:
            own.warm()
        except Exception as error:
            if _lacks_memory(error) and _leaves(shared, index):
                return None
            _report_failure("compilation before the first fork", shared)
            own.drop()
        time.sleep(_WAIT_SECONDS)
    shared.end(index)
    return None


def _can_fork(job: Job, shared: Shared, text: ForkText, fork: Fork) -> bool:
    """Returns True if the state in which a fork starts is there, with the weights that earlier lines began with."""
    path = state_path(job.recipe, text, fork, job.options.cache)
    if not path.exists():
        return False
    try:
        check_state(path, job.states.get((fork.base_seed, fork.point), ()))
    except ValueError:
        _report_failure(f"forks of the base of seed {fork.base_seed}", shared)
        shared.bases[fork.base_seed].value = APART
        return False
    return True


def _goes_on_after_base(index: int, job: Job, shared: Shared, text: ForkText, seed: int, device: torch.device) -> bool:
    """Trains a base; returns False if this worker is to end."""
    began = time.time()
    try:
        train_base(job.recipe, text, seed, device, job.options.cache)
    except Exception as error:
        if _lacks_memory(error) and _leaves(shared, index, base=seed):
            return False
        _report_failure(f"base of seed {seed}", shared)
        shared.bases[seed].value = FAILED
        if _is_usable(device):
            return True
        shared.end(index)
        return False
    print(f"base of seed {seed}: {time.time() - began:.0f} s", flush=True)
    return True


def _is_late(job: Job, seconds: float) -> bool:
    """Returns True if what takes so long would end after the deadline."""
    return time.time() + seconds > job.deadline


def _report_failure(what: str, shared: Shared) -> None:
    print(f"{what}: failed\n{traceback.format_exc()}", file=sys.stderr, flush=True)
    with shared.failed.get_lock():
        shared.failed.value += 1


def _command(options: argparse.Namespace) -> str:
    """Returns what to type for these lines again, without what differs between machines: folders, files, time."""
    overrides = ["--override", *options.override] if options.override else []
    imports = [part for module in options.modules for part in ("--import", module)]
    return shlex.join(["python", "-m", "eval.bakeoff.forks", "run", str(options.recipe), *overrides, *imports])


def _signed(job: Job, run: ForkRun, steps: int, text: ForkText, device: torch.device) -> dict[str, Any]:
    """Returns what a line says of its origin."""
    is_cuda = device.type == "cuda"
    per_device = math.ceil(job.options.workers / torch.cuda.device_count()) if is_cuda else job.options.workers
    cpu = f"{platform.machine()}, {torch.get_num_threads()} threads"
    return {
        "schema_version": SCHEMA_VERSION,
        "id": run.ids[steps],
        "setting": job.recipe.setting(text.digest, steps, run.fork),
        "contender": run.contender.name,
        "spec": run.contender.to_dict(),
        "fork": run.fork.to_dict(),
        "seed": run.fork.seed,
        "steps": steps,
        "machine": torch.cuda.get_device_name(device) if is_cuda else cpu,
        "processes_per_device": per_device,
        "cuda_graph": job.recipe.cuda_graph,
        "torch": torch.__version__,
        "commit": job.options.commit or git_commit(),
        "command": _command(job.options),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
