"""The three matrix products of a linear layer, and their operands.

Legend: T tokens, I in_features, O out_features; X (T, I) activations, W (O, I) weight, G (T, O) output gradients.
"""

from __future__ import annotations

from collections.abc import Mapping

# In the order of the format codes in a layer's state tensor (docs/method.md, section 1).
GEMMS = ("forward", "grad_input", "grad_weight")
OPERANDS = ("activation", "gradient", "weight")

# GEMM -> its two operands, each with the dimension that the product contracts: 0 rows, 1 columns.
CONTRACTIONS = {
    "forward": (("activation", 1), ("weight", 1)),
    "grad_input": (("gradient", 1), ("weight", 0)),
    "grad_weight": (("gradient", 0), ("activation", 0)),
}

Assignment = Mapping[str, Mapping[str, str]]
"""Layer -> GEMM -> format."""

# Elements along each side of the largest block: 1x128 for activations and gradients, 128x128 for weights.
TILE = 128
ROW_TILE = (1, TILE)
SQUARE_TILE = (TILE, TILE)


def gemm_of(operand: str, contracts: int) -> str:
    """Returns the GEMM that has this operand and contracts this dimension of it."""
    return next(gemm for gemm, operands in CONTRACTIONS.items() if (operand, contracts) in operands)
