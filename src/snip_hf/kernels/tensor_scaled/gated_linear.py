"""Three linears of folded operands around a gate, Y = (silu(X G^T) * (X U^T)) D^T, as one function.

The product of gate and up, and their gradients, exist in E4M3 alone: no launch writes them in BF16 for another to fold.

Legend: T tokens, I channels of X and Y, C channels of gate and up; x (..., I), weights of gate and up (C, I), of down
(I, C). Numerics are those of three `linear.TensorScaledGemms`, with silu(gate) * up and its gradients computed in FP32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..products import refuse_double_backward
from .gated_operators import LAYERS, fold_gated, fold_gated_gradients
from .linear import Weight, forward_product, grad_input_product
from .operators import fold_operand, multiply

_GRADIENT = 1  # in `gemms.OPERANDS`


class How(NamedTuple):
    """Python constants: changing one triggers recompilation."""

    counts: bool
    """Whether the records take note of the pass."""
    has_backward: bool
    has_grad_input: bool
    """Whether the backward pass computes the gradient of x."""
    inputs: int
    """1: x is quantized once for gate and up. 2: for each."""
    kept: tuple[int, ...]
    """Of each weight, how many tensors of its layouts are given: all four or none."""


class GatedGemms(torch.autograd.Function):
    """All nine GEMMs of gate, up and down, none of them in BF16.

    Saved for backward are x's columns, a byte per element, and gate and up in BF16.

    Args of forward:
        x: (..., I), BF16.
        up_x: the same for up, where x is cast from FP32: the gradients of both are then added in FP32, as those of two
            layers are. None: x is the input itself.
        gate_weight, up_weight, down_weight: the parameters themselves, FP32 or BF16; all are trained.
        table: of the records.
        how: what is known before.
        tensors: the states of the three layers, and their records; x as `quantize_input` gives it, once or for gate and
            for up; the layouts of the weights that are kept, in the order of the layers.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        up_x: Tensor | None,
        gate_weight: Tensor,
        up_weight: Tensor,
        down_weight: Tensor,
        table: Tensor,
        how: How,
        *tensors: Tensor,
    ) -> Tensor:
        states, records, quantized = tensors[:LAYERS], tensors[LAYERS : 2 * LAYERS], tensors[2 * LAYERS :]
        weights, tokens = (gate_weight, up_weight, down_weight), x.numel() // x.shape[-1]
        of_gate, of_up = quantized[:4], quantized[4 * how.inputs - 4 : 4 * how.inputs]
        layers = _layers(weights, states, records, table, how.kept, quantized[4 * how.inputs :])
        how_inner = how.has_grad_input, how.counts
        gate, gate_kept = forward_product(of_gate[:2], layers[0], how_inner, tokens, x.dtype)
        up, up_kept = forward_product(of_up[:2], layers[1], how_inner, tokens, x.dtype)
        rows = fold_gated(gate, up, table, [states[2], records[2]], how.counts)
        y, down_kept = forward_product(rows, layers[2], (how.has_backward, how.counts), tokens, x.dtype)
        # The states themselves: in a compiled graph a copy would be made in the backward pass (`TensorScaledGemms`).
        kept = gate_kept, up_kept, down_kept
        columns = of_gate[2:] if how.inputs == 1 else (*of_gate[2:], *of_up[2:])
        layouts = [tensor for one in kept for tensor in one]
        ctx.save_for_backward(gate, up, table, *weights, *states, *records, *columns, *layouts)
        ctx.inputs = how.inputs
        ctx.kept, ctx.counts, ctx.x_shape = tuple(map(len, kept)), how.counts, x.shape
        result: Tensor = torch.ops.aten._unsafe_view(y, [*x.shape[:-1], down_weight.shape[0]])
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_double_backward()
        gate, up, table, *rest = ctx.saved_tensors
        weights, states, records = rest[:LAYERS], rest[LAYERS : 2 * LAYERS], rest[2 * LAYERS : 3 * LAYERS]
        columns, kept = rest[3 * LAYERS :][: 2 * ctx.inputs], rest[3 * LAYERS + 2 * ctx.inputs :]
        layers = _layers(weights, states, records, table, ctx.kept, kept)
        counts, needs_x, tokens = ctx.counts, ctx.needs_input_grad[0], gate.shape[0]
        g = grad_output.reshape(tokens, weights[2].shape[0])
        output = fold_operand(g, states[2], records[2], table, _GRADIENT, (1, 2), counts)
        grad = grad_input_product(output[:2], layers[2], counts, tokens, g.dtype)
        tensors = [tensor for pair in zip(states, records, strict=True) for tensor in pair]
        folded = fold_gated_gradients(grad, gate, up, table, tensors, needs_x, counts)
        of_gate, of_up, activation = folded[:4], folded[4:8], folded[8:]
        grads_x: list[Tensor | None] = [None, None]
        if needs_x:
            pairs = zip((of_gate, of_up), layers, strict=False)
            products = [grad_input_product(one[:2], own, counts, tokens, g.dtype) for one, own in pairs]
            products = products if ctx.needs_input_grad[1] else [products[0] + products[1]]
            grads_x[: len(products)] = [product.view(ctx.x_shape) for product in products]
        operands = (of_gate[2:], columns[:2]), (of_up[2:], columns[-2:]), (output[2:], activation)
        grads = [
            _weight_gradient(*pair, weight, g.dtype, record)
            for pair, weight, record in zip(operands, weights, records, strict=True)
        ]
        return *grads_x, *grads, *[None] * (len(ctx.needs_input_grad) - 2 - LAYERS)


def _layers(
    weights: Sequence[Tensor],
    states: Sequence[Tensor],
    records: Sequence[Tensor],
    table: Tensor,
    numbers: Sequence[int],
    kept: Sequence[Tensor],
) -> list[Weight]:
    """Returns each layer's weight, with so many of the tensors that are kept."""
    found: list[Weight] = []
    for weight, state, record, number in zip(weights, states, records, numbers, strict=True):
        found.append((weight, (state, record, table), kept[:number]))
        kept = kept[number:]
    return found


def _weight_gradient(
    left: Sequence[Tensor], right: Sequence[Tensor], weight: Tensor, dtype: torch.dtype, record: Tensor
) -> Tensor:
    """Returns the gradient of a weight in its own precision, as `TensorScaledGemms` does."""
    rows, columns = weight.shape
    summed = dtype if weight.dtype == dtype else torch.float32
    return multiply("grad_weight", left, right, (rows, columns), summed, record).to(weight.dtype)
