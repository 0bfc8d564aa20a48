# ruff: noqa: SIM102  # a constant and a number of the device cannot be combined
"""The Triton kernels that fold operands of layers of several matrices into E4M3, with a scale of each matrix.

Legend: as in `tiles` and `places`. A program has 32 places, which are one matrix's. Weights have no `blocks`: all their
matrices have the same number of rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_numerics import KEY, RUN, amax_of, bits_of_key, key_of_matrix, pack_fp8
from . import folding, places
from .scale_tiles import _BLOCKS, _LOST, _MOST, _SATURATED, _SMALL
from .tiles import (
    _BLOCK,
    _EXPONENT,
    _LARGEST,
    _PARAMETERS,
    _SPACING,
    _UNSET,
    _all_rounded,
    _as_bf16,
    _column_amax,
    _largest,
    _least_powers,
    _over_columns,
    _over_rows,
    _row_amax,
    _scale_of,
    _store_rows,
)

_RUNS = tl.constexpr(folding.BLOCK // RUN.value)
_MATRIX, _FIRST, _ROWS = tl.constexpr(places.MATRIX), tl.constexpr(places.FIRST), tl.constexpr(places.ROWS)
_OFFSET, _TOKENS = tl.constexpr(places.OFFSET), tl.constexpr(places.TOKENS)
_FIELDS = tl.constexpr(places.BLOCK_FIELDS)


@triton.jit
def _block_of(blocks, block, height, EVEN: tl.constexpr):
    """Its matrix, first token, number of tokens, which of the matrix's the first one is, and the matrix's tokens.

    height: rows of each matrix if EVEN.
    """
    if EVEN:
        row = block.to(tl.int64) * _BLOCK
        matrix = row // height
        first, rows, offset, tokens = row, row * 0 + _BLOCK, row - matrix * height, row * 0 + height
    else:
        at = blocks + block * _FIELDS
        matrix, first, rows = tl.load(at + _MATRIX), tl.load(at + _FIRST), tl.load(at + _ROWS)
        offset, tokens = tl.load(at + _OFFSET), tl.load(at + _TOKENS)
    return matrix, first, rows, offset, tokens


@triton.jit
def grouped_scales_kernel(
    x,
    blocks,
    state,
    record,
    table,
    amaxes,
    height,
    channels,
    stride,
    parts,
    ROW_GEMM: tl.constexpr,
    COLUMN_GEMM: tl.constexpr,
    COUNTS: tl.constexpr,
    COUNTING: tl.constexpr,  # programs that count at most
    EVEN: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The amax of each matrix, FP32 bits. All of x is read only where they are needed: without an exponent in force, or
    in a format with one FP32 scale. Otherwise some programs count the blocks of one part that do not fit."""
    exponent = tl.load(record + _EXPONENT)
    needed, is_folded, known = exponent == _UNSET, False, table
    if COLUMN_GEMM >= 0:
        column_known = table + tl.load(state + COLUMN_GEMM) * _PARAMETERS
        is_folded = tl.load(column_known + _SPACING) > 0.0
        needed, known = needed | (not is_folded), column_known
    if ROW_GEMM >= 0:
        row_known = table + tl.load(state + ROW_GEMM) * _PARAMETERS
        is_row_folded = tl.load(row_known + _SPACING) > 0.0
        needed, known = needed | (not is_row_folded), tl.where(is_row_folded, row_known, known)
        is_folded = is_folded | is_row_folded
    across = tl.cdiv(channels, WIDTH)
    row = tl.arange(0, _BLOCK)
    if needed:
        for part in range(tl.program_id(0), parts, tl.num_programs(0)):
            matrix, first, rows, _, _ = _block_of(blocks, part // across, height, EVEN)
            column = part % across * WIDTH + tl.arange(0, WIDTH)
            at = x + (first + row)[:, None] * stride + column[None, :]
            magnitude = tl.abs(_as_bf16(tl.load(at, (row < rows)[:, None] & (column < channels)[None, :], other=0.0)))
            found = amax_of(amax_of(magnitude, 1), 0).to(tl.int32, bitcast=True)
            tl.atomic_max(amaxes + matrix, found)
            if COUNTS:
                tl.atomic_max(record + _LARGEST, tl.where(found < 0x7F800000, found, 0).to(tl.int64))
    if COUNTS:
        counting = tl.minimum(tl.num_programs(0), COUNTING)
        if is_folded and exponent != _UNSET and tl.program_id(0) < counting:
            part = tl.program_id(0) * (parts // counting)
            _, first, rows, _, _ = _block_of(blocks, part // across, height, EVEN)
            column = part % across * WIDTH + tl.arange(0, WIDTH)
            at = x + (first + row)[:, None] * stride + column[None, :]
            magnitude = tl.abs(_as_bf16(tl.load(at, (row < rows)[:, None] & (column < channels)[None, :], other=0.0)))
            inverse = ((127 - exponent.to(tl.int32)) << 23).to(tl.float32, bitcast=True)
            amax = _row_amax(magnitude * inverse, _BLOCK, WIDTH)
            saturated = (amax > tl.load(known + _MOST)) & (amax < float("inf"))
            small = (amax > 0.0) & (amax <= tl.load(known + _LOST))
            tl.atomic_add(record + _BLOCKS, tl.sum(tl.sum((amax > 0.0).to(tl.int32), 1), 0).to(tl.int64))
            tl.atomic_add(record + _SATURATED, tl.sum(tl.sum(saturated.to(tl.int32), 1), 0).to(tl.int64))
            tl.atomic_add(record + _SMALL, tl.sum(tl.sum(small.to(tl.int32), 1), 0).to(tl.int64))


@triton.jit
def _load(x, first, rows, channel, stride):
    """The first, second, third and fourth tokens of the runs of a block, FP32, zeros behind its tokens."""
    token = tl.arange(0, _RUNS) * RUN
    at = x + (first + token)[:, None] * stride + channel[None, :]
    a = tl.load(at, (token < rows)[:, None], other=0.0)
    b = tl.load(at + stride, (token + 1 < rows)[:, None], other=0.0)
    c = tl.load(at + 2 * stride, (token + 2 < rows)[:, None], other=0.0)
    d = tl.load(at + 3 * stride, (token + 3 < rows)[:, None], other=0.0)
    return _as_bf16(a), _as_bf16(b), _as_bf16(c), _as_bf16(d)


@triton.jit
def _factor(inverse, scale, bits):
    """What a matrix's values that were divided by a scale are multiplied by for another one; 1 for nothing but zeros,
    whose inverse scale would make it infinite. bits: of the amax."""
    return tl.where(bits == 0, 1.0, inverse * scale)


@triton.jit
def grouped_fold_kernel(
    x,
    blocks,  # not read if EVEN
    state,
    record,
    table,
    amaxes,  # read if NEEDS
    row_scales,
    column_scales,
    rows,
    columns,
    height,
    channels,
    places,
    stride,
    HAS_ROWS: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    ROW_GEMM: tl.constexpr,
    COLUMN_GEMM: tl.constexpr,
    NEEDS: tl.constexpr,  # the amaxes
    IS_GRADIENT: tl.constexpr,
    COUNTS: tl.constexpr,
    EVEN: tl.constexpr,
    CHANNELS: tl.constexpr,  # a multiple of 32 that divides the channels
):
    """Both layouts of 32 places by CHANNELS channels, from one read of x, and each matrix's scales.

    Programs have one axis, since along others there may be no more than 65,535.
    """
    across = channels // CHANNELS
    block, part = tl.program_id(0) // across, tl.program_id(0) % across
    channel = part * CHANNELS + tl.arange(0, CHANNELS)
    matrix, first, count, offset, tokens = _block_of(blocks, block, height, EVEN)
    a, b, c, d = _load(x, first, count, channel, stride)
    exponent, seen = tl.load(record + _EXPONENT), tl.load(record + _LARGEST)
    largest, amax_bits = seen, exponent * 0
    if NEEDS:
        amax_bits = tl.load(amaxes + matrix).to(tl.int64)
    writes_scales = (offset == 0) & (part == 0)
    row_known, column_known = table, table
    row_spacing, column_spacing, scale, inverse = 0.0, 0.0, 1.0, 1.0
    row_inverse, column_inverse = 1.0, 1.0
    if HAS_COLUMNS:
        column_known = table + tl.load(state + COLUMN_GEMM) * _PARAMETERS
        column_spacing = tl.load(column_known + _SPACING)
        column_scale, column_inverse = _scale_of(column_spacing, exponent, amax_bits)
        scale = tl.where(column_spacing > 0.0, column_scale, scale)
        inverse = tl.where(column_spacing > 0.0, column_inverse, inverse)
        tl.store(column_scales + matrix, column_scale, writes_scales)
    if HAS_ROWS:
        row_known = table + tl.load(state + ROW_GEMM) * _PARAMETERS
        row_spacing = tl.load(row_known + _SPACING)
        row_scale, row_inverse = _scale_of(row_spacing, exponent, amax_bits)
        scale = tl.where(row_spacing > 0.0, row_scale, scale)
        inverse = tl.where(row_spacing > 0.0, row_inverse, inverse)
        tl.store(row_scales + matrix, row_scale, writes_scales)
    # Both layouts round with the same random numbers, those of the matrix alone.
    run = offset // RUN + tl.arange(0, _RUNS)
    bits = run
    if IS_GRADIENT:
        own = key_of_matrix(tl.load(state + KEY), matrix)
        bits = bits_of_key(own, state, run, channel, tokens.to(tl.int32), channels)
    a, b, c, d = a * inverse, b * inverse, c * inverse, d * inverse  # exact
    place = block.to(tl.int64) * _BLOCK + tl.arange(0, _RUNS) * RUN
    if HAS_ROWS:
        at = rows + place[:, None] * channels + channel[None, :]
        if row_spacing > 0.0:
            la, lb = _row_amax(a, _RUNS, CHANNELS), _row_amax(b, _RUNS, CHANNELS)
            lc, ld = _row_amax(c, _RUNS, CHANNELS), _row_amax(d, _RUNS, CHANNELS)
            if COUNTS:
                largest = _largest(tl.maximum(tl.maximum(la, lb), tl.maximum(lc, ld)), scale)
            la = _over_rows(_least_powers(la, row_known), _RUNS, CHANNELS)
            lb = _over_rows(_least_powers(lb, row_known), _RUNS, CHANNELS)
            lc = _over_rows(_least_powers(lc, row_known), _RUNS, CHANNELS)
            ld = _over_rows(_least_powers(ld, row_known), _RUNS, CHANNELS)
            ra, rb, rc, rd = _all_rounded(a, b, c, d, la, lb, lc, ld, bits, row_spacing, IS_GRADIENT)
            _store_rows(at, ra, rb, rc, rd, channels)
        else:
            factor = _factor(row_inverse, scale, amax_bits)
            _store_rows(at, a * factor, b * factor, c * factor, d * factor, channels)
    if HAS_COLUMNS:
        at = columns.to(tl.pointer_type(tl.uint32), bitcast=True)
        at += channel.to(tl.int64)[None, :] * (places // RUN) + (place // RUN)[:, None]
        if column_spacing > 0.0:
            amax = _column_amax(a, b, c, d, _RUNS, CHANNELS)
            if COUNTS and not HAS_ROWS:
                largest = _largest(amax, scale)
            least = _over_columns(_least_powers(amax, column_known), _RUNS, CHANNELS)
            a, b, c, d = _all_rounded(a, b, c, d, least, least, least, least, bits, column_spacing, IS_GRADIENT)
            tl.store(at, pack_fp8(a, b, c, d))
        else:
            factor = _factor(column_inverse, scale, amax_bits)
            tl.store(at, pack_fp8(a * factor, b * factor, c * factor, d * factor))
    if COUNTS:
        if largest > seen:
            tl.atomic_max(record + _LARGEST, largest)
