"""Forks from checkpoints: what a precision does to training, with noise so small that a difference can be seen.

    python -m eval.bakeoff.forks text recipes/forks-formats.yaml --text runs/forks-text.npz
    python -m eval.bakeoff.forks run recipes/forks-formats.yaml --text runs/forks-text.npz --output runs/forks.jsonl
    python -m eval.bakeoff.forks report runs/forks.jsonl --recipe recipes/forks-formats.yaml --output runs/forks.md

All are started in the repository's folder. Every contender trains on from the same states with the same data and random
numbers. A fork whose line is there already is not run again.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from snip_hf.cli.commands import at_least_one
from snip_hf.cli.own_modules import add_import_option, import_modules
from snip_hf.extras import needed_by

with needed_by("eval.bakeoff.forks"):
    from .fork_recipe import load_recipe
    from .fork_report import Asked, write_report
    from .fork_text import write_text
    from .fork_workers import run_forks


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 0, or 1 if a fork failed or the recipe is wrong."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(arguments)
    options.typed = shlex.join(["python", "-m", "eval.bakeoff.forks", *arguments])
    try:
        import_modules(options.modules)
        result: int = options.command(options)
        return result
    except (ValueError, TypeError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted; the same command continues.", file=sys.stderr)
        return 130


def _text(options: argparse.Namespace) -> int:
    text = write_text(load_recipe(options.recipe, options.override), options.text)
    mib = options.text.stat().st_size / 2**20
    print(f"{options.text}: {len(text.train)} + {len(text.held_out)} sequences, {mib:.1f} MiB, {text.digest}")
    return 0


def _run(options: argparse.Namespace) -> int:
    return run_forks(load_recipe(options.recipe, options.override), options)


def _report(options: argparse.Namespace) -> int:
    others = {"against": options.against, "command": options.typed}
    asked = Asked.by(load_recipe(options.recipe), options.recipe, **others) if options.recipe else Asked(**others)
    print(write_report(options.lines, options.output, asked, options.docs, options.figures))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval.bakeoff.forks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    text = commands.add_parser("text", help="write the tokens that bases and forks see")
    text.set_defaults(command=_text)
    run = commands.add_parser("run", help="train the bases, then the forks that have no line yet")
    run.set_defaults(command=_run)
    for command in (text, run):
        command.add_argument("recipe", type=Path, help="YAML file; its keys are in eval/README.md")
        command.add_argument("--override", nargs="+", action="extend", default=[], metavar="KEY=VALUE")
        command.add_argument("--text", type=Path, required=True, metavar="FILE", help="tokens, as an .npz file")
    run.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON lines; new ones are added")
    run.add_argument("--workers", type=int, default=1, metavar="N", help="forks at a time, spread over the GPUs")
    run.add_argument("--cells", type=at_least_one, metavar="N", help="only the first N contenders of the cells")
    run.add_argument("--minutes", type=float, metavar="M", help="start no fork that would end later than this")
    run.add_argument("--cache", type=Path, default=Path("runs/forks-cache"), metavar="DIR", help="states of the bases")
    run.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    run.add_argument("--data-dir", type=Path, metavar="DIR", help="benchmark files, for cells that are benchmarked")
    run.add_argument("--commit", metavar="ID", help="the lines' commit, for code that lies without its .git folder")
    run.add_argument("--list", action="store_true", help="only say what would be run, and how long it takes")
    run.add_argument("--pace", type=Path, nargs="+", default=[], metavar="FILE", help="lines to go by for that")
    report = commands.add_parser("report", help="make tables of the lines")
    report.set_defaults(command=_report)
    report.add_argument("lines", type=Path, nargs="+", metavar="FILE")
    report.add_argument("--output", type=Path, metavar="FILE", help="Markdown (default: printed alone)")
    report.add_argument("--against", default="bf16", metavar="NAME", help="contender to take differences to")
    report.add_argument("--recipe", type=Path, metavar="FILE", help="YAML file: what is tested and shown")
    report.add_argument("--docs", type=Path, nargs="+", default=[], metavar="FILE", help="Markdown, renewed")
    report.add_argument("--figures", type=Path, metavar="DIR", help="a figure of each family of comparisons")
    for command in (text, run, report):
        add_import_option(command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
