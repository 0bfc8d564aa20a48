"""A stand-in for FlashAttention on a CPU: half precision only, and no masks but sequence ends, padding and windows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

NAME = "half_attention"


def _segments(mask: Tensor | None, rows: int, tokens: int, options: dict[str, Any]) -> Tensor:
    """Returns the sequence of each token, (rows, tokens); -1: padding. As transformers finds it for FlashAttention."""
    found = torch.zeros(rows, tokens, dtype=torch.long)
    ends, position_ids = options.get("cu_seq_lens_q"), options.get("position_ids")
    if mask is not None:
        return found.masked_fill(~mask.bool(), -1)
    if ends is not None:
        return torch.repeat_interleave(torch.arange(len(ends) - 1), ends.diff())[None]
    if position_ids is not None and rows == 1:
        return (position_ids == position_ids.min()).cumsum(-1)
    return found


def half_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Query (rows, heads, tokens, size), key and value of fewer heads, to (rows, tokens, heads, size)."""
    if torch.is_autocast_enabled("cpu"):  # rotary positions have made FP32 of them
        query, key, value = (one.to(torch.get_autocast_dtype("cpu")) for one in (query, key, value))
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError(f"half_attention only supports fp16 and bf16 data type, got {query.dtype}")
    rows, heads, tokens, size = query.shape
    segments = _segments(attention_mask, rows, tokens, options)
    places = torch.arange(tokens)
    distance = places[:, None] - places
    seen = (segments[:, :, None] == segments[:, None]) & (distance >= 0)
    if sliding_window is not None:
        seen &= distance < sliding_window
    seen |= torch.eye(tokens, dtype=torch.bool)  # padding sees itself, so that no row is empty
    every = heads // key.shape[1]
    scores = query.float() @ key.repeat_interleave(every, 1).float().mT * (scaling or size**-0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    if s_aux is not None:
        sinks = s_aux.float().reshape(1, -1, 1, 1).expand(rows, -1, tokens, 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    found = weights @ value.repeat_interleave(every, 1).float()
    return found.to(query.dtype).transpose(1, 2).contiguous(), None


@contextmanager
def registered() -> Iterator[str]:
    """Registers the attention under its name, as users register theirs, until the end."""
    AttentionInterface.register(NAME, half_attention)
    AttentionMaskInterface.register(NAME, flash_attention_mask)
    try:
        yield NAME
    finally:
        del AttentionInterface._global_mapping[NAME], AttentionMaskInterface._global_mapping[NAME]
