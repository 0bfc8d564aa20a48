"""Which kernels run the three GEMMs of a linear layer: the choice of a backend.

`emulated` rounds in software and multiplies in FP32, on any device that torch runs on. `hopper` gives the same numbers
on the FP8 tensor cores of NVIDIA's sm_90 GPUs. Both read formats and random streams from the layers' state tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..numerics.formats import UNQUANTIZED
from ..numerics.gemms import GEMMS
from . import emulated
from .emulated import STATE_SIZE, forward_gemm, grad_input_gemm, grad_weight_gemm

if TYPE_CHECKING or find_spec("triton") is not None:
    from . import hopper

__all__ = [
    "STATE_SIZE",
    "emulated",
    "forward_gemm",
    "gemm_call",
    "grad_input_gemm",
    "grad_weight_gemm",
    "hopper_lacks",
    "select_backend",
]


def select_backend(requested: str, device: torch.device | str) -> str:
    """Returns the name of the backend that runs for `SnipConfig.backend` on a device.

    Raises:
        ValueError: "hopper" is requested and cannot run there.
    """
    lacks = hopper_lacks(torch.device(device))
    if requested == "hopper" and lacks is not None:
        raise ValueError(
            f"backend='hopper' cannot run: {lacks}. Use backend='auto' or 'emulated' (same numerics, slower than BF16)."
        )
    return "emulated" if requested == "emulated" or lacks is not None else "hopper"


def hopper_lacks(device: torch.device) -> str | None:
    """Returns what keeps the Hopper kernels from running on a device, None if nothing does."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"the model is on {device.type!r}, expected a CUDA device of compute capability 9.0 (H100, H200)"
    if torch.version.cuda is None:
        return "torch is not built for CUDA"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, expected 9.0 (H100, H200)"
    version = tuple(int(part) for part in torch.version.cuda.split(".")[:2])
    if version < (12, 9):
        return f"torch is built for CUDA {torch.version.cuda}, expected at least 12.9"
    if find_spec("triton") is None:
        return "the package triton is not installed"
    return None


def gemm_call(
    backend: str, gemm: str, x: Tensor, weight: Tensor, grad_output: Tensor, state: Tensor
) -> Callable[[], Tensor]:
    """Returns a function that runs one GEMM as training does, with the quantization of its activations and gradients.

    That of the weight is left out on Hopper, where it is done once per optimizer step.

    Args:
        backend: "emulated" or "hopper".
        gemm: one of `formats.GEMMS`.
        x: (T, I).
        weight: (O, I).
        grad_output: (T, O).
        state: of `STATE_SIZE` numbers; its format of this GEMM must be known to stay the same between calls.
    """
    number = GEMMS.index(gemm)
    high = int(state[number]) == UNQUANTIZED.code
    if backend == "emulated" or high:
        return {
            "forward": lambda: forward_gemm(x, weight, None, state),
            "grad_input": lambda: grad_input_gemm(grad_output, weight, state),
            "grad_weight": lambda: grad_weight_gemm(grad_output, x, state),
        }[gemm]
    tokens, (out_features, in_features) = x.shape[0], weight.shape
    by_output, output_scales, by_input, input_scales = hopper.quantize_weight(weight, state, True, True)

    def forward() -> Tensor:
        rows, scales, _, _ = hopper.quantize_tokens(x, state, 0, -1, False)
        return hopper.multiply(rows, scales, by_output, output_scales, True, tokens, out_features)

    def grad_input() -> Tensor:
        rows, scales, _, _ = hopper.quantize_tokens(grad_output, state, 1, -1, True)
        return hopper.multiply(rows, scales, by_input, input_scales, True, tokens, in_features)

    def grad_weight() -> Tensor:
        _, _, left, left_scales = hopper.quantize_tokens(grad_output, state, -1, 2, True)
        _, _, right, right_scales = hopper.quantize_tokens(x, state, -1, 2, False)
        return hopper.multiply(left, left_scales, right, right_scales, False, out_features, in_features)

    return {"forward": forward, "grad_input": grad_input, "grad_weight": grad_weight}[gemm]
