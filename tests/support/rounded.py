"""The reference rounding by format, grid or name, as the tests of everything above it use it."""

from __future__ import annotations

import torch
from torch import Tensor

from snip_hf.numerics.formats import FORMATS, ElementGrid, NumberFormat
from snip_hf.numerics.rounding import Quantized, fake_quantize_tiles, quantize_tiles

Format = NumberFormat | ElementGrid | str | None


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
