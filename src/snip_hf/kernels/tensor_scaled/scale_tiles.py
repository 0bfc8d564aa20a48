"""The Triton kernel that finds the scales of an operand, and counts its blocks that do not fit.

Legend: as in `tiles`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_numerics import amax_of, larger
from . import folding, records
from .tiles import _EXPONENT, _LARGEST, _PARAMETERS, _SPACING, _UNSET, _as_bf16, _row_amax, _write_parameters

_MOST, _LOST = tl.constexpr(folding.MOST), tl.constexpr(folding.LOST)
_BLOCKS, _SATURATED, _SMALL = tl.constexpr(records.BLOCKS), tl.constexpr(records.SATURATED), tl.constexpr(records.SMALL)
_AMAX, _ARRIVED = tl.constexpr(records.AMAX), tl.constexpr(records.ARRIVED)


@triton.jit
def _magnitudes(x, part, tokens, channels, stride, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Of a part of x, (HEIGHT, WIDTH), zeros behind its ends."""
    across = tl.cdiv(channels, WIDTH)
    row = (part // across * HEIGHT + tl.arange(0, HEIGHT)).to(tl.int64)[:, None]
    column = (part % across * WIDTH + tl.arange(0, WIDTH))[None, :]
    return tl.abs(_as_bf16(tl.load(x + row * stride + column, (row < tokens) & (column < channels), other=0.0)))


@triton.jit
def _count(record, known, x, part, tokens, channels, stride, inverse, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Counts the 1x32 blocks of a part that are not zero, those that saturate and those that lose bits."""
    amax = _row_amax(_magnitudes(x, part, tokens, channels, stride, HEIGHT, WIDTH) * inverse, HEIGHT, WIDTH)
    saturated = (amax > tl.load(known + _MOST)) & (amax < float("inf"))
    small = (amax > 0.0) & (amax <= tl.load(known + _LOST))
    tl.atomic_add(record + _BLOCKS, tl.sum(tl.sum((amax > 0.0).to(tl.int32), 1), 0).to(tl.int64))
    tl.atomic_add(record + _SATURATED, tl.sum(tl.sum(saturated.to(tl.int32), 1), 0).to(tl.int64))
    tl.atomic_add(record + _SMALL, tl.sum(tl.sum(small.to(tl.int32), 1), 0).to(tl.int64))


@triton.jit
def scales_kernel(
    x,
    state,
    record,
    table,
    row_parameters,
    column_parameters,
    tokens,
    channels,
    stride,
    parts,
    ROW_GEMM: tl.constexpr,
    COLUMN_GEMM: tl.constexpr,
    COUNTS: tl.constexpr,
    COUNTING: tl.constexpr,  # programs that count at most
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The parameters of both layouts. All of x is read only where they need its amax: without an exponent in force, or
    in a format with one FP32 scale. Otherwise some programs count the blocks of one part that do not fit."""
    exponent = tl.load(record + _EXPONENT)
    needed, is_folded = exponent == _UNSET, False
    row_known, column_known, known = table, table, table
    if COLUMN_GEMM >= 0:
        column_known = table + tl.load(state + COLUMN_GEMM) * _PARAMETERS
        is_folded = tl.load(column_known + _SPACING) > 0.0
        needed, known = needed | (not is_folded), column_known
    if ROW_GEMM >= 0:
        row_known = table + tl.load(state + ROW_GEMM) * _PARAMETERS
        is_row_folded = tl.load(row_known + _SPACING) > 0.0
        needed, known = needed | (not is_row_folded), tl.where(is_row_folded, row_known, known)
        is_folded = is_folded | is_row_folded
    is_last = tl.program_id(0) == 0
    bits = exponent * 0
    if needed:
        largest = tl.zeros([HEIGHT, WIDTH], tl.float32)
        # From the end, which was written last and may be in the cache, to where `fold_kernel` begins.
        for part in range(tl.program_id(0), parts, tl.num_programs(0)):
            largest = larger(largest, _magnitudes(x, parts - 1 - part, tokens, channels, stride, HEIGHT, WIDTH))
        found = amax_of(amax_of(largest, 1), 0).to(tl.int32, bitcast=True).to(tl.int64)
        tl.atomic_max(record + _AMAX, found)
        # The last program to arrive sees what all have found, and leaves the places as they were.
        is_last = tl.atomic_add(record + _ARRIVED, 1) == tl.num_programs(0) - 1
        if is_last:
            bits = tl.atomic_xchg(record + _AMAX, 0)
            tl.atomic_xchg(record + _ARRIVED, 0)
            if COUNTS:
                tl.atomic_max(record + _LARGEST, tl.where(bits < 0x7F800000, bits, 0))
    if is_last:
        if ROW_GEMM >= 0:
            _write_parameters(row_parameters, row_known, exponent, bits)
        if COLUMN_GEMM >= 0:
            _write_parameters(column_parameters, column_known, exponent, bits)
    if COUNTS:
        counting = tl.minimum(tl.num_programs(0), COUNTING)
        if is_folded and exponent != _UNSET and tl.program_id(0) < counting:
            part = tl.program_id(0) * (parts // counting)
            inverse = ((127 - exponent.to(tl.int32)) << 23).to(tl.float32, bitcast=True)
            _count(record, known, x, part, tokens, channels, stride, inverse, HEIGHT, WIDTH)
