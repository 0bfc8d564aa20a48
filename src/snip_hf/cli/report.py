"""`snip-hf report` and `snip-hf compare`: show runs as tables, figures and a page."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from ..integrations.hub import run_folder
from ..records.run_folder import FOLDER
from ..text import printable


def compare(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from ..reporting.differences import print_differences, read_compared

    print_differences(read_compared([(name, run_folder(name)) for name in arguments.sources]), Console())
    return 0


def report(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from ..records.load import load_recorded
    from ..reporting.csv_files import write_csv
    from ..reporting.figures import write_figures
    from ..reporting.page import write_page
    from ..reporting.run_report import print_run
    from ..reporting.tables import say

    if arguments.bf16 is not None and not arguments.html:
        raise ValueError("--bf16 adds a run to the page, so it needs --html.")
    names = short_names([*arguments.runs, *([] if arguments.bf16 is None else [arguments.bf16])])
    given = dict(zip(names, arguments.runs, strict=False))
    runs = {name: load_recorded(run_folder(path)) for name, path in given.items()}
    bf16 = None if arguments.bf16 is None else (f"{names[-1]} (BF16)", _bf16_losses(arguments.bf16))
    console = Console()
    files: list[Path] = []
    for name, run in runs.items():
        if len(runs) > 1:
            say(console, f"Run {name}")
        print_run(run, console, arguments.micro_batches)
        folder = _folder(given[name], name, arguments.out, len(runs))
        files += write_figures(run, folder)
        if arguments.csv:
            files += write_csv(run, folder)
    if arguments.html:
        folder = _folder(arguments.runs[0], names[0], arguments.out, 1)
        files.append(write_page(folder / "report.html", runs, bf16))
    for path in files:
        print(printable(path))
    return 0


def _folder(given: str, name: str, out: Path | None, count: int) -> Path:
    """Returns the folder for the files of a run: its own, --out, or ./snip-report for a run from the Hub."""
    if out is None and os.path.lexists(given):
        return Path(given) / FOLDER
    base = Path("snip-report") if out is None else out
    return base / name.replace("/", "-") if count > 1 else base


def _bf16_losses(name: str) -> dict[int, dict[str, float]]:
    """Returns the losses of the BF16 run, which may be a run without SNIP.

    Raises:
        ValueError: it has no losses.
    """
    from ..records.load import read_log

    notes: list[str] = []
    losses, _ = read_log(run_folder(name), notes)
    if not losses:
        raise ValueError(f"--bf16 {name} has no losses: {' '.join(notes)}")
    return losses


def short_names(names: Sequence[str]) -> list[str]:
    """Returns the shortest ending of each path that no other path has."""
    from ..layers.labels import endings

    paths = ["/".join(part for part in _plain(name).parts if part != os.sep) or name for name in names]
    return [end or path for end, path in zip(endings(paths, "/"), paths, strict=True)]


def _plain(name: str) -> Path:
    """Returns a path without "..", which would point outside the output folder."""
    path = os.path.normpath(name)
    return Path(os.path.abspath(path) if path.split(os.sep)[0] == ".." else path)
