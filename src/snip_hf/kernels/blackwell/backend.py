"""The backend "blackwell": the numerics of `emulated` on block-scaled tensor cores. Not run on Blackwell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from ...numerics.formats import FORMATS, NumberFormat, format_of_code
from ...numerics.gemms import CONTRACTIONS, GEMMS
from ..backend import Backend, Layer, missing_for_kernels, not_in_bf16, register_backend
from ..emulated import EMULATED
from ..trials import fault_of, operands, products_of
from . import operators
from .linear import Cache, block_scaled_linear, keep_quantized, new_cache
from .packing import Packed, kind_of
from .quantization import quantize


class Blackwell(Backend):
    """Computes in BF16; layers whose compute dtype is another one run emulated."""

    name = "blackwell"
    arithmetic = "FP8 and FP4 tensor cores, by torch's scaled_mm"

    def lacks(self, device: torch.device) -> str | None:
        return missing_for_kernels(device, "10.x or 12.x (Blackwell)", lambda found: found[0] in (10, 12), (12, 8))

    def runs(self, format: NumberFormat) -> bool:
        return kind_of(format) is not None

    def fails(self, format: NumberFormat, device: torch.device) -> str | None:
        return fault(format.name, device)

    def forward(self, layer: Layer, input: Tensor, x: Tensor, bias: Tensor | None, casts: bool) -> Tensor:
        cache: Cache = layer.snip_cache
        if x.dtype != torch.bfloat16 or x.device.type != cache.device:
            return EMULATED.forward(layer, input, x, bias, casts)
        # Before evaluation, and generation in training mode, weights may have changed without notice; not before a pass
        # that is trained on.
        is_kept = torch.compiler.is_compiling() or cache.weight_version == layer.weight._version
        is_kept = is_kept and layer.training and torch.is_grad_enabled()
        kept = cache.kept if is_kept else cache.kept.new_empty(0)
        y: Tensor = block_scaled_linear(x, layer.matrix, bias, None, layer.snip_state, cache.codes, kept)
        return y

    def gemm_call(
        self, gemm: str, x: Tensor, weight: Tensor, grad_output: Tensor, state: Tensor
    ) -> Callable[[], Tensor]:
        """Does as `Backend.gemm_call`, with the weight quantized before: training does so once per optimizer step."""
        format = format_of_code(int(state[GEMMS.index(gemm)]))
        if not format.is_quantized:
            return EMULATED.gemm_call(gemm, x, weight, grad_output, state)

        def packed(operand: Tensor, name: str, contracts: int) -> Packed:
            return quantize(operand, format, name, contracts, state)

        if gemm == "grad_weight":
            return lambda: operators.multiply(packed(grad_output, "gradient", 0), packed(x, "activation", 0), x.dtype)
        contracts = 1 if gemm == "forward" else 0
        right = packed(weight.to(x.dtype), "weight", contracts)
        left, name = (x, "activation") if gemm == "forward" else (grad_output, "gradient")
        return lambda: operators.multiply(packed(left, name, 1), right, x.dtype)

    def attach(self, layer: Layer) -> None:
        layer.snip_cache = new_cache(layer)
        self.note_formats(layer, [format_of_code(code) for code in layer.snip_state[: len(GEMMS)].tolist()])

    def cache_of_copy(self, layer: Layer) -> Cache:
        cache: Cache = layer.snip_cache
        return Cache(cache.device, cache.codes.clone(), cache.kept.new_empty(0))

    def note_formats(self, layer: Layer, formats: Sequence[NumberFormat]) -> None:
        cache: Cache = layer.snip_cache
        cache.codes.copy_(torch.tensor([format.code for format in formats], device="cpu"))
        cache.forget()  # the kept weight is in other formats

    def before_pass(self, layers: Mapping[str, Layer], everything: bool) -> None:
        keep_quantized(layers, everything)

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
    format = FORMATS[name]

    return fault_of(
        BLACKWELL.name,
        format,
        device,
        lambda by_kernel: encoded(format, device, by_kernel),
        lambda: products_of(BLACKWELL, operands(format, device)),
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
