"""The launch of the Triton kernel that rounds one operand: which operands it takes, in which blocks, and its numbers.

Legend: R rows, C columns of the operand.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from ..numerics.formats import NumberFormat, Operand
from ..numerics.gemms import TILE, gemm_of
from ..numerics.grids import ElementGrid, scale_grid
from ..numerics.random_streams import rank_stream
from .rounding_tiles import rounding_kernel, tensor_amax_kernel

# Across the contracted dimension, the least rows or columns of a block: lines of memory are read whole.
_LEAST_ROWS, _LEAST_COLUMNS = 16, 32
_LARGE_BLOCK = 4096
_MANTISSA_BITS = 23
_MOST_TARGETS = 2


def takes(format: NumberFormat, operand: str) -> bool:
    """Returns True if the kernel rounds this operand of a format.

    It does not take noise, more than two targets, and grids with 8 exponent bits, whose spacings are subnormal FP32
    numbers.
    """
    rule = format.operand(operand)
    grid = rule.grid or format.grid
    return not rule.noise and len(rule.targets) <= _MOST_TARGETS and (grid is None or _is_narrow(grid))


def _is_narrow(grid: ElementGrid) -> bool:
    return grid.min_exponent - grid.mantissa_bits >= -126 and grid.max < 2.0**127


def round_by_kernel(
    x: Tensor,
    format: NumberFormat,
    operand: str,
    contracts: int,
    key: int | None = None,
    rank: int = 0,
    ranks: int = 1,
    amax: Tensor | None = None,
) -> Tensor:
    """`rounding.round_operand` by the kernel: x (R, C) with at least one element, of an operand that it `takes`."""
    rule = format.operand(operand)
    grid = rule.grid or format.grid
    assert grid is not None
    key = key if rule.stochastic else None
    is_rotated = gemm_of(operand, contracts) in format.rotated
    stages = format.rotation.bit_length() - 1 if is_rotated else 0
    block = _block(rule, contracts)
    rows, columns = block if rule.block is None else rule.tile(contracts)
    if rule.block is None or format.tensor_scale is not None:
        amax = tensor_amax(x, block, stages, contracts) if amax is None or is_rotated else amax.to(torch.float32)
    stream, first = (0, 0) if key is None else rank_stream(key, x.shape, rank, ranks)
    kind = scale_grid(format.scale)
    y = torch.empty(*x.shape, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        rounding_kernel[_programs(x, block)](
            x,
            y,
            y if amax is None else amax,
            *x.shape,
            *x.stride(),
            _as_int64(stream),
            first,
            *_grid_numbers(grid),
            *_scale_numbers(format, rule, grid),
            TILES_DOWN=block[0] // rows,
            ROWS=rows,
            TILES_ACROSS=block[1] // columns,
            COLUMNS=columns,
            SUBNORMALS=grid.subnormals,
            MANTISSA=grid.mantissa_bits > 0,
            RANDOM=key is not None,
            KIND=format.scale if kind is None else "grid",
            RULE=_rule(format, rule),
            WHOLE=rule.block is None,
            TENSOR_SCALE=format.tensor_scale is not None,
            SCALE_MANTISSA=kind is None or kind.mantissa_bits > 0,
            TWO_TARGETS=len(rule.targets) == _MOST_TARGETS,
            STAGES=stages,
            ALONG=contracts,
            **_options(block, stages > 0 or len(rule.targets) == _MOST_TARGETS),
        )
    return y


def tensor_amax(x: Tensor, block: tuple[int, int], stages: int, contracts: int) -> Tensor:
    """Returns the largest magnitude of x (R, C), rotated in runs of 2**stages, (1,); not finite where x is not."""
    found = torch.zeros(1, dtype=torch.int32, device=x.device)
    with torch.cuda.device_of(x):
        tensor_amax_kernel[_programs(x, block)](
            x, found, *x.shape, *x.stride(), *block, stages, contracts, **_options(block, stages > 0)
        )
    return found.view(torch.float32)


def _block(rule: Operand, contracts: int) -> tuple[int, int]:
    """Returns rows and columns of what one program rounds: whole tiles, and whole runs of a rotation."""
    across = 1 if rule.block is None else rule.block[0]
    if contracts == 0:
        return TILE, max(across, _LEAST_COLUMNS)
    return max(across, _LEAST_ROWS), TILE


def _programs(x: Tensor, block: tuple[int, int]) -> tuple[int]:
    return (math.prod(triton.cdiv(size, of_block) for size, of_block in zip(x.shape, block, strict=True)),)


def _options(block: tuple[int, int], is_wide: bool) -> dict[str, Any]:
    """is_wide: elements take twice as many registers as in simple formats."""
    warps = 8 if math.prod(block) > _LARGE_BLOCK else 4
    # Without fusion, since scaling and rounding are two roundings.
    return {"num_warps": warps * (1 + is_wide), "enable_fp_fusion": False}


def _grid_numbers(grid: ElementGrid) -> tuple[float, int, int]:
    """Returns the largest value, the bits of the smallest normal power of two, and what leads to the spacing."""
    return grid.max, (grid.min_exponent + 127) << _MANTISSA_BITS, grid.mantissa_bits << _MANTISSA_BITS


def _scale_numbers(format: NumberFormat, rule: Operand, grid: ElementGrid) -> tuple[float, ...]:
    """Returns what `_scales` takes from `target` on, with the second target behind the first."""
    targets = rule.targets or (grid.max,)
    is_even = _rule(format, rule) == "floor" and format.rule_of(rule) == "even"
    carry = 1 << (_MANTISSA_BITS - grid.mantissa_bits - 1) if is_even else 0
    of_tensor = (format.tensor_scale or 1.0) * grid.max
    kind = scale_grid(format.scale) or grid
    largest, least, shift = _grid_numbers(kind)
    top = math.floor(math.log2(grid.max))
    return targets[0], targets[-1], top, carry, of_tensor, largest, kind.smallest, least, shift


def _rule(format: NumberFormat, rule: Operand) -> str:
    """Returns the rule of the scales; "even" is "floor" of a number to which a carry was added."""
    how = format.rule_of(rule)
    return "floor" if how == "even" else how


def _as_int64(key: int) -> int:
    return key - 2**64 if key >= 2**63 else key
