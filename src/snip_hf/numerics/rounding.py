"""Rounding of a tensor to a format: pure functions, the reference for every other path.

Legend: R rows, C columns of a 2-D tensor; a tile is a (tile_rows, tile_columns) block of it. Every tile has one scale
(`scales`; with FP32 scales amax / max(grid)). Elements are multiplied by the reciprocal of the scale, rounded to the
format's grid, and multiplied by the scale again to get a value. A last, shorter tile uses its own elements.

Edge cases: an all-zero tile stays zero. A tile that holds a NaN or an infinity comes out as NaN in full, never as a
clipped number; if a scale belongs to the whole tensor, the whole tensor does. FP32 scales below the smallest normal
number are raised to it, so that tiles of tiny values round towards zero without dividing by subnormal numbers, which
some devices cannot do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .formats import FORMATS, ElementGrid, NumberFormat, Operand
from .gemms import OPERANDS, gemm_of
from .grids import round_to_grid as round_to_grid
from .grids import spacing_of
from .random_streams import normal, stream_key, uniform
from .rotation import rotate, rotate_back
from .scales import Scales, block_scales, fp32_scales


@dataclass(frozen=True)
class Quantized:
    """`values` (R, C) on the format's grid, `scales` (R / tile_rows, C / tile_columns), both FP32."""

    values: Tensor
    scales: Tensor
    tile: tuple[int, int]

    def dequantize(self) -> Tensor:
        """Returns values * scales, (R, C), FP32."""
        return _scale_tiles(self.values, self.scales, self.tile)


def quantize(x: Tensor, format: str, operand: str = "activation", seed: int | None = None) -> Tensor:
    """Returns one operand as a GEMM in a format sees it: rounded, times its scales. The reference rounding.

    Args:
        x: (rows, contracted), a floating-point tensor; blocks lie along the last dimension.
        format: name of a registered format.
        operand: "activation", "weight" or "gradient".
        seed: for stochastic rounding; needed only for operands that the format rounds stochastically.

    Returns: x's shape, FP32.

    Raises:
        ValueError: the format or operand is unknown, a seed is missing, or x is not a 2-D floating-point tensor.
    """
    fmt = FORMATS[FORMATS.checked(format, "format")]
    if operand not in OPERANDS:
        raise ValueError(f"operand={operand!r} is not known; expected one of {', '.join(OPERANDS)}.")
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"quantize expects a 2-D floating-point tensor, got shape {tuple(x.shape)}, {x.dtype}.")
    rule = fmt.operand(operand)
    is_random = fmt.is_quantized and (rule.stochastic or rule.noise)
    if is_random and seed is None:
        raise ValueError(f"Format {format!r} rounds a {operand} stochastically; give a seed.")
    key = stream_key(seed, 0, 0, 0, 0) if is_random and seed is not None else None
    return round_operand(x, fmt, operand, 1, key)


def round_operand(
    x: Tensor,
    format: NumberFormat,
    operand: str,
    contracts: int,
    key: int | None = None,
    rank: int = 0,
    ranks: int = 1,
    amax: Tensor | None = None,
) -> Tensor:
    """Returns x as a GEMM in a format sees it, FP32: quantized, times its scales, rotated back.

    Args:
        x: (R, C).
        format: of the GEMM.
        operand: name of x in `gemms.OPERANDS`.
        contracts: the dimension of x that the GEMM contracts, 0 or 1.
        key: of the random numbers, for operands that are rounded stochastically or get noise; None: rounding to
            nearest.
        rank, ranks: x is part `rank`, from 0, of `ranks` parts of a tensor, for its random numbers.
        amax: the largest magnitude of the tensor of which x is a part, one element; None: x is the whole tensor. If the
            GEMM's operands are rotated, x counts as the whole tensor.
    """
    rule, x_fp32 = format.operand(operand), x.to(torch.float32)
    if not format.is_quantized or not rule.quantized or x.numel() == 0:
        return x_fp32
    is_rotated = gemm_of(operand, contracts) in format.rotated
    if is_rotated:
        x_fp32, amax = rotate(x_fp32, format.rotation, contracts), None
    tile = rule.tile(contracts, x.shape)
    if rule.noise and key is not None:
        found = _with_noise(x_fp32, format, rule, tile, amax, key)
    else:
        random = uniform(key, x.shape, x.device, rank, ranks) if rule.stochastic and key is not None else None
        found = quantize_operand(x_fp32, format, rule, tile, amax, random).dequantize()
    return rotate_back(found, format.rotation, contracts) if is_rotated else found


def quantize_operand(
    x_fp32: Tensor,
    format: NumberFormat,
    rule: Operand,
    tile: tuple[int, int],
    amax: Tensor | None = None,
    random: Tensor | None = None,
) -> Quantized:
    """Quantizes by an operand's rule, without rotation; each tile uses the best of several targets.

    Args:
        x_fp32: (R, C), rotated if the GEMM's operands are.
        format: of the GEMM.
        rule: of the operand.
        tile: rows and columns of a tile.
        amax: as in `round_operand`.
        random: as in `round_to_grid`.
    """
    grid = rule.grid or format.grid
    assert grid is not None
    candidates = []
    for target in rule.targets or (grid.max,):
        scales, factors = _scales(x_fp32, format, rule, tile, amax, target)
        values = round_to_grid(_scale_tiles(x_fp32, factors, tile), grid, random)
        candidates.append(Quantized(values, scales, tile))
    best = candidates[0]
    if len(candidates) > 1:
        least = _squared_errors(best, x_fp32)
        for other in candidates[1:]:
            errors = _squared_errors(other, x_fp32)
            is_better = errors < least
            least = torch.where(is_better, errors, least)
            values = torch.where(_spread(is_better, tile, x_fp32.shape), other.values, best.values)
            best = Quantized(values, torch.where(is_better, other.scales, best.scales), tile)
    return best


def _squared_errors(quantized: Quantized, x_fp32: Tensor) -> Tensor:
    """Returns every tile's sum of squared errors in FP64, so that the order of summation rarely matters."""
    return _blocks((quantized.dequantize().double() - x_fp32.double()).square_(), quantized.tile).sum(dim=(1, 3))


def _with_noise(
    x_fp32: Tensor, format: NumberFormat, rule: Operand, tile: tuple[int, int], amax: Tensor | None, key: int
) -> Tensor:
    """Returns x plus Gaussian noise with the variance of rounding, a twelfth of the squared spacing."""
    grid = rule.grid or format.grid
    assert grid is not None
    scales, factors = _scales(x_fp32, format, rule, tile, amax, grid.max)
    scales = torch.where(tile_amax(x_fp32, tile) == 0, 0.0, scales)  # zeros stay zero
    steps = _scale_tiles(spacing_of(_scale_tiles(x_fp32, factors, tile), grid), scales, tile)
    return x_fp32 + steps * normal(key, x_fp32.shape, x_fp32.device) * 12**-0.5


def _scales(
    x_fp32: Tensor, format: NumberFormat, rule: Operand, tile: tuple[int, int], amax: Tensor | None, target: float
) -> Scales:
    """Returns the scales of x's tiles, (tiles along R, tiles along C)."""
    of_tiles = tile_amax(x_fp32, tile) if rule.block is not None or amax is None else amax.view(1, 1)
    if format.tensor_scale is not None and amax is None:
        amax = of_tiles.amax()
    return block_scales(of_tiles, format, rule, target, amax)


def tile_scales(x_fp32: Tensor, grid: ElementGrid, tile: tuple[int, int]) -> Tensor:
    """Returns amax / max(grid) of every tile of x_fp32 (R, C); NaN for a tile with a NaN or an infinity."""
    return fp32_scales(tile_amax(x_fp32, tile), grid.max)


def tile_amax(x_fp32: Tensor, tile: tuple[int, int]) -> Tensor:
    """Returns the largest magnitude of every tile of x_fp32 (R, C); NaN for a tile with a NaN."""
    return _blocks(x_fp32.abs(), tile).amax(dim=(1, 3))  # keeps NaN


def _blocks(x: Tensor, tile: tuple[int, int]) -> Tensor:
    """Returns x (R, C), padded with zeros, as (tiles along R, rows, tiles along C, columns)."""
    rows, columns = _within(tile, x.shape)
    if x.shape[0] % rows or x.shape[1] % columns:
        x = torch.nn.functional.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))
    return x.reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)


def _within(tile: tuple[int, int], shape: torch.Size) -> tuple[int, int]:
    """Returns a tile cut to the size of x (R, C), which only removes padding.

    An empty dimension of x has tiles of 1.
    """
    return min(tile[0], max(1, shape[0])), min(tile[1], max(1, shape[1]))


def _scale_tiles(x: Tensor, factors: Tensor, tile: tuple[int, int]) -> Tensor:
    """Returns x (R, C) with every element multiplied by its tile's entry of `factors`."""
    rows, columns = _within(tile, x.shape)
    if x.shape[0] % rows == 0 and x.shape[1] % columns == 0:
        blocks = x.reshape(factors.shape[0], rows, factors.shape[1], columns)
        return (blocks * factors[:, None, :, None]).view(x.shape)
    return x * _spread(factors, tile, x.shape)


def _spread(of_tiles: Tensor, tile: tuple[int, int], shape: torch.Size) -> Tensor:
    """Returns every tile's entry repeated for each of its elements."""
    rows, columns = tile
    return of_tiles.repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(columns, 1)[:, : shape[1]]
