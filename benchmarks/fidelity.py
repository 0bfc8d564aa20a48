r"""How close are the estimated divergences to the measured ones, on a checkpoint of a recipe's run?

    accelerate launch recipes/pretrain.py recipes/quickstart.yaml \
        --override training.save_strategy=steps training.save_steps=400
    python benchmarks/fidelity.py recipes/quickstart.yaml runs/quickstart/checkpoint-400

Loads model and optimizer state, takes the first sequences of the training data, and prints for every format and GEMM
the median over layers of |estimate / truth - 1|, its 90th percentile and the rank correlation.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer

from snip_hf import SnipConfig, estimate_divergence, measure_divergence
from snip_hf.divergence import CHOICES, ROWS, DivergenceTable

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "recipes"))
from data import load_documents, pack  # a script beside the recipes, not a package
from recipe import load_recipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("checkpoint", type=Path, help="a checkpoint folder of that recipe's run, with optimizer.pt")
    parser.add_argument("--sequences", type=int, default=4, help="sequences in the batch (default 4)")
    parser.add_argument("--draws", type=int, default=2, help="stochastic-rounding draws of the truth (default 2)")
    parser.add_argument("--gemms", nargs="+", choices=ROWS, default=["layer"], help="rows to measure (default layer)")
    parser.add_argument("--probes", type=int, default=1, help="probes of the estimate (default 1)")
    parser.add_argument("--output", type=Path, help="JSON file for both tables")
    options = parser.parse_args()
    model, optimizer, batch = load(options.recipe, options.checkpoint, options.sequences)
    config = SnipConfig(probe_tokens=None, probes=options.probes)
    start = time.perf_counter()
    estimate = estimate_divergence(model, batch, optimizer, config)
    estimated = time.perf_counter()
    truth = measure_divergence(model, batch, optimizer, config, options.draws, tuple(options.gemms))
    print(f"estimate {estimated - start:.1f} s, truth {time.perf_counter() - estimated:.1f} s; {options}")
    Console().print(compare(estimate, truth))
    if options.output:
        tables = {"estimate": estimate.to_records(), "truth": truth.to_records()}
        options.output.write_text(json.dumps(tables, indent=1) + "\n", encoding="utf-8")


def load(
    recipe_path: Path, checkpoint: Path, sequences: int
) -> tuple[torch.nn.Module, torch.optim.Optimizer, dict[str, torch.Tensor]]:
    """Returns the checkpoint's model, its optimizer as the Trainer builds it, and one batch of training text."""
    recipe = load_recipe(recipe_path, [])
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    args = torch.load(checkpoint / "training_args.bin", weights_only=False)  # our own run's arguments
    args.eval_strategy = "no"
    optimizer = Trainer(model, args).create_optimizer()
    optimizer.load_state_dict(torch.load(checkpoint / "optimizer.pt", weights_only=True))
    for group in optimizer.param_groups:
        group["lr"] = args.learning_rate  # the schedule's end is 0; a common factor drops out of every ratio
    train, _ = pack(*load_documents(recipe.data), AutoTokenizer.from_pretrained(checkpoint), recipe.data)
    ids = torch.tensor([row["input_ids"] for row, _ in zip(train, range(sequences), strict=False)])
    return model, optimizer, {"input_ids": ids, "labels": ids}


def compare(estimate: DivergenceTable, truth: DivergenceTable) -> Table:
    """Returns a row per format and GEMM; layers whose truth is 0 (no weights upstream) are left out of the ratios."""
    guesses = {(row.layer, row.gemm, row.format): row for row in estimate.rows}
    columns = ("median error", "90%", "ratio min-max", "Spearman dW", "CV of truth", "Spearman dL")
    table = Table("format", "GEMM", "layers", *columns)
    for fmt in CHOICES:
        for gemm in ROWS:
            rows = [row for row in truth.rows if (row.format, row.gemm) == (fmt, gemm) and row.weight_divergence > 0]
            if not rows:
                continue
            pairs = [(guesses[row.layer, gemm, fmt], row) for row in rows]
            true = np.array([row.weight_divergence for row in rows])
            ratio = np.array([guess.weight_divergence for guess, _ in pairs]) / true
            error = np.abs(ratio - 1)
            losses = np.array([(guess.loss_divergence, row.loss_divergence) for guess, row in pairs])
            table.add_row(
                fmt,
                gemm,
                str(len(rows)),
                f"{np.median(error):.3f}",
                f"{np.quantile(error, 0.9):.3f}",
                f"{ratio.min():.2f}-{ratio.max():.2f}",
                f"{spearmanr(ratio * true, true).statistic:.2f}",
                f"{true.std() / true.mean():.2f}",
                f"{spearmanr(losses).statistic:.2f}",
            )
    return table


if __name__ == "__main__":
    main()
