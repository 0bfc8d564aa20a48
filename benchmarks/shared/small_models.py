"""Small models of several families, their optimizers, and training in FP32 up to the state that a probe sees.

Models have 6 blocks of width 128 and about 1.6M parameters, so that measuring the truth of every layer takes minutes on
a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    Adafactor,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    GPTNeoXConfig,
    LlamaConfig,
    Olmo2Config,
    PhiConfig,
    PretrainedConfig,
    Qwen3Config,
)

from .texts import LENGTH, VOCABULARY, Text

_COMMON: dict[str, Any] = {
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES = ("llama", "qwen3", "gpt-neox", "llama-tied", "olmo2", "gemma3", "phi", "glm4")


def config(family: str, hidden: int = 128, blocks: int = 6, vocabulary: int = VOCABULARY) -> PretrainedConfig:
    """Returns the configuration of a family.

    llama       grouped-query attention, SiLU; llama-tied with the embedding as its head
    qwen3       the same with norms of queries and keys
    olmo2       norms behind attention and MLP instead of before them, and of queries and keys
    gemma3      sandwich norms, norms of queries and keys, gated GELU, windows of 64 tokens in five of six blocks, tied
    glm4        sandwich norms, biases of queries, keys and values, gate and up as one linear
    gpt-neox    attention and MLP side by side behind a norm each, biases, GELU, queries, keys and values as one linear
    phi         attention and MLP side by side behind one norm, biases, GELU
    """
    shape = {**_COMMON, "vocab_size": vocabulary, "hidden_size": hidden, "num_hidden_layers": blocks}
    gated = {**shape, "intermediate_size": 3 * hidden, "num_key_value_heads": 2}
    head = hidden // 4
    if family == "gpt-neox":
        return GPTNeoXConfig(**shape, intermediate_size=4 * hidden, use_parallel_residual=True)
    if family == "phi":
        return PhiConfig(**shape, intermediate_size=4 * hidden)
    if family == "qwen3":
        return Qwen3Config(**gated, head_dim=head)
    if family == "olmo2":
        return Olmo2Config(**gated)
    if family == "gemma3":
        return Gemma3TextConfig(**gated, head_dim=head, query_pre_attn_scalar=head, sliding_window=64)
    if family == "glm4":
        return Glm4Config(**gated, head_dim=head, attention_bias=True)
    return LlamaConfig(**gated, tie_word_embeddings=family == "llama-tied")


OPTIMIZERS = ("adamw", "sgd", "lion", "adafactor", "muon", "adamw8bit")


class Lion(torch.optim.Optimizer):
    """Sign of an interpolated momentum (arXiv:2302.06675)."""

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in (p for p in group["params"] if p.grad is not None):
                momentum = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(group["lr"] * torch.lerp(parameter.grad, momentum, beta1).sign_())
                momentum.lerp_(parameter.grad, 1 - beta2)


def optimizers(name: str, model: nn.Module, scale: float = 1.0) -> list[torch.optim.Optimizer]:
    """Returns the optimizers of a model; the first one holds the linears of its blocks.

    Args:
        name: of `OPTIMIZERS`.
        model: any causal LM.
        scale: factor of the learning rates, which are those of training from scratch.
    """
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n and "head" not in n]
    inside = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in inside]
    if name == "muon":
        muon = torch.optim.Muon(matrices, lr=scale * 2e-3, adjust_lr_fn="match_rms_adamw")
        return [muon, torch.optim.AdamW(others, lr=scale * 2e-3, betas=(0.9, 0.95))]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    if name == "adamw8bit":
        from torchao.optim import AdamW8bit  # slow to import, and only needed here

        return [AdamW8bit(groups, lr=scale * 2e-3, betas=(0.9, 0.95))]
    if name == "adafactor":
        return [Adafactor(groups, lr=scale * 2e-3, scale_parameter=False, relative_step=False)]
    if name == "lion":
        return [Lion(groups, lr=scale * 3e-4)]
    if name == "sgd":
        groups[0]["weight_decay"] = 1e-4
        return [torch.optim.SGD(groups, lr=scale * 0.3, momentum=0.9)]
    return [torch.optim.AdamW(groups, lr=scale * 2e-3, betas=(0.9, 0.95))]


@dataclass
class State:
    """A model in training after `step` optimizer steps; `optimizers[0]` holds the linears of the blocks."""

    optimizer_name: str
    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    rows: int
    step: int = 0

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.optimizers[0]

    def train(self, text: Text, steps: int, warmup: int = 50) -> None:
        """Does `steps` optimizer steps; the learning rate rises over the first `warmup` steps, then stays."""
        for _ in range(steps):
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    base = group.setdefault("base_lr", float(group["lr"]))
                    lr = base * min(1.0, (self.step + 1) / warmup)
                    group["lr"] = group["lr"].fill_(lr) if isinstance(group["lr"], Tensor) else lr
            self.model(**text.batch(self.step, self.rows)).loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            self.step += 1


def new_state(
    family: str,
    optimizer: str,
    device: str,
    rows: int = 8,
    seed: int = 0,
    hidden: int = 128,
    blocks: int = 6,
    vocabulary: int = VOCABULARY,
) -> State:
    """Returns an untrained model with its optimizers."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config(family, hidden, blocks, vocabulary)).to(device).train()
    return State(optimizer, model, optimizers(optimizer, model), rows)
