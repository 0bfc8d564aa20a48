"""Rounding in one launch on a GPU: `fake_quantize`, as the estimate and the emulated GEMMs use it.

A Triton kernel runs on NVIDIA GPUs from compute capability 8.0 on, for all formats but those with noise or 8 exponent
bits (`rounding_kernel.takes`); torch's operations run for these and anywhere else. Both give the numbers of
`numerics.rounding` bit for bit. The kernel takes one launch, or three where a scale belongs to the whole tensor,
instead of twenty to a hundred.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..numerics import rounding
from ..numerics.formats import REFERENCE, NumberFormat

if TYPE_CHECKING or find_spec("triton") is not None:
    from .rounding_kernel import round_by_kernel, takes

logger = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The least that Triton supports.
_AMPERE = (8, 0)


def fake_quantize(
    x: Tensor,
    format: NumberFormat,
    operand: str,
    contracts: int,
    key: int | None = None,
    rank: int = 0,
    ranks: int = 1,
    amax: Tensor | None = None,
) -> Tensor:
    """Returns what a GEMM in a format sees of x, (R, C), in FP32: quantized, times its scales; x itself unquantized.

    Autograd does not see into it.

    Args:
        x: (R, C).
        format: of the GEMM.
        operand: which of its operands x is (`gemms.OPERANDS`).
        contracts: the dimension of x that the GEMM contracts, 0 or 1.
        key: of the random numbers of operands that are rounded stochastically or get noise; others, or without one,
            are rounded to nearest.
        rank, ranks: as in `rounding.quantize_tiles`.
        amax: as in `rounding.round_operand`.

    Raises:
        ValueError: x is not a 2-D floating-point tensor.
    """
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"fake_quantize expects a 2-D floating-point tensor, got shape {tuple(x.shape)}, {x.dtype}.")
    if format.grid is None or not format.operand(operand).quantized:
        return x.to(torch.float32)
    if x.numel() > 0 and x.dtype in _DTYPES and has_kernels(x.device) and takes(format, operand):
        return round_by_kernel(x, format, operand, contracts, key, rank, ranks, amax)
    with torch.no_grad():
        return rounding.round_operand(x, format, operand, contracts, key, rank, ranks, amax)


def capability(device: torch.device) -> tuple[int, int]:
    """Returns the compute capability of an NVIDIA GPU; (0, 0) for other devices."""
    if device.type != "cuda" or torch.version.cuda is None:
        return 0, 0
    return torch.cuda.get_device_capability(device)


@cache
def has_kernels(device: torch.device) -> bool:
    """Returns True if Triton's kernels run on a device, by a trial: they are compiled there, with a C compiler."""
    if find_spec("triton") is None or capability(device) < _AMPERE:
        return False
    try:
        round_by_kernel(torch.ones(1, 1, device=device), REFERENCE, "activation", 1)
    except Exception as error:
        # Only the time differs.
        logger.warning("snip-hf: rounding takes 20 to 100 kernels instead of one, since Triton fails: %s", error)
        return False
    return True
