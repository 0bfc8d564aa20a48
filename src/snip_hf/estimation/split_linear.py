"""Large linears that are not swapped, such as the output head, in a pass: on a GPU as split products too.

In FP32 beside the tensor cores a head takes as long as several blocks. Its outputs are taken in parts, so that the BF16
parts of a whole vocabulary are never held.

Legend: T tokens, I in_features, O out_features.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .products import is_split, product

# Outputs at a time. Linears of fewer are left to torch: they take little time, and routers choose by them.
OUTPUTS = 8192


class SplitLinear(torch.autograd.Function):
    """Y = X W^T + b of a frozen W, (T, O)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.has_bias = bias is not None
        y = x.new_empty(x.shape[0], weight.shape[0])
        for part, of_weight in zip(y.split(OUTPUTS, 1), weight.split(OUTPUTS), strict=True):
            part.copy_(product(x, of_weight.t()))  # (T, I) x (I, O)
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        grad_bias = grad_output.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        if not ctx.needs_input_grad[0]:
            return None, None, grad_bias
        if torch.is_grad_enabled():
            # A loss that differentiates this gradient: the kernels that split operands have no derivative.
            return grad_output @ weight, None, grad_bias
        grad_input = grad_output.new_zeros(grad_output.shape[0], weight.shape[1])
        for part, of_weight in zip(grad_output.split(OUTPUTS, 1), weight.split(OUTPUTS), strict=True):
            grad_input += product(part, of_weight)  # (T, O) x (O, I)
        return grad_input, None, grad_bias


@contextmanager
def split_linears() -> Iterator[None]:
    """Lets `nn.functional.linear` compute so for the time of the context.

    The function itself is replaced, since backward passes that recompute run in threads of their own.
    """
    original = nn.functional.linear

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not _is_taken(input, weight):
            return original(input, weight, bias)
        y: Tensor = SplitLinear.apply(input.reshape(-1, input.shape[-1]), weight, bias)
        return y.view(*input.shape[:-1], weight.shape[0])

    nn.functional.linear = linear
    try:
        yield
    finally:
        nn.functional.linear = original


def _is_taken(input: Tensor, weight: Tensor) -> bool:
    is_plain = type(input) is Tensor and type(weight) in (Tensor, nn.Parameter) and not weight.requires_grad
    return is_plain and weight.dim() == 2 and weight.shape[0] >= OUTPUTS and is_split(input, weight)
