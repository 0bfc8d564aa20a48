"""The Triton kernels that quantize tiles for FP8 tensor cores.

Legend: T tokens, C channels, I in_features, O out_features. Each function repeats one of `numerics`, bit for bit except
for the sign of zeros. Formats are numbers that kernels read from `state` at run time, the same for a whole program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...numerics.formats import E2M1, E4M3, FORMATS
from ...numerics.gemms import TILE
from ..triton_numerics import (
    INTERPRETED,
    RUN,
    amax_of,
    bits_of_runs,
    larger,
    load_runs,
    pack_fp8,
    power_of_two,
    random_of_runs,
    store_rows,
    to_grid,
)

_FP4 = tl.constexpr(FORMATS["fp4"].code)
_MAX_FP4, _MAX_FP8 = tl.constexpr(E2M1.max), tl.constexpr(E4M3.max)
_SMALLEST_NORMAL = tl.constexpr(2.0**-126)
_TILE = tl.constexpr(TILE)


@triton.jit
def _scales(amax, is_fp4):
    """`rounding.tile_scales` from a tile's amax: the scale and its reciprocal. All lanes of a tile compute it."""
    largest = tl.zeros_like(amax) + tl.where(is_fp4, _MAX_FP4, _MAX_FP8)
    if INTERPRETED:
        scale = tl.maximum(tl.div_rn(amax, largest), _SMALLEST_NORMAL)
        scale = tl.where(amax < float("inf"), scale, float("nan"))
        inverse = tl.div_rn(tl.zeros_like(scale) + 1.0, scale)
    else:
        # Correctly rounded quotient and reciprocal, from approximations and their remainders (Markstein 1990). The
        # second is `rcp.rn` without its tests for numbers that scales cannot be.
        inverse_largest = tl.zeros_like(amax) + tl.where(is_fp4, 1.0 / _MAX_FP4, 1.0 / _MAX_FP8)
        quotient = amax * inverse_largest
        scale = tl.fma(tl.fma(-quotient, largest, amax), inverse_largest, quotient)
        scale = tl.maximum(scale, _SMALLEST_NORMAL)
        scale = tl.where(amax < float("inf"), scale, float("nan"))
        near = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [scale], dtype=tl.float32, is_pure=True, pack=1
        )
        inverse = tl.fma(tl.fma(-scale, near, 1.0), near, near)
    return scale, inverse


@triton.jit
def _round_fp4(x, dither):
    """`grids.round_to_grid` of scaled numbers to E2M1; 0 loses its sign.

    dither: (random - 1/2) times the spacing between 1 and 2, which is 1/2; or 0.
    """
    # Below 1 the grid has the spacing of 1 to 2.
    return to_grid(x, dither, tl.maximum(power_of_two(x), 1.0), 0.5)


@triton.jit
def _dithers(state, run, channel, tokens, channels):
    """(`random_streams.uniform` - 1/2) / 2 of the four tokens of each run; positions wrap modulo 2**32."""
    a, b, c, d = random_of_runs(bits_of_runs(state, run, channel, tokens, channels))
    offset = 64.25 - 2.0**-10
    return a * 64.0 - offset, b * 64.0 - offset, c * 64.0 - offset, d * 64.0 - offset


@triton.jit
def _rounded(a, b, c, d, is_fp4, state, run, channel, tokens, channels, IS_GRADIENT: tl.constexpr):
    """Rounds scaled numbers to the grid of FP4; leaves them for FP8, since storing them rounds."""
    if is_fp4:
        if IS_GRADIENT:
            da, db, dc, dd = _dithers(state, run, channel, tokens, channels)
            a = _round_fp4(a, da)
            b = _round_fp4(b, db)
            c = _round_fp4(c, dc)
            d = _round_fp4(d, dd)
        else:
            a = _round_fp4(a, 0.0)
            b = _round_fp4(b, 0.0)
            c = _round_fp4(c, 0.0)
            d = _round_fp4(d, 0.0)
    return a, b, c, d


@triton.jit
def _write_rows(
    x,
    state,
    rows,
    row_scales,
    run,
    column_tile,
    tokens,
    channels,
    padded_tokens,
    padded_channels,
    stride,
    GEMM: tl.constexpr,
    IS_GRADIENT: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Writes some runs of tokens by 128 channels, in tiles of 1x128."""
    is_fp4 = tl.load(state + GEMM) == _FP4
    channel = column_tile * _TILE + tl.arange(0, _TILE)
    a, b, c, d = load_runs(x, run, channel, tokens, channels, stride, RAGGED)
    sa, ia = _scales(amax_of(a, 1), is_fp4)
    sb, ib = _scales(amax_of(b, 1), is_fp4)
    sc, ic = _scales(amax_of(c, 1), is_fp4)
    sd, id = _scales(amax_of(d, 1), is_fp4)
    a, b, c, d = a * ia[:, None], b * ib[:, None], c * ic[:, None], d * id[:, None]
    a, b, c, d = _rounded(a, b, c, d, is_fp4, state, run, channel, tokens, channels, IS_GRADIENT)
    at = rows + (run * RUN)[:, None] * padded_channels + channel[None, :]
    store_rows(at, a, b, c, d, padded_channels)
    at_scale = row_scales + column_tile.to(tl.int64) * padded_tokens + run * RUN
    tl.store(at_scale, sa)
    tl.store(at_scale + 1, sb)
    tl.store(at_scale + 2, sc)
    tl.store(at_scale + 3, sd)


@triton.jit
def _write_columns(
    x,
    state,
    columns,
    column_scales,
    row_tile,
    channel,
    tokens,
    channels,
    padded_tokens,
    padded_channels,
    stride,
    GEMM: tl.constexpr,
    IS_GRADIENT: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Writes 128 tokens by some channels, in tiles of 128x1, transposed."""
    is_fp4 = tl.load(state + GEMM) == _FP4
    run = (row_tile * (_TILE // RUN) + tl.arange(0, _TILE // RUN)).to(tl.int64)
    a, b, c, d = load_runs(x, run, channel, tokens, channels, stride, RAGGED)
    largest = larger(larger(tl.abs(a), tl.abs(b)), larger(tl.abs(c), tl.abs(d)))
    scale, inverse = _scales(amax_of(largest, 0), is_fp4)
    i = inverse[None, :]
    a, b, c, d = _rounded(a * i, b * i, c * i, d * i, is_fp4, state, run, channel, tokens, channels, IS_GRADIENT)
    at = columns.to(tl.pointer_type(tl.uint32), bitcast=True)
    at += channel.to(tl.int64)[None, :] * (padded_tokens // RUN) + run[:, None]
    tl.store(at, pack_fp8(a, b, c, d))
    tl.store(column_scales + row_tile.to(tl.int64) * padded_channels + channel, scale)


@triton.jit
def tokens_kernel(
    x,
    state,
    rows,
    row_scales,
    columns,
    column_scales,
    tokens,
    channels,
    padded_tokens,
    padded_channels,
    stride,
    ROW_GEMM: tl.constexpr,
    COLUMN_GEMM: tl.constexpr,
    IS_GRADIENT: tl.constexpr,
    RAGGED: tl.constexpr,
    ROW_RUNS: tl.constexpr,  # runs of tokens per program that writes rows; 0: there is none
    WIDTH: tl.constexpr,  # channels per program that writes columns; 0: there is none
):
    """Writes a part of one 128x128 tile, in one of the two layouts. The programs of a tile are neighbours, so that x
    comes from memory once although two read it. One program for both layouts would need too many registers."""
    row_parts: tl.constexpr = _TILE // RUN // ROW_RUNS if ROW_RUNS > 0 else 0
    column_parts: tl.constexpr = _TILE // WIDTH if WIDTH > 0 else 0
    part = tl.program_id(0) % (row_parts + column_parts)
    column_tile = tl.program_id(0) // (row_parts + column_parts)
    row_tile = tl.program_id(1)
    if part < row_parts:
        if ROW_RUNS > 0:
            run = (row_tile * (_TILE // RUN) + part * ROW_RUNS + tl.arange(0, ROW_RUNS)).to(tl.int64)
            _write_rows(
                x, state, rows, row_scales, run, column_tile, tokens, channels, padded_tokens, padded_channels, stride,
                ROW_GEMM, IS_GRADIENT, RAGGED,
            )  # fmt: skip
    else:
        if WIDTH > 0:
            channel = column_tile * _TILE + (part - row_parts) * WIDTH + tl.arange(0, WIDTH)
            _write_columns(
                x, state, columns, column_scales, row_tile, channel, tokens, channels, padded_tokens, padded_channels,
                stride, COLUMN_GEMM, IS_GRADIENT, RAGGED,
            )  # fmt: skip


@triton.jit
def weight_kernel(
    weight,
    state,
    by_output,
    output_scales,
    by_input,
    input_scales,
    out_features,
    in_features,
    padded_out,
    padded_in,
    out_blocks,
    in_blocks,
    stride,
    FORWARD: tl.constexpr,
    GRAD_INPUT: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Writes one 128x128 block, rounded to BF16 first, as autocast does."""
    column_tile = tl.program_id(0)
    row_tile = tl.program_id(1)
    row = (row_tile * _TILE + tl.arange(0, _TILE)).to(tl.int64)
    column = column_tile * _TILE + tl.arange(0, _TILE)
    at = weight + row[:, None] * stride + column[None, :]
    if RAGGED:
        value = tl.load(at, (row[:, None] < out_features) & (column[None, :] < in_features), other=0.0)
    else:
        value = tl.load(at)
    value = value.to(tl.bfloat16).to(tl.float32)
    amax = amax_of(amax_of(value, 1), 0)
    if FORWARD:
        is_fp4 = tl.load(state) == _FP4
        scale, inverse = _scales(amax, is_fp4)
        rounded = value * inverse
        if is_fp4:
            rounded = _round_fp4(rounded, 0.0)
        tl.store(by_output + row[:, None] * padded_in + column[None, :], rounded.to(tl.float8e4nv))
        tl.store(output_scales + row_tile * in_blocks + column_tile, scale)
    if GRAD_INPUT:
        is_fp4 = tl.load(state + 1) == _FP4
        scale, inverse = _scales(amax, is_fp4)
        rounded = value * inverse
        if is_fp4:
            rounded = _round_fp4(rounded, 0.0)
        at_input = by_input.to(tl.pointer_type(tl.int8), bitcast=True)
        at_input += column.to(tl.int64)[:, None] * padded_out + row[None, :]
        # Store bytes: Triton stores a transposed FP8 tile wrongly beside a maximum that keeps NaN (triton#11111).
        tl.store(at_input, tl.trans(rounded.to(tl.float8e4nv).to(tl.int8, bitcast=True)))
        tl.store(input_scales + column_tile * out_blocks + row_tile, scale)
