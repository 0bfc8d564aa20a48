"""The backend "hopper": the numerics of `emulated` on the FP8 tensor cores of an H100 or H200."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from ...numerics.formats import E2M1, E4M3, NumberFormat, Operand, format_of_code
from ...numerics.gemms import GEMMS, ROW_TILE, SQUARE_TILE
from .. import hopper
from ..backend import Backend, Layer, register_backend
from ..emulated import EMULATED
from .cache import Cache, drop_quantized, forget_inputs, keep_quantized, share_inputs
from .linear import TensorCoreGemms, quantize_input


class Hopper(Backend):
    """Computes in BF16; layers whose compute dtype is another one run emulated."""

    name = "hopper"
    arithmetic = "FP8 tensor cores; FP4 values were stored as FP8"
    recompiles_for_bf16 = True
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

    def forward(self, layer: Layer, input: Tensor, x: Tensor, bias: Tensor | None, casts: bool) -> Tensor:
        cache: Cache = layer.snip_cache
        if x.dtype != torch.bfloat16 or x.device.type != cache.device:
            return EMULATED.forward(layer, input, x, bias, casts)
        high = cache.high
        if all(high):
            return torch.nn.functional.linear(x, layer.matrix.to(x.dtype), bias)
        keeps_x = torch.is_grad_enabled() and layer.weight.requires_grad
        row_gemm, column_gemm = -1 if high[0] else 0, 2 if keeps_x and not high[2] else -1
        if cache.tied is None or cache.tied.parted:
            quantized = quantize_input(x, layer.snip_state, row_gemm, column_gemm)
        else:
            quantized = cache.tied.quantized(input, x, layer.snip_state, row_gemm, column_gemm)
        # Evaluation, and generation in training mode, may follow a change of the weights that nobody told of; a pass
        # that is trained on does not.
        is_kept = torch.compiler.is_compiling() or cache.weight_version == layer.weight._version
        weights = cache.weights if layer.training and torch.is_grad_enabled() and is_kept else ()
        y: Tensor = TensorCoreGemms.apply(x, layer.matrix, bias, layer.snip_state, high, keeps_x, *quantized, *weights)
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

    def attach(self, layer: Layer) -> None:
        layer.snip_cache = Cache(layer.weight.device.type, (False, False, False))
        self.note_formats(layer, [format_of_code(code) for code in layer.snip_state[: len(GEMMS)].tolist()])

    def cache_of_copy(self, layer: Layer) -> Cache:
        return Cache(layer.snip_cache.device, layer.snip_cache.high)

    def note_formats(self, layer: Layer, formats: Sequence[NumberFormat]) -> None:
        cache: Cache = layer.snip_cache
        forward, grad_input, grad_weight = (not format.is_quantized for format in formats)
        cache.high = (forward, grad_input, grad_weight)
        cache.weight_version = -1  # what is kept of the weight is in other formats
        if cache.tied is not None:
            cache.tied.note(id(layer), (formats[0].code, formats[2].code))

    def share_inputs(self, layers: Mapping[str, Layer], groups: Sequence[Sequence[str]]) -> None:
        share_inputs(layers, groups)

    def before_pass(self, layers: Mapping[str, Layer], everything: bool) -> None:
        keep_quantized(layers, everything)

    def after_step(self, layers: Mapping[str, Layer]) -> None:
        forget_inputs(layers)

    def release(self, layers: Mapping[str, Layer]) -> None:
        drop_quantized(layers)

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
