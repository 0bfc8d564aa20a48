"""A tensor in a small format: loops over tiles in numpy; ml_dtypes rounds (an independent reading).

The stochastic rule and the random numbers are written out from their definitions (docs/method.md, section 1) without
any code of the package; the counter hash is in Python integers.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

GRIDS = {"e2m1": ml_dtypes.float4_e2m1fn, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
MASK32 = 0xFFFFFFFF


def grid_values(grid: str) -> NDArray[np.float64]:
    """All finite values of at least 0, rising, read from every code of the format."""
    codes = np.arange(2 ** ml_dtypes.finfo(GRIDS[grid]).bits, dtype=np.uint8).view(GRIDS[grid]).astype(np.float64)
    return np.unique(np.abs(codes[np.isfinite(codes)]))


def nearest(x: Floats, grid: str) -> Floats:
    """Nearest grid value, ties to even; larger numbers become the largest one; NaN stays NaN."""
    largest = np.float32(grid_values(grid)[-1])
    rounded = np.clip(np.nan_to_num(x, nan=0.0), -largest, largest).astype(GRIDS[grid]).astype(np.float32)
    return np.where(np.isnan(x), x, rounded)


def stochastic(x: Floats, grid: str, random: Floats) -> Floats:
    """`between` of the values of a grid."""
    return between(x, grid_values(grid), random)


def between(x: Floats, values: NDArray[np.float64], random: Floats) -> Floats:
    """x + (random - 1/2) * (b - a) to the nearest of the neighbours a <= x <= b, ties to even; x's sign; saturating.

    Counted in spacings from 0, where every grid value is a whole number and the even code is an even number. Of these
    steps only the sum is not exact: FP32 rounds it once, and sums that it rounds to half a spacing are ties.
    """
    magnitude = np.minimum(np.abs(x.astype(np.float64)), values[-1])
    below = np.searchsorted(values[:-1], magnitude, side="right") - 1
    gap = np.diff(values)[below]
    sums = np.float32(np.copysign(magnitude, x) / gap) + (random - np.float32(0.5))
    assert sums.dtype == np.float32
    whole = np.floor(np.abs(sums.astype(np.float64)))
    half = np.abs(sums) - whole
    whole += (half > 0.5) | ((half == 0.5) & (whole % 2 == 1))
    return np.copysign(whole * gap, x).astype(np.float32)


def quantized(
    x: Floats, grid: str, tile: tuple[int, int], random: Floats | None = None
) -> tuple[Floats, Floats, Floats]:
    """Values, scales and their products (R, C), (tiles along R, tiles along C), (R, C), one tile after another."""
    rows, columns = tile
    largest, smallest_normal = np.float32(grid_values(grid)[-1]), np.finfo(np.float32).tiny
    values, products = np.empty_like(x), np.empty_like(x)
    scales = np.empty((-(-x.shape[0] // rows), -(-x.shape[1] // columns)), np.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            here = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            block = x[here]
            if not np.isfinite(block).all():
                values[here], scales[i, j], products[here] = np.nan, np.nan, np.nan
                continue
            scale = np.maximum(np.abs(block).max() / largest, smallest_normal)
            scaled = block * (np.float32(1) / scale)
            values[here] = nearest(scaled, grid) if random is None else stochastic(scaled, grid, random[here])
            scales[i, j], products[here] = scale, values[here] * scale
    return values, scales, products


def mixed(x: int) -> int:
    """`lowbias32` of Chris Wellons' hash prospector: 32 bits to 32 bits."""
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK32
    x ^= x >> 15
    x = x * 0x846CA68B & MASK32
    return x ^ x >> 16


def stream_halves(seed: int, step: int, micro_batch: int, layer: int, operand: int) -> tuple[int, int]:
    """The two 32-bit halves (low, high) that key one stream; the start is the fraction of pi."""
    low, high = 0x243F6A88, 0x85A308D3
    for word in (seed & MASK32, seed >> 32, step, micro_batch, layer, operand):
        low = mixed(low ^ word)
        high = mixed((high + low) & MASK32)
    return low, high


def random_word(low: int, high: int, position: int) -> int:
    """The 32 random bits at one position of a stream."""
    x = (position & MASK32) ^ low
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK32
    x = (x + high) & MASK32
    x ^= x >> 15
    x = x * 0x846CA68B & MASK32
    return x ^ x >> 16


def random_integer(
    low: int, high: int, row: int, column: int, shape: tuple[int, int], rank: int = 0, ranks: int = 1
) -> int:
    """The 8-bit number of one element: a byte of a word, whose others belong to its neighbours in the column.

    With as many runs of four rows as this one, the ranks before have `rank` times, and all of them `ranks` times as
    many: the former come first in the stream, the latter is part of its key.
    """
    rows, columns = shape
    runs = -(-rows // 4)
    low ^= ranks * runs * 0x9E3779B9 & MASK32
    high = (high + ranks * runs * 0x85EBCA6B) & MASK32
    run, byte = divmod(row, 4)
    return random_word(low, high, (rank * runs + run) * columns + column) >> 8 * byte & 0xFF


def random_numbers(
    key: tuple[int, int, int, int, int], shape: tuple[int, int], rank: int = 0, ranks: int = 1
) -> Floats:
    """The numbers in (0, 1) for one rank's matrix of the stream keyed by (seed, step, micro-batch, layer, operand)."""
    low, high = stream_halves(*key)
    rows, columns = shape
    integers = [
        random_integer(low, high, row, column, shape, rank, ranks) for row in range(rows) for column in range(columns)
    ]
    return ((np.array(integers, np.float64) + 0.5) / 2**8).astype(np.float32).reshape(shape)
