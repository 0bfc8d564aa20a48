"""A linear layer on block-scaled FP8 products.

Legend: T tokens, I in_features, O out_features; x (..., I), weight (O, I). Numerics are those of `kernels.emulated`,
except that gradients of FP32 weights are not rounded to BF16; operands and layouts are those of `operators`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import hopper
from ..tensor_core import How, Kernels, Layout, Quantized, tensor_core_linear, with_bias


def quantize_input(x: Tensor, state: Tensor, row_gemm: int, column_gemm: int) -> Quantized:
    """Returns `operators.quantize_tokens` of x (..., I) for the forward and the grad_weight GEMM."""
    with torch.no_grad():
        quantized: Quantized = hopper.operators.quantize_tokens(
            x.reshape(-1, x.shape[-1]), state, row_gemm, column_gemm, False
        )
    return quantized


class _Hopper(Kernels):
    def forward(
        self, x: Layout, weight: Tensor, bias: Tensor | None, layer: Layout, kept: Layout, how: How, tokens: int
    ) -> tuple[Tensor, Layout]:
        right = kept[:2] or hopper.operators.quantize_weight(weight, layer[0], True, False)[:2]
        dtype = torch.bfloat16 if bias is None else torch.float32
        y = hopper.operators.multiply(x[0], x[1], right[0], right[1], True, tokens, weight.shape[0], dtype)
        return with_bias(y, bias), kept[2:]

    def gradient(self, grad_output: Tensor, layer: Layout, gemms: tuple[int, int], how: How) -> Quantized:
        quantized: Quantized = hopper.operators.quantize_tokens(grad_output, layer[0], *gemms, True)
        return quantized

    def grad_input(
        self, grad: Layout, weight: Tensor, layer: Layout, by_input: Layout, how: How, tokens: int
    ) -> Tensor:
        right = by_input or hopper.operators.quantize_weight(weight, layer[0], False, True)[2:]
        return hopper.operators.multiply(grad[0], grad[1], right[0], right[1], True, tokens, weight.shape[1])

    def grad_weight(
        self, grad: Layout, x: Layout, weight: Tensor, layer: Layout, how: How, dtype: torch.dtype
    ) -> Tensor:
        out_features, in_features = weight.shape
        return hopper.operators.multiply(grad[0], grad[1], x[0], x[1], False, out_features, in_features, dtype)


hopper_linear = tensor_core_linear(_Hopper())
"""x (..., I) BF16, weight (O, I) FP32 or BF16, bias (O) BF16 or None, and the tensors of `tensor_core_linear`."""
