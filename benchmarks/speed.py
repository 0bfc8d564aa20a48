"""The speed of training on FP8 tensor cores against BF16 and torchao's FP8, from one kernel up to whole models.

    python benchmarks/speed.py --output runs/speed.jsonl
    python benchmarks/speed.py --quick --parts kernels models

Needs one Hopper GPU. All parts, in runs that begin nothing after 8.5 minutes and name what they left out. The first
took 469 s on one H200 and left nothing out, with forks on the host's other GPUs; the parts of the others ran in other
runs (docs/log.md):

    python benchmarks/speed.py
    python benchmarks/speed.py --parts trainer --formats mxfp4 fp8-tensor --backend tensor-scaled
    python benchmarks/speed.py --parts first folding gates --formats mxfp4 fp8-tensor --backend tensor-scaled
    python benchmarks/speed.py --parts crossing rounding bf16_mix

kernels  the quantization kernels, against the time that their bytes take at the copy rate measured just before
gemms    the three GEMMs of every linear of the two models, without quantization, against BF16's
models   whole training steps: AdamW fused, BF16 autocast over FP32 masters, decoder layers compiled one by one; every
         recipe quantizes the linears of the decoder layers and no other
refresh  what a refresh costs at 1.1B, in steps of compiled BF16 (`probe_cost.py`)
compile  graphs and recompilations while plans change; the losses under CUDA graphs
linears  one linear, forward and backward, with the quantization of its weight

Only if `--parts` names them:

trainer  runs of the Hugging Face Trainer with torch_compile=True, by regions, and the preset "hopper": median step
         after the first plan, two refreshes apart, memory with and without them, the first step, recompilations
first    first step and first refresh of part trainer's runs, each in a process of its own with empty caches
folding  operands folded into tensor-scaled E4M3, against the same, by tile; their products, with errors
crossing one decoder layer, hidden 512 to 8192, 2,048 to 32,768 tokens: where low precision begins to pay
rounding the emulated backend's rounding of every format, one operand at a time, against the same bound
bf16_mix steps under plans that leave some GEMMs in BF16, and the first step after each change of such a plan
gates    silu(gate) * up and its gradients, computed and folded in one launch, against their bytes, by tile

BF16 is measured first and last, and the others are compared with the median of both, since clocks drift. What fails is
printed with its error, and the rest goes on. JSON lines go to --output, with the machine, versions and the command.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from shared.origin import origin_of
from speed_parts import setting
from speed_parts.bf16_mix import bf16_mix_part
from speed_parts.crossing import crossing_part
from speed_parts.first_steps import first_part
from speed_parts.folding import folding_part
from speed_parts.gates import gates_part
from speed_parts.kernels import gemms_part, kernels_part
from speed_parts.linears import linears_part
from speed_parts.measuring import described
from speed_parts.plan_changes import compile_part
from speed_parts.rounding import rounding_part
from speed_parts.setting import CHANNELS, IN_TRAINER, LARGEST, OURS, OURS_ALONE, WARM_UP, Row
from speed_parts.tables import report
from speed_parts.torchao_recipes import BLOCKWISE, TORCHAO
from speed_parts.trainer_runs import trainer_part
from speed_parts.training_steps import models_part, refresh_part

PARTS: dict[str, Callable[[argparse.Namespace, Sequence[Row]], Iterator[Row]]] = {
    "kernels": kernels_part,
    "gemms": gemms_part,
    "models": models_part,
    "refresh": refresh_part,
    "compile": compile_part,
    "linears": linears_part,
    "trainer": trainer_part,
    "first": first_part,
    "folding": folding_part,
    "crossing": crossing_part,
    "rounding": rounding_part,
    "bf16_mix": bf16_mix_part,
    "gates": gates_part,
}
ON_REQUEST = ("trainer", "first", "folding", "crossing", "rounding", "bf16_mix", "gates")


def main() -> None:
    """Print where the figures come from; per part a line of JSON for each measurement, and a table."""
    options = parse()
    source = origin(options)
    print(", ".join(f"{name} {value}" for name, value in source.items()), flush=True)
    found: list[Row] = []
    # With the default of 8, what compiles anew for every layer would end up uncompiled and slow.
    with torch._dynamo.config.patch(recompile_limit=64):
        for part in options.parts:
            rows, began = [], time.monotonic()
            for row in run_part(part, options, found):
                rows.append(row)
                if options.output:
                    with options.output.open("a", encoding="utf-8") as stream:
                        stream.write(json.dumps({**row, **source}) + "\n")
            found += rows
            print(f"\n{report(part, rows)}\n\n({time.monotonic() - began:.0f} s)\n", flush=True)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the options, with what --quick makes of those that are not given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    by_default = [name for name in PARTS if name not in ON_REQUEST]
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=by_default, metavar="PART")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and recipes: under 4 minutes instead of 9")
    parser.add_argument("--minutes", type=float, help="begin no measurement later than this (default 8.5; quick 3.5)")
    parser.add_argument("--models", nargs="+", choices=setting.MODELS, default=list(setting.MODELS), metavar="MODEL")
    parser.add_argument(
        "--recipes", nargs="+", help="between BF16 and BF16 (default of models: three of ours and two of torchao's)"
    )
    parser.add_argument(
        "--linears", type=linear_size, nargs="+", metavar="OxI", help="of part linears (default two, quick one)"
    )
    parser.add_argument("--rows", type=int, default=8, help="sequences per micro-batch (default 8)")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence (default 2048)")
    parser.add_argument("--steps", type=int, default=10, help=f"steps to time, after {WARM_UP} more (default 10)")
    parser.add_argument("--trainer-steps", type=int, help="of a run of parts trainer and first (default 60; quick 24)")
    parser.add_argument(
        "--formats", nargs="+", metavar="FORMAT", help="of parts trainer, first, crossing, compile (default fp4 fp8)"
    )
    parser.add_argument("--backend", default="auto", help="of the same parts (default auto)")
    parser.add_argument("--mode", choices=("default", "reduce-overhead"), default="default", help="of models")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSONL file; lines are added")
    options = parser.parse_args(arguments)
    quick = options.quick
    options.device = torch.device(options.device)
    options.deadline = time.monotonic() + 60 * (options.minutes or (3.5 if quick else 8.5))
    options.linears = options.linears or LARGEST[: 1 if quick else 2]
    options.channels = CHANNELS[:2] if quick else CHANNELS
    options.trainer_steps = options.trainer_steps or (24 if quick else 60)
    known = (*OURS, *OURS_ALONE, *IN_TRAINER, *TORCHAO)
    quickly = ("snip-hf FP4, ties", "snip-hf MXFP4, ties", "snip-hf FP4", *IN_TRAINER, "torchao tensorwise")
    # Blockwise takes 200 s to try its kernels.
    on_request = (BLOCKWISE, *setting.WITH_CHANGES, *setting.ON_REQUEST)
    options.recipes = options.recipes or (quickly if quick else [name for name in known if name not in on_request])
    for recipe in options.recipes:
        if recipe not in known:
            parser.error(f"--recipes: {recipe!r} is not known; expected some of {', '.join(known)}")
    options.tokens = options.rows * options.length
    return options


def linear_size(text: str) -> tuple[int, int]:
    """Returns (O, I) of "OxI"."""
    out_features, in_features = map(int, text.split("x"))
    return out_features, in_features


def origin(options: argparse.Namespace) -> Row:
    """Returns where the figures come from: machine, versions, commit, command and seed."""
    versions = {}
    for package in ("triton", "torchao", "transformers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {**origin_of(str(options.device)), "cuda": torch.version.cuda, **versions, "seed": options.seed}


def run_part(part: str, options: argparse.Namespace, found: Sequence[Row]) -> Iterator[Row]:
    """Yields a part's rows; what fails outside its measurements is a row too."""
    try:
        for row in PARTS[part](options, found):
            yield {"part": part, **row}
    except Exception as error:
        yield {"part": part, "error": described(error)}


if __name__ == "__main__":
    main()
