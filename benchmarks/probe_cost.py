"""What a refresh costs, part by part, in ordinary training steps and in memory, against the model's size.

    python benchmarks/probe_cost.py --sizes 1M 3M 10M 30M 100M
    python benchmarks/probe_cost.py --device cuda --sizes 1B --compile --output runs/probe-cost.jsonl
    python benchmarks/probe_cost.py --formats fp4,fp8 mxfp4,nvfp4,fp4,mxfp8,fp8 --sizes 3M --refreshes 5
    python benchmarks/probe_cost.py --device cuda --sizes 124M 1B --compile --resume --output runs/refresh-steps.jsonl
    python benchmarks/probe_cost.py --device cuda --sizes 1B --compile --loss-estimators saliency token-fisher
    python benchmarks/refresh_steps.py runs/refresh-steps.jsonl

An ordinary step is forward, backward and AdamW of a Llama that snip-hf has not touched, on random tokens (times do not
depend on them): on CUDA under BF16 autocast over FP32 weights with fused AdamW, in FP32 on a CPU. Then `SnipController`
refreshes: probe (passes and sums), program, solver beside `--delay` further steps, application. "refresh" is all that
training waits for; "waited" is the solver's part of it. Sizes are in `SIZES`; 1B is TinyLlama-1.1B's shape. With
several `--formats` or `--loss-estimators` the refreshes take turns, so that a change of the machine's load meets all
alike; "/ first" is the time of passes and sums over that of the first ones: on a CPU the processor's, which other
programs hardly change.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import torch
from shared.json_lines import drop_unfinished_line, read_lines
from shared.origin import origin_of
from transformers import LlamaConfig, LlamaForCausalLM

from snip_hf import SnipConfig
from snip_hf.config import LossEstimator
from snip_hf.estimation import divergence
from snip_hf.training import refresh as refresh_module
from snip_hf.training import step_probe
from snip_hf.training.controller import SnipController

HEAD = 64
# Name -> hidden size, inner size, blocks, vocabulary, heads of keys for one of queries, sequences and their length.
SIZES = {
    name: (hidden, 3 * hidden, blocks, 2048, 0.5, 8, 256)
    for name, hidden, blocks in (("1M", 128, 3), ("3M", 256, 3), ("10M", 384, 5), ("30M", 512, 9), ("100M", 768, 14))
} | {"124M": (896, 2432, 12, 8192, 1, 32, 512), "1B": (2048, 5632, 22, 32000, 0.125, 8, 2048)}
# Of the parts of a refresh, what each one took is kept.
STEPS = ("passes", "sums", "program", "rest", "solver", "waited", "apply", "refresh")
# JSON field -> head of its column and format of its figures.
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
    "predicted_mib": ("probe, MiB predicted", "{:.0f}"),
    "step_peak_mib": ("peak of a step, MiB", "{:.0f}"),
    "refresh_peak_mib": ("of a refresh, MiB", "{:.0f}"),
}


def parser() -> argparse.ArgumentParser:
    """The command line; with its defaults `measure` is called by other benchmarks too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["1M", "3M", "10M", "30M"], metavar="SIZE")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, help="sequences per step (default 8)")
    parser.add_argument("--length", type=int, help="tokens of a sequence (default 256; 1B 2048)")
    parser.add_argument("--probe-batch-tokens", type=int, help="as in SnipConfig; 0 for all (default as there)")
    parser.add_argument("--probe-tokens", type=int, help="as in SnipConfig; 0 for all (default as there)")
    parser.add_argument("--formats", nargs="+", default=[",".join(SnipConfig().formats)], help="lists to compare")
    losses, loss = get_args(LossEstimator), SnipConfig().loss_estimator
    parser.add_argument("--loss-estimators", nargs="+", choices=losses, default=[loss], help="each with each list")
    parser.add_argument("--steps", type=int, default=5, help="ordinary steps to time, after two more (default 5)")
    parser.add_argument("--refreshes", type=int, default=2, help="refreshes to time, after one more (default 2)")
    parser.add_argument("--delay", type=int, default=10, help="apply_delay: steps beside the solver (default 10)")
    parser.add_argument("--compile", action="store_true", help="compile the ordinary step (default: eager)")
    parser.add_argument("--output", type=Path, help="JSONL file; lines are added")
    parser.add_argument("--resume", action="store_true", help="leave out the sizes that the output holds")
    return parser


def main() -> None:
    """Print where the figures come from, then per size a line of JSON, and a table of all."""
    options = parser().parse_args()
    source = origin_of(options.device)
    print(", ".join(f"{name} {value}" for name, value in source.items()))
    found, done = [], set()
    if options.resume and options.output:
        drop_unfinished_line(options.output)
        done = {line["size"] for line in read_lines(options.output) if line["machine"] == source["machine"]}
    for size in (size for size in options.sizes if size not in done):
        for figures in measure(size, options):
            found.append(figures)
            print(json.dumps(figures), flush=True)
            if options.output:
                with options.output.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps({**figures, **source}) + "\n")
        gc.collect()  # the model, which holds itself in circles
    print(f"\n| {' | '.join(head for head, _ in COLUMNS.values())} |\n|{'---|' * len(COLUMNS)}")
    for figures in found:
        print(f"| {' | '.join(cell(figures[name], form) for name, (_, form) in COLUMNS.items())} |")


def cell(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)


def measure(size: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a size's figures per formats and loss divergence: medians in seconds, MiB, counts, and the settings."""
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
    refreshes = [
        [refresh(model, optimizer, batch, config) for config in configs] for _ in range(options.refreshes + 1)
    ][1:]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    first = None
    for config, parts in zip(configs, zip(*refreshes, strict=True), strict=True):
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
            "probes": [round(part["probe"], 4) for part in parts],
            "each": {name: [round(part[name], 6) for part in parts] for name in STEPS},
            "refresh_steps": figures["refresh"] / step,
            "refreshes": options.refreshes,
            "rows": rows,
            "length": length,
            "compiled": options.compile,
            **{name: getattr(config, name) for name in ("probe_batch_tokens", "probe_tokens", "apply_delay")},
        }


def settings(options: argparse.Namespace, formats: str, loss_estimator: str) -> SnipConfig:
    """Returns the configuration of a run whose first step refreshes."""
    given = {name: getattr(options, name) for name in ("probe_batch_tokens", "probe_tokens")}
    return SnipConfig(
        start_format="bf16",
        first_refresh=1,
        refresh_every=1000,
        apply_delay=options.delay,
        # As in the figures of docs/fidelity.md; by GEMM the program has three times the groups.
        granularity="layer",
        solver="highs",
        formats=tuple(formats.split(",")),
        loss_estimator=loss_estimator,
        **{name: value or None for name, value in given.items() if value is not None},
    )


def refresh(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any], config: SnipConfig
) -> dict[str, Any]:
    """Refreshes once, under a controller of its own, and returns seconds per part, and MiB."""
    device = batch["labels"].device
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        planner = SnipController(model, optimizer, config, output_dir=folder)

        def step(number: int) -> tuple[float, float]:
            """Does one step, and returns the seconds of what the controller does before and after the optimizer's."""
            planner.capture(batch)
            backward(model, batch)
            settle(device)
            before = clocked(device, lambda: planner.before_optimizer_step(number))
            optimizer.step()
            optimizer.zero_grad()
            return before, clocked(device, lambda: planner.after_step(number))

        with timing(seconds, device):
            before, after = step(1)
        peak = peak_mib(device)
        for number in range(2, 2 + config.apply_delay):
            after = step(number)[1]
        planner.close()
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
        "predicted_mib": line["memory_mib"]["predicted"],
        "refresh_peak_mib": peak,
    }


@contextmanager
def timing(seconds: dict[str, float], device: torch.device) -> Iterator[None]:
    """Notes the seconds of the parts of a refresh, by name."""
    places = {
        "passes": (divergence, "run_probe"),
        "divergences": (step_probe, "divergences_at"),
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
    device = batch["labels"].device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        loss = model(**batch).loss
    loss.backward()


def clocked(device: torch.device, function: Callable[[], Any]) -> float:
    """Returns the seconds that a call takes, what it leaves for the device included."""
    wait(device)
    began = time.perf_counter()
    function()
    wait(device)
    return time.perf_counter() - began


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def settle(device: torch.device) -> None:
    """Waits for the device, and forgets the peak of its memory until now."""
    wait(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_mib(device: torch.device) -> float | None:
    return torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None


if __name__ == "__main__":
    main()
