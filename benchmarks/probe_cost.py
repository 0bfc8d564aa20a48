"""What does a refresh cost, in training steps and in memory, against the model's size?

    python benchmarks/probe_cost.py --sizes 1M 3M 10M 30M 100M
    python benchmarks/probe_cost.py --device cuda --sizes 1B --output runs/probe-cost.jsonl

A Llama of each size is trained through `SnipController` on random tokens (times do not depend on them), all GEMMs in
FP8 until the first refresh: in FP32 on a CPU, under BF16 autocast with FP32 weights on CUDA. A probe's passes are in
FP32 on both. One forward-backward pass in FP8 and an AdamW step make a "step"; its time contains the emulation of FP8.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import cases
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from snip_hf import SnipConfig
from snip_hf.controller import SnipController

VOCABULARY, LENGTH, HEAD = 2048, 256, 64
# Name -> hidden size, blocks. Without biases and norms: blocks * 12 * hidden^2 + 2 * VOCABULARY * hidden parameters.
SIZES = {"1M": (128, 3), "3M": (256, 3), "10M": (384, 5), "30M": (512, 9), "100M": (768, 14), "1B": (2048, 20)}
# JSON field -> head of its column and format of its figures.
COLUMNS = {
    "size": ("model", "{}"),
    "parameters": ("parameters", "{:,}"),
    "linears": ("linears", "{}"),
    "step": ("step, s", "{:.3g}"),
    "probe": ("probe, s", "{:.3g}"),
    "probe_steps": ("in steps", "{:.2f}"),
    "check": ("drift check, s", "{:.3g}"),
    "check_steps": ("in steps", "{:.2f}"),
    "solver": ("solver, s", "{:.2g}"),
    "weights_mib": ("weights, MiB", "{:.0f}"),
    "predicted_mib": ("probe, MiB predicted", "{:.0f}"),
    "measured_mib": ("peak, MiB measured", "{:.0f}"),
}


def main() -> None:
    """Print where the figures come from and a row per size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["1M", "3M", "10M", "30M"], metavar="SIZE")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=8, help=f"sequences of {LENGTH} tokens per step (default 8)")
    parser.add_argument("--steps", type=int, default=3, help="ordinary steps to time, after one more (default 3)")
    parser.add_argument("--refreshes", type=int, default=2, help="refreshes and checks to time (default 2 of each)")
    parser.add_argument("--output", type=Path, help="JSONL file; lines are added")
    options = parser.parse_args()
    source = cases.origin(options.device)
    print(", ".join(f"{name} {value}" for name, value in source.items()))
    print(
        f"{options.rows} x {LENGTH} tokens per step, medians of {options.steps} steps and {options.refreshes} probes\n"
    )
    print(f"| {' | '.join(head for head, _ in COLUMNS.values())} |\n|{'---|' * len(COLUMNS)}")
    for size in options.sizes:
        figures = measure(size, options)
        print(f"| {' | '.join(cell(figures[name], form) for name, (_, form) in COLUMNS.items())} |", flush=True)
        if options.output:
            with options.output.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({**figures, "rows": options.rows, **source}) + "\n")
        gc.collect()  # the model, which holds itself in circles


def cell(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)


def measure(size: str, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of one size: seconds, MiB and counts."""
    hidden, blocks = SIZES[size]
    heads = {"num_attention_heads": hidden // HEAD, "num_key_value_heads": hidden // HEAD // 2}
    shape = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": blocks, **heads}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **shape))
    model.to(options.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = options.steps + 2
    # From there on a refresh at every other step, applied at once, and a check at those between; none comes early.
    config = SnipConfig(first_refresh=first, refresh_every=2, apply_delay=0, refresh_on_drift=0.0, drift_every=1)
    with tempfile.TemporaryDirectory() as folder:
        controller = SnipController(model, optimizer, config, output_dir=folder)
        steps = range(1, first + 2 * options.refreshes)
        seconds = [train(controller, optimizer, step, options.rows) for step in steps]
        lines = [json.loads(line) for line in Path(folder, "snip", "history.jsonl").read_text().splitlines()]
    assert all(line["reason"] is None for line in lines[1:]), lines
    refreshes = [line for line in lines if line["event"] == "refresh"]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    step = statistics.median(seconds[1 : first - 1])  # the first one warms up
    probe, solver = (statistics.median(line["seconds"][part] for line in refreshes) for part in ("probe", "solver"))
    check = statistics.median(line["seconds"] for line in lines if line["event"] == "drift")
    memory = {f"{kind}_mib": refreshes[0]["memory_mib"][kind] for kind in ("predicted", "measured")}
    counts = {"parameters": parameters, "linears": 7 * blocks, "weights_mib": 4 * parameters / 2**20}
    times = {"step": step, "probe": probe, "check": check, "solver": solver}
    return {"size": size, **counts, **times, "probe_steps": probe / step, "check_steps": check / step, **memory}


def train(controller: SnipController, optimizer: torch.optim.Optimizer, step: int, rows: int) -> float:
    """Does optimizer step `step` with what the controller does in it, and returns its seconds."""
    device = next(controller.model.parameters()).device
    ids = torch.randint(VOCABULARY, (rows, LENGTH), device=device)
    batch = {"input_ids": ids, "labels": ids}
    settle(device)
    began = time.perf_counter()
    controller.capture(batch)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        loss = controller.model(**batch).loss
    loss.backward()
    settle(device)  # the probe's clock and peak begin here
    controller.before_optimizer_step(step)
    optimizer.step()
    optimizer.zero_grad()
    controller.after_step(step)
    settle(device)
    return time.perf_counter() - began


def settle(device: torch.device) -> None:
    """Waits for the device, and forgets the peak of its memory until now."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)


if __name__ == "__main__":
    main()
