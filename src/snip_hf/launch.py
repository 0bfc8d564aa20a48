"""What a run cannot be launched under, and how the model is found inside what a launcher wrapped around it."""

from __future__ import annotations

from typing import Any

from torch import nn

from .config import SnipConfig
from .policies import needs_probe


def check_launch(config: SnipConfig, accelerator: Any) -> None:
    """Refuses what this version cannot run under.

    Raises:
        ValueError: FP8 or FP16 mixed precision; sharded or several processes with a policy that needs a probe.
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
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if accelerator.num_processes > 1 or kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        raise ValueError(
            f"policy={config.policy!r} runs in one process so far; got {accelerator.num_processes} processes ({kind}). "
            "Launch with --num_processes 1, or use a policy that needs no probe, such as a plan file or "
            "policy='layer-position'."
        )


def unwrap(model: nn.Module) -> nn.Module:
    """Returns the model inside DDP and torch.compile wrappers.

    Raises:
        ValueError: it is in `nn.DataParallel`.
    """
    while True:
        if isinstance(model, nn.DataParallel):
            raise ValueError(
                "nn.DataParallel copies the model in every step, and the plan with it; start one process per GPU with "
                "`accelerate launch`, or show one GPU only (CUDA_VISIBLE_DEVICES=0)."
            )
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner
