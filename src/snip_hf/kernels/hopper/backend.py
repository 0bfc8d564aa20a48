"""The backend "hopper": the numerics of `emulated` on the FP8 tensor cores of an H100 or H200.

Gradients of FP32 weights are the exception: they are not rounded to BF16. Operands and layouts are those of
`operators`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...numerics.formats import E2M1, E4M3, NumberFormat, Operand, format_of_code
from ...numerics.gemms import GEMMS, ROW_TILE, SQUARE_TILE
from ..backend import Layer, missing_for_kernels, not_in_bf16, register_backend
from ..emulated import EMULATED
from ..tensor_core import Kernels, Layout, Pass, Quantized, TensorCoreBackend, tensor_core_linear, with_bias

if TYPE_CHECKING or find_spec("triton") is not None:
    from . import operators


class _Hopper(Kernels):
    def forward(self, given: Pass, x: Layout, bias: Tensor | None, weights: Layout) -> tuple[Tensor, Layout]:
        right = weights[:2] or operators.quantize_weight(given.weight, given.layer[0], True, False)[:2]
        dtype = torch.bfloat16 if bias is None else torch.float32
        y = operators.multiply(x[0], x[1], right[0], right[1], True, given.tokens, given.weight.shape[0], dtype)
        return with_bias(y, bias), weights[2:]

    def gradient(self, given: Pass, grad_output: Tensor, gemms: tuple[int, int]) -> Quantized:
        return operators.quantize_tokens(grad_output, given.layer[0], *gemms, True)

    def grad_input(self, given: Pass, grad: Layout, by_input: Layout) -> Tensor:
        right = by_input or operators.quantize_weight(given.weight, given.layer[0], False, True)[2:]
        return operators.multiply(grad[0], grad[1], right[0], right[1], True, given.tokens, given.weight.shape[1])

    def grad_weight(self, given: Pass, grad: Layout, x: Layout, dtype: torch.dtype) -> Tensor:
        out_features, in_features = given.weight.shape
        return operators.multiply(grad[0], grad[1], x[0], x[1], False, out_features, in_features, dtype)


hopper_linear = tensor_core_linear(_Hopper())
"""x (..., I) BF16, weight (O, I) FP32 or BF16, bias (O) BF16 or None, and the tensors of `tensor_core_linear`."""


class Hopper(TensorCoreBackend):
    """Computes in BF16; layers whose compute dtype is another one run emulated."""

    name = "hopper"
    arithmetic = "FP8 tensor cores; FP4 values were stored as FP8"
    measured_speeds = {2048: (1.11, 1.17), 4096: (1.27, 1.32)}  # noqa: RUF012

    def lacks(self, device: torch.device) -> str | None:
        return missing_for_kernels(device, "9.0 (H100, H200)", lambda version: version == (9, 0), (12, 9))

    def runs(self, format: NumberFormat) -> bool:
        tiles = format.activation == Operand(ROW_TILE) and format.weight == Operand(SQUARE_TILE)
        gradient = Operand(ROW_TILE, stochastic=format.grid == E2M1)
        return tiles and format.gradient == gradient and format.grid in (E2M1, E4M3) and format.name in ("fp4", "fp8")

    def quantize_input(self, x: Tensor, tensors: Layout, gemms: tuple[int, int]) -> Quantized:
        rows = x.reshape(-1, x.shape[-1])
        with torch.no_grad():
            quantized: Quantized = operators.quantize_tokens(rows, tensors[0], *gemms, False)
        return quantized

    def quantize_weight(self, layer: Layer, forward: bool, grad_input: bool) -> Quantized:
        weight = layer.matrix.detach()
        return operators.quantize_weight(weight, layer.snip_state, forward, grad_input)

    def quantize_weight_into(self, layer: Layer, outputs: Sequence[Tensor]) -> None:
        operators.quantize_weight_into(layer.matrix.detach(), layer.snip_state, outputs)

    def three_gemms(self, *arguments: Any) -> Tensor:
        return hopper_linear(*arguments)

    def gemm_call(
        self, gemm: str, x: Tensor, weight: Tensor, grad_output: Tensor, state: Tensor
    ) -> Callable[[], Tensor]:
        """Implements `Backend.gemm_call` with the weight quantized beforehand, as training does once per step."""
        if not format_of_code(int(state[GEMMS.index(gemm)])).is_quantized:
            return EMULATED.gemm_call(gemm, x, weight, grad_output, state)
        tokens, (out_features, in_features) = x.shape[0], weight.shape
        by_output, output_scales, by_input, input_scales = operators.quantize_weight(weight, state, True, True)

        def forward() -> Tensor:
            rows, scales, _, _ = operators.quantize_tokens(x, state, 0, -1, False)
            return operators.multiply(rows, scales, by_output, output_scales, True, tokens, out_features)

        def grad_input() -> Tensor:
            rows, scales, _, _ = operators.quantize_tokens(grad_output, state, 1, -1, True)
            return operators.multiply(rows, scales, by_input, input_scales, True, tokens, in_features)

        def grad_weight() -> Tensor:
            _, _, left, left_scales = operators.quantize_tokens(grad_output, state, -1, 2, True)
            _, _, right, right_scales = operators.quantize_tokens(x, state, -1, 2, False)
            return operators.multiply(left, left_scales, right, right_scales, False, out_features, in_features)

        return {"forward": forward, "grad_input": grad_input, "grad_weight": grad_weight}[gemm]

    def notice(self, weight: Tensor, mixed_precision: str | None, asked: bool) -> tuple[bool, str]:
        return not_in_bf16("FP8", "FP8 and FP4", weight, mixed_precision) or (
            False,
            "FP8 and FP4 GEMMs run on FP8 tensor cores wherever the compute dtype is BF16, others are emulated.",
        )


register_backend(Hopper())
