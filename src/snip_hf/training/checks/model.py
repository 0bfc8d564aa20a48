"""Refusals of a model: what the probe cannot run through."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ...layers.state import snip_linears
from ...optimizers.parts import groups_of
from ...parallel.sharding import is_fully_sharded, is_sharded
from ...text import WITHOUT_PROBE


def check_model(model: nn.Module) -> None:
    """Refuses what the probe cannot measure.

    Raises:
        ValueError: FlashAttention, which knows no FP32, or tensor parallelism.
    """
    is_sharded_by_fsdp = is_fully_sharded(model)
    parts = [name for name, layer in snip_linears(model).items() if is_sharded(layer.weight)]
    if (getattr(model, "tp_size", None) or 1) > 1 or (parts and not is_sharded_by_fsdp):
        raise ValueError(
            f"The model is tensor-parallel ({parts[0] if parts else 'tp_size is above 1'}): its ranks hold parts of "
            f"the activations, which the probe cannot put together. Use FSDP2 or DDP, or {WITHOUT_PROBE}."
        )
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ValueError(
            "The model is in FSDP version 1, which flattens the weights. Use version 2 (torch's fully_shard), or "
            f"{WITHOUT_PROBE}."
        )
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None) or ""
    if attention.startswith("flash"):
        raise ValueError(
            f"attn_implementation={attention!r} cannot run the probe's FP32 passes; expected 'sdpa' or 'eager'. "
            f"Load the model with attn_implementation='sdpa', or use {WITHOUT_PROBE}."
        )


def check_weights(optimizer: Any) -> None:
    """Refuses an optimizer that trains weights in FP16.

    Raises:
        ValueError: a GradScaler does not unscale their gradients, and without one these are lost below 2^-24.
    """
    weights = [weight for group in groups_of(optimizer) for weight in group["params"] if weight.requires_grad]
    halves = sum(weight.dtype == torch.float16 for weight in weights)
    if halves:
        raise ValueError(
            f"{halves} of the {len(weights)} trained parameters are in FP16: a GradScaler does not unscale their "
            "gradients, and without one small gradients become 0. Load the model in FP32 "
            f"(from_pretrained(..., dtype=torch.float32)), with which fp16=True still multiplies in FP16, or use "
            f"{WITHOUT_PROBE}."
        )


def check_parts(parts: Iterable[nn.Module]) -> None:
    """Refuses parts of a pipeline that the probe's FP32 passes cannot run through.

    Raises:
        ValueError: weights in another dtype: what stages send each other would not fit the buffers of training.
    """
    for part in parts:
        for name, parameter in part.named_parameters():
            if parameter.is_floating_point() and parameter.dtype != torch.float32:
                raise ValueError(
                    f"The pipeline's parameter {name!r} is {parameter.dtype}; the probe runs its passes in FP32 and "
                    f"needs stages with FP32 weights, without autocast. Use these, or {WITHOUT_PROBE}."
                )
