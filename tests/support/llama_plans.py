"""Plans of a tiny Llama, with formats layer by layer."""

from __future__ import annotations

from typing import Any

import torch
from configs import fp4_config
from transformers import AutoModelForCausalLM, LlamaConfig

from snip_hf.costs.flops import linear_flops
from snip_hf.layers.convert import convert_model
from snip_hf.numerics.gemms import GEMMS
from snip_hf.planning.plan import PlanProvenance, PrecisionPlan

BLOCK = "model.layers"
Formats = tuple[str, str, str]


def llama(**changes: Any) -> LlamaConfig:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaConfig(**{**sizes, "num_key_value_heads": 4, "vocab_size": 64, **changes})


def make_plan(default: str | Formats, config: LlamaConfig | None = None, **formats: str | Formats) -> PrecisionPlan:
    """A plan of a tiny Llama; a keyword is the end of a layer's name, with "_" for ".", after its block."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config or llama())
    layers = convert_model(model, fp4_config())
    assignment = {}
    for layer in layers:
        short = layer.removeprefix(f"{BLOCK}.").replace(".self_attn.", "_").replace(".mlp.", "_")
        chosen = formats.get(f"b{short}", default)
        row = (chosen,) * 3 if isinstance(chosen, str) else chosen
        assignment[layer] = dict(zip(GEMMS, row, strict=True))
    provenance = PlanProvenance(step=1, policy="snip", config=fp4_config().to_dict())
    return PrecisionPlan(assignment, linear_flops(model), (tuple(layers),), provenance)
