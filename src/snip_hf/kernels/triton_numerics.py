"""The arithmetic of rounding that Triton kernels share: random numbers, the step to the nearest grid point, FP8 bytes.

Each function repeats one of `numerics`, bit for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..numerics.formats import E4M3
from ..numerics.gemms import GEMMS

# Places in a layer's state.
KEY, RANK, RANKS = tl.constexpr(len(GEMMS)), tl.constexpr(len(GEMMS) + 1), tl.constexpr(len(GEMMS) + 2)
# Tokens whose bytes form one 32-bit word of a transposed layout, and whose random numbers come from one hash.
RUN = tl.constexpr(4)
_MAX_FP8, _NAN_FP8 = tl.constexpr(E4M3.max), tl.constexpr(0x7F)
_LEAST_NORMAL_FP8, _SPACING_FP8 = tl.constexpr(2.0**E4M3.min_exponent), tl.constexpr(2.0**-E4M3.mantissa_bits)
# Triton's interpreter has no inline assembly, and is slow at reductions by functions.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def random_bits(position, low, high):
    """32 random bits for each position (uint32) of the stream with these key halves: the hash of `random_streams`."""
    word = position ^ low
    word = (word ^ (word >> 16)) * 0x7FEB352D + high
    word = (word ^ (word >> 15)) * 0x846CA68B
    return word ^ (word >> 16)


@triton.jit
def power_of_two(x):
    """The largest power of two that is not above the magnitude of x."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def to_grid(x, dither, power, spacing):
    """x + dither * power, rounded to a multiple of power * spacing, ties to even; 0 loses its sign.

    power is a power of two, spacing is the grid's between 1 and 2. Products with both are exact, so fusing them with
    sums changes nothing.
    """
    # 1.5 * 2**23 spacings, added and taken away, round to whole ones.
    anchor = power * (spacing * 12582912.0)
    return ((x + dither * power) + anchor) - anchor


@triton.jit
def larger(a, b):
    """The larger one; NaN if either is NaN, which `tl.max` drops on a GPU."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def amax_of(x, AXIS: tl.constexpr):
    """The largest magnitude along an axis; NaN if there is one."""
    if INTERPRETED:  # the bits of magnitudes order like these, with NaN on top
        found = tl.max(tl.abs(x).to(tl.int32, bitcast=True), AXIS).to(tl.float32, bitcast=True)
    else:
        found = tl.reduce(tl.abs(x), AXIS, larger)
    return found


@triton.jit
def bits_of_runs(state, run, channel, tokens, channels):
    """The hash of `random_streams.uniform` for each run of four tokens; positions wrap modulo 2**32."""
    return bits_of_key(tl.load(state + KEY), state, run, channel, tokens, channels)


@triton.jit
def bits_of_key(key, state, run, channel, tokens, channels):
    """`bits_of_runs` with a given key instead of the state's."""
    low, high, first_run = rank_stream(key, state, tokens)
    run = run.to(tl.uint32) + first_run
    bits = run[:, None] * channels + channel[None, :].to(tl.uint32)
    return random_bits(bits, low, high)


@triton.jit
def rank_stream(key, state, tokens):
    """`random_streams.rank_stream`: the halves of the key, and the first run of this rank."""
    runs = (tokens + RUN - 1) // RUN
    all_runs = tl.load(state + RANKS).to(tl.uint32) * runs
    low = key.to(tl.uint32) ^ (all_runs * 0x9E3779B9)
    high = (key >> 32).to(tl.uint32) + all_runs * 0x85EBCA6B
    return low, high, tl.load(state + RANK).to(tl.uint32) * runs


@triton.jit
def dither_of(row, position, low, high):
    """`random_streams.uniform` - 1/2 of elements in these rows, at these positions of their run's stream (uint32)."""
    word = random_bits(position, low, high)
    number = (word >> ((row & 3) * 8).to(tl.uint32)) & 0xFF
    return (number.to(tl.float32) - 127.5) * 0.00390625


@triton.jit
def key_of_matrix(key, matrix):
    """The key of one of a layer's matrices (`random_streams.matrix_keys`), from the layer's own (int64)."""
    zero = matrix.to(tl.uint32) * 0
    low, high = zero + 0x243F6A88, zero + 0x85A308D3
    low, high = _next_word(low, high, key.to(tl.uint32))
    low, high = _next_word(low, high, (key >> 32).to(tl.uint32))
    low, high = _next_word(low, high, zero)
    low, high = _next_word(low, high, zero)
    low, high = _next_word(low, high, matrix.to(tl.uint32))
    low, high = _next_word(low, high, zero)
    return (high.to(tl.int64) << 32) | low.to(tl.int64)


@triton.jit
def _next_word(low, high, word):
    low = random_bits(low ^ word, 0, 0)
    return low, random_bits(high + low, 0, 0)


@triton.jit
def random_of_runs(bits):
    """1 + k * 2**-15 for each of the four tokens of each run; `random_streams.uniform` is (k + 1/2) / 256.

    bits: of `bits_of_runs`. Each byte becomes the second one of a number in [1, 2).
    """
    if INTERPRETED:
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
    return a, b, c, d


@triton.jit
def to_fp8(x):
    """To E4M3: to nearest, ties to even, saturating; NaN stays NaN."""
    if INTERPRETED:  # the interpreter rounds differently, and neither saturates nor handles NaN
        power = tl.maximum(power_of_two(x), _LEAST_NORMAL_FP8)
        rounded = to_grid(x, 0.0, power, _SPACING_FP8)
        rounded = tl.where(tl.abs(rounded) > _MAX_FP8, tl.where(x > 0, _MAX_FP8, -_MAX_FP8), rounded)
        bits = rounded.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        found = tl.where(x == x, bits, _NAN_FP8).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        found = x.to(tl.float8e4nv)
    return found


@triton.jit
def pack_fp8(a, b, c, d):
    """Four numbers as four bytes of E4M3, the first one lowest; to nearest, ties to even, saturating."""
    if INTERPRETED:
        word = to_fp8(a).to(tl.uint8, bitcast=True).to(tl.uint32)
        word |= to_fp8(b).to(tl.uint8, bitcast=True).to(tl.uint32) << 8
        word |= to_fp8(c).to(tl.uint8, bitcast=True).to(tl.uint32) << 16
        word |= to_fp8(d).to(tl.uint8, bitcast=True).to(tl.uint32) << 24
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
def bits_of(x):
    """The bits of FP32 numbers, int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    """The FP32 numbers that have these bits (int32)."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def spacing_bits(magnitude, least, shift, SUBNORMALS: tl.constexpr):
    """Bits of `grids.spacing_of`. least: bits of the smallest normal power; shift: mantissa bits << 23."""
    power = bits_of(magnitude) & 0x7F800000
    if SUBNORMALS:
        power = tl.maximum(power, least)
    return tl.where(power < least, least, power - shift)


@triton.jit
def round_to_grid(
    x,
    dither,
    largest,
    least,
    shift,
    SUBNORMALS: tl.constexpr,
    MANTISSA: tl.constexpr,
    RANDOM: tl.constexpr,
):
    """`grids.round_to_grid` for grids whose spacings are normal FP32 numbers below 2**127.

    dither: random number - 1/2, in spacings, used if RANDOM. MANTISSA: True if the grid has mantissa bits.
    """
    magnitude = tl.abs(x)
    # The largest value is on the grid, so that saturating before rounding changes nothing. NaN stays.
    magnitude = tl.where(magnitude > largest, largest, magnitude)
    spacing = spacing_bits(magnitude, least, shift, SUBNORMALS)
    steps = magnitude * float_of(0x7F000000 - spacing)  # 2**-e for a spacing 2**e
    if RANDOM:
        steps += tl.where(bits_of(x) < 0, -dither, dither)
    if not MANTISSA:
        # Ties go to the even code, which is an even exponent's.
        is_even = ((spacing - least) & 0x800000) != 0
        steps = tl.where((steps == 1.5) & is_even, 1.0, steps)
    # 1.5 * 2**23, added and taken away, rounds to whole steps, ties to even.
    rounded = ((steps + 12582912.0) - 12582912.0) * float_of(spacing)
    return float_of((bits_of(rounded) & 0x7FFFFFFF) | (bits_of(x) & -0x80000000))


@triton.jit
def as_bf16(value):
    """Rounded to BF16, as autocast would, in FP32."""
    return value.to(tl.bfloat16).to(tl.float32)


@triton.jit
def load_runs(x, run, channel, tokens, channels, stride, RAGGED: tl.constexpr):
    """The first, second, third and fourth tokens of the runs, rounded to BF16, FP32."""
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
    return as_bf16(a), as_bf16(b), as_bf16(c), as_bf16(d)


@triton.jit
def store_rows(at, a, b, c, d, padded_channels):
    """Stores the four tokens of each run as E4M3."""
    tl.store(at, to_fp8(a))
    tl.store(at + padded_channels, to_fp8(b))
    tl.store(at + 2 * padded_channels, to_fp8(c))
    tl.store(at + 3 * padded_channels, to_fp8(d))
