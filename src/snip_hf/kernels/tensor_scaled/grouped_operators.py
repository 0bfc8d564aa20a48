"""The operators of layers of several matrices: operands folded into E4M3 with a scale of each matrix, and products.

Legend: S tokens of all matrices, E matrices, C channels, P places (`places`). torch.compile does not look into them, as
in `operators`. On a GPU the kernels of `grouped_tiles` and torch's grouped FP8 product run, elsewhere
`grouped_reference`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...numerics.gemms import GEMMS
from ..launching import launch
from ..tensor_core import Quantized
from . import grouped_reference, operators
from .folding import BLOCK
from .records import Records

if TYPE_CHECKING or find_spec("triton") is not None:
    from .grouped_tiles import grouped_fold_kernel, grouped_scales_kernel

# Channels of a program of `grouped_fold_kernel`, at most, for activations, gradients and weights: as `operators.TILES`.
_WIDTHS = (64, 32, 64)
# Channels and warps of a program of `grouped_scales_kernel`, and the most programs, of all and of those that count.
_PART = (128, 4, 1056, 64)
_GRADIENT = 1  # in `gemms.OPERANDS`
BY_ROWS, BY_COLUMNS, OVER_TOKENS = range(3)
"""How a product reads its right operand: see `grouped_product`."""

_library = torch.library.Library("snip_hf", "FRAGMENT")
_library.define(
    "fold_grouped(Tensor x, Tensor? blocks, Tensor[] layer, int operand, int matrices, int[] gemms, bool counts) -> "
    "(Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "grouped_product(Tensor[] operands, Tensor ends, int kind, bool fast, Tensor? record=None, int gemm=-1) -> Tensor"
)


def _outputs(x: Tensor, blocks: Tensor | None, matrices: int, gemms: Sequence[int]) -> Quantized:
    places, channels = x.shape[0] if blocks is None else blocks.shape[0] * BLOCK, x.shape[1]
    has_rows, has_columns = int(gemms[0] >= 0), int(gemms[1] >= 0)
    fp8, fp32 = torch.float8_e4m3fn, torch.float32
    return (
        x.new_empty(places * has_rows, channels, dtype=fp8),
        x.new_empty(matrices * has_rows, dtype=fp32),
        x.new_empty(channels * has_columns, places, dtype=fp8),
        x.new_empty(matrices * has_columns, dtype=fp32),
    )


@torch.library.impl(_library, "fold_grouped", "CompositeExplicitAutograd")
def _fold(
    x: Tensor,
    blocks: Tensor | None,
    layer: Sequence[Tensor],
    operand: int,
    matrices: int,
    gemms: Sequence[int],
    counts: bool,
) -> Quantized:
    outputs = _outputs(x, blocks, matrices, gemms)
    fold_grouped_into(x, blocks, layer, operand, (gemms[0], gemms[1]), counts, outputs)
    return outputs


@torch.library.register_fake("snip_hf::fold_grouped", lib=_library)
def _(
    x: Tensor,
    blocks: Tensor | None,
    layer: Sequence[Tensor],
    operand: int,
    matrices: int,
    gemms: Sequence[int],
    counts: bool,
) -> Quantized:
    return _outputs(x, blocks, matrices, gemms)


fold_grouped = torch.ops.snip_hf.fold_grouped
"""Folds the operands of several matrices for two GEMMs.

Args:
    x: (S, C), BF16 or FP32, which is rounded to BF16 first; tokens as `Places` says, or the rows of all matrices, as
        many of each, one matrix's behind the other's. C is a multiple of 32, as is the number of a matrix's rows.
    blocks: of `Places`; None: x are the matrices.
    layer: state, record and table, as in `operators.fold_operand`, as are operand and counts. A gradient is rounded
        with the random numbers of each matrix (`random_streams.matrix_keys`).
    matrices: how many.
    gemms: the GEMM that contracts C, numbered as in `gemms.GEMMS`, or -1: rows are left out, and come back empty; and
        the one that contracts S, likewise.

Returns: rows (P, C) E4M3 and the scale of each matrix (E,), columns (C, P) and theirs. Places without a token are zero.
"""


def fold_grouped_into(
    x: Tensor,
    blocks: Tensor | None,
    layer: Sequence[Tensor],
    operand: int,
    gemms: tuple[int, int],
    counts: bool,
    outputs: Sequence[Tensor],
    by_kernel: bool | None = None,
) -> None:
    """As `fold_grouped`, into the tensors that it gave.

    Args:
        x, blocks, layer, operand, gemms, counts, outputs: as there.
        by_kernel: None leaves the choice to the device.
    """
    if max(gemms) < 0:
        return
    if x.is_cuda if by_kernel is None else by_kernel:
        x = x if x.stride(1) == 1 else x.contiguous()
        with torch.cuda.device_of(x):  # Triton launches on the current device
            _launch(x, blocks, layer, operand, gemms, counts, outputs)
    else:
        grouped_reference.fold(x, blocks, layer, operand, gemms, counts, outputs)


def folded(
    x: Tensor,
    blocks: Tensor | None,
    state: Tensor,
    records: Records,
    operand: int,
    matrices: int,
    gemms: tuple[int, int],
    by_kernel: bool | None = None,
) -> Quantized:
    """Returns `fold_grouped` by the kernels or by the reference; the records take note."""
    outputs, layer = _outputs(x, blocks, matrices, gemms), (state, records.record, records.table)
    fold_grouped_into(x, blocks, layer, operand, gemms, True, outputs, by_kernel)
    return outputs


def _launch(
    x: Tensor,
    blocks: Tensor | None,
    layer: Sequence[Tensor],
    operand: int,
    gemms: tuple[int, int],
    counts: bool,
    outputs: Sequence[Tensor],
) -> None:
    rows, row_scales, columns, column_scales = outputs
    (state, record, table), channels = layer, x.shape[1]
    matrices = max(row_scales.shape[0], column_scales.shape[0])
    count = x.shape[0] // BLOCK if blocks is None else blocks.shape[0]
    is_even, height = blocks is None, x.shape[0] // matrices if blocks is None else 0
    own, table_of = record[operand], state if blocks is None else blocks
    needs = operators.needs_scales(record, operand, gemms, counts)
    amaxes = torch.zeros(matrices if needs else 0, dtype=torch.int32, device=x.device)
    if needs:
        width, warps, programs, counting = _PART
        parts = count * (-(-channels // width))
        launch(
            grouped_scales_kernel,
            (min(parts, programs),),
            (x, table_of, state, own, table, amaxes),
            (height, channels, x.stride(0), parts),
            (*gemms, counts, counting, is_even, width),
            num_warps=warps,
        )
    width = min(_WIDTHS[operand], channels & -channels)
    launch(
        grouped_fold_kernel,
        (channels // width * count,),
        (x, table_of, state, own, table, amaxes, row_scales, column_scales, rows, columns),
        (height, channels, count * BLOCK, x.stride(0)),
        (gemms[0] >= 0, gemms[1] >= 0, *gemms, needs, operand == _GRADIENT, counts, is_even, width),
        num_warps=1,
        enable_fp_fusion=True,  # products with powers of two are exact
    )


@torch.library.impl(_library, "grouped_product", "CompositeExplicitAutograd")
def _product(
    operands: Sequence[Tensor], ends: Tensor, kind: int, fast: bool, record: Tensor | None = None, gemm: int = -1
) -> Tensor:
    left, left_scales, right, right_scales = operands
    right = _third(right, ends.shape[0], kind)
    if not left.is_cuda:
        return grouped_reference.product(left, left_scales, right, right_scales, ends)
    # All factors on one side, so that the FP32 sum is multiplied once by what matters, and once by 1.
    factors, ones = (left_scales * right_scales)[:, None], torch.ones
    if kind == OVER_TOKENS:
        scales = factors.expand(-1, left.shape[0]).reshape(-1), ones(ends.shape[0] * right.shape[1], device=left.device)
    else:
        scales = ones(left.shape[0], device=left.device), factors.expand(-1, right.shape[2]).contiguous()
    result: Tensor = torch.ops.aten._scaled_grouped_mm.default(
        left, right, *scales, ends, None, None, torch.bfloat16, fast or operators.sums_fast(record, gemm)
    )
    return result


def _third(right: Tensor, matrices: int, kind: int) -> Tensor:
    """Returns a right operand as torch's product reads it: (E, K, N), or (P, N) where tokens are contracted."""
    if kind == BY_ROWS:
        return right.view(matrices, -1, right.shape[1]).transpose(1, 2)
    if kind == BY_COLUMNS:
        return right.view(right.shape[0], matrices, -1).permute(1, 2, 0)
    return right.t()


@torch.library.register_fake("snip_hf::grouped_product", lib=_library)
def _(
    operands: Sequence[Tensor], ends: Tensor, kind: int, fast: bool, record: Tensor | None = None, gemm: int = -1
) -> Tensor:
    left, _, right, _ = operands
    if kind == OVER_TOKENS:
        return left.new_empty(ends.shape[0], left.shape[0], right.shape[0], dtype=torch.bfloat16)
    columns = right.shape[0] // (ends.shape[0] if kind == BY_ROWS else 1)
    return left.new_empty(left.shape[0], columns, dtype=torch.bfloat16)


def multiply_grouped(
    gemm: str, left: Sequence[Tensor], right: Sequence[Tensor], ends: Tensor, kind: int, record: Tensor | None
) -> Tensor:
    """Returns the products of a GEMM, one of each matrix, BF16 of FP32 sums.

    Args:
        gemm: one of `gemms.GEMMS`.
        left: E4M3 and the scale of each matrix: (P, K), or (M, P) where tokens are contracted.
        right: likewise: by rows (E * N, K), by columns (N, E * K), over tokens (N, P).
        ends: matrix -> where its places end, int32.
        kind: which of these three.
        record: the layer's; None: sums are fast only where they are in every format.

    Returns: (P, N), in places behind the last end anything; or (E, M, N).
    """
    product: Tensor = torch.ops.snip_hf.grouped_product(
        [*left, *right], ends, kind, operators.FAST_SUMS[gemm], record, GEMMS.index(gemm)
    )
    return product
