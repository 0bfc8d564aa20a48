"""The three GEMMs on FP8 tensor cores: quantization in one pass, and cuBLASLt's block-scaled product.

Every FP4 value is an FP8 (E4M3) value, so both grids are stored as E4M3 and multiplied by the same GEMM
(docs/method.md, section 1). Kernels read the format of each operand from the layer's `state`: a new plan is new data
for the same code.

Legend: T tokens, C channels, I in_features, O out_features; T', C', I', O' are rounded up to whole tiles, filled with
zeros. An operand is stored with the contracted dimension last, with one FP32 scale per 128 elements along it
("rows", "columns") or per 128x128 block (weights). GEMMs are numbered as in `numerics.gemms.GEMMS`; number -1 leaves a
layout out, and empty tensors come back for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...numerics.gemms import TILE
from ..triton_numerics import INTERPRETED
from .tiles import tokens_kernel, weight_kernel

# torch.nn.functional.ScalingType: one scale per 1x128 and per 128x128 elements.
_ROWS, _SQUARES = 4, 5


def _launched(kernel: Any) -> Any:
    """Returns the kernel in the form that torch.compile can trace."""
    return kernel if INTERPRETED.value else torch.library.wrap_triton(kernel)


def _padded(size: int) -> int:
    return (size + TILE - 1) // TILE * TILE


def _blocks(size: int) -> int:
    """Returns the scales per row of blocks: cuBLASLt needs a multiple of four."""
    return (size + 4 * TILE - 1) // (4 * TILE) * 4


def _tokens_outputs(x: Tensor, row_gemm: int, column_gemm: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, channels = _padded(x.shape[0]), _padded(x.shape[1])
    fp8, fp32 = torch.float8_e4m3fn, torch.float32
    has_rows, has_columns = int(row_gemm >= 0), int(column_gemm >= 0)
    return (
        x.new_empty(tokens * has_rows, channels, dtype=fp8),
        x.new_empty(channels // TILE * has_rows, tokens, dtype=fp32),
        x.new_empty(channels * has_columns, tokens, dtype=fp8),
        x.new_empty(tokens // TILE * has_columns, channels, dtype=fp32),
    )


@torch.library.triton_op("snip_hf::quantize_tokens", mutates_args=())
def quantize_tokens(
    x: Tensor, state: Tensor, row_gemm: int, column_gemm: int, is_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantizes activations or output gradients for two GEMMs in one pass over them.

    Args:
        x: (T, C), BF16.
        state: the layer's, on x's device.
        row_gemm: the GEMM that contracts C; its tiles are 1x128.
        column_gemm: the GEMM that contracts T; its tiles are 128x1.
        is_gradient: rounds to FP4 stochastically.

    Returns: rows (T', C') E4M3, their scales (C' / 128, T'), columns (C', T') E4M3, their scales (T' / 128, C').
    """
    outputs = _tokens_outputs(x, row_gemm, column_gemm)
    tokens, channels = x.shape
    if x.numel() == 0 or (row_gemm < 0 and column_gemm < 0):
        return outputs
    if x.stride(1) != 1:
        x = x.contiguous()
    padded_tokens, padded_channels = _padded(tokens), _padded(channels)
    # The fastest sizes of those tried on an H200 (docs/log/2026-11.md).
    row_runs, width = 8 * (row_gemm >= 0), (16 if is_gradient else 32) * (column_gemm >= 0)
    parts = (TILE // 4 // row_runs if row_runs else 0) + (TILE // width if width else 0)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _launched(tokens_kernel)[(parts * (padded_channels // TILE), padded_tokens // TILE)](
            x,
            state,
            *outputs,
            tokens,
            channels,
            padded_tokens,
            padded_channels,
            x.stride(0),
            ROW_GEMM=row_gemm,
            COLUMN_GEMM=column_gemm,
            IS_GRADIENT=is_gradient,
            RAGGED=padded_tokens != tokens or padded_channels != channels,
            ROW_RUNS=row_runs,
            WIDTH=width,
            num_warps=2,
        )
    return outputs


Weights = tuple[Tensor, Tensor, Tensor, Tensor]


def _weight_outputs(weight: Tensor, forward: bool, grad_input: bool) -> Weights:
    rows, columns = weight.shape
    fp8, fp32, forwards, backwards = torch.float8_e4m3fn, torch.float32, int(forward), int(grad_input)
    return (
        weight.new_empty(_padded(rows) * forwards, _padded(columns), dtype=fp8),
        weight.new_empty(_padded(rows) // TILE * forwards, _blocks(columns), dtype=fp32),
        weight.new_empty(_padded(columns) * backwards, _padded(rows), dtype=fp8),
        weight.new_empty(_padded(columns) // TILE * backwards, _blocks(rows), dtype=fp32),
    )


@torch.library.triton_op("snip_hf::quantize_weight", mutates_args=())
def quantize_weight(
    weight: Tensor, state: Tensor, forward: bool, grad_input: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantizes a weight, rounded to BF16 first, in 128x128 blocks for the two GEMMs that read it.

    Args:
        weight: (O, I), FP32 or BF16.
        state: the layer's, on the weight's device.
        forward: True if the forward GEMM needs it.
        grad_input: True if the grad_input GEMM needs it.

    Returns: for the forward GEMM (O', I') E4M3 and scales (O' / 128, I' / 128 rounded up to 4); for grad_input the
    transposed (I', O') and scales (I' / 128, O' / 128 rounded up to 4).
    """
    outputs = _weight_outputs(weight, forward, grad_input)
    if weight.numel() > 0 and (forward or grad_input):
        quantize_weight_into(weight, state, outputs)
    return outputs


def quantize_weight_into(weight: Tensor, state: Tensor, outputs: Sequence[Tensor]) -> None:
    """Quantizes like `quantize_weight`, but overwrites the tensors it returned; skips empty ones."""
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    (rows, columns), padded_rows, padded_columns = weight.shape, _padded(weight.shape[0]), _padded(weight.shape[1])
    with torch.cuda.device_of(weight):  # Triton launches on the current device
        _launched(weight_kernel)[(padded_columns // TILE, padded_rows // TILE)](
            weight,
            state,
            *outputs,
            rows,
            columns,
            padded_rows,
            padded_columns,
            _blocks(rows),
            _blocks(columns),
            weight.stride(0),
            FORWARD=outputs[0].shape[0] > 0,
            GRAD_INPUT=outputs[2].shape[0] > 0,
            RAGGED=padded_rows != rows or padded_columns != columns,
            num_warps=8,
        )


def multiply(
    left: Tensor,
    left_scales: Tensor,
    right: Tensor,
    right_scales: Tensor,
    square: bool,
    rows: int,
    columns: int,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Returns left @ right^T, (rows, columns), summed in FP32 by cuBLASLt.

    Args:
        left: (M', K') E4M3.
        left_scales: (K' / 128, M').
        right: (N', K') E4M3.
        right_scales: (N' / 128, K' / 128 rounded up to 4) of 128x128 blocks if `square`, else (K' / 128, N').
        square: see right_scales.
        rows: M without the padding.
        columns: N without the padding.
        dtype: of the result, BF16 or FP32.
    """
    return torch.ops.snip_hf.multiply(left, left_scales, right, right_scales, square, rows, columns, dtype)


# Through `Library` and not `custom_op`, which costs 35 microseconds more per call on the host.
_library = torch.library.Library("snip_hf", "FRAGMENT")
_library.define(
    "multiply(Tensor left, Tensor left_scales, Tensor right, Tensor right_scales, bool square, SymInt rows, "
    "SymInt columns, ScalarType dtype) -> Tensor"
)


@torch.library.impl(_library, "multiply", "CUDA")
def _multiply(
    left: Tensor,
    left_scales: Tensor,
    right: Tensor,
    right_scales: Tensor,
    square: bool,
    rows: int,
    columns: int,
    dtype: torch.dtype,
) -> Tensor:
    if left.shape[1] == 0 or rows == 0:
        return left.new_zeros(rows, columns, dtype=dtype)
    product: Tensor = torch.ops.aten._scaled_mm_v2.default(
        left,
        right.t(),
        [left_scales.t()],
        [_ROWS],
        [],
        [right_scales.t()],
        [_SQUARES if square else _ROWS],
        [],
        None,
        dtype,
        [],
        False,
    )
    return product if product.shape == (rows, columns) else product[:rows, :columns].contiguous()


@torch.library.register_fake("snip_hf::multiply", lib=_library)
def _(left: Tensor, *rest: Any) -> Tensor:
    *_, rows, columns, dtype = rest
    return left.new_empty(rows, columns, dtype=dtype)
