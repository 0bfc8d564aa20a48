"""`snip-hf compare`: two or more runs or plans beside each other."""

from __future__ import annotations

import argparse

from .commands import Commands, examples
from .own_modules import add_import_option

_EXAMPLES = {
    "snip-hf compare runs/mine runs/other runs/plain": "runs, one of them without snip-hf",
    "snip-hf compare old.json runs/mine/snip/plan.json": "plans",
}


def add(commands: Commands) -> None:
    compare = commands.add_parser(
        "compare",
        help="two or more runs or plans: shares, changes, losses",
        description="Prints the FP4 shares, the settings that differ, which layers have other formats, and the losses "
        "at common steps. The first run or plan is what the others are compared with.",
        epilog=examples(_EXAMPLES),
    )
    compare.add_argument(
        "sources",
        nargs="+",
        metavar="RUN_OR_PLAN",
        help="the Trainer's output_dir, one of its checkpoints, a repository of the Hub (USER/NAME[@REVISION]), or a "
        "plan.json",
    )
    compare.set_defaults(run=run)
    add_import_option(compare)


def run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from ..integrations.hub import run_folder
    from ..reporting.differences import print_differences, read_compared

    sources = [(name, run_folder(name)) for name in arguments.sources]
    print_differences(read_compared(sources), Console())
    return 0
