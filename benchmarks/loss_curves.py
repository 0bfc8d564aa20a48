"""Losses of the first steps of training in MXFP4: emulated, on tensor cores with exact and with fast sums, and BF16.

    python benchmarks/loss_curves.py --output runs/loss_curves.jsonl
    python benchmarks/loss_curves.py --shape 64 160 2 4 2 --steps 4 --rows 2 --device cpu --arms BF16 emulated

All arms begin with the same weights and read the same text. A JSON line per arm goes to --output, with the loss of each
step, the machine, versions and the command.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from shared import texts
from shared.origin import origin_of
from speed_parts.measuring import release
from speed_parts.setting import BF16, COMPILER, FOLDED, MODELS, TIES
from speed_parts.switches import CHANGES, turn_on
from speed_parts.training_steps import Training

from snip_hf import SnipConfig

# Arm -> its backend and the changes of the backend "tensor-scaled" that it has.
ARMS: dict[str, tuple[str | None, tuple[str, ...]]] = {
    BF16: (None, CHANGES),
    "fast sums": ("tensor-scaled", CHANGES),
    "exact sums": ("tensor-scaled", ("spared launches", "late columns", "fused gates")),
    "emulated": ("emulated", CHANGES),
}
_LAST = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    texts.add_text_arguments(parser)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    parser.add_argument("--shape", type=int, nargs=5, default=MODELS["TinyLlama-1.1B"], metavar="N")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", type=int, default=32, help="sequences per step")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no step later than this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSONL file; lines are added")
    options = parser.parse_args()
    options.deadline = time.monotonic() + 60 * options.minutes
    source = {**origin_of(options.device), "seed": options.seed}
    text = texts.load_text(options.text, options.device)
    for arm in options.arms:
        row = run(arm, text, options)
        losses = row["losses"]
        if losses:
            last = statistics.fmean(losses[-_LAST:])
            print(
                f"{arm}: {len(losses)} steps, {row['seconds']:.0f} s, mean of the last {_LAST}: {last:.4f}", flush=True
            )
        if options.output:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            with options.output.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({**row, **source}) + "\n")


def run(arm: str, text: texts.Text, options: argparse.Namespace) -> dict[str, Any]:
    backend, changes = ARMS[arm]
    device = torch.device(options.device)
    release(device)
    turn_on(changes)
    recipe: str | SnipConfig = BF16
    if backend is not None:
        recipe = SnipConfig(policy="uniform-mxfp4", formats=FOLDED, ties=TIES, backend=backend, seed=options.seed)
    batch = options.rows, texts.LENGTH
    training = Training((*options.shape, texts.VOCABULARY), batch, recipe, options.seed, device, backend=COMPILER)
    turn_on(changes)  # a name of a recipe has its own
    began, losses = time.monotonic(), []
    for step in range(1, options.steps + 1):
        if time.monotonic() > options.deadline:
            break
        training.batches = [text.batch(step, options.rows)]
        losses.append(training.step())
    found = torch.stack(losses).tolist() if losses else []
    seconds = time.monotonic() - began
    if training.controller is not None:
        training.controller.close()
    return {"arm": arm, "shape": list(options.shape), "losses": found, "seconds": seconds}


if __name__ == "__main__":
    main()
