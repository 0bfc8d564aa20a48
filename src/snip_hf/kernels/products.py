"""Products of rounded operands, as the emulated backend computes them: FP32 sums of exact products."""

from __future__ import annotations

import torch
from torch import Tensor

from ..numerics.formats import NumberFormat
from ..numerics.gemms import CONTRACTIONS, GEMMS

STATE_SIZE = len(GEMMS) + 3
"""Numbers in a layer's state (`emulated.py`)."""
# Of a BF16 number's significand.
_BF16_BITS = 8


def is_differentiated_again() -> bool:
    """Returns True in a backward pass whose gradients get a graph of their own (`create_graph=True`).

    torch.compile refuses such passes itself.
    """
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def refuse_double_backward() -> None:
    """Refuses a backward pass with a graph of its own on kernels that do not keep their operands for one.

    Raises:
        NotImplementedError: always in such a pass.
    """
    if is_differentiated_again():
        raise NotImplementedError(
            "Got a backward pass with create_graph=True; the kernels on tensor cores compute first derivatives only. "
            "Name the emulated backend in SnipConfig.backend for gradient penalties."
        )


def multiply(left_fp32: Tensor, right_fp32: Tensor, dtype: torch.dtype, fits_bf16: bool) -> Tensor:
    """Returns left @ right, FP32, also under autocast, which would cast both to BF16.

    Args:
        left_fp32, right_fp32: the rounded operands.
        dtype: of the call.
        fits_bf16: whether the operands' values are BF16 numbers.
    """
    with torch.autocast(left_fp32.device.type, enabled=False):
        if not (fits_bf16 and dtype == torch.bfloat16 and left_fp32.is_cuda):
            return left_fp32 @ right_fp32
        # Asked for in FP32: partial sums are then FP32 too, whatever
        # `torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction` says.
        left, right = left_fp32.to(torch.bfloat16), right_fp32.to(torch.bfloat16)
        return torch.mm(left, right, out_dtype=torch.float32)


def fits_bf16(format: NumberFormat, gemm: str) -> bool:
    """Returns True if both operands of a GEMM, rounded, are BF16 numbers: at most 8 bits, times a power of two.

    Values below 2**-126, where BF16 has fewer bits, are the exception: they are rounded once more.
    """
    if format.scale != "e8m0" or gemm in format.rotated:
        return False
    rules = [format.operand(operand) for operand, _ in CONTRACTIONS[gemm]]
    grids = [rule.grid or format.grid for rule in rules if rule.quantized and not rule.noise]
    return len(grids) == len(rules) and all(grid is not None and grid.mantissa_bits < _BF16_BITS for grid in grids)
