"""A layer of several matrices of folded operands: what is quantized when, and what is kept for backward.

Legend: S tokens, sorted by matrix, E matrices, I in_features, O out_features, P places (`places`); x (S, I), weight as
the model stores it, (E, O, I), or transposed (E, I, O). Numerics are those of `kernels.grouped` inside the range of
`folding`, but that a bias is added to the product rounded to BF16, as torch's grouped product gives nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..products import refuse_double_backward
from ..tensor_core import Quantized
from .grouped_operators import BY_COLUMNS, BY_ROWS, OVER_TOKENS, fold_grouped, multiply_grouped
from .places import Places

_ACTIVATION, _GRADIENT, _WEIGHT = range(3)  # as in `gemms.OPERANDS`


class How(NamedTuple):
    """What Python knows of a pass: changing it triggers recompilation."""

    high: tuple[bool, bool, bool]
    """For each GEMM, whether it runs in BF16."""
    keeps_x: bool
    """Whether the backward pass will compute the weight's gradient."""
    counts: bool
    """Whether the record takes note of the pass."""
    is_transposed: bool
    """Whether the weight is (E, I, O)."""


def quantize_matrices(weight: Tensor, layer: Sequence[Tensor], uses: tuple[bool, bool], transposed: bool) -> Quantized:
    """Returns a weight folded for the forward and for the grad_input GEMM, if these are to be used.

    Args:
        weight: (E, O, I), or (E, I, O) if `transposed`.
        layer: its state, record and table.
        uses: whether the forward and the grad_input GEMM read it.
        transposed: its rows are then those of grad_input, which contracts O, and its columns those of forward.
    """
    stored = weight.detach().reshape(-1, weight.shape[2])
    rows, scales, columns, column_scales = fold_grouped(
        stored, None, layer, _WEIGHT, weight.shape[0], weight_gemms(uses, transposed), True
    )
    return (columns, column_scales, rows, scales) if transposed else (rows, scales, columns, column_scales)


def weight_gemms(uses: tuple[bool, bool], transposed: bool) -> list[int]:
    """Returns the GEMMs that read the rows and the columns of a stored weight, -1 where it is not to be used."""
    gemms = [gemm if used else -1 for gemm, used in enumerate(uses)]
    return gemms[::-1] if transposed else gemms


class GroupedTensorScaledGemms(torch.autograd.Function):
    """Y = X W[e]^T + b[e] of E4M3 operands. Of X, what is saved for backward is quantized, one byte per element.

    Args of forward:
        x: (S, I), BF16, sorted by matrix.
        weight: the parameter itself as (E, O, I) or (E, I, O), FP32 or BF16.
        bias: (E, O), BF16, or None.
        state, record, table: the layer's.
        how: see `How`.
        given: the five tensors of `Places`; then the weight as `quantize_matrices` gives it, if it is kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor,
        record: Tensor,
        table: Tensor,
        how: How,
        *given: Tensor,
    ) -> Tensor:
        places, weights, layer = Places(*given[:5]), given[5:], [state, record, table]
        high, transposed = how.high, how.is_transposed
        gemms = [-1 if high[0] else 0, 2 if how.keeps_x and not high[2] else -1]
        folded = fold_grouped(x, places.blocks, layer, _ACTIVATION, weight.shape[0], gemms, how.counts)
        if high[0]:
            y = _in_bf16(x, weight if transposed else weight.transpose(1, 2), places)
        else:
            right = weights[:2] or quantize_matrices(weight, layer, (True, False), transposed)[:2]
            kind = BY_COLUMNS if transposed else BY_ROWS
            y = multiply_grouped("forward", folded[:2], right, places.padded_ends, kind, record)[places.place]
        if bias is not None:
            y = y + bias[places.matrix.clamp(max=weight.shape[0] - 1)]
        # As in `linear.TensorScaledGemms`.
        kept_state = state if torch.compiler.is_compiling() else state.clone()
        kept_x = x if how.keeps_x and high[2] else None
        ctx.save_for_backward(kept_x, weight, kept_state, record, table, *places, *folded[2:], *weights[2:])
        ctx.how = how
        return _of_matrices(y, places, weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_double_backward()
        x, weight, state, record, table, *kept = ctx.saved_tensors
        places, x_columns, by_input = Places(*kept[:5]), kept[5:7], kept[7:]
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        (_, high_input, high_weight), _, counts, transposed = ctx.how
        matrices, ends, layer = weight.shape[0], places.padded_ends, [state, record, table]
        gemms = [1 if needs_x and not high_input else -1, 2 if needs_weight and not high_weight else -1]
        folded = fold_grouped(grad_output, places.blocks, layer, _GRADIENT, matrices, gemms, counts)
        grad_x = grad_weight = None
        if needs_x and high_input:
            grad_x = _in_bf16(grad_output, weight.transpose(1, 2) if transposed else weight, places)
        elif needs_x:
            right = by_input or quantize_matrices(weight, layer, (False, True), transposed)[2:]
            kind = BY_ROWS if transposed else BY_COLUMNS
            grad_x = multiply_grouped("grad_input", folded[:2], right, ends, kind, record)[places.place]
        if needs_weight and high_weight:
            first, second = (x, grad_output) if transposed else (grad_output, x)
            grad_weight = torch.nn.functional.grouped_mm(first.t(), second, offs=places.ends)
        elif needs_weight:
            left, right = (x_columns, folded[2:]) if transposed else (folded[2:], x_columns)
            grad_weight = multiply_grouped("grad_weight", left, right, ends, OVER_TOKENS, record)
        return (
            None if grad_x is None else _of_matrices(grad_x, places, matrices),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            _sums(grad_output, places, matrices) if needs_bias else None,
            *[None] * (len(ctx.needs_input_grad) - 3),
        )


def _in_bf16(x: Tensor, right: Tensor, places: Places) -> Tensor:
    """Returns x @ right[e] for the tokens of each matrix, by torch's grouped product; right (E, K, N)."""
    return torch.nn.functional.grouped_mm(x, right.to(x.dtype), offs=places.ends)


def _of_matrices(y: Tensor, places: Places, matrices: int) -> Tensor:
    """Returns y (S, *) with zeros for the tokens that belong to no matrix."""
    return torch.where((places.matrix < matrices)[:, None], y, 0)


def _sums(grad_output: Tensor, places: Places, matrices: int) -> Tensor:
    """Returns the sums over the tokens of each matrix, (E, O): by a product, whose order of sums is the same always."""
    own = torch.arange(matrices, device=places.matrix.device)[:, None] == places.matrix
    return own.to(grad_output.dtype) @ grad_output
