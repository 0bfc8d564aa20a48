"""The operators of the backend: encoding an operand as E4M3, and FP8 products with one scale per matrix.

torch.compile does not look into them: it would treat kernels' writes to a layer's record as changes of an input.
Results never depend on those writes, in any order and however often a pass is recomputed.

Legend: T tokens, C channels, I in_features, O out_features; R', C' are R, C rounded up to a multiple of 64, filled with
zeros. Layers of several matrices have S tokens, E matrices, and P slots (`slots`) without further padding. On a GPU the
kernels of `tiles` and torch's FP8 products run, elsewhere `reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...numerics.formats import format_of_code
from ...numerics.gemms import GEMMS
from ..emulated import EMULATED
from ..launching import launch, relaunch
from ..tensor_core import Quantized
from . import reference
from .encoding import BLOCK, PARAMETERS, SCALE
from .exponents import HostView, Records, follow, view_of
from .reference import LayerTensors

if TYPE_CHECKING or find_spec("triton") is not None:
    from .tiles import encode_kernel, encode_matrices_kernel, matrix_scales_kernel, scales_kernel

ACTIVATION, GRADIENT, WEIGHT = range(3)  # in `gemms.OPERANDS`
MULTIPLE = 64

Tile = tuple[int, int, int, int | None]
"""(runs of 4 tokens, channels, num_warps, maxnreg) of a program of `encode_kernel`."""
# For activations, gradients and weights. The first two are the fastest of those tried on an H200 (docs/log/2026-11.md).
TILES: tuple[Tile, Tile, Tile] = ((8, 64, 1, None), (8, 32, 1, None), (8, 64, 1, None))
# Rows, columns and warps of a program of `scales_kernel`; most programs; most programs that count blocks.
_PART = (8, 512, 4, 1056, 64)
# For several matrices: most channels of a program of `encode_matrices_kernel`, by operand; channels and warps of a
# program of `matrix_scales_kernel`, most programs, and most programs that count blocks.
_WIDTHS = (64, 32, 64)
_MATRIX_PART = (128, 4, 1056, 64)

BY_ROWS, BY_COLUMNS, OVER_TOKENS = range(3)
"""Layouts of the right operand of `grouped_product`."""

# Through `Library` and not `custom_op`, which costs 35 microseconds more per call on the host.
_library = torch.library.Library("snip_hf", "FRAGMENT")
_library.define(
    "encode_operand(Tensor x, Tensor state, Tensor record, Tensor table, int operand, int[] gemms, bool counts, "
    "Tensor? after=None, int matrices=0, Tensor? blocks=None) -> (Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "tensor_scaled_product(Tensor[] operands, SymInt rows, SymInt columns, ScalarType dtype, Tensor? record=None, "
    "int gemm=-1) -> Tensor"
)
_library.define(
    "tensor_scaled_weight_product(Tensor[] left, Tensor weight, Tensor[] layer, int gemm, bool keeps, bool counts, "
    "SymInt rows, ScalarType dtype) -> Tensor[]"
)
_library.define("grouped_product(Tensor[] operands, Tensor ends, int kind, Tensor? record=None, int gemm=-1) -> Tensor")


# ------------------------------------------------------------------------------------- memory


def padded(size: int) -> int:
    return (size + MULTIPLE - 1) // MULTIPLE * MULTIPLE


def parts_of(size: int, width: int) -> int:
    """Returns the number of parts of a width, rounded up; `triton.cdiv` takes over a microsecond."""
    return (size + width - 1) // width


def empty_layouts(
    x: Tensor, row_gemm: int, column_gemm: int, matrices: int = 0, blocks: Tensor | None = None
) -> Quantized:
    """Returns memory for the rows and columns of an operand (R, C), with their parameters.

    For several matrices: with the parameters of each, and with rows for all slots.
    """
    tokens, channels = x.shape
    if matrices == 0:
        tokens, channels = padded(tokens), padded(channels)
    elif blocks is not None:
        tokens = blocks.shape[0] * BLOCK
    has_rows, has_columns, numbers = int(row_gemm >= 0), int(column_gemm >= 0), max(matrices, 1) * PARAMETERS
    fp8, fp32 = torch.float8_e4m3fn, torch.float32
    return (
        x.new_empty(tokens * has_rows, channels, dtype=fp8),
        x.new_empty(numbers * has_rows, dtype=fp32),
        x.new_empty(channels * has_columns, tokens, dtype=fp8),
        x.new_empty(numbers * has_columns, dtype=fp32),
    )


def one_layout(x: Tensor, row_gemm: int, column_gemm: int) -> Quantized:
    """Returns `empty_layouts` for one GEMM; the layout that the caller drops is an empty one that all share."""
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


# ------------------------------------------------------------------------------------- encoding


def runs_kernels(x: Tensor) -> bool:
    """Returns True if the kernels of `tiles` and torch's FP8 products run on a tensor's device."""
    return x.is_cuda


def is_captured(x: Tensor) -> bool:
    """Returns True if launches are being captured in a CUDA graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def serves_all_plans(record: Tensor, view: HostView) -> bool:
    """Returns True if the graph that is being captured will be replayed under all plans.

    Only torch.compile captures another one when facts change, and only for packed records (`exponents.pack`).
    """
    if view.packed is None:
        return True
    from torch._inductor import cudagraph_trees  # a second of import, unless torch.compile has done it

    manager = cudagraph_trees.get_container(record.get_device()).tree_manager
    return manager is None or torch.cuda.current_stream() != manager.stream


@torch.library.impl(_library, "encode_operand", "CompositeExplicitAutograd")
def encode(
    x: Tensor,
    state: Tensor,
    record: Tensor,
    table: Tensor,
    operand: int,
    gemms: Sequence[int],
    counts: bool,
    after: Tensor | None = None,
    matrices: int = 0,
    blocks: Tensor | None = None,
    by_kernel: bool | None = None,
) -> Quantized:
    """Implements `encode_operand`; `by_kernel` as in `encode_into`."""
    (row_gemm, column_gemm), layer = gemms, (state, record, table)
    outputs = empty_layouts(x, row_gemm, column_gemm, matrices, blocks)
    encode_into(x, layer, operand, (row_gemm, column_gemm), counts, outputs, matrices > 0, blocks, by_kernel)
    return outputs


@torch.library.register_fake("snip_hf::encode_operand", lib=_library)
def _(x: Tensor, state: Tensor, record: Tensor, table: Tensor, operand: int, gemms: Any, *rest: Any) -> Quantized:
    return empty_layouts(x, *gemms, *rest[2:])


encode_operand = torch.ops.snip_hf.encode_operand
"""Encodes an operand as E4M3 for two GEMMs.

Args:
    x: (R, C), BF16 or FP32, which is rounded to BF16 first.
    state: the layer's, on x's device.
    record, table: the layer's (`exponents.Records`).
    operand: index of x in `gemms.OPERANDS`. A gradient is rounded stochastically in block formats.
    gemms: the GEMM that reads rows and contracts C, and the one that reads columns and contracts R, numbered as in
        `gemms.GEMMS`; -1: there is none, and the layout is empty.
    counts: True in a pass that is trained on, so that the record is updated.
    after: not read; a compiled graph runs the operator after computing it.
    matrices: 0: x belongs to one matrix. Otherwise the number of matrices, each with its own parameters and random
        numbers (`random_streams.matrix_keys`); C and the rows of each matrix are multiples of 32.
    blocks: of `Slots`, for tokens sorted by matrix; None: x holds the matrices, one after the other.

Returns: rows (R', C') E4M3 and their parameters (`encoding`), columns (C', R') and theirs. For several matrices rows
    (P, C) and columns (C, P), with zeros in slots without a token, and the parameters of one matrix after the other.
"""


def encode_into(
    x: Tensor,
    layer: LayerTensors,
    operand: int,
    gemms: tuple[int, int],
    counts: bool,
    outputs: Sequence[Tensor],
    is_grouped: bool = False,
    blocks: Tensor | None = None,
    by_kernel: bool | None = None,
) -> None:
    """Encodes like `encode_operand`, but overwrites the tensors that it returned.

    Args:
        x, operand, gemms, counts, outputs, blocks: as there.
        layer: state, record and table.
        is_grouped: True if there are several matrices.
        by_kernel: None leaves the choice to the device.
    """
    if max(gemms) < 0 or (x.numel() == 0 and not is_grouped):
        for output in outputs:
            output.view(torch.uint8).zero_()
    elif runs_kernels(x) if by_kernel is None else by_kernel:
        x = x if x.stride(1) == 1 else x.contiguous()
        state, record, table = layer
        row, needs, in_blocks = facts_of(record, operand, gemms, counts)
        layer, in_blocks = (state, row, table), not needs and in_blocks
        if is_grouped:
            _launch_matrices(x, blocks, layer, operand, gemms, counts, needs, in_blocks, outputs)
        else:
            if needs:
                find_scales(x, layer, gemms, counts, outputs)
            launch_encode(x, layer, operand, gemms, counts, needs, in_blocks, outputs)
    elif is_grouped:
        reference.encode_matrices(x, layer, operand, gemms, counts, outputs, blocks)
    else:
        for index, layout in enumerate(reference.encode(x, layer, operand, gemms, counts)):
            if layout is not None:
                outputs[2 * index].copy_(reference.padded(layout[0], MULTIPLE))
                outputs[2 * index + 1].copy_(layout[1])


class Facts(NamedTuple):
    """The host's knowledge of an operand for two GEMMs."""

    row: Tensor
    """The operand's row of the layer's record."""
    needs_scales: bool
    """True if its scales need a separate launch, or its blocks are counted in this step. A graph that is replayed under
    all plans needs the launch in any case; one that torch.compile captures counts no blocks."""
    in_blocks: bool
    """True if both GEMMs are known to have block formats. Unknown in a captured graph, which is replayed under other
    plans, too (`HostView.facts`)."""


def facts_of(record: Tensor, operand: int, gemms: tuple[int, int], counts: bool) -> Facts:
    """Returns the facts of an operand from one look at the layer's view; arguments as of `encode_into`."""
    view = view_of(record)
    if view is None:
        return Facts(record[operand], True, False)
    captured = is_captured(record)
    needs_launch = serves_all_plans(record, view) if captured else counts and view.counts_now
    needs_launch = needs_launch or not view.is_settled(operand, gemms)
    return Facts(view.rows[operand], needs_launch, view.are_in_blocks(gemms) and not captured)


def find_scales(
    x: Tensor, layer: LayerTensors, gemms: tuple[int, int], counts: bool, outputs: Sequence[Tensor]
) -> None:
    """Launches `scales_kernel`; the layer's record is the operand's."""
    (tokens, channels), (row_gemm, column_gemm) = x.shape, gemms
    height, width, warps, programs, counting = _PART
    parts = parts_of(tokens, height) * parts_of(channels, width)
    launch(
        scales_kernel,
        (min(parts, programs),),
        (x, *layer, outputs[1], outputs[3]),
        (tokens, channels, x.stride(0), parts),
        (row_gemm, column_gemm, counts, counting, height, width),
        num_warps=warps,
    )


def launch_encode(
    x: Tensor,
    layer: LayerTensors,
    operand: int,
    gemms: tuple[int, int],
    counts: bool,
    needs: bool,
    in_blocks: bool,
    outputs: Sequence[Tensor],
) -> None:
    """Launches `encode_kernel`.

    Args:
        x, operand, gemms, counts, outputs: as in `encode_into`.
        layer: as there, but its record is the operand's.
        needs: True if `scales_kernel` has written the parameters in `outputs`. Otherwise the kernel computes and writes
            them from the exponent in force.
        in_blocks: as in `Facts`; False if `needs`.
    """
    rows, row_parameters, columns, column_parameters = outputs
    tensors = x, *layer, row_parameters, column_parameters, rows, columns
    shape, pitch = x.shape, x.stride(0)
    key = encode_kernel.fn, x.get_device(), x.dtype, shape, pitch, operand, gemms, counts, needs, in_blocks
    if relaunch(key, tensors):
        return
    tokens, channels = shape
    padded_tokens, padded_channels = padded(tokens), padded(channels)
    runs, width, warps, registers = TILES[operand]
    is_ragged = padded_tokens != tokens or padded_channels != channels
    layouts, known = (gemms[0] >= 0, gemms[1] >= 0), (-1, -1) if needs else gemms
    launch(
        encode_kernel,
        (parts_of(padded_channels, width), parts_of(padded_tokens, 4 * runs)),
        tensors,
        (tokens, channels, padded_tokens, padded_channels, pitch),
        (*layouts, *known, not needs, in_blocks, operand == GRADIENT, counts, is_ragged, runs, width),
        key=key,
        num_warps=warps,
        maxnreg=registers,
        enable_fp_fusion=True,  # products with powers of two are exact
    )


def _launch_matrices(
    x: Tensor,
    blocks: Tensor | None,
    layer: LayerTensors,
    operand: int,
    gemms: tuple[int, int],
    counts: bool,
    needs: bool,
    in_blocks: bool,
    outputs: Sequence[Tensor],
) -> None:
    """Launches the kernels for several matrices; the layer's record is the operand's."""
    rows, row_parameters, columns, column_parameters = outputs
    (state, record, table), channels = layer, x.shape[1]
    matrices = max(len(row_parameters), len(column_parameters)) // PARAMETERS
    count = x.shape[0] // BLOCK if blocks is None else blocks.shape[0]
    is_even, height = blocks is None, x.shape[0] // matrices if blocks is None else 0
    tokens_of = state if blocks is None else blocks
    amaxes = torch.zeros(matrices if needs else 0, dtype=torch.int32, device=x.device)
    if needs:
        width, warps, programs, counting = _MATRIX_PART
        parts = count * parts_of(channels, width)
        launch(
            matrix_scales_kernel,
            (min(parts, programs),),
            (x, tokens_of, state, record, table, amaxes),
            (height, channels, x.stride(0), parts),
            (*gemms, counts, counting, is_even, width),
            num_warps=warps,
        )
    width = min(_WIDTHS[operand], channels & -channels)
    launch(
        encode_matrices_kernel,
        (channels // width * count,),
        (x, tokens_of, state, record, table, amaxes, row_parameters, column_parameters, rows, columns),
        (height, channels, count * BLOCK, x.stride(0)),
        (gemms[0] >= 0, gemms[1] >= 0, *gemms, not needs, in_blocks, operand == GRADIENT, counts, is_even, width),
        num_warps=1,
        enable_fp_fusion=True,  # products with powers of two are exact
    )


# ------------------------------------------------------------------------------------- products


def sums_fast(record: Tensor | None, gemm: int) -> bool:
    """Returns True if partial sums of a layer's GEMM stay in the tensor cores' 14 bits over the whole contraction,
    instead of 128 elements of it: if its format is known to be a block format or a delayed one (docs/log/2026-11.md has
    the errors, docs/results-loss.md the losses).

    False while a graph is captured that is replayed under all plans.
    """
    view = None if record is None else view_of(record)
    if record is None or view is None or not view.follows[gemm]:
        return False
    return not (is_captured(record) and serves_all_plans(record, view))


@torch.library.impl(_library, "tensor_scaled_product", "CompositeExplicitAutograd")
def _product(
    operands: Sequence[Tensor],
    rows: int,
    columns: int,
    dtype: torch.dtype,
    record: Tensor | None = None,
    gemm: int = -1,
) -> Tensor:
    left, left_parameters, right, right_parameters = operands
    if left.numel() == 0 or right.numel() == 0:
        return left.new_zeros(rows, columns, dtype=dtype)
    if not runs_kernels(left):
        found = reference.product(left, left_parameters[0], right, right_parameters[0])
        return found[:rows, :columns].to(dtype).contiguous()
    product: Tensor = torch._scaled_mm(
        left, right.t(), left_parameters[:1], right_parameters[:1], None, None, dtype, sums_fast(record, gemm)
    )
    return product if product.shape == (rows, columns) else product[:rows, :columns].contiguous()


@torch.library.register_fake("snip_hf::tensor_scaled_product", lib=_library)
def _(operands: Sequence[Tensor], rows: int, columns: int, dtype: torch.dtype, *rest: Any) -> Tensor:
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
        record: the layer's; None: sums are not fast (`sums_fast`).
    """
    gemm_index = GEMMS.index(gemm)
    product: Tensor = torch.ops.snip_hf.tensor_scaled_product([*left, *right], *shape, dtype, record, gemm_index)
    return product


@torch.library.impl(_library, "tensor_scaled_weight_product", "CompositeExplicitAutograd")
def _weight_product(
    left: Sequence[Tensor],
    weight: Tensor,
    layer: Sequence[Tensor],
    gemm: int,
    keeps: bool,
    counts: bool,
    rows: int,
    dtype: torch.dtype,
) -> list[Tensor]:
    (state, record, table), is_forward = layer, gemm == 0
    gemms = 0 if is_forward else -1, 1 if keeps or not is_forward else -1
    outputs = empty_layouts(weight, *gemms) if keeps else one_layout(weight, *gemms)
    encode_into(weight, (state, record, table), WEIGHT, gemms, counts, outputs)
    right = outputs[:2] if is_forward else outputs[2:]
    product = _product([*left, *right], rows, weight.shape[gemm], dtype, record, gemm)
    return [product, *outputs[2:]] if keeps else [product]


@torch.library.register_fake("snip_hf::tensor_scaled_weight_product", lib=_library)
def _(left: Any, weight: Tensor, layer: Any, gemm: int, keeps: bool, *rest: Any) -> list[Tensor]:
    _, rows, dtype = rest
    product = weight.new_empty(rows, weight.shape[gemm], dtype=dtype)
    return [product, *empty_layouts(weight, -1, 1)[2:]] if keeps else [product]


def multiply_weight(
    gemm: str,
    left: Sequence[Tensor],
    weight: Tensor,
    layer: Sequence[Tensor],
    keeps: bool,
    counts: bool,
    rows: int,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Encodes a layer's weight, and returns its product with an operand, and perhaps the weight for grad_input.

    One operator instead of two, since each costs the host some microseconds, over a hundred times per step.

    Args:
        gemm: "forward" or "grad_input".
        left: (M', K') E4M3 and its parameters.
        weight: (O, I).
        layer: its state, record and table.
        keeps: True if the forward GEMM also encodes the weight for grad_input.
        counts: True if the record is updated.
        rows: M without the padding.
        dtype: of the product, BF16 or FP32.

    Returns: the product, then the weight for grad_input if requested, (I', O') E4M3 and its parameters.
    """
    found: list[Tensor] = torch.ops.snip_hf.tensor_scaled_weight_product(
        list(left), weight.detach(), list(layer), GEMMS.index(gemm), keeps, counts, rows, dtype
    )
    return found


@torch.library.impl(_library, "grouped_product", "CompositeExplicitAutograd")
def _grouped_product(
    operands: Sequence[Tensor], ends: Tensor, kind: int, record: Tensor | None = None, gemm: int = -1
) -> Tensor:
    left, left_parameters, right, right_parameters = operands
    left_scales, right_scales = left_parameters[SCALE::PARAMETERS], right_parameters[SCALE::PARAMETERS]
    right = _by_matrix(right, ends.shape[0], kind)
    if not left.is_cuda:
        return reference.grouped_product(left, left_scales, right, right_scales, ends)
    # All factors on one side: the FP32 sum is multiplied once by the product of both scales, and once by 1.
    factors, ones = (left_scales * right_scales)[:, None], torch.ones
    if kind == OVER_TOKENS:
        scales = factors.expand(-1, left.shape[0]).reshape(-1), ones(ends.shape[0] * right.shape[1], device=left.device)
    else:
        scales = ones(left.shape[0], device=left.device), factors.expand(-1, right.shape[2]).contiguous()
    result: Tensor = torch.ops.aten._scaled_grouped_mm.default(
        left, right, *scales, ends, None, None, torch.bfloat16, sums_fast(record, gemm)
    )
    return result


def _by_matrix(right: Tensor, matrices: int, kind: int) -> Tensor:
    """Returns a right operand as torch's product reads it: (E, K, N), or (P, N) if tokens are contracted."""
    if kind == BY_ROWS:
        return right.view(matrices, -1, right.shape[1]).transpose(1, 2)
    if kind == BY_COLUMNS:
        return right.view(right.shape[0], matrices, -1).permute(1, 2, 0)
    return right.t()


@torch.library.register_fake("snip_hf::grouped_product", lib=_library)
def _(operands: Sequence[Tensor], ends: Tensor, kind: int, *rest: Any) -> Tensor:
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
        left: E4M3 and the parameters of each matrix: (P, K), or (M, P) if tokens are contracted.
        right: E4M3 and the parameters of each matrix: by rows (E * N, K), by columns (N, E * K), over tokens (N, P).
        ends: matrix -> end of its slots, int32.
        kind: one of these three layouts.
        record: the layer's; None: sums are not fast (`sums_fast`).

    Returns: (P, N), with arbitrary values in slots after the last end; or (E, M, N).
    """
    product: Tensor = torch.ops.snip_hf.grouped_product([*left, *right], ends, kind, record, GEMMS.index(gemm))
    return product


def gemm_call(gemm: str, x: Tensor, weight: Tensor, grad_output: Tensor, state: Tensor) -> Callable[[], Tensor]:
    """Implements `Backend.gemm_call` with the weight encoded beforehand, as training does once per optimizer step."""
    formats = [format_of_code(code) for code in state[: len(GEMMS)].tolist()]
    if not formats[GEMMS.index(gemm)].is_quantized:
        return EMULATED.gemm_call(gemm, x, weight, grad_output, state)
    records = Records.new(x.device)
    record, table = records.record, records.table
    records.view.set_formats(formats)

    def encode(values: Tensor, operand: int, row_gemm: int, column_gemm: int) -> tuple[Tensor, ...]:
        layouts: Quantized = encode_operand(values, state, record, table, operand, (row_gemm, column_gemm), True)
        return layouts[:2] if row_gemm >= 0 else layouts[2:]

    by_output, by_input = encode(weight, WEIGHT, 0, -1), encode(weight, WEIGHT, -1, 1)

    def forward() -> Tensor:
        return multiply(gemm, encode(x, ACTIVATION, 0, -1), by_output, (x.shape[0], weight.shape[0]), x.dtype, record)

    def grad_input() -> Tensor:
        left = encode(grad_output, GRADIENT, 1, -1)
        return multiply(gemm, left, by_input, (x.shape[0], weight.shape[1]), x.dtype, record)

    def grad_weight() -> Tensor:
        left, right = encode(grad_output, GRADIENT, -1, 2), encode(x, ACTIVATION, -1, 2)
        return multiply(gemm, left, right, (weight.shape[0], weight.shape[1]), x.dtype, record)

    call = {"forward": forward, "grad_input": grad_input, "grad_weight": grad_weight}[gemm]
    call()
    follow([records])  # as in training, exponents are known before the pass
    return call
