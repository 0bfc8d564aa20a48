"""Single layers of a large model forced to FP4: the measured weight divergence beside the estimated one.

    python benchmarks/truth_at_size.py measure --model tiny --device cpu --output runs/truth.jsonl
    python benchmarks/truth_at_size.py measure --model 1.1B --steps 100 --device cuda --state runs/truth.pt \
        --minutes 9 --output runs/truth_1.1B.jsonl
    python benchmarks/truth_at_size.py report runs/truth_1.1B.jsonl

A Llama with random weights, trained for `--steps` steps of AdamW on text (by default the source of Python's standard
library), is frozen. The estimate is the default one, from each micro-batch by itself. The truth quantizes one layer
after the other, with `--draws` draws of stochastic rounding on each micro-batch. Layers are taken in a random order,
so that a run that its time ends has a fair sample; the same command goes on with the layers that the output lacks.
`--state` keeps the trained model, so that it goes on from the same weights; lines of other weights are refused.
`format_fidelity.py` measures all formats and families, in small models.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from estimate_fidelity import unquantized
from scipy.stats import spearmanr
from shared import small_models, texts
from shared.json_lines import drop_unfinished_line, read_lines
from shared.origin import origin_of
from transformers import LlamaConfig, LlamaForCausalLM

from snip_hf import SnipConfig, estimate_divergence
from snip_hf.estimation.ground_truth import measure_assignment
from snip_hf.estimation.pending import LAYER
from snip_hf.numerics.formats import UNQUANTIZED
from snip_hf.numerics.gemms import GEMMS

Array = npt.NDArray[np.float64]
FORMAT = "fp4"
# Name -> hidden size, inner size, blocks, heads, heads of keys, learning rate.
MODELS = {
    "tiny": (128, 384, 6, 4, 2, 2e-3),
    "124M": (896, 2432, 12, 14, 14, 1e-3),
    "1.1B": (2048, 5632, 22, 32, 4, 4e-4),
}
# So many layers are measured, and written, at a time.
TOGETHER = 4
RESAMPLES = 1000


def main() -> None:
    options = parse()
    if options.what == "measure":
        measure(options)
    else:
        print(report(read_lines(options.lines)))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="what", required=True)
    measured = parts.add_parser("measure", help="add lines to the output")
    texts.add_text_arguments(measured)
    measured.add_argument("--model", choices=MODELS, default="tiny")
    measured.add_argument("--steps", type=int, default=100, help="of training before (default 100)")
    measured.add_argument("--layers", type=int, default=42, help="to measure (default 42)")
    measured.add_argument("--rows", type=int, default=4, help="sequences of 256 tokens in a micro-batch (default 4)")
    measured.add_argument("--batches", type=int, default=2, help="micro-batches (default 2)")
    measured.add_argument("--draws", type=int, default=2, help="of stochastic rounding (default 2)")
    measured.add_argument("--state", type=Path, help="file that keeps the trained model and its optimizer")
    measured.add_argument("--minutes", type=float, default=9.0, help="begin no further layers after this time")
    measured.add_argument("--seed", type=int, default=0)
    measured.add_argument("--output", type=Path, required=True)
    parts.add_parser("report", help="print what the lines say").add_argument("lines", type=Path)
    return parser.parse_args()


# ------------------------------------------------------------------------------------------------ measurements


def measure(options: argparse.Namespace) -> None:
    """Adds a line per layer to the output, until all or the time is done."""
    deadline = time.monotonic() + 60 * options.minutes
    torch.set_num_threads(1)
    text = texts.load_text(options.text, options.device)
    state = trained(options, text)
    seen = -(-state.step * state.rows // options.rows)
    batches = [text.batch(seen + index, options.rows) for index in range(options.batches)]
    config = SnipConfig(start_format=UNQUANTIZED.name, seed=options.seed)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    drop_unfinished_line(options.output)
    done = read_lines(options.output)
    with unquantized(state.model, config) as layers:
        estimates = [estimated(state, batch, replace(config, seed=config.seed + i)) for i, batch in enumerate(batches)]
        where = {
            **{name: getattr(options, name) for name in ("model", "steps", "rows", "batches", "draws", "seed")},
            "loss": float(f"{float(state.model(**batches[0]).loss.detach()):.4g}"),
        }
        check(done, where, options.output)
        chosen = random.Random(options.seed).sample(layers, min(options.layers, len(layers)))
        left = [layer for layer in chosen if layer not in {line["layer"] for line in done}]
        print(f"{len(left)} of {len(chosen)} layers to do", flush=True)
        source = origin_of(options.device)
        for start in range(0, len(left), TOGETHER):
            if time.monotonic() > deadline:
                print("The time is over; the same command goes on.")
                return
            part = left[start : start + TOGETHER]
            truths = measured(state, batches, part, config, options.draws)
            with options.output.open("a", encoding="utf-8") as stream:
                for layer, truth in zip(part, truths, strict=True):
                    line = {"layer": layer, "truth": truth, "estimate": [table[layer] for table in estimates]}
                    stream.write(json.dumps({**line, **where, **source}) + "\n")


def trained(options: argparse.Namespace, text: texts.Text) -> small_models.State:
    """Returns the model after its training, from the file that keeps it if that is there."""
    hidden, inner, blocks, heads, key_heads, rate = MODELS[options.model]
    config = LlamaConfig(
        vocab_size=texts.VOCABULARY,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=texts.LENGTH,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(options.seed)
    with torch.device(options.device):
        model = LlamaForCausalLM(config).train()
    optimizers = small_models.optimizers("adamw", model)
    for group in optimizers[0].param_groups:
        group["lr"] = rate
    state = small_models.State("llama", "adamw", model, optimizers, rows=8)
    if options.state and options.state.exists():
        kept = torch.load(options.state, map_location=options.device, weights_only=True)
        model.load_state_dict(kept["model"])
        optimizers[0].load_state_dict(kept["optimizer"])
        state.step = kept["step"]
        return state
    state.train(text, options.steps)
    if options.state:
        kept = {"model": model.state_dict(), "optimizer": optimizers[0].state_dict(), "step": state.step}
        torch.save(kept, options.state)
    return state


def check(done: Sequence[dict[str, Any]], where: dict[str, Any], output: Path) -> None:
    """Raises SystemExit if the output has lines of another model, state or setting."""
    for line in done:
        other = {name: line[name] for name in where if line[name] != where[name]}
        if other:
            raise SystemExit(
                f"{output} has lines of another measurement: {other}; this one has "
                f"{ {name: where[name] for name in other} }. Give another --output, or the --state of those lines."
            )


def estimated(state: small_models.State, batch: dict[str, torch.Tensor], config: SnipConfig) -> dict[str, float]:
    """Returns layer -> estimated weight divergence in FP4."""
    table = estimate_divergence(state.model, batch, state.optimizer, config)
    return {row.layer: row.weight_divergence for row in table.rows if (row.gemm, row.format) == (LAYER, FORMAT)}


def measured(
    state: small_models.State,
    batches: Sequence[dict[str, torch.Tensor]],
    layers: Sequence[str],
    config: SnipConfig,
    draws: int,
) -> list[list[list[float]]]:
    """Returns the measured weight divergence of each layer, micro-batch and draw."""
    assignments = [{layer: dict.fromkeys(GEMMS, FORMAT)} for layer in layers]
    found = [
        [
            measure_assignment(
                state.model, batch, state.optimizer, assignments, replace(config, seed=1000 + draw), draws=1
            )
            for draw in range(draws)
        ]
        for batch in batches
    ]
    return [[[draw[index][1] for draw in of_batch] for of_batch in found] for index in range(len(layers))]


# ------------------------------------------------------------------------------------------------ report


def report(lines: Sequence[dict[str, Any]]) -> str:
    """Returns a table: rank correlation and errors over layers, with 95% intervals of a bootstrap over layers."""
    if not lines:
        return "No lines yet."
    squares = np.square(np.array([line["truth"] for line in lines])).mean(2)  # (layers, batches)
    truth, halves = np.sqrt(squares.mean(1)), np.sqrt(squares)
    single = np.array([line["estimate"] for line in lines])
    whole = np.sqrt(np.square(single).mean(1))
    first = lines[0]
    rows = [
        f"{first['model']}, step {first['steps']}, loss {first['loss']}: {len(lines)} layers in FP4, "
        f"{first['batches']} micro-batches of {first['rows']} x {texts.LENGTH} tokens, {first['draws']} draws; "
        f"{first['machine']}, commit {first['commit']}. Median and interval of 95% over layers.\n",
        "| figure | estimate of all micro-batches | of the first, as a refresh has it |",
        "|---|---|---|",
    ]
    for name, figure in FIGURES.items():
        rows.append(
            f"| {name} | {with_interval(figure, whole, truth)} | {with_interval(figure, single[:, 0], truth)} |"
        )
    if halves.shape[1] > 1:
        between = with_interval(rank, halves[:, 0], halves[:, 1])
        rows.append(f"| rank correlation of the truth of two micro-batches | {between} | |")
    return "\n".join(rows)


def rank(estimate: Array, truth: Array) -> float:
    return float(spearmanr(estimate, truth)[0])


def with_interval(figure: Callable[[Array, Array], float], estimate: Array, truth: Array) -> str:
    """Returns a figure with the 2.5% and 97.5% quantiles of a bootstrap over layers."""
    draw = np.random.default_rng(0)
    places = draw.integers(0, len(truth), (RESAMPLES, len(truth)))
    with np.errstate(invalid="ignore", divide="ignore"):
        found = [figure(estimate[place], truth[place]) for place in places]
    low, high = np.nanquantile(found, [0.025, 0.975])
    return f"{figure(estimate, truth):.3f} ({low:.3f} to {high:.3f})"


FIGURES: dict[str, Callable[[Array, Array], float]] = {
    "rank correlation (Spearman)": rank,
    "median error": lambda estimate, truth: float(np.median(np.abs(estimate / truth - 1))),
    "90th percentile of the error": lambda estimate, truth: float(np.quantile(np.abs(estimate / truth - 1), 0.9)),
    "median of estimate / truth": lambda estimate, truth: float(np.median(estimate / truth)),
}


if __name__ == "__main__":
    main()
