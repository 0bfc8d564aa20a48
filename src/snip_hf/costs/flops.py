"""The FLOPs of each linear layer's GEMMs, per token, and those that run by the tokens that each layer sees."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ..layers.state import gemms_of, snip_linears

Work = Mapping[str, Mapping[str, float]]
"""Layer -> GEMM -> FLOPs per token, or seconds."""
Tokens = Mapping[str, float]
"""Layer -> tokens that it saw in all its matrices together, per token of the micro-batch."""


def executed(work: Work, tokens: Tokens | None) -> Work:
    """Returns the work that runs, per token of the micro-batch; None: every layer saw each token once."""
    if tokens is None:
        return work
    return {layer: {gemm: value * tokens[layer] for gemm, value in row.items()} for layer, row in work.items()}


def relative_tokens(seen: Mapping[str, int], tokens: int | None) -> dict[str, float] | None:
    """Returns what layers saw per token of the micro-batch; None if all of them saw the same number.

    Args:
        seen: layer -> tokens that it saw.
        tokens: of the micro-batch; None where that cannot be told: the most that a layer saw.
    """
    most = max(seen.values(), default=0)
    if most == 0 or most == min(seen.values()):
        return None
    return {layer: count / (tokens or most) for layer, count in seen.items()}


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
