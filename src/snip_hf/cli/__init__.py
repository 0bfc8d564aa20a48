"""The command line: one module per command, whose `add` makes its parser and whose `run` runs it.

Exit codes: 0, 1 (the plan does not fit the model; no solution), 2 (bad input). An error is one sentence on stderr.
Commands import what they need when they run, so that help and wrong usage do not wait for torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import metadata

from . import export, inspect, recipe, report, solve
from .messages import fail
from .own_modules import import_modules as import_modules


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code (argparse itself exits on `--help`, `--version` and wrong usage)."""
    arguments = _parser().parse_args(argv)
    try:
        import_modules(getattr(arguments, "modules", ()))
        return int(arguments.run(arguments))
    except (OSError, ValueError, TypeError) as error:
        return fail(error, 2)
    except ArithmeticError as error:
        return fail(
            ValueError(f"A figure cannot be computed ({error}): the files hold numbers that are no real ones."), 2
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="snip-hf", description="Plans of FP4/FP8 training: solve, inspect, report.")
    parser.add_argument("--version", action="version", version=f"snip-hf {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (solve, inspect, report, export, recipe):
        command.add(commands)
    return parser


def _version() -> str:
    try:
        return metadata.version("snip-hf")
    except metadata.PackageNotFoundError:
        return "(not installed)"
