"""`snip-hf inspect`: a plan, and what does not fit between it and a model."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from .commands import PLAN, Commands, add_micro_batches
from .messages import MOST_SHOWN
from .model_fit import compare_with_model
from .own_modules import add_import_option
from .plan_files import load_plan


def add(commands: Commands) -> None:
    inspect = commands.add_parser(
        "inspect",
        help="show a plan; with --model, compare it with a model",
        description="Prints a plan: the format of each GEMM, its stages, and the run and the settings that it comes "
        "from. With --model, says whether the plan fits the model; exit code 1 if it does not.",
    )
    inspect.add_argument("plan", type=Path, metavar="plan.json", help=PLAN)
    inspect.add_argument(
        "--model", metavar="NAME_OR_DIR", help="a causal LM, as a folder or a name on the Hub; only its config is read"
    )
    inspect.set_defaults(run=run)
    add_import_option(inspect)
    add_micro_batches(inspect)


def run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from ..reporting.tables import listed, plan_table, print_cost, print_stages, say

    plan = load_plan(arguments.plan)
    console = Console()
    console.print(plan_table(plan))
    print_stages(plan, console, arguments.micro_batches)
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
            say(console, f"{field.name}: {shown}", MOST_SHOWN)
    return 0 if arguments.model is None else compare_with_model(plan, arguments.model)
