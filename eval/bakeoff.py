"""Which precision policy keeps the loss? Many training runs from one YAML grid, one JSON line each; tables and figures.

    python eval/bakeoff.py run recipes/bakeoff.yaml --output runs/bakeoff.jsonl [--only shares ...] [--workers 3]
    python eval/bakeoff.py report recipes/bakeoff.yaml runs/bakeoff.jsonl --output docs/bakeoff

A run whose line is there already is not run again, so an interrupted bake-off is continued by the same command.
"""

from __future__ import annotations

import argparse
import hashlib
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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "recipes"))

from bakeoff_grid import Grid, Spec, load_grid
from bakeoff_training import Run, Text
from data import load_documents, load_tokenizer, pack
from local_tasks import EvaluationError, known_tasks, stock_tasks
from recipe import DataSection
from results import git_commit
from run import evaluate, set_environment
from transformers import AutoTokenizer

from snip_hf.config import current_names

SCHEMA_VERSION = 1
# Of a row of eval/run.py; a group's members are left out.
_SCORE_FIELDS = ("task", "group", "metrics", "chance", "num_fewshot", "num_samples", "task_version")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 0, or 1 if a run failed or the grid is wrong."""
    options = _parser().parse_args(arguments)
    try:
        grid = load_grid(options.grid, options.override, options.only)
        return options.command(grid, options)
    except (ValueError, TypeError, KeyError, FileNotFoundError, EvaluationError) as error:
        print(f"error: {error.args[0] if isinstance(error, KeyError) else error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted; the same command continues.", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="train what has no line yet")
    run.set_defaults(command=run_grid)
    report = commands.add_parser("report", help="make tables and figures of the lines")
    report.set_defaults(command=report_grid)
    for command in (run, report):
        command.add_argument("grid", type=Path, help="YAML file; its keys are in eval/README.md")
        command.add_argument("--override", nargs="+", action="extend", default=[], metavar="KEY=VALUE")
        command.add_argument("--only", nargs="+", default=[], metavar="EXPERIMENT")
    run.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON lines; new ones are added")
    run.add_argument("--workers", type=int, default=1, metavar="N", help="runs at a time, spread over the GPUs")
    run.add_argument("--minutes", type=float, metavar="M", help="start no run that would end later than this")
    run.add_argument("--cache", type=Path, default=Path("runs/bakeoff-cache"), help="tokens and trained states")
    run.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    run.add_argument("--data-dir", type=Path, metavar="DIR", help="benchmark files, for runs that are benchmarked")
    run.add_argument("--commit", metavar="ID", help="the lines' commit, for code that lies without its .git folder")
    run.add_argument("--list", action="store_true", help="only say what would be run")
    report.add_argument("lines", type=Path, nargs="+", metavar="FILE")
    report.add_argument("--output", type=Path, required=True, metavar="DIR")
    report.add_argument("--docs", type=Path, nargs="*", default=[], help="Markdown files whose tables are renewed")
    return parser


def report_grid(grid: Grid, options: argparse.Namespace) -> int:
    """Makes tables and figures."""
    from bakeoff_report import write_report

    for path in options.lines:
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist; expected the lines that `bakeoff.py run` wrote.")
    lines = [line for path in options.lines for line in read_lines(path)]
    if not grid.runs().keys() & {line["id"] for line in lines}:
        raise ValueError(
            f"None of the {len(lines)} lines is of a run of {options.grid}. Give the grid and the --override that the "
            "runs were made with."
        )
    write_report(lines, grid.ids(), options.output, options.docs, prefix=options.grid.stem)
    return 0


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
    _drop_half_a_line(options.output)
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


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a JSON lines file, none if there is no file; half a line at its end is left out.

    Lines keep the names of settings of their time; they are returned with those of now.
    """
    if not path.exists():
        return []
    complete = path.read_text(encoding="utf-8").rpartition("\n")[0]
    lines = [json.loads(line) for line in complete.splitlines()]
    return [line | {"spec": current_names(line["spec"])} for line in lines]


def _drop_half_a_line(path: Path) -> None:
    """Cuts what a killed run left at the end of a file, so that new lines begin as lines."""
    if path.exists():
        with path.open("r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


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
    return shlex.join(["python", "eval/bakeoff.py", "run", str(options.grid), "--output", str(output), *overrides])


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
        rows = evaluate(model, run.text.tokenizer, grid.benchmarks, options.data_dir, batch_size=64)
    except Exception:
        print(f"benchmarks of {run.spec.label}: failed\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        return None
    return [{name: row[name] for name in _SCORE_FIELDS} for row in rows if row["group"] is None]


def prepare_text(grid: Grid, cache: Path) -> None:
    """Trains the tokenizer and packs the text, unless that was done before."""
    folder, section = _text_folder(grid, cache), _here(grid.data)
    if (folder / "tokenizer").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    documents = load_documents(section)
    tokenizer = load_tokenizer(grid.tokenizer, None, documents[0])
    dtype = np.uint16 if len(tokenizer) <= 2**16 else np.int32
    for name, rows in zip(("train", "validation"), pack(*documents, tokenizer, section), strict=True):
        np.save(folder / f"{name}.npy", np.array(rows.with_format("numpy")["input_ids"][:], dtype))
    tokenizer.save_pretrained(folder / "tokenizer")


def load_text(grid: Grid, cache: Path) -> Text:
    """Returns what `prepare_text` left."""
    folder = _text_folder(grid, cache)
    train, validation = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("train", "validation"))
    return Text(train, validation, AutoTokenizer.from_pretrained(folder / "tokenizer"))


def _here(section: DataSection) -> DataSection:
    """Returns where the text lies on this machine: $NAME in a path is the environment's."""
    paths = {name: tuple(map(os.path.expandvars, getattr(section, name))) for name in ("files", "validation_files")}
    return replace(section, **paths)


def _text_folder(grid: Grid, cache: Path) -> Path:
    text = json.dumps([asdict(_here(grid.data)), asdict(grid.tokenizer)], sort_keys=True)
    return cache / f"text-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


if __name__ == "__main__":
    sys.exit(main())
