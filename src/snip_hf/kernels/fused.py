"""Which chains of small operations run as one kernel on a GPU? Rounding, and the sums of squares of a refresh.

Triton kernels on NVIDIA GPUs from compute capability 8.0 on, torch's operations anywhere else. `fake_quantize_tiles`
gives the numbers of `rounding.fake_quantize_tiles` bit for bit either way, in one launch instead of about twenty.

Legend: R pieces of a sample, O out_features, I in_features, E kinds of errors.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
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
# Elements of an (O, I) tensor that one program sums.
_BLOCK = 1024
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
) -> Tensor:
    """Returns what a GEMM in a format sees of x, (R, C), in FP32: quantized, times its scales; x itself unquantized.

    Autograd does not see into it.

    Args:
        x: (R, C).
        format: of the GEMM.
        operand: which of its operands x is (`gemms.OPERANDS`).
        contracts: the dimension of x that the GEMM contracts, 0 or 1.
        key: of the random numbers of operands that are rounded stochastically; others, or without one, are rounded to
            nearest.
        rank, ranks: as in `rounding.quantize_tiles`.
    """
    if format.grid is None:
        return x.to(torch.float32)
    rule = format.operand(operand)
    return fake_quantize_tiles(x, format.grid, rule.tile(contracts), key if rule.stochastic else None, rank, ranks)


def fake_quantize_tiles(
    x: Tensor, grid: ElementGrid, tile: tuple[int, int], key: int | None = None, rank: int = 0, ranks: int = 1
) -> Tensor:
    """As `rounding.fake_quantize_tiles`. The kernel takes tiles 1x128, 128x1 and 128x128."""
    is_taken = x.dim() == 2 and x.numel() > 0 and x.dtype in _DTYPES and tile in _BLOCKS
    if not is_taken or not _has_kernel(x.device):
        return rounding.fake_quantize_tiles(x, grid, tile, key, rank, ranks)
    return _by_kernel(x, grid, tile, key, rank, ranks)


def error_squares(first: Tensor, second: Tensor, errors: Tensor) -> Tensor:
    """Returns what squared errors do by way of each piece, and by way of all pieces together.

    Args:
        first: (R, O, I), FP32; used up.
        second: as first.
        errors: squared, (E, O, I).

    Returns: (E, 3, 2); for `first`, `second` and their sum p: sum of errors * (sum of p_r^2) and of errors *
    (sum of p_r)^2.
    """
    if _has_kernel(first.device):
        return _error_squares(first, second, errors)
    found = []
    for parts in (first, second, None):
        parts = first.add_(second) if parts is None else parts
        squares = _squares(parts), parts.sum(0).square_()
        found.append(torch.stack([(errors * square).sum((1, 2)) for square in squares], 1))
    return torch.stack(found, 1)


def scaled_squares(parts: Tensor, factors: Tensor) -> Tensor:
    """Returns sum of |factors * p_r|^2 and |factors * sum of p_r|^2, (2,).

    Args:
        parts: (R, O, I), FP32; used up.
        factors: (O, I).
    """
    if _has_kernel(parts.device):
        return _scaled_squares(parts, factors)
    return norms([parts.mul_(factors), parts.sum(0)]).square_()


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the Frobenius norms of FP32 tensors, one or more, (how many,)."""
    if tensors[0].is_cuda:
        return torch.stack(torch._foreach_norm(list(tensors)))
    # On a CPU torch's norms add up in FP32 one by one: those of 20 million numbers are 2 parts in 1,000 too small.
    return torch.stack([tensor.square().sum() for tensor in tensors]).sqrt_()


def _squares(parts: Tensor) -> Tensor:
    """Returns the sum over the first dimension of squares."""
    # On CUDA without a tensor of the squares; on a CPU a norm over the first dimension is several times slower.
    return torch.linalg.vector_norm(parts, dim=0).square_() if parts.is_cuda else parts.square().sum(0)


@cache
def _has_kernel(device: torch.device) -> bool:
    """Tells whether Triton's kernels run on a device, by a trial: they are compiled there, with a C compiler."""
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
        power = (scaled.to(tl.int32, bitcast=True) & _INFINITY).to(tl.float32, bitcast=True)
        power = tl.maximum(power, least_power)
        # Products with `power` and `spacing` are exact: both are powers of two.
        moved = scaled
        if RANDOM:
            # `random_streams.uniform`
            word = ((row >> 2) * columns + first + column).to(tl.uint32) ^ key.to(tl.uint32)
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

    @triton.jit
    def _error_squares_kernel(  # type: ignore[no-untyped-def]
        first,
        second,
        errors,
        sums,
        size,  # O * I
        errors_stride,
        PIECES: tl.constexpr,
        KINDS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        zero = tl.zeros([BLOCK], tl.float32)
        own_a, own_b, own_both, total_a, total_b = zero, zero, zero, zero, zero
        for _ in tl.static_range(PIECES):
            a = tl.load(first + at, inside, other=0.0)
            b = tl.load(second + at, inside, other=0.0)
            own_a += a * a
            own_b += b * b
            own_both += (a + b) * (a + b)
            total_a += a
            total_b += b
            first += size
            second += size
        total_both = (total_a + total_b) * (total_a + total_b)
        sums += tl.program_id(0) * (6 * KINDS)
        for _ in tl.static_range(KINDS):
            error = tl.load(errors + at, inside, other=0.0)
            tl.store(sums, tl.sum(own_a * error, 0))
            tl.store(sums + 1, tl.sum(total_a * total_a * error, 0))
            tl.store(sums + 2, tl.sum(own_b * error, 0))
            tl.store(sums + 3, tl.sum(total_b * total_b * error, 0))
            tl.store(sums + 4, tl.sum(own_both * error, 0))
            tl.store(sums + 5, tl.sum(total_both * error, 0))
            errors += errors_stride
            sums += 6

    @triton.jit
    def _scaled_squares_kernel(  # type: ignore[no-untyped-def]
        parts,
        factors,
        sums,
        size,  # O * I
        PIECES: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        factor = tl.load(factors + at, inside, other=0.0)
        own, total = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        for _ in tl.static_range(PIECES):
            scaled = tl.load(parts + at, inside, other=0.0) * factor
            own += scaled * scaled
            total += scaled
            parts += size
        sums += tl.program_id(0) * 2
        tl.store(sums, tl.sum(own, 0))
        tl.store(sums + 1, tl.sum(total * total, 0))


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


def _error_squares(first: Tensor, second: Tensor, errors: Tensor) -> Tensor:
    first, second, errors = first.contiguous(), second.contiguous(), errors.contiguous()
    pieces, *shape = first.shape
    size, kinds = shape[0] * shape[1], errors.shape[0]
    programs = triton.cdiv(size, _BLOCK)
    sums = first.new_empty(programs, kinds, 3, 2)
    with torch.cuda.device_of(first):
        _error_squares_kernel[(programs,)](
            first, second, errors, sums, size, errors.stride(0), pieces, kinds, _BLOCK, enable_fp_fusion=True
        )
    return sums.sum(0)


def _scaled_squares(parts: Tensor, factors: Tensor) -> Tensor:
    parts, factors = parts.contiguous(), factors.contiguous()
    size = factors.numel()
    programs = triton.cdiv(size, _BLOCK)
    sums = parts.new_empty(programs, 2)
    with torch.cuda.device_of(parts):
        _scaled_squares_kernel[(programs,)](parts, factors, sums, size, parts.shape[0], _BLOCK, enable_fp_fusion=True)
    return sums.sum(0)


def _as_int64(key: int) -> int:
    return key - 2**64 if key >= 2**63 else key
