"""Small models of the causal-LM families of transformers, from their configs.

Layers are in the proportions that large models have: what a router or a small projection takes of the FLOPs depends on
them.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from models import built
from packaging.version import Version
from torch import Tensor
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
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
_GEMMA4: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 16}
_INKLING: dict[str, Any] = {
    **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16, "sliding_window_size": 16},
    **{"d_rel": 4, "rel_extent": 16, "layer_types": ["hybrid_sliding", "hybrid"]},
}
_INKLING2: dict[str, Any] = {**_INKLING, "unpadded_vocab_size": VOCABULARY, "n_layers_per_attn_res_block": 1}


def _alike(fields: dict[str, Any], *families: str) -> dict[str, dict[str, Any]]:
    return dict.fromkeys(families, fields)


def _blt(hidden: int) -> dict[str, Any]:
    """A config of one of BLT's four models, of one block."""
    return {
        **{"vocab_size": VOCABULARY, "hidden_size": hidden, "hidden_size_global": HIDDEN, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": hidden * 11 // 4},
        "max_position_embeddings": 64,
    }


DENSE: dict[str, dict[str, Any]] = {
    **_alike({}, "apertus", "arcee", "biogpt", "bitnet", "bloom", "cohere", "cohere2", "cwm", "diffllama", "doge"),
    **_alike({}, "ernie4_5", "exaone4", "flint", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt2"),
    **_alike({}, "gpt_bigcode", "gpt_neox", "gpt_neox_japanese", "granite", "granite_swa", "helium", "hrm_text"),
    **_alike({}, "hunyuan_v1_dense", "hyperclovax", "internlm3", "jais2", "llama", "ministral", "ministral3"),
    **_alike({}, "mistral", "modernbert-decoder", "mpt", "nanochat", "nemotron", "olmo", "olmo2", "olmo3"),
    **_alike({}, "openai-gpt", "opt", "persimmon", "phi", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3"),
    **_alike({}, "stablelm", "starcoder2", "vaultgemma", "xglm", "apertus1p5_text", "exaone", "iquestcoder"),
    **_alike({"rotary_dim": 8}, "codegen", "gptj"),
    "blt": {
        **{"hidden_size": None, "use_cache": False, "encoder_hash_byte_group_vocab": 64},
        **{f"{part}_config": _blt(HIDDEN // 2) for part in ("patcher", "encoder")},
        **{"decoder_config": {**_blt(HIDDEN // 2), "num_hidden_layers": 2}},
        **{"global_config": {**_blt(HIDDEN), "num_hidden_layers": 2}},
    },
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
        }
    },
    "cpmant": {"dim_head": 16, "dim_ff": 176, "prompt_length": 4, "init_std": 0.02},
    "ctrl": {"dff": 176},
    "dory": {"num_hidden_layers": 4, "n_input_layers": 1, "n_output_layers": 1},
    "falcon": {"head_dim": None},
    "gemma3n_text": {
        **{"num_hidden_layers": 5, "num_kv_shared_layers": 0, "layer_types": None, "laurel_rank": 8},
        **{"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16},
        "activation_sparsity_pattern": None,
    },
    "gemma4_text": {**_GEMMA4, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16},
    "gemma4_unified_text": _GEMMA4,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "minicpm3": _LATENT,
    "phi4_multimodal": {
        "head_dim": None,
        "vision_config": {
            **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
            **{"image_size": 28, "crop_size": 28},
        },
        "audio_config": {"hidden_size": 32, "intermediate_size": 64, "num_blocks": 1, "num_attention_heads": 2},
    },
    "reformer": {
        **{"is_decoder": True, "attn_layers": ["local", "lsh"], "attention_head_size": 16, "feed_forward_size": 176},
        **{"axial_pos_shape": (4, 8), "axial_pos_embds_dim": (HIDDEN // 2, HIDDEN // 2), "max_position_embeddings": 32},
        **{"local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8, "num_buckets": 4, "hash_seed": 0},
    },
    "xlm": {"emb_dim": HIDDEN, "n_layers": LAYERS, "n_heads": 4, "causal": True},
    "xlnet": {"d_inner": 176, "max_position_embeddings": None},
    # transformers zeroes the padding's embedding when it loads this one.
    "youtu": {**_LATENT, "pad_token_id": None},
}
HYBRID: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention"], "num_key_value_heads": 4},
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
    **_alike(_LINEAR_ATTENTION, "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "lara_mini"),
    "qwen4_exp_text": {
        **{**_LINEAR_ATTENTION, "num_hidden_layers": 4, "layer_types": None},
        **{"hc_count": 2, "hc_lowrank": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16},
        **{"indexer_budget": 8, "indexer_compress_ratio": 4},
    },
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": HIDDEN, "attention_window_size": 16},
    "rwkv": {},
    "zamba": {
        **{"num_hidden_layers": 4, "layer_types": ["mamba", "hybrid", "mamba", "hybrid"], "mamba_d_state": 4},
        **{"attention_hidden_size": 2 * HIDDEN, "attention_head_dim": 32},
    },
    "zamba2": {
        **{"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
        **{"mamba_d_state": 16, "n_mamba_heads": 8, "chunk_size": 16},
    },
}
EXPERTS: dict[str, dict[str, Any]] = {
    **_alike({}, "afmoe", "cohere2_moe", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe"),
    **_alike({}, "gpt_oss", "granitemoe", "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "jetmoe"),
    **_alike({}, "laguna", "llama4_text", "mimo_v2_flash", "minimax_m2", "mixtral", "olmoe", "phimoe"),
    **_alike({}, "qwen2_moe", "qwen3_moe", "solar_open", "granitemoe_swa", "kolibri1", "mellum", "deepseek_v4"),
    **_alike({}, "sarvam_moe"),
    **_alike(_LATENT, "sarvam_mla", "axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
    **_alike(_INDEXER, "deepseek_v32", "glm_moe_dsa", "axk2"),
    "aria_text": {"moe_num_experts": 8, "moe_topk": 2, "moe_num_shared_experts": 1, "intermediate_size": 64},
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "dbrx": {
        # The configuration of files names the base of rotations here, which the class does not know.
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": HIDDEN, "ffn_hidden_size": 64, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "dots3_note_text": {
        **{**_INDEXER, "head_dim": 24, "layer_types": ["indexed_attention", "sliding_attention"]},
        **{"shared_experts_intermediate_size": 64, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4},
        **{"swa_q_lora_rank": 32, "swa_kv_lora_rank": 32, "swa_head_dim": 24},
        **{"swa_qk_nope_head_dim": 16, "swa_v_head_dim": 16},
    },
    "gemma4_text-moe": {**_GEMMA4, "hidden_size_per_layer_input": 0, "enable_moe_block": True, "top_k_experts": 2},
    "hy_v4": {**_INDEXER, "hc_mult": 2, "indexer_types": ["full", "shared"]},
    "inkling_text": _INKLING,
    "inkling2_text": _INKLING2,
    "inkling2_loop_text": {
        **{**_INKLING2, "num_hidden_layers": 4, "layer_types": ["hybrid_sliding", "hybrid"] * 2},
        **{"loop_layer_index_start": 1, "loop_layer_index_end": 3, "loop_gate_rank": 4},
    },
    "longcat_flash": {**_LATENT, "moe_topk": 2, "zero_expert_num": 2, "expert_ffn_hidden_size": 64},
    "minimax_m3_vl_text": {
        **{
            "rotary_dim": 8,
            "layer_types": ["full_attention", "minimax_m3_sparse"],
            "mlp_layer_types": ["dense", "sparse"],
        },
        **{"intermediate_size": 64, "dense_intermediate_size": 176, "shared_intermediate_size": 64},
        **{"index_n_heads": 2, "index_head_dim": 16, "index_block_size": 4, "index_topk_blocks": 2},
    },
    # Not as many channels of the router as experts: the layers inside of it are known as such by its class.
    "zaya": {
        **{"head_dim": 8, "num_key_value_heads": 1},
        **{"num_experts": 16, "num_experts_per_tok": 1, "router_hidden_size": 8},
    },
}


def type_of(family: str) -> str:
    """The model type. A family that exists with and without experts is here twice, once with "-moe" behind it."""
    return family.removesuffix("-moe")


# Before these versions, a family is another model (Inkling 2, Aria's experts) or has no small one (Zamba).
_SINCE = {"aria_text": "5.18", "inkling2_text": "5.24", "zamba": "5.18"}
FAMILIES = {
    family: fields
    for family, fields in {**DENSE, **HYBRID, **EXPERTS}.items()
    if type_of(family) in CONFIG_MAPPING
    and type_of(family) in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    and Version(transformers.__version__) >= Version(_SINCE.get(family, "5"))
}
"""Family -> fields of its config that are not those of `_SIZES`; None leaves the config's own default. Those that the
installed transformers has."""


def config_of(family: str) -> PretrainedConfig:
    kind = CONFIG_MAPPING[type_of(family)]
    fields = {**_SIZES, **FAMILIES[family]}
    # hasattr() would ask for the value, which a config whose layers differ refuses to tell.
    known = {*dir(kind()), *kind.attribute_map}
    other_names = {name for name, other in kind.attribute_map.items() if other in fields}
    chosen = {
        name: value
        for name, value in fields.items()
        if value is not None and name not in other_names and (name in FAMILIES[family] or name in known)
    }
    return kind(**chosen)


def build(family: str) -> PreTrainedModel:
    return built(config_of(family))


def class_of(family: str) -> str:
    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[type_of(family)])


def batch(rows: int = 2, length: int = 32) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}
