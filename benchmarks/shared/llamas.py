"""The models and recipes whose speed is measured, and their training in a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from snip_hf import SnipConfig, SnipController

from .timing import BF16, autocast

COMPILER = "inductor"
VOCABULARY = 32000
# Norms of queries and keys, and an embedding that is the head too.
_QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "tie_word_embeddings": True}
# Biases of queries, keys and values.
_QWEN2 = {"model_type": "qwen2", "vocab_size": 152064}
# Hidden size, inner size, layers, heads, key heads; what differs from a Llama.
SHAPES: dict[str, tuple[Any, ...]] = {
    "8B, 8 layers": (4096, 14336, 8, 32, 8),
    "TinyLlama-1.1B": (2048, 5632, 22, 32, 4),
    "100M": (768, 2048, 8, 12, 4),
    "small": (256, 768, 2, 4, 2),
    "70B, 2 layers": (8192, 28672, 2, 64, 8),
    "Qwen3-0.6B": (1024, 3072, 28, 16, 8, _QWEN3),
    "Qwen3-4B, 12 layers": (2560, 9728, 12, 32, 8, _QWEN3),
    "Qwen2.5-7B, 8 layers": (3584, 18944, 8, 28, 4, _QWEN2),
}
FORMATS = ("mxfp4", "fp8-delayed")
# "75%": three quarters of the FLOPs run in 4 bits, GEMMs chosen at random.
OURS: dict[str, dict[str, Any]] = {
    "snip-hf MXFP4": {"policy": "uniform-mxfp4"},
    "snip-hf 75%": {"policy": "random", "target_fp4_fraction": 0.75, "granularity": "gemm"},
    "snip-hf FP8": {"policy": "uniform-fp8-delayed"},
}


def recipe_config(recipe: str, device: torch.device, seed: int = 0, **changes: Any) -> SnipConfig:
    """Returns the configuration of a recipe of `OURS`: one plan, made at the start."""
    backend = "tensor-scaled" if device.type == "cuda" else "emulated"
    fields = {"formats": FORMATS, "ties": "auto", "backend": backend, "seed": seed, **OURS[recipe], **changes}
    return SnipConfig(**fields)


def _in_block(module: nn.Module, name: str) -> bool:
    """The linears that snip-hf swaps: those in numbered blocks."""
    return isinstance(module, nn.Linear) and any(part.isdigit() for part in name.split("."))


def _float8(recipe: str, model: nn.Module) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(model, module_filter_fn=_in_block, config=Float8LinearConfig.from_recipe_name(recipe))


# torchao's FP8 training of the same linears.
TORCHAO: dict[str, Callable[[nn.Module], None]] = {
    "torchao tensorwise": partial(_float8, "tensorwise"),
    "torchao rowwise": partial(_float8, "rowwise"),
}


def build_model(shape: Sequence[Any], length: int, seed: int, device: torch.device) -> PreTrainedModel:
    """Returns an untrained model in training mode.

    Args:
        shape: as in `SHAPES`.
        length: tokens of the longest sequence.
        seed: decides the weights.
        device: where the weights are created.
    """
    hidden, inner, layers, heads, key_heads, *changes = shape
    fields = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "max_position_embeddings": length,
        "use_cache": False,
    }
    config = AutoConfig.for_model(**fields | dict(*changes))
    torch.manual_seed(seed)
    with device:
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()


class LoopTraining:
    """A model in training by a plain loop on one random micro-batch: AdamW, BF16 autocast, decoder layers compiled."""

    def __init__(
        self, model: nn.Module, batch: tuple[int, int], recipe: str | SnipConfig, seed: int, device: torch.device
    ) -> None:
        if isinstance(recipe, str) and recipe in TORCHAO:
            TORCHAO[recipe](model)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
        if isinstance(recipe, str) and recipe in OURS:
            recipe = recipe_config(recipe, device, seed)
        self.controller = None
        if isinstance(recipe, SnipConfig):
            self.controller = SnipController(model, self.optimizer, recipe)
        for layer in model.model.layers:
            layer.compile(backend=COMPILER)
        ids = torch.randint(model.config.vocab_size, batch, device=device)
        self.batch = {"input_ids": ids, "labels": ids}
        self.device, self.number = device, 0

    def step(self) -> Tensor:
        """Does one optimizer step and returns its loss."""
        self.number += 1
        if self.controller is not None:
            self.controller.capture(self.batch)
        with autocast(self.device):
            loss = self.model(**self.batch).loss
        loss.backward()
        if self.controller is not None:
            self.controller.before_optimizer_step(self.number)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.controller is not None:
            self.controller.after_step(self.number)
        return loss.detach()


RECIPES = (BF16, *OURS, *TORCHAO)
