"""The Triton kernel that quantizes an operand for block-scaled tensor cores. Not run on Blackwell.

Every step is integer or FP32 arithmetic that all GPUs have: no conversion instruction of sm_100, which sm_120 lacks in
part. Elements, their order and random numbers are those of `numerics.rounding`, bit for bit. Legend: as in `packing`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...numerics.gemms import GEMMS
from ...numerics.grids import E4M3
from ..triton_numerics import power_of_two, random_bits, to_grid

# Places in a layer's state.
_KEY, _RANK, _RANKS = tl.constexpr(len(GEMMS)), tl.constexpr(len(GEMMS) + 1), tl.constexpr(len(GEMMS) + 2)
_INFINITY = tl.constexpr(0x7F800000)
_LARGEST = tl.constexpr(3.4028234663852886e38)
_LEAST_POWER = tl.constexpr(1 << 22)  # the bits of 2**-127
# Of E4M3, as scales.
_SCALE_MAX, _SCALE_MIN = tl.constexpr(E4M3.max), tl.constexpr(E4M3.smallest)
_SCALE_POWER, _SCALE_SPACING = tl.constexpr(2.0**E4M3.min_exponent), tl.constexpr(2.0**-E4M3.mantissa_bits)
_TILE_ROWS, _TILE_SCALES = tl.constexpr(128), tl.constexpr(4)


@triton.jit
def _small_float(
    magnitude, MIN_EXPONENT: tl.constexpr, MANTISSA_BITS: tl.constexpr, LEAST: tl.constexpr, PER_LEAST: tl.constexpr
):
    """The code of a number >= 0 that is on a grid, int32: `packing.codes_of` without the sign."""
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = (bits >> (23 - MANTISSA_BITS)) - ((126 + MIN_EXPONENT) << MANTISSA_BITS)
    return tl.where(magnitude < LEAST, (magnitude * PER_LEAST).to(tl.int32), normal)


@triton.jit
def _power_scales(amax_bits, largest, TOP: tl.constexpr, RULE: tl.constexpr, MANTISSA_BITS: tl.constexpr):
    """`scales._exponents` and `scales._power`: codes of E8M0 scales, and what elements are multiplied by."""
    if RULE == "rceil" or RULE == "ceil":
        amax = amax_bits.to(tl.float32, bitcast=True)
        bits = amax_bits
        if RULE == "rceil":
            bits = tl.div_rn(amax, tl.zeros_like(amax) + largest).to(tl.int32, bitcast=True)
        field, mantissa = bits >> 23, bits & 0x7FFFFF
        above = tl.where(field == 0, mantissa > _LEAST_POWER, mantissa > 0)
        exponent = field - 127 + above.to(tl.int32)
        if RULE == "ceil":
            exponent -= TOP
    else:
        bits = amax_bits
        if RULE == "even":
            bits += 1 << (22 - MANTISSA_BITS)
        exponent = (bits >> 23) - 127 - TOP
    exponent = tl.minimum(tl.maximum(exponent, -127), 127)
    factor_bits = tl.where(exponent == 127, _LEAST_POWER, (127 - exponent) << 23)
    return exponent + 127, factor_bits.to(tl.float32, bitcast=True)


@triton.jit
def _fine_scales(amax_bits, largest, whole, RULE: tl.constexpr):
    """`scales._two_level`: codes of E4M3 scales, and what elements are multiplied by."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    wanted = tl.div_rn(tl.div_rn(amax, tl.zeros_like(amax) + largest), whole)
    power = tl.maximum(power_of_two(wanted), _SCALE_POWER)
    scale = tl.minimum(to_grid(wanted, 0.0, power, _SCALE_SPACING), _SCALE_MAX)
    if RULE == "up":
        scale = tl.where(scale < wanted, scale + power * _SCALE_SPACING, scale)
    scale = tl.minimum(tl.maximum(scale, _SCALE_MIN), _SCALE_MAX)
    factor = tl.minimum(tl.div_rn(tl.div_rn(tl.zeros_like(whole) + 1.0, whole), scale), _LARGEST)
    return _small_float(scale, -6, 3, _SCALE_POWER, 512.0), factor


@triton.jit
def _random_numbers(state, x_row, x_column, x_rows, x_columns):
    """`random_streams.uniform` - 1/2 of the elements at these places of x."""
    # `random_streams.rank_stream`
    key, runs = tl.load(state + _KEY), (x_rows + 3) // 4
    all_runs = tl.load(state + _RANKS).to(tl.uint32) * runs
    low = key.to(tl.uint32) ^ (all_runs * 0x9E3779B9)
    high = (key >> 32).to(tl.uint32) + all_runs * 0x85EBCA6B
    first = tl.load(state + _RANK).to(tl.uint32) * runs
    position = (first + (x_row >> 2).to(tl.uint32)) * x_columns + x_column.to(tl.uint32)
    word = random_bits(position, low, high)
    number = (word >> ((x_row & 3) * 8).to(tl.uint32)) & 0xFF
    return (number.to(tl.float32) - 127.5) * 0.00390625


@triton.jit
def quantize_kernel(
    x,
    state,
    tensor_scale,
    data,
    scales,
    rows,
    contracted,
    padded_rows,
    padded_contracted,
    scale_runs,
    row_stride,
    contracted_stride,
    largest,
    CONTRACTS: tl.constexpr,
    ACROSS: tl.constexpr,
    BLOCK: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    LEAST: tl.constexpr,
    SPACING: tl.constexpr,
    SIGN: tl.constexpr,
    TOP: tl.constexpr,
    POWERS: tl.constexpr,
    RULE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Rounds 128 rows and four scales of each: one run of swizzled scales. Blocks are (ACROSS, BLOCK).

    Tiles keep x's own order, so that loads are whole lines: rows first, or the contracted dimension first.
    """
    WIDTH: tl.constexpr = _TILE_SCALES * BLOCK
    HIGH: tl.constexpr = _TILE_ROWS // ACROSS
    ROWS_FIRST: tl.constexpr = CONTRACTS == 1
    # The tile, and its blocks in both dimensions.
    FIRST: tl.constexpr = _TILE_ROWS if ROWS_FIRST else WIDTH
    SECOND: tl.constexpr = WIDTH if ROWS_FIRST else _TILE_ROWS
    BLOCKS: tl.constexpr = HIGH if ROWS_FIRST else _TILE_SCALES
    SIZE: tl.constexpr = ACROSS if ROWS_FIRST else BLOCK
    OTHER_BLOCKS: tl.constexpr = _TILE_SCALES if ROWS_FIRST else HIGH
    OTHER_SIZE: tl.constexpr = BLOCK if ROWS_FIRST else ACROSS
    tile_row, tile_column = tl.program_id(0) // scale_runs, tl.program_id(0) % scale_runs
    first_row, first_column = tile_row.to(tl.int64) * _TILE_ROWS, tile_column.to(tl.int64) * WIDTH
    in_row, in_column = tl.arange(0, _TILE_ROWS), tl.arange(0, WIDTH)
    place, in_scale = tl.arange(0, WIDTH // 2), tl.arange(0, _TILE_SCALES)
    if ROWS_FIRST:
        in_row, in_column, place, in_scale = in_row[:, None], in_column[None, :], place[None, :], in_scale[None, :]
    else:
        in_row, in_column, place, in_scale = in_row[None, :], in_column[:, None], place[:, None], in_scale[:, None]
    row, column = tile_row * _TILE_ROWS + in_row, tile_column * WIDTH + in_column
    inside = (row < rows) & (column < contracted)
    x += first_row * row_stride + first_column * contracted_stride
    value = tl.load(x + in_row * row_stride + in_column * contracted_stride, inside, other=0.0).to(tl.float32)
    # The magnitude's bits order like it, with infinity and NaN on top.
    bits = tl.reshape(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, [BLOCKS, SIZE, OTHER_BLOCKS, OTHER_SIZE])
    amax = tl.max(tl.max(bits, 3), 1)  # of each block
    if POWERS:
        is_finite = amax < _INFINITY
        code, factor = _power_scales(amax, largest, TOP, RULE, MANTISSA_BITS)
        code = tl.where(is_finite, code, 255)
    else:
        whole = tl.zeros_like(amax).to(tl.float32) + tl.load(tensor_scale)
        is_finite = (amax < _INFINITY) & (whole == whole)
        code, factor = _fine_scales(amax, largest, whole, RULE)
        code = tl.where(is_finite, code, 127)
    # What is not finite becomes 0: its scale is NaN.
    factor = tl.where(is_finite, factor, float("nan"))
    spread = tl.broadcast_to(factor[:, None, :, None], [BLOCKS, SIZE, OTHER_BLOCKS, OTHER_SIZE])
    scaled = value * tl.reshape(spread, [FIRST, SECOND])
    scaled = tl.where(scaled == scaled, scaled, 0.0)
    power = tl.maximum(power_of_two(scaled), LEAST)
    if STOCHASTIC:
        if ROWS_FIRST:
            dither = _random_numbers(state, row, column, rows, contracted) * SPACING
        else:
            dither = _random_numbers(state, column, row, contracted, rows) * SPACING
        rounded = to_grid(scaled, dither, power, SPACING)
    else:
        rounded = to_grid(scaled, 0.0, power, SPACING)
    rounded = tl.minimum(tl.abs(rounded), largest)
    element = _small_float(rounded, MIN_EXPONENT, MANTISSA_BITS, LEAST, 1.0 / (LEAST * SPACING))
    # What becomes 0 keeps its sign.
    element |= ((scaled.to(tl.int32, bitcast=True) >> 31) & 1) << SIGN
    if PACKED:
        if ROWS_FIRST:
            low, high = tl.split(tl.reshape(element, [_TILE_ROWS, WIDTH // 2, 2]))
        else:
            low, high = tl.split(tl.permute(tl.reshape(element, [WIDTH // 2, 2, _TILE_ROWS]), [0, 2, 1]))
        per_row = padded_contracted // 2
        written = (row < padded_rows) & (tile_column * (WIDTH // 2) + place < per_row)
        data += first_row * per_row + first_column // 2
        tl.store(data + in_row * per_row + place, (low | (high << 4)).to(tl.uint8), written)
    else:
        written = (row < padded_rows) & (column < padded_contracted)
        data += first_row * padded_contracted + first_column
        tl.store(data + in_row * padded_contracted + in_column, element.to(tl.uint8), written)
    if ROWS_FIRST:
        of_rows = tl.broadcast_to(code[:, None, :], [HIGH, ACROSS, _TILE_SCALES])
        of_rows = tl.reshape(of_rows, [_TILE_ROWS, _TILE_SCALES])
    else:
        of_rows = tl.broadcast_to(code[:, :, None], [_TILE_SCALES, HIGH, ACROSS])
        of_rows = tl.reshape(of_rows, [_TILE_SCALES, _TILE_ROWS])
    starts = (tile_column * _TILE_SCALES + in_scale) * BLOCK
    of_rows = tl.where((row < rows) & (starts < contracted), of_rows, 0)
    at = 16 * (in_row % 32) + 4 * (in_row // 32) + in_scale
    run = tl.program_id(0).to(tl.int64) * (_TILE_ROWS * _TILE_SCALES)
    tl.store(scales + run + at, of_rows.to(tl.uint8))
