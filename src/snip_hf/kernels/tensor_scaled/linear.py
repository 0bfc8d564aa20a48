"""A linear layer of E4M3 operands: encodes each operand when it is needed, and saves some for the backward pass.

Legend: T tokens, I in_features, O out_features; x (..., I), weight (O, I). Layers of several matrices have S tokens,
sorted by matrix, E matrices, and P slots (`slots`); their weight is (E, O, I), or (E, I, O) if it is stored transposed.
Numerics are those of `kernels.emulated` inside the range of `encoding`, with two exceptions: gradients of FP32 weights
are not rounded to BF16; and layers of several matrices add a bias to a product in BF16, the only dtype that torch's
grouped product returns. A layer's tensors are its state, record and table, followed by its `Slots` if there are several
matrices.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..tensor_core import Kernels, Layout, Pass, Quantized, tensor_core_linear, with_bias
from .operators import (
    ACTIVATION,
    BY_COLUMNS,
    BY_ROWS,
    GRADIENT,
    OVER_TOKENS,
    WEIGHT,
    encode_operand,
    multiply,
    multiply_grouped,
    multiply_weight,
)
from .slots import Slots

# Most elements of a weight that one launch encodes for forward and grad_input from one read. Its second layout takes a
# byte per element until grad_input, too much for larger weights.
SMALL = 2**22


def quantize_input(x: Tensor, layer: Layout, gemms: tuple[int, int], counts: bool) -> Quantized:
    """Returns `operators.encode_operand` of x (..., I) for the forward and the grad_weight GEMM."""
    with torch.no_grad():
        quantized: Quantized = encode_operand(x.reshape(-1, x.shape[-1]), *layer, ACTIVATION, gemms, counts)
    return quantized


def quantize_weight(weight: Tensor, layer: Layout, gemms: tuple[int, int], counts: bool) -> Quantized:
    """Returns `operators.encode_operand` of a weight (O, I) for the forward and the grad_input GEMM."""
    quantized: Quantized = encode_operand(weight.detach(), *layer, WEIGHT, gemms, counts)
    return quantized


def forward_product(
    rows: Layout,
    weight: Tensor,
    layer: Layout,
    kept: Layout,
    has_grad_input: bool,
    counts: bool,
    dtype: torch.dtype,
    tokens: int,
) -> tuple[Tensor, Layout]:
    """Returns X W^T, (T, O), and the weight for grad_input, empty if it is encoded again then.

    Args:
        rows: of X, and their parameters.
        weight: (O, I).
        layer: its tensors.
        kept: both layouts of the weight, or nothing.
        has_grad_input: True if there will be a quantized grad_input GEMM.
        counts: True if the record is updated.
        dtype: of the product.
        tokens: T.
    """
    if kept:
        return multiply("forward", rows, kept[:2], (tokens, weight.shape[0]), dtype, layer[1]), kept[2:]
    keeps = has_grad_input and weight.numel() <= SMALL
    y, *layout = multiply_weight("forward", rows, weight, layer, keeps, counts, tokens, dtype)
    return y, layout


def grad_input_product(
    rows: Layout, weight: Tensor, layer: Layout, kept: Layout, counts: bool, tokens: int, dtype: torch.dtype
) -> Tensor:
    """Returns G W, (T, I).

    Args:
        rows: of G, and their parameters.
        weight: (O, I).
        layer: its tensors.
        kept: the weight's layout for grad_input, or nothing.
        counts: True if the record is updated.
        tokens: T.
        dtype: of the product.
    """
    if kept:
        return multiply("grad_input", rows, kept, (tokens, weight.shape[1]), dtype, layer[1])
    return multiply_weight("grad_input", rows, weight, layer, False, counts, tokens, dtype)[0]


class _Dense(Kernels):
    layer_tensors = 3

    def forward(self, given: Pass, x: Layout, bias: Tensor | None, weights: Layout) -> tuple[Tensor, Layout]:
        weight, layer, options, tokens = given
        dtype = torch.bfloat16 if bias is None else torch.float32
        has_grad_input = options.has_grad_input and not options.high[1]
        y, by_input = forward_product(x, weight, layer, weights, has_grad_input, options.counts, dtype, tokens)
        return with_bias(y, bias), by_input

    def gradient(self, given: Pass, grad_output: Tensor, gemms: tuple[int, int]) -> Quantized:
        quantized: Quantized = encode_operand(grad_output, *given.layer, GRADIENT, gemms, given.options.counts)
        return quantized

    def grad_input(self, given: Pass, grad: Layout, by_input: Layout) -> Tensor:
        weight, layer, options, tokens = given
        return grad_input_product(grad, weight, layer, by_input, options.counts, tokens, torch.bfloat16)

    def grad_weight(self, given: Pass, grad: Layout, x: Layout, dtype: torch.dtype) -> Tensor:
        out_features, in_features = given.weight.shape
        return multiply("grad_weight", grad, x, (out_features, in_features), dtype, given.layer[1])

    def late_columns(self, given: Pass, x: Tensor, grad: Tensor, after: Tensor) -> Layout:
        # Operations that depend on a gradient stay in the backward pass. Without the dependence, torch.compile would
        # encode X in the forward pass and save the result, or save X. With it, it recomputes X from tensors that are
        # saved anyway. The input of a square linear is usually attention's output, which is saved: no copy then.
        weight, layer, options, _ = given
        is_saved = weight.shape[0] == weight.shape[1]
        late = x if is_saved else torch.where(grad[0, 0] == 0, x, x)
        # `after` instead of the gradient: each operator that reads a gradient cast from FP32 would get its own copy.
        counts = options.counts and options.high[0]  # otherwise the forward pass has updated the record
        columns: Layout = encode_operand(late.reshape(-1, x.shape[-1]), *layer, ACTIVATION, (-1, 2), counts, after)[2:]
        return columns


tensor_scaled_linear = tensor_core_linear(_Dense())
"""x (..., I) BF16, weight (O, I) FP32 or BF16, bias (O) BF16 or None, and the tensors of `tensor_core_linear`."""


def encode_tokens(
    x: Tensor, layer: Layout, operand: int, gemms: tuple[int, int], counts: bool, count: int
) -> Quantized:
    """Returns tokens (S, C) that are sorted by `count` matrices, encoded."""
    state, record, table, *slots = layer
    blocks = Slots(*slots).blocks
    with torch.no_grad():
        quantized: Quantized = encode_operand(x, state, record, table, operand, gemms, counts, None, count, blocks)
    return quantized


def quantize_matrices(weight: Tensor, layer: Layout, uses: tuple[bool, bool], transposed: bool) -> Quantized:
    """Returns a weight encoded for those of the forward and the grad_input GEMM that use it.

    Args:
        weight: (E, O, I), or (E, I, O) if `transposed`.
        layer: begins with its state, record and table.
        uses: True for each of the forward and the grad_input GEMM that reads it.
        transposed: True makes its rows those of grad_input, which contracts O, and its columns those of forward.
    """
    stored = weight.detach().reshape(-1, weight.shape[2])
    rows, scales, columns, column_scales = encode_operand(
        stored, *layer[:3], WEIGHT, weight_gemms(uses, transposed), True, None, weight.shape[0]
    )
    return (columns, column_scales, rows, scales) if transposed else (rows, scales, columns, column_scales)


def weight_gemms(uses: tuple[bool, bool], transposed: bool) -> tuple[int, int]:
    """Returns the GEMMs that read the rows and the columns of a stored weight, -1 for none."""
    forward, grad_input = (gemm if used else -1 for gemm, used in enumerate(uses))
    return (grad_input, forward) if transposed else (forward, grad_input)


class _Grouped(Kernels):
    layer_tensors = 3 + len(Slots._fields)

    def forward(self, given: Pass, x: Layout, bias: Tensor | None, weights: Layout) -> tuple[Tensor, Layout]:
        weight, layer, options, _ = given
        slots, transposed = Slots(*layer[3:]), options.is_transposed
        right = weights[:2] or quantize_matrices(weight, layer, (True, False), transposed)[:2]
        kind = BY_COLUMNS if transposed else BY_ROWS
        y = multiply_grouped("forward", x, right, slots.padded_ends, kind, layer[1])[slots.slot]
        return _finished(y, bias, slots, weight.shape[0]), weights[2:]

    def gradient(self, given: Pass, grad_output: Tensor, gemms: tuple[int, int]) -> Quantized:
        matrices = given.layer[3].shape[0]
        return encode_tokens(grad_output, given.layer, GRADIENT, gemms, given.options.counts, matrices)

    def grad_input(self, given: Pass, grad: Layout, by_input: Layout) -> Tensor:
        weight, layer, options, _ = given
        slots, transposed = Slots(*layer[3:]), options.is_transposed
        right = by_input or quantize_matrices(weight, layer, (False, True), transposed)[2:]
        kind = BY_ROWS if transposed else BY_COLUMNS
        grad_x = multiply_grouped("grad_input", grad, right, slots.padded_ends, kind, layer[1])[slots.slot]
        return _finished(grad_x, None, slots, weight.shape[0])

    def grad_weight(self, given: Pass, grad: Layout, x: Layout, dtype: torch.dtype) -> Tensor:
        _, layer, options, _ = given
        left, right = (x, grad) if options.is_transposed else (grad, x)
        return multiply_grouped("grad_weight", left, right, Slots(*layer[3:]).padded_ends, OVER_TOKENS, layer[1])

    def high_forward(self, given: Pass, x: Tensor, bias: Tensor | None) -> Tensor:
        weight, layer, options, _ = given
        slots, right = Slots(*layer[3:]), weight if options.is_transposed else weight.transpose(1, 2)
        y = functional.grouped_mm(x, right.to(x.dtype), offs=slots.ends)
        return _finished(y, bias, slots, weight.shape[0])

    def high_grad_input(self, given: Pass, grad: Tensor) -> Tensor:
        weight, layer, options, _ = given
        slots, right = Slots(*layer[3:]), weight.transpose(1, 2) if options.is_transposed else weight
        grad_x = functional.grouped_mm(grad, right.to(grad.dtype), offs=slots.ends)
        return _finished(grad_x, None, slots, weight.shape[0])

    def high_grad_weight(self, given: Pass, grad: Tensor, x: Tensor) -> Tensor:
        first, second = (x, grad) if given.options.is_transposed else (grad, x)
        return functional.grouped_mm(first.t(), second, offs=Slots(*given.layer[3:]).ends)

    def bias_gradient(self, given: Pass, grad: Tensor) -> Tensor:
        """Returns the sums over the tokens of each matrix, (E, O), by a product, which fixes the order of summation."""
        matrix = Slots(*given.layer[3:]).matrix
        is_own = torch.arange(given.weight.shape[0], device=matrix.device)[:, None] == matrix
        return is_own.to(grad.dtype) @ grad


def _finished(y: Tensor, bias: Tensor | None, slots: Slots, matrices: int) -> Tensor:
    """Returns y (S, *) plus the bias of each token's matrix; zeros for tokens without a matrix."""
    if bias is not None:
        y = y + bias[slots.matrix.clamp(max=matrices - 1)]
    return torch.where((slots.matrix < matrices)[:, None], y, 0)


grouped_linear = tensor_core_linear(_Grouped())
"""x (S, I) BF16, sorted by matrix, weight as stored, FP32 or BF16, bias (E, O) BF16 or None, and the tensors of
`tensor_core_linear`."""
