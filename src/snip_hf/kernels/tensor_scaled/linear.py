"""A linear layer of folded operands: what is quantized when, and what is kept for backward.

Legend: T tokens, I in_features, O out_features; x (..., I), weight (O, I). Numerics are those of `kernels.emulated`
inside the range of `folding`, but that gradients of FP32 weights are not rounded to BF16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..products import refuse_double_backward
from ..tensor_core import Quantized
from .operators import fold_operand, multiply, multiply_weight

_ACTIVATION, _GRADIENT, _WEIGHT = range(3)  # as in `gemms.OPERANDS`
# Elements of the largest weight that is folded for forward and grad_input at once, in one launch and from one read. Its
# layout for grad_input takes a byte per element until then, which would be too much for larger ones.
SMALL = 2**22


def quantize_input(
    x: Tensor, state: Tensor, record: Tensor, table: Tensor, gemms: tuple[int, int], counts: bool
) -> Quantized:
    """Returns `operators.fold_operand` of x (..., I) for the forward and the grad_weight GEMM."""
    with torch.no_grad():
        quantized: Quantized = fold_operand(
            x.reshape(-1, x.shape[-1]), state, record, table, _ACTIVATION, gemms, counts
        )
    return quantized


def quantize_weight(
    weight: Tensor, state: Tensor, record: Tensor, table: Tensor, gemms: tuple[int, int], counts: bool
) -> Quantized:
    """Returns `operators.fold_operand` of a weight (O, I) for the forward and the grad_input GEMM."""
    quantized: Quantized = fold_operand(weight.detach(), state, record, table, _WEIGHT, gemms, counts)
    return quantized


Weight = tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]
"""A weight (O, I); its layer's state, record and table; and its layouts, as far as they are kept."""


def forward_product(
    rows: Sequence[Tensor], own: Weight, how: tuple[bool, bool], tokens: int, dtype: torch.dtype
) -> tuple[Tensor, Sequence[Tensor]]:
    """Returns X W^T, (T, O), and the weight for grad_input, empty if it is folded again then.

    Args:
        rows: of X, and their parameters.
        own: the weight; of its layouts both or none are kept.
        how: whether there will be a grad_input GEMM that is quantized; whether the record takes note of the pass.
        tokens: T.
        dtype: of the product.
    """
    weight, tensors, kept = own
    has_grad_input, counts = how
    if kept:
        shape = tokens, weight.shape[0]
        return multiply("forward", rows, kept[:2], shape, dtype, tensors[1]), kept[2:]
    keeps = has_grad_input and weight.numel() <= SMALL
    y, *layout = multiply_weight("forward", rows, weight, tensors, (keeps, counts), tokens, dtype)
    return y, layout


def grad_input_product(rows: Sequence[Tensor], own: Weight, counts: bool, tokens: int, dtype: torch.dtype) -> Tensor:
    """Returns G W, (T, I).

    Args:
        rows: of G, and their parameters.
        own: the weight; of its layouts, that for grad_input is kept or none.
        counts: whether the record takes note of the pass.
        tokens: T.
        dtype: of the product.
    """
    weight, tensors, kept = own
    if kept:
        return multiply("grad_input", rows, kept, (tokens, weight.shape[1]), dtype, tensors[1])
    return multiply_weight("grad_input", rows, weight, tensors, (False, counts), tokens, dtype)[0]


class TensorScaledGemms(torch.autograd.Function):
    """Y = X W^T + b of E4M3 operands. Of X, what is saved for backward is quantized, one byte per element.

    Or nothing, where a compiled graph can compute X again from what other operations save anyway: norms, activation
    functions and attention save what they need of their own. X without columns says so.

    Args of forward:
        x: (..., I), BF16.
        weight: (O, I), the parameter itself, FP32 or BF16.
        bias: (O), BF16, or None.
        state, record, table: the layer's.
        how: for each GEMM, whether it runs in BF16; whether the backward pass will compute the weight's gradient;
            whether the record takes note of the pass; whether there will be a grad_input GEMM. A Python constant:
            changing it triggers recompilation.
        quantized: x as `quantize_input` gives it, for the GEMMs that are not high; then the weight, both layouts with
            their parameters, if they are kept, or nothing, if each pass quantizes what it needs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor,
        record: Tensor,
        table: Tensor,
        how: tuple[tuple[bool, bool, bool], bool, bool, bool],
        *quantized: Tensor,
    ) -> Tensor:
        high, keeps_x, counts, has_grad_input = how
        out_features, in_features = weight.shape
        rows, columns, weights = quantized[:2], quantized[2:4], quantized[4:]
        by_input: Sequence[Tensor] = weights[2:]
        if high[0]:
            y = torch.nn.functional.linear(x.reshape(-1, in_features), weight.to(x.dtype), bias)
        else:
            # The bias is added to the FP32 sums, as emulated.
            dtype = x.dtype if bias is None else torch.float32
            own, how_weight = (weight, (state, record, table), weights), (has_grad_input and not high[1], counts)
            y, by_input = forward_product(rows, own, how_weight, x.numel() // in_features, dtype)
            y = y if bias is None else (y + bias).to(x.dtype)
        # A copy: the next forward pass may write the state before this one's backward pass reads it. A compiled graph
        # would make it in the backward pass, where it is of no use; torch notices there if the state was written.
        kept_state = state if torch.compiler.is_compiling() else state.clone()
        kept_x = x if keeps_x and (high[2] or columns[0].numel() == 0) else None
        ctx.save_for_backward(kept_x, weight, kept_state, record, table, *columns, *by_input)
        ctx.high, ctx.x_shape = high, x.shape
        # Of gradients and weights, and of X if it is folded in the backward pass alone.
        ctx.counts, ctx.counts_x = counts, counts and high[0]
        # A view would be refused by autograd where a model adds to it in place (Falcon: `attention_output += ...`).
        result: Tensor = torch.ops.aten._unsafe_view(y, [*x.shape[:-1], out_features])
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_double_backward()
        x, weight, state, record, table, *kept = ctx.saved_tensors
        x_columns, by_input = kept[:2], kept[2:]
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        _, high_input, high_weight = ctx.high
        out_features, in_features = weight.shape
        g = grad_output.reshape(-1, out_features)
        gemms = 1 if needs_x and not high_input else -1, 2 if needs_weight and not high_weight else -1
        quantized = fold_operand(g, state, record, table, _GRADIENT, gemms, ctx.counts)
        grad_x = grad_weight = None
        if needs_x and high_input:
            grad_x = g @ weight.to(g.dtype)
        elif needs_x:
            own = weight, (state, record, table), by_input
            grad_x = grad_input_product(quantized[:2], own, ctx.counts, g.shape[0], g.dtype)
        if needs_weight and high_weight:
            grad_weight = g.t() @ x.reshape(-1, in_features)
        elif needs_weight:
            if x_columns[0].numel() == 0 and g.numel() > 0:
                # What depends on a gradient stays in the backward pass. Without it, torch.compile would fold X in the
                # forward pass and save the result, or save X. So it computes X again from what is saved anyway. The
                # input of a square linear is attention's output as a rule, which is saved as it is: no copy then.
                is_saved = in_features == out_features
                late = (x if is_saved else torch.where(g[0, 0] == 0, x, x)).reshape(-1, in_features)
                # Not g itself: where it is cast from FP32, each operator that reads it would get a copy of its own.
                after = quantized[3]
                x_columns = fold_operand(late, state, record, table, _ACTIVATION, (-1, 2), ctx.counts_x, after)[2:]
            # In the parameter's own precision: rounding FP32 sums to BF16 first would gain nothing.
            dtype = g.dtype if weight.dtype == g.dtype else torch.float32
            grad_weight = multiply("grad_weight", quantized[2:], x_columns, (out_features, in_features), dtype, record)
        return (
            None if grad_x is None else grad_x.view(ctx.x_shape),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            g.sum(0) if needs_bias else None,
            *[None] * (len(ctx.needs_input_grad) - 3),
        )
