"""FLOPs of each linear layer's GEMMs: per token, and as executed for the tokens that each layer sees."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import nn

from ..layers.state import gemms_of, snip_linears
from ..numerics.gemms import GEMMS

FORWARD, GRAD_INPUT, _ = GEMMS

Work = Mapping[str, Mapping[str, float]]
"""Layer -> GEMM -> FLOPs per token, or seconds."""
Tokens = Mapping[str, float | Mapping[str, float]]
"""Layer -> tokens that it saw in all its matrices, per token of the micro-batch. If grad_input did not run for all of
them: {"forward", "grad_input"} -> the tokens of each."""

# Marks names of experts' layers, which see the tokens that a router sends them.
_EXPERTS = re.compile(r"(^|\.)experts?(\.mlp)?\.")


def is_routed(layer: str) -> bool:
    """Returns True if a layer belongs to experts, judging by its name."""
    return _EXPERTS.search(layer) is not None


def executed(work: Work, tokens: Tokens | None) -> Work:
    """Returns the executed work, per token of the micro-batch; `tokens` None: every layer saw each token once."""
    if tokens is None:
        return work
    return {
        layer: {gemm: value * tokens_of_gemm(tokens, layer, gemm) for gemm, value in row.items()}
        for layer, row in work.items()
    }


def tokens_of_gemm(tokens: Tokens, layer: str, gemm: str) -> float:
    """Returns the number of tokens that a GEMM of a layer runs for, per token of the micro-batch."""
    own = tokens[layer]
    return own.get(gemm, own[FORWARD]) if isinstance(own, Mapping) else own


def relative_tokens(seen: Mapping[str, int], returned: Mapping[str, int], tokens: int | None) -> Tokens | None:
    """Returns the tokens of each layer per token of the micro-batch; None if all GEMMs ran for the same number.

    With experts there is always a number for each layer, and None means that nothing was counted.

    Args:
        seen: layer -> tokens that it saw.
        returned: layer -> tokens that grad_input runs for.
        tokens: of the micro-batch; None (unknown): the most that a layer saw.
    """
    most = max(seen.values(), default=0)
    if most == 0 or (most == min(returned.values()) and not any(map(is_routed, seen))):
        return None

    def relative(layer: str) -> float | dict[str, float]:
        forward, grad_input = (count / (tokens or most) for count in (seen[layer], returned[layer]))
        return forward if forward == grad_input else {FORWARD: forward, GRAD_INPUT: grad_input}

    return {layer: relative(layer) for layer in seen}


def linear_flops(model: nn.Module) -> dict[str, dict[str, float]]:
    """Returns layer -> GEMM -> FLOPs per token (a multiplication and an addition count as two).

    Each GEMM costs 2 * in_features * out_features per token. A frozen weight has no grad_weight, and no
    entry for it.
    """
    flops = {}
    for name, layer in snip_linears(model).items():
        gemm = 2.0 * layer.in_features * layer.out_features
        flops[name] = dict.fromkeys(gemms_of(layer), gemm)
    return flops
