"""`snip-hf inspect` and `snip-hf export`: show a plan, check it against a model, and convert it for another library."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path

import torch
from torch import nn

from ..config import SnipConfig, changed_fields
from ..costs.flops import linear_flops
from ..integrations.export import TARGETS, NotExpressible
from ..integrations.hub import load_plan
from ..json_io import read_json, write_atomic
from ..layers.convert import convert_model
from ..planning.plan import PrecisionPlan
from ..text import printable
from . import fail

# One mistake, such as another prefix, makes all layers mismatch, so longer lists are cut.
_MAX_LISTED = 20
_MAX_VALUE = 4000
# What `inspect` calls a field of the provenance, if not by its name.
_NAMES = {"seconds": "solver's seconds", "config": "config, other than the defaults"}


def inspect(arguments: argparse.Namespace) -> int:
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
            name, shown = _NAMES.get(field.name, field.name), value
            if field.name == "config":
                others = [f"{key}={json.dumps(one)}" for key, one in changed_fields(value).items()]
                shown = ", ".join(others) or "SnipConfig()"
            say(console, f"{name}: {shown}", _MAX_VALUE)
    return 0 if arguments.model is None else compare_with_model(plan, arguments.model)


def export(arguments: argparse.Namespace) -> int:
    output: Path | None = arguments.output
    is_checkpoint = arguments.to == "checkpoint"
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
            text = TARGETS[arguments.to](plan)
            if output is None:
                sys.stdout.write(text)
                return 0
            write_atomic(output, text.encode())
    except NotExpressible as error:
        for name, reason in error.reasons.items():
            print(f"  {printable(name)}: {printable(reason)}", file=sys.stderr)
        return fail(error, 1)
    print(f"Written: {printable(output)}")
    for name, kind in stored.items():
        print(f"  {name}: {kind}")
    return 0


def compare_with_model(plan: PrecisionPlan, name: str) -> int:
    """Prints the mismatches between a plan and a model; returns 1 if there are any."""
    model = empty_model(name)
    # Only the fields that choose layers: others may be those of another version.
    fields = plan.provenance.config or {}
    choosing = {name: fields[name] for name in ("skip_modules", "include_modules") if name in fields}
    layers = convert_model(model, SnipConfig.from_dict(choosing))
    flops = linear_flops(model)
    missing, unexpected = plan.mismatches(layers)
    # The forward GEMM, because a frozen weight has no grad_weight FLOPs.
    resized = [x for x in layers if x in plan.flops and plan.flops[x]["forward"] != flops[x]["forward"]]
    shown = printable(name)
    for what, names in (
        (f"in {shown} but not in the plan", missing),
        (f"in the plan but not in {shown}", unexpected),
        (f"of another size in {shown} than in the plan", resized),
    ):
        if names:
            print(f"{len(names)} layers are {what}:")
            listed = "".join(f"  {printable(layer)}\n" for layer in names[:_MAX_LISTED])
            print(listed + "  ...\n" * (len(names) > _MAX_LISTED))
    if missing or unexpected or resized:
        return 1
    print(f"The plan fits {shown}: all {len(layers)} layers agree in name and size.")
    return 0


def empty_model(name: str) -> nn.Module:
    """Builds a causal LM from its config on the meta device, where weights take no memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if (Path(name) / "adapter_config.json").is_file() and not (Path(name) / "config.json").is_file():
        base = read_json(Path(name) / "adapter_config.json").get("base_model_name_or_path")
        raise ValueError(f"{name!r} is the folder of an adapter, not of a model. Give its base model, {base!r}.")
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # transformers raises many types
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"Cannot build the model {name!r} from its config: {reason}") from error
    return model
