"""How far estimates of the weight divergence are from the truth under optimizers of other packages.

    python benchmarks/estimates_by_optimizer.py
    python benchmarks/estimates_by_optimizer.py --optimizers "GaLore" "APOLLO"

A Llama shape of 2 blocks and hidden size 64 is trained for 60 steps in FP32 on a random table of bigrams. Then every
layer and GEMM is estimated on one batch of 8 x 32 tokens and measured. Printed are, per format, the median and the 90th
percentile of |estimate / truth - 1| over the rows of single GEMMs, and the medians per GEMM. Needs bitsandbytes,
schedulefree, galore_torch, apollo_torch and grokadamw, as far as they are asked for.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from snip_hf import SnipConfig, estimate_divergence, measure_divergence

VOCABULARY, STEPS, RATE = 128, 60, 3e-3
LOW_RANK = {"rank": 8, "update_proj_gap": 50, "proj_type": "std"}


def build(package: str, name: str, **options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Returns what makes an optimizer of a package for all parameters of a model."""
    return lambda model: getattr(importlib.import_module(package), name)(model.parameters(), lr=RATE, **options)


def build_low_rank(package: str, name: str, **group: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Returns what makes an optimizer that projects the gradients of the blocks' matrices."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        named = dict(model.named_parameters())
        matrices = [value for key, value in named.items() if "layers" in key and value.dim() == 2]
        rest = [value for key, value in named.items() if "layers" not in key or value.dim() != 2]
        groups = [{"params": rest}, {"params": matrices, **LOW_RANK, **group}]
        return getattr(importlib.import_module(package), name)(groups, lr=RATE)

    return make


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": build("torch.optim", "AdamW"),
    "AdamW in 8 bits": build("bitsandbytes.optim", "AdamW", optim_bits=8),
    "AdEMAMix in 8 bits": build("bitsandbytes.optim", "AdEMAMix", optim_bits=8),
    "schedule-free AdamW": build("schedulefree", "AdamWScheduleFree"),
    "GaLore": build_low_rank("galore_torch", "GaLoreAdamW", scale=0.25),
    "APOLLO": build_low_rank("apollo_torch", "APOLLOAdamW", proj="random", scale_type="channel", scale=1.0),
    "GrokAdamW": build("grokadamw", "GrokAdamW"),
}


def batch(table: Tensor, seed: int) -> dict[str, Tensor]:
    """Returns 8 sequences of 32 tokens, drawn from the table's bigrams."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (8, 1), generator=generator)
    for _ in range(31):
        tokens = torch.cat([tokens, torch.multinomial(table[tokens[:, -1]], 1, generator=generator)], 1)
    return {"input_ids": tokens, "labels": tokens}


def trained(make: Callable[[nn.Module], torch.optim.Optimizer], table: Tensor) -> tuple[nn.Module, Any, float]:
    """Returns a model after its steps, its optimizer and its last loss."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(shape)
    optimizer = make(model)
    if hasattr(optimizer, "train"):
        optimizer.train()
    loss = torch.zeros(())
    for step in range(STEPS):
        loss = model(**batch(table, step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, float(loss.detach())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    table = torch.softmax(3 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0)), -1)
    config = SnipConfig(probe_tokens=None, probe_batch_tokens=None)
    print("| optimizer | loss | format | median | 90% | forward | grad_input | grad_weight | layer |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in options.optimizers:
        model, optimizer, loss = trained(OPTIMIZERS[name], table)
        tables = (
            ask(model, batch(table, 1000), optimizer, config) for ask in (estimate_divergence, measure_divergence)
        )
        estimate, truth = (
            {(row.layer, row.gemm, row.format): row.weight_divergence for row in found.rows} for found in tables
        )
        errors = {key: abs(estimate[key] / truth[key] - 1) for key in truth if truth[key] > 0}
        for fmt in ("fp8", "fp4"):
            single = sorted(error for (_, gemm, of), error in errors.items() if of == fmt and gemm != "layer")
            medians = [
                statistics.median(error for (_, gemm, of), error in errors.items() if of == fmt and gemm == asked)
                for asked in ("forward", "grad_input", "grad_weight", "layer")
            ]
            figures = [statistics.median(single), single[int(0.9 * len(single))], *medians]
            print(f"| {name} | {loss:.2f} | {fmt} | " + " | ".join(f"{figure:.3f}" for figure in figures) + " |")


if __name__ == "__main__":
    main()
