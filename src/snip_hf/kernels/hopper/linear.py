"""Linear layers on FP8 tensor cores: what is quantized when, and what is kept for backward.

Legend: T tokens, I in_features, O out_features; x (..., I), weight (O, I). Numerics are those of `kernels.emulated`,
but that gradients of FP32 weights are not rounded to BF16; operands and layouts are those of `operators`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import hopper
from ..products import refuse_double_backward
from ..tensor_core import Quantized


def quantize_input(x: Tensor, state: Tensor, row_gemm: int, column_gemm: int) -> Quantized:
    """Returns `operators.quantize_tokens` of x (..., I) for the forward and the grad_weight GEMM."""
    with torch.no_grad():
        quantized: Quantized = hopper.operators.quantize_tokens(
            x.reshape(-1, x.shape[-1]), state, row_gemm, column_gemm, False
        )
    return quantized


class TensorCoreGemms(torch.autograd.Function):
    """Y = X W^T + b on FP8 tensor cores. Of X, what is saved for backward is quantized, one byte per element.

    Args of forward:
        x: (..., I), BF16.
        weight: (O, I), the parameter itself, FP32 or BF16.
        bias: (O), BF16, or None.
        state: the layer's.
        high: for each GEMM, whether it runs in BF16. A Python constant: changing it triggers recompilation.
        keeps_x: whether the backward pass will compute the weight's gradient.
        quantized: x as `quantize_input` gives it, for the GEMMs that are not high; then the weight, both layouts with
            their scales, if they are kept, or nothing, if each pass quantizes what it needs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor,
        high: tuple[bool, bool, bool],
        keeps_x: bool,
        *quantized: Tensor,
    ) -> Tensor:
        out_features, in_features = weight.shape
        rows, row_scales, columns, column_scales, *weights = quantized
        if high[0]:
            y = torch.nn.functional.linear(x.reshape(-1, in_features), weight.to(x.dtype), bias)
        else:
            by_output, scales, _, _ = weights or hopper.operators.quantize_weight(weight, state, True, False)
            tokens = x.numel() // in_features
            # The bias is added to the FP32 sums, as emulated.
            dtype = x.dtype if bias is None else torch.float32
            y = hopper.operators.multiply(rows, row_scales, by_output, scales, True, tokens, out_features, dtype)
            y = y if bias is None else (y + bias).to(x.dtype)
        # A copy: the next forward pass may write the state before this one's backward pass reads it. A compiled graph
        # would make it in the backward pass, where it is of no use; torch notices there if the state was written.
        kept_state = state if torch.compiler.is_compiling() else state.clone()
        ctx.save_for_backward(
            x if keeps_x and high[2] else None, weight, columns, column_scales, kept_state, *weights[2:]
        )
        ctx.high, ctx.x_shape = high, x.shape
        # A view would be refused by autograd where a model adds to it in place (Falcon: `attention_output += ...`).
        result: Tensor = torch.ops.aten._unsafe_view(y, [*x.shape[:-1], out_features])
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_double_backward()
        x, weight, x_columns, x_scales, state, *kept = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        _, high_input, high_weight = ctx.high
        out_features, in_features = weight.shape
        g = grad_output.reshape(-1, out_features)
        rows, row_scales, columns, column_scales = hopper.operators.quantize_tokens(
            g, state, 1 if needs_x and not high_input else -1, 2 if needs_weight and not high_weight else -1, True
        )
        grad_x = grad_weight = None
        if needs_x and high_input:
            grad_x = g @ weight.to(g.dtype)
        elif needs_x:
            by_input, scales = kept or hopper.operators.quantize_weight(weight, state, False, True)[2:]
            grad_x = hopper.operators.multiply(rows, row_scales, by_input, scales, True, g.shape[0], in_features)
        if needs_weight and high_weight:
            grad_weight = g.t() @ x.reshape(-1, in_features)
        elif needs_weight:
            # In the parameter's own precision: rounding FP32 sums to BF16 first would gain nothing.
            dtype = g.dtype if weight.dtype == g.dtype else torch.float32
            grad_weight = hopper.operators.multiply(
                columns, column_scales, x_columns, x_scales, False, out_features, in_features, dtype
            )
        return (
            None if grad_x is None else grad_x.view(ctx.x_shape),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            g.sum(0) if needs_bias else None,
            *[None] * (len(ctx.needs_input_grad) - 3),
        )
