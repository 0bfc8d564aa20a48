"""Torch's attention in a pass: in FP32 on a GPU it uses its memory-efficient kernels, which run on tensor cores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def efficient_attention() -> Iterator[None]:
    """Makes `nn.functional.scaled_dot_product_attention` use these kernels within the context.

    The function itself is replaced, since backward passes that recompute run in threads of their own.
    """
    original = nn.functional.scaled_dot_product_attention

    def attention(
        query: Tensor, key: Tensor, value: Tensor, *positional: Any, enable_gqa: bool = False, **given: Any
    ) -> Tensor:
        if enable_gqa and query.is_cuda and query.dtype == torch.float32:
            # The memory-efficient kernel holds no (tokens, tokens) matrices, but takes no shared heads.
            key, value, enable_gqa = per_query_head(query, key), per_query_head(query, value), False
        return original(query, key, value, *positional, **given, enable_gqa=enable_gqa)  # type: ignore[misc]

    nn.functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = original


def per_query_head(query: Tensor, shared: Tensor) -> Tensor:
    """Returns keys or values (..., fewer heads, L, E) as (..., heads of the query, L, E)."""
    return shared.repeat_interleave(query.shape[-3] // shared.shape[-3], dim=-3)
