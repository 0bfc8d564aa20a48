"""`snip-hf export`: a plan for another library, or a checkpoint for inference."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout
from pathlib import Path

from ..integrations.export_names import CHECKPOINT, NAMES
from ..text import printable
from .commands import PLAN, Commands, examples
from .empty_model import empty_model
from .messages import fail
from .model_fit import compare_with_model
from .own_modules import add_import_option
from .plan_files import load_plan

_EXAMPLES = {
    "snip-hf export plan.json --to megatron -o precision.yaml": "",
    "snip-hf export plan.json --to torchao --nearest -o precision.py": "",
    "snip-hf export plan.json --to checkpoint --nearest --model DIR -o NEW_DIR": "",
}


def add(commands: Commands) -> None:
    export = commands.add_parser(
        "export",
        help="write a plan for another library, or a checkpoint for inference",
        description="Writes a plan in the words of another library, or a checkpoint with quantized weights. A target "
        "may lack formats of the plan: they are listed and nothing is written (exit code 1), unless you say --nearest.",
        epilog=examples(_EXAMPLES),
    )
    export.add_argument("plan", type=Path, metavar="plan.json", help=PLAN)
    export.add_argument(
        "--to",
        required=True,
        choices=NAMES,
        help="the library that reads the file; or checkpoint, a folder with the model in quantized weights",
    )
    export.add_argument(
        "--nearest", action="store_true", help="replace what the target lacks by the nearest that it has, and list it"
    )
    export.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="PATH",
        help="the file to write (default: stdout); of a checkpoint, a new or empty folder",
    )
    export.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    export.add_argument(
        "--model",
        metavar="NAME_OR_DIR",
        help="compare the plan with this model first; a checkpoint needs it, as a folder with weights",
    )
    export.add_argument(
        "--text", type=Path, metavar="FILE", help="of a checkpoint, measure the perplexity on this text"
    )
    export.set_defaults(run=run)
    add_import_option(export)


def run(arguments: argparse.Namespace) -> int:
    from ..config import SnipConfig
    from ..integrations.export import NotExpressible
    from ..integrations.export_report import report_checkpoint, report_export
    from ..layers.selection import skip_reasons

    is_checkpoint = arguments.to == CHECKPOINT
    if is_checkpoint and (arguments.model is None or arguments.output is None):
        raise ValueError("A checkpoint needs --model, the folder of the model, and --output, a new folder.")
    if not is_checkpoint and arguments.text is not None:
        raise ValueError("--text is for --to checkpoint.")
    plan = load_plan(arguments.plan)
    outside, model = ["lm_head"], None
    if arguments.model is not None:
        with redirect_stdout(sys.stderr if arguments.output is None else sys.stdout):
            if compare_with_model(plan, arguments.model):
                return 1
        model = empty_model(arguments.model)
        outside = [name for name in skip_reasons(model, SnipConfig()) if name not in plan.assignment]
    try:
        if is_checkpoint:
            return report_checkpoint(plan, arguments)
        return report_export(plan, arguments, outside, model)
    except NotExpressible as error:
        for name, reason in error.reasons.items():
            print(f"  {printable(name)}: {printable(reason)}", file=sys.stderr)
        return fail(error, 1)
