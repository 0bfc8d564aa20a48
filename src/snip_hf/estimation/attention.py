"""Torch's attention in a pass: in FP32 on a GPU it takes kernels that run on tensor cores.

On Hopper these are ours, of products of BF16 parts (`kernels.split_attention`), where attention is causal or sees all.
Else they are torch's memory-efficient ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..kernels.split_attention import Attention, attend, attention_gradients, takes

_by_torch = nn.functional.scaled_dot_product_attention


class SplitAttention(torch.autograd.Function):
    """Attention (B, H, L, D) of queries, keys and values, as `attend` takes them."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, task: Attention) -> Tensor:
        out, logs = attend(query, key, value, task)
        ctx.save_for_backward(query, key, value, out, logs)
        ctx.task = task
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, out, logs = ctx.saved_tensors
        if torch.is_grad_enabled():
            # A loss that differentiates these gradients: the kernels have no derivative.
            return *_differentiable_gradients((query, key, value), grad_output, ctx.task), None
        return *attention_gradients(grad_output, (query, key, value), out, logs, ctx.task), None


def _differentiable_gradients(
    tensors: tuple[Tensor, Tensor, Tensor], grad_output: Tensor, task: Attention
) -> list[Tensor | None]:
    """Returns the gradients of those that ask for one, None of others."""
    query, key, value = tensors
    asking = [one for one in tensors if one.requires_grad]
    with sdpa_kernel(SDPBackend.MATH):
        out = _by_torch(query, key, value, is_causal=task.is_causal, scale=task.scale, enable_gqa=True)
        found = iter(torch.autograd.grad(out, asking, grad_output, create_graph=True))
    return [next(found) if one.requires_grad else None for one in tensors]


@contextmanager
def efficient_attention() -> Iterator[None]:
    """Lets `nn.functional.scaled_dot_product_attention` compute so for the time of the context.

    The function itself is replaced, since backward passes that recompute run in threads of their own.
    """
    original = nn.functional.scaled_dot_product_attention

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        is_plain = attn_mask is None and dropout_p == 0 and (enable_gqa or query.shape[-3:-2] == key.shape[-3:-2])
        if is_plain and takes(query, key, value, is_causal):
            task = Attention(query.shape[-1] ** -0.5 if scale is None else scale, is_causal)
            found: Tensor = SplitAttention.apply(query, key, value, task)
            return found
        if enable_gqa and query.is_cuda and query.dtype == torch.float32:
            # Only so does it take the memory-efficient kernel, which holds no (tokens, tokens) matrices.
            key, value, enable_gqa = per_query_head(query, key), per_query_head(query, value), False
        given: dict[str, Any] = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal}
        return original(query, key, value, **given, scale=scale, enable_gqa=enable_gqa)

    nn.functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = original


def per_query_head(query: Tensor, shared: Tensor) -> Tensor:
    """Returns keys or values (..., fewer heads, L, E) as (..., heads of the query, L, E)."""
    return shared.repeat_interleave(query.shape[-3] // shared.shape[-3], dim=-3)
