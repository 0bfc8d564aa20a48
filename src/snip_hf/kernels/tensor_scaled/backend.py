"""The backend "tensor-scaled": formats that fold into E4M3, on FP8 tensor cores with one scale per operand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ...numerics.formats import NumberFormat, format_of_code
from ...numerics.gemms import GEMMS
from ..backend import GroupedLayer, Layer, register_backend
from ..emulated import EMULATED
from ..tensor_core import Cache, Quantized, TensorCoreBackend, weights_of
from . import gated_linear, grouped_trial, records
from .folding import BLOCK, fold_of, has_one_scale
from .gemm_calls import gemm_call
from .grouped_linear import GroupedTensorScaledGemms, How, quantize_matrices, weight_gemms
from .grouped_operators import fold_grouped_into
from .linear import TensorScaledGemms, quantize_input, quantize_weight
from .operators import fold_into
from .places import places_of
from .records import Records
from .trial import fault

_OLDEST = (8, 9)
_EXPECTED = "expected a CUDA device of compute capability 8.9 or later (Ada, Hopper, Blackwell)"
# Shares of blocks that are worth a line of the log.
_MUCH_SATURATED, _MUCH_SMALL = 1e-4, 1e-2
_MOST_NAMED = 3
# Of torch's grouped FP8 product.
_MOST_MATRICES = 1023


class TensorScaled(TensorCoreBackend):
    """Computes in BF16; layers whose compute dtype is another one run emulated."""

    name = "tensor-scaled"
    arithmetic = "FP8 tensor cores with one scale per operand; values of 4 bits and their blocks' scales stored as FP8"
    quantizes_late = True
    runs_groups = runs_gates = True
    fuses_gates = True
    """Whether `gated_forward` does so, for timings without it."""
    measured_speeds = {2048: 1.30, 4096: 1.48}  # noqa: RUF012

    def lacks(self, device: torch.device) -> str | None:
        if device.type != "cuda" or not torch.cuda.is_available():
            return f"the model is on {device.type!r}, {_EXPECTED}"
        if torch.version.cuda is None:
            return "torch is not built for CUDA"
        capability = torch.cuda.get_device_capability(device)
        if capability < _OLDEST:
            return f"the GPU has compute capability {capability[0]}.{capability[1]}, {_EXPECTED}"
        if find_spec("triton") is None:
            return "the package triton is not installed"
        return None

    def runs(self, format: NumberFormat) -> bool:
        return fold_of(format) is not None or has_one_scale(format)

    def fails(self, format: NumberFormat, device: torch.device) -> str | None:
        return fault(format.name, device)

    def quantize_input(self, layer: Layer, x: Tensor, row_gemm: int, column_gemm: int) -> Quantized:
        own = _records(layer, x.device)
        noted = torch.is_grad_enabled()  # a pass that may be trained on counts for the next exponents
        return quantize_input(x, layer.snip_state, own.record, own.table, (row_gemm, column_gemm), noted)

    def gated_forward(self, layers: Sequence[Layer], input: Tensor) -> Tensor | None:
        device_type = input.device.type
        casts = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if casts else input.dtype
        if not self.fuses_gates or dtype != torch.bfloat16:
            return None
        if any(layer.snip_backend is not self or not _is_gated_here(layer, device_type) for layer in layers):
            return None
        trains, tied = torch.is_grad_enabled(), [layer.snip_cache.tied for layer in layers[:2]]
        x, up_x = input.to(dtype), None if input.dtype == dtype else input.to(dtype)
        gemms = 0, 2 if trains else -1
        inputs = [self.shared_input(layer, input, x, gemms) for layer in layers[:2]]
        # A tensor may be given to an autograd function once in a compiled graph.
        inputs = inputs[:1] if tied[0] is not None and tied[0] is tied[1] and not tied[0].parted else inputs
        weights = [weights_of(layer) for layer in layers]
        given = len(inputs), tuple(map(len, weights))
        how = gated_linear.How(trains, trains, trains and input.requires_grad, *given)
        own = [_records(layer, input.device) for layer in layers]
        tensors = *(layer.snip_state for layer in layers), *(one.record for one in own)
        quantized = [tensor for one in (*inputs, *weights) for tensor in one]
        matrices = [layer.matrix for layer in layers]
        y: Tensor = gated_linear.GatedGemms.apply(x, up_x, *matrices, own[0].table, how, *tensors, *quantized)
        return y

    def refuses_groups(self, layer: GroupedLayer) -> str | None:
        if layer.out_features % BLOCK or layer.in_features % BLOCK:
            return f"grouped FP8 products need features that are multiples of {BLOCK}"
        if layer.num_matrices > _MOST_MATRICES:
            return f"grouped FP8 products take {_MOST_MATRICES} matrices at most"
        device = layer.weight.device
        return grouped_trial.fault(device) if device.type == "cuda" else None

    def grouped_forward(self, layer: GroupedLayer, x: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
        cache: Cache = layer.snip_cache
        if x.dtype != torch.bfloat16 or x.device.type != cache.device:
            return EMULATED.grouped_forward(layer, x, bias, ends)
        keeps_x = torch.is_grad_enabled() and layer.weight.requires_grad
        how = How(cache.high, keeps_x, torch.is_grad_enabled(), layer.is_transposed)
        # As `TensorCoreBackend.forward`.
        is_kept = torch.compiler.is_compiling() or cache.weight_version == layer.weight._version
        weights = cache.weights if layer.training and torch.is_grad_enabled() and is_kept else ()
        own, places = _records(layer, x.device), places_of(ends, x.shape[0])
        tensors = layer.snip_state, own.record, own.table
        y: Tensor = GroupedTensorScaledGemms.apply(x, _stored(layer), bias, *tensors, how, *places, *weights)
        return y

    def quantize_weight(self, layer: Layer, forward: bool, grad_input: bool) -> Quantized:
        if _is_grouped(layer):
            own = _records(layer, layer.weight.device)
            uses, transposed = (forward, grad_input), layer.is_transposed
            return quantize_matrices(_stored(layer), [layer.snip_state, own.record, own.table], uses, transposed)
        own, gemms = _records(layer, layer.weight.device), (0 if forward else -1, 1 if grad_input else -1)
        return quantize_weight(layer.matrix, layer.snip_state, own.record, own.table, gemms, True)

    def quantize_weight_into(self, layer: Layer, outputs: Sequence[Tensor]) -> None:
        own = _records(layer, layer.weight.device)
        uses = outputs[0].shape[0] > 0, outputs[2].shape[0] > 0
        if _is_grouped(layer):
            outputs = [*outputs[2:], *outputs[:2]] if layer.is_transposed else outputs
            first, second = weight_gemms(uses, layer.is_transposed)
            stored = _stored(layer).detach().flatten(0, 1)
            tensors = layer.snip_state, own.record, own.table
            fold_grouped_into(stored, None, tensors, 2, (first, second), True, outputs)
            return
        gemms = 0 if uses[0] else -1, 1 if uses[1] else -1
        with torch.no_grad():
            fold_into(layer.matrix.detach(), layer.snip_state, (own.record, own.table), 2, gemms, True, outputs)

    def three_gemms(
        self, layer: Layer, x: Tensor, bias: Tensor | None, keeps_x: bool, inputs: Quantized, weights: Sequence[Tensor]
    ) -> Tensor:
        own, has_grad_input = _records(layer, x.device), torch.is_grad_enabled() and x.requires_grad
        how = layer.snip_cache.high, keeps_x, torch.is_grad_enabled(), has_grad_input
        tensors = layer.snip_state, own.record, own.table
        y: Tensor = TensorScaledGemms.apply(x, layer.matrix, bias, *tensors, how, *inputs, *weights)
        return y

    def gemm_call(
        self, gemm: str, x: Tensor, weight: Tensor, grad_output: Tensor, state: Tensor
    ) -> Callable[[], Tensor]:
        return gemm_call(gemm, x, weight, grad_output, state)

    def attach(self, layer: Layer) -> None:
        super().attach(layer)
        layer.snip_cache.own = own = Records.new(layer.weight.device)
        own.note.take([format_of_code(code) for code in layer.snip_state[: len(GEMMS)].tolist()])

    def note_formats(self, layer: Layer, formats: Sequence[NumberFormat]) -> None:
        super().note_formats(layer, formats)
        if layer.snip_cache.own is not None:
            layer.snip_cache.own.note.take(formats)

    def cache_of_copy(self, layer: Layer) -> Cache:
        copied = super().cache_of_copy(layer)
        copied.own = layer.snip_cache.own.copy()
        return copied

    def share_inputs(self, layers: Mapping[str, Layer], groups: Sequence[Sequence[str]]) -> None:
        super().share_inputs(layers, groups)
        records.pack(list(_of_all(layers).values()))

    def after_step(self, layers: Mapping[str, Layer]) -> None:
        super().after_step(layers)
        records.follow(list(_of_all(layers).values()))

    def state_dict(self, layers: Mapping[str, Layer]) -> dict[str, Any]:
        return records.saved(_of_all(layers))

    def load_state_dict(self, layers: Mapping[str, Layer], state: Mapping[str, Any]) -> None:
        records.load(_of_all(layers), state)

    def figures(self, layers: Mapping[str, Layer]) -> dict[str, float]:
        found = records.losses(_of_all(layers), resets=False)
        return {
            "saturated_share": max((one.saturated for one in found), default=0.0),
            "small_share": max((one.small for one in found), default=0.0),
            "saturated_operands": sum(one.clipped_steps > 0 for one in found),
        }

    def findings(self, layers: Mapping[str, Layer]) -> tuple[bool, str] | None:
        found = records.losses(_of_all(layers))
        saturated = [one for one in found if one.saturated > _MUCH_SATURATED]
        small = [one for one in found if one.small > _MUCH_SMALL]
        if not saturated and not small:
            return None
        worst = saturated or sorted(small, key=lambda one: -one.small)
        more = f", and {len(worst) - _MOST_NAMED} more" if len(worst) > _MOST_NAMED else ""
        return bool(saturated), (
            f"{len(worst)} operands have blocks outside the binades that E4M3 holds (docs/tensor_scaled.md): "
            f"{'; '.join(map(str, worst[:_MOST_NAMED]))}{more}."
        )

    def notice(self, weight: Tensor, mixed_precision: str | None, asked: bool) -> tuple[bool, str]:
        if weight.dtype != torch.bfloat16 and mixed_precision not in (None, "bf16"):
            return True, (
                f"the GPU has FP8 tensor cores, but the model does not compute in BF16 (mixed_precision="
                f"{mixed_precision!r}, {weight.dtype} weights): its formats are emulated, slower than BF16. Train with "
                "bf16=True."
            )
        return False, (
            "its formats run on FP8 tensor cores with one scale per operand wherever the compute dtype is BF16, others "
            "are emulated. Compile the decoder layers: without it little or nothing is gained."
        )


def _records(layer: Layer | GroupedLayer, device: torch.device) -> Records:
    own: Records = layer.snip_cache.own
    return own.on(device)


def _is_gated_here(layer: Layer, device_type: str) -> bool:
    """Returns True if a layer of a gated MLP can run with the others: all its GEMMs are quantized, its weight is
    trained, and it has no bias."""
    cache: Cache = layer.snip_cache
    is_trained = layer.training and layer.weight.requires_grad
    return is_trained and layer.bias is None and not any(cache.high) and cache.device == device_type


def _is_grouped(layer: Layer | GroupedLayer) -> TypeGuard[GroupedLayer]:
    return hasattr(type(layer), "stacked")


def _stored(layer: GroupedLayer) -> Tensor:
    """Returns the matrices as the model stores them, (E, O, I) or (E, I, O)."""
    return layer.stacked.transpose(1, 2) if layer.is_transposed else layer.stacked


def _of_all(layers: Mapping[str, Layer]) -> dict[str, Records]:
    """Returns the records of the layers that run here; another run may have put some on another backend."""
    here = {name: layer for name, layer in layers.items() if layer.snip_backend is TENSOR_SCALED}
    return {name: layer.snip_cache.own for name, layer in here.items()}


TENSOR_SCALED = register_backend(TensorScaled())
