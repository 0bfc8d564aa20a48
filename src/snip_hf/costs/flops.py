"""The FLOPs of each linear layer's GEMMs, per token."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ..layers.state import gemms_of, snip_linears

Work = Mapping[str, Mapping[str, float]]
"""Layer -> GEMM -> FLOPs per token, or seconds."""


def linear_flops(model: nn.Module) -> dict[str, dict[str, float]]:
    """Returns layer -> GEMM -> FLOPs per token (a multiplication and an addition count as two).

    Each GEMM costs 2 * in_features * out_features per token. Where the weight is frozen there is no grad_weight, and no
    entry for it.
    """
    flops = {}
    for name, layer in snip_linears(model).items():
        gemm = 2.0 * layer.in_features * layer.out_features
        flops[name] = dict.fromkeys(gemms_of(layer), gemm)
    return flops
