"""`snip-hf report`: the tables and files of one run or several, wherever their records are."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ..layers.labels import endings
from ..records.load import load_recorded
from ..records.losses import read_log
from ..records.run_folder import FOLDER
from ..reporting.csv_files import write_csv
from ..reporting.figures import write_figures
from ..reporting.page import write_page
from ..reporting.run_report import run_contents
from ..reporting.tables import say
from .hub_runs import RunSource, run_source

# Runs that one page shows.
_MOST_RUNS = 8
# In the working directory, for runs of the Hub.
_FOLDER = Path("snip-report")


def report(arguments: argparse.Namespace, console: Console | None = None) -> list[Path]:
    """Prints the tables of the runs and writes what was asked for; returns the files written.

    Raises:
        OSError, ValueError: a run cannot be found or read, or the arguments do not fit together.
    """
    console = console or Console()
    if arguments.bf16 is not None and not arguments.html:
        raise ValueError("--bf16 adds a run to the page; expected --html with it.")
    if arguments.out is not None and arguments.out.exists() and not arguments.out.is_dir():
        raise NotADirectoryError(f"--out {arguments.out} is a file; expected a folder.")
    if len(arguments.runs) > _MOST_RUNS:
        raise ValueError(f"Got {len(arguments.runs)} runs, expected at most {_MOST_RUNS} in one report.")
    sources = [run_source(str(name)) for name in arguments.runs]
    names = short_names([source.name for source in sources] + ([arguments.bf16] if arguments.bf16 else []))
    runs = {name: load_recorded(source.folder) for name, source in zip(names, sources, strict=False)}
    bf16 = None if arguments.bf16 is None else (f"{names[-1]} (BF16)", _bf16_losses(arguments.bf16))
    files: list[Path] = []
    contents = {name: run_contents(run, arguments.micro_batches) for name, run in runs.items()}
    for (name, run), source in zip(runs.items(), sources, strict=True):
        if len(runs) > 1:
            say(console, f"Run {name}")
        for content in contents[name]:
            console.print(content)
        folder = _folder(source, name, arguments.out, len(runs))
        files += write_figures(run, folder)
        if arguments.csv:
            files += write_csv(run, folder)
    if arguments.html:
        folder = _folder(sources[0], names[0], arguments.out, 1)
        files.append(write_page(folder / "report.html", runs, bf16, contents))
    return files


def _folder(source: RunSource, name: str, out: Path | None, count: int) -> Path:
    """Returns the folder that a run's files go to."""
    if out is None and source.is_local:
        return source.folder / FOLDER
    base = _FOLDER if out is None else out
    return base / name.replace("/", "-").replace(os.sep, "-") if count > 1 else base


def _bf16_losses(name: str) -> dict[int, dict[str, float]]:
    """Returns the losses of the run in BF16, which may be of a Trainer without SNIP.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: there are no losses.
    """
    notes: list[str] = []
    folder = run_source(name).folder
    if not folder.exists():
        raise FileNotFoundError(f"--bf16 {name} does not exist; expected the output folder of a run.")
    losses = read_log(folder, notes).losses
    if not losses:
        raise ValueError(f"--bf16 {name} has no losses: {' '.join(notes)}")
    return losses


def short_names(names: Sequence[str]) -> list[str]:
    """Returns of each path the last parts, as few as no other one ends with; equal paths get a number."""
    paths = ["/".join(part for part in _plain(name).parts if part != os.sep) or name for name in names]
    numbers = [f" #{index}" * (paths.count(path) > 1) for index, path in enumerate(paths, 1)]
    return [(end or path) + number for end, path, number in zip(endings(paths, "/"), paths, numbers, strict=True)]


def _plain(name: str) -> Path:
    """Returns a path without "..", which would lead out of the folder that files are written to."""
    path = os.path.normpath(name)
    return Path(os.path.abspath(path) if path.split(os.sep)[0] == ".." else path)
