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
_EXPONENT, _LARGEST = tl.constexpr(records.EXPONENT), tl.constexpr(records.LARGEST)
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
def load_runs(x, run, channel, tokens, channels, stride, RAGGED: tl.constexpr):
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
    state,
    record,
    table,
    row_parameters,
    column_parameters,
    is_first,
    ROW_GEMM: tl.constexpr,
    COLUMN_GEMM: tl.constexpr,
):
    """Where the table has the formats of the rows and the columns; one program writes the parameters of both."""
    row_known, column_known = table, table
    exponent = tl.load(record + _EXPONENT)
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


@triton.jit
def _fold_rows(
    at,
    a,
    b,
    c,
    d,
    known,
    spacing,
    bits,
    scale,
    padded_channels,
    IS_GRADIENT: tl.constexpr,
    RUNS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Stores the rows of a folded format; returns the bits of their largest magnitude."""
    la, lb = _row_amax(a, RUNS, CHANNELS), _row_amax(b, RUNS, CHANNELS)
    lc, ld = _row_amax(c, RUNS, CHANNELS), _row_amax(d, RUNS, CHANNELS)
    largest = _largest(tl.maximum(tl.maximum(la, lb), tl.maximum(lc, ld)), scale)
    la = _over_rows(_least_powers(la, known), RUNS, CHANNELS)
    lb = _over_rows(_least_powers(lb, known), RUNS, CHANNELS)
    lc = _over_rows(_least_powers(lc, known), RUNS, CHANNELS)
    ld = _over_rows(_least_powers(ld, known), RUNS, CHANNELS)
    a, b, c, d = _all_rounded(a, b, c, d, la, lb, lc, ld, bits, spacing, IS_GRADIENT)
    _store_rows(at, a, b, c, d, padded_channels)
    return largest


@triton.jit
def _fold_columns(
    at,
    a,
    b,
    c,
    d,
    known,
    spacing,
    bits,
    scale,
    IS_GRADIENT: tl.constexpr,
    RUNS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Stores the columns of a folded format; returns the bits of their largest magnitude."""
    amax = _column_amax(a, b, c, d, RUNS, CHANNELS)
    largest = _largest(amax, scale)
    least = _over_columns(_least_powers(amax, known), RUNS, CHANNELS)
    a, b, c, d = _all_rounded(a, b, c, d, least, least, least, least, bits, spacing, IS_GRADIENT)
    tl.store(at, pack_fp8(a, b, c, d))
    return largest


@triton.jit
def fold_tile(
    a,
    b,
    c,
    d,
    state,
    record,
    table,  # read if FINDS
    row_parameters,
    column_parameters,
    rows,
    columns,
    run,
    channel,
    is_first,  # of the operand's programs
    tokens,
    channels,
    padded_tokens,
    padded_channels,
    HAS_ROWS: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    ROW_GEMM: tl.constexpr,
    COLUMN_GEMM: tl.constexpr,
    FINDS: tl.constexpr,
    IS_GRADIENT: tl.constexpr,
    COUNTS: tl.constexpr,
    RUNS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Both layouts of the runs of tokens a, b, c, d: `fold_kernel`."""
    row_known, column_known = row_parameters, column_parameters
    if FINDS:  # where all formats are folded and an exponent is in force
        row_known, column_known = _find_parameters(
            state, record, table, row_parameters, column_parameters, is_first, ROW_GEMM, COLUMN_GEMM
        )
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
        if FINDS:
            found = _fold_rows(
                at, a, b, c, d, row_known, row_spacing, bits, scale, padded_channels, IS_GRADIENT, RUNS, CHANNELS
            )
            if COUNTS:
                largest = found
        else:
            if row_spacing > 0.0:
                found = _fold_rows(
                    at, a, b, c, d, row_known, row_spacing, bits, scale, padded_channels, IS_GRADIENT, RUNS, CHANNELS
                )
                if COUNTS:
                    largest = found
            else:
                factor = tl.load(row_parameters + _INVERSE) * scale
                _store_rows(at, a * factor, b * factor, c * factor, d * factor, padded_channels)
    if HAS_COLUMNS:
        at = columns.to(tl.pointer_type(tl.uint32), bitcast=True)
        at += channel.to(tl.int64)[None, :] * (padded_tokens // RUN) + run[:, None]
        if FINDS:
            found = _fold_columns(
                at, a, b, c, d, column_known, column_spacing, bits, scale, IS_GRADIENT, RUNS, CHANNELS
            )
            if COUNTS and not HAS_ROWS:
                largest = found
        else:
            if column_spacing > 0.0:
                found = _fold_columns(
                    at, a, b, c, d, column_known, column_spacing, bits, scale, IS_GRADIENT, RUNS, CHANNELS
                )
                if COUNTS and not HAS_ROWS:
                    largest = found
            else:
                factor = tl.load(column_parameters + _INVERSE) * scale
                tl.store(at, pack_fp8(a * factor, b * factor, c * factor, d * factor))
    if COUNTS:
        if largest > seen:
            tl.atomic_max(record + _LARGEST, largest)


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
    # From the end, where x is read for the first time: it was written last and may be in the cache.
    place = tl.num_programs(1) - 1 - tl.program_id(1) if FINDS else tl.program_id(1)
    run = (place * RUNS + tl.arange(0, RUNS)).to(tl.int64)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    a, b, c, d = load_runs(x, run, channel, tokens, channels, stride, RAGGED)
    fold_tile(
        a, b, c, d, state, record, table, row_parameters, column_parameters, rows, columns, run, channel,
        tl.program_id(0) + tl.program_id(1) == 0, tokens, channels, padded_tokens, padded_channels, HAS_ROWS,
        HAS_COLUMNS, ROW_GEMM, COLUMN_GEMM, FINDS, IS_GRADIENT, COUNTS, RUNS, CHANNELS,
    )  # fmt: skip
