"""The arithmetic of rounding that all Triton kernels share: random bits, and the step to the nearest grid point.

Each function repeats one of `numerics`, bit for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def random_bits(position, low, high):
    """32 random bits for each position (uint32) of the stream whose key has these halves: `random_streams`' hash."""
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

    power is a power of two, spacing that of the grid between 1 and 2. Products with both are exact, so that it does not
    matter whether they are fused with the sums.
    """
    # 1.5 * 2**23 spacings, added and taken away, round to whole ones.
    anchor = power * (spacing * 12582912.0)
    return ((x + dither * power) + anchor) - anchor


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
    """Bits of `grid_rounding.spacing_of`. least: bits of the smallest normal power; shift: mantissa bits << 23."""
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
    """`grid_rounding.round_to_grid` for grids whose spacings are normal FP32 numbers below 2**127.

    dither: random number - 1/2, in spacings, used if RANDOM. MANTISSA: whether the grid has mantissa bits.
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
