"""The emulated GEMMs of layers of several matrices, as custom operators: each matrix multiplies its own tokens.

Legend: S tokens of all matrices, E matrices, I in_features, O out_features; x (S, I), weight (E, O, I), grad_output
(S, O). Tokens are sorted by matrix: those of matrix e are rows ends[e - 1] ... ends[e] - 1; rows behind the last end
belong to none, and their results are zero. A matrix may have no tokens. `state` is the layer's (`emulated.py`).

Each matrix gives bit for bit what the operators of `emulated.py` give for it and its tokens alone: blocks begin anew
at its first token, scales of whole tensors are its own, and so is the key of its random numbers
(`random_streams.matrix_keys`). The loop over matrices is inside the operators, which wait for the device once.

Matrices may be in groups of formats of their own. `state` then has a row for each group of equally many matrices, and
each group gives what a layer of these matrices alone gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..numerics.formats import UNQUANTIZED, NumberFormat, format_of_code
from ..numerics.gemms import GEMMS, gemm_of
from ..numerics.random_streams import matrix_keys
from .products import STATE_SIZE, fits_bf16, is_differentiated_again, multiply
from .rounding import fake_quantize

# As in `emulated.py`: the operators read numbers on the host.
_TAGS = (torch.Tag.cudagraph_unsafe,)


class _Part(NamedTuple):
    """One matrix that has tokens."""

    matrix: int
    rows: slice
    """Its tokens."""
    stream: tuple[int, int, int]
    """Key, rank and ranks of its random numbers."""


class _Group(NamedTuple):
    """Matrices with a state of their own, as a layer of these alone."""

    matrices: slice
    rows: slice
    """Their tokens."""
    ends: Tensor
    """Matrix -> where its rows end among these; on the host, as the state is."""
    state: Tensor


@torch.library.custom_op("snip_hf::grouped_forward_gemm", mutates_args=(), tags=_TAGS)
def grouped_forward_gemm(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, state: Tensor) -> Tensor:
    """Returns x @ weight[e]^T + bias[e] for the tokens of each matrix e, (S, O), in x's dtype; bias is (E, O)."""
    if state.dim() == 1:
        return _forward(x, weight, bias, ends, state)
    y = x.new_zeros(x.shape[0], weight.shape[1])
    for matrices, rows, own_ends, own_state in _groups(state, ends):
        own_bias = None if bias is None else bias[matrices]
        y[rows] = _forward(x[rows], weight[matrices], own_bias, own_ends, own_state)
    return y


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, state: Tensor) -> Tensor:
    format, parts = _read(state, ends, "forward")
    y = x.new_zeros(x.shape[0], weight.shape[1])
    if not format.is_quantized:
        for part in parts:
            own_bias = None if bias is None else bias[part.matrix]
            y[part.rows] = torch.nn.functional.linear(x[part.rows], weight[part.matrix], own_bias)
        return y
    lefts = _round_tokens(x, parts, format, "activation", 1)
    rights = _round_matrices(weight, parts, format, 1)
    for part, left, right in zip(parts, lefts, rights, strict=True):
        # (T, I) x (I, O): contracts I
        y_fp32 = multiply(left, right.t(), x.dtype, fits_bf16(format, "forward"))
        if bias is not None:
            y_fp32 += bias[part.matrix].to(torch.float32)
        y[part.rows] = y_fp32.to(x.dtype)
    return y


@torch.library.custom_op("snip_hf::grouped_grad_input_gemm", mutates_args=(), tags=_TAGS)
def grouped_grad_input_gemm(grad_output: Tensor, weight: Tensor, ends: Tensor, state: Tensor) -> Tensor:
    """Returns grad_output @ weight[e] for the tokens of each matrix e, (S, I), in grad_output's dtype."""
    if state.dim() == 1:
        return _grad_input(grad_output, weight, ends, state)
    grad_input = grad_output.new_zeros(grad_output.shape[0], weight.shape[2])
    for matrices, rows, own_ends, own_state in _groups(state, ends):
        grad_input[rows] = _grad_input(grad_output[rows], weight[matrices], own_ends, own_state)
    return grad_input


def _grad_input(grad_output: Tensor, weight: Tensor, ends: Tensor, state: Tensor) -> Tensor:
    format, parts = _read(state, ends, "grad_input")
    grad_input = grad_output.new_zeros(grad_output.shape[0], weight.shape[2])
    if not format.is_quantized:
        for part in parts:
            grad_input[part.rows] = grad_output[part.rows].mm(weight[part.matrix])
        return grad_input
    lefts = _round_tokens(grad_output, parts, format, "gradient", 1)
    rights = _round_matrices(weight, parts, format, 0)
    for part, left, right in zip(parts, lefts, rights, strict=True):
        # (T, O) x (O, I): contracts O
        product = multiply(left, right, grad_output.dtype, fits_bf16(format, "grad_input"))
        grad_input[part.rows] = product.to(grad_output.dtype)
    return grad_input


@torch.library.custom_op("snip_hf::grouped_grad_weight_gemm", mutates_args=(), tags=_TAGS)
def grouped_grad_weight_gemm(grad_output: Tensor, x: Tensor, ends: Tensor, state: Tensor, transposed: bool) -> Tensor:
    """Returns grad_output^T @ x of the tokens of each matrix, (E, O, I), in grad_output's dtype; zeros without tokens.

    `transposed`: in memory as (E, I, O).
    """
    grad_weight = _empty_weight(grad_output, x, ends, transposed).zero_()
    if state.dim() == 1:
        return _grad_weight(grad_output, x, ends, state, grad_weight)
    for matrices, rows, own_ends, own_state in _groups(state, ends):
        _grad_weight(grad_output[rows], x[rows], own_ends, own_state, grad_weight[matrices])
    return grad_weight


def _grad_weight(grad_output: Tensor, x: Tensor, ends: Tensor, state: Tensor, grad_weight: Tensor) -> Tensor:
    """Writes the gradients of the matrices that have tokens into `grad_weight`, and returns it."""
    format, parts = _read(state, ends, "grad_weight")
    if not format.is_quantized:
        for part in parts:
            grad_weight[part.matrix] = grad_output[part.rows].t().mm(x[part.rows])
        return grad_weight
    lefts = _round_tokens(grad_output, parts, format, "gradient", 0)
    rights = _round_tokens(x, parts, format, "activation", 0)
    for part, left, right in zip(parts, lefts, rights, strict=True):
        # (O, T) x (T, I): contracts T
        grad_weight[part.matrix] = multiply(left.t(), right, grad_output.dtype, fits_bf16(format, "grad_weight"))
    return grad_weight


@torch.library.custom_op("snip_hf::grouped_bias_gradient", mutates_args=(), tags=_TAGS)
def grouped_bias_gradient(grad_output: Tensor, ends: Tensor) -> Tensor:
    """Returns the sum of grad_output over the tokens of each matrix, (E, O)."""
    sums = grad_output.new_zeros(ends.shape[0], grad_output.shape[1])
    for matrix, rows in _rows(ends.tolist()):
        sums[matrix] = grad_output[rows].sum(0)
    return sums


@grouped_forward_gemm.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, state: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@grouped_grad_input_gemm.register_fake
def _(grad_output: Tensor, weight: Tensor, ends: Tensor, state: Tensor) -> Tensor:
    return grad_output.new_empty(grad_output.shape[0], weight.shape[2])


@grouped_grad_weight_gemm.register_fake
def _(grad_output: Tensor, x: Tensor, ends: Tensor, state: Tensor, transposed: bool) -> Tensor:
    return _empty_weight(grad_output, x, ends, transposed)


@grouped_bias_gradient.register_fake
def _(grad_output: Tensor, ends: Tensor) -> Tensor:
    return grad_output.new_empty(ends.shape[0], grad_output.shape[1])


def _empty_weight(grad_output: Tensor, x: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    matrices, out_features, in_features = ends.shape[0], grad_output.shape[1], x.shape[1]
    if transposed:
        return grad_output.new_empty(matrices, in_features, out_features).transpose(1, 2)
    return grad_output.new_empty(matrices, out_features, in_features)


def _on_host(state: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Returns copies of both in the host's memory, read in one go."""
    own_state, own_ends = torch.cat([state.flatten(), ends]).to("cpu", copy=True).split([state.numel(), len(ends)])
    return own_state.view(state.shape), own_ends


def _groups(state: Tensor, ends: Tensor) -> list[_Group]:
    """Returns the groups that `state` (G, 6) has rows for; reads both tensors in one go."""
    states, ends = _on_host(state, ends)
    size, starts = len(ends) // len(state), [0, *ends.tolist()]
    found = []
    for index, own_state in enumerate(states):
        matrices = slice(index * size, (index + 1) * size)
        rows = slice(starts[matrices.start], starts[matrices.stop])
        found.append(_Group(matrices, rows, ends[matrices] - rows.start, own_state))
    return found


def _read(state: Tensor, ends: Tensor, gemm: str) -> tuple[NumberFormat, list[_Part]]:
    """Returns the format of `gemm`, and the matrices that have tokens; reads both tensors in one go."""
    numbers = torch.cat([state, ends]).tolist()
    *codes, key, rank, ranks = numbers[: len(state)]
    keys = matrix_keys(key % 2**64, len(ends))
    rows = _rows(numbers[len(state) :])
    return format_of_code(codes[GEMMS.index(gemm)]), [_Part(e, own, (keys[e], rank, ranks)) for e, own in rows]


def _rows(ends: Sequence[int]) -> list[tuple[int, slice]]:
    """Returns (matrix, its rows) for every matrix that has tokens."""
    starts = [0, *ends[:-1]]
    return [(e, slice(start, end)) for e, (start, end) in enumerate(zip(starts, ends, strict=True)) if end > start]


def _round_tokens(
    x: Tensor, parts: Sequence[_Part], format: NumberFormat, operand: str, contracts: int
) -> Sequence[Tensor]:
    """Returns the rows of x (S, C) that are each matrix's tokens, rounded, FP32."""
    behind = [part.rows.stop for part in parts[-1:] if part.rows.stop < len(x)]
    if _is_split_by(format, operand, contracts, [*(part.rows.start for part in parts), *behind]):
        rounded = fake_quantize(x, format, operand, contracts)
        return [rounded[part.rows] for part in parts]
    return [fake_quantize(x[part.rows], format, operand, contracts, *part.stream) for part in parts]


def _round_matrices(weight: Tensor, parts: Sequence[_Part], format: NumberFormat, contracts: int) -> Sequence[Tensor]:
    """Returns the matrices (O, I) that have tokens, rounded, FP32."""
    if parts and _is_split_by(format, "weight", contracts, [weight.shape[1]]):
        needed = weight if len(parts) == len(weight) else weight[[part.matrix for part in parts]]
        rounded = fake_quantize(needed.reshape(-1, weight.shape[2]), format, "weight", contracts)
        return rounded.view(needed.shape).unbind()
    return [fake_quantize(weight[part.matrix], format, "weight", contracts, *part.stream) for part in parts]


def _is_split_by(format: NumberFormat, operand: str, contracts: int, starts: Sequence[int]) -> bool:
    """Returns True if tensors that begin at these rows of one tensor can be rounded together: no block has two."""
    rule = format.operand(operand)
    if rule.block is None or format.tensor_scale is not None or rule.stochastic or rule.noise:
        return False
    across, along = rule.block
    units = [along if contracts == 0 else across]
    if contracts == 0 and gemm_of(operand, contracts) in format.rotated:
        units.append(format.rotation)
    return all(start % unit == 0 for start in starts for unit in units)


def unquantized(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    """Returns x @ weight[e]^T + bias[e] for the tokens of each matrix e, (S, O), differentiable, in high precision.

    Args:
        x: (S, I), any dtype.
        weight: (E, O, I), in memory perhaps as (E, I, O). Gives the dtype of the products, or autocast does.
        bias: (E, O) or None.
        ends: (E,), int64.
    """
    is_cast = torch.is_autocast_enabled(x.device.type)
    dtype = torch.get_autocast_dtype(x.device.type) if is_cast else weight.dtype
    state = ends.new_full((STATE_SIZE,), UNQUANTIZED.code)
    bias = None if bias is None else bias.to(dtype)
    is_transposed = weight.stride(1) < weight.stride(2)
    y: Tensor = ThreeGroupedGemms.apply(x.to(dtype), weight.to(dtype), bias, ends, state, is_transposed)
    return y


class ThreeGroupedGemms(torch.autograd.Function):
    """Y = X W[e]^T + b[e] for the tokens of each matrix, with the format of each GEMM read from `state`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, state: Tensor, transposed: bool
    ) -> Tensor:
        # As in `emulated.py`.
        if torch.compiler.is_compiling():
            ctx.save_for_backward(x, weight, ends, state.clone())
        else:
            state, ends = _on_host(state, ends)
            ctx.save_for_backward(x, weight, ends, state)
        ctx.transposed = transposed
        y: Tensor = grouped_forward_gemm(x, weight, bias, ends, state)
        return y

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, ends, state = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        if is_differentiated_again():
            return *_differentiable_gradients(grad_output, x, weight, ends, needs_bias), None, None, None
        return (
            grouped_grad_input_gemm(grad_output, weight, ends, state) if needs_x else None,
            grouped_grad_weight_gemm(grad_output, x, ends, state, ctx.transposed) if needs_weight else None,
            grouped_bias_gradient(grad_output, ends) if needs_bias else None,
            None,
            None,
            None,
        )


def _differentiable_gradients(
    grad_output: Tensor, x: Tensor, weight: Tensor, ends: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the gradients of x, weight and bias in high precision, by functions that torch differentiates again."""
    lengths = ends.diff(prepend=ends.new_zeros(1)).tolist()
    *grads, behind = grad_output.split([*lengths, len(x) - sum(lengths)])
    *parts, _ = x.split([*lengths, len(behind)])
    products = [grad @ matrix for grad, matrix in zip(grads, weight, strict=True)]
    grad_x = torch.cat([*products, behind.new_zeros(len(behind), x.shape[1])])
    grad_weight = torch.stack([grad.t() @ part for grad, part in zip(grads, parts, strict=True)])
    return grad_x, grad_weight, torch.stack([grad.sum(0) for grad in grads]) if has_bias else None
