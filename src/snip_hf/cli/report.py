"""`snip-hf report`: tables, figures and a page of runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from .commands import Commands, add_micro_batches, examples
from .messages import shown_path
from .own_modules import add_import_option

_EXAMPLES = {
    "snip-hf report runs/mine": "tables, and figures in runs/mine/snip",
    "snip-hf report runs/mine --html --csv": "also a page, and the figures' data",
    "snip-hf report runs/a runs/b --html": "several runs on one page",
    "snip-hf report runs/mine/checkpoint-1000": "the run up to a checkpoint",
}


def add(commands: Commands) -> None:
    report = commands.add_parser(
        "report",
        help="tables, figures and a page of one run or several",
        description="Prints the tables of a run: refreshes, losses, the plan at its end, its stages, and why each "
        "layer has its format. Writes its figures as PNG files.",
        epilog=examples(_EXAMPLES),
    )
    report.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="the Trainer's output_dir, one of its checkpoints, or a repository of the Hub (USER/NAME[@REVISION])",
    )
    report.add_argument("--html", action="store_true", help="also write report.html, one page of all runs")
    report.add_argument("--csv", action="store_true", help="also write the figures' data as CSV files")
    report.add_argument("--bf16", metavar="RUN", help="a run in BF16, with or without SNIP, whose losses the page adds")
    report.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for the files (default: RUN/snip; of the Hub: ./snip-report)"
    )
    report.set_defaults(run=run)
    add_import_option(report)
    add_micro_batches(report)


def run(arguments: argparse.Namespace) -> int:
    from ..integrations.report_command import report

    for path in report(arguments):
        print(shown_path(path))
    return 0
