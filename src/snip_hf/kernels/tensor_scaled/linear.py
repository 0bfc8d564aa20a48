"""A linear layer of E4M3 operands: encodes each operand when it is needed, and saves some for the backward pass.

Legend: T tokens, I in_features, O out_features; x (..., I), weight (O, I). Layers of several matrices have E of them
and P slots (`slots`); their tokens are sorted by matrix, and their weight is (E, O, I), in memory perhaps as (E, I, O).
Numerics are those of `kernels.emulated` inside the range of `encoding`, with two exceptions: gradients of FP32 weights
are not rounded to BF16; and layers of several matrices add a bias to a product in BF16, the only dtype that torch's
grouped product returns. A layer's tensors are its state, record and table, followed by its `Slots` if there are several
matrices.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..linear import is_transposed
from ..tensor_core import Kernels, Layout, Pass, Quantized, tensor_core_linear, with_bias
from .operators import (
    ACTIVATION,
    BY_COLUMNS,
    BY_ROWS,
    GRADIENT,
    OVER_TOKENS,
    WEIGHT,
    encode_into,
    encode_operand,
    multiply,
    multiply_grouped,
    multiply_weight,
)
from .slots import Slots

# Most elements of a weight that one launch encodes for forward and grad_input from one read. Its second layout takes a
# byte per element until grad_input, too much for larger weights.
SMALL = 2**22
_RECORDS = 3
"""A layer's state, record and table."""


def slots_in(layer: Layout) -> Slots | None:
    """Returns the slots among a layer's tensors; None if it has one matrix."""
    return Slots(*layer[_RECORDS:]) if len(layer) > _RECORDS else None


def encode_tokens(x: Tensor, layer: Layout, operand: int, gemms: tuple[int, int], counts: bool) -> Quantized:
    """Returns `operators.encode_operand` of tokens (T, C)."""
    slots = slots_in(layer)
    grouped = () if slots is None else (None, slots.ends.shape[0], slots.blocks)
    quantized: Quantized = encode_operand(x, *layer[:_RECORDS], operand, gemms, counts, *grouped)
    return quantized


def encode_weight(weight: Tensor, layer: Layout, uses: tuple[bool, bool]) -> Quantized:
    """Returns a weight encoded for those of the forward and the grad_input GEMM that use it."""
    stored, gemms, matrices = _as_stored(weight, uses)
    layouts: Quantized = encode_operand(stored, *layer[:_RECORDS], WEIGHT, gemms, True, None, matrices)
    return (*layouts[2:], *layouts[:2]) if is_transposed(weight) else layouts


def encode_weight_into(weight: Tensor, layer: Layout, outputs: Layout) -> None:
    """Encodes like `encode_weight`, but overwrites the tensors it returned; skips empty ones."""
    stored, gemms, matrices = _as_stored(weight, (outputs[0].shape[0] > 0, outputs[2].shape[0] > 0))
    outputs = [*outputs[2:], *outputs[:2]] if is_transposed(weight) else outputs
    state, record, table = layer[:_RECORDS]
    with torch.no_grad():
        encode_into(stored, (state, record, table), WEIGHT, gemms, True, outputs, matrices > 0)


def _as_stored(weight: Tensor, uses: tuple[bool, bool]) -> tuple[Tensor, tuple[int, int], int]:
    """Returns a weight as rows in memory, the GEMMs that read the rows and the columns, -1 for none, and E or 0.

    The rows of matrices stored as (E, I, O) are those of grad_input, which contracts O.
    """
    forward, grad_input = (gemm if used else -1 for gemm, used in enumerate(uses))
    weight = weight.detach()
    if weight.dim() == 2:
        return weight, (forward, grad_input), 0
    if is_transposed(weight):
        return weight.mT.flatten(0, 1), (grad_input, forward), weight.shape[0]
    return weight.flatten(0, 1), (forward, grad_input), weight.shape[0]


def product(
    gemm: str, left: Layout, right: Layout, weight: Tensor, layer: Layout, dtype: torch.dtype, tokens: int
) -> Tensor:
    """Returns the product of a GEMM's operands, (T, O), (T, I), or with the weight's shape.

    Args:
        gemm: one of `gemms.GEMMS`.
        left: rows of X or G, or columns of G, and their parameters.
        right: the weight's layout for this GEMM, or columns of X, and its.
        weight: (O, I) or (E, O, I).
        layer: its tensors.
        dtype: of the product of one matrix; those of several are BF16.
        tokens: T.
    """
    slots, record = slots_in(layer), layer[1]
    if slots is None:
        out_features, in_features = weight.shape
        rows = out_features if gemm == "grad_weight" else tokens
        return multiply(gemm, left, right, (rows, out_features if gemm == "forward" else in_features), dtype, record)
    turned = is_transposed(weight)
    if gemm == "grad_weight":
        left, right = (right, left) if turned else (left, right)
        grad_weight = multiply_grouped(gemm, left, right, slots.padded_ends, OVER_TOKENS, record)
        return grad_weight.mT if turned else grad_weight
    kind = BY_COLUMNS if turned == (gemm == "forward") else BY_ROWS
    return multiply_grouped(gemm, left, right, slots.padded_ends, kind, record)[slots.slot]


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
        weight, layer, dtype, tokens: as in `product`.
        kept: both layouts of the weight, or nothing.
        has_grad_input: True if there will be a quantized grad_input GEMM.
        counts: True if the record is updated.
    """
    if kept:
        return product("forward", rows, kept[:2], weight, layer, dtype, tokens), kept[2:]
    if weight.dim() == 3:
        right = encode_weight(weight, layer, (True, False))[:2]
        return product("forward", rows, right, weight, layer, dtype, tokens), ()
    keeps = has_grad_input and weight.numel() <= SMALL
    y, *layout = multiply_weight("forward", rows, weight, layer, keeps, counts, tokens, dtype)
    return y, layout


def grad_input_product(
    rows: Layout, weight: Tensor, layer: Layout, kept: Layout, counts: bool, tokens: int, dtype: torch.dtype
) -> Tensor:
    """Returns G W, (T, I).

    Args:
        rows: of G, and their parameters.
        weight, layer, dtype, tokens: as in `product`.
        kept: the weight's layout for grad_input, or nothing.
        counts: True if the record is updated.
    """
    if not kept and weight.dim() == 2:
        return multiply_weight("grad_input", rows, weight, layer, False, counts, tokens, dtype)[0]
    right = kept or encode_weight(weight, layer, (False, True))[2:]
    return product("grad_input", rows, right, weight, layer, dtype, tokens)


class _TensorScaled(Kernels):
    def forward(self, given: Pass, x: Layout, bias: Tensor | None, weights: Layout) -> tuple[Tensor, Layout]:
        weight, layer, options, tokens = given
        slots, has_grad_input = slots_in(layer), options.has_grad_input and not options.high[1]
        dtype = torch.bfloat16 if bias is None else torch.float32
        y, by_input = forward_product(x, weight, layer, weights, has_grad_input, options.counts, dtype, tokens)
        return with_bias(y, bias) if slots is None else slots.finished(y, bias), by_input

    def gradient(self, given: Pass, grad_output: Tensor, gemms: tuple[int, int]) -> Quantized:
        return encode_tokens(grad_output, given.layer, GRADIENT, gemms, given.options.counts)

    def grad_input(self, given: Pass, grad: Layout, by_input: Layout) -> Tensor:
        weight, layer, options, tokens = given
        slots = slots_in(layer)
        grad_x = grad_input_product(grad, weight, layer, by_input, options.counts, tokens, torch.bfloat16)
        return grad_x if slots is None else slots.finished(grad_x)

    def grad_weight(self, given: Pass, grad: Layout, x: Layout, dtype: torch.dtype) -> Tensor:
        weight, layer, _, tokens = given
        return product("grad_weight", grad, x, weight, layer, dtype, tokens)

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

    def high_forward(self, given: Pass, x: Tensor, bias: Tensor | None) -> Tensor:
        slots = slots_in(given.layer)
        if slots is None:
            return super().high_forward(given, x, bias)
        return slots.finished(functional.grouped_mm(x, given.weight.mT.to(x.dtype), offs=slots.ends), bias)

    def high_grad_input(self, given: Pass, grad: Tensor) -> Tensor:
        slots = slots_in(given.layer)
        if slots is None:
            return super().high_grad_input(given, grad)
        return slots.finished(functional.grouped_mm(grad, given.weight.to(grad.dtype), offs=slots.ends))

    def high_grad_weight(self, given: Pass, grad: Tensor, x: Tensor) -> Tensor:
        slots = slots_in(given.layer)
        if slots is None:
            return super().high_grad_weight(given, grad, x)
        if is_transposed(given.weight):
            return functional.grouped_mm(x.t(), grad, offs=slots.ends).mT
        return functional.grouped_mm(grad.t(), x, offs=slots.ends)

    def bias_gradient(self, given: Pass, grad: Tensor) -> Tensor:
        """Returns the sums over the tokens of each matrix, by a product, which fixes the order of summation."""
        slots = slots_in(given.layer)
        if slots is None:
            return super().bias_gradient(given, grad)
        is_own = torch.arange(slots.ends.shape[0], device=grad.device)[:, None] == slots.matrix
        return is_own.to(grad.dtype) @ grad


tensor_scaled_linear = tensor_core_linear(_TensorScaled())
"""x (..., I) BF16, weight FP32 or BF16, bias (O) or (E, O) BF16 or None, and the tensors of `tensor_core_linear`."""
