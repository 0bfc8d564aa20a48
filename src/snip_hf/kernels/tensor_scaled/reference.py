"""Encoding and products with torch's operations, on any device: the oracle for the kernels of `tiles`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...numerics.formats import E4M3, NumberFormat, format_of_code
from ...numerics.gemms import GEMMS, OPERANDS
from ...numerics.grids import round_to_grid
from ...numerics.random_streams import matrix_keys, uniform
from ...numerics.rounding import Quantized, tile_amax
from ...numerics.scales import block_scales, fp32_scales
from .encoding import (
    BLOCK,
    INVERSE,
    LOST,
    MOST,
    PARAMETERS,
    SCALE,
    SPACING,
    encoding_of,
    exponents_of,
    has_one_scale,
)
from .exponents import BLOCKS, EXPONENT, LARGEST, LIMIT, SATURATED, SMALL, UNSET
from .slots import FIRST, MATRIX, OFFSET, TOKENS

_INFINITY = float("inf")
LayerTensors = tuple[Tensor, Tensor, Tensor]
"""A layer's state, record and table (`exponents.Records`)."""


def encode(
    x: Tensor, layer: LayerTensors, operand: int, gemms: tuple[int, int], counts: bool
) -> list[tuple[Tensor, Tensor] | None]:
    """Returns rows and columns of an operand, (R, C) and (C, R) E4M3, each with its parameters; None if left out.

    Args:
        x: (R, C).
        layer: the pass updates its record.
        operand: index of x in `OPERANDS`.
        gemms: those that read rows and columns, -1: none.
        counts: True in a pass that is trained on, so that the record is updated.
    """
    state, record, table = layer
    x_fp32, row = x.to(torch.bfloat16).to(torch.float32), record[operand].data
    amax = x_fp32.abs().amax().view(1)
    bits = amax.view(torch.int32).to(torch.int64)
    is_set = bool(row[EXPONENT] != UNSET)
    exponent = row[EXPONENT] if is_set else exponents_of(bits)[0].clamp(-LIMIT, LIMIT)
    if counts and torch.isfinite(amax):
        row[LARGEST] = torch.maximum(row[LARGEST], bits[0])
    found: list[tuple[Tensor, Tensor] | None] = []
    if counts and is_set:
        _count_blocks(x_fp32 * torch.exp2(-exponent), state, table, gemms, row)
    for contracts, gemm in zip((1, 0), gemms, strict=True):
        if gemm < 0:
            found.append(None)
            continue
        format = format_of_code(int(state[gemm]))
        parameters = table[format.code].clone()
        if has_one_scale(format):
            scale = fp32_scales(amax, E4M3.max)[0]
            parameters[SCALE], parameters[INVERSE] = scale, scale.reciprocal()
        else:
            parameters[SCALE], parameters[INVERSE] = torch.exp2(exponent), torch.exp2(-exponent)
        if encoding_of(format) is None:
            values = round_to_grid(x_fp32 * parameters[INVERSE], E4M3)
        else:
            values = _encoded_blocks(x_fp32, format, OPERANDS[operand], contracts, parameters, state)
        values = values if contracts == 1 else values.t()
        found.append((values.to(torch.float8_e4m3fn), parameters))
    return found


def _encoded_blocks(
    x_fp32: Tensor, format: NumberFormat, operand: str, contracts: int, parameters: Tensor, state: Tensor
) -> Tensor:
    """Returns x, (R, C), rounded in its blocks, times 2**-s, within E4M3's values."""
    encoding, rule = encoding_of(format), format.operand(operand)
    assert encoding is not None
    random = None
    if rule.stochastic:
        key, rank, ranks = state[len(GEMMS) :].tolist()
        random = uniform(key % 2**64, x_fp32.shape, x_fp32.device, rank, ranks)
    tile = rule.tile(contracts)
    scales, _ = block_scales(tile_amax(x_fp32, tile), format, rule, encoding.grid.max, None)
    scales = torch.maximum(scales, 2.0**encoding.lowest * parameters[SCALE])
    values = round_to_grid(Quantized(x_fp32, scales.reciprocal(), tile).dequantize(), encoding.grid, random)
    return Quantized(values, scales * parameters[INVERSE], tile).dequantize().clamp_(-E4M3.max, E4M3.max)


def _count_blocks(scaled: Tensor, state: Tensor, table: Tensor, gemms: tuple[int, int], row: Tensor) -> None:
    """Counts the 1x32 blocks that are not zero, those that saturate and those that lose bits."""
    known = [table[int(state[gemm])] for gemm in gemms if gemm >= 0]
    encoded = [parameters for parameters in known if parameters[SPACING] != 0]
    if encoded:
        amax = tile_amax(scaled, (1, BLOCK))
        row[BLOCKS] += (amax > 0).sum()
        row[SATURATED] += ((amax > encoded[0][MOST]) & (amax < _INFINITY)).sum()
        row[SMALL] += ((amax > 0) & (amax <= encoded[0][LOST])).sum()


def padded(layout: Tensor, multiple: int) -> Tensor:
    """Returns a layout padded with zeros to multiples of a size."""
    rows, columns = layout.shape
    bytes_ = pad(layout.contiguous().view(torch.uint8), (0, -columns % multiple, 0, -rows % multiple))
    return bytes_.view(torch.float8_e4m3fn)


def encode_matrices(
    x: Tensor,
    layer: LayerTensors,
    operand: int,
    gemms: tuple[int, int],
    counts: bool,
    outputs: Sequence[Tensor],
    blocks: Tensor | None,
) -> None:
    """Encodes the operands of several matrices, one by one, into outputs (`operators.encode_into`)."""
    state, record, table = layer
    matrices = max(len(outputs[1]), len(outputs[3])) // PARAMETERS
    keys = matrix_keys(int(state[len(GEMMS)]) % 2**64, matrices)
    for output in outputs:
        output.view(torch.uint8).zero_()
    for matrix, tokens, start in _matrices(x, blocks, matrices):
        own = state.clone()
        own[len(GEMMS)] = keys[matrix] - 2**64 if keys[matrix] >= 2**63 else keys[matrix]
        count = tokens.stop - tokens.start
        rows = x[tokens] if count else x.new_zeros(1, x.shape[1])  # a matrix without tokens needs parameters, too
        layouts = encode(rows, (own, record, table), operand, gemms, counts)
        slots = slice(start, start + count)
        for index, layout in enumerate(layouts):
            if layout is not None:
                output, parameters = outputs[2 * index : 2 * index + 2]
                target, values = (output, layout[0]) if index == 0 else (output.t(), layout[0].t())
                target[slots].copy_(values[:count])
                parameters.view(matrices, PARAMETERS)[matrix] = layout[1]


def _matrices(x: Tensor, blocks: Tensor | None, matrices: int) -> Iterator[tuple[int, slice, int]]:
    """Yields each matrix with its tokens and its first slot."""
    if blocks is None:
        height = x.shape[0] // matrices
        for matrix in range(matrices):
            yield matrix, slice(matrix * height, (matrix + 1) * height), matrix * height
        return
    for block, row in enumerate(blocks.tolist()):
        if row[OFFSET] == 0:
            yield row[MATRIX], slice(row[FIRST], row[FIRST] + row[TOKENS]), block * BLOCK


def product(left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor) -> Tensor:
    """Returns left @ right^T times both scales, FP32."""
    with torch.autocast(left.device.type, enabled=False):
        return (left.to(torch.float32) * left_scale) @ (right.to(torch.float32) * right_scale).t()


def grouped_product(left: Tensor, left_scales: Tensor, right: Tensor, right_scales: Tensor, ends: Tensor) -> Tensor:
    """Returns products with FP32 sums: of left (P, K) and right (E, K, N), (P, N) with zeros after the last end; or of
    left (M, P) and right (P, N), (E, M, N). BF16."""
    stops = ends.tolist()
    parts = [slice(start, stop) for start, stop in zip([0, *stops[:-1]], stops, strict=True)]
    factors = (left_scales * right_scales).tolist()
    with torch.autocast(left.device.type, enabled=False):
        a, b = left.to(torch.float32), right.to(torch.float32)
        if right.dim() == 2:
            products = [(a[:, part] @ b[part]) * factor for part, factor in zip(parts, factors, strict=True)]
            return torch.stack(products).to(torch.bfloat16)
        found = a.new_zeros(a.shape[0], b.shape[2])
        for matrix, (part, factor) in enumerate(zip(parts, factors, strict=True)):
            found[part] = (a[part] @ b[matrix]) * factor
    return found.to(torch.bfloat16)
