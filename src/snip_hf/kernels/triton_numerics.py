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
