"""Rounding errors of an operand and their sums: one launch each on a GPU, torch's operations elsewhere.

Legend: O out_features, I in_features of a weight; n tokens in R pieces of L, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .launching import launch
from .rounding import has_kernels
from .sums import norms

# Elements of one program.
_BLOCK = 1024
# Rows and columns of a program of `_error_products_kernel`.
_ROWS, _COLUMNS = 32, 64


class ErrorProducts(NamedTuple):
    """The errors of an operand, and sums of their products with the other operand."""

    error: Tensor
    """(n, C), FP32, or BF16 if from `error_products`."""
    sums: list[Tensor]
    """Numbers that `Sizes.of_tokens` squares: all products, or numbers with their norm; sums over channels, (n,); over
    the tokens of a piece, (R, C); over all tokens, (C,)."""

    def in_channel(self) -> Tensor | None:
        """Returns the squares of the last figure minus those of all products, (), if the kernel computed them."""
        if self.error.dtype != torch.bfloat16:
            return None
        return self.sums[-1].square().sum() - self.sums[0].square().sum()


class WeightErrors(NamedTuple):
    """The results of `weight_errors` besides the squares."""

    sums: Tensor
    """(1,) or (2,): of the squared errors of each."""
    first: Tensor | None
    """The first error in BF16, (O, I), if `has_kernels`; else None."""


def weight_errors(weight: Tensor, rounded: Sequence[Tensor], out: Tensor) -> WeightErrors:
    """Writes the squared error of a weight that is rounded once, or both squares and the product of two errors.

    Args:
        weight: (O, I), FP32.
        rounded: one or two of its kind.
        out: (1, O, I) or (3, O, I), contiguous; is written.
    """
    size, count = weight.numel(), len(rounded)
    if size == 0 or not has_kernels(weight.device):
        for error, one in zip(out, rounded, strict=False):
            torch.sub(one, weight, out=error)
        if count > 1:
            torch.mul(out[0], out[1], out=out[2])
        return WeightErrors(torch.stack([error.square_().sum() for error in out[:count]]), None)
    narrow = torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.device)
    programs = triton.cdiv(size, _BLOCK)
    sums = weight.new_empty(programs, count)
    tensors = (weight.contiguous(), rounded[0].contiguous(), rounded[-1].contiguous(), out, narrow, sums)
    launch(_weight_errors_kernel, (programs,), tensors, (size,), (count > 1, _BLOCK), enable_fp_fusion=False)
    return WeightErrors(sums.sum(0), narrow)


def error_norms(x: Tensor, rounded: Sequence[Tensor]) -> Tensor:
    """Returns the norms of the errors of x, FP32, in two roundings, (2,)."""
    size = x.numel()
    if size == 0 or not has_kernels(x.device):
        return norms(torch._foreach_sub(list(rounded), [x, x]))
    programs = triton.cdiv(size, _BLOCK)
    sums = x.new_empty(programs, 2)
    tensors = (x.contiguous(), *(one.contiguous() for one in rounded), sums)
    launch(_error_norms_kernel, (programs,), tensors, (size,), (_BLOCK,), enable_fp_fusion=True)
    return sums.sum(0).sqrt_()


def joined_errors(x: Tensor, rounded: Tensor, pieces: int, is_first: bool) -> Tensor:
    """Returns x and its errors, one piece after the other, as BF16, (R, 2 L, C).

    Args:
        x: (n, C), FP32; n is a multiple of the pieces.
        rounded: as x.
        pieces: R.
        is_first: True: the errors, then x; False: the rounded x, then the errors.
    """
    size = x.numel()
    if size == 0 or not has_kernels(x.device):
        parts = (rounded - x, x) if is_first else (rounded, rounded - x)
        return torch.cat([part.bfloat16().unflatten(0, (pieces, -1)) for part in parts], 1)
    joined = torch.empty(pieces, 2 * (len(x) // pieces), x.shape[1], dtype=torch.bfloat16, device=x.device)
    tensors, numbers = (x.contiguous(), rounded.contiguous(), joined), (size, size // pieces)
    programs = (triton.cdiv(size, _BLOCK),)
    launch(_joined_errors_kernel, programs, tensors, numbers, (is_first, _BLOCK), enable_fp_fusion=False)
    return joined


def rises_of_tokens(along: Tensor, slopes: Tensor, x: Tensor, rounded: Tensor) -> Tensor:
    """Returns the sum over channels of along * rounded + slopes * (rounded - x), (n,).

    Args:
        along: (n, C), FP32; used up.
        slopes: as along.
        x: as along.
        rounded: as along.
    """
    if x.numel() == 0 or not has_kernels(x.device):
        return along.mul_(rounded).addcmul_(slopes, rounded - x).sum(1)
    rises = x.new_empty(len(x))
    tensors = (*(one.contiguous() for one in (along, slopes, x, rounded)), rises)
    launch(_rises_kernel, (len(x),), tensors, (x.shape[1],), (_BLOCK,), enable_fp_fusion=True)
    return rises


def has_error_products(x: Tensor, pieces: int) -> bool:
    """Returns True if `error_products` takes x: on a GPU, with equal pieces."""
    return x.numel() > 0 and len(x) % pieces == 0 and has_kernels(x.device)


def error_products(x: Tensor, rounded: Tensor, factors: Tensor, pieces: int) -> ErrorProducts:
    """Returns the errors of x and sums of their products with `factors`.

    Args:
        x: (n, C), FP32; `has_error_products` must return True for it.
        rounded: as x.
        factors: as x.
        pieces: R.
    """
    (tokens, columns), parts = x.shape, triton.cdiv(x.shape[1], _COLUMNS)
    error = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    roots, rows, channels = x.new_empty(pieces, parts), x.new_empty(tokens, parts), x.new_empty(pieces, columns)
    tensors = (x.contiguous(), rounded.contiguous(), factors.contiguous(), error, roots, rows, channels)
    numbers, constants = (tokens // pieces, columns), (_ROWS, _COLUMNS)
    launch(_error_products_kernel, (pieces, parts), tensors, numbers, constants, enable_fp_fusion=True)
    return ErrorProducts(error, [roots, rows.sum(1), channels, channels.sum(0)])


if TYPE_CHECKING or find_spec("triton") is not None:
    import triton
    import triton.language as tl

    @triton.jit
    def _weight_errors_kernel(  # type: ignore[no-untyped-def]
        weight, first, second, found, narrow, sums, size, IS_TWO: tl.constexpr, BLOCK: tl.constexpr
    ):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        exact = tl.load(weight + at, inside, other=0.0)
        error = tl.load(first + at, inside, other=0.0) - exact
        tl.store(narrow + at, error.to(tl.bfloat16), inside)
        square = error * error
        tl.store(found + at, square, inside)
        sums += tl.program_id(0) * (1 + IS_TWO)
        tl.store(sums, tl.sum(square, 0))
        if IS_TWO:
            other = tl.load(second + at, inside, other=0.0) - exact
            square = other * other
            tl.store(found + size + at, square, inside)
            tl.store(found + size + size + at, error * other, inside)
            tl.store(sums + 1, tl.sum(square, 0))

    @triton.jit
    def _error_norms_kernel(x, first, second, sums, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        exact = tl.load(x + at, inside, other=0.0)
        error = tl.load(first + at, inside, other=0.0) - exact
        other = tl.load(second + at, inside, other=0.0) - exact
        sums += tl.program_id(0) * 2
        tl.store(sums, tl.sum(error * error, 0))
        tl.store(sums + 1, tl.sum(other * other, 0))

    @triton.jit
    def _joined_errors_kernel(  # type: ignore[no-untyped-def]
        x,
        rounded,
        joined,
        size,
        part,  # L * C
        IS_FIRST: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        exact, value = tl.load(x + at, inside, other=0.0), tl.load(rounded + at, inside, other=0.0)
        error = value - exact
        joined += at + at // part * part  # after both parts of each earlier piece
        tl.store(joined, (error if IS_FIRST else value).to(tl.bfloat16), inside)
        tl.store(joined + part, (exact if IS_FIRST else error).to(tl.bfloat16), inside)

    @triton.jit
    def _rises_kernel(along, slopes, x, rounded, rises, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        token = tl.program_id(0).to(tl.int64)
        rise = tl.zeros([BLOCK], tl.float32)
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            at, inside = token * columns + column, column < columns
            value = tl.load(rounded + at, inside, other=0.0)
            error = value - tl.load(x + at, inside, other=0.0)
            rise += tl.load(along + at, inside, other=0.0) * value + tl.load(slopes + at, inside, other=0.0) * error
        tl.store(rises + token, tl.sum(rise, 0))

    @triton.jit
    def _error_products_kernel(  # type: ignore[no-untyped-def]
        x,
        rounded,
        factors,
        error,  # BF16
        roots,  # of sums of squares, by program
        rows,  # (n, programs along the channels)
        channels,  # (R, C)
        length,  # L
        columns,  # C
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
    ):
        piece, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
        column = part * COLUMNS + tl.arange(0, COLUMNS)
        squares, of_channels = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([COLUMNS], tl.float32)
        for start in range(0, length, ROWS):
            row = start + tl.arange(0, ROWS)
            inside = (row[:, None] < length) & (column[None, :] < columns)
            at = (piece * length + row[:, None]) * columns + column[None, :]
            difference = tl.load(rounded + at, inside, other=0.0) - tl.load(x + at, inside, other=0.0)
            tl.store(error + at, difference.to(tl.bfloat16), inside)
            product = difference * tl.load(factors + at, inside, other=0.0)
            squares += product * product
            of_channels += tl.sum(product, 0)
            tl.store(rows + (piece * length + row) * tl.num_programs(1) + part, tl.sum(product, 1), row < length)
        tl.store(channels + piece * columns + column, of_channels, column < columns)
        tl.store(roots + piece * tl.num_programs(1) + part, tl.sqrt_rn(tl.sum(tl.sum(squares, 1), 0)))
