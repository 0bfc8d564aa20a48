"""What each GEMM costs: linear FLOPs per token, the weights of the program's efficiency constraint."""

from __future__ import annotations

from torch import nn

from .linear import snip_linears


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
