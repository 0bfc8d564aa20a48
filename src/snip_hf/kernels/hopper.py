"""How the three GEMMs run on FP8 tensor cores: Triton kernels that quantize, and cuBLASLt's block-scaled product.

Every FP4 value is an FP8 (E4M3) value, so both grids are stored as E4M3 and multiplied by the same GEMM (ours,
docs/method.md, section 1): the format of each operand is a number that the kernels read from the layer's `state`, and
a new plan is new data for the same code.

Legend: T tokens, C channels, I in_features, O out_features; T', C', I', O' are these rounded up to whole tiles, filled
with zeros. An operand is stored with the contracted dimension last, with one FP32 scale per 128 elements along it
("rows", "columns") or per 128x128 block (weights). GEMMs are numbered as in `formats.GEMMS`; number -1 leaves a layout
out, and empty tensors come back for it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import E2M1, E4M3, FORMAT_CODES, GEMMS, TILE

_FP4 = tl.constexpr(FORMAT_CODES["fp4"])
_MAX_FP4, _MAX_FP8 = tl.constexpr(E2M1.max), tl.constexpr(E4M3.max)
_SMALLEST_NORMAL = tl.constexpr(2.0**-126)
_KEY = tl.constexpr(len(GEMMS))
_TILE = tl.constexpr(TILE)
# Tokens whose bytes make one 32-bit word of the transposed layout, and whose random numbers come from one hash.
_RUN = tl.constexpr(4)
# torch.nn.functional.ScalingType: one scale per 1x128 and per 128x128 elements.
_ROWS, _SQUARES = 4, 5
# Triton's interpreter has no inline assembly, and is slow at reductions by functions.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _amax(x, AXIS: tl.constexpr):
    """The largest magnitude along an axis; NaN if there is one, which `tl.max` would leave out on a GPU."""
    if _INTERPRETED:
        largest = tl.max(tl.abs(x), AXIS)
    else:
        largest = tl.reduce(tl.abs(x), AXIS, _larger)
    return largest


@triton.jit
def _scales(amax, is_fp4):
    """`quantize.tile_scales` from a tile's amax: the scale, and its reciprocal. Every lane of a tile computes it."""
    largest = amax * 0 + tl.where(is_fp4, _MAX_FP4, _MAX_FP8)
    if _INTERPRETED:
        scale = tl.div_rn(amax, largest)
    else:
        # The quotient by way of the rounded reciprocal and the remainder: correctly rounded (Markstein 1990).
        inverse_largest = amax * 0 + tl.where(is_fp4, 1.0 / _MAX_FP4, 1.0 / _MAX_FP8)
        quotient = amax * inverse_largest
        scale = tl.fma(tl.fma(-quotient, largest, amax), inverse_largest, quotient)
    scale = tl.maximum(scale, _SMALLEST_NORMAL)
    scale = tl.where(amax < float("inf"), scale, float("nan"))
    if _INTERPRETED:
        inverse = tl.div_rn(scale * 0 + 1.0, scale)
    else:
        inverse = tl.inline_asm_elementwise(
            "rcp.rn.f32 $0, $1;", "=f,f", [scale], dtype=tl.float32, is_pure=True, pack=1
        )
    return scale, inverse


@triton.jit
def _round_fp4(x, dither):
    """`quantize.round_to_format` to E2M1 of what is scaled already; 0 loses its sign.

    dither: (random - 1/2) times the spacing between 1 and 2, which is 1/2; or 0.
    """
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    power = tl.maximum(power, 1.0)  # below 1 the grid has the spacing of 1 to 2
    # 1.5 * 2**23 spacings, added and taken away, round to whole ones, ties to even. Products with `power` are exact,
    # so that it does not matter whether they are fused with the sums.
    moved = (x + dither * power) + power * 6291456.0
    return moved - power * 6291456.0


@triton.jit
def _pack(a, b, c, d):
    """Four numbers as four bytes of E4M3, the first one lowest; to nearest, ties to even, saturating."""
    if _INTERPRETED:
        word = a.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.uint32)
        word |= b.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.uint32) << 8
        word |= c.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.uint32) << 16
        word |= d.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.uint32) << 24
    else:
        word = tl.inline_asm_elementwise(
            "{ .reg .b16 low, high;"
            "  cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;"
            "  cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;"
            "  mov.b32 $0, {low, high}; }",
            "=r,f,f,f,f",
            [a, b, c, d],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    return word


@triton.jit
def _dithers(key, run, channel, channels):
    """(`quantize.uniform` - 1/2) / 2 of the four tokens of each run; positions wrap modulo 2**32."""
    bits = run[:, None].to(tl.uint32) * channels + channel[None, :].to(tl.uint32)
    bits = bits ^ key.to(tl.uint32)
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D + (key >> 32).to(tl.uint32)
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    bits = bits ^ (bits >> 16)
    # Each byte as the second one of a number in [1, 2): 1 + k * 2**-15
    if _INTERPRETED:
        a = (((bits & 0xFF) << 8) | 0x3F800000).to(tl.float32, bitcast=True)
        b = ((bits & 0xFF00) | 0x3F800000).to(tl.float32, bitcast=True)
        c = (((bits >> 8) & 0xFF00) | 0x3F800000).to(tl.float32, bitcast=True)
        d = (((bits >> 16) & 0xFF00) | 0x3F800000).to(tl.float32, bitcast=True)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            "prmt.b32 $0, $4, 0x3F800000, 0x7604;"
            "prmt.b32 $1, $4, 0x3F800000, 0x7614;"
            "prmt.b32 $2, $4, 0x3F800000, 0x7624;"
            "prmt.b32 $3, $4, 0x3F800000, 0x7634;",
            "=r,=r,=r,=r,r",
            [bits],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    offset = 64.25 - 2.0**-10
    return a * 64.0 - offset, b * 64.0 - offset, c * 64.0 - offset, d * 64.0 - offset


@triton.jit
def _load(x, run, channel, tokens, channels, stride, RAGGED: tl.constexpr):
    """The first, second, third and fourth tokens of the runs, FP32."""
    token = run * _RUN
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
    return a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), d.to(tl.float32)


@triton.jit
def _rounded(a, b, c, d, is_fp4, state, run, channel, channels, IS_GRADIENT: tl.constexpr):
    """What is scaled, on the grid of FP4; for FP8 as it was, since storing it rounds it."""
    if is_fp4:
        if IS_GRADIENT:
            da, db, dc, dd = _dithers(tl.load(state + _KEY), run, channel, channels)
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
def _tokens_kernel(
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
    ROW_PARTS: tl.constexpr,
    COLUMN_PARTS: tl.constexpr,
):
    """A part of one 128x128 tile for one of the two layouts. The programs of a tile follow each other: x is read twice,
    but from memory only once. One program for both would need too many registers."""
    part = tl.program_id(0) % (ROW_PARTS + COLUMN_PARTS)
    column_tile = tl.program_id(0) // (ROW_PARTS + COLUMN_PARTS)
    row_tile = tl.program_id(1)
    if part < ROW_PARTS:
        runs: tl.constexpr = _TILE // _RUN // max(ROW_PARTS, 1)
        is_fp4 = tl.load(state + ROW_GEMM) == _FP4
        run = (row_tile * (_TILE // _RUN) + part * runs + tl.arange(0, runs)).to(tl.int64)
        channel = column_tile * _TILE + tl.arange(0, _TILE)
        a, b, c, d = _load(x, run, channel, tokens, channels, stride, RAGGED)
        sa, ia = _scales(_amax(a, 1), is_fp4)
        sb, ib = _scales(_amax(b, 1), is_fp4)
        sc, ic = _scales(_amax(c, 1), is_fp4)
        sd, id = _scales(_amax(d, 1), is_fp4)
        a, b, c, d = a * ia[:, None], b * ib[:, None], c * ic[:, None], d * id[:, None]
        a, b, c, d = _rounded(a, b, c, d, is_fp4, state, run, channel, channels, IS_GRADIENT)
        at = rows + (run * _RUN)[:, None] * padded_channels + channel[None, :]
        tl.store(at, a.to(tl.float8e4nv))
        tl.store(at + padded_channels, b.to(tl.float8e4nv))
        tl.store(at + 2 * padded_channels, c.to(tl.float8e4nv))
        tl.store(at + 3 * padded_channels, d.to(tl.float8e4nv))
        at_scale = row_scales + column_tile.to(tl.int64) * padded_tokens + run * _RUN
        tl.store(at_scale, sa)
        tl.store(at_scale + 1, sb)
        tl.store(at_scale + 2, sc)
        tl.store(at_scale + 3, sd)
    else:
        width: tl.constexpr = _TILE // max(COLUMN_PARTS, 1)
        is_fp4 = tl.load(state + COLUMN_GEMM) == _FP4
        run = (row_tile * (_TILE // _RUN) + tl.arange(0, _TILE // _RUN)).to(tl.int64)
        channel = column_tile * _TILE + (part - ROW_PARTS) * width + tl.arange(0, width)
        a, b, c, d = _load(x, run, channel, tokens, channels, stride, RAGGED)
        largest = _larger(_larger(tl.abs(a), tl.abs(b)), _larger(tl.abs(c), tl.abs(d)))
        scale, inverse = _scales(_amax(largest, 0), is_fp4)
        i = inverse[None, :]
        a, b, c, d = _rounded(a * i, b * i, c * i, d * i, is_fp4, state, run, channel, channels, IS_GRADIENT)
        at = columns.to(tl.pointer_type(tl.uint32), bitcast=True)
        at += channel.to(tl.int64)[None, :] * (padded_tokens // _RUN) + run[:, None]
        tl.store(at, _pack(a, b, c, d))
        tl.store(column_scales + row_tile.to(tl.int64) * padded_channels + channel, scale)


@triton.jit
def _weight_kernel(
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
    """One 128x128 block, rounded to BF16 first, as autocast would."""
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
    amax = _amax(_amax(value, 1), 0)
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
        at_input = by_input + column.to(tl.int64)[:, None] * padded_out + row[None, :]
        tl.store(at_input, tl.trans(rounded.to(tl.float8e4nv)))
        tl.store(input_scales + column_tile * out_blocks + row_tile, scale)


def _launched(kernel: Any) -> Any:
    """Returns the kernel as torch.compile can see into it."""
    return kernel if _INTERPRETED.value else torch.library.wrap_triton(kernel)


def _padded(size: int) -> int:
    return (size + TILE - 1) // TILE * TILE


def _blocks(size: int) -> int:
    """Scales per row of blocks: cuBLASLt wants a multiple of four."""
    return (size + 4 * TILE - 1) // (4 * TILE) * 4


def _tokens_outputs(x: Tensor, row_gemm: int, column_gemm: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, channels = _padded(x.shape[0]), _padded(x.shape[1])
    fp8, fp32 = torch.float8_e4m3fn, torch.float32
    has_rows, has_columns = int(row_gemm >= 0), int(column_gemm >= 0)
    return (
        x.new_empty(tokens * has_rows, channels, dtype=fp8),
        x.new_empty(channels // TILE * has_rows, tokens, dtype=fp32),
        x.new_empty(channels * has_columns, tokens, dtype=fp8),
        x.new_empty(tokens // TILE * has_columns, channels, dtype=fp32),
    )


@torch.library.triton_op("snip_hf::quantize_tokens", mutates_args=())
def quantize_tokens(
    x: Tensor, state: Tensor, row_gemm: int, column_gemm: int, is_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantizes activations or output gradients for two GEMMs in one pass over them.

    Args:
        x: (T, C), BF16.
        state: the layer's, on x's device.
        row_gemm: the GEMM that contracts C; its tiles are 1x128.
        column_gemm: the GEMM that contracts T; its tiles are 128x1.
        is_gradient: rounds to FP4 stochastically.

    Returns: rows (T', C') E4M3, their scales (C' / 128, T'), columns (C', T') E4M3, their scales (T' / 128, C').
    """
    outputs = _tokens_outputs(x, row_gemm, column_gemm)
    tokens, channels = x.shape
    if x.numel() == 0 or row_gemm < 0 and column_gemm < 0:
        return outputs
    if x.stride(1) != 1:
        x = x.contiguous()
    padded_tokens, padded_channels = _padded(tokens), _padded(channels)
    # Measured on an H200: more elements per thread where there is more to do for each.
    row_parts, column_parts, warps = (2, 2, 4) if is_gradient else (4, 2, 2)
    row_parts, column_parts = row_parts * (row_gemm >= 0), column_parts * (column_gemm >= 0)
    _launched(_tokens_kernel)[((row_parts + column_parts) * (padded_channels // TILE), padded_tokens // TILE)](
        x,
        state,
        *outputs,
        tokens,
        channels,
        padded_tokens,
        padded_channels,
        x.stride(0),
        ROW_GEMM=row_gemm,
        COLUMN_GEMM=column_gemm,
        IS_GRADIENT=is_gradient,
        RAGGED=padded_tokens != tokens or padded_channels != channels,
        ROW_PARTS=row_parts,
        COLUMN_PARTS=column_parts,
        num_warps=warps,
    )
    return outputs


Weights = tuple[Tensor, Tensor, Tensor, Tensor]


def _weight_outputs(weight: Tensor, forward: bool, grad_input: bool) -> Weights:
    rows, columns = weight.shape
    fp8, fp32 = torch.float8_e4m3fn, torch.float32
    return (
        weight.new_empty(_padded(rows) * forward, _padded(columns), dtype=fp8),
        weight.new_empty(_padded(rows) // TILE * forward, _blocks(columns), dtype=fp32),
        weight.new_empty(_padded(columns) * grad_input, _padded(rows), dtype=fp8),
        weight.new_empty(_padded(columns) // TILE * grad_input, _blocks(rows), dtype=fp32),
    )


@torch.library.triton_op("snip_hf::quantize_weight", mutates_args=())
def quantize_weight(
    weight: Tensor, state: Tensor, forward: bool, grad_input: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantizes a weight, rounded to BF16 first, in 128x128 blocks for the two GEMMs that read it.

    Args:
        weight: (O, I), FP32 or BF16.
        state: the layer's, on the weight's device.
        forward: whether the forward GEMM needs it.
        grad_input: whether the grad_input GEMM needs it.

    Returns: for the forward GEMM (O', I') E4M3 and scales (O' / 128, I' / 128 rounded up to 4); for grad_input the
    transposed (I', O') and scales (I' / 128, O' / 128 rounded up to 4).
    """
    outputs = _weight_outputs(weight, forward, grad_input)
    if weight.numel() > 0 and (forward or grad_input):
        quantize_weight_into(weight, state, outputs)
    return outputs


def quantize_weight_into(weight: Tensor, state: Tensor, outputs: Weights) -> None:
    """As `quantize_weight`, into the tensors that it gave; an empty one is left out."""
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    (rows, columns), padded_rows, padded_columns = weight.shape, _padded(weight.shape[0]), _padded(weight.shape[1])
    _launched(_weight_kernel)[(padded_columns // TILE, padded_rows // TILE)](
        weight,
        state,
        *outputs,
        rows,
        columns,
        padded_rows,
        padded_columns,
        _blocks(rows),
        _blocks(columns),
        weight.stride(0),
        FORWARD=outputs[0].shape[0] > 0,
        GRAD_INPUT=outputs[2].shape[0] > 0,
        RAGGED=padded_rows != rows or padded_columns != columns,
        num_warps=8,
    )


def multiply(
    left: Tensor,
    left_scales: Tensor,
    right: Tensor,
    right_scales: Tensor,
    square: bool,
    rows: int,
    columns: int,
) -> Tensor:
    """Returns left @ right^T, (rows, columns), BF16, summed in FP32 by cuBLASLt.

    Args:
        left: (M', K') E4M3.
        left_scales: (K' / 128, M').
        right: (N', K') E4M3.
        right_scales: (N' / 128, K' / 128 rounded up to 4) of 128x128 blocks if `square`, else (K' / 128, N').
        square: see right_scales.
        rows: M without the padding.
        columns: N without the padding.
    """
    product: Tensor = torch.ops.snip_hf.multiply(left, left_scales, right, right_scales, square, rows, columns)
    return product


# Through `Library` and not `custom_op`, which costs 35 microseconds more per call on the host.
_library = torch.library.Library("snip_hf", "FRAGMENT")
_library.define(
    "multiply(Tensor left, Tensor left_scales, Tensor right, Tensor right_scales, bool square, SymInt rows, "
    "SymInt columns) -> Tensor"
)


@torch.library.impl(_library, "multiply", "CUDA")
def _multiply(
    left: Tensor,
    left_scales: Tensor,
    right: Tensor,
    right_scales: Tensor,
    square: bool,
    rows: int,
    columns: int,
) -> Tensor:
    if left.shape[1] == 0 or rows == 0:
        return left.new_zeros(rows, columns, dtype=torch.bfloat16)
    product: Tensor = torch.ops.aten._scaled_mm_v2.default(
        left,
        right.t(),
        [left_scales.t()],
        [_ROWS],
        [],
        [right_scales.t()],
        [_SQUARES if square else _ROWS],
        [],
        None,
        torch.bfloat16,
        [],
        False,
    )
    return product if product.shape == (rows, columns) else product[:rows, :columns].contiguous()


@torch.library.register_fake("snip_hf::multiply", lib=_library)
def _(
    left: Tensor,
    left_scales: Tensor,
    right: Tensor,
    right_scales: Tensor,
    square: bool,
    rows: int,
    columns: int,
) -> Tensor:
    return left.new_empty(rows, columns, dtype=torch.bfloat16)
