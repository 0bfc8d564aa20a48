"""The FLOPs of each linear layer's three GEMMs, per token."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ..layers.state import snip_linears

Work = Mapping[str, Mapping[str, float]]
"""Layer -> GEMM -> FLOPs per token, or seconds."""


def linear_flops(model: nn.Module) -> dict[str, dict[str, float]]:
    """Returns layer -> GEMM -> FLOPs per token (a multiplication and an addition count as two).

    Each of the three GEMMs costs 2 * in_features * out_features per token; grad_weight costs nothing where the weight
    is frozen.
    """
    flops = {}
    for name, layer in snip_linears(model).items():
        gemm = 2.0 * layer.in_features * layer.out_features
        flops[name] = {
            "forward": gemm,
            "grad_input": gemm,
            "grad_weight": gemm if layer.weight.requires_grad else 0.0,
        }
    return flops
