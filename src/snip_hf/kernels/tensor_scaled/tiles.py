# ruff: noqa: SIM102  # a constant and a number of the device cannot be combined
"""The Triton kernels that encode operands as E4M3, of one matrix or of several with parameters of their own.

Legend: T tokens, C channels; for weights, read O for T and I for C. Formats are numbers that kernels read at run time,
the same for all programs: the parameters of a layout (`encoding`). A program of the kernels for several matrices has 32
slots (`slots`) of one matrix. Weights have no `blocks`, since all their matrices have the same number of rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...numerics.formats import E4M3
from ..triton_numerics import (
    KEY,
    RUN,
    amax_of,
    as_bf16,
    bits_of_key,
    key_of_matrix,
    larger,
    load_runs,
    pack_fp8,
    power_of_two,
    random_of_runs,
    store_rows,
    to_grid,
)
from . import encoding, exponents, slots

_MAX_FP8, _SMALLEST_NORMAL = tl.constexpr(E4M3.max), tl.constexpr(2.0**-126)
_BLOCK, _BLOCK_RUNS = tl.constexpr(encoding.BLOCK), tl.constexpr(encoding.BLOCK // RUN.value)
_CARRY, _TOP_FIELD = tl.constexpr(0x3FFFFF), tl.constexpr(127 + 8)  # `encoding.exponents_of`
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: added and subtracted, it rounds to whole numbers
# Fields of parameters, records and blocks.
_PARAMETERS = tl.constexpr(encoding.PARAMETERS)
_SCALE, _INVERSE = tl.constexpr(encoding.SCALE), tl.constexpr(encoding.INVERSE)
_CEILING, _LEAST = tl.constexpr(encoding.CEILING), tl.constexpr(encoding.LEAST)
_SPACING, _MOST, _LOST = tl.constexpr(encoding.SPACING), tl.constexpr(encoding.MOST), tl.constexpr(encoding.LOST)
_EXPONENT, _LARGEST = tl.constexpr(exponents.EXPONENT), tl.constexpr(exponents.LARGEST)
_BLOCKS, _SATURATED = tl.constexpr(exponents.BLOCKS), tl.constexpr(exponents.SATURATED)
_SMALL, _AMAX, _ARRIVED = tl.constexpr(exponents.SMALL), tl.constexpr(exponents.AMAX), tl.constexpr(exponents.ARRIVED)
_UNSET, _LIMIT = tl.constexpr(exponents.UNSET), tl.constexpr(exponents.LIMIT)
_MATRIX, _FIRST, _ROWS = tl.constexpr(slots.MATRIX), tl.constexpr(slots.FIRST), tl.constexpr(slots.ROWS)
_OFFSET, _TOKENS, _FIELDS = tl.constexpr(slots.OFFSET), tl.constexpr(slots.TOKENS), tl.constexpr(slots.BLOCK_FIELDS)


@triton.jit
def _scale_of(spacing, exponent, bits):
    """The scale of a tensor and its inverse.

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
    """Writes the format's row in the table (known) with the tensor's scale and inverse (`_scale_of`)."""
    scale, inverse = _scale_of(tl.load(known + _SPACING), exponent, bits)
    place = tl.arange(0, _PARAMETERS)
    value = tl.load(known + place)
    value = tl.where(place == _SCALE, scale, tl.where(place == _INVERSE, inverse, value))
    tl.store(parameters + place, value)


@triton.jit
def _row_amax(x, RUNS: tl.constexpr, CHANNELS: tl.constexpr):
    """The amax of each 1x32 block, (RUNS, CHANNELS / 32)."""
    return amax_of(tl.reshape(x, [RUNS, CHANNELS // _BLOCK, _BLOCK]), 2)


@triton.jit
def _least_powers(amax, parameters):
    """The powers of two below which a block's grid has one spacing, from its amax. Infinity for a block that holds an
    infinity or NaN: the whole block becomes NaN."""
    power = power_of_two(amax * tl.load(parameters + _CEILING))
    return tl.maximum(power, tl.load(parameters + _LEAST))


@triton.jit
def _power_of(exponent):
    """2**exponent, FP32."""
    return ((exponent.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _scale_in_force(known, record, bits, scale, inverse, FINDS: tl.constexpr, HAS_AMAX: tl.constexpr):
    """The tensor's scale and its inverse, powers of two, unless the format has one FP32 scale: then those given; the
    grid's spacing; and the inverse of the layout's own scale.

    known: the format's row in the table if FINDS or HAS_AMAX, else the layout's parameters. bits: of the amax.
    """
    spacing = tl.load(known + _SPACING)
    if FINDS:
        exponent = tl.load(record + _EXPONENT)
        scale, inverse = _power_of(exponent), _power_of(-exponent)
        own_inverse = inverse
    else:
        if HAS_AMAX:
            own_scale, own_inverse = _scale_of(spacing, tl.load(record + _EXPONENT), bits)
        else:
            own_scale, own_inverse = tl.load(known + _SCALE), tl.load(known + _INVERSE)
        scale = tl.where(spacing != 0.0, own_scale, scale)
        inverse = tl.where(spacing != 0.0, own_inverse, inverse)
    return scale, inverse, spacing, own_inverse


@triton.jit
def _find_parameters(
    state,
    record,
    table,
    row_parameters,
    column_parameters,
    amax,
    is_first,
    HAS_AMAX: tl.constexpr,
    ROW_GEMM: tl.constexpr,
    COLUMN_GEMM: tl.constexpr,
):
    """The table's rows for the formats of rows and columns; one program writes the parameters of both."""
    row_known, column_known = table, table
    exponent = tl.load(record + _EXPONENT)
    bits = tl.load(amax).to(tl.int64) if HAS_AMAX else exponent * 0
    if ROW_GEMM >= 0:
        row_known = table + tl.load(state + ROW_GEMM) * _PARAMETERS
        if is_first:
            _write_parameters(row_parameters, row_known, exponent, bits)
    if COLUMN_GEMM >= 0:
        column_known = table + tl.load(state + COLUMN_GEMM) * _PARAMETERS
        if is_first:
            _write_parameters(column_parameters, column_known, exponent, bits)
    return row_known, column_known, bits


@triton.jit
def _factor(inverse, scale):
    """The factor that replaces the scale by which a tensor was divided. It would be infinite for one of zeros only."""
    factor = inverse * scale
    return tl.where(factor == float("inf"), 1.0, factor)


@triton.jit
def _over_rows(of_blocks, RUNS: tl.constexpr, CHANNELS: tl.constexpr):
    """Spreads one number per 1x32 block to the block's elements."""
    spread = tl.broadcast_to(of_blocks[:, :, None], [RUNS, CHANNELS // _BLOCK, _BLOCK])
    return tl.reshape(spread, [RUNS, CHANNELS])


@triton.jit
def _column_amax(a, b, c, d, RUNS: tl.constexpr, CHANNELS: tl.constexpr):
    """The amax of each 32x1 block, (RUNS / 8, CHANNELS)."""
    largest = larger(larger(tl.abs(a), tl.abs(b)), larger(tl.abs(c), tl.abs(d)))
    return amax_of(tl.reshape(largest, [RUNS // _BLOCK_RUNS, _BLOCK_RUNS, CHANNELS]), 1)


@triton.jit
def _over_columns(of_blocks, RUNS: tl.constexpr, CHANNELS: tl.constexpr):
    """Spreads one number per 32x1 block to the block's elements."""
    spread = tl.broadcast_to(of_blocks[:, None, :], [RUNS // _BLOCK_RUNS, _BLOCK_RUNS, CHANNELS])
    return tl.reshape(spread, [RUNS, CHANNELS])


@triton.jit
def _rounded(x, least_power, spacing):
    """Rounds to a grid's nearest number; its spacing between 1 and 2, and below least_power, is `spacing`."""
    power = tl.maximum(power_of_two(x), least_power)
    return (x + power * (spacing * _ROUND)) - power * (spacing * _ROUND)


@triton.jit
def _rounded_randomly(x, fraction, least_power, spacing):
    """Rounds to one of the two neighbours at random; fraction: of `random_of_runs`."""
    dither = fraction * (128.0 * spacing) - (128.5 - 2.0**-9) * spacing  # (random - 1/2) spacings
    return to_grid(x, dither, tl.maximum(power_of_two(x), least_power), spacing)


@triton.jit
def _all_rounded(a, b, c, d, la, lb, lc, ld, bits, spacing, IS_GRADIENT: tl.constexpr):
    """Rounds the four tokens of each run, with their least powers."""
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
    """The bits of the largest magnitude in a program, from its blocks' amax divided by the scale, (*, *)."""
    finite = tl.where(amax < float("inf"), amax, 0.0)
    return (tl.max(tl.max(finite, 1), 0) * scale).to(tl.int32, bitcast=True).to(tl.int64)


@triton.jit
def _largest_of(a, b, c, d, scale):
    """The bits of the largest finite magnitude in a program, from its values divided by the scale."""
    return _largest(larger(larger(tl.abs(a), tl.abs(b)), larger(tl.abs(c), tl.abs(d))), scale)


@triton.jit
def _kept(x):
    """Finite numbers as they are, NaN for an infinity, which the cast to E4M3 would cut off."""
    return tl.fma(x, 0.0, x)


@triton.jit
def _encode_rows(
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
    """Stores the rows of a block format; returns the bits of their largest magnitude."""
    la, lb = _row_amax(a, RUNS, CHANNELS), _row_amax(b, RUNS, CHANNELS)
    lc, ld = _row_amax(c, RUNS, CHANNELS), _row_amax(d, RUNS, CHANNELS)
    largest = _largest(tl.maximum(tl.maximum(la, lb), tl.maximum(lc, ld)), scale)
    la = _over_rows(_least_powers(la, known), RUNS, CHANNELS)
    lb = _over_rows(_least_powers(lb, known), RUNS, CHANNELS)
    lc = _over_rows(_least_powers(lc, known), RUNS, CHANNELS)
    ld = _over_rows(_least_powers(ld, known), RUNS, CHANNELS)
    a, b, c, d = _all_rounded(a, b, c, d, la, lb, lc, ld, bits, spacing, IS_GRADIENT)
    store_rows(at, a, b, c, d, padded_channels)
    return largest


@triton.jit
def _encode_columns(
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
    """Stores the columns of a block format; returns the bits of their largest magnitude."""
    amax = _column_amax(a, b, c, d, RUNS, CHANNELS)
    largest = _largest(amax, scale)
    least = _over_columns(_least_powers(amax, known), RUNS, CHANNELS)
    a, b, c, d = _all_rounded(a, b, c, d, least, least, least, least, bits, spacing, IS_GRADIENT)
    tl.store(at, pack_fp8(a, b, c, d))
    return largest


@triton.jit
def encode_tile(
    a,
    b,
    c,
    d,
    state,
    record,
    table,  # read if FINDS or GROUPED
    amax,  # of the matrix, FP32 bits, read if GROUPED and not FINDS
    matrix,  # read if GROUPED
    row_parameters,
    column_parameters,
    rows,
    columns,
    run,
    stored_run,  # the same in the layouts
    channel,
    is_first,  # of the programs with these parameters
    tokens,
    channels,
    padded_tokens,
    padded_channels,
    HAS_ROWS: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    ROW_GEMM: tl.constexpr,
    COLUMN_GEMM: tl.constexpr,
    FINDS: tl.constexpr,
    IN_BLOCKS: tl.constexpr,  # all formats are block formats; False if unknown
    GROUPED: tl.constexpr,
    IS_GRADIENT: tl.constexpr,
    COUNTS: tl.constexpr,
    RUNS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Encodes both layouts of the runs of tokens a, b, c, d, of one matrix, or of one of several if GROUPED.

    FINDS: an exponent is in force, and no format has an FP32 scale. Otherwise the amax may be needed: the parameters of
    one matrix are those of `scales_kernel`, several have their amaxes.
    """
    HAS_AMAX: tl.constexpr = GROUPED and not FINDS
    row_known, column_known = row_parameters, column_parameters
    amax_bits = 0
    if FINDS or HAS_AMAX:
        row_known, column_known, amax_bits = _find_parameters(
            state, record, table, row_parameters, column_parameters, amax, is_first, HAS_AMAX, ROW_GEMM, COLUMN_GEMM
        )
    seen = tl.load(record + _LARGEST)  # by the programs so far; no need to wait for all
    largest = seen
    # Both layouts round with the same random numbers.
    bits = run
    if IS_GRADIENT:
        key = tl.load(state + KEY)
        if GROUPED:
            key = key_of_matrix(key, matrix)
        bits = bits_of_key(key, state, run, channel, tokens, channels)
    row_spacing, column_spacing, scale, inverse = 0.0, 0.0, 1.0, 1.0
    if HAS_COLUMNS:
        scale, inverse, column_spacing, column_inverse = _scale_in_force(
            column_known, record, amax_bits, scale, inverse, FINDS, HAS_AMAX
        )
    if HAS_ROWS:
        scale, inverse, row_spacing, row_inverse = _scale_in_force(
            row_known, record, amax_bits, scale, inverse, FINDS, HAS_AMAX
        )
    a, b, c, d = a * inverse, b * inverse, c * inverse, d * inverse  # exact
    if HAS_ROWS:
        # Each branch stores its own result: joining them would take more registers.
        at = rows + (stored_run * RUN)[:, None] * padded_channels + channel[None, :]
        if IN_BLOCKS or row_spacing > 0.0:
            found = _encode_rows(
                at, a, b, c, d, row_known, row_spacing, bits, scale, padded_channels, IS_GRADIENT, RUNS, CHANNELS
            )
            if COUNTS:
                largest = found
        else:
            # 1 if FINDS; without this product ptxas takes up to 50% more registers.
            factor = _factor(row_inverse, scale)
            store_rows(at, _kept(a * factor), _kept(b * factor), _kept(c * factor), _kept(d * factor), padded_channels)
            if COUNTS and row_spacing < 0.0:
                largest = _largest_of(a, b, c, d, scale)
    if HAS_COLUMNS:
        at = columns.to(tl.pointer_type(tl.uint32), bitcast=True)
        at += channel.to(tl.int64)[None, :] * (padded_tokens // RUN) + stored_run[:, None]
        if IN_BLOCKS or column_spacing > 0.0:
            found = _encode_columns(
                at, a, b, c, d, column_known, column_spacing, bits, scale, IS_GRADIENT, RUNS, CHANNELS
            )
            if COUNTS and not HAS_ROWS:
                largest = found
        else:
            factor = _factor(column_inverse, scale)
            tl.store(at, pack_fp8(_kept(a * factor), _kept(b * factor), _kept(c * factor), _kept(d * factor)))
            if COUNTS and not HAS_ROWS and column_spacing < 0.0:
                largest = _largest_of(a, b, c, d, scale)
    if COUNTS:
        if largest > seen:
            tl.atomic_max(record + _LARGEST, largest)


# With tokens = 1 as a constant, the columns of that single token were wrong on an H200 (docs/log/2026-11.md).
@triton.jit(do_not_specialize=["tokens"])
def encode_kernel(
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
    FINDS: tl.constexpr,  # finds and writes the parameters; else `scales_kernel` has written them
    IN_BLOCKS: tl.constexpr,  # all formats are block formats; False if unknown
    IS_GRADIENT: tl.constexpr,
    COUNTS: tl.constexpr,
    RAGGED: tl.constexpr,
    RUNS: tl.constexpr,  # of 4 tokens, a multiple of 8
    CHANNELS: tl.constexpr,  # a multiple of 32
):
    """Both layouts of 4 * RUNS tokens by CHANNELS channels, from one read of x."""
    # If x is read for the first time, from the end: it was written last and may be in the cache.
    place = tl.num_programs(1) - 1 - tl.program_id(1) if FINDS else tl.program_id(1)
    run = (place * RUNS + tl.arange(0, RUNS)).to(tl.int64)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    a, b, c, d = load_runs(x, run, channel, tokens, channels, stride, RAGGED)
    encode_tile(
        a, b, c, d, state, record, table, record, 0, row_parameters, column_parameters, rows, columns, run, run,
        channel, tl.program_id(0) + tl.program_id(1) == 0, tokens, channels, padded_tokens, padded_channels, HAS_ROWS,
        HAS_COLUMNS, ROW_GEMM, COLUMN_GEMM, FINDS, IN_BLOCKS, False, IS_GRADIENT, COUNTS, RUNS, CHANNELS,
    )  # fmt: skip


@triton.jit
def _magnitudes(x, part, tokens, channels, stride, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """The magnitudes of a part of x, (HEIGHT, WIDTH), zeros after its ends."""
    across = tl.cdiv(channels, WIDTH)
    row = (part // across * HEIGHT + tl.arange(0, HEIGHT)).to(tl.int64)[:, None]
    column = (part % across * WIDTH + tl.arange(0, WIDTH))[None, :]
    return tl.abs(as_bf16(tl.load(x + row * stride + column, (row < tokens) & (column < channels), other=0.0)))


@triton.jit
def _count(record, known, magnitude, exponent, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Counts the 1x32 blocks of a part that are not zero, those that saturate and those that lose bits."""
    amax = _row_amax(magnitude * _power_of(-exponent), HEIGHT, WIDTH)
    saturated = (amax > tl.load(known + _MOST)) & (amax < float("inf"))
    small = (amax > 0.0) & (amax <= tl.load(known + _LOST))
    tl.atomic_add(record + _BLOCKS, tl.sum(tl.sum((amax > 0.0).to(tl.int32), 1), 0).to(tl.int64))
    tl.atomic_add(record + _SATURATED, tl.sum(tl.sum(saturated.to(tl.int32), 1), 0).to(tl.int64))
    tl.atomic_add(record + _SMALL, tl.sum(tl.sum(small.to(tl.int32), 1), 0).to(tl.int64))


@triton.jit
def _formats(state, table, exponent, ROW_GEMM: tl.constexpr, COLUMN_GEMM: tl.constexpr):
    """The table's rows for the formats of rows and columns; the row of one without an FP32 scale; True if there is one;
    True if the amax is needed, because no exponent is in force or a format has one FP32 scale."""
    needed, is_encoded = exponent == _UNSET, False
    row_known, column_known, known = table, table, table
    if COLUMN_GEMM >= 0:
        column_known = table + tl.load(state + COLUMN_GEMM) * _PARAMETERS
        is_encoded = tl.load(column_known + _SPACING) != 0.0
        needed, known = needed | (not is_encoded), column_known
    if ROW_GEMM >= 0:
        row_known = table + tl.load(state + ROW_GEMM) * _PARAMETERS
        row_is_encoded = tl.load(row_known + _SPACING) != 0.0
        needed, known = needed | (not row_is_encoded), tl.where(row_is_encoded, row_known, known)
        is_encoded = is_encoded | row_is_encoded
    return row_known, column_known, known, is_encoded, needed


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
    """The parameters of both layouts. All of x is read only if they need its amax. With a block format and an exponent
    in force, some programs count the blocks of one part that do not fit."""
    exponent = tl.load(record + _EXPONENT)
    row_known, column_known, known, is_encoded, needed = _formats(state, table, exponent, ROW_GEMM, COLUMN_GEMM)
    is_last = tl.program_id(0) == 0
    bits = exponent * 0
    if needed:
        largest = tl.zeros([HEIGHT, WIDTH], tl.float32)
        # From the end, which was written last and may be in the cache, to the beginning, where `encode_kernel` starts.
        for part in range(tl.program_id(0), parts, tl.num_programs(0)):
            largest = larger(largest, _magnitudes(x, parts - 1 - part, tokens, channels, stride, HEIGHT, WIDTH))
        found = amax_of(amax_of(largest, 1), 0).to(tl.int32, bitcast=True).to(tl.int64)
        tl.atomic_max(record + _AMAX, found)
        # The last program to finish sees the result of all, and resets both fields.
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
        if is_encoded and exponent != _UNSET and tl.program_id(0) < counting:
            part = tl.program_id(0) * (parts // counting)
            _count(
                record, known, _magnitudes(x, part, tokens, channels, stride, HEIGHT, WIDTH), exponent, HEIGHT, WIDTH
            )


@triton.jit
def _block_of(blocks, block, height, EVEN: tl.constexpr):
    """A block's matrix, first token, number of tokens, index of the first among the matrix's, and the matrix's tokens.

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
def _matrix_magnitudes(x, blocks, part, height, channels, stride, EVEN: tl.constexpr, WIDTH: tl.constexpr):
    """The matrix of a part of x and the part's magnitudes, (32, WIDTH), zeros after its ends."""
    across = tl.cdiv(channels, WIDTH)
    matrix, first, rows, _, _ = _block_of(blocks, part // across, height, EVEN)
    row, column = tl.arange(0, _BLOCK), part % across * WIDTH + tl.arange(0, WIDTH)
    at = x + (first + row)[:, None] * stride + column[None, :]
    return matrix, tl.abs(as_bf16(tl.load(at, (row < rows)[:, None] & (column < channels)[None, :], other=0.0)))


@triton.jit
def matrix_scales_kernel(
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
    """The amax of each matrix, FP32 bits. All of x is read only if they are needed. With a block format and an exponent
    in force, some programs count the blocks of one part that do not fit."""
    exponent = tl.load(record + _EXPONENT)
    # Triton compiles no two types under one name, not even `_`.
    _row, _column, known, is_encoded, needed = _formats(state, table, exponent, ROW_GEMM, COLUMN_GEMM)
    if needed:
        for part in range(tl.program_id(0), parts, tl.num_programs(0)):
            matrix, magnitude = _matrix_magnitudes(x, blocks, part, height, channels, stride, EVEN, WIDTH)
            found = amax_of(amax_of(magnitude, 1), 0).to(tl.int32, bitcast=True)
            tl.atomic_max(amaxes + matrix, found)
            if COUNTS:
                tl.atomic_max(record + _LARGEST, tl.where(found < 0x7F800000, found, 0).to(tl.int64))
    if COUNTS:
        counting = tl.minimum(tl.num_programs(0), COUNTING)
        if is_encoded and exponent != _UNSET and tl.program_id(0) < counting:
            part = tl.program_id(0) * (parts // counting)
            _matrix, magnitude = _matrix_magnitudes(x, blocks, part, height, channels, stride, EVEN, WIDTH)
            _count(record, known, magnitude, exponent, _BLOCK, WIDTH)


@triton.jit
def encode_matrices_kernel(
    x,
    blocks,  # not read if EVEN
    state,
    record,
    table,
    amaxes,  # read if not FINDS
    row_parameters,
    column_parameters,
    rows,
    columns,
    height,
    channels,
    slots,
    stride,
    HAS_ROWS: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    ROW_GEMM: tl.constexpr,
    COLUMN_GEMM: tl.constexpr,
    FINDS: tl.constexpr,  # an exponent is in force, and no format has an FP32 scale
    IN_BLOCKS: tl.constexpr,  # all formats are block formats; False if unknown
    IS_GRADIENT: tl.constexpr,
    COUNTS: tl.constexpr,
    EVEN: tl.constexpr,
    CHANNELS: tl.constexpr,  # a multiple of 32 that divides the channels
):
    """Both layouts of 32 slots by CHANNELS channels, from one read of x, and each matrix's parameters.

    Programs have one axis: CUDA limits the others to 65,535.
    """
    across = channels // CHANNELS
    block, part = tl.program_id(0) // across, tl.program_id(0) % across
    run, channel = tl.arange(0, _BLOCK_RUNS), part * CHANNELS + tl.arange(0, CHANNELS)
    matrix, first, count, offset, tokens = _block_of(blocks, block, height, EVEN)
    a, b, c, d = load_runs(x + first * stride, run, channel, count, channels, stride, True)
    encode_tile(
        a, b, c, d, state, record, table, amaxes + matrix, matrix, row_parameters + matrix * _PARAMETERS,
        column_parameters + matrix * _PARAMETERS, rows, columns, offset // RUN + run,
        block.to(tl.int64) * _BLOCK_RUNS + run, channel, (offset == 0) & (part == 0), tokens.to(tl.int32), channels,
        slots, channels, HAS_ROWS, HAS_COLUMNS, ROW_GEMM, COLUMN_GEMM, FINDS, IN_BLOCKS, True, IS_GRADIENT, COUNTS,
        _BLOCK_RUNS, CHANNELS,
    )  # fmt: skip
