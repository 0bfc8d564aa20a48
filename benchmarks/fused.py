"""How can small models take thousands of quantized steps on a GPU? One Triton kernel per quantized operand.

The same function as `snip_hf.quantize.fake_quantize`, bit for bit on finite tensors, in one launch instead of about
twenty. Only for the option `--fused`; infinities and NaN stay in their elements instead of spreading over the tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from snip_hf import quantize
from snip_hf.formats import FORMATS, NumberFormat
from snip_hf.kernels import emulated


@triton.jit(do_not_specialize=["low", "high"])
def _kernel(
    x,
    y,
    rows,
    columns,
    x_row,
    x_column,
    low,
    high,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    AXIS: tl.constexpr,  # of the sums over a tile: 1 row tiles, 0 column tiles, -1 the whole block
    LARGEST: tl.constexpr,
    MANTISSA: tl.constexpr,  # 2**mantissa bits
    MIN_POWER: tl.constexpr,
    RANDOM: tl.constexpr,
):
    row = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    column = (tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS))[None, :]
    inside = (row < rows) & (column < columns)
    value = tl.load(x + row * x_row + column * x_column, inside, other=0.0).to(tl.float32)
    magnitude = tl.abs(value)
    amax = tl.max(tl.max(magnitude, 1), 0) if AXIS == -1 else tl.expand_dims(tl.max(magnitude, AXIS), AXIS)
    scale = tl.maximum(tl.div_rn(amax, amax * 0 + LARGEST), 1.1754943508222875e-38)
    scaled = value * tl.div_rn(scale * 0 + 1.0, scale)
    power = (scaled.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    spacing = tl.maximum(power, MIN_POWER) / MANTISSA
    steps = tl.div_rn(scaled, spacing)
    if RANDOM:
        # `snip_hf.quantize.uniform` at position row * columns + column
        bits = (row * columns + column).to(tl.uint32) ^ low.to(tl.uint32)
        bits = (bits ^ (bits >> 16)) * 0x7FEB352D
        bits = bits + high.to(tl.uint32)
        bits = (bits ^ (bits >> 15)) * 0x846CA68B
        bits = bits ^ (bits >> 16)
        uniform = (bits >> 8).to(tl.float32) * 5.9604644775390625e-08
        whole = tl.floor(tl.abs(steps))
        whole += (uniform < tl.abs(steps) - whole).to(tl.float32)
        rounded = tl.where(steps < 0, -whole, whole)
    else:
        # To nearest, ties to even, by the loss of low bits; |steps| is at most 2**(mantissa bits + 1).
        rounded = (steps + 12582912.0) - 12582912.0
    rounded = tl.minimum(tl.maximum(rounded * spacing, -LARGEST), LARGEST)
    tl.store(y + row * columns + column, rounded * scale, inside)


def fake_quantize(x: Tensor, fmt: NumberFormat | None, tile: tuple[int, int], key: int | None = None) -> Tensor:
    """As `snip_hf.quantize.fake_quantize`, for tiles 1x128, 128x1 and 128x128 of tensors on a GPU."""
    if fmt is None or x.numel() == 0:
        return x.to(torch.float32)
    rows, columns = x.shape
    block_rows, block_columns = (size if size > 1 else 16 for size in tile)
    axis = {quantize.ROW_TILE: 1, quantize.COLUMN_TILE: 0, quantize.SQUARE_TILE: -1}[tile]
    y = torch.empty(rows, columns, dtype=torch.float32, device=x.device)
    _kernel[(triton.cdiv(rows, block_rows), triton.cdiv(columns, block_columns))](
        x,
        y,
        rows,
        columns,
        *x.stride(),
        quantize._signed((key or 0) & 0xFFFFFFFF),
        quantize._signed((key or 0) >> 32),
        block_rows,
        block_columns,
        axis,
        fmt.max,
        2.0**fmt.mantissa_bits,
        2.0**fmt.min_exponent,
        key is not None,
        num_warps=16 if axis == -1 else 4,
    )
    return y


def install(device: str) -> None:
    """Puts the fused kernel in the place of the GEMMs' quantization, after comparing it with the original.

    Raises:
        AssertionError: the two differ in more than one of a thousand elements.
    """
    generator = torch.Generator(device).manual_seed(0)
    for shape in ((256, 384), (128, 64)):
        x = torch.randn(shape, generator=generator, device=device)
        x *= torch.randn(shape, generator=generator, device=device).mul_(3).exp_()
        x[:, 3], x[5] = 0, 0
        for name in ("fp8", "fp4"):
            for tile in (quantize.ROW_TILE, quantize.COLUMN_TILE, quantize.SQUARE_TILE):
                for key in (None, 0x9E3779B97F4A7C15):
                    expected = quantize.fake_quantize(x, FORMATS[name], tile, key)
                    different = (fake_quantize(x, FORMATS[name], tile, key) != expected).float().mean().item()
                    assert different <= 1e-3, f"{name}, tile {tile}, key {key}, {shape}: {different:.2%} differ"
    emulated.fake_quantize = fake_quantize
