"""The command line: one module per command, whose `add` makes its parser and whose `run` runs it.

Exit codes: 0, 1 (the plan does not fit the model; no solution; something installed does not work), 2 (bad input), 141
(nobody reads the output any more). An error is one sentence on stderr. Commands import what they need when they run, so
that help and wrong usage do not wait for torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import snip_hf

from ..extras import MissingExtra, needed_by
from . import compare, completion, doctor, export, inspect, recipe, report, solve
from .commands import Parser, examples
from .messages import NO_READER, drop_output, fail, flush
from .own_modules import import_modules as import_modules

_EXAMPLES = {
    "snip-hf report runs/mine": "what a run did, as tables and figures",
    "snip-hf inspect runs/mine/snip/plan.json": "a plan; --model NAME compares it with a model",
    "snip-hf compare runs/mine runs/other": "shares, changes and losses of runs or plans",
    "snip-hf export plan.json --to torchao": "a plan for another library",
    "snip-hf recipe copy quickstart": "a complete run, to try or to change",
    "snip-hf doctor": "what runs here, and what is missing",
    'eval "$(snip-hf completion bash)"': "complete commands in this shell",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code (argparse itself exits on `--help`, `--version` and wrong usage).

    Ends quietly where the reader of the output has gone, as `head` does.
    """
    try:
        try:
            return _run(build_parser().parse_args(argv))
        finally:
            flush()
    except SystemExit as left:
        if not isinstance(left.__context__, BrokenPipeError):  # rich leaves so
            raise
    except BrokenPipeError:
        pass
    except OSError as error:  # a full disk
        return drop_output(fail(error, 2))
    return drop_output(NO_READER)


def _run(arguments: argparse.Namespace) -> int:
    try:
        import_modules(getattr(arguments, "modules", ()))
        with needed_by(f"The command {arguments.command!r}"):
            return int(arguments.run(arguments))
    except BrokenPipeError:
        raise
    except (OSError, ValueError, TypeError, MissingExtra) as error:
        return drop_output(fail(error, 2))
    except ArithmeticError as error:
        return fail(
            ValueError(f"A figure cannot be computed ({error}): the files hold numbers that are no real ones."), 2
        )


def build_parser() -> Parser:
    parser = Parser(
        prog="snip-hf",
        description="Runs and plans of adaptive FP4/FP8 training: look at them, compare them, take them elsewhere.",
        epilog=examples(_EXAMPLES, "`snip-hf COMMAND --help` says more about a command."),
    )
    parser.add_argument("--version", action="version", version=f"snip-hf {snip_hf.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (report, inspect, compare, export, recipe, solve, doctor, completion):
        command.add(commands)
    return parser
