"""The Triton kernels that round one operand, in every kind of format except noise.

A program holds one block of the operand, made of whole tiles, as a 4-D array: tiles along R, rows of a tile, tiles
along C, columns of a tile. It rotates the block if the format has a rotation, finds the scale of every tile,
rounds, multiplies by the scales and rotates back. Formats are numbers and a few flags, so that few kernels are
compiled. Every number is that of `numerics.rounding`, bit for bit; of two targets, see `_squared_error`.

Legend: R rows, C columns of the operand.
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from ..numerics.rotation import LARGEST, signs
from .triton_numerics import bits_of, dither_of, float_of, power_of_two, round_to_grid, spacing_bits

_SMALLEST_NORMAL = tl.constexpr(2.0**-126)
_LARGEST_FLOAT = tl.constexpr(3.4028234663852886e38)
_INFINITY = tl.constexpr(0x7F800000)


def _word_of_signs(word: int) -> int:
    """Returns 32 signs of a rotation, the first in the highest bit, 1 for minus, as a signed integer."""
    bits = "".join("1" if sign < 0 else "0" for sign in signs(LARGEST)[32 * word : 32 * word + 32])
    return struct.unpack(">i", int(bits, 2).to_bytes(4, "big"))[0]


_SIGNS_0, _SIGNS_1, _SIGNS_2, _SIGNS_3 = (tl.constexpr(_word_of_signs(word)) for word in range(4))


@triton.jit
def _place(columns, TILES_DOWN: tl.constexpr, ROWS: tl.constexpr, TILES_ACROSS: tl.constexpr, COLUMNS: tl.constexpr):
    """Row and column of each element of this program's block, int64: (TILES_DOWN, ROWS, TILES_ACROSS, COLUMNS)."""
    blocks = tl.cdiv(columns, TILES_ACROSS * COLUMNS)
    row = tl.program_id(0) // blocks * (TILES_DOWN * ROWS) + tl.arange(0, TILES_DOWN)[:, None, None, None] * ROWS
    row += tl.arange(0, ROWS)[None, :, None, None]
    column = tl.program_id(0) % blocks * (TILES_ACROSS * COLUMNS)
    column += tl.arange(0, TILES_ACROSS)[None, None, :, None] * COLUMNS + tl.arange(0, COLUMNS)[None, None, None, :]
    return row.to(tl.int64), column.to(tl.int64)


@triton.jit
def _run_of(position, length, SIZE: tl.constexpr, STAGES: tl.constexpr):
    """The size of each position's rotation run, its sign there, and 1 / sqrt(size).

    A last, shorter run is split into smaller powers of two, the largest first: the set bits of its length.
    """
    offset = position & (SIZE - 1)
    left = tl.minimum(length - (position - offset), SIZE)
    size = power_of_two((left ^ offset).to(tl.float32)).to(tl.int32)
    size = tl.where(offset < left, size, 1)
    index = offset & (size - 1)
    word = tl.where(index < 32, _SIGNS_0, _SIGNS_1)
    word = tl.where(index < 64, word, tl.where(index < 96, _SIGNS_2, _SIGNS_3))
    sign = 1.0 - 2.0 * ((word >> (31 - (index & 31))) & 1).to(tl.float32)
    norm = tl.full(size.shape, 1.0, tl.float32)
    for stage in tl.static_range(1, STAGES + 1):
        norm = tl.where(size == (1 << stage), 0.5 ** (stage * 0.5), norm)
    return size, sign, norm


@triton.jit
def _sums_and_differences(x, size, HALF: tl.constexpr, STRIDE: tl.constexpr):
    """One stage of the Hadamard transform: elements HALF apart in a run, STRIDE apart in the block."""
    pairs = tl.permute(tl.reshape(x, (x.numel // (2 * STRIDE), 2, STRIDE)), (0, 2, 1))
    one, other = tl.split(pairs)
    found = tl.permute(tl.join(one + other, one - other), (0, 2, 1))
    return tl.where(size > HALF, tl.reshape(found, x.shape), x)


@triton.jit
def _hadamard(x, size, norm, STAGES: tl.constexpr, STRIDE: tl.constexpr):
    """`rotation._hadamard` of runs whose neighbours are STRIDE elements apart in the block."""
    for stage in tl.static_range(STAGES):
        x = _sums_and_differences(x, size, 1 << stage, STRIDE << stage)
    return x * norm


@triton.jit
def tensor_amax_kernel(
    x,
    found,
    rows,
    columns,
    x_row,
    x_column,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    ALONG: tl.constexpr,
):
    """Bits of the largest magnitude of x, rotated if STAGES; infinity and NaN are larger than all numbers."""
    row, column = _place(columns, BLOCK_ROWS, 1, 1, BLOCK_COLUMNS)
    inside = (row < rows) & (column < columns)
    value = tl.load(x + row * x_row + column * x_column, inside, other=0.0).to(tl.float32)
    if STAGES > 0:
        position, length = (row, rows) if ALONG == 0 else (column, columns)
        size, sign, norm = _run_of(position.to(tl.int32), length, 1 << STAGES, STAGES)
        value = _hadamard(value * sign, size, norm, STAGES, BLOCK_COLUMNS if ALONG == 0 else 1)
    tl.atomic_max(found, tl.max(bits_of(value) & 0x7FFFFFFF))


@triton.jit
def _fp32_scale(amax, target):
    """`scales.fp32_scales`."""
    scale = tl.maximum(tl.div_rn(amax, target), _SMALLEST_NORMAL)
    return tl.where(bits_of(amax) < _INFINITY, scale, float("nan"))


@triton.jit
def _ceil_log2(x):
    """`scales._ceil_log2`."""
    field, mantissa = bits_of(x) >> 23, bits_of(x) & 0x7FFFFF
    is_above = mantissa > tl.where(field == 0, 0x400000, 0)
    return field - 127 + is_above.to(tl.int32)


@triton.jit
def _power(exponent):
    """`scales._power`."""
    return float_of(tl.where(exponent == -127, 0x400000, (exponent + 127) << 23))


@triton.jit
def block_scales(
    amax,
    tensor_amax,
    target,
    top,
    carry,
    tensor_target,
    largest,
    smallest,
    least,
    shift,
    KIND: tl.constexpr,
    RULE: tl.constexpr,
    TENSOR_SCALE: tl.constexpr,
    MANTISSA: tl.constexpr,
):
    """`scales.block_scales`: the blocks' own scales, those times the tensor's, and the elements' factors.

    `rounding.scale_numbers` has the numbers, from `target` on.
    """
    if KIND == "fp32":
        own = _fp32_scale(amax, target)
        scale = own
        factor = tl.div_rn(1.0, scale)
    elif KIND == "e8m0":
        if RULE == "rceil":
            exponent = _ceil_log2(tl.div_rn(amax, target))
        elif RULE == "ceil":
            exponent = _ceil_log2(amax) - top
        else:
            exponent = ((bits_of(amax) + carry) >> 23) - 127 - top
        exponent = tl.minimum(tl.maximum(exponent, -127), 127)
        is_finite = bits_of(amax) < _INFINITY
        own = tl.where(is_finite, _power(exponent), float("nan"))
        scale = own
        factor = tl.where(is_finite, _power(-exponent), float("nan"))
    else:
        wanted = tl.div_rn(amax, target)
        is_finite = bits_of(amax) < _INFINITY
        if TENSOR_SCALE:
            of_tensor = _fp32_scale(tensor_amax, tensor_target)
            is_finite = is_finite & (of_tensor == of_tensor)
            wanted = tl.div_rn(wanted, of_tensor)
        rounded = round_to_grid(wanted, 0.0, largest, least, shift, True, MANTISSA, False)
        if RULE == "up":
            spacing = float_of(spacing_bits(wanted, least, shift, True))
            rounded = tl.where(rounded < wanted, rounded + spacing, rounded)
        rounded = tl.minimum(tl.maximum(rounded, smallest), largest)
        rounded = tl.where(is_finite, rounded, float("nan"))
        own = rounded
        scale = rounded
        factor = tl.div_rn(1.0, rounded)
        if TENSOR_SCALE:
            scale = rounded * of_tensor
            factor = tl.div_rn(tl.div_rn(1.0, of_tensor), rounded)
        factor = tl.where(factor > _LARGEST_FLOAT, _LARGEST_FLOAT, factor)
    return own, scale, factor


@triton.jit
def _quantized(
    value, dither, amax, tensor_amax, target, top, carry, tensor_target, scale_largest, scale_smallest, scale_least,
    scale_shift, largest, least, shift, KIND: tl.constexpr, RULE: tl.constexpr, TENSOR_SCALE: tl.constexpr,
    SCALE_MANTISSA: tl.constexpr, SUBNORMALS: tl.constexpr, MANTISSA: tl.constexpr, RANDOM: tl.constexpr,
):  # fmt: skip
    """`rounding.quantize_operand` for one target, times the scales."""
    _, scale, factor = block_scales(
        amax, tensor_amax, target, top, carry, tensor_target, scale_largest, scale_smallest, scale_least, scale_shift,
        KIND, RULE, TENSOR_SCALE, SCALE_MANTISSA,
    )  # fmt: skip
    return round_to_grid(value * factor, dither, largest, least, shift, SUBNORMALS, MANTISSA, RANDOM) * scale


@triton.jit
def _squared_error(rounded, value):
    """The sum over each tile of squared errors, in FP64, as `rounding._squared_errors`.

    Squares are exact, but the order of summation differs from torch's: a tile may choose another target if the sums of
    two targets differ only in their last bits.
    """
    error = rounded.to(tl.float64) - value.to(tl.float64)
    return tl.sum(tl.sum(error * error, 3, keep_dims=True), 1, keep_dims=True)


@triton.jit(
    do_not_specialize=[
        "key", "first", "least", "shift", "top", "carry", "scale_least", "scale_shift",
    ]
)  # fmt: skip
def rounding_kernel(
    x,
    y,
    tensor_amax,  # one FP32 number, read if a scale belongs to the tensor
    key: tl.int64,
    first: tl.int64,  # position in the key's stream
    rows,
    columns,
    x_row,
    x_column,
    # of the elements' grid
    largest,
    least,
    shift,
    # of the scales
    target,
    other_target,
    top,
    carry,
    tensor_target,
    scale_largest,
    scale_smallest,
    scale_least,
    scale_shift,
    TILES_DOWN: tl.constexpr,
    ROWS: tl.constexpr,
    TILES_ACROSS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUBNORMALS: tl.constexpr,
    MANTISSA: tl.constexpr,
    RANDOM: tl.constexpr,
    KIND: tl.constexpr,
    RULE: tl.constexpr,
    WHOLE: tl.constexpr,  # one scale for the tensor
    TENSOR_SCALE: tl.constexpr,
    SCALE_MANTISSA: tl.constexpr,
    TWO_TARGETS: tl.constexpr,
    STAGES: tl.constexpr,  # of the rotation; 0: none
    ALONG: tl.constexpr,  # direction of the rotation's runs: 0 rows, 1 columns
):
    row, column = _place(columns, TILES_DOWN, ROWS, TILES_ACROSS, COLUMNS)
    inside = (row < rows) & (column < columns)
    value = tl.load(x + row * x_row + column * x_column, inside, other=0.0).to(tl.float32)
    if STAGES > 0:
        position, length = (row, rows) if ALONG == 0 else (column, columns)
        size, sign, norm = _run_of(position.to(tl.int32), length, 1 << STAGES, STAGES)
        value = _hadamard(value * sign, size, norm, STAGES, TILES_ACROSS * COLUMNS if ALONG == 0 else 1)

    of_tensor = 0.0
    if WHOLE or TENSOR_SCALE:
        of_tensor = tl.load(tensor_amax + tl.zeros((1, 1, 1, 1), tl.int32))
    if WHOLE:
        amax = of_tensor
    else:
        # The magnitude's bits order like it, with infinity and NaN on top.
        bits = bits_of(value) & 0x7FFFFFFF
        amax = float_of(tl.max(tl.max(bits, 3, keep_dims=True), 1, keep_dims=True))

    dither = 0.0
    if RANDOM:
        position = ((row >> 2) * columns + first + column).to(tl.uint32)
        dither = dither_of(row, position, key.to(tl.uint32), (key >> 32).to(tl.uint32))
    found = _quantized(
        value, dither, amax, of_tensor, target, top, carry, tensor_target, scale_largest, scale_smallest, scale_least,
        scale_shift, largest, least, shift, KIND, RULE, TENSOR_SCALE, SCALE_MANTISSA, SUBNORMALS, MANTISSA, RANDOM,
    )  # fmt: skip
    if TWO_TARGETS:
        other = _quantized(
            value, dither, amax, of_tensor, other_target, top, carry, tensor_target, scale_largest, scale_smallest,
            scale_least, scale_shift, largest, least, shift, KIND, RULE, TENSOR_SCALE, SCALE_MANTISSA, SUBNORMALS,
            MANTISSA, RANDOM,
        )  # fmt: skip
        found = tl.where(_squared_error(other, value) < _squared_error(found, value), other, found)
    if STAGES > 0:
        found = _hadamard(found, size, norm, STAGES, TILES_ACROSS * COLUMNS if ALONG == 0 else 1) * sign
    tl.store(y + row * columns + column, found, inside)
