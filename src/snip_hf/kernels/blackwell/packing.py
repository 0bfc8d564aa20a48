"""The memory layout of operands: packed elements, and block scales in the order that the tensor cores read.

Legend: R rows of an operand, K its contracted dimension, which lies last; R' is R rounded up to 16 and K' is K rounded
up to 32, as the products require. R counts the rows of the operand, not of its tensor: grad_weight contracts the
tokens, so its rows are channels.

Elements are one byte each (E4M3), or two per byte (E2M1), the first in the lower half. Padding is 0.
Scales are one byte each. Four neighbours along K, of 128 rows, make 512 bytes in a row: row r, scale s is byte
16 * (r % 32) + 4 * (r // 32) + s. NVIDIA calls this the layout of block scaling factors, torch SWIZZLE_32_4_4. Their
padding is 0, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...numerics.formats import E2M1, E4M3, ElementGrid, NumberFormat, Operand
from ...numerics.gemms import OPERANDS
from ...numerics.rounding import Quantized
from ...numerics.scales import fp32_scales

# One swizzled run of scales.
SCALE_ROWS, SCALE_COLUMNS = 128, 4
_ROWS, _CONTRACTED = 16, 32
# Alignment of the parts of a buffer: more than any of them needs.
_ALIGNED = 256
_EXPONENT_BIAS, _MANTISSA_BITS = 127, 23


@dataclass(frozen=True)
class Kind:
    """One kind of product, by the form of its operands."""

    grid: ElementGrid
    scale: str
    """See `NumberFormat.scale`."""
    block: int
    """Elements along K that share a scale."""
    element: torch.dtype
    scale_dtype: torch.dtype
    per_byte: int


MXFP8 = Kind(E4M3, "e8m0", 32, torch.float8_e4m3fn, torch.float8_e8m0fnu, 1)
MXFP4 = Kind(E2M1, "e8m0", 32, torch.float4_e2m1fn_x2, torch.float8_e8m0fnu, 2)
NVFP4 = Kind(E2M1, E4M3.name, 16, torch.float4_e2m1fn_x2, torch.float8_e4m3fn, 2)
KINDS = (MXFP8, MXFP4, NVFP4)


def kind_of(format: NumberFormat) -> Kind | None:
    """Returns the kind of product for a format's GEMMs, None if there is none."""
    for kind in KINDS:
        if format.scale == kind.scale and all(_fits(format.operand(name), format, kind) for name in OPERANDS):
            return kind
    return None


def _fits(rule: Operand, format: NumberFormat, kind: Kind) -> bool:
    """Returns True if an operand's elements and blocks fit the kind; blocks may be more than one row high."""
    in_blocks = rule.block is not None and rule.block[1] == kind.block
    return in_blocks and rule.quantized and not rule.noise and (rule.grid or format.grid) == kind.grid


@dataclass(frozen=True)
class Packed:
    """An operand (R, K), ready for a product."""

    kind: Kind
    rows: int
    contracted: int
    buffer: Tensor
    """All bytes of the operand, flat; the other tensors are parts of it."""
    data: Tensor
    """(R', K' / elements per byte), bytes."""
    scales: Tensor
    """Swizzled and flat, bytes."""
    tensor_scale: Tensor
    """One FP32 number that multiplies the whole operand; 1 if the format has none."""

    def dequantize(self) -> Tensor:
        """Returns the operand's values, (R, K), FP32."""
        per_row = _up(self.contracted, self.kind.block) // self.kind.block
        scales = unswizzled(self.scales, self.rows, per_row).view(self.kind.scale_dtype).to(torch.float32)
        values = _read_elements(self.data, self.kind)[: self.rows, : self.contracted]
        return values * (scales * self.tensor_scale).repeat_interleave(self.kind.block, 1)[:, : self.contracted]


def empty(kind: Kind, rows: int, contracted: int, device: torch.device) -> Packed:
    """Returns an uninitialized operand."""
    return within(
        torch.empty(size_of(kind, rows, contracted), dtype=torch.uint8, device=device), kind, rows, contracted
    )


def size_of(kind: Kind, rows: int, contracted: int) -> int:
    """Returns the bytes of an operand (R, K) with its scales."""
    return sum(_up(part, _ALIGNED) for part in _parts(kind, rows, contracted))


def within(buffer: Tensor, kind: Kind, rows: int, contracted: int) -> Packed:
    """Returns the operand (R, K) whose bytes a buffer of `size_of` bytes holds."""
    of_data, of_scales, of_tensor = _parts(kind, rows, contracted)
    second = _up(of_data, _ALIGNED)
    third = second + _up(of_scales, _ALIGNED)
    # `narrow`: indexing asks for a driver, even if torch only fakes a GPU.
    data = buffer.narrow(0, 0, of_data).view(_up(rows, _ROWS), _up(contracted, _CONTRACTED) // kind.per_byte)
    scales = buffer.narrow(0, second, of_scales)
    tensor_scale = buffer.narrow(0, third, of_tensor).view(torch.float32)
    return Packed(kind, rows, contracted, buffer, data, scales, tensor_scale)


def _parts(kind: Kind, rows: int, contracted: int) -> tuple[int, int, int]:
    """Returns the bytes of elements, of scales and of the tensor's scale."""
    elements = _up(rows, _ROWS) * (_up(contracted, _CONTRACTED) // kind.per_byte)
    scales = _up(rows, SCALE_ROWS) * _up(_up(contracted, kind.block) // kind.block, SCALE_COLUMNS)
    return elements, scales, torch.float32.itemsize


def _up(size: int, multiple: int) -> int:
    return (size + multiple - 1) // multiple * multiple


def tensor_scale_of(kind: Kind, format: NumberFormat, amax: Tensor) -> Tensor:
    """Returns the scale of a whole tensor from its largest magnitude, one element, FP32; 1 in formats without one."""
    if format.tensor_scale is None:
        return torch.ones_like(amax)
    return fp32_scales(amax, format.tensor_scale * kind.grid.max)


def pack(quantized: Quantized, tensor_scale: Tensor, kind: Kind, contracts: int) -> Packed:
    """Returns the bytes of a quantized tensor whose dimension `contracts` the GEMM contracts."""
    values, scales = quantized.values, quantized.scales
    across = quantized.tile[1 - contracts]
    if contracts == 0:
        values, scales = values.t(), scales.t()
    rows, contracted = values.shape
    of_rows = scales.repeat_interleave(across, 0)[:rows]
    packed = empty(kind, rows, contracted, values.device)
    packed.tensor_scale.copy_(tensor_scale)
    packed.scales.copy_(swizzled(_written_scales(of_rows, tensor_scale, kind)))
    packed.data.zero_()
    codes = codes_of(values, kind.grid)
    padded = torch.nn.functional.pad(codes, (0, -contracted % _CONTRACTED))
    packed.data[:rows] = padded if kind.per_byte == 1 else padded[:, ::2] | padded[:, 1::2] << 4
    return packed


def codes_of(values: Tensor, grid: ElementGrid) -> Tensor:
    """Returns the codes of numbers that are on a grid, uint8: the sign above the bits of a small float; 0 for NaN."""
    bits = values.contiguous().view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    offset = (_EXPONENT_BIAS + grid.min_exponent - 1) << grid.mantissa_bits
    normal = (magnitude >> (_MANTISSA_BITS - grid.mantissa_bits)) - offset
    subnormal = (values.abs() * 2.0 ** (grid.mantissa_bits - grid.min_exponent)).nan_to_num(0.0).to(torch.int32)
    codes = torch.where(values.abs() < 2.0**grid.min_exponent, subnormal, normal)
    codes |= (bits < 0).to(torch.int32) << (grid.exponent_bits + grid.mantissa_bits)
    return torch.where(values.isnan(), 0, codes).to(torch.uint8)


def _read_elements(data: Tensor, kind: Kind) -> Tensor:
    """Returns the numbers of packed elements, FP32."""
    if kind.per_byte == 1:
        return data.view(kind.element).to(torch.float32)
    codes = torch.stack([data & 15, data >> 4], 2).view(data.shape[0], -1)
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=data.device)
    return torch.cat([values, -values])[codes.to(torch.int64)]


def _written_scales(scales: Tensor, tensor_scale: Tensor, kind: Kind) -> Tensor:
    """Returns block scales as bytes; `scales` are those that elements are multiplied by, the tensor's included."""
    if kind.scale_dtype == torch.float8_e8m0fnu:
        codes = scales.contiguous().view(torch.int32) >> _MANTISSA_BITS  # 2**-127, subnormal in FP32, has the code 0
        return torch.where(scales.isnan(), 255, codes).to(torch.uint8)
    # A product of FP32 numbers divided by one of them is the other one within the last bit, far below E4M3's spacing.
    return (scales / tensor_scale).to(kind.scale_dtype).view(torch.uint8)


def swizzled(scales: Tensor) -> Tensor:
    """Returns bytes (R, scales per row) in the order that tensor cores read, flat, padded with zeros."""
    rows, columns = scales.shape
    padded = torch.nn.functional.pad(scales, (0, -columns % SCALE_COLUMNS, 0, -rows % SCALE_ROWS))
    runs = padded.view(-1, 4, SCALE_ROWS // 4, padded.shape[1] // SCALE_COLUMNS, SCALE_COLUMNS)
    return runs.permute(0, 3, 2, 1, 4).reshape(-1)


def unswizzled(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Returns the bytes (rows, columns) that `swizzled` made flat."""
    across = _up(columns, SCALE_COLUMNS) // SCALE_COLUMNS
    runs = scales.view(-1, across, SCALE_ROWS // 4, 4, SCALE_COLUMNS).permute(0, 3, 2, 1, 4)
    return runs.reshape(-1, across * SCALE_COLUMNS)[:rows, :columns]
