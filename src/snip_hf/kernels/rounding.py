"""Rounding in one launch on a GPU: `fake_quantize`, as the estimate and the emulated GEMMs use it.

Triton kernels run on NVIDIA GPUs from compute capability 8.0 on, for operands that are rounded in the large blocks with
FP32 scales; torch's operations run for other operands and anywhere else. Both give the numbers of `numerics.rounding`
bit for bit; the kernel takes one launch instead of about twenty.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..numerics import rounding
from ..numerics.formats import E4M3, ElementGrid, NumberFormat
from ..numerics.gemms import COLUMN_TILE, ROW_TILE, SQUARE_TILE, TILE
from ..numerics.random_streams import rank_stream

logger = logging.getLogger(__name__)

# Tile -> rows and columns of the block that one program rounds, and its warps.
_BLOCKS = {ROW_TILE: (16, TILE, 4), COLUMN_TILE: (TILE, 32, 4), SQUARE_TILE: (TILE, TILE, 8)}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The least that Triton supports.
_AMPERE = (8, 0)


def fake_quantize(
    x: Tensor,
    format: NumberFormat,
    operand: str,
    contracts: int,
    key: int | None = None,
    rank: int = 0,
    ranks: int = 1,
    amax: Tensor | None = None,
) -> Tensor:
    """Returns what a GEMM in a format sees of x, (R, C), in FP32: quantized, times its scales; x itself unquantized.

    Autograd does not see into it.

    Args:
        x: (R, C).
        format: of the GEMM.
        operand: which of its operands x is (`gemms.OPERANDS`).
        contracts: the dimension of x that the GEMM contracts, 0 or 1.
        key: of the random numbers of operands that are rounded stochastically or get noise; others, or without one,
            are rounded to nearest.
        rank, ranks: as in `rounding.quantize_tiles`.
        amax: as in `rounding.round_operand`.
    """
    if format.grid is None:
        return x.to(torch.float32)
    rule = format.operand(operand)
    if format.scale != "fp32" or format.rotation or not rule.is_plain:
        with torch.no_grad():
            return rounding.round_operand(x, format, operand, contracts, key, rank, ranks, amax)
    grid, tile = rule.grid or format.grid, rule.tile(contracts)
    return fake_quantize_tiles(x, grid, tile, key if rule.stochastic else None, rank, ranks)


def fake_quantize_tiles(
    x: Tensor, grid: ElementGrid, tile: tuple[int, int], key: int | None = None, rank: int = 0, ranks: int = 1
) -> Tensor:
    """As `rounding.fake_quantize_tiles`.

    The kernel takes tiles 1x128, 128x1 and 128x128, and grids that have subnormals and mantissas.
    """
    is_taken = x.dim() == 2 and x.numel() > 0 and x.dtype in _DTYPES and tile in _BLOCKS
    is_taken = is_taken and grid.subnormals and grid.mantissa_bits > 0
    if not is_taken or not has_kernels(x.device):
        return rounding.fake_quantize_tiles(x, grid, tile, key, rank, ranks)
    return _by_kernel(x, grid, tile, key, rank, ranks)


@cache
def has_kernels(device: torch.device) -> bool:
    """Returns True if Triton's kernels run on a device, by a trial: they are compiled there, with a C compiler."""
    if device.type != "cuda" or torch.version.cuda is None or find_spec("triton") is None:
        return False
    if torch.cuda.get_device_capability(device) < _AMPERE:
        return False
    try:
        _by_kernel(torch.ones(1, 1, device=device), E4M3, ROW_TILE)
    except Exception as error:
        # Only the time differs.
        logger.warning("snip-hf: rounding takes some twenty kernels instead of one, since Triton fails: %s", error)
        return False
    return True


if TYPE_CHECKING or find_spec("triton") is not None:
    import triton
    import triton.language as tl

    from .triton_numerics import power_of_two, random_bits, to_grid

    _SMALLEST_NORMAL = tl.constexpr(2.0**-126)
    _INFINITY = tl.constexpr(0x7F800000)

    # Formats are numbers, so that few kernels are compiled.
    @triton.jit(do_not_specialize=["key", "first"])
    def _rounding_kernel(  # type: ignore[no-untyped-def]  # Triton reads the annotations
        x,
        y,
        rows,
        columns,
        x_row,
        x_column,
        key: tl.int64,
        first: tl.int64,  # position in the key's stream
        largest,
        least_power,
        spacing,  # of the grid from 1 to 2
        BLOCK_ROWS: tl.constexpr,
        BLOCK_COLUMNS: tl.constexpr,
        TILE_ROWS: tl.constexpr,
        TILE_COLUMNS: tl.constexpr,
        RANDOM: tl.constexpr,
    ):
        blocks = tl.cdiv(columns, BLOCK_COLUMNS)
        row = (tl.program_id(0) // blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None].to(tl.int64)
        column = (tl.program_id(0) % blocks * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS))[None, :].to(tl.int64)
        inside = (row < rows) & (column < columns)
        value = tl.load(x + row * x_row + column * x_column, inside, other=0.0).to(tl.float32)
        # The magnitude's bits order like it, with infinity and NaN on top.
        bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        if TILE_COLUMNS > 1:
            bits = tl.max(bits, 1, keep_dims=True)
        if TILE_ROWS > 1:
            bits = tl.max(bits, 0, keep_dims=True)
        amax = bits.to(tl.float32, bitcast=True)
        scale = tl.maximum(tl.div_rn(amax, largest), _SMALLEST_NORMAL)
        scale = tl.where(bits < _INFINITY, scale, float("nan"))
        scaled = value * tl.div_rn(1.0, scale)
        power = tl.maximum(power_of_two(scaled), least_power)
        if RANDOM:
            # `random_streams.uniform`
            position = ((row >> 2) * columns + first + column).to(tl.uint32)
            word = random_bits(position, key.to(tl.uint32), (key >> 32).to(tl.uint32))
            number = (word >> ((row & 3) * 8).to(tl.uint32)) & 0xFF
            rounded = to_grid(scaled, (number.to(tl.float32) - 127.5) * 0.00390625 * spacing, power, spacing)
        else:
            rounded = to_grid(scaled, 0.0, power, spacing)
        rounded = rounded.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        # What becomes 0 keeps its sign.
        signed = (rounded | (scaled.to(tl.int32, bitcast=True) & -0x80000000)).to(tl.float32, bitcast=True)
        tl.store(y + row * columns + column, signed * scale, inside)


def _by_kernel(
    x: Tensor, grid: ElementGrid, tile: tuple[int, int], key: int | None = None, rank: int = 0, ranks: int = 1
) -> Tensor:
    """`fake_quantize_tiles` by the kernel: x (R, C) with at least one element."""
    rows, columns = x.shape
    stream, first = (0, 0) if key is None else rank_stream(key, x.shape, rank, ranks)
    block_rows, block_columns, warps = _BLOCKS[tile]
    y = torch.empty(rows, columns, dtype=torch.float32, device=x.device)
    programs = (triton.cdiv(rows, block_rows) * triton.cdiv(columns, block_columns),)
    with torch.cuda.device_of(x):
        _rounding_kernel[programs](
            x,
            y,
            rows,
            columns,
            *x.stride(),
            _as_int64(stream),
            first,
            grid.max,
            2.0**grid.min_exponent,
            2.0**-grid.mantissa_bits,
            block_rows,
            block_columns,
            *tile,
            key is not None,
            num_warps=warps,
            enable_fp_fusion=False,  # scaling and rounding are two roundings
        )
    return y


def _as_int64(key: int) -> int:
    return key - 2**64 if key >= 2**63 else key
