"""The refusals of a start: launches, models, pipeline parts and plans that snip-hf cannot work with."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..config import SnipConfig
from ..costs.flops import Weights
from ..layers.state import snip_linears
from ..optimizers.deepspeed_zero import check_deepspeed
from ..parallel.sharding import is_fully_sharded, is_sharded, offloads
from ..planning.plan import PrecisionPlan
from ..policies.registry import needs_probe
from ..text import WITHOUT_PROBE


def check_launch(config: SnipConfig, accelerator: Any) -> None:
    """Refuses what this version cannot run under.

    Raises:
        ValueError: FP8 or FP16 mixed precision; FSDP version 1, offloading, a stage of DeepSpeed that partitions
            weights, tensor or context parallelism, or Megatron-LM with a policy that needs a probe.
    """
    if accelerator is None:
        return
    if accelerator.mixed_precision == "fp8":
        raise ValueError(
            "mixed_precision='fp8' would convert the linears a second time; snip-hf does the FP8 itself. Use 'bf16' "
            "or 'no'."
        )
    if not needs_probe(config):
        return
    if accelerator.mixed_precision == "fp16":
        raise ValueError("mixed_precision='fp16' scales the gradients that the probe needs; use 'bf16' or 'no'.")
    plugin = getattr(getattr(accelerator, "state", accelerator), "deepspeed_plugin", None)
    if plugin is not None:
        check_deepspeed(plugin.deepspeed_config)
    reason = _unsupported(accelerator)
    if reason is not None:
        raise ValueError(
            f"policy={config.policy!r} cannot probe a model under {reason}, or use a plan file or {WITHOUT_PROBE}."
        )


def _unsupported(accelerator: Any) -> str | None:
    """Returns what the probe cannot work under, and what to use instead."""
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    state = getattr(accelerator, "state", accelerator)
    parallelism = getattr(state, "parallelism_config", None)
    for name in ("tp", "cp", "sp"):
        if parallelism is not None and getattr(parallelism, f"{name}_size", 1) > 1:
            return f"{name}_size={getattr(parallelism, f'{name}_size')}: its ranks hold parts of the activations; use 1"
    if kind == "FSDP":
        plugin = state.fsdp_plugin
        if getattr(plugin, "fsdp_version", 1) != 2:
            return "FSDP version 1, which flattens the weights; use version 2 (fsdp_version: 2)"
        # Without offloading accelerate's plugin has a policy too, one that does nothing.
        if offloads(plugin.cpu_offload):
            return "FSDP2 with offloading to the CPU; turn fsdp_offload_params off"
    if kind == "MEGATRON_LM":
        return "Megatron-LM; use FSDP2 (fsdp_version: 2)"
    return None


def check_model(model: nn.Module, log: logging.Logger) -> None:
    """Refuses, or warns of, what the probe cannot measure.

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
    config = getattr(model, "config", None)
    if "relu" in (getattr(config, "hidden_act", None), getattr(config, "activation_function", None)):
        log.warning(
            "snip-hf: the model's activation is ReLU, whose kinks the probe's differences take for curvature: "
            "weight divergences may be several times too high (docs/limitations.md)."
        )
    attention = getattr(config, "_attn_implementation", None) or ""
    if attention.startswith("flash"):
        raise ValueError(
            f"attn_implementation={attention!r} cannot run the probe's FP32 passes; expected 'sdpa' or 'eager'. "
            "Load the model with attn_implementation='sdpa', or use a policy that needs no probe."
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
                    "needs stages with FP32 weights, without autocast. Use these, or a policy that needs no probe."
                )


def check_sizes(plan: PrecisionPlan, flops: Weights) -> None:
    """Refuses a plan for layers of other sizes.

    Raises:
        ValueError: names the layer and both sizes.
    """
    for layer, row in flops.items():
        planned = plan.flops.get(layer, row)
        if planned["forward"] != row["forward"]:
            raise ValueError(
                f"The plan is for a layer {layer!r} of {planned['forward']:g} FLOPs per token, the model's has "
                f"{row['forward']:g}. Was it made for another model? Run `snip-hf inspect PLAN --model MODEL` "
                "to compare."
            )
