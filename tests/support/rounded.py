"""The reference rounding by format, grid or name, as the tests of everything above it use it."""

from __future__ import annotations

import torch
from torch import Tensor

from snip_hf.numerics.formats import FORMATS, ElementGrid, NumberFormat, Operand
from snip_hf.numerics.gemms import TILE
from snip_hf.numerics.random_streams import uniform
from snip_hf.numerics.rounding import Quantized, quantize_operand, round_operand

COLUMN_TILE = (TILE, 1)

Format = NumberFormat | ElementGrid | str | None


def of_tiles(grid: ElementGrid, tile: tuple[int, int]) -> tuple[NumberFormat, str, int]:
    """Returns a format, an operand and a contraction that round a tensor in these tiles, at random by a key."""
    contracts = 0 if tile == COLUMN_TILE else 1
    rule = Operand(tile if contracts == 1 else tile[::-1], stochastic=True)
    fmt = NumberFormat(name="tiles", grid=grid, bits=grid.bits, gradient=rule, speed=1.0, label="", colour="#000000")
    return fmt, "gradient", contracts


def quantize_tiles(
    x: Tensor, grid: ElementGrid, tile: tuple[int, int], key: int | None = None, rank: int = 0, ranks: int = 1
) -> Quantized:
    """Returns x quantized in tiles with FP32 scales, to nearest or by a key."""
    fmt, _, _ = of_tiles(grid, tile)
    random = None if key is None else uniform(key, x.shape, x.device, rank, ranks)
    return quantize_operand(x.to(torch.float32), fmt, fmt.gradient, tile, None, random)


def fake_quantize_tiles(
    x: Tensor, grid: ElementGrid, tile: tuple[int, int], key: int | None = None, rank: int = 0, ranks: int = 1
) -> Tensor:
    """Returns x quantized in tiles and multiplied by its scales, FP32."""
    return round_operand(x, *of_tiles(grid, tile), key, rank, ranks)


def grid_of(fmt: Format) -> ElementGrid | None:
    fmt = FORMATS[fmt] if isinstance(fmt, str) else fmt
    return fmt.grid if isinstance(fmt, NumberFormat) else fmt


def quantize(
    x: Tensor, fmt: Format, tile: tuple[int, int], key: int | None = None, rank: int = 0, ranks: int = 1
) -> Quantized:
    grid = grid_of(fmt)
    assert grid is not None, "what is not quantized has no scales"
    return quantize_tiles(x, grid, tile, key, rank, ranks)


def fake_quantize(
    x: Tensor, fmt: Format, tile: tuple[int, int], key: int | None = None, rank: int = 0, ranks: int = 1
) -> Tensor:
    """x as a GEMM sees it, FP32; unquantized formats leave it as it is."""
    grid = grid_of(fmt)
    return x.to(torch.float32) if grid is None else fake_quantize_tiles(x, grid, tile, key, rank, ranks)
