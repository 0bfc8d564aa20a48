"""How does a GPU round a tensor to a format in one kernel instead of twenty? `quantize.fake_quantize`, fused.

`fake_quantize` here gives the reference's numbers bit for bit, whichever of the two computes them: a Triton kernel on
NVIDIA GPUs from compute capability 8.0 on, the reference anywhere else.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import quantize
from ..formats import E4M3, TILE, NumberFormat
from ..quantize import COLUMN_TILE, ROW_TILE, SQUARE_TILE

logger = logging.getLogger(__name__)

# Tile -> rows and columns of the block that one program rounds, and its warps.
_BLOCKS = {ROW_TILE: (16, TILE, 4), COLUMN_TILE: (TILE, 32, 4), SQUARE_TILE: (TILE, TILE, 8)}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The least that Triton supports.
_AMPERE = (8, 0)


def fake_quantize(x: Tensor, fmt: NumberFormat | None, tile: tuple[int, int], key: int | None = None) -> Tensor:
    """As `quantize.fake_quantize`; autograd does not see into it. The kernel takes tiles 1x128, 128x1 and 128x128."""
    is_taken = x.dim() == 2 and x.numel() > 0 and x.dtype in _DTYPES and tile in _BLOCKS
    if fmt is None or not is_taken or not _has_kernel(x.device):
        return quantize.fake_quantize(x, fmt, tile, key)
    return _by_kernel(x, fmt, tile, key)


@cache
def _has_kernel(device: torch.device) -> bool:
    """Tells whether the kernel runs on a device, by a trial: it is compiled there, which takes a C compiler."""
    if device.type != "cuda" or torch.version.cuda is None or find_spec("triton") is None:
        return False
    if torch.cuda.get_device_capability(device) < _AMPERE:
        return False
    try:
        _by_kernel(torch.ones(1, 1, device=device), E4M3, ROW_TILE)
    except Exception as error:
        # Only the time differs, not the numbers.
        logger.warning("snip-hf: rounding takes some twenty kernels instead of one, since Triton fails: %s", error)
        return False
    return True


if TYPE_CHECKING or find_spec("triton") is not None:
    import triton
    import triton.language as tl

    _SMALLEST_NORMAL = tl.constexpr(2.0**-126)
    _INFINITY = tl.constexpr(0x7F800000)

    # Formats are numbers, so that few kernels are compiled.
    @triton.jit(do_not_specialize=["key"])
    def _kernel(  # type: ignore[no-untyped-def]  # Triton reads the annotations
        x,
        y,
        rows,
        columns,
        x_row,
        x_column,
        key: tl.int64,
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
        power = (scaled.to(tl.int32, bitcast=True) & _INFINITY).to(tl.float32, bitcast=True)
        power = tl.maximum(power, least_power)
        # Products with `power` and `spacing` are exact: both are powers of two.
        moved = scaled
        if RANDOM:
            # `quantize.uniform`
            word = ((row >> 2) * columns + column).to(tl.uint32) ^ key.to(tl.uint32)
            word = (word ^ (word >> 16)) * 0x7FEB352D + (key >> 32).to(tl.uint32)
            word = (word ^ (word >> 15)) * 0x846CA68B
            word = word ^ (word >> 16)
            number = (word >> ((row & 3) * 8).to(tl.uint32)) & 0xFF
            moved += (number.to(tl.float32) - 127.5) * 0.00390625 * (power * spacing)
        # 1.5 * 2**23 spacings, added and taken away, round to whole ones, ties to even.
        anchor = power * (spacing * 12582912.0)
        rounded = ((moved + anchor) - anchor).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        # What becomes 0 keeps its sign.
        signed = (rounded | (scaled.to(tl.int32, bitcast=True) & -0x80000000)).to(tl.float32, bitcast=True)
        tl.store(y + row * columns + column, signed * scale, inside)


def _by_kernel(x: Tensor, fmt: NumberFormat, tile: tuple[int, int], key: int | None = None) -> Tensor:
    """`fake_quantize` by the kernel: x (R, C) with at least one element."""
    rows, columns = x.shape
    block_rows, block_columns, warps = _BLOCKS[tile]
    y = torch.empty(rows, columns, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(rows, block_rows) * triton.cdiv(columns, block_columns),)
    with torch.cuda.device_of(x):
        _kernel[grid](
            x,
            y,
            rows,
            columns,
            *x.stride(),
            _as_int64(key or 0),
            fmt.max,
            2.0**fmt.min_exponent,
            2.0**-fmt.mantissa_bits,
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
