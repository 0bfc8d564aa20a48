"""Folding with torch's operations, on any device: what the kernels of `tiles` do, by the reference rounding."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...numerics.formats import E4M3, NumberFormat, format_of_code
from ...numerics.gemms import GEMMS, OPERANDS
from ...numerics.grid_rounding import round_to_grid
from ...numerics.random_streams import uniform
from ...numerics.rounding import Quantized, tile_amax
from ...numerics.scales import block_scales, fp32_scales
from .folding import BLOCK, INVERSE, LOST, MOST, SCALE, SPACING, exponents_of, fold_of
from .records import BLOCKS, EXPONENT, LARGEST, LIMIT, SATURATED, SMALL, UNSET

_INFINITY = float("inf")


def fold(
    x: Tensor, state: Tensor, record: Tensor, table: Tensor, operand: int, gemms: tuple[int, int], counts: bool
) -> list[tuple[Tensor, Tensor] | None]:
    """Returns rows and columns of an operand, (R, C) and (C, R) E4M3, each with its parameters; None for what is left
    out.

    Args:
        x: (R, C).
        state: the layer's.
        record, table: as in `records`; what passes note is added to the record.
        operand: which of `OPERANDS` x is.
        gemms: those that read rows and columns, -1: none.
        counts: whether the pass is one that is trained on, which the record takes note of.
    """
    x_fp32, row = x.to(torch.bfloat16).to(torch.float32), record[operand].data
    amax = x_fp32.abs().amax().view(1)
    bits = amax.view(torch.int32).to(torch.int64)
    is_set = bool(row[EXPONENT] != UNSET)
    exponent = row[EXPONENT] if is_set else exponents_of(bits)[0].clamp(-LIMIT, LIMIT)
    if counts and torch.isfinite(amax):
        row[LARGEST] = torch.maximum(row[LARGEST], bits[0])
    found: list[tuple[Tensor, Tensor] | None] = []
    if counts and is_set:
        _note(x_fp32 * torch.exp2(-exponent), state, table, gemms, row)
    for contracts, gemm in zip((1, 0), gemms, strict=True):
        if gemm < 0:
            found.append(None)
            continue
        format = format_of_code(int(state[gemm]))
        parameters = table[format.code].clone()
        if fold_of(format) is None:
            scale = fp32_scales(amax, E4M3.max)[0]
            parameters[SCALE], parameters[INVERSE] = scale, scale.reciprocal()
            values = round_to_grid(x_fp32 * parameters[INVERSE], E4M3)
        else:
            parameters[SCALE], parameters[INVERSE] = torch.exp2(exponent), torch.exp2(-exponent)
            values = _folded(x_fp32, format, OPERANDS[operand], contracts, parameters, state)
        values = values if contracts == 1 else values.t()
        found.append((values.to(torch.float8_e4m3fn), parameters))
    return found


def _folded(
    x_fp32: Tensor, format: NumberFormat, operand: str, contracts: int, parameters: Tensor, state: Tensor
) -> Tensor:
    """Returns x, (R, C), rounded in its blocks, times 2**-s, within E4M3's values."""
    fold, rule = fold_of(format), format.operand(operand)
    assert fold is not None
    random = None
    if rule.stochastic:
        key, rank, ranks = state[len(GEMMS) :].tolist()
        random = uniform(key % 2**64, x_fp32.shape, x_fp32.device, rank, ranks)
    tile = rule.tile(contracts)
    scales, _ = block_scales(tile_amax(x_fp32, tile), format, rule, fold.grid.max, None)
    scales = torch.maximum(scales, 2.0**fold.lowest * parameters[SCALE])
    values = round_to_grid(Quantized(x_fp32, scales.reciprocal(), tile).dequantize(), fold.grid, random)
    return Quantized(values, scales * parameters[INVERSE], tile).dequantize().clamp_(-E4M3.max, E4M3.max)


def _note(scaled: Tensor, state: Tensor, table: Tensor, gemms: tuple[int, int], row: Tensor) -> None:
    """Counts the 1x32 blocks that are not zero, those that saturate and those that lose bits."""
    known = [table[int(state[gemm])] for gemm in gemms if gemm >= 0]
    folded = [parameters for parameters in known if parameters[SPACING] > 0]
    if folded:
        amax = tile_amax(scaled, (1, BLOCK))
        row[BLOCKS] += (amax > 0).sum()
        row[SATURATED] += ((amax > folded[0][MOST]) & (amax < _INFINITY)).sum()
        row[SMALL] += ((amax > 0) & (amax <= folded[0][LOST])).sum()


def padded(layout: Tensor, multiple: int) -> Tensor:
    """Returns a layout with zeros behind its ends, each side a multiple."""
    rows, columns = layout.shape
    bytes_ = pad(layout.contiguous().view(torch.uint8), (0, -columns % multiple, 0, -rows % multiple))
    return bytes_.view(torch.float8_e4m3fn)
