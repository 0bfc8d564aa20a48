"""Losses of the first steps of training in MXFP4: emulated, on tensor cores with exact and with fast sums, and BF16.

    python benchmarks/loss_curves.py --output runs/loss_curves.jsonl
    python benchmarks/loss_curves.py --seeds 0 1 2 3 --arms "fast sums" "exact sums" --output runs/loss_curves.jsonl
    python benchmarks/loss_curves.py --shape 64 160 2 4 2 --steps 4 --rows 2 --device cpu --arms BF16 emulated

All arms of a seed begin with the same weights and read the same text. A JSON line per arm and seed goes to --output,
with the loss of each step, the machine, versions and the command. One seed tells nothing below some 0.05: runs that
differ in last bits come apart by as much (docs/log.md). With several, paired differences of the last losses are
printed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from scipy.stats import ttest_1samp
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
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], metavar="N")
    parser.add_argument("--output", type=Path, help="JSONL file; lines are added")
    options = parser.parse_args()
    options.deadline = time.monotonic() + 60 * options.minutes
    source, rows = origin_of(options.device), []
    text = texts.load_text(options.text, options.device)
    for seed, arm in itertools.product(options.seeds, options.arms):
        row = run(arm, seed, text, options)
        rows.append(row)
        if row["losses"]:
            seconds, last = row["seconds"], last_of(row)
            print(
                f"{arm}, seed {seed}: {len(row['losses'])} steps, {seconds:.0f} s, mean of the last: {last:.4f}",
                flush=True,
            )
        if options.output:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            with options.output.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({**row, **source}) + "\n")
    for line in differences(rows, options.steps):
        print(line)


def last_of(row: dict[str, Any]) -> float:
    return statistics.fmean(row["losses"][-_LAST:])


def differences(rows: Sequence[dict[str, Any]], steps: int) -> Iterator[str]:
    """Yields, for each pair of arms that ran all steps with two seeds or more, a line with 95% of Student's t."""
    done = {(row["arm"], row["seed"]): last_of(row) for row in rows if len(row["losses"]) == steps}
    for second, first in itertools.combinations(dict.fromkeys(arm for arm, _ in done), 2):
        seeds = [seed for arm, seed in done if arm == first and (second, seed) in done]
        found = [done[first, seed] - done[second, seed] for seed in seeds]
        if len(found) > 1:
            interval = ttest_1samp(found, 0).confidence_interval()
            half = (interval.high - interval.low) / 2
            yield f"{first} less {second}: {statistics.fmean(found):+.4f} ± {half:.4f} ({len(found)} seeds)"


def run(arm: str, seed: int, text: texts.Text, options: argparse.Namespace) -> dict[str, Any]:
    backend, changes = ARMS[arm]
    device = torch.device(options.device)
    release(device)
    turn_on(changes)
    recipe: str | SnipConfig = BF16
    if backend is not None:
        recipe = SnipConfig(policy="uniform-mxfp4", formats=FOLDED, ties=TIES, backend=backend, seed=seed)
    batch = options.rows, texts.LENGTH
    training = Training((*options.shape, texts.VOCABULARY), batch, recipe, seed, device, backend=COMPILER)
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
    return {"arm": arm, "seed": seed, "shape": list(options.shape), "losses": found, "seconds": seconds}


if __name__ == "__main__":
    main()
