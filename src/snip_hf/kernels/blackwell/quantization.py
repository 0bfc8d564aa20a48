"""An operand of a GEMM as packed bytes: one Triton kernel on a GPU, torch's operations elsewhere, with the same bytes.

The kernel quantizes all operands of the formats that `packing.kind_of` knows, except those that try several targets per
block (four over six), which torch's operations quantize on every device. Rotations come first. Legend: as in `packing`.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...numerics.formats import NumberFormat, Operand
from ...numerics.gemms import GEMMS, gemm_of
from ...numerics.random_streams import uniform
from ...numerics.rotation import rotate
from ...numerics.rounding import quantize_operand
from ..rounding import grid_numbers, scale_numbers, scale_rule
from .packing import SCALE_COLUMNS, SCALE_ROWS, Kind, Packed, empty, kind_of, pack, tensor_scale_of

if TYPE_CHECKING or find_spec("triton") is not None:
    from .tiles import quantize_kernel

# Warps by contracted dimension: the fastest of 4, 8 and 16 on an H200.
_WARPS = {0: 4, 1: 8}


def quantize(
    x: Tensor, format: NumberFormat, operand: str, contracts: int, state: Tensor, by_kernel: bool | None = None
) -> Packed:
    """Returns x, (R, K) or (K, R), as the product of a format's GEMM reads it.

    Args:
        x: 2-D, BF16 or FP32, with at least one element.
        format: one that `packing.kind_of` knows.
        operand: name of x in `gemms.OPERANDS`.
        contracts: the dimension of x that the GEMM contracts, 0 or 1.
        state: of the layer, on x's device: the key of stochastic rounding is read from it.
        by_kernel: None leaves the choice to the device.
    """
    kind, rule = kind_of(format), format.operand(operand)
    assert kind is not None, f"{format.name} has no kernels here; layers refuse it"
    if gemm_of(operand, contracts) in format.rotated:
        x = rotate(x.to(torch.float32), format.rotation, contracts)
    least, most = torch.aminmax(x)  # one pass, and NaN if there is one
    amax = torch.maximum(-least, most).to(torch.float32).view(1)
    tensor_scale = tensor_scale_of(kind, format, amax)
    if by_kernel or (by_kernel is None and x.is_cuda and not rule.targets):
        return _by_kernel(x, format, rule, contracts, state, amax, tensor_scale)
    random = None
    if rule.stochastic:
        key, rank, ranks = state[len(GEMMS) :].tolist()
        random = uniform(key % 2**64, x.shape, x.device, rank, ranks)
    tile = rule.tile(contracts, x.shape)
    return pack(quantize_operand(x.to(torch.float32), format, rule, tile, None, random), tensor_scale, kind, contracts)


def _by_kernel(
    x: Tensor, format: NumberFormat, rule: Operand, contracts: int, state: Tensor, amax: Tensor, tensor_scale: Tensor
) -> Packed:
    """Quantizes in one launch."""
    kind = kind_of(format)
    assert kind is not None and rule.block is not None
    rows, contracted = x.shape[1 - contracts], x.shape[contracts]
    packed, grid = empty(kind, rows, contracted, x.device), kind.grid
    packed.tensor_scale.copy_(tensor_scale)
    runs = math.ceil(contracted / (SCALE_COLUMNS * kind.block))
    with torch.cuda.device_of(x):  # Triton launches on the current device
        quantize_kernel[(math.ceil(rows / SCALE_ROWS) * runs,)](
            x,
            state,
            amax,
            packed.data,
            packed.scales,
            rows,
            contracted,
            packed.data.shape[0],
            packed.data.shape[1] * kind.per_byte,
            runs,
            x.stride(1 - contracts),
            x.stride(contracts),
            *grid_numbers(grid),
            *scale_numbers(format, rule, grid),
            **constants_of(kind, format, rule, contracts),
            num_warps=_WARPS[contracts],
            enable_fp_fusion=False,  # scaling and rounding are two roundings
        )
    return packed


def constants_of(kind: Kind, format: NumberFormat, rule: Operand, contracts: int) -> dict[str, Any]:
    """Returns the constants that the kernel is compiled with for an operand of a format."""
    grid, block = kind.grid, rule.block
    assert block is not None
    return {
        "CONTRACTS": contracts,
        "ACROSS": block[0],
        "BLOCK": kind.block,
        "SMALLEST": grid.smallest,
        "MIN_EXPONENT": grid.min_exponent,
        "MANTISSA_BITS": grid.mantissa_bits,
        "SIGN": grid.exponent_bits + grid.mantissa_bits,
        "KIND": kind.scale if kind.scale == "e8m0" else "grid",
        "RULE": scale_rule(format, rule),
        "TENSOR_SCALE": format.tensor_scale is not None,
        "STOCHASTIC": rule.stochastic,
        "PACKED": kind.per_byte == 2,
    }
