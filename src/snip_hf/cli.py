"""The command line: `snip-hf solve`, `snip-hf inspect`, `snip-hf report`, `snip-hf export`.

Exit codes: 0, 1 (the plan does not fit the model; no solution), 2 (bad input). An error is one sentence on stderr.
Commands import what they need when they run, so that help and wrong usage do not wait for torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from .integrations.export_names import CHECKPOINT, NAMES
from .json_io import MAX_DIGITS, open_regular, read_json, write_json_atomic
from .text import printable

if TYPE_CHECKING:
    from rich.console import Console
    from torch import nn

    from .planning.plan import PrecisionPlan

# Longer lists of layers are cut: one mistake, such as another prefix, makes every layer a mismatch.
_MOST_LISTED = 20
# Characters of an error, and of the config that a plan was made under.
_MOST_SHOWN = 4000
_MOST_PATH = 4096  # as of Linux
# Of a model's config.json, whose largest have tables of labels; of its layers, of which the deepest models have some
# 200; and of its modules, of which one with 45,032 linears has up to 100,000.
_MOST_CONFIG_BYTES = 16 * 2**20
_MOST_LAYERS, _MOST_MODULES = 2000, 150_000
# Entries of a config that say how many layers there are, or what each of them is.
_LAYERS = re.compile(r"(layers?|blocks?|depths?|types?)$")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code (argparse itself exits on `--help`, `--version` and wrong usage)."""
    arguments = _parser().parse_args(argv)
    try:
        import_modules(getattr(arguments, "modules", ()))
        return int(arguments.run(arguments))
    except (OSError, ValueError, TypeError) as error:
        return _fail(error, 2)
    except ArithmeticError as error:
        return _fail(
            ValueError(f"A figure cannot be computed ({error}): the files hold numbers that are no real ones."), 2
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="snip-hf", description="Plans of FP4/FP8 training: solve, inspect, report.")
    parser.add_argument("--version", action="version", version=f"snip-hf {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    solve = commands.add_parser("solve", help="solve an integer program, as JSON, in a process of its own")
    solve.add_argument("problem", type=Path, metavar="problem.json")
    solve.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the solution here, not to stdout")
    solve.set_defaults(run=_solve)

    inspect = commands.add_parser("inspect", help="show a plan; with --model, compare it with a model")
    inspect.add_argument("plan", type=Path, metavar="plan.json")
    inspect.add_argument("--model", metavar="NAME_OR_DIR", help="a causal LM; only its config is read")
    inspect.set_defaults(run=_inspect)

    report = commands.add_parser("report", help="tables, figures and a page of one run or several")
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
    report.set_defaults(run=_report)

    export = commands.add_parser("export", help="write a plan for another library, or a checkpoint for inference")
    export.add_argument("plan", type=Path, metavar="plan.json")
    export.add_argument("--to", required=True, choices=NAMES)
    export.add_argument("--nearest", action="store_true", help="round what the target cannot express")
    export.add_argument("-o", "--output", type=Path, metavar="PATH", help="file (default: stdout); folder: checkpoint")
    export.add_argument("--overwrite", action="store_true", help="replace the file, if there is one")
    export.add_argument("--model", metavar="NAME_OR_DIR", help="the plan's model; a folder for checkpoint")
    export.add_argument("--text", type=Path, metavar="FILE", help="with checkpoint: measure perplexity on this text")
    export.set_defaults(run=_export)

    for command in (inspect, report, export):
        command.add_argument(
            "--import",
            dest="modules",
            action="append",
            default=[],
            metavar="MODULE",
            help="import this module first, which registers formats or policies of your own; may be repeated",
        )
    for command in (inspect, report):
        command.add_argument(
            "--micro-batches", type=int, metavar="N", help="per step through a pipeline's stages (default: 4 per stage)"
        )
    return parser


def import_modules(names: Sequence[str]) -> None:
    """Imports modules that register what files name, as `python -m` finds them: the working directory goes first."""
    if names and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever the module raises
            raise ValueError(
                f"--import {name}: {type(error).__name__}: {error}. Expected the name of a module that can be imported "
                "from here, such as my_formats for ./my_formats.py."
            ) from error


def _load_plan(path: Path) -> PrecisionPlan:
    from .planning.plan import PrecisionPlan
    from .records.run_folder import FOLDER

    try:
        return PrecisionPlan.load(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path} does not exist; expected a plan, e.g. OUTPUT_DIR/snip/plan.json.") from error
    except OSError:
        plans = [one for one in (path / "plan.json", path / FOLDER / "plan.json") if one.is_file()]
        if not path.is_dir():
            raise
        advice = f"give the plan in it: {plans[0]}" if plans else "expected a plan, e.g. OUTPUT_DIR/snip/plan.json."
        raise IsADirectoryError(f"{path} is a folder; {advice}") from None


def _solve(arguments: argparse.Namespace) -> int:
    try:
        problem = read_json(arguments.problem)
    except ValueError as error:
        raise ValueError(f"{arguments.problem} is not a usable problem: {error}") from error
    if not isinstance(problem, dict):
        raise ValueError(f"{arguments.problem} holds a {type(problem).__name__}, expected a JSON object with groups.")
    from .planning.solver.process import SolverProcess
    from .planning.solver.solution import SolverError

    try:
        with SolverProcess.start(problem) as process:
            result = process.result()
    except SolverError as error:
        return _fail(error, 2 if error.reason == "bad problem" else 1)
    solution = dataclasses.asdict(result)
    if arguments.output is None:
        print(json.dumps(solution, indent=1))
    else:
        write_json_atomic(arguments.output, solution)
        print(f"{result.status}, objective {result.objective:.6g}, by {result.solver}: {_path(arguments.output)}")
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from .reporting.tables import listed, print_cost, print_plan, say

    plan = _load_plan(arguments.plan)
    console = Console()
    print_plan(plan, console)
    _inspect_stages(plan, arguments, console)
    if plan.measured is not None:
        print_cost(plan, console)
    speedups = plan.stage_linear_speedups()
    if speedups is not None:
        stages = listed([f"{speedup:.4f}" for speedup in speedups])
        speed = f"{plan.linear_speedup():.4f} times BF16's speed ({plan.speed_source})"
        say(console, f"The linears run at {speed}, per stage: {stages}.")
    for field in dataclasses.fields(plan.provenance):
        value = getattr(plan.provenance, field.name)
        if value is not None:
            shown = json.dumps(dict(value)) if field.name == "config" else value
            say(console, f"{field.name}: {shown}", _MOST_SHOWN)
    return 0 if arguments.model is None else _compare(plan, arguments.model)


def _inspect_stages(plan: PrecisionPlan, arguments: argparse.Namespace, console: Console) -> None:
    """Prints the stages, compared with one global constraint where the run's divergences lie beside the plan."""
    from .records.divergences import read_divergence
    from .registry import UnknownName
    from .reporting.tables import print_stages

    path = arguments.plan.parent / f"divergence-{plan.provenance.step}.json"
    try:
        records = read_divergence(path)[1]
    except FileNotFoundError:
        records = None
    except UnknownName as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path} holds no divergences: {error} Restore the file or move it away.") from error
    print_stages(plan, console, arguments.micro_batches, records)


def _compare(plan: PrecisionPlan, name: str) -> int:
    """Prints what does not fit between a plan and a model; returns 1 if anything does not."""
    from .config import SnipConfig
    from .costs.flops import linear_flops
    from .layers.convert import convert_model
    from .planning.pipeline_model import MOST_COMPARISONS

    model = _empty_model(name)
    # The plan's own config, because what was skipped then has to be skipped now.
    config = SnipConfig() if plan.provenance.config is None else SnipConfig.from_dict(plan.provenance.config)
    modules = sum(1 for _ in model.modules())
    if modules * len(config.skip_modules) > MOST_COMPARISONS:
        raise ValueError(
            f"The plan's skip_modules has {len(config.skip_modules):,} patterns, which are too many to compare with "
            f"the {modules:,} modules of {name}."
        )
    layers = convert_model(model, config)
    flops = linear_flops(model)
    missing, unexpected = plan.mismatches(layers)
    # The forward GEMM, because a frozen weight has no grad_weight FLOPs.
    resized = [x for x in layers if x in plan.flops and plan.flops[x]["forward"] != flops[x]["forward"]]
    shown = _path(name)
    for what, names in (
        (f"in {shown} but not in the plan", missing),
        (f"in the plan but not in {shown}", unexpected),
        (f"of another size in {shown} than in the plan", resized),
    ):
        if names:
            print(f"{len(names)} layers are {what}:")
            listed = "".join(f"  {printable(layer)}\n" for layer in names[:_MOST_LISTED])
            print(listed + "  ...\n" * (len(names) > _MOST_LISTED))
    if missing or unexpected or resized:
        return 1
    print(f"The plan fits {shown}: all {len(layers)} layers agree in name and size.")
    return 0


def _empty_model(name: str) -> nn.Module:
    """The causal LM `name`, built from its config on the meta device: layers without memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        if Path(name).is_dir():
            _check_config(Path(name) / "config.json")
        with _silent_transformers(), _bounded_modules():
            config = AutoConfig.from_pretrained(name, trust_remote_code=False)
            with torch.device("meta"):
                model: nn.Module = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # Whatever a foreign config makes of it.
        raise ValueError(f"Cannot build the model {name!r} from its config: {error}") from error
    return model


def _check_config(path: Path) -> None:
    """Refuses what would take minutes or gigabytes before anything is built from it."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > _MOST_CONFIG_BYTES:
            raise ValueError(f"{path} is larger than {_MOST_CONFIG_BYTES} bytes.")
        level = [json.loads(file.read(_MOST_CONFIG_BYTES), parse_int=_bounded_int)]
    while level:  # configs of parts of the model lie inside
        below = []
        for key, value in (item for mapping in level if isinstance(mapping, dict) for item in mapping.items()):
            count = len(value) if isinstance(value, list) else value
            if _LAYERS.search(key) and isinstance(count, int | float) and count > _MOST_LAYERS:
                raise ValueError(f"{key} is or has {count:,}, expected at most {_MOST_LAYERS:,}.")
            below += value if isinstance(value, list) else [value]
        level = below


def _bounded_int(text: str) -> float:
    return int(text) if len(text) <= MAX_DIGITS else float(text)


@contextmanager
def _bounded_modules() -> Iterator[None]:
    """Inside, building more than so many modules is an error: configs name numbers of layers in many ways."""
    from torch.nn.modules.module import register_module_module_registration_hook

    count = 0

    def note(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        nonlocal count
        count += 1
        if count > _MOST_MODULES:
            raise ValueError(f"it has more than {_MOST_MODULES:,} modules.")

    handle = register_module_module_registration_hook(note)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _silent_transformers() -> Iterator[None]:
    """Inside, transformers logs nothing: it quotes configs as they are."""
    from transformers.utils import logging as transformers_logging

    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(before)


def _export(arguments: argparse.Namespace) -> int:
    from .config import SnipConfig
    from .integrations.export import NotExpressible
    from .integrations.export_report import report_checkpoint, report_export
    from .layers.selection import skip_reasons

    is_checkpoint = arguments.to == CHECKPOINT
    if is_checkpoint and (arguments.model is None or arguments.output is None):
        raise ValueError("A checkpoint needs --model, the folder of the model, and --output, a new folder.")
    if not is_checkpoint and arguments.text is not None:
        raise ValueError("--text is for --to checkpoint.")
    plan = _load_plan(arguments.plan)
    outside, model = ["lm_head"], None
    if arguments.model is not None:
        with redirect_stdout(sys.stderr if arguments.output is None else sys.stdout):
            if _compare(plan, arguments.model):
                return 1
        model = _empty_model(arguments.model)
        outside = [name for name in skip_reasons(model, SnipConfig()) if name not in plan.assignment]
    try:
        if is_checkpoint:
            return report_checkpoint(plan, arguments)
        return report_export(plan, arguments, outside, model)
    except NotExpressible as error:
        for name, reason in error.reasons.items():
            print(f"  {printable(name)}: {printable(reason)}", file=sys.stderr)
        return _fail(error, 1)


def _report(arguments: argparse.Namespace) -> int:
    from .integrations.report_command import report

    for path in report(arguments):
        print(_path(path))
    return 0


def _path(path: str | Path) -> str:
    return printable(path, _MOST_PATH)


def _fail(error: Exception, code: int) -> int:
    print(f"snip-hf: {printable(' '.join(str(error).split()), _MOST_SHOWN)}", file=sys.stderr)
    return code


def _version() -> str:
    try:
        return metadata.version("snip-hf")
    except metadata.PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
