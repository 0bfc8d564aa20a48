"""How a tensor is rounded to a format: pure functions, the reference for every other path.

Legend: R rows, C columns of a 2-D tensor; a tile is a (tile_rows, tile_columns) block of it. Every tile has one FP32
scale = amax / max(format); elements are multiplied by the reciprocal of the scale, rounded to the format's grid, and
multiplied by the scale again where a value is wanted. A last, shorter tile uses its own elements.

Edge cases: an all-zero tile stays zero. A tile that holds a NaN or an infinity comes out as NaN in full, never as a
clipped number. Scales below the smallest normal FP32 number are raised to it, so that a tile of tiny values rounds
towards zero instead of dividing by a subnormal number, which not every device can do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .formats import TILE, NumberFormat

ROW_TILE = (1, TILE)
COLUMN_TILE = (TILE, 1)
SQUARE_TILE = (TILE, TILE)

_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
_EXPONENT_MASK = 0x7F800000
_MASK32 = 0xFFFFFFFF


@dataclass(frozen=True)
class Quantized:
    """`values` (R, C) on the format's grid, `scales` (R / tile_rows, C / tile_columns), both FP32."""

    values: Tensor
    scales: Tensor
    tile: tuple[int, int]

    def dequantize(self) -> Tensor:
        """Returns values * scales, (R, C), FP32."""
        return _scale_tiles(self.values, self.scales, self.tile)


def quantize(
    x: Tensor, fmt: NumberFormat, tile: tuple[int, int], key: int | None = None, rank: int = 0, ranks: int = 1
) -> Quantized:
    """Quantizes a 2-D tensor tile by tile.

    Args:
        x: (R, C), float32, bfloat16 or float16.
        fmt: the grid.
        tile: rows and columns of a tile.
        key: None rounds to nearest, ties to even; a 64-bit key (see `stream_key`) rounds stochastically, with that
            key's random number for element (r, c) (see `uniform`).
        rank: which of `ranks` parts of a tensor x is, counted from 0, for its random numbers.
        ranks: how many parts there are.

    Raises:
        ValueError: x is not a 2-D floating-point tensor.
    """
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"quantize expects a 2-D floating-point tensor, got shape {tuple(x.shape)}, {x.dtype}.")
    x_fp32 = x.to(torch.float32)
    scales = tile_scales(x_fp32, fmt, tile)
    scaled = _scale_tiles(x_fp32, scales.reciprocal(), tile)
    random = None if key is None else uniform(key, x.shape, x.device, rank, ranks)
    return Quantized(round_to_format(scaled, fmt, random), scales, tile)


def fake_quantize(
    x: Tensor, fmt: NumberFormat | None, tile: tuple[int, int], key: int | None = None, rank: int = 0, ranks: int = 1
) -> Tensor:
    """Returns what a GEMM in `fmt` sees of x, in FP32: quantized, times its scales; x itself for fmt None."""
    if fmt is None or x.numel() == 0:
        return x.to(torch.float32)
    return quantize(x, fmt, tile, key, rank, ranks).dequantize()


def tile_scales(x_fp32: Tensor, fmt: NumberFormat, tile: tuple[int, int]) -> Tensor:
    """Returns amax / max(format) of every tile of x_fp32 (R, C), NaN where the tile holds a NaN or an infinity."""
    rows, columns = tile
    pad_columns, pad_rows = -x_fp32.shape[1] % columns, -x_fp32.shape[0] % rows
    magnitude = torch.nn.functional.pad(x_fp32.abs(), (0, pad_columns, 0, pad_rows))
    blocks = magnitude.view(magnitude.shape[0] // rows, rows, magnitude.shape[1] // columns, columns)
    amax = blocks.amax(dim=(1, 3))  # keeps NaN
    # The floor keeps an all-zero tile's scale above 0 (and its elements from 0 * inf = NaN).
    # Divided by a tensor: by a Python number, CUDA multiplies by its rounded reciprocal, one bit off.
    scales = (amax / amax.new_full((1,), fmt.max)).clamp_min(_SMALLEST_NORMAL)
    return torch.where(torch.isfinite(amax), scales, torch.nan)


def round_to_format(x: Tensor, fmt: NumberFormat, random: Tensor | None = None) -> Tensor:
    """Rounds every element to the format's grid, saturating; NaN stays NaN.

    Args:
        x: any shape, FP32.
        fmt: the grid.
        random: None for nearest, ties to even. Otherwise numbers of x's shape as `uniform` gives them: x + (random -
            1/2) * (spacing of the grid around x) is rounded to nearest, so that x goes to either neighbour with the
            probability that keeps its mean.

    Returns: x's shape, FP32.
    """
    # The spacing of the grid around x: 2**(exponent of x - mantissa bits), not below that of the subnormals. All of
    # these are powers of two, so that dividing and multiplying by them is exact.
    power = (x.view(torch.int32) & _EXPONENT_MASK).view(torch.float32)
    spacing = power.clamp_min(2.0**fmt.min_exponent).mul_(2.0**-fmt.mantissa_bits)
    steps = x / spacing
    if random is not None:
        steps += random - 0.5
    rounded = steps.round_().copysign_(x)  # ties to even; copysign keeps the sign of what becomes 0
    return rounded.mul_(spacing).clamp_(-fmt.max, fmt.max)


def stream_key(seed: int, step: int, micro_batch: int, layer: Any, operand: int) -> Any:
    """Returns the 64-bit key of one operand's stream of random numbers; for an array of layers (uint64), an array.

    The same five numbers give the same stream, in a resumed run and in the recomputation of activation checkpointing
    alike; a change of any of them gives another one.
    """
    low, high = 0x243F6A88, 0x85A308D3  # the first bits of pi
    for word in (seed, seed >> 32, step, micro_batch, layer, operand):
        low = _mix(low ^ (word & _MASK32))
        high = _mix((high + low) & _MASK32)
    return (high << 32) | low


def uniform(
    key: int,
    shape: tuple[int, int] | torch.Size,
    device: torch.device | str = "cpu",
    rank: int = 0,
    ranks: int = 1,
) -> Tensor:
    """Returns numbers (k + 1/2) / 256, k = 0 ... 255, one per element: a pure function of (key, rank, ranks, element).

    One 32-bit hash serves four neighbours in a column, which a kernel has at hand together, a run: rows 4 i ... 4 i + 3
    take its bytes, the lowest first, at position i * C + c of what `rank_stream` gives; positions count modulo 2**32.
    Eight bits are what NVIDIA's stochastic conversion to FP4 takes too; they leave the mean of a rounded number within
    2**-9 spacings of it. The hash is a finaliser of two multiplications (constants of Wellons' `lowbias32`) with the
    key's halves put in before and between them. Integer operations wrap, so that a kernel in any language can repeat it
    bit for bit.

    Args:
        key: 64 bits.
        shape: (R, C).
        device: where the numbers are wanted.
        rank: which of `ranks` parts of a tensor, split along its rows, the numbers are for; counted from 0.
        ranks: how many parts there are.
    """
    rows, columns = shape
    runs = (rows + 3) // 4
    bits = _hash(*rank_stream(key, shape, rank, ranks), runs * columns, device).view(runs, 1, columns)
    numbers = torch.cat([bits, bits >> 8, bits >> 16, bits >> 24], 1).bitwise_and_(0xFF)
    return numbers.to(torch.float32).add_(0.5).mul_(2.0**-8).view(4 * runs, columns)[:rows]


def rank_stream(key: int, shape: tuple[int, int] | torch.Size, rank: int, ranks: int) -> tuple[int, int]:
    """Returns the key of the hash and the first of its positions for a tensor (R, C), which one rank of several has.

    The positions of the ranks before come first, and the number of runs on all ranks, if all have as many as this one,
    goes into the key. So ranks that have equally many rows, a multiple of 4, draw together the numbers that one process
    draws for all the rows, and ranks that have more rows or fewer draw from streams of their own.
    """
    runs = (shape[0] + 3) // 4
    all_runs = ranks * runs
    # Odd constants of the golden ratio and of MurmurHash3, one for each half. Put into the high half alone, as it is,
    # the number would give streams that correlate (up to 0.6) where it differs by little.
    low = (key ^ all_runs * 0x9E3779B9) & _MASK32
    high = ((key >> 32) + all_runs * 0x85EBCA6B) & _MASK32
    return (high << 32) | low, rank * runs * shape[1] & _MASK32


def _hash(key: int, first: int, count: int, device: torch.device | str) -> Tensor:
    """Returns the key's 32 random bits for positions first ... first + count - 1, int32."""
    x = torch.arange(count, dtype=torch.int64 if count > 2**31 - 1 else torch.int32, device=device).to(torch.int32)
    low, high = _signed(key & _MASK32), _signed(key >> 32)
    x = _shift_xor(x.add_(_signed(first)).bitwise_xor_(low), 16).mul_(0x7FEB352D)
    x = _shift_xor(x.add_(high), 15).mul_(_signed(0x846CA68B))
    return _shift_xor(x, 16)


def _shift_xor(x: Tensor, bits: int) -> Tensor:
    """Returns x ^ (x >> bits) with a logical shift (torch's is arithmetic on signed integers), in place."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (32 - bits)) - 1))


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def _mix(x: Any) -> Any:
    """Wellons' `lowbias32` on a Python integer, or on an array of uint64 that are below 2**32."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)


def _scale_tiles(x: Tensor, factors: Tensor, tile: tuple[int, int]) -> Tensor:
    """Returns x (R, C) with every element multiplied by its tile's entry of `factors`."""
    rows, columns = tile
    if x.shape[0] % rows == 0 and x.shape[1] % columns == 0:
        blocks = x.reshape(factors.shape[0], rows, factors.shape[1], columns)
        return (blocks * factors[:, None, :, None]).view(x.shape)
    spread = factors.repeat_interleave(rows, 0)[: x.shape[0]].repeat_interleave(columns, 1)[:, : x.shape[1]]
    return x * spread
