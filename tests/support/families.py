"""Tiny models of families whose matrix products are not all those of `nn.Linear`, from their configs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    DeepseekV3Config,
    GPT2Config,
    JambaConfig,
    LlamaConfig,
    LlavaConfig,
    MambaConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
)

HIDDEN, INNER, LAYERS, VOCABULARY, EXPERTS, CHOSEN = 64, 96, 2, 80, 4, 2
IMAGE_TOKEN, PATCHES, VISION_HIDDEN, VISION_INNER = 79, 4, 32, 48
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_HEADS: dict[str, Any] = {**_COMMON, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": INNER}

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_HEADS),
    "mixtral": MixtralConfig(**_HEADS, num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN),
    "gpt2": GPT2Config(vocab_size=VOCABULARY, n_embd=HIDDEN, n_layer=LAYERS, n_head=4, n_positions=64),
    # Multi-head latent attention; the first block is dense, the second has experts and a shared one.
    "deepseek": DeepseekV3Config(
        **{**_HEADS, "num_key_value_heads": 4},
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
    "mamba": MambaConfig(**_COMMON, state_size=8, time_step_rank=8),
    # A Mamba block with a dense MLP, and an attention block with experts.
    "jamba": JambaConfig(
        **_HEADS,
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
        text_config=LlamaConfig(**_HEADS),
        image_token_index=IMAGE_TOKEN,
        vision_feature_layer=-1,
    ),
}


def build(family: str, seed: int = 0) -> PreTrainedModel:
    """A model in training mode; torch's random state is left alone."""
    auto = AutoModelForImageTextToText if family == "llava" else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = auto.from_config(CONFIGS[family]).train()
    return model


def text(rows: int = 2, length: int = 8) -> dict[str, Tensor]:
    ids = torch.randint(0, IMAGE_TOKEN, (rows, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def with_images(rows: int = 2, length: int = 8) -> dict[str, Tensor]:
    """Text after one image per sequence, for "llava"."""
    images = torch.full((rows, PATCHES), IMAGE_TOKEN)
    pixels = torch.randn(rows, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    ids = torch.cat([images, text(rows, length)["input_ids"]], dim=1)
    return {"input_ids": ids, "labels": ids, "pixel_values": pixels}


def send_all_tokens_to(model: nn.Module, experts: tuple[int, ...]) -> None:
    """Lets the routers of a "mixtral" choose these experts for every token."""

    def chosen(module: nn.Module, args: Any, output: Any) -> Any:
        logits, weights, indices = output
        return logits, weights, torch.tensor(experts, device=indices.device).expand_as(indices).contiguous()

    for name, module in model.named_modules():
        if name.endswith(".mlp.gate"):
            module.register_forward_hook(chosen)
