"""The Triton kernel that quantizes an operand for block-scaled tensor cores. Not run on Blackwell.

Every step is integer or FP32 arithmetic that all GPUs have: no conversion instruction of sm_100, which sm_120 lacks in
part. Elements, their order and random numbers are those of `numerics.rounding`, bit for bit. Legend: as in `packing`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..rounding_tiles import block_scales
from ..triton_numerics import KEY, bits_of, dither_of, float_of, rank_stream, round_to_grid

_TILE_ROWS, _TILE_SCALES = tl.constexpr(128), tl.constexpr(4)


@triton.jit
def _codes(magnitude, SMALLEST: tl.constexpr, MIN_EXPONENT: tl.constexpr, MANTISSA_BITS: tl.constexpr):
    """The codes of numbers >= 0 on a grid, int32: `packing.codes_of` without the sign."""
    normal = (bits_of(magnitude) >> (23 - MANTISSA_BITS)) - ((126 + MIN_EXPONENT) << MANTISSA_BITS)
    return tl.where(normal < (1 << MANTISSA_BITS), (magnitude * (1.0 / SMALLEST)).to(tl.int32), normal)


@triton.jit
def quantize_kernel(
    x,
    state,
    tensor_amax,
    data,
    scales,
    rows,
    contracted,
    padded_rows,
    padded_contracted,
    scale_runs,
    row_stride,
    contracted_stride,
    # of the elements' grid, as in `rounding_tiles.rounding_kernel`
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
    CONTRACTS: tl.constexpr,
    ACROSS: tl.constexpr,
    BLOCK: tl.constexpr,
    SMALLEST: tl.constexpr,  # number of the elements' grid
    MIN_EXPONENT: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    SIGN: tl.constexpr,
    KIND: tl.constexpr,
    RULE: tl.constexpr,
    TENSOR_SCALE: tl.constexpr,
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
    bits = tl.reshape(bits_of(value) & 0x7FFFFFFF, [BLOCKS, SIZE, OTHER_BLOCKS, OTHER_SIZE])
    amax = float_of(tl.max(tl.max(bits, 3), 1))  # of each block
    of_tensor = tl.load(tensor_amax + tl.zeros((1, 1), tl.int32))
    own, _, factor = block_scales(
        amax, of_tensor, target, top, carry, tensor_target, scale_largest, scale_smallest, scale_least, scale_shift,
        KIND, RULE, TENSOR_SCALE, True,
    )  # fmt: skip
    if KIND == "e8m0":
        code = bits_of(own) >> 23  # 255 for NaN
    else:
        code = _codes(own, 2.0**-9, -6, 3)  # of E4M3
        code = tl.where(own == own, code, 127)
    spread = tl.broadcast_to(factor[:, None, :, None], [BLOCKS, SIZE, OTHER_BLOCKS, OTHER_SIZE])
    scaled = value * tl.reshape(spread, [FIRST, SECOND])
    scaled = tl.where(scaled == scaled, scaled, 0.0)  # blocks that are not finite have the scale NaN
    dither = 0.0
    if STOCHASTIC:
        # Rows and columns of x are those of the operand, or the other way round.
        x_row, x_column = (row, column) if ROWS_FIRST else (column, row)
        x_rows, x_columns = (rows, contracted) if ROWS_FIRST else (contracted, rows)
        low, high, first_run = rank_stream(tl.load(state + KEY), state, x_rows)
        position = (first_run + (x_row >> 2).to(tl.uint32)) * x_columns + x_column.to(tl.uint32)
        dither = dither_of(x_row, position, low, high)
    rounded = round_to_grid(scaled, dither, largest, least, shift, True, True, STOCHASTIC)
    element = _codes(tl.abs(rounded), SMALLEST, MIN_EXPONENT, MANTISSA_BITS)
    # A number that is rounded to 0 keeps its sign.
    element |= ((bits_of(scaled) >> 31) & 1) << SIGN
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
