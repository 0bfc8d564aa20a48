"""Small models of the causal-LM families of transformers, from their configs, and what of each one a plan covers.

Layers are in the proportions that large models have: what a router or a small projection takes of the FLOPs depends on
them. Run as a program, it writes the table of docs/families.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY, HIDDEN, LAYERS = 96, 64, 2
# Given to a config where it has the field.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim"), HIDDEN),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"), 176),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
    "head_dim": 16,
    # Experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 64),
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    # Latent attention
    **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
_LATENT: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 8}
_INDEXER: dict[str, Any] = {**_LATENT, "index_head_dim": 8, "index_n_heads": 4, "index_topk": 8}
_MAMBA2: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
_LINEAR_ATTENTION: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
}
_CONVOLUTION: dict[str, Any] = {"layer_types": ["conv", "full_attention"]}


def _alike(fields: dict[str, Any], *families: str) -> dict[str, dict[str, Any]]:
    return dict.fromkeys(families, fields)


DENSE: dict[str, dict[str, Any]] = {
    **_alike({}, "apertus", "arcee", "biogpt", "bitnet", "bloom", "cohere", "cohere2", "cwm", "diffllama", "doge"),
    **_alike({}, "ernie4_5", "exaone4", "flint", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt2"),
    **_alike({}, "gpt_bigcode", "gpt_neox", "gpt_neox_japanese", "granite", "granite_swa", "helium", "hrm_text"),
    **_alike({}, "hunyuan_v1_dense", "hyperclovax", "internlm3", "jais2", "llama", "ministral", "ministral3"),
    **_alike({}, "mistral", "modernbert-decoder", "mpt", "nanochat", "nemotron", "olmo", "olmo2", "olmo3"),
    **_alike({}, "openai-gpt", "opt", "persimmon", "phi", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3"),
    **_alike({}, "stablelm", "starcoder2", "vaultgemma", "xglm"),
    **_alike({"rotary_dim": 8}, "codegen", "gptj"),
    "ctrl": {"dff": 176},
    "falcon": {"head_dim": None},
    "gemma3n_text": {
        **{"num_hidden_layers": 5, "num_kv_shared_layers": 0, "layer_types": None, "laurel_rank": 8},
        **{"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16},
        "activation_sparsity_pattern": None,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "minicpm3": _LATENT,
    # transformers zeroes the padding's embedding when it loads this one.
    "youtu": {**_LATENT, "pad_token_id": None},
}
HYBRID: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA2, "num_hidden_layers": 3, "attn_layer_indices": [1]},
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 128, "mamba_n_groups": 1},
    "falcon_mamba": {"state_size": 4, "time_step_rank": 4},
    "granitemoehybrid": {**_MAMBA2, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 64},
    "jamba": {
        **{"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
        **{"mamba_d_state": 4, "mamba_dt_rank": 4},
    },
    "kimi_linear": {
        "linear_attn_config": {
            **{"num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4},
            **{"kda_layers": [1], "full_attn_layers": [2]},
        },
        **_LATENT,
    },
    **_alike(_CONVOLUTION, "lfm2", "lfm3"),
    "lfm2_moe": {**_CONVOLUTION, "num_dense_layers": 1},
    "mamba": {"state_size": 4, "time_step_rank": 4},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1},
    "minimax": {"layer_types": ["linear_attention", "full_attention"]},
    "nemotron_h": {
        "moe_shared_expert_intermediate_size": 64,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 1,
    },
    "olmo_hybrid": {},
    **_alike(_LINEAR_ATTENTION, "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"),
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": HIDDEN, "attention_window_size": 16},
    "rwkv": {},
    "zamba": {
        **{"num_hidden_layers": 4, "layer_types": ["mamba", "hybrid", "mamba", "hybrid"], "mamba_d_state": 4},
        **{"attention_hidden_size": 2 * HIDDEN, "attention_head_dim": 32},
    },
}
EXPERTS: dict[str, dict[str, Any]] = {
    **_alike({}, "afmoe", "cohere2_moe", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe"),
    **_alike({}, "gpt_oss", "granitemoe", "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "jetmoe"),
    **_alike({}, "laguna", "llama4_text", "mimo_v2_flash", "minimax_m2", "mixtral", "olmoe", "phimoe"),
    **_alike({}, "qwen2_moe", "qwen3_moe", "solar_open", "granitemoe_swa", "kolibri1", "mellum", "deepseek_v4"),
    **_alike(_LATENT, "axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
    **_alike(_INDEXER, "deepseek_v32", "glm_moe_dsa", "axk2"),
    "aria_text": {"moe_num_experts": 8, "moe_topk": 2, "moe_num_shared_experts": 1, "intermediate_size": 64},
    "dbrx": {
        # The configuration of files names the base of rotations here, which the class does not know.
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": HIDDEN, "ffn_hidden_size": 64, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "longcat_flash": {**_LATENT, "moe_topk": 2, "zero_expert_num": 2, "expert_ffn_hidden_size": 64},
}
FAMILIES = {family: fields for family, fields in {**DENSE, **HYBRID, **EXPERTS}.items() if family in CONFIG_MAPPING}
"""Model type -> fields of its config that are not those of `_SIZES`; None leaves the config's own default. Those that
the installed transformers has."""


def config_of(family: str) -> PretrainedConfig:
    kind = CONFIG_MAPPING[family]
    default, fields = kind(), {**_SIZES, **FAMILIES[family]}
    other_names = {name for name, other in kind.attribute_map.items() if other in fields}
    chosen = {
        name: value
        for name, value in fields.items()
        if value is not None and name not in other_names and (name in FAMILIES[family] or hasattr(default, name))
    }
    return kind(**chosen)


def build(family: str) -> PreTrainedModel:
    """A model in training mode; torch's random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config_of(family)).train()


def class_of(family: str) -> str:
    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family])


def batch(rows: int = 2, length: int = 32) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}
