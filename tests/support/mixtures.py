"""Tiny mixture-of-experts models, one per way in which transformers stores experts."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

HIDDEN, INNER, EXPERTS, LAYERS, VOCABULARY = 64, 48, 4, 2, 128
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_SIZES: dict[str, Any] = {"intermediate_size": INNER, "moe_intermediate_size": INNER}
_LATENT: dict[str, Any] = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}

CONFIGS: dict[str, PretrainedConfig] = {
    "mixtral": MixtralConfig(**_COMMON, num_local_experts=EXPERTS, intermediate_size=INNER),
    "qwen2-moe": Qwen2MoeConfig(  # with a shared expert and its gate, a linear of one output
        **_COMMON, **_SIZES, num_experts=EXPERTS, shared_expert_intermediate_size=INNER
    ),
    "qwen3-moe": Qwen3MoeConfig(**_COMMON, **_SIZES, num_experts=EXPERTS, head_dim=16),
    "gpt-oss": GptOssConfig(  # transposed weights, gate and up interleaved, biases
        **_COMMON,
        num_local_experts=EXPERTS,
        intermediate_size=INNER,
        head_dim=16,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "deepseek-v3": DeepseekV3Config(  # one dense block; sigmoid routing by groups
        **_COMMON, **_SIZES, **_LATENT, v_head_dim=16, n_routed_experts=EXPERTS, n_group=1, topk_group=1,
        first_k_dense_replace=1,
    ),
}  # fmt: skip


def build(family: str, seed: int = 0, **options: Any) -> PreTrainedModel:
    """A model in training mode; torch's random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[family]), **options)
        # Routers and biases that are not zero.
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or "bias" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return model.train()
