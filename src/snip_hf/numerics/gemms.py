"""TODO."""

from __future__ import annotations

# The three matrix products of one linear layer (docs/method.md, section 1), in the order of the format codes that a
# layer's state tensor holds.
GEMMS = ("forward", "grad_input", "grad_weight")

# Elements along each side of a scaling tile: 1x128 for activations and gradients, 128x128 for weights.
TILE = 128

ROW_TILE = (1, TILE)
COLUMN_TILE = (TILE, 1)
SQUARE_TILE = (TILE, TILE)
