"""The backend "hopper": the numerics of `emulated` on the FP8 tensor cores of an H100 or H200."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from ...numerics.formats import E2M1, E4M3, NumberFormat, Operand, format_of_code
from ...numerics.gemms import GEMMS, ROW_TILE, SQUARE_TILE
from .. import hopper
from ..backend import Layer, register_backend
from ..emulated import EMULATED
from ..tensor_core import How, Quantized, TensorCoreBackend
from .linear import hopper_linear, quantize_input


class Hopper(TensorCoreBackend):
    """Computes in BF16; layers whose compute dtype is another one run emulated."""

    name = "hopper"
    arithmetic = "FP8 tensor cores; FP4 values were stored as FP8"
    measured_speeds = {2048: 1.17, 4096: 1.32}  # noqa: RUF012

    def lacks(self, device: torch.device) -> str | None:
        if device.type != "cuda" or not torch.cuda.is_available():
            return f"the model is on {device.type!r}, expected a CUDA device of compute capability 9.0 (H100, H200)"
        if torch.version.cuda is None:
            return "torch is not built for CUDA"
        capability = torch.cuda.get_device_capability(device)
        if capability != (9, 0):
            return f"the GPU has compute capability {capability[0]}.{capability[1]}, expected 9.0 (H100, H200)"
        version = tuple(int(part) for part in torch.version.cuda.split(".")[:2])
        if version < (12, 9):
            return f"torch is built for CUDA {torch.version.cuda}, expected at least 12.9"
        if find_spec("triton") is None:
            return "the package triton is not installed"
        return None

    def runs(self, format: NumberFormat) -> bool:
        tiles = format.activation == Operand(ROW_TILE) and format.weight == Operand(SQUARE_TILE)
        gradient = Operand(ROW_TILE, stochastic=format.grid == E2M1)
        return tiles and format.gradient == gradient and format.grid in (E2M1, E4M3) and format.name in ("fp4", "fp8")

    def quantize_input(self, layer: Layer, x: Tensor, row_gemm: int, column_gemm: int) -> Quantized:
        return quantize_input(x, layer.snip_state, row_gemm, column_gemm)

    def quantize_weight(self, layer: Layer, forward: bool, grad_input: bool) -> Quantized:
        found: Quantized = hopper.operators.quantize_weight(
            layer.matrix.detach(), layer.snip_state, forward, grad_input
        )
        return found

    def quantize_weight_into(self, layer: Layer, outputs: Sequence[Tensor]) -> None:
        hopper.operators.quantize_weight_into(layer.matrix.detach(), layer.snip_state, outputs)

    def three_gemms(
        self, layer: Layer, x: Tensor, bias: Tensor | None, keeps_x: bool, inputs: Quantized, weights: Sequence[Tensor]
    ) -> Tensor:
        how = How(layer.snip_cache.high, keeps_x)
        y: Tensor = hopper_linear(x, layer.matrix, bias, how, layer.snip_state, *inputs, *weights)
        return y

    def gemm_call(
        self, gemm: str, x: Tensor, weight: Tensor, grad_output: Tensor, state: Tensor
    ) -> Callable[[], Tensor]:
        """As `Backend.gemm_call`; the weight is quantized before, as it is once per optimizer step."""
        if not format_of_code(int(state[GEMMS.index(gemm)])).is_quantized:
            return EMULATED.gemm_call(gemm, x, weight, grad_output, state)
        run = hopper.operators
        tokens, (out_features, in_features) = x.shape[0], weight.shape
        by_output, output_scales, by_input, input_scales = run.quantize_weight(weight, state, True, True)

        def forward() -> Tensor:
            rows, scales, _, _ = run.quantize_tokens(x, state, 0, -1, False)
            return run.multiply(rows, scales, by_output, output_scales, True, tokens, out_features)

        def grad_input() -> Tensor:
            rows, scales, _, _ = run.quantize_tokens(grad_output, state, 1, -1, True)
            return run.multiply(rows, scales, by_input, input_scales, True, tokens, in_features)

        def grad_weight() -> Tensor:
            _, _, left, left_scales = run.quantize_tokens(grad_output, state, -1, 2, True)
            _, _, right, right_scales = run.quantize_tokens(x, state, -1, 2, False)
            return run.multiply(left, left_scales, right, right_scales, False, out_features, in_features)

        return {"forward": forward, "grad_input": grad_input, "grad_weight": grad_weight}[gemm]

    def notice(self, weight: Tensor, mixed_precision: str | None, asked: bool) -> tuple[bool, str]:
        if weight.dtype != torch.bfloat16 and mixed_precision not in (None, "bf16"):
            return True, (
                f"the GPU has FP8 tensor cores, but the model does not compute in BF16 (mixed_precision="
                f"{mixed_precision!r}, {weight.dtype} weights): FP8 and FP4 are emulated, slower than BF16. Train with "
                "bf16=True."
            )
        return False, (
            "FP8 and FP4 GEMMs run on FP8 tensor cores wherever the compute dtype is BF16, others are emulated."
        )


HOPPER = register_backend(Hopper())
