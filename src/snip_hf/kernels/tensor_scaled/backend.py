"""The backend "tensor-scaled": formats that E4M3 can encode, on FP8 tensor cores with one scale per operand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...numerics.formats import NumberFormat, format_of_code
from ...numerics.gemms import GEMMS
from ..backend import Layer, missing_for_kernels, not_in_bf16, register_backend
from ..tensor_core import Cache, Layout, Quantized, TensorCoreBackend, weights_of
from . import exponents, gated, trial
from .encoding import BLOCK, encoding_of, has_one_scale, is_delayed
from .exponents import Records
from .linear import encode_tokens, encode_weight, encode_weight_into, tensor_scaled_linear
from .operators import ACTIVATION, gemm_call
from .reference import LayerTensors
from .slots import slots_of

# Shares of blocks that deserve a line in the log.
_MUCH_SATURATED, _MUCH_SMALL = 1e-4, 1e-2
_MOST_NAMED = 3
# The limit of torch's grouped FP8 product.
_MOST_MATRICES = 1023


class TensorScaled(TensorCoreBackend):
    """Computes in BF16; layers whose compute dtype is another one run emulated."""

    name = "tensor-scaled"
    arithmetic = "FP8 tensor cores with one scale per operand; values of 4 bits and their blocks' scales stored as FP8"
    quantizes_late = True
    runs_gates = True
    measured_speeds = {2048: (1.03, 1.35), 4096: (1.42, 1.53)}  # noqa: RUF012
    adapter_speeds = {2048: (0.96, 0.96), 4096: (1.35, 1.38)}  # noqa: RUF012
    sharded_speeds = {2048: (0.76, 1.15), 4096: (1.47, 1.51)}  # noqa: RUF012
    # All in MXFP4 on an H200 (docs/results-speed.md, "Where it begins to pay").
    layer_speeds = {  # noqa: RUF012
        512: {8192: 0.64},
        1024: {2048: 0.63, 8192: 0.53, 32768: 1.06},
        2048: {2048: 0.58, 8192: 0.91, 32768: 1.34},
        4096: {2048: 0.88, 8192: 1.47, 32768: 1.60},
    }

    def lacks(self, device: torch.device) -> str | None:
        return missing_for_kernels(
            device, "8.9 or later (Hopper; Ada and Blackwell: never tried)", lambda version: version >= (8, 9)
        )

    def runs(self, format: NumberFormat) -> bool:
        return encoding_of(format) is not None or has_one_scale(format) or is_delayed(format)

    def fails(self, format: NumberFormat, device: torch.device) -> str | None:
        return trial.fault(format.name, device)

    def tensors_of(self, layer: Layer, x: Tensor, ends: Tensor | None) -> Layout:
        return *_tensors(layer, x.device), *(() if ends is None else slots_of(ends, x.shape[0]))

    def quantize_input(self, x: Tensor, tensors: Layout, gemms: tuple[int, int]) -> Quantized:
        counts = torch.is_grad_enabled()  # passes that may be trained on determine the next exponents
        with torch.no_grad():
            return encode_tokens(x.reshape(-1, x.shape[-1]), tensors, ACTIVATION, gemms, counts)

    def gated_forward(self, layers: Sequence[Layer], input: Tensor) -> Tensor | None:
        device_type = input.device.type
        casts = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if casts else input.dtype
        if dtype != torch.bfloat16:
            return None
        if any(layer.snip_backend is not self or not _is_gated_here(layer, device_type) for layer in layers):
            return None
        trains, tied = torch.is_grad_enabled(), [layer.snip_cache.tied for layer in layers[:2]]
        x, up_x = input.to(dtype), None if input.dtype == dtype else input.to(dtype)
        gemms = 0, 2 if trains else -1
        given = [_tensors(layer, input.device) for layer in layers]
        inputs = [self.shared_input(layer, input, x, one, gemms) for layer, one in zip(layers[:2], given, strict=False)]
        # In a compiled graph, an autograd function may receive a tensor only once.
        inputs = inputs[:1] if tied[0] is not None and tied[0] is tied[1] and not tied[0].parted else inputs
        weights = [weights_of(layer) for layer in layers]
        counts = len(inputs), tuple(map(len, weights))
        options = gated.GatedOptions(trains, trains, trains and input.requires_grad, *counts)
        states, records, tables = zip(*given, strict=True)
        quantized = [tensor for one in (*inputs, *weights) for tensor in one]
        matrices = [layer.matrix for layer in layers]
        y: Tensor = gated.GatedGemms.apply(x, up_x, *matrices, tables[0], options, *states, *records, *quantized)
        return y

    def refuses(self, layer: Layer) -> str | None:
        if not layer.num_matrices:
            return None
        if layer.out_features % BLOCK or layer.in_features % BLOCK:
            return f"grouped FP8 products need features that are multiples of {BLOCK}"
        if layer.num_matrices > _MOST_MATRICES:
            return f"grouped FP8 products support at most {_MOST_MATRICES} matrices"
        device = layer.weight.device
        return trial.grouped_fault(device) if device.type == "cuda" else None

    def quantize_weight(self, layer: Layer, forward: bool, grad_input: bool) -> Quantized:
        return encode_weight(layer.matrix, _tensors(layer, layer.weight.device), (forward, grad_input))

    def quantize_weight_into(self, layer: Layer, outputs: Sequence[Tensor]) -> None:
        encode_weight_into(layer.matrix, _tensors(layer, layer.weight.device), outputs)

    def three_gemms(self, *arguments: Any) -> Tensor:
        y: Tensor = tensor_scaled_linear(*arguments)
        return y

    def gemm_call(
        self, gemm: str, x: Tensor, weight: Tensor, grad_output: Tensor, state: Tensor
    ) -> Callable[[], Tensor]:
        return gemm_call(gemm, x, weight, grad_output, state)

    def attach(self, layer: Layer) -> None:
        super().attach(layer)
        layer.snip_cache.records = records = Records.new(layer.snip_state.device)
        records.view.set_formats([format_of_code(code) for code in layer.snip_state[: len(GEMMS)].tolist()])

    def note_formats(self, layer: Layer, formats: Sequence[NumberFormat]) -> None:
        super().note_formats(layer, formats)
        if layer.snip_cache.records is not None:
            layer.snip_cache.records.set_formats(formats)

    def cache_of_copy(self, layer: Layer) -> Cache:
        copied = super().cache_of_copy(layer)
        copied.records = layer.snip_cache.records.copy()
        return copied

    def share_inputs(self, layers: Mapping[str, Layer], groups: Sequence[Sequence[str]]) -> None:
        super().share_inputs(layers, groups)
        exponents.pack(list(_of_all(layers).values()))

    def after_step(self, layers: Mapping[str, Layer]) -> None:
        super().after_step(layers)
        exponents.follow(list(_of_all(layers).values()))

    def state_dict(self, layers: Mapping[str, Layer]) -> dict[str, Any]:
        return exponents.saved(_of_all(layers))

    def load_state_dict(self, layers: Mapping[str, Layer], state: Mapping[str, Any]) -> None:
        exponents.load(_of_all(layers), state)

    def counters(self, layers: Mapping[str, Layer]) -> dict[str, float]:
        found = exponents.losses(_of_all(layers), resets=False)
        return {
            "saturated_share": max((one.saturated for one in found), default=0.0),
            "small_share": max((one.small for one in found), default=0.0),
            "saturated_operands": sum(one.clipped_steps > 0 for one in found),
        }

    def findings(self, layers: Mapping[str, Layer]) -> tuple[bool, str] | None:
        found = exponents.losses(_of_all(layers))
        saturated = [one for one in found if one.saturated > _MUCH_SATURATED]
        small = [one for one in found if one.small > _MUCH_SMALL]
        if not saturated and not small:
            return None
        worst = saturated or sorted(small, key=lambda one: -one.small)
        more = f", and {len(worst) - _MOST_NAMED} more" if len(worst) > _MOST_NAMED else ""
        return bool(saturated), (
            f"{len(worst)} operands have blocks outside the binades that E4M3 holds (docs/kernels.md): "
            f"{'; '.join(map(str, worst[:_MOST_NAMED]))}{more}."
        )

    def notice(self, weight: Tensor, mixed_precision: str | None, asked: bool) -> tuple[bool, str]:
        return not_in_bf16("FP8", "its formats", weight, mixed_precision) or (
            False,
            "its formats run on FP8 tensor cores with one scale per operand wherever the compute dtype is BF16, others "
            "are emulated. Compile the decoder layers: without it little or nothing is gained.",
        )


def _tensors(layer: Layer, device: torch.device) -> LayerTensors:
    records: Records = layer.snip_cache.records.on(device)
    return layer.snip_state, records.record, records.table


def _is_gated_here(layer: Layer, device_type: str) -> bool:
    """Returns True if a layer of a gated MLP can run with the others: all its GEMMs are quantized, its weight is
    trained, and it has no bias."""
    cache: Cache = layer.snip_cache
    is_trained = layer.training and layer.weight.requires_grad
    return is_trained and layer.bias is None and not any(cache.high) and cache.device == device_type


def _of_all(layers: Mapping[str, Layer]) -> dict[str, Records]:
    """Returns the records of the layers on this backend; another run may have moved some to another backend."""
    here = {name: layer for name, layer in layers.items() if layer.snip_backend is TENSOR_SCALED}
    return {name: layer.snip_cache.records for name, layer in here.items()}


TENSOR_SCALED = register_backend(TensorScaled())
