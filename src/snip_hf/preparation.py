"""What is checked and found out before the first step: backend, sizes, costs, and what the probe cannot work with."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from .config import SnipConfig
from .cost import MeasuredCost, Weights, describe_cost, linear_flops, measure_cost
from .distributed import Attempt, Processes, Ranks, is_sharded
from .kernels import hopper_lacks
from .linear import SnipLinear, convert_model, drop_quantized, pack_states, set_rank, skip_reasons, snip_linears
from .plan import PrecisionPlan, read_measured
from .policies import block_of


def swap(model: nn.Module, config: SnipConfig, pipeline: Ranks) -> None:
    """Swaps the layers of the model, or of the parts of it that this rank of a pipeline holds.

    Raises:
        ValueError: as `convert_model`; a name in `skip_modules` may match on any rank.
    """
    names = skip_reasons(model, config)
    own = {pattern: any(fnmatchcase(name, pattern) for name in names) for pattern in config.skip_modules}
    everywhere = pipeline.gather(own)
    # What matches on another rank alone is no mistake here.
    asked = [pattern for pattern in own if own[pattern] or not any(found[pattern] for found in everywhere)]
    convert_model(model, replace(config, skip_modules=tuple(asked)))


def flops_of_all(model: nn.Module, pipeline: Ranks) -> dict[str, dict[str, float]]:
    """Returns `linear_flops` of the layers of all stages of a pipeline, in the order of the model's blocks."""
    found = linear_flops(model)
    if pipeline.size == 1:
        return found
    merged = {layer: row for part in pipeline.gather(found) for layer, row in part.items()}
    numbers = {layer: int((re.findall(r"\d+", block_of(layer)) or [0])[-1]) for layer in merged}
    return {layer: merged[layer] for layer in sorted(merged, key=numbers.__getitem__)}


def cost_of_all(
    model: nn.Module, tokens: int, backend: str, path: str | None, flops: Weights, processes: Processes, log: Any
) -> MeasuredCost:
    """Times the GEMMs of all layers in `flops`, as `cost.measure_cost` does.

    One rank measures for all that hold the same layers, since each would find other times.
    """
    began = time.perf_counter()
    found, attempt = None, Attempt()
    with attempt:
        found = processes.data.by_first(lambda: measure_cost(model, tokens, backend, path).to_dict())
    processes.everyone.agree(attempt.error)
    parts = [read_measured(part) for part in processes.pipeline.gather(found)]
    seconds = {layer: row for part in parts for layer, row in part.seconds.items()}
    measured = replace(parts[0], seconds={layer: seconds[layer] for layer in flops})
    taken = time.perf_counter() - began
    log.info("snip-hf: measured the GEMMs in %.1f s. %s", taken, describe_cost(flops, measured))
    if backend == "emulated":
        log.warning("snip-hf: the emulated backend was timed: FP8 and FP4 are the times of their emulation.")
    return measured


def use_backend(
    layers: Mapping[str, SnipLinear],
    backend: str,
    data: Ranks,
    mixed_precision: str | None,
    log: logging.Logger,
) -> None:
    """Tells the layers which kernels to run and which rank they are on, and the log what that means."""
    weight = next(iter(layers.values())).weight
    drop_quantized(layers)  # what a run before that was not closed may have left
    for layer in layers.values():
        layer.snip_backend, layer.snip_device = backend, layer.weight.device.type
    pack_states(layers)
    set_rank(layers, data.rank, data.size)
    if backend == "hopper" and weight.dtype != torch.bfloat16 and mixed_precision not in (None, "bf16"):
        log.warning(
            "snip-hf: the GPU has FP8 tensor cores, but the model does not compute in BF16 (mixed_precision=%r, %s "
            "weights): FP8 and FP4 are emulated, slower than BF16. Train with bf16=True.",
            mixed_precision,
            weight.dtype,
        )
    elif backend == "hopper":
        log.info(
            "snip-hf: backend hopper: FP8 and FP4 GEMMs run on FP8 tensor cores wherever the compute dtype is "
            "BF16, others are emulated. Compile the decoder layers: without it little or nothing is gained."
        )
    else:
        log.info(
            "snip-hf: backend emulated: the numerics of FP8 and FP4, slower than BF16 (%s).",
            hopper_lacks(weight.device) or "asked for by backend='emulated'",
        )


def check_model(model: nn.Module, log: logging.Logger) -> None:
    """Refuses, or warns of, what the probe cannot measure.

    Raises:
        ValueError: FlashAttention, which knows no FP32, or tensor parallelism.
    """
    is_sharded_by_fsdp = any(isinstance(module, FSDPModule) for module in model.modules())
    parts = [name for name, layer in snip_linears(model).items() if is_sharded(layer.weight)]
    if (getattr(model, "tp_size", None) or 1) > 1 or (parts and not is_sharded_by_fsdp):
        raise ValueError(
            f"The model is tensor-parallel ({parts[0] if parts else 'tp_size is above 1'}): its ranks hold parts of "
            "the activations, which the probe cannot put together. Use FSDP2 or DDP, or a policy that needs no probe, "
            "such as policy='layer-position'."
        )
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ValueError(
            "The model is in FSDP version 1, which flattens the weights. Use version 2 (torch's fully_shard), or a "
            "policy that needs no probe, such as policy='layer-position'."
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
