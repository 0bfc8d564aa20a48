"""FP32 products of a probe on a GPU, fast and nearly exact: matrices as three BF16 products (ours), attention.

FP32 products run beside the tensor cores, more than ten times slower than BF16 ones. To 16 bits an FP32 number is the
sum of two BF16 numbers, high + low, and so

    left right = high high + high low + low high        (low low is as small as the bits that the two parts leave out)

which is one BF16 product three times as long, summed in FP32, with errors of about 2^-17 of its terms. A probe looks
for differences of some 2^-10 of them (docs/method.md, section 3); one BF16 product errs by 2^-9, one TF32 product by
2^-12.

Within a pass, `efficient_products` makes large linears that are not swapped, such as the output head, use such
products, and torch's attention its memory-efficient kernels. Legend: T tokens, I in_features, O out_features.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.bf16_parts import bf16_parts
from ..kernels.rounding import capability, has_kernels

# Outputs at a time, so that the BF16 parts of a whole vocabulary are never held. Linears with fewer outputs are left to
# torch: they take little time, and routers choose by them.
OUTPUTS = 8192
# The first GPUs whose tensor cores multiply BF16.
_AMPERE = (8, 0)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Returns left @ right, (..., M, K) x (..., K, N), both of two or both of three dimensions.

    FP32 operands on a GPU with BF16 tensor cores are split (`split_product`), all others multiplied as they are.
    """
    return split_product(left, right) if is_split(left, right) else left @ right


def rough_product(left: Tensor, right: Tensor, is_narrow: bool = False) -> Tensor:
    """Returns left @ right as `product` does, but from one BF16 product, not three, with errors of 2^-9 of its terms.

    Use where only sums of squares or magnitudes matter: independent rounding errors average out.

    Args:
        left: as `product` takes it, or in BF16 as `product` would split it.
        right: as left.
        is_narrow: whether such a product may be in BF16 itself.
    """
    if torch.bfloat16 not in (left.dtype, right.dtype) and not is_split(left, right):
        return left @ right
    return _multiplied(left.bfloat16(), right.bfloat16(), is_narrow and has_kernels(left.device))


def roughly(x: Tensor) -> Tensor:
    """Returns an operand as `rough_product` multiplies it, for several products: in BF16 if it multiplies in BF16."""
    return x.bfloat16() if is_split(x, x) else x


def split_product(left: Tensor, right: Tensor) -> Tensor:
    """Returns left @ right from three products of BF16 parts; shapes as in `product`, FP32.

    On a CPU the same parts are multiplied in FP32, where their products are exact.
    """
    one, other = bf16_parts(left, -1, 2), bf16_parts(right, -2, 1)
    return _multiplied(one, other)


def _multiplied(left: Tensor, right: Tensor, is_narrow: bool = False) -> Tensor:
    """Returns left @ right of BF16 matrices, summed in FP32; a narrow product is in BF16, others are in FP32."""
    if not left.is_cuda:
        found = left.to(torch.float32) @ right.to(torch.float32)
        return found.bfloat16() if is_narrow else found
    if is_narrow:
        return left @ right
    multiply = torch.mm if left.dim() == 2 else torch.bmm
    return multiply(left, right, out_dtype=torch.float32)


def is_split(left: Tensor, right: Tensor) -> bool:
    """Returns True if `product` splits these operands: FP32, outside of autocast, on a GPU with BF16 tensor cores."""
    if capability(left.device) < _AMPERE or torch.is_autocast_enabled("cuda"):
        return False
    return left.dtype == right.dtype == torch.float32 and left.numel() * right.numel() > 0


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
def efficient_products() -> Iterator[None]:
    """Replaces `nn.functional.linear` and `scaled_dot_product_attention` within the context.

    The functions themselves are replaced, since backward passes that recompute run in threads of their own.
    """
    by_torch = nn.functional.linear, nn.functional.scaled_dot_product_attention

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not _is_taken(input, weight):
            return by_torch[0](input, weight, bias)
        y: Tensor = SplitLinear.apply(input.reshape(-1, input.shape[-1]), weight, bias)
        return y.view(*input.shape[:-1], weight.shape[0])

    def attention(
        query: Tensor, key: Tensor, value: Tensor, *positional: Any, enable_gqa: bool = False, **given: Any
    ) -> Tensor:
        if enable_gqa and query.is_cuda and query.dtype == torch.float32:
            # The memory-efficient kernel holds no (tokens, tokens) matrices, but takes no shared heads.
            key, value, enable_gqa = per_query_head(query, key), per_query_head(query, value), False
        return by_torch[1](query, key, value, *positional, **given, enable_gqa=enable_gqa)  # type: ignore[misc]

    nn.functional.linear, nn.functional.scaled_dot_product_attention = linear, attention
    try:
        yield
    finally:
        nn.functional.linear, nn.functional.scaled_dot_product_attention = by_torch


def _is_taken(input: Tensor, weight: Tensor) -> bool:
    is_plain = type(input) is Tensor and type(weight) in (Tensor, nn.Parameter) and not weight.requires_grad
    return is_plain and weight.dim() == 2 and weight.shape[0] >= OUTPUTS and is_split(input, weight)


def per_query_head(query: Tensor, shared: Tensor) -> Tensor:
    """Returns keys or values (..., fewer heads, L, E) as (..., heads of the query, L, E)."""
    return shared.repeat_interleave(query.shape[-3] // shared.shape[-3], dim=-3)
