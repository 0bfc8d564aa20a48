"""The three GEMMs on block-scaled tensor cores, each an operator that torch.compile does not look into.

An operator quantizes its operands and multiplies them. The host selects the kind of product (`packing.KINDS`), or
BF16's, by `codes`. `codes` is a tensor on the CPU: the host reads it without waiting for the device, and a new plan is
new data for the same graph. A CUDA graph would keep the selection of its capture, so operators are tagged for inductor
to leave them out, and refuse a capture. Inductor of torch 2.13 could not compile the products either: it asserts that
scales are not swizzled.

Legend: T tokens, I in_features, O out_features; x (..., I), weight (O, I), grad_output (T, O). `state` is the layer's,
with the key of random numbers; `codes` (3) are the codes of the formats of its GEMMs; `packed` is the result of
`pack_weight`, or empty. On a CPU the product multiplies the dequantized operands in FP32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ...numerics.formats import NumberFormat, format_of_code
from ...numerics.gemms import GEMMS
from .packing import MXFP4, NVFP4, Kind, Packed, kind_of, size_of, within
from .quantization import quantize

_library = torch.library.Library("snip_hf", "FRAGMENT")
# Through `Library` and not `custom_op`, which costs 35 microseconds more per call on the host.
_SCHEMAS = (
    "scaled_forward_gemm(Tensor x, Tensor weight, Tensor? bias, Tensor packed, Tensor state, Tensor codes) -> Tensor",
    "scaled_grad_input_gemm(Tensor grad_output, Tensor weight, Tensor packed, Tensor state, Tensor codes) -> Tensor",
    "scaled_grad_weight_gemm(Tensor grad_output, Tensor x, Tensor state, Tensor codes) -> Tensor",
)
for _schema in _SCHEMAS:
    _library.define(_schema, tags=(torch.Tag.cudagraph_unsafe,))


@torch.library.impl(_library, "scaled_forward_gemm", "CompositeExplicitAutograd")
def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, packed: Tensor, state: Tensor, codes: Tensor) -> Tensor:
    """Returns x @ weight^T + bias, (..., O), in x's dtype; the bias is added to FP32 sums if there are any."""
    format = _format_of(codes, "forward", x)
    if not format.is_quantized:
        y = functional.linear(x, weight.to(x.dtype), bias)
    else:
        # (T, I) x (I, O): contracts I
        rows = x.reshape(-1, x.shape[-1])
        by_output = _unpacked(packed, weight, codes)[0] or _quantized(weight.to(x.dtype), format, "weight", 1, state)
        left = _quantized(rows, format, "activation", 1, state)
        y = _product(rows, left, by_output, weight.shape[0], x.dtype if bias is None else torch.float32)
        if bias is not None:
            y = (y + bias).to(x.dtype)
    return torch.ops.aten._unsafe_view(y, [*x.shape[:-1], weight.shape[0]])


@torch.library.impl(_library, "scaled_grad_input_gemm", "CompositeExplicitAutograd")
def _grad_input(grad_output: Tensor, weight: Tensor, packed: Tensor, state: Tensor, codes: Tensor) -> Tensor:
    """Returns grad_output @ weight, (T, I), in grad_output's dtype."""
    format = _format_of(codes, "grad_input", grad_output)
    if not format.is_quantized:
        return grad_output.mm(weight.to(grad_output.dtype))
    # (T, O) x (O, I): contracts O
    dtype = grad_output.dtype
    by_input = _unpacked(packed, weight, codes)[1] or _quantized(weight.to(dtype), format, "weight", 0, state)
    left = _quantized(grad_output, format, "gradient", 1, state)
    return _product(grad_output, left, by_input, weight.shape[1], dtype)


@torch.library.impl(_library, "scaled_grad_weight_gemm", "CompositeExplicitAutograd")
def _grad_weight(grad_output: Tensor, x: Tensor, state: Tensor, codes: Tensor) -> Tensor:
    """Returns grad_output^T @ x, (O, I), in grad_output's dtype; x (T, I)."""
    format = _format_of(codes, "grad_weight", grad_output)
    if not format.is_quantized:
        return grad_output.t().mm(x)
    # (O, T) x (T, I): contracts T
    left = _quantized(grad_output, format, "gradient", 0, state)
    right = _quantized(x, format, "activation", 0, state)
    return _product(grad_output.t(), left, right, x.shape[1], grad_output.dtype)


@torch.library.register_fake("snip_hf::scaled_forward_gemm", lib=_library)
def _(x: Tensor, weight: Tensor, bias: Tensor | None, packed: Tensor, state: Tensor, codes: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@torch.library.register_fake("snip_hf::scaled_grad_input_gemm", lib=_library)
def _(grad_output: Tensor, weight: Tensor, packed: Tensor, state: Tensor, codes: Tensor) -> Tensor:
    return grad_output.new_empty(grad_output.shape[0], weight.shape[1])


@torch.library.register_fake("snip_hf::scaled_grad_weight_gemm", lib=_library)
def _(grad_output: Tensor, x: Tensor, state: Tensor, codes: Tensor) -> Tensor:
    return grad_output.new_empty(grad_output.shape[1], x.shape[1])


forward_gemm = torch.ops.snip_hf.scaled_forward_gemm
grad_input_gemm = torch.ops.snip_hf.scaled_grad_input_gemm
grad_weight_gemm = torch.ops.snip_hf.scaled_grad_weight_gemm


def pack_weight(weight: Tensor, state: Tensor, codes: Tensor) -> Tensor:
    """Returns the bytes of a weight in the compute dtype, for the forward and then for the grad_input GEMM.

    A GEMM in BF16 has none.
    """
    parts = [weight.new_empty(0, dtype=torch.uint8)]
    for contracts, code in zip((1, 0), codes.tolist(), strict=False):
        packed = _quantized(weight, format_of_code(code), "weight", contracts, state)
        parts += [] if packed is None else [packed.buffer]
    return torch.cat(parts)


def _unpacked(packed: Tensor, weight: Tensor, codes: Tensor) -> list[Packed | None]:
    """Returns the weight from `pack_weight`, for the forward and the grad_input GEMM; None for one that is missing."""
    found: list[Packed | None] = []
    first, (out_features, in_features) = 0, weight.shape
    sizes = ((out_features, in_features), (in_features, out_features))
    for (rows, contracted), code in zip(sizes, codes.tolist(), strict=False):
        kind = kind_of(format_of_code(code))
        if kind is None or packed.numel() == 0:
            found.append(None)
            continue
        size = size_of(kind, rows, contracted)
        found.append(within(packed[first : first + size], kind, rows, contracted))
        first += size
    return found


def _format_of(codes: Tensor, gemm: str, x: Tensor) -> NumberFormat:
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "A CUDA graph would keep the formats that the layer has now, also under later plans. Leave layers of this "
            "backend out of the capture; torch.compile(mode='reduce-overhead') does."
        )
    return format_of_code(int(codes[GEMMS.index(gemm)]))


def _quantized(x: Tensor, format: NumberFormat, operand: str, contracts: int, state: Tensor) -> Packed | None:
    """Returns `quantize` of x; None if x has no elements or the format does not quantize."""
    if x.numel() == 0 or not format.is_quantized:
        return None
    return quantize(x, format, operand, contracts, state)


def _product(x: Tensor, left: Packed | None, right: Packed | None, columns: int, dtype: torch.dtype) -> Tensor:
    """Returns `multiply` of an operand made of x (R, K), (R, columns); zeros if an operand has no elements."""
    if left is None or right is None:
        return x.new_zeros(x.shape[0], columns, dtype=dtype)
    return multiply(left, right, dtype)


def multiply(left: Packed, right: Packed, dtype: torch.dtype) -> Tensor:
    """Returns left @ right^T, (rows of left, rows of right).

    Args:
        left: (R, K).
        right: of the same kind and K.
        dtype: of the result. Sums are FP32; MXFP4's product returns only BF16, which is then cast.
    """
    if not left.data.is_cuda:
        with torch.autocast("cpu", enabled=False):
            return (left.dequantize() @ right.dequantize().t()).to(dtype)
    product = by_scaled_mm(left, right, torch.bfloat16 if left.kind is MXFP4 else dtype).to(dtype)
    shape = (left.rows, right.rows)
    return product if product.shape == shape else product[: shape[0], : shape[1]].contiguous()


def by_scaled_mm(left: Packed, right: Packed, dtype: torch.dtype) -> Tensor:
    """Returns the product of all rows, including padding."""
    kind, (recipes, swizzles) = left.kind, _recipe(left.kind)
    scales = [_scales_of(operand) for operand in (left, right)]
    return functional.scaled_mm(
        left.data.view(kind.element),
        right.data.view(kind.element).t(),
        scale_a=scales[0],
        scale_recipe_a=recipes,
        scale_b=scales[1],
        scale_recipe_b=recipes,
        swizzle_a=swizzles,
        swizzle_b=swizzles,
        output_dtype=dtype,
    )


def _recipe(kind: Kind) -> tuple[list[functional.ScalingType], list[functional.SwizzleType]]:
    """Returns the kinds of an operand's scales, and their orders."""
    scaling, swizzle = functional.ScalingType, functional.SwizzleType
    if kind is NVFP4:
        return [scaling.BlockWise1x16, scaling.TensorWise], [swizzle.SWIZZLE_32_4_4, swizzle.NO_SWIZZLE]
    return [scaling.BlockWise1x32], [swizzle.SWIZZLE_32_4_4]


def _scales_of(operand: Packed) -> list[Tensor]:
    blocks = operand.scales.view(operand.kind.scale_dtype)
    return [blocks, operand.tensor_scale] if operand.kind is NVFP4 else [blocks]
