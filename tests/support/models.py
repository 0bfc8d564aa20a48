"""Builds a tiny Hugging Face model of a family from its config."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    DeepseekV3Config,
    FalconConfig,
    GPT2Config,
    GPTNeoXConfig,
    JambaConfig,
    LlamaConfig,
    LlavaConfig,
    MambaConfig,
    MixtralConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

HIDDEN, INNER, LAYERS, VOCABULARY, EXPERTS, CHOSEN = 64, 96, 2, 80, 4, 2
IMAGE_TOKEN, PATCHES, VISION_HIDDEN, VISION_INNER = 79, 4, 32, 48
_COMMON: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS}
_HEADS: dict[str, Any] = {"num_attention_heads": 4, "max_position_embeddings": 64}
_NO_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_LLAMA: dict[str, Any] = {**_COMMON, **_HEADS, **_NO_TOKENS, "intermediate_size": INNER, "num_key_value_heads": 2}

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_LLAMA),  # grouped-query attention
    "llama-tied": LlamaConfig(**_LLAMA, tie_word_embeddings=True),
    "gpt-neox": GPTNeoXConfig(**_COMMON, **_HEADS, **_NO_TOKENS, intermediate_size=INNER),  # biases everywhere
    "opt": OPTConfig(**_COMMON, **_HEADS, **_NO_TOKENS, ffn_dim=INNER, word_embed_proj_dim=48, dropout=0.0),
    "qwen2": Qwen2Config(**_LLAMA),  # biases in q, k, v only
    "falcon": FalconConfig(**_COMMON, **_NO_TOKENS, num_attention_heads=4, ffn_hidden_size=INNER),  # FalconLinear
    "gpt2": GPT2Config(  # Conv1D
        vocab_size=VOCABULARY,
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=4,
        n_positions=64,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        **_NO_TOKENS,
    ),
    "mixtral": MixtralConfig(**_LLAMA, num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN),
    # Multi-head latent attention; the first block is dense, the second has experts and a shared one.
    "deepseek": DeepseekV3Config(
        **{**_LLAMA, "num_key_value_heads": 4},
        n_routed_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        moe_intermediate_size=32,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
    ),
    "mamba": MambaConfig(**_COMMON, **_NO_TOKENS, state_size=8, time_step_rank=8),
    # A Mamba block with a dense MLP, and an attention block with experts.
    "jamba": JambaConfig(
        **_LLAMA,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        expert_layer_period=2,
        expert_layer_offset=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=8,
        mamba_dt_rank=8,
    ),
    "llava": LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=VISION_HIDDEN,
            intermediate_size=VISION_INNER,
            num_hidden_layers=LAYERS,
            num_attention_heads=2,
            image_size=8,
            patch_size=4,
        ),
        text_config=LlamaConfig(**_LLAMA),
        image_token_index=IMAGE_TOKEN,
        vision_feature_layer=-1,
    ),
}

_ATTENTION = [f"self_attn.{name}_proj" for name in "qkvo"]
_LLAMA_NAMES = [*_ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
_NEOX_NAMES = ["attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"]
_FALCON_NAMES = ["self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"]
_GPT2_NAMES = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
_OPT_NAMES = [f"self_attn.{name}_proj" for name in ("k", "v", "q", "out")] + ["fc1", "fc2"]

LINEARS: dict[str, set[str]] = {
    family: {f"{prefix}.{block}.{name}" for block in range(LAYERS) for name in names}
    for family, prefix, names in (
        ("llama", "model.layers", _LLAMA_NAMES),
        ("llama-tied", "model.layers", _LLAMA_NAMES),
        ("gpt-neox", "gpt_neox.layers", _NEOX_NAMES),
        ("opt", "model.decoder.layers", _OPT_NAMES),
        ("qwen2", "model.layers", _LLAMA_NAMES),
        ("falcon", "transformer.h", _FALCON_NAMES),
        ("gpt2", "transformer.h", _GPT2_NAMES),
    )
}
"""The linears (or Conv1D) inside the blocks, by their names in the families' model files."""


def built(config: PretrainedConfig, seed: int = 0, std: float | None = None) -> PreTrainedModel:
    """Builds a model in training mode; torch's random state is left alone.

    Args:
        std: standard deviation of weights and biases; None: as the family initializes them, with biases and some
            routers of zeros.
    """
    auto = AutoModelForImageTextToText if isinstance(config, LlavaConfig) else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = auto.from_config(copy.deepcopy(config)).train()
        for name, parameter in model.named_parameters():
            if std is not None and (parameter.dim() > 1 or "bias" in name):
                nn.init.normal_(parameter, std=std)
    return model


def build(family: str, seed: int = 0) -> PreTrainedModel:
    return built(CONFIGS[family], seed)


def batch(rows: int = 2, length: int = 20, seed: int = 1) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def text(rows: int = 2, length: int = 8) -> dict[str, Tensor]:
    """Tokens without that of an image."""
    ids = torch.randint(0, IMAGE_TOKEN, (rows, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def with_images(rows: int = 2, length: int = 8) -> dict[str, Tensor]:
    """Text after one image per sequence, for "llava"."""
    images = torch.full((rows, PATCHES), IMAGE_TOKEN)
    pixels = torch.randn(rows, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    ids = torch.cat([images, text(rows, length)["input_ids"]], dim=1)
    return {"input_ids": ids, "labels": ids, "pixel_values": pixels}
