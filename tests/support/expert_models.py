"""Tiny models with experts, one per way in which transformers stores them, and dense models that they are equal to."""

from __future__ import annotations

from typing import Any

import torch
from models import built
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.integrations import use_experts_implementation

HIDDEN, INNER, EXPERTS, VOCABULARY = 64, 48, 4, 128
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_SIZES: dict[str, Any] = {"intermediate_size": INNER, "moe_intermediate_size": INNER}
_LATENT: dict[str, Any] = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
_ROPE: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}

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
        **_ROPE,
    ),
    "deepseek-v3": DeepseekV3Config(  # one dense block; sigmoid routing by groups
        **_COMMON, **_SIZES, **_LATENT, v_head_dim=16, n_routed_experts=EXPERTS, n_group=1, topk_group=1,
        first_k_dense_replace=1,
    ),
}  # fmt: skip


def build(family: str, seed: int = 0) -> PreTrainedModel:
    return built(CONFIGS[family], seed, std=0.1)


def tiny_qwen3_moe(seed: int = 0) -> PreTrainedModel:
    """Eight experts, two for each token; gate and up in one parameter (E, O, I)."""
    return built(
        Qwen3MoeConfig(**_COMMON, head_dim=16, moe_intermediate_size=32, num_experts=8, norm_topk_prob=True), seed
    )


def tiny_gpt_oss(seed: int = 0) -> PreTrainedModel:
    """Eight experts, two for each token; parameters (E, I, O), gate and up by turns, biases, clamped activations."""
    return built(
        GptOssConfig(**_COMMON, **_ROPE, head_dim=16, intermediate_size=32, num_local_experts=8, sliding_window=64),
        seed,
    )


@use_experts_implementation(has_gate=False)
class TinyExperts(nn.Module):
    def __init__(self, config: Any, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.num_experts = up.shape[0]
        self.up_proj, self.down_proj = nn.Parameter(up), nn.Parameter(down)
        self.act_fn = torch.tanh

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        found = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, place = torch.where(top_k_index == expert)
            inner = self.act_fn(hidden_states[token] @ self.up_proj[expert].t())
            outer = inner @ self.down_proj[expert].t() * top_k_weights[token, place, None]
            found = found.index_add(0, token, outer)
        return found


class RoutedBlock(nn.Module):
    """A residual block whose MLP is one, or experts, of which a router chooses `top_k` of equal weights."""

    def __init__(self, hidden: int, inner: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.mix = nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, inner, bias=False), nn.Linear(inner, hidden, bias=False)
        self.scores = nn.Parameter(torch.randn(hidden, max(1, experts)))
        self.experts: nn.Module | None = None
        self.top_k = top_k

    def use_experts(self, count: int) -> None:
        """Replaces the MLP by so many experts, each with its weights."""
        weights = [linear.weight.detach().expand(count, -1, -1).clone() for linear in (self.up, self.down)]
        self.experts = TinyExperts(PretrainedConfig(experts_implementation="eager"), *weights)
        del self.up, self.down

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.mix(x))
        found = self.norm(x)
        if self.experts is None:
            return x + self.down(torch.tanh(self.up(found)))
        rows = found.flatten(0, 1)
        chosen = torch.topk(rows @ self.scores, self.top_k).indices
        weights = torch.full_like(chosen, 1, dtype=x.dtype) / self.top_k
        return x + self.experts(rows, chosen, weights).view_as(x)


class RoutedLM(nn.Module):
    """A causal LM of `RoutedBlock`s whose tokens see the mean of those before them."""

    def __init__(self, blocks: int, experts: int, top_k: int, hidden: int, inner: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList([RoutedBlock(hidden, inner, experts, top_k) for _ in range(blocks)])
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype, device=x.device)[:, None]
            x = layer(x)
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def routed_lm(experts: int, top_k: int = 1, blocks: int = 2, hidden: int = 24, inner: int = 40) -> RoutedLM:
    """A model with the same numbers whether it is dense (`experts` 0) or has so many experts, all equal."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = RoutedLM(blocks, 4, top_k, hidden, inner, 17)
    for layer in model.layers if experts else ():
        layer.scores = nn.Parameter(layer.scores.detach()[:, :experts])
        layer.use_experts(experts)
    return model
