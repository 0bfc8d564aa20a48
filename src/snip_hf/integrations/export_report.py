"""What `snip-hf export` writes and prints."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from ..json_io import write_atomic
from ..numerics.formats import UNQUANTIZED
from ..planning.forward_shares import forward_shares
from ..planning.plan import PrecisionPlan
from ..text import printable
from .export import Export, export_plan
from .export_names import FOUR_OVER_SIX, TORCHAO

_MOST_PATH = 4096


def report_export(
    plan: PrecisionPlan, arguments: argparse.Namespace, outside: Sequence[str], model: nn.Module | None
) -> int:
    """Writes the file of a target, or prints it; what was rounded is printed, on stderr where stdout has the file.

    Raises:
        NotExpressible: the target cannot express the plan.
        ValueError: the output exists.
    """
    output: Path | None = arguments.output
    if output is not None and os.path.lexists(output) and not arguments.overwrite:
        raise ValueError(f"{output} exists already; give another --output, or --overwrite.")
    export = export_plan(plan, arguments.to, arguments.nearest, outside, model)
    if output is None:
        sys.stdout.write(export.text)
    else:
        write_atomic(output, export.text.encode())
        print(f"Written: {printable(output, _MOST_PATH)}")
    _print_changes(plan, export, arguments)
    return 0


def _print_changes(plan: PrecisionPlan, export: Export, arguments: argparse.Namespace) -> None:
    stream = sys.stderr if arguments.output is None else sys.stdout
    if arguments.to == FOUR_OVER_SIX and arguments.model is None:
        print(
            "Linear layers outside the plan are not known without --model: of these, modules_to_not_convert names "
            "lm_head alone.",
            file=stream,
        )
    if arguments.to == TORCHAO and arguments.model is None:
        print(
            "Sizes of the layers are not known without --model: `convert` in the file checks them, and refuses layers "
            "that torchao cannot convert.",
            file=stream,
        )
    if export.unfit:
        print(
            f"{len(export.unfit)} layers stay in {UNQUANTIZED.name}, {export.unfit_share:.4f} of the FLOPs, because "
            f"{arguments.to} cannot convert them:",
            file=stream,
        )
        for layer, why in export.unfit.items():
            print(f"  {printable(layer)}: {printable(why)}", file=stream)
    if not export.changes:
        print(f"The file gives every GEMM the format of the plan: FP4 share {_share(plan)}.", file=stream)
        return
    layers: dict[str, list[str]] = {}
    for place, (old, new) in export.changes.items():
        layer, gemm = place.rsplit(":", 1)
        layers.setdefault(layer, []).append(f"{gemm} {old} -> {new}")
    print(
        f"FP4 share {_share(plan)} in the plan, {_share(export.plan)} in the file. "
        f"{len(layers)} of {len(plan.assignment)} layers were changed; {export.coarser:.4f} of the FLOPs have an "
        "operand of fewer bits than in the plan:",
        file=stream,
    )
    for layer, changes in layers.items():
        print(f"  {printable(layer)}: {', '.join(changes)}", file=stream)


def _share(plan: PrecisionPlan) -> str:
    """Returns a plan's FP4 share and, if it decides on forward GEMMs alone, that of these."""
    forward = forward_shares(plan)
    of_forward = "" if forward is None else f" (of the forward GEMMs {forward.fp4_fraction:.4f})"
    return f"{plan.fp4_fraction:.4f}{of_forward}"


def report_checkpoint(plan: PrecisionPlan, arguments: argparse.Namespace) -> int:
    """Writes a checkpoint for inference and prints its figures.

    Raises:
        NotExpressible: torchao cannot store a layer's weight in its format.
        ValueError: bad input; nothing is written.
    """
    from .export_checkpoint import export_checkpoint  # Slow to import, and only needed here.

    done = export_checkpoint(plan, Path(arguments.model), arguments.output, arguments.nearest, arguments.text)
    print(f"Written: {printable(arguments.output, _MOST_PATH)}")
    for (name, label), count in done.kinds.items():
        print(f"  {count} layers of {name}: {label}")
    for what, layers in (
        ("have other scales than in the plan", done.changed),
        ("stay in BF16, which the plan has in a low format", done.kept),
    ):
        if layers:
            print(f"  {len(layers)} layers {what}:")
            for layer, said in layers.items():
                print(f"    {printable(layer)}: {printable(said)}")
    of_plan, here = done.fp4_fractions
    print(f"FP4 share of the forward GEMMs: {of_plan:.4f} in the plan, {here:.4f} in the checkpoint.")
    given, in_bf16, after = done.bytes
    print(
        f"Size of the weights: {given:,} bytes as given, {in_bf16:,} in BF16, {after:,} quantized "
        f"({after / in_bf16:.3f} of BF16)."
    )
    if done.perplexity is not None:
        print(f"Perplexity of the text: {done.perplexity[0]:.4f} in BF16, {done.perplexity[1]:.4f} quantized.")
    return 0
