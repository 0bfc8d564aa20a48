"""What low precision costs a mixture of experts in loss: emulated, on FP8 tensor cores, and with BF16 products.

    python benchmarks/moe_losses.py --text criteria-text.npz --output runs/moe_losses.jsonl
    python benchmarks/moe_losses.py --text criteria-text.npz --steps 100 --minutes 6 --output runs/moe_losses.jsonl
    python benchmarks/moe_losses.py --tiny --device cpu --seeds 0 --steps 4 --arms BF16 "MXFP4, emulated"

Trains a Qwen3-MoE from random weights with each arm and seed: FP32 master weights under BF16 autocast, AdamW, a
learning rate that rises over a tenth of the steps and then falls to zero. All arms of a seed begin with the same
weights and read the same text. BF16 runs through snip-hf's layers too, all of whose products are then BF16, so that the
arms differ by formats and kernels alone. Seeds run at the same time, each in a process of its own. Prints the loss on
held-out text, in each arm's own arithmetic, and its paired differences from BF16 and from the emulated arm.

The line of an arm is written as soon as the arm ends. An arm begins only if it ends before --minutes in the time of its
seed's longest one so far; the lines of the others say so. On one H200, beside other work, an arm of 100 steps took 26
to 61 s with three seeds at a time. Layers run uncompiled: in `moe_speed.py` a kind of layers compiled in 17 to 20 s,
and these arms have three kinds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import moe_speed
import numpy as np
import torch
from moe_speed import Size
from shared import texts
from shared.origin import origin_of
from speed_parts.measuring import autocast, guarded, release
from speed_parts.setting import BF16, FOLDED, Row
from torch import Tensor

from snip_hf import SnipConfig, SnipController
from snip_hf.kernels.emulated import EMULATED
from snip_hf.layers.state import snip_linears

# Arm -> its backend on a GPU and fields of its SnipConfig.
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    BF16: ("tensor-scaled", {"policy": "bf16"}),
    "MXFP4": ("tensor-scaled", {"policy": "uniform-mxfp4"}),
    "MXFP4, emulated": ("emulated", {"policy": "uniform-mxfp4"}),
    "MXFP4 75%, snip": ("tensor-scaled", {"policy": "snip", "target_fp4_fraction": 0.75, "granularity": "gemm"}),
    "MXFP4 75%, random": ("tensor-scaled", {"policy": "random", "target_fp4_fraction": 0.75, "granularity": "gemm"}),
}
REFERENCES = (BF16, "MXFP4, emulated")
SIZE = Size(hidden=1024, inner=512, layers=4, experts=16, experts_per_token=4, rows=32, length=512)
PEAK_RATE = 1e-3
LAST = 10


def run(arm: str, sequences: tuple[Tensor, Tensor], options: argparse.Namespace) -> Iterator[Row]:
    """Trains, and gives the losses on the text and, afterwards, on held-out text."""
    device, size, steps = options.device, options.size, options.steps
    release(device)
    model = moe_speed.build_model(size, options.seed, device, torch.float32)
    fused = {"fused": True} if device.type == "cuda" else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.1, **fused)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(rate, steps))
    backend, fields = ARMS[arm]
    config = SnipConfig(
        **fields,
        formats=FOLDED,
        backend=backend if device.type == "cuda" else "emulated",
        first_refresh=max(1, steps // 10),
        refresh_every=max(2, steps // 2),
        apply_delay=1,
        seed=options.seed,
    )
    controller = SnipController(model, optimizer, config, max_steps=steps)
    train, held_out = sequences
    began, losses = time.monotonic(), []
    for step in range(1, steps + 1):
        ids = train[torch.arange((step - 1) * size.rows, step * size.rows) % len(train)].to(device)
        batch = {"input_ids": ids, "labels": ids}
        controller.capture(batch)
        with autocast(device):
            loss = model(**batch).loss
        loss.backward()
        controller.before_optimizer_step(step)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        controller.after_step(step)
        losses.append(loss.detach())
    found = torch.stack(losses).tolist()
    seconds = time.monotonic() - began
    model.eval()
    with torch.no_grad(), autocast(device):
        parts = [model(input_ids=ids, labels=ids).loss for ids in held_out.to(device).split(size.rows)]
    row = {
        "last": statistics.fmean(found[-LAST:]),
        "held_out": float(torch.stack(parts).mean()),
        "losses": found,
        "seconds": seconds,
        "share": controller.plan.fp4_fraction,
        "emulated_layers": sum(layer.snip_backend is EMULATED for layer in snip_linears(model).values()),
    }
    controller.close()
    yield row


def rate(steps: int, step: int) -> float:
    """Returns the learning rate of a step, from 0 on, in parts of the highest."""
    rise = max(1, steps // 10)
    return min((step + 1) / rise, (steps - step) / max(1, steps - rise))


def read(options: argparse.Namespace) -> tuple[Tensor, Tensor, int]:
    """Returns sequences to train on, in the seed's order, held-out ones, and the size of their vocabulary."""
    if options.text is not None and options.text.suffix == ".npz":
        file = np.load(options.text)
        train, held_out = (torch.from_numpy(file[name].astype(np.int64)) for name in ("train", "held_out"))
        vocabulary = int(file["vocabulary"][0])
    else:
        text = texts.load_text(options.text, "cpu")
        train, held_out, vocabulary = text.train, text.held_out, texts.VOCABULARY
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(options.seed))
    length, whole = options.size.length, 2 * options.size.rows
    return train[order][:, :length], held_out[:whole, :length], vocabulary


def work(options: argparse.Namespace) -> None:
    """Runs all arms of one seed."""
    if options.device.type == "cuda":
        torch.cuda.set_device(options.device)
    train, held_out, vocabulary = read(options)
    options.size = Size(**{**vars(options.size), "vocabulary": vocabulary, "length": train.shape[1]})
    run_arms(options, lambda arm: run(arm, (train, held_out), options))


def run_arms(options: argparse.Namespace, measure: Callable[[str], Iterable[Row]]) -> None:
    """Runs one arm after the other, and writes the line of each as it ends."""
    latest, longest = options.deadline, 0.0
    for arm in options.arms:
        options.deadline, began = latest - longest, time.monotonic()
        identity = {"arm": arm, "seed": options.seed, "steps": options.steps}
        rows = guarded(identity, partial(measure, arm), options)
        longest = max(longest, time.monotonic() - began)
        lines = "".join(json.dumps(row | vars(options.size) | options.origin) + "\n" for row in rows)
        # Other seeds add to the same file: one unbuffered write keeps a line whole.
        with options.output.open("ab", buffering=0) as file:
            file.write(lines.encode())


def started(options: argparse.Namespace) -> list[Row]:
    """Runs the seeds at the same time, spread over the GPUs, and returns the lines that they added."""
    command = [sys.executable, __file__, "--steps", str(options.steps), "--until", str(options.until)]
    command += ["--origin", json.dumps(origin_of(str(options.device)))]
    command += ["--arms", *options.arms, *(["--tiny"] if options.tiny else [])]
    command += ["--text", str(options.text)] if options.text else []
    gpus = torch.cuda.device_count() if options.device.type == "cuda" else 0
    with tempfile.TemporaryDirectory() as folder:
        path = options.output or Path(folder, "rows.jsonl")
        path.touch()
        earlier, running = path.stat().st_size, []
        for index, seed in enumerate(options.seeds):
            device = f"cuda:{index % gpus}" if gpus else str(options.device)
            own = ["--seeds", str(seed), "--device", device, "--output", str(path)]
            running.append(subprocess.Popen([*command, *own], stdout=subprocess.DEVNULL))
        codes = [process.wait() for process in running]
        if any(codes):
            raise RuntimeError(f"Got exit codes {codes} of the seeds {options.seeds}; expected 0.")
        return [json.loads(line) for line in path.read_bytes()[earlier:].splitlines()]


def paired(rows: Sequence[Row], arm: str, reference: str, figure: str) -> list[float]:
    """Returns by how many percent an arm is above a reference, of every seed that both have."""
    found = {(row["arm"], row["seed"]): row[figure] for row in rows if figure in row}
    seeds = sorted({seed for name, seed in found if name == arm and (reference, seed) in found})
    return [100 * (found[arm, seed] / found[reference, seed] - 1) for seed in seeds]


def with_error(values: Sequence[float]) -> str:
    """Returns the mean, and its standard error where there are several values."""
    mean = f"{statistics.fmean(values):+.2f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values) / math.sqrt(len(values)):.2f}"


def print_table(rows: Sequence[Row]) -> None:
    print(
        f"| arm | held-out loss | mean of the last {LAST} | s | "
        + " | ".join(f"% above {r}" for r in REFERENCES)
        + " |"
    )
    print("|" + "---|" * (4 + len(REFERENCES)))
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == arm and "held_out" in row]
        if not own:
            continue
        means = [statistics.fmean(row[name] for row in own) for name in ("held_out", "last", "seconds")]
        differences = [paired(rows, arm, reference, "held_out") for reference in REFERENCES]
        cells = [arm, f"{means[0]:.4f}", f"{means[1]:.4f}", f"{means[2]:.1f}"]
        print("|", " | ".join([*cells, *(with_error(values) if values else "-" for values in differences)]), "|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--text", type=Path, help="token ids as `eval.bakeoff.forks text` writes them; default: Python's"
    )
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--minutes", type=float, default=0.8, help="begin no arm that would end later (default 0.8)")
    parser.add_argument("--tiny", action="store_true", help="a model that a CPU trains too")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, help="JSONL file; lines are added")
    # What the process of one seed is given: when --minutes are over, by the clock, and what is added to its lines.
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--origin", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.device, options.seed = torch.device(options.device), options.seeds[0]
    options.size = moe_speed.TINY if options.tiny else SIZE
    if options.origin is not None:
        options.deadline = time.monotonic() + options.until - time.time()
        work(options)
        return
    options.until = time.time() + 60 * options.minutes
    rows = started(options)
    for row in rows:
        if "error" in row:
            print(json.dumps(row))
    print_table(rows)


if __name__ == "__main__":
    main()
