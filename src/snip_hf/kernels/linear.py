"""One autograd function for all backends: Y = X W^T + b, from the products that a backend supplies.

Legend: T tokens, I in_features, O out_features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Forward = Callable[[Tensor, Tensor, Tensor | None, Any, Sequence[Any]], tuple[Tensor, Sequence[Tensor | None]]]
"""(x, weight, bias, options, tensors) -> Y, and tensors for the backward pass besides the weight."""
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Gradients of x, weight and bias."""
Backward = Callable[[Tensor, Tensor, Any, Sequence[Any], tuple[bool, bool, bool]], Gradients]
"""(grad_output (T, O), weight, options, saved tensors, which gradients are needed) -> these gradients."""


def linear_function(forward: Forward, backward: Backward, differentiable: Backward | None = None) -> Any:
    """Returns `apply` of an autograd function: (x (..., I), weight, bias, options, *tensors) -> Y (..., O).

    Args:
        forward: computes Y. `options` holds Python constants: changing them recompiles.
        backward: computes the gradients.
        differentiable: computes gradients that can be differentiated again (`create_graph=True`); None: refused.
    """

    class LinearFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Tensor:
            # No names for the arguments: without gradients Dynamo drops `ctx` if there are as many as parameters here.
            x, weight, bias, options, *tensors = args
            y, saved = forward(x, weight, bias, options, tensors)
            ctx.save_for_backward(weight, *saved)
            ctx.options, ctx.x_shape = options, x.shape
            if y.dim() == x.dim():
                return y
            # Not a view: autograd refuses to modify one in place, as Falcon does (`attention_output += ...`).
            return torch.ops.aten._unsafe_view(y, [*x.shape[:-1], y.shape[-1]])

        @staticmethod
        def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
            weight, *saved = ctx.saved_tensors
            needs = ctx.needs_input_grad[:3]
            grad_rows = grad_output.reshape(-1, grad_output.shape[-1])
            if is_differentiated_again():
                if differentiable is None:
                    raise refusal()
                grads = differentiable(grad_rows, weight, ctx.options, saved, needs)
            else:
                grads = backward(grad_rows, weight, ctx.options, saved, needs)
            grad_x, grad_weight, grad_bias = grads
            return (
                None if grad_x is None else grad_x.view(ctx.x_shape),
                None if grad_weight is None else grad_weight.to(weight.dtype),
                grad_bias,
                *[None] * (len(ctx.needs_input_grad) - 3),
            )

    return LinearFunction.apply


def is_transposed(weight: Tensor) -> bool:
    """Returns True for matrices (E, O, I) that lie in memory as (E, I, O)."""
    return weight.dim() == 3 and weight.stride(1) < weight.stride(2)


def is_differentiated_again() -> bool:
    """Returns True in a backward pass whose gradients get a graph of their own (`create_graph=True`).

    torch.compile refuses such passes itself.
    """
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def refusal() -> NotImplementedError:
    """Returns the error for a backward pass that is to be differentiated again on kernels that cannot."""
    return NotImplementedError(
        "Got a backward pass with create_graph=True; the kernels on tensor cores compute first derivatives only. "
        "Name the emulated backend in SnipConfig.backend for gradient penalties."
    )


def kept_for_backward(state: Tensor) -> Tensor:
    """Returns a copy of a layer's state: the next forward pass may write it before this one's backward pass reads it.

    A compiled graph would make the copy in its backward pass, too late; torch notices there if the state was written.
    """
    return state if torch.compiler.is_compiling() else state.clone()
