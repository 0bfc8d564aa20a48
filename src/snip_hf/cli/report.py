"""`snip-hf report`: tables and figures of a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from .commands import Commands, add_micro_batches
from .messages import shown_path
from .own_modules import add_import_option


def add(commands: Commands) -> None:
    report = commands.add_parser("report", help="tables and figures of a run")
    report.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the Trainer's output_dir")
    report.add_argument("--out", type=Path, metavar="DIR", help="folder for the figures (default: RUN_DIR/snip)")
    report.set_defaults(run=run)
    add_import_option(report)
    add_micro_batches(report)


def run(arguments: argparse.Namespace) -> int:
    from ..reporting.run_report import run_report

    for path in run_report(arguments.run_dir, arguments.out, arguments.micro_batches):
        print(shown_path(path))
    return 0
