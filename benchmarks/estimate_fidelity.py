"""Compares SNIP's estimated divergences with measured truth, layer by layer, for any model, optimizer and formats.

    python benchmarks/estimate_fidelity.py --output runs/estimate_fidelity.jsonl
    python benchmarks/estimate_fidelity.py --family gemma3 --optimizer muon --steps 300 --formats mxfp4 nvfp4 fp8
    python benchmarks/estimate_fidelity.py --checkpoint FOLDER --text FILE --device cuda --layers 24 --batches 2

The model is either a small one (6 blocks of width 128), trained in FP32 for `--steps` steps, or a checkpoint's folder,
whose optimizer takes `--steps` steps to fill its state. The truth quantizes one layer at a time: its weight divergence
is the change of all next updates (`measure_divergence`), its loss divergence the rise of the loss on held-out text with
the forward GEMM quantized. Estimates use the settings of a refresh in training (1,024 tokens of the micro-batch). They
are:

    snip, snip-paper               the weight divergence of these policies
    absolute-error, relative-error rounding errors of the operands, which ignore the loss and the optimizer
    token-fisher, saliency         the loss divergence by these estimators; saliency is not on the scale of a rise

Both are root mean squares over the micro-batches. Prints, per divergence, format and estimate: Spearman's rank
correlation over layers with a 95% bootstrap interval; median and 90th percentile of |estimate / truth - 1|; quartiles
of estimate / truth. "halves" is the rank correlation between the truths of two halves of the micro-batches, a bound on
what an estimate of one half can reach for the other. The default run takes some 8 minutes on one core.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import spearmanr
from shared import small_models, texts
from shared.lines import Line, append_line, origin_of, table
from transformers import AutoModelForCausalLM, AutoTokenizer

from snip_hf import SnipConfig, estimate_divergence, formats
from snip_hf.estimation.ground_truth import measure_assignment
from snip_hf.layers.convert import convert_model
from snip_hf.layers.state import snip_linears

Array = npt.NDArray[np.float64]
# Estimate -> policy or loss estimator of its configuration, and column of the table.
WEIGHT_ESTIMATES = {
    "snip": ({"policy": "snip"}, "weight_divergence"),
    "snip-paper": ({"policy": "snip-paper", "granularity": "layer"}, "weight_divergence"),
    "absolute-error": ({"policy": "snip"}, "absolute_error"),
    "relative-error": ({"policy": "snip"}, "relative_error"),
}
LOSS_ESTIMATES = {
    "token-fisher": ({"loss_estimator": "token-fisher"}, "loss_divergence"),
    "saliency": ({"loss_estimator": "saliency"}, "loss_divergence"),
    "snip-paper": ({"policy": "snip-paper", "granularity": "layer"}, "loss_divergence"),
    "absolute-error": ({}, "absolute_error"),
}
# Estimates whose ranks alone are comparable with a truth.
UNSCALED = ("absolute-error", "relative-error", "saliency")
GEMMS = ("forward", "grad_input", "grad_weight")
RESAMPLES = 200
COLUMNS = {
    "divergence": ("divergence", "{}"),
    "format": ("format", "{}"),
    "estimate": ("estimate", "{}"),
    "spearman": ("Spearman", "{:.3f}"),
    "interval": ("95% interval", "{}"),
    "halves": ("halves", "{:.3f}"),
    "median_error": ("median error", "{:.3f}"),
    "error_90": ("90%", "{:.3f}"),
    "ratio": ("estimate / truth, quartiles", "{}"),
}


def main() -> None:
    """Measures, prints the table and writes a line per row."""
    options = parse()
    model, optimizer, text = training_state(options)
    config = SnipConfig(formats=tuple(options.formats), start_format="bf16", seed=options.seed)
    convert_model(model, config)
    layers = chosen_layers(list(snip_linears(model)), options.layers, options.seed)
    batches = [text.batch(options.steps + index, options.rows) for index in range(options.batches)]
    held_out = [text.batch(index, options.rows, held_out=True) for index in range(options.held_out)]
    subject = {"model": str(options.checkpoint or options.family), "optimizer": options.optimizer}
    rows: list[Line] = []
    for fmt in config.formats:
        found = weight_rows(model, optimizer, batches, layers, config, fmt, options.draws)
        found += loss_rows(model, optimizer, batches, held_out, layers, config, fmt)
        for row in found:
            append_line(options.output, {**subject, "steps": options.steps, **row, **origin_of(options.device)})
        rows += found
    print(table(COLUMNS, rows))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=small_models.FAMILIES, default="llama", help="of the small model")
    parser.add_argument("--checkpoint", type=Path, help="folder of a saved model, in place of a small one")
    parser.add_argument("--optimizer", choices=small_models.OPTIMIZERS, default="adamw")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps before the probe (default 200)")
    parser.add_argument("--formats", nargs="+", choices=formats, default=["fp4", "fp8"], metavar="FORMAT")
    parser.add_argument("--layers", type=int, help="measure this many random layers (default all)")
    parser.add_argument("--batches", type=int, default=2, help="micro-batches (default 2)")
    parser.add_argument("--rows", type=int, default=8, help=f"sequences per micro-batch of {texts.LENGTH} tokens (8)")
    parser.add_argument("--draws", type=int, default=2, help="draws of stochastic rounding per truth (default 2)")
    parser.add_argument("--held-out", type=int, default=16, help="held-out micro-batches (default 16)")
    parser.add_argument("--blocks", type=int, default=6, help="of the small model (default 6)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSONL file; lines are added")
    texts.add_text_arguments(parser)
    return parser.parse_args(arguments)


def training_state(options: argparse.Namespace) -> tuple[torch.nn.Module, torch.optim.Optimizer, texts.Text]:
    """Returns a model in training, the optimizer of its linears, and the text."""
    if options.checkpoint is None:
        text = texts.load_text(options.text, options.device)
        state = small_models.new_state(
            options.family, options.optimizer, options.device, seed=options.seed, blocks=options.blocks
        )
    else:
        tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
        text = texts.load_text(options.text, options.device, tokenizer=tokenizer.backend_tokenizer)
        model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32).to(options.device)
        model.train()
        optimizers = small_models.optimizers(options.optimizer, model, scale=0.01)
        state = small_models.State(options.optimizer, model, optimizers, options.rows)
    state.train(text, options.steps)
    return state.model, state.optimizer, text


def chosen_layers(layers: Sequence[str], count: int | None, seed: int) -> list[str]:
    """Returns all layers, or a random choice of `count`, in the model's order."""
    if count is None or count >= len(layers):
        return list(layers)
    chosen = set(random.Random(seed).sample(list(layers), count))
    return [layer for layer in layers if layer in chosen]


def weight_rows(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Mapping[str, Any]],
    layers: Sequence[str],
    config: SnipConfig,
    fmt: str,
    draws: int,
) -> list[Line]:
    """Returns the rows of the weight divergence in a format, whole layers."""
    assignments = [{layer: dict.fromkeys(GEMMS, fmt)} for layer in layers]
    count = draws if formats[fmt].is_random else 1
    truths = [
        [weight for _, weight in measure_assignment(model, batch, optimizer, assignments, config, count)]
        for batch in batches
    ]
    estimates = estimated(model, optimizer, batches, layers, config, fmt, WEIGHT_ESTIMATES, "layer")
    return compare("weight", fmt, np.array(truths), estimates)


def loss_rows(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Mapping[str, Any]],
    held_out: Sequence[Mapping[str, Any]],
    layers: Sequence[str],
    config: SnipConfig,
    fmt: str,
) -> list[Line]:
    """Returns the rows of the loss divergence in a format, forward GEMMs."""
    assignments = [{layer: {"forward": fmt}} for layer in layers]
    truths = [
        [rise for rise, _ in measure_assignment(model, batch, optimizer, assignments, config, 1)] for batch in held_out
    ]
    estimates = estimated(model, optimizer, batches, layers, config, fmt, LOSS_ESTIMATES, "forward")
    return compare("loss", fmt, np.array(truths), estimates, signed=True)


def estimated(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Mapping[str, Any]],
    layers: Sequence[str],
    config: SnipConfig,
    fmt: str,
    estimates: Mapping[str, tuple[dict[str, Any], str]],
    gemm: str,
) -> dict[str, Array]:
    """Returns estimate -> figures, (batches, layers)."""
    found: dict[str, list[list[float]]] = {name: [] for name in estimates}
    for index, batch in enumerate(batches):
        tables: dict[str, dict[str, Any]] = {}
        for name, (changes, column) in estimates.items():
            key = repr(changes)
            if key not in tables:
                settings = replace(config, seed=config.seed + index, **changes)
                result = estimate_divergence(model, batch, optimizer, settings)
                tables[key] = {row.layer: row for row in result.rows if (row.gemm, row.format) == (gemm, fmt)}
            found[name].append([getattr(tables[key][layer], column) for layer in layers])
    return {name: np.array(values) for name, values in found.items()}


def compare(
    divergence: str, fmt: str, truths: Array, estimates: Mapping[str, Array], signed: bool = False
) -> list[Line]:
    """Returns a row per estimate.

    Args:
        divergence: "weight" or "loss".
        fmt: the format.
        truths: (batches, layers).
        estimates: name -> (batches, layers).
        signed: whether the truth is a mean (a rise may be negative) and not a root mean square.
    """
    half = len(truths) // 2
    pooled = (lambda values: values.mean(0)) if signed else (lambda values: np.sqrt(np.square(values).mean(0)))
    truth = pooled(truths)
    rows = []
    for name, values in estimates.items():
        estimate = values.mean(0) if signed else np.sqrt(np.square(values).mean(0))
        row: Line = {"divergence": divergence, "format": fmt, "estimate": name, "layers": len(truth)}
        row |= rank_figures(estimate, truth)
        row["halves"] = float(spearmanr(pooled(truths[:half]), pooled(truths[half:])).statistic) if half else None
        if name not in UNSCALED:
            row |= ratio_figures(estimate, truth)
        row |= {"truth": [float(f"{x:.5g}") for x in truth], "estimates": [float(f"{x:.5g}") for x in estimate]}
        rows.append(row)
    return rows


def rank_figures(estimate: Array, truth: Array, seed: int = 0) -> Line:
    """Returns Spearman's rho over layers, with a 95% bootstrap interval over layers."""
    generator = np.random.default_rng(seed)
    draws = []
    for _ in range(RESAMPLES):
        chosen = generator.integers(0, len(truth), len(truth))
        if len(set(chosen)) > 2:
            draws.append(spearmanr(estimate[chosen], truth[chosen]).statistic)
    low, high = np.nanquantile(draws, [0.025, 0.975]) if draws else (float("nan"), float("nan"))
    return {"spearman": float(spearmanr(estimate, truth).statistic), "interval": f"{low:.2f} to {high:.2f}"}


def ratio_figures(estimate: Array, truth: Array) -> Line:
    """Returns median and 90th percentile of |estimate / truth - 1|, and the quartiles of estimate / truth."""
    ratio = estimate / truth
    error = np.abs(ratio - 1)
    quartiles = np.quantile(ratio, [0.25, 0.5, 0.75])
    return {
        "median_error": float(np.median(error)),
        "error_90": float(np.quantile(error, 0.9)),
        "ratio": ", ".join(f"{value:.2f}" for value in quartiles),
    }


if __name__ == "__main__":
    main()
