"""The operators of the backend: an operand folded into E4M3, and the product with one scale per operand.

torch.compile does not look into them: it would take what the kernels note in a layer's record for a change of an input.
The notes have no part in what an operator returns, in any order and however often a pass is computed again.

Legend: T tokens, C channels, I in_features, O out_features; R', C' are R, C rounded up to a multiple of 64, filled with
zeros. On a GPU the kernels of `tiles` run, elsewhere `reference`, and a product in FP32.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...numerics.gemms import GEMMS
from ..launching import is_elsewhere, launch, relaunch
from ..tensor_core import Quantized
from . import reference
from .layouts import MULTIPLE, empty_layouts, one_layout, padded, parts_of
from .notes import Note, note_of
from .records import Records

if TYPE_CHECKING or find_spec("triton") is not None:
    from .scale_tiles import scales_kernel
    from .tiles import fold_kernel

# Whether partial sums stay in the tensor cores' 14 bits over the whole contraction instead of 128 elements of it: in
# every format, and where the format is folded (docs/log.md has the errors).
FAST_SUMS = {"forward": False, "grad_input": False, "grad_weight": False}
FAST_SUMS_FOLDED = {"forward": True, "grad_input": True, "grad_weight": True}
Tile = tuple[int, int, int, int | None]
"""Runs of tokens, channels and warps of a program of `fold_kernel`, and the most registers of a thread; None: any."""
# For activations, gradients and weights: the fastest of those tried on an H200 (docs/log.md), but for weights.
TILES: tuple[Tile, Tile, Tile] = ((8, 64, 1, None), (8, 32, 1, None), (8, 64, 1, None))
# Rows, columns and warps of a program of `scales_kernel`, and the most programs, of all and of those that count.
_PART = (8, 512, 4, 1056, 64)
# Whether the launch that finds the scales of an operand is left out where they are known.
SPARES_LAUNCHES = True
_GRADIENT, _WEIGHT = 1, 2  # in `gemms.OPERANDS`

# Through `Library` and not `custom_op`, which costs 35 microseconds more per call on the host.
_library = torch.library.Library("snip_hf", "FRAGMENT")
_library.define(
    "fold_operand(Tensor x, Tensor state, Tensor record, Tensor table, int operand, int[] gemms, bool counts, "
    "Tensor? after=None) -> (Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "tensor_scaled_product(Tensor[] operands, SymInt rows, SymInt columns, bool fast, ScalarType dtype, "
    "Tensor? record=None, int gemm=-1) -> Tensor"
)
_library.define(
    "tensor_scaled_weight_product(Tensor[] left, Tensor weight, Tensor[] tensors, int gemm, bool[] how, SymInt rows, "
    "ScalarType dtype) -> Tensor[]"
)


def runs_kernels(x: Tensor) -> bool:
    """Returns True if the kernels of `tiles` and torch's FP8 products run where a tensor is."""
    return x.is_cuda


def is_captured(x: Tensor) -> bool:
    """Returns True if what is launched now becomes part of a CUDA graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


@torch.library.impl(_library, "fold_operand", "CompositeExplicitAutograd")
def _fold(
    x: Tensor,
    state: Tensor,
    record: Tensor,
    table: Tensor,
    operand: int,
    gemms: Sequence[int],
    counts: bool,
    after: Tensor | None = None,
) -> Quantized:
    row_gemm, column_gemm = gemms
    outputs = empty_layouts(x, row_gemm, column_gemm)
    fold_into(x, state, (record, table), operand, (row_gemm, column_gemm), counts, outputs)
    return outputs


@torch.library.register_fake("snip_hf::fold_operand", lib=_library)
def _(
    x: Tensor,
    state: Tensor,
    record: Tensor,
    table: Tensor,
    operand: int,
    gemms: Sequence[int],
    counts: bool,
    after: Tensor | None = None,
) -> Quantized:
    return empty_layouts(x, *gemms)


fold_operand = torch.ops.snip_hf.fold_operand
"""Folds an operand for two GEMMs.

Args:
    x: (R, C), BF16 or FP32, which is rounded to BF16 first.
    state: the layer's, on x's device.
    record, table: the layer's (`records.Records`).
    operand: which of `gemms.OPERANDS` x is. A gradient is rounded stochastically in folded formats.
    gemms: the GEMM that contracts C, numbered as in `gemms.GEMMS`, or -1: rows are left out, and come back empty; and
        the one that contracts R, likewise.
    counts: whether the pass is trained on, so that the record takes note of it.
    after: not read; a compiled graph runs the operator where this is known.

Returns: rows (R', C') E4M3 and their parameters (`folding`), columns (C', R') and theirs.
"""


def fold_into(
    x: Tensor,
    state: Tensor,
    tensors: tuple[Tensor, Tensor],
    operand: int,
    gemms: tuple[int, int],
    counts: bool,
    outputs: Sequence[Tensor],
    by_kernel: bool | None = None,
) -> None:
    """As `fold_operand`, into the tensors that it gave.

    Args:
        x, state, operand, counts, outputs: as there.
        tensors: record and table.
        gemms: the row and the column GEMM.
        by_kernel: None leaves the choice to the device.
    """
    record, table = tensors
    if x.numel() == 0 or max(gemms) < 0:
        for output in outputs:
            output.view(torch.uint8).zero_()
    elif runs_kernels(x) if by_kernel is None else by_kernel:
        if is_elsewhere(x):  # Triton launches on the current device
            with torch.cuda.device_of(x):
                return fold_into(x, state, tensors, operand, gemms, counts, outputs, by_kernel)
        x = x if x.stride(1) == 1 else x.contiguous()
        note = note_of(record)
        row = record[operand] if note is None else note.rows[operand]
        if _needs_scales(note, record, operand, gemms, counts):
            find_scales(x, state, (row, table), gemms, counts, outputs)
            launch_fold(x, state, row, operand, counts, outputs)
        else:
            launch_fold(x, state, row, operand, counts, outputs, known=(table, gemms))
    else:
        found = reference.fold(x, state, record, table, operand, gemms, counts)
        for index, layout in enumerate(found):
            if layout is not None:
                outputs[2 * index].copy_(reference.padded(layout[0], MULTIPLE))
                outputs[2 * index + 1].copy_(layout[1])


def needs_scales(record: Tensor, operand: int, gemms: tuple[int, int], counts: bool) -> bool:
    """Returns True if the scales of an operand need a launch of their own, or its blocks are to be counted in it.

    In a graph that is captured they always have one: it is replayed under other plans too.
    """
    return _needs_scales(note_of(record), record, operand, gemms, counts)


def _needs_scales(note: Note | None, record: Tensor, operand: int, gemms: tuple[int, int], counts: bool) -> bool:
    if not SPARES_LAUNCHES or note is None or not note.is_settled(operand, gemms):
        return True
    return (counts and note.looks) or is_captured(record)


def folded(
    x: Tensor, state: Tensor, records: Records, operand: int, gemms: tuple[int, int], by_kernel: bool | None = None
) -> Quantized:
    """Returns `fold_operand` by the kernels or by the reference; the records take note."""
    outputs = empty_layouts(x, *gemms)
    fold_into(x, state, (records.record, records.table), operand, gemms, True, outputs, by_kernel)
    return outputs


def find_scales(
    x: Tensor,
    state: Tensor,
    tensors: tuple[Tensor, Tensor],
    gemms: tuple[int, int],
    counts: bool,
    outputs: Sequence[Tensor],
) -> None:
    """Launches `scales_kernel` with the operand's record and the table."""
    (tokens, channels), (row_gemm, column_gemm) = x.shape, gemms
    height, width, warps, programs, counting = _PART
    parts = parts_of(tokens, height) * parts_of(channels, width)
    launch(
        scales_kernel,
        (min(parts, programs),),
        (x, state, *tensors, outputs[1], outputs[3]),
        (tokens, channels, x.stride(0), parts),
        (row_gemm, column_gemm, counts, counting, height, width),
        num_warps=warps,
    )


def launch_fold(
    x: Tensor,
    state: Tensor,
    record: Tensor,
    operand: int,
    counts: bool,
    outputs: Sequence[Tensor],
    tile: Tile | None = None,
    known: tuple[Tensor, tuple[int, int]] | None = None,
) -> None:
    """Launches `fold_kernel`, with the parameters of the layouts in `outputs`.

    Args:
        x, state, operand, counts, outputs: as in `fold_into`.
        record: of the operand.
        tile: None: the fastest known.
        known: the table, and the row and the column GEMM, where the kernel takes the parameters from the exponent in
            force and writes them; None: `scales_kernel` has written them.
    """
    rows, row_parameters, columns, column_parameters = outputs
    table, gemms = known or (row_parameters, (-1, -1))
    tensors = x, state, record, table, row_parameters, column_parameters, rows, columns
    layouts, pitch, tile = (rows.shape[0] > 0, columns.shape[0] > 0), x.stride(0), tile or TILES[operand]
    key = fold_kernel.fn, x.get_device(), x.dtype, x.shape, pitch, operand, counts, layouts, known is None, gemms, tile
    if relaunch(key, tensors):
        return
    tokens, channels = x.shape
    padded_tokens, padded_channels = padded(tokens), padded(channels)
    runs, width, warps, registers = tile
    is_ragged = padded_tokens != tokens or padded_channels != channels
    launch(
        fold_kernel,
        (parts_of(padded_channels, width), parts_of(padded_tokens, 4 * runs)),
        tensors,
        (tokens, channels, padded_tokens, padded_channels, pitch),
        (*layouts, *gemms, known is not None, operand == _GRADIENT, counts, is_ragged, runs, width),
        key=key,
        num_warps=warps,
        maxnreg=registers,
        enable_fp_fusion=True,  # products with powers of two are exact
    )


@torch.library.impl(_library, "tensor_scaled_product", "CompositeExplicitAutograd")
def _product(
    operands: Sequence[Tensor],
    rows: int,
    columns: int,
    fast: bool,
    dtype: torch.dtype,
    record: Tensor | None = None,
    gemm: int = -1,
) -> Tensor:
    left, left_parameters, right, right_parameters = operands
    if left.numel() == 0 or right.numel() == 0:
        return left.new_zeros(rows, columns, dtype=dtype)
    if not runs_kernels(left):
        with torch.autocast("cpu", enabled=False):
            a, b = left.to(torch.float32) * left_parameters[0], right.to(torch.float32) * right_parameters[0]
            return (a @ b.t())[:rows, :columns].to(dtype).contiguous()
    product: Tensor = torch._scaled_mm(
        left, right.t(), left_parameters[:1], right_parameters[:1], None, None, dtype, fast or sums_fast(record, gemm)
    )
    return product if product.shape == (rows, columns) else product[:rows, :columns].contiguous()


def sums_fast(record: Tensor | None, gemm: int) -> bool:
    """Returns True if a layer's GEMM may have fast sums because its format is folded."""
    return FAST_SUMS_FOLDED[GEMMS[gemm]] and is_folded(record, gemm)


def is_folded(record: Tensor | None, gemm: int) -> bool:
    """Returns True if a layer's GEMM is known to have a format that is folded.

    Not in a graph that is captured: it is replayed under other plans too.
    """
    note = None if record is None else note_of(record)
    if record is None or note is None or not note.folded[gemm]:
        return False
    return not is_captured(record)


@torch.library.register_fake("snip_hf::tensor_scaled_product", lib=_library)
def _(
    operands: Sequence[Tensor],
    rows: int,
    columns: int,
    fast: bool,
    dtype: torch.dtype,
    record: Tensor | None = None,
    gemm: int = -1,
) -> Tensor:
    return operands[0].new_empty(rows, columns, dtype=dtype)


def multiply(
    gemm: str,
    left: Sequence[Tensor],
    right: Sequence[Tensor],
    shape: tuple[int, int],
    dtype: torch.dtype,
    record: Tensor | None = None,
) -> Tensor:
    """Returns left @ right^T of a GEMM, summed in FP32.

    Args:
        gemm: one of `gemms.GEMMS`.
        left: (M', K') E4M3 and its parameters.
        right: (N', K') and its.
        shape: M and N without the padding.
        dtype: of the result, BF16 or FP32.
        record: the layer's; None: sums are fast only where they are in every format.
    """
    product: Tensor = torch.ops.snip_hf.tensor_scaled_product(
        [*left, *right], *shape, FAST_SUMS[gemm], dtype, record, GEMMS.index(gemm)
    )
    return product


@torch.library.impl(_library, "tensor_scaled_weight_product", "CompositeExplicitAutograd")
def _weight_product(
    left: Sequence[Tensor],
    weight: Tensor,
    tensors: Sequence[Tensor],
    gemm: int,
    how: Sequence[bool],
    rows: int,
    dtype: torch.dtype,
) -> list[Tensor]:
    (state, record, table), (keeps, counts, fast), is_forward = tensors, how, gemm == 0
    gemms = 0 if is_forward else -1, 1 if keeps or not is_forward else -1
    outputs = empty_layouts(weight, *gemms) if keeps else one_layout(weight, *gemms)
    fold_into(weight, state, (record, table), _WEIGHT, gemms, counts, outputs)
    right = outputs[:2] if is_forward else outputs[2:]
    product = _product([*left, *right], rows, weight.shape[gemm], fast, dtype, record, gemm)
    return [product, *outputs[2:]] if keeps else [product]


@torch.library.register_fake("snip_hf::tensor_scaled_weight_product", lib=_library)
def _(
    left: Sequence[Tensor],
    weight: Tensor,
    tensors: Sequence[Tensor],
    gemm: int,
    how: Sequence[bool],
    rows: int,
    dtype: torch.dtype,
) -> list[Tensor]:
    product = weight.new_empty(rows, weight.shape[gemm], dtype=dtype)
    return [product, *empty_layouts(weight, -1, 1)[2:]] if how[0] else [product]


def multiply_weight(
    gemm: str,
    left: Sequence[Tensor],
    weight: Tensor,
    tensors: Sequence[Tensor],
    how: tuple[bool, bool],
    rows: int,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Returns the product of an operand with a layer's weight, which is folded for it; and the weight for grad_input.

    One operator instead of two: the host takes some microseconds for each, over a hundred times per step.

    Args:
        gemm: "forward" or "grad_input".
        left: (M', K') E4M3 and its parameters.
        weight: (O, I).
        tensors: the layer's state, record and table.
        how: whether the weight is folded for grad_input too, in the forward GEMM; whether the record takes note of it.
        rows: M without the padding.
        dtype: of the product, BF16 or FP32.

    Returns: the product, and, if it is asked for, (I', O') E4M3 with its parameters.
    """
    found: list[Tensor] = torch.ops.snip_hf.tensor_scaled_weight_product(
        list(left), weight.detach(), list(tensors), GEMMS.index(gemm), [*how, FAST_SUMS[gemm]], rows, dtype
    )
    return found
