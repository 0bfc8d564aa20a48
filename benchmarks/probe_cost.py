"""The cost of a refresh, part by part, in seconds, in ordinary training steps and in memory.

    python benchmarks/probe_cost.py --sizes 1M 3M 10M 30M 100M
    python benchmarks/probe_cost.py --device cuda --sizes 124M 1B --compile --resume --output runs/probe_cost.jsonl
    python benchmarks/probe_cost.py --formats fp4,fp8 mxfp4,nvfp4,fp4,mxfp8,fp8 --sizes 3M --refreshes 5

An ordinary step is forward, backward and AdamW of an unconverted Llama on random tokens: under BF16 autocast over FP32
weights on CUDA, in FP32 on a CPU. A refresh consists of

    passes   the passes of the probe at moved weights
    sums     divergences of layers, GEMMs and formats
    program  the integer program
    rest     checks, records, start of the solver
    waited   the part of the solver that training waits for; it works beside the `--delay` steps that follow the probe
    apply    the application of the plan

"refresh" is the sum of these. The solver's own time is in no sum. With several `--formats` or `--loss-estimators` their
refreshes alternate, so that a change of the machine's load affects all of them; "/ first" is the time of passes and
sums relative to the first combination (processor time on a CPU, which other programs hardly change). A second table has
the median (least to most) over refreshes, in seconds, steps and shares of the refresh.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import torch
from shared.lines import Line, append_line, drop_unfinished_line, origin_of, read_lines, table
from shared.timing import autocast, clocked, reset_peak, wait
from transformers import LlamaConfig, LlamaForCausalLM

from snip_hf import SnipConfig
from snip_hf.config import LossEstimator
from snip_hf.estimation import divergence
from snip_hf.training import refresh as refresh_module
from snip_hf.training.controller import SnipController

HEAD = 64
# Name -> hidden size, inner size, blocks, vocabulary, key heads per query head, sequences, tokens per sequence.
SIZES = {
    name: (hidden, 3 * hidden, blocks, 2048, 0.5, 8, 256)
    for name, hidden, blocks in (("1M", 128, 3), ("3M", 256, 3), ("10M", 384, 5), ("30M", 512, 9), ("100M", 768, 14))
} | {"124M": (896, 2432, 12, 8192, 1, 32, 512), "1B": (2048, 5632, 22, 32000, 0.125, 8, 2048)}
# Part of a refresh -> its title in the second table.
PARTS = {
    "passes": "1. two passes at moved weights",
    "sums": "2. sums: divergences of layers, GEMMs, formats",
    "program": "3. program",
    "rest": "checks, records, start of the solver",
    "solver": "4. solver, beside training",
    "waited": "   of it, training waits",
    "apply": "5. plan applied",
    "refresh": "**everything that training waits for**",
}
COLUMNS = {
    "size": ("model", "{}"),
    "formats": ("formats", "{}"),
    "loss_estimator": ("loss divergence", "{}"),
    "parameters": ("parameters", "{:,}"),
    "linears": ("linears", "{}"),
    "step": ("step, s", "{:.3g}"),
    "passes": ("passes, s", "{:.3g}"),
    "sums": ("sums, s", "{:.3g}"),
    "of_first": ("/ first", "{:.2f}"),
    "program": ("program, s", "{:.2g}"),
    "rest": ("rest, s", "{:.2g}"),
    "waited": ("waited, s", "{:.2g}"),
    "apply": ("apply, s", "{:.2g}"),
    "refresh": ("refresh, s", "{:.3g}"),
    "refresh_steps": ("in steps", "{:.2f}"),
    "solver": ("solver, s", "{:.2g}"),
    "weights_mib": ("weights, MiB", "{:.0f}"),
    "step_peak_mib": ("peak of a step, MiB", "{:.0f}"),
    "refresh_peak_mib": ("of a refresh, MiB", "{:.0f}"),
}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["1M", "3M", "10M", "30M"], metavar="SIZE")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, help="sequences per step (default 8; 124M 32)")
    parser.add_argument("--length", type=int, help="tokens per sequence (default 256; 124M 512; 1B 2048)")
    parser.add_argument("--probe-batch-tokens", type=int, help="as in SnipConfig; 0 for all (default as there)")
    parser.add_argument("--probe-tokens", type=int, help="as in SnipConfig; 0 for all (default as there)")
    parser.add_argument("--formats", nargs="+", default=[",".join(SnipConfig().formats)], help="lists to compare")
    losses, loss = get_args(LossEstimator), SnipConfig().loss_estimator
    parser.add_argument("--loss-estimators", nargs="+", choices=losses, default=[loss], help="each with each list")
    parser.add_argument("--steps", type=int, default=5, help="ordinary steps to time, after two others (default 5)")
    parser.add_argument("--refreshes", type=int, default=2, help="refreshes to time, after one other (default 2)")
    parser.add_argument("--delay", type=int, default=10, help="apply_delay: steps beside the solver (default 10)")
    parser.add_argument("--compile", action="store_true", help="compile the ordinary step (default: eager)")
    parser.add_argument("--output", type=Path, help="JSONL file; lines are added")
    parser.add_argument("--resume", action="store_true", help="skip the sizes that the output has for this machine")
    return parser


def main() -> None:
    """Prints a line per size and combination, then two tables."""
    options = parser().parse_args()
    source = origin_of(options.device)
    found, done = [], set()
    if options.resume and options.output:
        drop_unfinished_line(options.output)
        done = {line["size"] for line in read_lines(options.output) if line["machine"] == source["machine"]}
    for size in (size for size in options.sizes if size not in done):
        for figures in measure(size, options):
            found.append({**figures, **source})
            print(json.dumps(figures), flush=True)
            append_line(options.output, found[-1])
        gc.collect()  # Reference cycles keep the model alive.
    if found:
        print(f"\n{table(COLUMNS, found)}\n\n{by_part(found)}")


def by_part(lines: Sequence[Line]) -> str:
    """Returns a table with a row per part of a refresh and three columns per line."""
    heads, rows = ["step"], {name: [title] for name, title in PARTS.items()}
    for line in lines:
        where = f"{line['size']}, {line['rows']} x {line['length']} tokens, {line['machine']}, {line['loss_estimator']}"
        heads += [f"{where}: s", "in training steps", "of the refresh"]
        whole = statistics.median(line["each"]["refresh"])
        for name, cells in rows.items():
            values = line["each"][name]
            median = statistics.median(values)
            cells += [f"{median:.3g} ({min(values):.3g} to {max(values):.3g})", f"{median / line['step']:.3g}"]
            cells.append("" if name == "solver" else f"{median / whole:.1%}")
    cells = [heads, ["---"] * len(heads), *rows.values()]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def measure(size: str, options: argparse.Namespace) -> Iterator[Line]:
    """Yields the figures of a size per formats and loss divergence: medians in seconds, MiB, counts, settings."""
    hidden, inner, blocks, vocabulary, key_heads, rows, length = SIZES[size]
    rows, length = options.rows or rows, options.length or length
    heads = {"num_attention_heads": hidden // HEAD, "num_key_value_heads": int(hidden // HEAD * key_heads)}
    shape = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": blocks, **heads}
    torch.manual_seed(0)
    device = torch.device(options.device)
    with device:
        model = LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, max_position_embeddings=length, **shape)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    batch = {"input_ids": torch.randint(vocabulary, (rows, length), device=device)}
    batch["labels"] = batch["input_ids"]

    run = torch.compile(model) if options.compile else model
    seconds = []
    for index in range(options.steps + 2):
        if index == 2:  # compiled and warm
            settle(device)
        seconds.append(clocked(device, lambda: train(run, optimizer, batch)))
    step, step_peak = statistics.median(seconds[2:]), peak_mib(device)

    configs = [settings(options, formats, loss) for formats in options.formats for loss in options.loss_estimators]
    refreshes = [[refresh(model, optimizer, batch, config) for config in configs] for _ in range(options.refreshes + 1)]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    first = None
    for config, parts in zip(configs, zip(*refreshes[1:], strict=True), strict=True):
        figures = {
            name: statistics.median(part[name] for part in parts) for name in parts[0] if parts[0][name] is not None
        }
        first = first or figures["probe"]
        yield {
            "size": size,
            "formats": ",".join(config.formats),
            "loss_estimator": config.loss_estimator,
            "parameters": parameters,
            "linears": 7 * blocks,
            "weights_mib": 4 * parameters / 2**20,
            "step": step,
            "step_peak_mib": step_peak,
            "refresh_peak_mib": None,
            **figures,
            "of_first": figures["probe"] / first,
            "each": {name: [round(part[name], 6) for part in parts] for name in PARTS},
            "refresh_steps": figures["refresh"] / step,
            "refreshes": options.refreshes,
            "rows": rows,
            "length": length,
            "compiled": options.compile,
            **{name: getattr(config, name) for name in ("probe_batch_tokens", "probe_tokens", "apply_delay")},
        }


def settings(options: argparse.Namespace, formats: str, loss_estimator: str) -> SnipConfig:
    """Returns the configuration of a run that refreshes at its first step."""
    given = {name: getattr(options, name) for name in ("probe_batch_tokens", "probe_tokens")}
    return SnipConfig(
        target_fp4_fraction=0.75,
        start_format="bf16",
        first_refresh=1,
        refresh_every=1000,
        apply_delay=options.delay,
        # The figures of docs/fidelity.md are by layer; by GEMM the program has three times as many groups.
        granularity="layer",
        solver="highs",
        formats=tuple(formats.split(",")),
        loss_estimator=loss_estimator,
        **{name: value or None for name, value in given.items() if value is not None},
    )


def refresh(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any], config: SnipConfig
) -> dict[str, Any]:
    """Refreshes once, under a new controller, and returns seconds per part, and MiB."""
    device = batch["labels"].device
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        controller = SnipController(model, optimizer, config, output_dir=folder)

        def step(number: int) -> tuple[float, float]:
            """Does one step; returns the controller's seconds before and after the optimizer's step."""
            controller.capture(batch)
            backward(model, batch)
            settle(device)
            before = clocked(device, lambda: controller.before_optimizer_step(number))
            optimizer.step()
            optimizer.zero_grad()
            return before, clocked(device, lambda: controller.after_step(number))

        with timing(seconds, device):
            before, after = step(1)
        peak = peak_mib(device)
        for number in range(2, 2 + config.apply_delay):
            after = step(number)[1]
        controller.close()
        lines = [json.loads(line) for line in Path(folder, "snip", "history.jsonl").read_text().splitlines()]
    [line] = [line for line in lines if line["event"] == "refresh"]
    assert line["reason"] is None, lines
    waited = line["seconds"]["waited"]
    return {
        "probe": seconds["divergences" if device.type == "cuda" else "divergences of the processor"],
        "passes": seconds["passes"],
        "sums": seconds["divergences"] - seconds["passes"],
        "program": seconds["program"],
        "rest": before - seconds["divergences"] - seconds["program"],
        "solver": line["seconds"]["solver"],
        "waited": waited,
        "apply": after - waited,
        "refresh": before + after,
        "refresh_peak_mib": peak,
    }


@contextmanager
def timing(seconds: dict[str, float], device: torch.device) -> Iterator[None]:
    """Records the seconds of the parts of a refresh, by name."""
    places = {
        "passes": (divergence, "run_probe"),
        "divergences": (refresh_module, "divergences_at"),
        "program": (refresh_module, "problem"),
    }

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = []
            began = time.process_time()
            seconds[name] = clocked(device, lambda: result.append(function(*args, **kwargs)))
            seconds[f"{name} of the processor"] = time.process_time() - began
            return result[0]

        return call

    with ExitStack() as stack:
        for name, (module, attribute) in places.items():
            stack.enter_context(patch.object(module, attribute, timed(name, getattr(module, attribute))))
        yield


def train(model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, Any]) -> None:
    """Does one ordinary step."""
    backward(model, batch)
    optimizer.step()
    optimizer.zero_grad()


def backward(model: Any, batch: dict[str, Any]) -> None:
    with autocast(batch["labels"].device):
        loss = model(**batch).loss
    loss.backward()


def settle(device: torch.device) -> None:
    """Waits for the device and resets its peak memory."""
    wait(device)
    reset_peak(device)


def peak_mib(device: torch.device) -> float | None:
    return torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None


if __name__ == "__main__":
    main()
