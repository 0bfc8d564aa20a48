"""The command line `snip-hf`.

Exit codes: 0 (success), 1 (the plan does not fit the model; no solution; an installed part does not work), 2 (bad
input), 1 or 141 (the reader of the output has closed it, as `head` does). An error is one sentence on stderr, after the
usage if that is wrong. Each command imports its modules when it runs, so that `--help` does not wait for torch.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import snip_hf

from ..extras import needed_by
from ..text import printable

# A shell reports this code for a program that SIGPIPE ended: 128 + 13.
NO_READER = 141
TARGETS = ("megatron", "torchao", "checkpoint")
_MAX_ERROR = 4000
_EXAMPLES = """examples:
  snip-hf report runs/mine                   show a run as tables and figures
  snip-hf report runs/a runs/b --html --csv  write a page on several runs, and the data of their figures
  snip-hf compare runs/mine runs/other       compare shares, settings, formats and losses of runs or plans
  snip-hf inspect plan.json --model DIR      show a plan, and check whether it fits a model
  snip-hf export plan.json --to torchao      convert a plan for another library
  snip-hf recipe copy quickstart             copy a complete run, to try or to change
  snip-hf doctor                             check what works here, and what is missing

`snip-hf COMMAND --help` shows the options of a command."""
_RUN = "the Trainer's output_dir, one of its checkpoints, or a repository of the Hub (USER/NAME[@REVISION])"
_PLAN = "a plan file, the folder of a run, or a repository of the Hub"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; argparse exits on `--help`, `--version` and wrong usage."""
    try:
        arguments = build_parser().parse_args(argv)
        import_modules(getattr(arguments, "modules", ()))
        with needed_by(f"The command {arguments.command!r}"):
            module = importlib.import_module(f".{arguments.module}", __name__)
            code = int(getattr(module, arguments.command)(arguments))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The interpreter flushes again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_READER
    except (OSError, ValueError, TypeError, ArithmeticError, ImportError) as error:
        return fail(error)


def fail(error: Exception, code: int = 2) -> int:
    """Prints the error in one line on stderr and returns the exit code."""
    print(f"snip-hf: {printable(' '.join(str(error).split()), _MAX_ERROR)}", file=sys.stderr, flush=True)
    return code


def import_modules(names: Iterable[str]) -> None:
    """Imports the user's modules, which register formats and policies, from the working directory or the path."""
    if names and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for name in names:
        importlib.import_module(name)


def add_import(parser: argparse.ArgumentParser) -> None:
    """Adds the option `--import`, whose values `import_modules` takes."""
    parser.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="first import this module, which registers your own formats or policies; may be repeated",
    )


def at_least_one(text: str) -> int:
    """Reads a whole number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _setting(text: str) -> tuple[str, Any]:
    """Reads FIELD=VALUE with a YAML value, for argparse."""
    import yaml

    name, separator, value = text.partition("=")
    try:
        if separator:
            return name, yaml.safe_load(value)
    except yaml.YAMLError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not FIELD=VALUE with a YAML value")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="snip-hf",
        description="Show, compare and export runs and plans of adaptive FP4/FP8 training.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"snip-hf {snip_hf.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(
        name: str, help: str, module: str, description: str, imports_modules: bool = True
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help, description=description)
        command.set_defaults(module=module)  # has a function of the command's name
        if imports_modules:
            add_import(command)
        return command

    report = add(
        "report",
        "show one or more runs as tables, figures and a page",
        "report",
        "Print the tables of a run: refreshes, losses, the last plan, its stages, and why each layer has its format. "
        "Write its figures as PNG files.",
    )
    report.add_argument("runs", nargs="+", metavar="RUN", help=_RUN)
    report.add_argument("--html", action="store_true", help="also write report.html, one page on all runs")
    report.add_argument("--csv", action="store_true", help="also write the data of the figures as CSV files")
    report.add_argument(
        "--bf16", metavar="RUN", help="a BF16 run, with or without SNIP, whose losses the page also shows"
    )
    report.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for the files (default: RUN/snip; for the Hub: ./snip-report)"
    )

    inspect = add(
        "inspect",
        "show a plan; with --model, compare it with a model",
        "plans",
        "Print a plan: the format of each GEMM, its stages, and the run and settings behind it. With --model, check "
        "whether the plan fits the model; the exit code is 1 if it does not.",
    )
    inspect.add_argument("plan", type=Path, metavar="PLAN", help=_PLAN)
    inspect.add_argument(
        "--model", metavar="NAME_OR_DIR", help="a causal LM, as a folder or a name on the Hub; only its config is read"
    )
    for command in (report, inspect):
        command.add_argument(
            "--micro-batches",
            type=at_least_one,
            metavar="N",
            help="micro-batches per step, for the predicted times of a pipeline (default: 4 per stage)",
        )

    compare = add(
        "compare",
        "compare shares, settings and losses of runs or plans",
        "report",
        "Print the FP4 shares, the settings and formats that differ, and the losses at common steps. All others are "
        "compared with the first run or plan.",
    )
    compare.add_argument("sources", nargs="+", metavar="RUN_OR_PLAN", help=f"{_RUN}; or a plan.json")

    export = add(
        "export",
        "write a plan for another library, or a checkpoint for inference",
        "plans",
        "Write a plan for another library, or a checkpoint with quantized weights. If the target does not support the "
        "formats of some layers, list these layers, write nothing and exit with code 1.",
    )
    export.add_argument("plan", type=Path, metavar="PLAN", help=_PLAN)
    export.add_argument(
        "--to",
        required=True,
        choices=TARGETS,
        help="the library that reads the file; or checkpoint, a folder with the model and quantized weights",
    )
    export.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="PATH",
        help="the file to write (default: stdout); for a checkpoint, a new or empty folder",
    )
    export.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    export.add_argument(
        "--model",
        metavar="NAME_OR_DIR",
        help="first check that the plan fits this model; required for a checkpoint, as a folder with weights",
    )

    recipe = add(
        "recipe",
        "list the recipes (complete runs), or copy them here",
        "recipe",
        "List the complete runs, or copy them with everything they need.",
        imports_modules=False,
    )
    actions = recipe.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("list", help="show the name and purpose of each recipe")
    copy = actions.add_parser("copy", help="copy recipes with everything they need to a folder")
    copy.add_argument("names", nargs="*", metavar="NAME", help="names from `list` (default: all)")
    copy.add_argument("--to", type=Path, default=Path(), metavar="DIR", help="folder (default: the working directory)")
    copy.add_argument("--overwrite", action="store_true", help="replace files that differ")

    solve = add(
        "solve",
        "solve an integer program given as JSON",
        "solve",
        "Solve an integer program that chooses one option per group, in a separate process as a refresh does. "
        "docs/files.md describes the program and the solution.",
        imports_modules=False,
    )
    solve.add_argument("problem", type=Path, metavar="problem.json", help="the program, with its solver")
    solve.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write the solution to this file instead of stdout"
    )

    doctor = add(
        "doctor",
        "check what works here, and what is missing",
        "doctor",
        "List packages, extras, devices, backends, formats and solvers, and how to install what is missing. With a "
        "model, also predict its training on this machine. Exit code 1 if an installed part does not work; a missing "
        "extra is not an error.",
    )
    doctor.add_argument(
        "model",
        nargs="?",
        metavar="NAME_OR_DIR",
        help="a causal LM, as a folder or a name on the Hub; only its config is read",
    )
    doctor.add_argument(
        "--snip",
        nargs="+",
        type=_setting,
        default=[],
        metavar="FIELD=VALUE",
        help="fields of SnipConfig that differ from their defaults, as in YAML: target_fp4_fraction=0.75",
    )
    doctor.add_argument(
        "--lora",
        nargs="*",
        type=_setting,
        metavar="FIELD=VALUE",
        help="train LoRA adapters, with these fields of PEFT's LoraConfig (default: target_modules=all-linear)",
    )
    return parser
