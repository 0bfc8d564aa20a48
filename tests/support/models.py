"""One tiny Hugging Face model per family, built from its config."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

HIDDEN, INNER, LAYERS, VOCABULARY = 64, 96, 2, 80
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


def build(family: str, seed: int = 0) -> PreTrainedModel:
    """A model in training mode; torch's random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(CONFIGS[family]).train()


def batch(rows: int = 2, length: int = 20, seed: int = 1) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}
