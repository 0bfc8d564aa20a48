"""The attention of a probe's passes: one that computes in FP32, with the masks of training's.

FlashAttention, kernels from the Hub and flex attention compute in half precision, or have no gradients in FP32. A
probe's passes use "sdpa" instead, or "eager" for models that "sdpa" cannot compute (soft caps, attention sinks:
transformers' `_supports_sdpa`). Models build masks for the attention that their config names, so sliding windows and
padding need nothing here. Packed sequences do: fused kernels find them by `cu_seq_lens_q` or `position_ids`, but not
all models use these for masks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_masks_for_generate

from ..text import WITHOUT_PROBE

_ATTRIBUTE = "_attn_implementation_internal"
# Implementations that compute in FP32, with gradients.
_PLAIN = (None, "eager", "sdpa")
# Implementations that compute the same function as these, in half precision.
_KNOWN = re.compile("flash_attention|flex_attention|kernels-community/")


def attention_of(model: nn.Module) -> str | None:
    """Returns the names of the attentions that the configs in the model give, as training runs them."""
    names = (getattr(getattr(module, "config", None), _ATTRIBUTE, None) for module in model.modules())
    return ", ".join(sorted({str(name) for name in names if name is not None})) or None


def check_attention(model: nn.Module) -> None:
    """Refuses a model whose attention cannot be switched.

    Raises:
        ValueError: it needs to be, and the model's code does not look it up by name.
    """
    for module in model.modules():
        name = getattr(getattr(module, "config", None), _ATTRIBUTE, None)
        can_set = getattr(module, "_can_set_attn_implementation", None)
        if name not in _PLAIN and can_set is not None and not can_set():
            raise ValueError(
                f"attn_implementation={name!r} cannot run the probe's FP32 passes, and {type(module).__name__} cannot "
                "switch it, since its code does not use transformers' attention interface. Load the model with "
                f"attn_implementation='sdpa' or 'eager', or use {WITHOUT_PROBE}."
            )


def foreign_attention(model: nn.Module) -> str | None:
    """Returns a warning if the model has an attention that may compute another function than the one of a probe."""
    for _, name, plain in switched_attention(model):
        if not _KNOWN.match(name):
            return (
                f"probes use {plain!r} in place of attn_implementation={name!r}. If the two compute different "
                f"functions, use {WITHOUT_PROBE}."
            )
    return None


@contextmanager
def plain_attention(model: nn.Module) -> Iterator[None]:
    """Switches every config in the model to an attention that computes in FP32, and back afterwards.

    Use inside `passes.traceless`, which removes the hook on the model's inputs.
    """
    switched = switched_attention(model)
    for config, _, plain in switched:
        setattr(config, _ATTRIBUTE, plain)
    if switched:
        model.register_forward_pre_hook(_describe_packs, with_kwargs=True)
    try:
        yield
    finally:
        for config, name, _ in switched:
            setattr(config, _ATTRIBUTE, name)


def switched_attention(model: nn.Module) -> list[tuple[Any, str, str]]:
    """Returns every config in the model whose attention a probe switches, with the attention's name and the other's."""
    found: dict[int, tuple[Any, str, str]] = {}
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        name = getattr(config, _ATTRIBUTE, None)
        # The language model in a composed one comes after it, and knows better if they share a config.
        supports_sdpa = getattr(module, "_supports_sdpa", None)
        if name in _PLAIN or (id(config) in found and supports_sdpa is None):
            continue
        # transformers 5.17 says that "sdpa" can compute Gemma 2, but leaves its soft caps out.
        has_caps = getattr(config, "attn_logit_softcapping", None) is not None
        found[id(config)] = config, str(name), "eager" if supports_sdpa is False or has_caps else "sdpa"
    return list(found.values())


def _describe_packs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Gives the model masks in which packed sequences do not see each other."""
    mask, ends, position_ids = (kwargs.get(name) for name in ("attention_mask", "cu_seq_lens_q", "position_ids"))
    if mask is not None and not isinstance(mask, Tensor):
        raise ValueError(
            f"attention_mask is a {type(mask).__name__}, which only the attention that training uses can read; the "
            "probe's passes need FP32. Give a tensor, or `position_ids` that begin again with each packed sequence, "
            f"or use {WITHOUT_PROBE}."
        )
    # Fused kernels look for packed sequences only in batches without padding, by `cu_seq_lens_q` if it is given.
    if mask is not None and not mask.all():
        return args, kwargs
    packs = position_ids
    if ends is not None:
        packs = positions(ends)
        ids = kwargs.get("input_ids")
        shape = tuple((kwargs["inputs_embeds"] if ids is None else ids).shape[:2])
        if shape != packs.shape:
            raise ValueError(
                f"cu_seq_lens_q ends at {packs.shape[1]}, but the batch has {shape[0]} row(s) of {shape[1]} tokens; "
                "expected one row that ends there. Give the ends of all its sequences, padding being one of them."
            )
    if packs is None or packs.shape[0] > 1:
        return args, kwargs
    masks_of = getattr(model, "create_masks_for_generate", create_masks_for_generate)
    prepared = masks_of(model.config, torch.empty(*packs.shape, 0, device=packs.device), None, None, packs)
    return args, {**kwargs, "position_ids": packs if position_ids is None else position_ids, "attention_mask": prepared}


def positions(ends: Tensor) -> Tensor:
    """Returns the `position_ids`, (1, tokens), of packed sequences with these ends (0 first, as `cu_seq_lens_q`)."""
    starts = torch.repeat_interleave(ends[:-1], ends.diff())
    return (torch.arange(int(ends[-1]), device=ends.device) - starts)[None]
