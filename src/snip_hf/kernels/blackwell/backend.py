"""The backend "blackwell": the numerics of `emulated` on block-scaled tensor cores. Not run on Blackwell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from ...numerics.formats import FORMATS, NumberFormat, format_of_code
from ...numerics.gemms import CONTRACTIONS, GEMMS
from ..backend import Backend, Layer, missing_for_kernels, not_in_bf16, register_backend
from ..emulated import EMULATED
from ..linear import Gradients, kept_for_backward, linear_function
from ..tensor_core import reads_kept_weight
from ..trials import fault_of, operands, products_of
from . import operators
from .packing import kind_of
from .quantization import quantize


@dataclass
class Cache:
    """State of one layer."""

    device: str
    """Type of the device that the backend was chosen for; on another one the layer runs emulated."""
    codes: Tensor
    """Codes of the three GEMMs' formats, on the CPU. Written in place, so that graphs read the new ones."""
    packed: Tensor
    """The weight as last quantized by `before_pass`; empty: every pass quantizes it."""
    weight_version: int = -1
    """torch's count of the weight's changes at that time."""

    def forget(self) -> None:
        """Drops the quantized weight."""
        self.packed, self.weight_version = self.packed.new_empty(0), -1


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, options: None, tensors: Sequence[Tensor]
) -> tuple[Tensor, Sequence[Tensor]]:
    state, codes, kept = tensors
    y = operators.forward_gemm(x, weight, bias, kept, state, codes)
    return y, (x, kept_for_backward(state), kept_for_backward(codes), kept)


def _backward(
    grad: Tensor, weight: Tensor, options: None, saved: Sequence[Tensor], needs: tuple[bool, bool, bool]
) -> Gradients:
    x, state, codes, kept = saved
    needs_x, needs_weight, needs_bias = needs
    return (
        operators.grad_input_gemm(grad, weight, kept, state, codes) if needs_x else None,
        operators.grad_weight_gemm(grad, x.reshape(-1, x.shape[-1]), state, codes) if needs_weight else None,
        grad.sum(0) if needs_bias else None,
    )


block_scaled_linear = linear_function(_forward, _backward)
"""x (..., I) BF16, weight (O, I) FP32 or BF16, bias (O) BF16 or None, None; state, codes, kept as in `operators`.

x is saved for the backward pass unquantized: the size of its encoding would depend on the plan.
"""


class Blackwell(Backend):
    """Computes in BF16; layers whose compute dtype is another one run emulated."""

    name = "blackwell"
    arithmetic = "FP8 and FP4 tensor cores, by torch's scaled_mm"

    def lacks(self, device: torch.device) -> str | None:
        return missing_for_kernels(
            device, "10.x or 12.x (Blackwell)", lambda capability: capability[0] in (10, 12), (12, 8)
        )

    def runs(self, format: NumberFormat) -> bool:
        return kind_of(format) is not None

    def fails(self, format: NumberFormat, device: torch.device) -> str | None:
        return fault(format.name, device)

    def forward(self, layer: Layer, input: Tensor, x: Tensor, bias: Tensor | None, ends: Tensor | None) -> Tensor:
        cache: Cache = layer.snip_cache
        if x.dtype != torch.bfloat16 or x.device.type != cache.device:
            return EMULATED.forward(layer, input, x, bias, ends)
        kept = cache.packed if reads_kept_weight(layer) else cache.packed.new_empty(0)
        return block_scaled_linear(x, layer.matrix, bias, None, layer.snip_state, cache.codes, kept)

    def gemm_call(
        self, gemm: str, x: Tensor, weight: Tensor, grad_output: Tensor, state: Tensor
    ) -> Callable[[], Tensor]:
        """Implements `Backend.gemm_call` with the weight quantized beforehand, as training does once per step."""
        codes = state[: len(GEMMS)].cpu()
        kept = operators.pack_weight(weight.to(x.dtype), state, codes)
        return {
            "forward": lambda: operators.forward_gemm(x, weight, None, kept, state, codes),
            "grad_input": lambda: operators.grad_input_gemm(grad_output, weight, kept, state, codes),
            "grad_weight": lambda: operators.grad_weight_gemm(grad_output, x, state, codes),
        }[gemm]

    def attach(self, layer: Layer) -> None:
        device = layer.snip_state.device
        codes = torch.zeros(len(GEMMS), dtype=torch.int64, device="cpu")  # independent of the default device
        layer.snip_cache = Cache(device.type, codes, torch.empty(0, dtype=torch.uint8, device=device))
        self.note_formats(layer, [format_of_code(code) for code in layer.snip_state[: len(GEMMS)].tolist()])

    def cache_of_copy(self, layer: Layer) -> Cache:
        cache: Cache = layer.snip_cache
        return Cache(cache.device, cache.codes.clone(), cache.packed.new_empty(0))

    def note_formats(self, layer: Layer, formats: Sequence[NumberFormat]) -> None:
        cache: Cache = layer.snip_cache
        cache.codes.copy_(torch.tensor([format.code for format in formats], device="cpu"))
        cache.forget()  # the kept weight is in other formats

    def before_pass(self, layers: Mapping[str, Layer], everything: bool) -> None:
        """Quantizes weights for all passes until the next call, for both GEMMs that read them.

        Passes quantize sharded weights themselves, and weights that are neither FP32 nor BF16.
        """
        for layer in layers.values():
            cache: Cache = layer.snip_cache
            weight = layer.weight
            is_taken = type(weight) is nn.Parameter and weight.dtype in (torch.float32, torch.bfloat16)
            if not is_taken or weight.device.type != cache.device:
                cache.forget()
            elif everything or cache.weight_version != weight._version:
                kept = operators.pack_weight(layer.matrix.detach().to(torch.bfloat16), layer.snip_state, cache.codes)
                if kept.shape == cache.packed.shape:
                    cache.packed.copy_(kept)  # compiled graphs and saved tensors refer to this memory
                else:
                    # Its size depends on the formats, which must not recompile the layer.
                    torch._dynamo.maybe_mark_dynamic(kept, 0)
                    cache.packed = kept
                cache.weight_version = weight._version

    def release(self, layers: Mapping[str, Layer]) -> None:
        for layer in layers.values():
            layer.snip_cache.forget()

    def notice(self, weight: Tensor, mixed_precision: str | None, asked: bool) -> tuple[bool, str]:
        return not_in_bf16("block-scaled", "its formats", weight, mixed_precision) or (
            False,
            "block-scaled tensor cores wherever the compute dtype is BF16, others are emulated. These kernels passed "
            "their trial on this GPU, but were written without one: please run benchmarks/first_run.py and report.",
        )


BLACKWELL = register_backend(Blackwell())


@cache
def fault(name: str, device: torch.device) -> str | None:
    """Returns why a format's GEMMs fail on a device, None if they pass. Takes some seconds, once.

    A machine may have the right GPU and still lack a product: only some builds of torch have MXFP4's.
    """
    given = FORMATS[name], device
    return fault_of(
        BLACKWELL.name,
        *given,
        lambda by_kernel: encoded(*given, by_kernel),
        lambda: products_of(BLACKWELL, operands(*given)),
    )


def encoded(
    format: NumberFormat, device: torch.device, by_kernel: bool | None = None
) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns each operand of each GEMM of a trial as elements and scales, by the kernel or by torch."""
    given, found = operands(format, device), {}
    for gemm, pair in CONTRACTIONS.items():
        for operand, contracts in pair:
            packed = quantize(given.by_name[operand], format, operand, contracts, given.state, by_kernel=by_kernel)
            found[f"{operand} of {gemm}"] = packed.data, packed.scales
    return found
