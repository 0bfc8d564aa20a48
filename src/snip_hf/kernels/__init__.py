"""Which kernels run the three GEMMs of a linear layer: the choice of a backend.

Today there is one backend, `emulated`: it rounds in software and multiplies in FP32, on any device that torch runs on.
Its operators are the boundary behind which faster kernels can be put.
"""

from __future__ import annotations

from . import emulated
from .emulated import STATE_SIZE, forward_gemm, grad_input_gemm, grad_weight_gemm

__all__ = ["STATE_SIZE", "emulated", "forward_gemm", "grad_input_gemm", "grad_weight_gemm", "select_backend"]


def select_backend(requested: str) -> str:
    """Returns the name of the backend that runs for `SnipConfig.backend`.

    Raises:
        NotImplementedError: "hopper", which this version does not have.
    """
    if requested == "hopper":
        raise NotImplementedError(
            "backend='hopper' is not in this version of snip-hf; use backend='auto' or 'emulated' (same "
            "numerics, slower)."
        )
    return "emulated"
