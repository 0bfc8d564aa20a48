"""Rounding of a tensor to a format: pure functions, the reference for every other path.

Legend: R rows, C columns of a 2-D tensor; a tile is a (tile_rows, tile_columns) block of it. Every tile has one FP32
scale = amax / max(grid); elements are multiplied by the reciprocal of the scale, rounded to the format's grid, and
multiplied by the scale again where a value is wanted. A last, shorter tile uses its own elements.

Edge cases: an all-zero tile stays zero. A tile that holds a NaN or an infinity comes out as NaN in full, never as a
clipped number. Scales below the smallest normal FP32 number are raised to it, so that a tile of tiny values rounds
towards zero instead of dividing by a subnormal number, which not every device can do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .formats import FORMATS, ElementGrid
from .gemms import OPERANDS
from .random_streams import stream_key, uniform

_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
_EXPONENT_MASK = 0x7F800000


@dataclass(frozen=True)
class Quantized:
    """`values` (R, C) on the format's grid, `scales` (R / tile_rows, C / tile_columns), both FP32."""

    values: Tensor
    scales: Tensor
    tile: tuple[int, int]

    def dequantize(self) -> Tensor:
        """Returns values * scales, (R, C), FP32."""
        return _scale_tiles(self.values, self.scales, self.tile)


def quantize_tiles(
    x: Tensor, grid: ElementGrid, tile: tuple[int, int], key: int | None = None, rank: int = 0, ranks: int = 1
) -> Quantized:
    """Quantizes a 2-D tensor tile by tile.

    Args:
        x: (R, C), float32, bfloat16 or float16.
        grid: the values that an element can take.
        tile: rows and columns of a tile.
        key: None rounds to nearest, ties to even; a 64-bit key (see `stream_key`) rounds stochastically, with that
            key's random number for element (r, c) (see `uniform`).
        rank: which of `ranks` parts of a tensor x is, counted from 0, for its random numbers.
        ranks: how many parts there are.

    Raises:
        ValueError: x is not a 2-D floating-point tensor.
    """
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"quantize_tiles expects a 2-D floating-point tensor, got shape {tuple(x.shape)}, {x.dtype}.")
    x_fp32 = x.to(torch.float32)
    scales = tile_scales(x_fp32, grid, tile)
    scaled = _scale_tiles(x_fp32, scales.reciprocal(), tile)
    random = None if key is None else uniform(key, x.shape, x.device, rank, ranks)
    return Quantized(round_to_grid(scaled, grid, random), scales, tile)


def fake_quantize_tiles(
    x: Tensor, grid: ElementGrid, tile: tuple[int, int], key: int | None = None, rank: int = 0, ranks: int = 1
) -> Tensor:
    """Returns x quantized and multiplied by its scales, FP32; arguments as in `quantize_tiles`."""
    if x.numel() == 0:
        return x.to(torch.float32)
    return quantize_tiles(x, grid, tile, key, rank, ranks).dequantize()


def quantize(x: Tensor, format: str, operand: str = "activation", seed: int | None = None) -> Tensor:
    """Returns one operand as a GEMM in a format sees it: rounded, times its scales. The reference rounding.

    Args:
        x: (rows, contracted), a floating-point tensor; blocks lie along the last dimension.
        format: name of a registered format.
        operand: "activation", "weight" or "gradient".
        seed: of stochastic rounding, for operands that the format rounds so; needed by these alone.

    Returns: x's shape, FP32.

    Raises:
        ValueError: an unknown format or operand, no seed where one is needed, or x is not a 2-D floating-point tensor.
    """
    fmt = FORMATS[FORMATS.checked(format, "format")]
    if operand not in OPERANDS:
        raise ValueError(f"operand={operand!r} is not known; expected one of {', '.join(OPERANDS)}.")
    if fmt.grid is None:
        return x.to(torch.float32)
    rule = fmt.operand(operand)
    if rule.stochastic and seed is None:
        raise ValueError(f"Format {format!r} rounds a {operand} stochastically; give a seed.")
    key = stream_key(seed, 0, 0, 0, 0) if rule.stochastic and seed is not None else None
    return fake_quantize_tiles(x, fmt.grid, rule.tile(1), key)


def tile_scales(x_fp32: Tensor, grid: ElementGrid, tile: tuple[int, int]) -> Tensor:
    """Returns amax / max(grid) of every tile of x_fp32 (R, C), NaN where the tile holds a NaN or an infinity."""
    rows, columns = tile
    pad_columns, pad_rows = -x_fp32.shape[1] % columns, -x_fp32.shape[0] % rows
    magnitude = torch.nn.functional.pad(x_fp32.abs(), (0, pad_columns, 0, pad_rows))
    blocks = magnitude.view(magnitude.shape[0] // rows, rows, magnitude.shape[1] // columns, columns)
    amax = blocks.amax(dim=(1, 3))  # keeps NaN
    # The floor keeps an all-zero tile's scale above 0 (and its elements from 0 * inf = NaN).
    # Divided by a tensor: by a Python number, CUDA multiplies by its rounded reciprocal, one bit off.
    scales = (amax / amax.new_full((1,), grid.max)).clamp_min(_SMALLEST_NORMAL)
    return torch.where(torch.isfinite(amax), scales, torch.nan)


def round_to_grid(x: Tensor, grid: ElementGrid, random: Tensor | None = None) -> Tensor:
    """Rounds every element to the grid, saturating; NaN stays NaN.

    Args:
        x: any shape, FP32.
        grid: the values that an element can take.
        random: None for nearest, ties to even. Otherwise numbers of x's shape as `uniform` gives them: x + (random -
            1/2) * (spacing of the grid around x) is rounded to nearest, so that x goes to either neighbour with the
            probability that keeps its mean.

    Returns: x's shape, FP32.
    """
    # The spacing of the grid around x: 2**(exponent of x - mantissa bits), not below that of the subnormals. All of
    # these are powers of two, so that dividing and multiplying by them is exact.
    power = (x.view(torch.int32) & _EXPONENT_MASK).view(torch.float32)
    spacing = power.clamp_min(2.0**grid.min_exponent).mul_(2.0**-grid.mantissa_bits)
    steps = x / spacing
    if random is not None:
        steps += random - 0.5
    rounded = steps.round_().copysign_(x)  # ties to even; copysign keeps the sign of what becomes 0
    return rounded.mul_(spacing).clamp_(-grid.max, grid.max)


def _scale_tiles(x: Tensor, factors: Tensor, tile: tuple[int, int]) -> Tensor:
    """Returns x (R, C) with every element multiplied by its tile's entry of `factors`."""
    rows, columns = tile
    if x.shape[0] % rows == 0 and x.shape[1] % columns == 0:
        blocks = x.reshape(factors.shape[0], rows, factors.shape[1], columns)
        return (blocks * factors[:, None, :, None]).view(x.shape)
    spread = factors.repeat_interleave(rows, 0)[: x.shape[0]].repeat_interleave(columns, 1)[:, : x.shape[1]]
    return x * spread
