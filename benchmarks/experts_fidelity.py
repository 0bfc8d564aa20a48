r"""How close the estimated weight divergences of models with experts are to the measured ones.

    python benchmarks/experts_fidelity.py --models 3 --output runs/experts_fidelity.jsonl

Small models of the shapes of Qwen3-MoE and gpt-oss, after some AdamW steps on the source of Python's own modules. On
two batches that training has not seen, every layer is quantized as a whole, by itself. Routers of quantized passes
choose experts by their own scores, as in training, or those that they choose in high precision, as the estimate has it.
A line of the output has, for one kind of projection, format and truth, the median over random directions of what is
said of estimate / truth over layers, models and batches.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from shared.origin import origin_of
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from snip_hf import SnipConfig, estimate_divergence, measure_divergence
from snip_hf.estimation.layer_sums import LAYER

DIRECTIONS = 5
STEPS = 60
Ratios = dict[tuple[str, str, bool], dict[int, list[float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=("qwen3-moe", "gpt-oss"), default=["qwen3-moe", "gpt-oss"])
    parser.add_argument("--models", type=int, default=3, help="how many seeds of models")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="of the steps before")
    parser.add_argument("--draws", type=int, default=4, help="of stochastic rounding, for the truth")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--length", type=int, default=96, help="tokens of each of a batch's four rows")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    setting = {name: value for name, value in vars(options).items() if name not in ("output", "shapes")}
    for shape in options.shapes:
        ratios: Ratios = defaultdict(lambda: defaultdict(list))
        for seed in range(options.first, options.first + options.models):
            note_model(shape, seed, options, ratios)
        with options.output.open("a") as file:
            for (part, fmt, is_fixed), by_direction in sorted(ratios.items()):
                line = {"shape": shape, "part": part, "format": fmt, "fixed_routing": is_fixed, **said(by_direction)}
                print(json.dumps(line))
                file.write(json.dumps({**line, **setting, "steps": STEPS, **origin_of("cpu")}) + "\n")


def note_model(shape: str, seed: int, options: argparse.Namespace, ratios: Ratios) -> None:
    """Adds part, format and kind of truth -> direction -> estimate / truth of all layers."""
    model = built(shape, seed, options.hidden, options.experts, options.top_k)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    for step in range(STEPS):
        model(**text(options.length, step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    plain = SnipConfig(probe_tokens=None, probe_batch_tokens=None, start_format="bf16")
    for index in (STEPS, STEPS + 1):
        batch = text(options.length, index)
        tables = []
        for seed in range(DIRECTIONS):
            config = SnipConfig(probe_tokens=None, probe_batch_tokens=None, start_format="bf16", seed=seed)
            rows = estimate_divergence(model, batch, optimizer, config).rows
            tables.append({(row.layer, row.format): row.weight_divergence for row in rows if row.gemm == LAYER})
        for is_fixed in (True, False):
            truth = measure_divergence(
                model, batch, optimizer, plain, draws=options.draws, gemms=(LAYER,), fixed_routing=is_fixed
            )
            for row in truth.rows:
                name = row.layer.rpartition(".")[2] if ".experts." in row.layer else "attention"
                for direction, table in enumerate(tables):
                    ratio = table[row.layer, row.format] / row.weight_divergence
                    ratios[name, row.format, is_fixed][direction].append(ratio)


def said(by_direction: dict[int, list[float]]) -> dict[str, float]:
    """Returns medians over directions: of the median error, of its last tenth's, and of the median ratio."""
    errors = [[abs(ratio - 1) for ratio in found] for found in by_direction.values()]
    figures = {
        "error": statistics.median(map(statistics.median, errors)),
        "error_90": statistics.median(statistics.quantiles(found, n=10)[-1] for found in errors),
        "ratio": statistics.median(map(statistics.median, by_direction.values())),
    }
    return {name: round(value, 4) for name, value in figures.items()}


def built(shape: str, seed: int, hidden: int, experts: int, top_k: int) -> PreTrainedModel:
    common: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "max_position_embeddings": 256,
        "num_experts_per_tok": top_k,
    }
    common |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    torch.manual_seed(seed)
    if shape == "gpt-oss":
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        sizes = {"intermediate_size": hidden // 2, "num_local_experts": experts, "sliding_window": 64}
        return GptOssForCausalLM(GptOssConfig(**common, **sizes, rope_parameters=rope))
    sizes = {"moe_intermediate_size": hidden // 2, "num_experts": experts}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **sizes, norm_topk_prob=True))


def text(length: int, index: int) -> dict[str, Tensor]:
    """Returns four rows of ASCII; others for every index."""
    data = (inspect.getsource(inspect) + inspect.getsource(json)).encode("ascii", "ignore")
    start = index * 4 * length % (len(data) - 4 * length)
    ids = torch.tensor(list(data[start : start + 4 * length])).view(4, length)
    return {"input_ids": ids, "labels": ids}


if __name__ == "__main__":
    main()
