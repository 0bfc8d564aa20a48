"""The wrappers that launchers put around a model (DDP, DeepSpeed, torch.compile), and the model inside."""

from __future__ import annotations

from typing import Any

from torch import nn


def unwrap(model: nn.Module) -> nn.Module:
    """Returns the model inside wrappers of DDP, DeepSpeed and torch.compile.

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
        if inner is None and (isinstance(model, nn.parallel.DistributedDataParallel) or deepspeed_engine(model)):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def deepspeed_engine(*candidates: Any) -> Any:
    """Returns the first of the candidates that is, or is an Accelerator of, a DeepSpeed engine; None if none is."""
    for candidate in candidates:
        wrapper = getattr(candidate, "deepspeed_engine_wrapped", None)
        engine = candidate if wrapper is None else wrapper.engine
        if has_class(engine, "DeepSpeedEngine"):
            return engine
    return None


def has_class(found: Any, name: str) -> bool:
    """Returns True if something is of a class of DeepSpeed's, without importing DeepSpeed."""
    return any(kind.__name__ == name and kind.__module__.startswith("deepspeed.") for kind in type(found).__mro__)
