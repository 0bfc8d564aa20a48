"""What does a tensor become in a block format? Loops over blocks in numpy, written from the formats' definitions.

Grids are lists of values; scales are written out per kind (OCP Microscaling v1.0, section 6.3; cuBLAS, "1D block
scaling"; arXiv:2509.25149, appendix on NVFP4). No code of the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .rounding import Floats

Values = NDArray[np.float64]
Scale = Callable[[np.float32, np.float32], np.float32]
"""Largest magnitudes of a block and of the tensor -> scale of the block."""


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


def nearest(x: float, grid: Grid) -> float:
    """The nearest value, of two equally near ones that with the even code; the largest one for what is larger."""
    magnitude = min(abs(x), grid.max)
    above = min(int(np.searchsorted(grid.values, magnitude)), len(grid.values) - 1)
    below = max(above - 1, 0)
    down, up = magnitude - grid.values[below], grid.values[above] - magnitude
    is_down = down < up or (down == up and grid.codes[below] % 2 == 0)
    return math.copysign(float(grid.values[below if is_down else above]), x)


def _power(exponent: int) -> np.float32:
    return np.float32(2.0 ** min(127, max(-127, exponent)))


def _floor_log2(x: float) -> int:
    return math.frexp(x)[1] - 1 if x > 0 else -10_000


def _ceil_log2(x: float) -> int:
    significand, exponent = math.frexp(x)
    return -10_000 if x == 0 else exponent - (significand == 0.5)


def e8m0(rule: str, grid: Grid) -> Scale:
    def floor(amax: np.float32, _: np.float32) -> np.float32:
        return _power(_floor_log2(float(amax)) - grid.emax)

    def ceil(amax: np.float32, _: np.float32) -> np.float32:
        return _power(_ceil_log2(float(amax)) - grid.emax)

    def rceil(amax: np.float32, _: np.float32) -> np.float32:
        return _power(_ceil_log2(float(amax / np.float32(grid.max))))

    def even(amax: np.float32, _: np.float32) -> np.float32:
        exponent = _floor_log2(float(amax))
        significand = float(amax) * 2.0**-exponent if amax > 0 else 1.0
        carries = math.floor(significand * 2**grid.mantissa_bits + 0.5) >= 2 ** (grid.mantissa_bits + 1)
        return _power(exponent + carries - grid.emax)

    return {"floor": floor, "ceil": ceil, "rceil": rceil, "even": even}[rule]


def fp32(target: float) -> Scale:
    return lambda amax, _: max(amax / np.float32(target), np.finfo(np.float32).tiny)


def e4m3_in_tensor(target: float, top: float, largest: float, up: bool = False) -> Scale:
    """amax / target as an E4M3 number times the tensor's FP32 scale; `top`: the block scale of the tensor's amax."""

    def scale(amax: np.float32, tensor_amax: np.float32) -> np.float32:
        of_tensor = max(tensor_amax / np.float32(top * largest), np.finfo(np.float32).tiny)
        wanted = amax / np.float32(target) / of_tensor
        grid = floats(4, 3, reserved=1)
        if up:
            of_block = grid.values[min(int(np.searchsorted(grid.values, float(wanted))), len(grid.values) - 1)]
        else:
            of_block = float(np.float32(min(wanted, np.float32(448))).astype(ml_dtypes.float8_e4m3fn))
        return np.float32(of_tensor * np.float32(max(of_block, 2.0**-9)))

    return scale


def quantized(x: Floats, block: tuple[int, int], grid: Grid, scale: Scale | list[Scale]) -> tuple[Floats, Floats]:
    """Dequantized values (R, C) and scales (blocks along R, blocks along C), one block after another.

    Of several scales a block takes the one with the smallest squared error, the first of equal ones.
    """
    rows, columns = block
    products = np.empty_like(x)
    scales = np.empty((-(-x.shape[0] // rows), -(-x.shape[1] // columns)), np.float32)
    tensor_amax = np.abs(x).max()
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            here = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            tried = []
            for rule in scale if isinstance(scale, list) else [scale]:
                found = rule(np.abs(x[here]).max(), tensor_amax)
                scaled = x[here] / np.float64(found)
                values = np.vectorize(lambda one: nearest(float(one), grid), otypes=[np.float64])(scaled)
                result = (values.astype(np.float32) * found).astype(np.float32)
                error = float(((result.astype(np.float64) - x[here].astype(np.float64)) ** 2).sum())
                tried.append((error, found, result))
            _, scales[i, j], products[here] = min(tried, key=lambda one: one[0])
    return products, scales
