"""A linear layer from the three operators, and its quantized weight between passes.

Legend: T tokens, I in_features, O out_features; x (..., I), weight (O, I).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...numerics.gemms import GEMMS
from ..backend import Layer
from ..linear import Gradients, kept_for_backward, linear_function
from . import operators


@dataclass
class Cache:
    """State of one layer."""

    device: str
    """Type of the device that the backend was chosen for; on another one the layer runs emulated."""
    codes: Tensor
    """Codes of the three GEMMs' formats, on the CPU. Written in place, so that graphs read the new ones."""
    kept: Tensor
    """The weight as last quantized by `keep_quantized`; empty: every pass quantizes it."""
    weight_version: int = -1
    """torch's count of the weight's changes at that time."""

    def forget(self) -> None:
        """Drops the quantized weight."""
        self.kept, self.weight_version = self.kept.new_empty(0), -1


def new_cache(layer: Layer) -> Cache:
    """Returns the cache of a layer whose formats are not noted yet."""
    device = layer.weight.device
    codes = torch.zeros(len(GEMMS), dtype=torch.int64, device="cpu")  # independent of the default device
    return Cache(device.type, codes, torch.empty(0, dtype=torch.uint8, device=device))


def keep_quantized(layers: Mapping[str, Layer], everything: bool) -> None:
    """Quantizes weights for all passes until the next call, for both GEMMs that read them.

    Passes quantize sharded weights themselves, and weights that are neither FP32 nor BF16.

    Args:
        layers: the layers.
        everything: False leaves out layers whose weight has not changed since the last call as far as torch knows
            (it misses changes by fused optimizers and through `weight.data`).
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
                cache.kept.copy_(kept)  # compiled graphs and saved tensors refer to this memory
            else:
                # Its size depends on the formats, which must not recompile the layer.
                torch._dynamo.maybe_mark_dynamic(kept, 0)
                cache.kept = kept
            cache.weight_version = weight._version


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, how: None, tensors: Sequence[Tensor]
) -> tuple[Tensor, Sequence[Tensor]]:
    state, codes, kept = tensors
    y = operators.forward_gemm(x, weight, bias, kept, state, codes)
    return y, (x, kept_for_backward(state), kept_for_backward(codes), kept)


def _backward(
    grad: Tensor, weight: Tensor, how: None, saved: Sequence[Tensor], needs: tuple[bool, bool, bool]
) -> Gradients:
    x, state, codes, kept = saved
    needs_x, needs_weight, needs_bias = needs
    return (
        operators.grad_input_gemm(grad, weight, kept, state, codes) if needs_x else None,
        operators.grad_weight_gemm(grad, x.reshape(-1, x.shape[-1]), state, codes) if needs_weight else None,
        grad.sum(0) if needs_bias else None,
    )


block_scaled_linear = linear_function(_forward, _backward)
"""x (..., I) BF16, weight (O, I) FP32 or BF16, bias (O) BF16 or None, None; state, codes, kept as in `operators`.

x is saved for the backward pass unquantized: the size of its encoding would depend on the plan.
"""
