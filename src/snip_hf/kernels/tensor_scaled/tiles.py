# ruff: noqa: SIM102  # a constant and a number of the device cannot be combined
"""The Triton kernels that fold operands into E4M3.

Legend: T tokens, C channels; weights have O for T and I for C. What a format is comes from the parameters of a layout
(`folding`), numbers that are read while the kernel runs and are the same for all of its programs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...numerics.formats import E4M3
from ..triton_numerics import (
    RUN,
    amax_of,
    bits_of_runs,
    larger,
    pack_fp8,
    power_of_two,
    random_of_runs,
    to_fp8,
    to_grid,
)
from . import folding, records

_MAX_FP8, _SMALLEST_NORMAL = tl.constexpr(E4M3.max), tl.constexpr(2.0**-126)
_BLOCK, _BLOCK_RUNS = tl.constexpr(folding.BLOCK), tl.constexpr(folding.BLOCK // RUN.value)
_CARRY, _TOP_FIELD = tl.constexpr(0x3FFFFF), tl.constexpr(127 + 8)  # `folding.exponents_of`
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: added and taken away, it rounds to whole numbers
_PARAMETERS = tl.constexpr(folding.PARAMETERS)
_SCALE, _INVERSE, _CEILING = tl.constexpr(folding.SCALE), tl.constexpr(folding.INVERSE), tl.constexpr(folding.CEILING)
_LEAST, _SPACING = tl.constexpr(folding.LEAST), tl.constexpr(folding.SPACING)
_MOST, _LOST = tl.constexpr(folding.MOST), tl.constexpr(folding.LOST)
_EXPONENT, _LARGEST = tl.constexpr(records.EXPONENT), tl.constexpr(records.LARGEST)
_BLOCKS, _SATURATED, _SMALL = tl.constexpr(records.BLOCKS), tl.constexpr(records.SATURATED), tl.constexpr(records.SMALL)
_AMAX, _ARRIVED = tl.constexpr(records.AMAX), tl.constexpr(records.ARRIVED)
_UNSET, _LIMIT = tl.constexpr(records.UNSET), tl.constexpr(records.LIMIT)


@triton.jit
def _as_bf16(value):
    """Rounded to BF16, as autocast would, in FP32."""
    return value.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _scale_of(spacing, exponent, bits):
    """The scale of a tensor in a format and its inverse.

    spacing: of the format. exponent: in force, or _UNSET. bits: of the tensor's amax, if it was needed.
    """
    if spacing == 0.0:
        amax = bits.to(tl.int32).to(tl.float32, bitcast=True)
        scale = tl.maximum(tl.div_rn(amax, _MAX_FP8), _SMALLEST_NORMAL)
        scale = tl.where(amax < float("inf"), scale, float("nan"))
        inverse = tl.div_rn(1.0, scale)
    else:
        own = tl.minimum(tl.maximum(((bits + _CARRY) >> 23) - _TOP_FIELD, -_LIMIT), _LIMIT)
        s = tl.where(exponent == _UNSET, own, exponent).to(tl.int32)
        scale = ((s + 127) << 23).to(tl.float32, bitcast=True)
        inverse = ((127 - s) << 23).to(tl.float32, bitcast=True)
    return scale, inverse


@triton.jit
def _write_parameters(parameters, known, exponent, bits):
    """The scale of the tensor and its inverse, and what the table knows of the format.

    known: the format's row in the table. exponent: in force, or _UNSET. bits: of the tensor's amax, if it was needed.
    """
    scale, inverse = _scale_of(tl.load(known + _SPACING), exponent, bits)
    place = tl.arange(0, _PARAMETERS)
    value = tl.load(known + place)
    value = tl.where(place == _SCALE, scale, tl.where(place == _INVERSE, inverse, value))
    tl.store(parameters + place, value)


@triton.jit
def _row_amax(x, RUNS: tl.constexpr, CHANNELS: tl.constexpr):
    """Of the 1x32 blocks, (RUNS, CHANNELS / 32)."""
    return amax_of(tl.reshape(x, [RUNS, CHANNELS // _BLOCK, _BLOCK]), 2)


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


@triton.jit
def _load(x, run, channel, tokens, channels, stride, RAGGED: tl.constexpr):
    """The first, second, third and fourth tokens of the runs, FP32."""
    token = run * RUN
    at = x + token[:, None] * stride + channel[None, :]
    if RAGGED:
        inside = channel[None, :] < channels
        a = tl.load(at, inside & (token[:, None] < tokens), other=0.0)
        b = tl.load(at + stride, inside & (token[:, None] + 1 < tokens), other=0.0)
        c = tl.load(at + 2 * stride, inside & (token[:, None] + 2 < tokens), other=0.0)
        d = tl.load(at + 3 * stride, inside & (token[:, None] + 3 < tokens), other=0.0)
    else:
        a = tl.load(at)
        b = tl.load(at + stride)
        c = tl.load(at + 2 * stride)
        d = tl.load(at + 3 * stride)
    return _as_bf16(a), _as_bf16(b), _as_bf16(c), _as_bf16(d)


@triton.jit
def _least_powers(amax, parameters):
    """The powers of two below which a block's grid has one spacing, from its amax. Infinity, which makes NaN of the
    whole block, where it holds an infinity or NaN."""
    power = power_of_two(amax * tl.load(parameters + _CEILING))
    return tl.maximum(power, tl.load(parameters + _LEAST))


@triton.jit
def _power_of(exponent):
    """2**exponent, FP32."""
    return ((exponent.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _folded_scale(known, record, scale, inverse, FINDS: tl.constexpr):
    """The tensor's scale and its inverse, powers of two, if a layout is folded, else those given; and its spacing.

    known: the parameters of the layout. FINDS: or the format's row in the table, with the exponent in the record.
    """
    spacing = tl.load(known + _SPACING)
    if FINDS:
        exponent = tl.load(record + _EXPONENT)
        scale, inverse = _power_of(exponent), _power_of(-exponent)
    else:
        scale = tl.where(spacing > 0.0, tl.load(known + _SCALE), scale)
        inverse = tl.where(spacing > 0.0, tl.load(known + _INVERSE), inverse)
    return scale, inverse, spacing


@triton.jit
def _find_parameters(
    state, record, table, row_parameters, column_parameters, ROW_GEMM: tl.constexpr, COLUMN_GEMM: tl.constexpr
):
    """Where the table has the formats of the rows and the columns; one program writes the parameters of both."""
    row_known, column_known = table, table
    exponent, is_first = tl.load(record + _EXPONENT), tl.program_id(0) + tl.program_id(1) == 0
    if ROW_GEMM >= 0:
        row_known = table + tl.load(state + ROW_GEMM) * _PARAMETERS
        if is_first:
            _write_parameters(row_parameters, row_known, exponent, exponent * 0)
    if COLUMN_GEMM >= 0:
        column_known = table + tl.load(state + COLUMN_GEMM) * _PARAMETERS
        if is_first:
            _write_parameters(column_parameters, column_known, exponent, exponent * 0)
    return row_known, column_known


@triton.jit
def _over_rows(of_blocks, RUNS: tl.constexpr, CHANNELS: tl.constexpr):
    """What 1x32 blocks have, at each of their elements."""
    spread = tl.broadcast_to(of_blocks[:, :, None], [RUNS, CHANNELS // _BLOCK, _BLOCK])
    return tl.reshape(spread, [RUNS, CHANNELS])


@triton.jit
def _column_amax(a, b, c, d, RUNS: tl.constexpr, CHANNELS: tl.constexpr):
    """Of the 32x1 blocks, (RUNS / 8, CHANNELS)."""
    largest = larger(larger(tl.abs(a), tl.abs(b)), larger(tl.abs(c), tl.abs(d)))
    return amax_of(tl.reshape(largest, [RUNS // _BLOCK_RUNS, _BLOCK_RUNS, CHANNELS]), 1)


@triton.jit
def _over_columns(of_blocks, RUNS: tl.constexpr, CHANNELS: tl.constexpr):
    """What 32x1 blocks have, at each of their elements."""
    spread = tl.broadcast_to(of_blocks[:, None, :], [RUNS // _BLOCK_RUNS, _BLOCK_RUNS, CHANNELS])
    return tl.reshape(spread, [RUNS, CHANNELS])


@triton.jit
def _rounded(x, least_power, spacing):
    """To the nearest number of a grid whose spacing is `spacing` between 1 and 2, and below least_power as there."""
    power = tl.maximum(power_of_two(x), least_power)
    return (x + power * (spacing * _ROUND)) - power * (spacing * _ROUND)


@triton.jit
def _rounded_randomly(x, fraction, least_power, spacing):
    """To one of the two neighbours; fraction: of `random_of_runs`."""
    dither = fraction * (128.0 * spacing) - (128.5 - 2.0**-9) * spacing  # (random - 1/2) spacings
    return to_grid(x, dither, tl.maximum(power_of_two(x), least_power), spacing)


@triton.jit
def _all_rounded(a, b, c, d, la, lb, lc, ld, bits, spacing, IS_GRADIENT: tl.constexpr):
    """The four tokens of each run, with their least powers."""
    if IS_GRADIENT:
        fa, fb, fc, fd = random_of_runs(bits)
        a, b = _rounded_randomly(a, fa, la, spacing), _rounded_randomly(b, fb, lb, spacing)
        c, d = _rounded_randomly(c, fc, lc, spacing), _rounded_randomly(d, fd, ld, spacing)
    else:
        a, b = _rounded(a, la, spacing), _rounded(b, lb, spacing)
        c, d = _rounded(c, lc, spacing), _rounded(d, ld, spacing)
    return a, b, c, d


@triton.jit
def _largest(amax, scale):
    """The bits of the largest magnitude of a program's blocks, from their amax divided by the scale, (*, *)."""
    finite = tl.where(amax < float("inf"), amax, 0.0)
    return (tl.max(tl.max(finite, 1), 0) * scale).to(tl.int32, bitcast=True).to(tl.int64)


@triton.jit
def _store_rows(at, a, b, c, d, padded_channels):
    """The four tokens of each run."""
    tl.store(at, to_fp8(a))
    tl.store(at + padded_channels, to_fp8(b))
    tl.store(at + 2 * padded_channels, to_fp8(c))
    tl.store(at + 3 * padded_channels, to_fp8(d))


# With a single token as a constant, the columns of nothing but that token were wrong on an H200 (docs/log.md).
@triton.jit(do_not_specialize=["tokens"])
def fold_kernel(
    x,
    state,
    record,
    table,  # read if FINDS
    row_parameters,
    column_parameters,
    rows,
    columns,
    tokens,
    channels,
    padded_tokens,
    padded_channels,
    stride,
    HAS_ROWS: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    ROW_GEMM: tl.constexpr,
    COLUMN_GEMM: tl.constexpr,
    FINDS: tl.constexpr,  # the parameters, and writes them; else `scales_kernel` has
    IS_GRADIENT: tl.constexpr,
    COUNTS: tl.constexpr,
    RAGGED: tl.constexpr,
    RUNS: tl.constexpr,  # of 4 tokens, a multiple of 8
    CHANNELS: tl.constexpr,  # a multiple of 32
):
    """Both layouts of 4 * RUNS tokens by CHANNELS channels, from one read of x."""
    row_known, column_known = row_parameters, column_parameters
    if FINDS:  # where all formats are folded and an exponent is in force
        row_known, column_known = _find_parameters(
            state, record, table, row_parameters, column_parameters, ROW_GEMM, COLUMN_GEMM
        )
    # From the end, where x is read for the first time: it was written last and may be in the cache.
    place = tl.num_programs(1) - 1 - tl.program_id(1) if FINDS else tl.program_id(1)
    run = (place * RUNS + tl.arange(0, RUNS)).to(tl.int64)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    a, b, c, d = _load(x, run, channel, tokens, channels, stride, RAGGED)
    seen = tl.load(record + _LARGEST)  # by some programs; no need to wait for others
    largest = seen
    # Both layouts round with the same random numbers.
    bits = bits_of_runs(state, run, channel, tokens, channels) if IS_GRADIENT else run
    row_spacing, column_spacing, scale, inverse = 0.0, 0.0, 1.0, 1.0
    if HAS_COLUMNS:
        scale, inverse, column_spacing = _folded_scale(column_known, record, scale, inverse, FINDS)
    if HAS_ROWS:
        scale, inverse, row_spacing = _folded_scale(row_known, record, scale, inverse, FINDS)
    a, b, c, d = a * inverse, b * inverse, c * inverse, d * inverse  # exact
    if HAS_ROWS:
        # Each branch stores what it computed, which takes fewer registers than to join.
        at = rows + (run * RUN)[:, None] * padded_channels + channel[None, :]
        if row_spacing > 0.0:
            la, lb = _row_amax(a, RUNS, CHANNELS), _row_amax(b, RUNS, CHANNELS)
            lc, ld = _row_amax(c, RUNS, CHANNELS), _row_amax(d, RUNS, CHANNELS)
            if COUNTS:
                largest = _largest(tl.maximum(tl.maximum(la, lb), tl.maximum(lc, ld)), scale)
            la = _over_rows(_least_powers(la, row_known), RUNS, CHANNELS)
            lb = _over_rows(_least_powers(lb, row_known), RUNS, CHANNELS)
            lc = _over_rows(_least_powers(lc, row_known), RUNS, CHANNELS)
            ld = _over_rows(_least_powers(ld, row_known), RUNS, CHANNELS)
            ra, rb, rc, rd = _all_rounded(a, b, c, d, la, lb, lc, ld, bits, row_spacing, IS_GRADIENT)
            _store_rows(at, ra, rb, rc, rd, padded_channels)
        else:
            factor = tl.load(row_parameters + _INVERSE) * scale
            _store_rows(at, a * factor, b * factor, c * factor, d * factor, padded_channels)
    if HAS_COLUMNS:
        at = columns.to(tl.pointer_type(tl.uint32), bitcast=True)
        at += channel.to(tl.int64)[None, :] * (padded_tokens // RUN) + run[:, None]
        if column_spacing > 0.0:
            amax = _column_amax(a, b, c, d, RUNS, CHANNELS)
            if COUNTS and not HAS_ROWS:
                largest = _largest(amax, scale)
            least = _over_columns(_least_powers(amax, column_known), RUNS, CHANNELS)
            a, b, c, d = _all_rounded(a, b, c, d, least, least, least, least, bits, column_spacing, IS_GRADIENT)
            tl.store(at, pack_fp8(a, b, c, d))
        else:
            factor = tl.load(column_parameters + _INVERSE) * scale
            tl.store(at, pack_fp8(a * factor, b * factor, c * factor, d * factor))
    if COUNTS:
        if largest > seen:
            tl.atomic_max(record + _LARGEST, largest)
