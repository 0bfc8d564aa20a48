"""Refusals of a launch, before anything is built: how the processes and the Trainer were started."""

from __future__ import annotations

from typing import Any

from ...config import SnipConfig
from ...optimizers.deepspeed_zero import check_deepspeed
from ...parallel.sharding import offloads
from ...policies.registry import needs_probe
from ...text import WITHOUT_PROBE


def check_trainer(args: Any) -> None:
    """Refuses a `transformers.Trainer` that trains in a way that snip-hf cannot work with.

    Args:
        args: its `TrainingArguments`.

    Raises:
        ValueError: nn.DataParallel.
    """
    if args.n_gpu > 1 and args.parallel_mode.value == "not_distributed":
        raise ValueError(
            f"The Trainer would put the model into nn.DataParallel on {args.n_gpu} GPUs, which copies the plan in "
            "every step. Start one process per GPU with `accelerate launch`, or show one GPU only "
            "(CUDA_VISIBLE_DEVICES=0)."
        )


def check_launch(config: SnipConfig, accelerator: Any) -> None:
    """Refuses what this version cannot run under.

    Raises:
        ValueError: FP8 mixed precision; a guard under DeepSpeed; and with a policy that needs a probe FSDP version 1,
            offloading, a stage of DeepSpeed that partitions weights, FP16 under FSDP2 or DeepSpeed, tensor or context
            parallelism, or Megatron-LM.
    """
    if accelerator is None:
        return
    if accelerator.mixed_precision == "fp8":
        raise ValueError(
            "mixed_precision='fp8' would convert the linears a second time; snip-hf does the FP8 itself. Use 'bf16' "
            "or 'no'."
        )
    plugin = getattr(getattr(accelerator, "state", accelerator), "deepspeed_plugin", None)
    if plugin is not None:
        check_guard(config, is_deepspeed=True)
    if not needs_probe(config):
        return
    if plugin is not None:
        # Its file may leave the precision to Accelerate ("auto").
        asked = {"fp16": {"enabled": True}} if accelerator.mixed_precision == "fp16" else {}
        check_deepspeed({**plugin.deepspeed_config, **asked})
    reason = _unsupported(accelerator)
    if reason is not None:
        raise ValueError(
            f"policy={config.policy!r} cannot probe a model under {reason}, or use a plan file or {WITHOUT_PROBE}."
        )


def check_guard(config: SnipConfig, is_deepspeed: bool) -> None:
    """Refuses a guard under DeepSpeed.

    Raises:
        ValueError: the guard is on.
    """
    if config.guard != "off" and is_deepspeed:
        raise ValueError(
            f"guard={config.guard!r} cannot work under DeepSpeed, which clips, steps and zeroes the gradients inside "
            "the backward pass. Set guard='off', or use FSDP2 (fsdp_version: 2) or DDP."
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
        if accelerator.mixed_precision == "fp16":
            return "FSDP2 with mixed_precision='fp16', whose loss scale it does not know; use 'bf16', or DDP"
    if kind == "MEGATRON_LM":
        return "Megatron-LM; use FSDP2 (fsdp_version: 2)"
    return None
