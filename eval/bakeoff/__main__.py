"""Compares precision policies by loss: many training runs from one YAML grid, one JSON line each; tables and figures.

    python -m eval.bakeoff run recipes/bakeoff.yaml --output runs/bakeoff.jsonl [--only shares ...] [--workers 3]
    python -m eval.bakeoff report recipes/bakeoff.yaml runs/bakeoff.jsonl --output docs/bakeoff

Both are started in the repository's folder. A run whose line is there already is not run again, so an interrupted
bake-off is continued by the same command.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from eval.scoring.local_tasks import EvaluationError
from snip_hf.extras import needed_by

with needed_by("eval.bakeoff"):
    from .grid import Grid, load_grid
    from .lines import read_runs
    from .report import write_report
    from .runner import run_grid


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
    parser = argparse.ArgumentParser(
        prog="python -m eval.bakeoff", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    for path in options.lines:
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist; expected the lines that `run` wrote.")
    lines = [line for path in options.lines for line in read_runs(path)]
    if not grid.runs().keys() & {line["id"] for line in lines}:
        raise ValueError(
            f"None of the {len(lines)} lines is of a run of {options.grid}. Give the grid and the --override that the "
            "runs were made with."
        )
    write_report(lines, grid.ids(), options.output, options.docs, prefix=options.grid.stem)
    return 0


if __name__ == "__main__":
    sys.exit(main())
