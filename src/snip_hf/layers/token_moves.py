"""Tokens on their way to experts and back, with gradients that are summed in a fixed order.

Legend: T tokens, K experts per token, S = T * K pairs of a token and its expert, sorted by expert in some order.

torch's own gradient of `x[index]` adds into zeros. On GPUs compiled code does that by atomic operations, in any order.
Here the order is known to be a permutation of the pairs, so that each gradient is read from its place instead.

`back` is everywhere `inverse(order)`, which a pass computes once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def sorted_tokens(hidden_states: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """Returns each pair's token, (S, *), for hidden_states (T, *) and the order of the pairs (S,)."""
    x: Tensor = _Sorted.apply(hidden_states, order, back)
    return x


def unsorted(x: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """Returns x (S, *), whose rows are in an order (S,) of the pairs, in the order of the batch again."""
    result: Tensor = _Permuted.apply(x, back, order)
    return result


def permuted(x: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """Returns x (S, *), whose rows are in the order of the batch, in another order (S,)."""
    result: Tensor = _Permuted.apply(x, order, back)
    return result


def inverse(order: Tensor) -> Tensor:
    """Returns where each pair of the batch is in an order, (S,)."""
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0], device=order.device)
    return back


class _Sorted(torch.autograd.Function):
    """The tokens of pairs in an order."""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        tokens = hidden_states.shape[0]
        ctx.shape = tokens, max(order.shape[0] // max(tokens, 1), 1)
        return hidden_states[order // ctx.shape[1]]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (back,) = ctx.saved_tensors
        return grad[back].view(*ctx.shape, *grad.shape[1:]).sum(1), None, None


class _Permuted(torch.autograd.Function):
    """x[order]; back is the inverse of the order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (back,) = ctx.saved_tensors
        return grad[back], None, None
