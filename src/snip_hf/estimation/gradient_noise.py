"""The noise that quantization adds to the gradient of one weight, at the GEMM that makes it."""

from __future__ import annotations

from functools import reduce

import torch

from ..kernels.sums import scaled_squares
from ..numerics.formats import FORMATS
from .layer_sums import LayerSums, outputs_at_once
from .pending import Pending
from .products import rough_product


def pending_gradient_noise(sums: LayerSums, name: str, key: int) -> Pending[float | None]:
    """Returns |e|^2, not waiting for the device; e: what Q(G)^T Q(X) - G^T X adds to the step's mean gradient.

    Args:
        sums: of the layer.
        name: format.
        key: of the random rounding of G, as in the weight divergence.
    """
    left, right = sums.gradient_error(name, key if FORMATS[name].gradient.stochastic else None)
    at_once = outputs_at_once(right.shape[0], right.shape[2])
    found = []
    for g_r in left.split(at_once, 2):
        ones = right.new_ones(g_r.shape[2], right.shape[2], dtype=torch.float32)
        found.append(scaled_squares(rough_product(g_r.mT, right), ones))  # (R, O, 2 L) x (R, 2 L, I)
    return Pending(reduce(torch.add, found), lambda figures: sums.sizes.of_pieces(*figures).step)
