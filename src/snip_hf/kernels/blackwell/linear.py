"""A linear layer of the three operators, and what is kept of its weight between passes.

Legend: T tokens, I in_features, O out_features; x (..., I), weight (O, I).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...numerics.gemms import GEMMS
from ..backend import Layer
from ..products import refuse_double_backward
from . import operators


@dataclass
class Cache:
    """What the backend knows of one layer."""

    device: str
    """Type of the device that the backend was chosen for; on another one the layer runs emulated."""
    codes: Tensor
    """Of the formats of the three GEMMs, on the CPU. Written in place, so that graphs read the new ones."""
    kept: Tensor
    """The weight as `keep_quantized` quantized it last; empty: every pass quantizes what it needs."""
    weight_version: int = -1
    """torch's count of the weight's changes at that time."""

    def forget(self) -> None:
        """Lets go of the quantized weight."""
        self.kept, self.weight_version = self.kept.new_empty(0), -1


def new_cache(layer: Layer) -> Cache:
    """Returns the cache of a layer whose formats are not noted yet."""
    device = layer.weight.device
    codes = torch.zeros(len(GEMMS), dtype=torch.int64, device="cpu")  # whatever the default device is
    return Cache(device.type, codes, torch.empty(0, dtype=torch.uint8, device=device))


def keep_quantized(layers: Mapping[str, Layer], everything: bool) -> None:
    """Quantizes weights for all passes until the next call, once for both GEMMs where the format's blocks allow it.

    Sharded weights, and those that are neither FP32 nor BF16, are left to the passes.

    Args:
        layers: the layers.
        everything: False leaves out layers whose weight has not changed since the last call as far as torch knows
            (it does not see what fused optimizers do, nor what is written through `weight.data`).
    """
    for layer in layers.values():
        cache: Cache = layer.snip_cache
        weight = layer.weight
        is_taken = type(weight) is nn.Parameter and weight.dtype in (torch.float32, torch.bfloat16)
        if not is_taken or weight.device.type != cache.device:
            cache.forget()
        elif everything or cache.weight_version != weight._version:
            kept = operators.keep(layer.matrix.detach().to(torch.bfloat16), layer.snip_state, cache.codes)
            if kept.shape == cache.kept.shape:
                cache.kept.copy_(kept)  # compiled graphs and saved tensors refer to it
            else:
                # Its size follows the formats, which must not compile the layer anew.
                torch._dynamo.maybe_mark_dynamic(kept, 0)
                cache.kept = kept
            cache.weight_version = weight._version


class BlockScaledGemms(torch.autograd.Function):
    """Y = X W^T + b. X is saved for the backward pass as it is: how many bytes it would take there is up to the plan.

    Args of forward:
        x: (..., I), BF16.
        weight: (O, I), FP32 or BF16.
        bias: (O), BF16, or None.
        state, codes, kept: as in `operators`.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, codes: Tensor, kept: Tensor
    ) -> Tensor:
        # Copies: the next forward pass may write both before this one's backward pass reads them. A compiled graph
        # would make them in the backward pass, where they are of no use; torch notices there if they were written.
        is_eager = not torch.compiler.is_compiling()
        ctx.save_for_backward(
            x, weight, state.clone() if is_eager else state, codes.clone() if is_eager else codes, kept
        )
        y: Tensor = operators.forward_gemm(x, weight, bias, kept, state, codes)
        return y

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_double_backward()
        x, weight, state, codes, kept = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        g = grad_output.reshape(-1, grad_output.shape[-1])
        grad_x = grad_weight = None
        if needs_x:
            grad_x = operators.grad_input_gemm(g, weight, kept, state, codes).view(x.shape)
        if needs_weight:
            grad_weight = operators.grad_weight_gemm(g, x.reshape(-1, x.shape[-1]), state, codes).to(weight.dtype)
        return grad_x, grad_weight, g.sum(0) if needs_bias else None, None, None, None
