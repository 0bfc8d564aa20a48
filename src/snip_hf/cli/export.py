"""`snip-hf export`: a plan for another library, or a checkpoint for inference."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path

from ..text import printable
from .commands import PLAN, Commands, examples
from .messages import fail
from .model_fit import compare_with_model
from .own_modules import add_import_option
from .plan_files import load_plan

_EXAMPLES = {
    "snip-hf export plan.json --to megatron -o precision.yaml": "",
    "snip-hf export plan.json --to torchao -o precision.py": "",
    "snip-hf export plan.json --to checkpoint --model DIR -o NEW_DIR": "",
}
_CHECKPOINT = "checkpoint"
# `integrations.export.TARGETS`, whose import would load torch, and the checkpoint.
TARGETS = ("megatron", "torchao", _CHECKPOINT)
_MOST_PATH = 4096


def add(commands: Commands) -> None:
    export = commands.add_parser(
        "export",
        help="write a plan for another library, or a checkpoint for inference",
        description="Writes a plan in the words of another library, or a checkpoint with quantized weights. If the "
        "target lacks formats of the plan, lists them, writes nothing and exits with code 1.",
        epilog=examples(_EXAMPLES),
    )
    export.add_argument("plan", type=Path, metavar="plan.json", help=PLAN)
    export.add_argument(
        "--to",
        required=True,
        choices=TARGETS,
        help="the library that reads the file; or checkpoint, a folder with the model in quantized weights",
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
    export.set_defaults(run=run)
    add_import_option(export)


def run(arguments: argparse.Namespace) -> int:
    from ..integrations.export import NotExpressible, export_plan
    from ..json_io import write_atomic

    output: Path | None = arguments.output
    is_checkpoint = arguments.to == _CHECKPOINT
    if is_checkpoint and (arguments.model is None or output is None):
        raise ValueError("A checkpoint needs --model, the folder of the model, and --output, a new folder.")
    plan = load_plan(arguments.plan)
    if arguments.model is not None:
        with redirect_stdout(sys.stderr if output is None else sys.stdout):
            if compare_with_model(plan, arguments.model):
                return 1
    if not is_checkpoint and output is not None and os.path.lexists(output) and not arguments.overwrite:
        raise ValueError(f"{output} exists already; give another --output, or --overwrite.")
    stored: dict[str, str] = {}
    try:
        if is_checkpoint:
            from ..integrations.export_checkpoint import export_checkpoint

            assert output is not None
            stored = export_checkpoint(plan, Path(arguments.model), output)
        else:
            text = export_plan(plan, arguments.to)
            if output is None:
                sys.stdout.write(text)
                return 0
            write_atomic(output, text.encode())
    except NotExpressible as error:
        for name, reason in error.reasons.items():
            print(f"  {printable(name)}: {printable(reason)}", file=sys.stderr)
        return fail(error, 1)
    print(f"Written: {printable(output, _MOST_PATH)}")
    for name, kind in stored.items():
        print(f"  {name}: {kind}")
    return 0
