"""The memory of folded operands: rows and columns in E4M3, padded, with their parameters.

Legend: as in `operators`.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ..tensor_core import Quantized
from .folding import PARAMETERS

MULTIPLE = 64


def padded(size: int) -> int:
    return (size + MULTIPLE - 1) // MULTIPLE * MULTIPLE


def parts_of(size: int, width: int) -> int:
    """Returns how many parts of a width a size has. `triton.cdiv` takes over a microsecond."""
    return (size + width - 1) // width


def empty_layouts(x: Tensor, row_gemm: int, column_gemm: int) -> Quantized:
    tokens, channels = padded(x.shape[0]), padded(x.shape[1])
    has_rows, has_columns = int(row_gemm >= 0), int(column_gemm >= 0)
    fp8, fp32 = torch.float8_e4m3fn, torch.float32
    return (
        x.new_empty(tokens * has_rows, channels, dtype=fp8),
        x.new_empty(PARAMETERS * has_rows, dtype=fp32),
        x.new_empty(channels * has_columns, tokens, dtype=fp8),
        x.new_empty(PARAMETERS * has_columns, dtype=fp32),
    )


def one_layout(x: Tensor, row_gemm: int, column_gemm: int) -> Quantized:
    """As `empty_layouts` for one GEMM, where the layout that is left out is not given on: all share one."""
    tokens, channels = padded(x.shape[0]), padded(x.shape[1])
    parameters = x.new_empty(PARAMETERS, dtype=torch.float32)
    if row_gemm >= 0:
        return x.new_empty(tokens, channels, dtype=torch.float8_e4m3fn), parameters, *_nothing(x.device)
    return *_nothing(x.device), x.new_empty(channels, tokens, dtype=torch.float8_e4m3fn), parameters


@cache
def _nothing(device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        return (
            torch.empty(0, 0, dtype=torch.float8_e4m3fn, device=device),
            torch.empty(0, dtype=torch.float32, device=device),
        )
