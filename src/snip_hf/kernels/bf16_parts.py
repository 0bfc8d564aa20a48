"""FP32 matrices split into BF16 parts, high + low, joined for a product: one launch on a GPU (`estimation.products`).

Legend: B matrices of R rows and C columns.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .launching import launch
from .rounding import has_kernels

# Columns of one program at most.
_BLOCK = 1024


def bf16_parts(x: Tensor, dim: int, low: int) -> Tensor:
    """Returns the parts high, high and low, joined along one of the last two dimensions.

    Args:
        x: (R, C) or (B, R, C), FP32.
        dim: -1 or -2.
        low: index of the low part, 1 or 2; a transposed x keeps its memory layout.
    """
    if x.stride(-2) == 1 and x.stride(-1) != 1:
        return bf16_parts(x.mT, -3 - dim, low).mT
    shape = list(x.shape)
    shape[dim] *= 3
    joined = torch.empty(shape, dtype=torch.bfloat16, device=x.device)
    if x.numel() == 0 or not has_kernels(x.device):
        parts = joined.chunk(3, dim)
        parts[0].copy_(x)
        torch.sub(x, parts[0], out=parts[low])  # exact in FP32, then rounded
        parts[3 - low].copy_(parts[0])
        return joined
    rows, columns = x.shape[-2:]
    joined_row, part = (3 * columns, columns) if dim == -1 else (columns, rows * columns)
    block = min(_BLOCK, triton.next_power_of_2(columns))
    programs = x.shape[:-1].numel() * triton.cdiv(columns, block)
    strides = (x.stride(0) if x.dim() == 3 else 0, *x.stride()[-2:])
    launch(_parts_kernel, (programs,), (x, joined), (rows, columns, *strides, joined_row, part), (low, block))
    return joined


if TYPE_CHECKING or find_spec("triton") is not None:
    import triton
    import triton.language as tl

    @triton.jit
    def _parts_kernel(  # type: ignore[no-untyped-def]
        x,
        joined,
        rows,
        columns,
        x_matrix,
        x_row,
        x_column,
        joined_row,
        part,  # from one part to the next
        LOW: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        blocks = tl.cdiv(columns, BLOCK)
        row = (tl.program_id(0) // blocks).to(tl.int64)
        matrix = row // rows
        column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
        inside = column < columns
        row -= matrix * rows
        x += matrix * x_matrix + row * x_row
        joined += matrix * rows * columns * 3 + row * joined_row + column
        value = tl.load(x + column.to(tl.int64) * x_column, inside, other=0.0)
        high = value.to(tl.bfloat16)
        least = (value - high.to(tl.float32)).to(tl.bfloat16)
        tl.store(joined, high, inside)
        joined += part
        tl.store(joined, least if LOW == 1 else high, inside)
        joined += part
        tl.store(joined, high if LOW == 1 else least, inside)
