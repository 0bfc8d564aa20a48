"""FlashAttention as torch ships it, registered in transformers: packed sequences in half precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

NAME = "torch_varlen"


def register() -> str:
    """Registers the attention and its masks; returns its name."""
    AttentionInterface.register(NAME, varlen_attention)
    AttentionMaskInterface.register(NAME, flash_attention_mask)
    return NAME


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence. Packed sequences are given by `cu_seq_lens_q` or `position_ids`.

    Args:
        module: the attention layer.
        query: (rows, heads, tokens, size).
        key: the same with fewer heads, as `value`.
        value: in half precision.
        attention_mask: None, since padding is not supported.
        scaling: factor of the scores.
        options: of other attentions.

    Returns:
        (rows, tokens, heads, size), and None in place of the scores.

    Raises:
        ValueError: the rows are padded.
        RuntimeError: the values are not in half precision.
    """
    if attention_mask is not None:
        raise ValueError(
            f"{NAME} cannot read padded rows; pack them (packing=True or padding_free=True) or use 'sdpa'."
        )
    rows, heads, tokens, size = query.shape
    groups = heads // key.shape[1]
    # Under autocast, rotary embeddings return FP32. torch 2.11's function has no `enable_gqa`.
    inputs = query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    flat = [one.to(value.dtype).transpose(1, 2).reshape(-1, heads, size) for one in inputs]
    ends, longest = _ends(rows, tokens, options, query.device)
    attend = _by_torch if query.is_cuda else _one_by_one
    return attend(*flat, ends, longest, scaling).view(rows, tokens, heads, size), None


def _ends(rows: int, tokens: int, options: dict[str, Any], device: torch.device) -> tuple[Tensor, int]:
    """Returns where sequences end, with 0 first, and the length of the longest."""
    if (ends := options.get("cu_seq_lens_q")) is not None:
        return ends, options["max_length_q"]
    position_ids = options.get("position_ids")
    if position_ids is None or rows > 1:
        return torch.arange(0, (rows + 1) * tokens, tokens, dtype=torch.int32, device=device), tokens
    starts = (position_ids[0] == 0).nonzero()[:, 0]
    ends = torch.cat([starts, starts.new_tensor([tokens])]).to(torch.int32)
    return ends, int(ends.diff().max())


def _by_torch(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, scale: float | None) -> Tensor:
    # This window makes the attention causal.
    found: Tensor = varlen_attn(query, key, value, ends, ends, longest, longest, scale=scale, window_size=(-1, 0))
    return found


def _one_by_one(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, scale: float | None) -> Tensor:
    """Takes the kernel's place on a CPU, where torch has none."""
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError(f"varlen attention only supports fp16 and bf16, got {query.dtype}")
    lengths = ends.diff().tolist()
    parts = zip(*(one.transpose(0, 1).split(lengths, 1) for one in (query, key, value)), strict=True)
    found = [scaled_dot_product_attention(*part, is_causal=True, scale=scale) for part in parts]
    return torch.cat(found, 1).transpose(0, 1)
