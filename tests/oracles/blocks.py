"""A tensor in a block format: loops over blocks in numpy, written from the formats' definitions.

Grids are lists of values; scales are written out per kind (OCP Microscaling v1.0, section 6.3; cuBLAS, "1D block
scaling"; arXiv:2509.25149, appendix on NVFP4). An element is multiplied by the reciprocal of its scale, in FP32, as
torchao does. No code of the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .rounding import Floats, between

Values = NDArray[np.float64]
Scale = Callable[[np.float32, np.float32], tuple[np.float32, np.float32]]
"""Largest magnitudes of a block and of the tensor -> scale of the block, and its reciprocal."""


@dataclass(frozen=True)
class Grid:
    """Values of at least 0, rising, with their codes, and the bits of a significand behind the point."""

    values: Values
    codes: NDArray[np.int64]
    mantissa_bits: int

    @property
    def max(self) -> float:
        return float(self.values[-1])

    @property
    def emax(self) -> int:
        return math.frexp(self.max)[1] - 1


def floats(exponent_bits: int, mantissa_bits: int, reserved: int = 0, subnormals: bool = True) -> Grid:
    """Every code but the last `reserved` ones, decoded one by one."""
    bias, steps = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
    values, codes = [], []
    for code in range(2 ** (exponent_bits + mantissa_bits) - reserved):
        field, fraction = divmod(code, steps)
        if field == 0 and fraction > 0 and not subnormals:
            continue
        whole = 0 if field == 0 else 1
        values.append((whole + fraction / steps) * 2.0 ** (max(field, 1) - bias))
        codes.append(code)
    if not subnormals:
        values[0] = 0.0
    return Grid(np.array(values), np.array(codes), mantissa_bits)


def integers(largest: int) -> Grid:
    values = np.arange(largest + 1)
    return Grid(values.astype(np.float64), values, largest.bit_length() - 1)


def nearest(x: Floats, grid: Grid) -> Floats:
    """The nearest values, of two equally near ones that with the even code; the largest one for what is larger."""
    magnitude = np.minimum(np.abs(x.astype(np.float64)), grid.max)
    above = np.minimum(np.searchsorted(grid.values, magnitude), len(grid.values) - 1)
    below = np.maximum(above - 1, 0)
    down, up = magnitude - grid.values[below], grid.values[above] - magnitude
    is_down = (down < up) | ((down == up) & (grid.codes[below] % 2 == 0))
    return np.copysign(np.where(is_down, grid.values[below], grid.values[above]), x).astype(np.float32)


def _power(exponent: int) -> np.float32:
    return np.float32(2.0 ** min(127, max(-127, exponent)))


def _floor_log2(x: float) -> int:
    return math.frexp(x)[1] - 1 if x > 0 else -10_000


def _ceil_log2(x: float) -> int:
    significand, exponent = math.frexp(x)
    return -10_000 if x == 0 else exponent - (significand == 0.5)


def e8m0(rule: str, grid: Grid) -> Scale:
    def floor(amax: float) -> int:
        return _floor_log2(amax) - grid.emax

    def ceil(amax: float) -> int:
        return _ceil_log2(amax) - grid.emax

    def rceil(amax: float) -> int:
        return _ceil_log2(float(np.float32(amax) / np.float32(grid.max)))

    def even(amax: float) -> int:
        exponent = _floor_log2(amax)
        significand = amax * 2.0**-exponent if amax > 0 else 1.0
        carries = math.floor(significand * 2**grid.mantissa_bits + 0.5) >= 2 ** (grid.mantissa_bits + 1)
        return exponent + carries - grid.emax

    def scale(amax: np.float32, _: np.float32) -> tuple[np.float32, np.float32]:
        found = _power({"floor": floor, "ceil": ceil, "rceil": rceil, "even": even}[rule](float(amax)))
        return found, np.float32(1) / found

    return scale


def fp32(target: float) -> Scale:
    def scale(amax: np.float32, _: np.float32) -> tuple[np.float32, np.float32]:
        found = max(amax / np.float32(target), np.finfo(np.float32).tiny)
        return found, np.float32(1) / found

    return scale


def fine(kind: Grid, target: float, top: tuple[float, float] | None = None, up: bool = False) -> Scale:
    """amax / target as a number of a small grid, to nearest or up.

    With `top`, the scale of the block with the tensor's amax and the largest element, it is times one FP32 scale of the
    tensor.
    """
    tiny, huge = np.finfo(np.float32).tiny, np.finfo(np.float32).max

    def scale(amax: np.float32, tensor_amax: np.float32) -> tuple[np.float32, np.float32]:
        of_tensor = np.float32(1) if top is None else max(tensor_amax / np.float32(top[0] * top[1]), tiny)
        if not np.isfinite(of_tensor):
            return np.float32(np.nan), np.float32(np.nan)
        wanted = amax / np.float32(target) / of_tensor
        if up:
            found = kind.values[min(int(np.searchsorted(kind.values, float(wanted))), len(kind.values) - 1)]
        else:
            found = nearest(np.array([wanted]), kind)[0]
        of_block = np.float32(max(found, kind.values[1]))
        return of_tensor * of_block, min(np.float32(1) / of_tensor / of_block, huge)

    return scale


def quantized(
    x: Floats, block: tuple[int, int], grid: Grid, scale: Scale | list[Scale], random: Floats | None = None
) -> tuple[Floats, Floats]:
    """Dequantized values (R, C) and scales (blocks along R, blocks along C), one block after another.

    Of several scales a block takes the one with the smallest squared error, the first of equal ones. With random
    numbers of (0, 1) elements go to either neighbour. A block that holds a NaN or an infinity is NaN in full.
    """
    rows, columns = block
    products = np.empty_like(x)
    scales = np.empty((-(-x.shape[0] // rows), -(-x.shape[1] // columns)), np.float32)
    tensor_amax = np.abs(x).max()
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            here = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            if not np.isfinite(x[here]).all():
                scales[i, j], products[here] = np.nan, np.nan
                continue
            tried = []
            for rule in scale if isinstance(scale, list) else [scale]:
                found, factor = rule(np.abs(x[here]).max(), tensor_amax)
                scaled = x[here] * factor
                values = nearest(scaled, grid) if random is None else between(scaled, grid.values, random[here])
                result = values * found
                error = float(((result.astype(np.float64) - x[here].astype(np.float64)) ** 2).sum())
                tried.append((error, found, result))
            _, scales[i, j], products[here] = min(tried, key=lambda one: one[0])
    return products, scales
