"""The sums of squares of a refresh: one launch each on a GPU, torch's operations elsewhere.

Legend: T tokens, R pieces of a sample, O out_features, I in_features, E kinds of errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .launching import launch
from .rounding import has_kernels

# Elements of an (O, I) tensor that one program sums.
_BLOCK = 1024


def error_squares(first: Tensor, second: Tensor, errors: Tensor) -> Tensor:
    """Returns the sums of squared errors weighted by each piece, and by all pieces together.

    Args:
        first: (R, O, I), FP32, or BF16 if `has_kernels`; used up.
        second: as first.
        errors: squared, (E, O, I).

    Returns: (E, 3, 2); for `first`, `second` and their sum p: sum of errors * (sum of p_r^2) and of errors *
    (sum of p_r)^2.
    """
    if not has_kernels(first.device):
        found = []
        for parts in (first, second, None):
            parts = first.add_(second) if parts is None else parts
            squares = _squares(parts), parts.sum(0).square_()
            found.append(torch.stack([(errors * square).sum((1, 2)) for square in squares], 1))
        return torch.stack(found, 1)
    first, second = first.contiguous(), second.contiguous()
    # Some outputs of a larger tensor are not copied.
    errors = errors if errors[0].is_contiguous() else errors.contiguous()
    size, kinds = first[0].numel(), errors.shape[0]
    programs = triton.cdiv(size, _BLOCK)
    sums = errors.new_empty(programs, kinds, 3, 2)
    tensors, numbers, constants = (first, second, errors, sums), (size, errors.stride(0)), (len(first), kinds, _BLOCK)
    launch(_error_squares_kernel, (programs,), tensors, numbers, constants, enable_fp_fusion=True)
    return sums.sum(0)


def scaled_squares(parts: Tensor, factors: Tensor) -> Tensor:
    """Returns sum of |factors * p_r|^2 and |factors * sum of p_r|^2, (2,).

    Args:
        parts: (R, O, I), FP32, or BF16 if `has_kernels`; used up.
        factors: (O, I).
    """
    if not has_kernels(parts.device):
        return norms([parts.mul_(factors), parts.sum(0)]).square_()
    size = factors.numel()
    programs = triton.cdiv(size, _BLOCK)
    sums = factors.new_empty(programs, 2)
    tensors, constants = (parts.contiguous(), factors.contiguous(), sums), (parts.shape[0], _BLOCK)
    launch(_scaled_squares_kernel, (programs,), tensors, (size,), constants, enable_fp_fusion=True)
    return sums.sum(0)


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the Frobenius norm of each FP32 tensor, (tensors,)."""
    if tensors[0].is_cuda:
        return torch.stack(torch._foreach_norm(list(tensors)))
    # On a CPU torch's norms add FP32 numbers one by one: those of 20 million numbers are 2 parts in 1,000 too small.
    return torch.stack([tensor.square().sum() for tensor in tensors]).sqrt_()


def row_squares(x: Tensor) -> Tensor:
    """Returns the sum of squares of each row of x (R, C), in FP32, (R,)."""
    if x.is_cuda:  # without a tensor of the squares
        norms_of_rows: Tensor = torch.linalg.vector_norm(x, dim=1, dtype=torch.float32)
        return norms_of_rows.square_()
    return x.to(torch.float32).square().sum(1)


def row_figures(x: Tensor) -> Tensor:
    """Returns the sum of squares and the largest magnitude of each row of x (T, C), (T, 2); only if `has_kernels`.

    Args:
        x: not empty, FP32.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    figures = x.new_empty(x.shape[0], 2)
    numbers = (x.shape[1], x.stride(0))
    launch(_row_figures_kernel, (x.shape[0],), (x, figures), numbers, (_BLOCK,), enable_fp_fusion=True)
    return figures


def token_figures(of_x: Tensor, grad_output: Tensor, is_kept: Tensor) -> Tensor:
    """Returns for each token its energy |X_t|^2 |G_t|^2, that energy if it is kept, and its amaxes of X and G, (T, 4).

    Only if `has_kernels`.

    Args:
        of_x: `row_figures` of X, (T, 2).
        grad_output: (T, O), not empty, FP32.
        is_kept: (T,), bool.
    """
    grad_output = grad_output if grad_output.stride(1) == 1 else grad_output.contiguous()
    figures = grad_output.new_empty(grad_output.shape[0], 4)
    tensors, numbers = (of_x, grad_output, is_kept, figures), (grad_output.shape[1], grad_output.stride(0))
    launch(_token_figures_kernel, (len(figures),), tensors, numbers, (_BLOCK,), enable_fp_fusion=True)
    return figures


def _squares(parts: Tensor) -> Tensor:
    """Returns the sum over the first dimension of squares."""
    # On CUDA without a tensor of the squares; on a CPU a norm over the first dimension is several times slower.
    return torch.linalg.vector_norm(parts, dim=0).square_() if parts.is_cuda else parts.square().sum(0)


if TYPE_CHECKING or find_spec("triton") is not None:
    import triton
    import triton.language as tl

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
            a = tl.load(first + at, inside, other=0.0).to(tl.float32)
            b = tl.load(second + at, inside, other=0.0).to(tl.float32)
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
            scaled = tl.load(parts + at, inside, other=0.0).to(tl.float32) * factor
            own += scaled * scaled
            total += scaled
            parts += size
        sums += tl.program_id(0) * 2
        tl.store(sums, tl.sum(own, 0))
        tl.store(sums + 1, tl.sum(total * total, 0))

    @triton.jit
    def _of_row(row, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        squares, largest = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        for start in range(0, columns, BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(row + at, at < columns, other=0.0)
            squares += value * value
            largest = tl.maximum(largest, tl.abs(value))
        square = tl.sum(squares, 0)
        return square, tl.where(square == square, tl.max(largest, 0), square)  # NaN of NaN

    @triton.jit
    def _row_figures_kernel(x, figures, columns, x_row, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0).to(tl.int64)
        square, largest = _of_row(x + row * x_row, columns, BLOCK)
        tl.store(figures + row * 2, square)
        tl.store(figures + row * 2 + 1, largest)

    @triton.jit
    def _token_figures_kernel(  # type: ignore[no-untyped-def]
        of_x, grad_output, is_kept, figures, outputs, grad_output_row, BLOCK: tl.constexpr
    ):
        token = tl.program_id(0).to(tl.int64)
        of_g, largest_g = _of_row(grad_output + token * grad_output_row, outputs, BLOCK)
        figures += token * 4
        energy = tl.load(of_x + token * 2) * of_g
        tl.store(figures, energy)
        tl.store(figures + 1, tl.where(tl.load(is_kept + token) != 0, energy, 0.0))
        tl.store(figures + 2, tl.load(of_x + token * 2 + 1))
        tl.store(figures + 3, largest_g)
