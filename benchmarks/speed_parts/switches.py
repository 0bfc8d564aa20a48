"""Turns changes of the backend "tensor-scaled" on and off, so that one run on one machine times them all."""

from __future__ import annotations

from collections.abc import Iterable

from snip_hf.kernels.tensor_scaled import operators
from snip_hf.kernels.tensor_scaled.backend import TensorScaled

CHANGES = ("spared launches", "fast sums", "late columns", "fast weight gradients", "fused gates")
_FAST_SUMS_FOLDED = dict(operators.FAST_SUMS_FOLDED)


def turn_on(changes: Iterable[str]) -> None:
    """Puts these changes in force, and no others; before layers are compiled."""
    chosen = set(changes)
    if unknown := chosen - set(CHANGES):
        raise ValueError(f"Changes {sorted(unknown)} are not known; expected some of {', '.join(CHANGES)}.")
    operators.SPARES_LAUNCHES = "spared launches" in chosen
    for gemm, fast in _FAST_SUMS_FOLDED.items():
        change = "fast weight gradients" if gemm == "grad_weight" else "fast sums"
        operators.FAST_SUMS_FOLDED[gemm] = fast and change in chosen
    TensorScaled.quantizes_late = "late columns" in chosen
    TensorScaled.fuses_gates = "fused gates" in chosen
