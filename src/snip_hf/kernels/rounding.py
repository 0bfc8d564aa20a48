"""Rounding in one launch on a GPU: `fake_quantize`, for the estimate and the emulated GEMMs.

A Triton kernel runs on NVIDIA GPUs from compute capability 8.0 on, for all formats except those with noise or 8
exponent bits (`takes`). torch's operations run for these formats and on other devices. Both give the numbers of
`numerics.rounding` bit for bit. The kernel needs one launch, or three if a scale belongs to the whole tensor, instead
of twenty to a hundred.
"""

from __future__ import annotations

import logging
import math
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..numerics import rounding
from ..numerics.formats import REFERENCE, NumberFormat, Operand
from ..numerics.gemms import TILE, gemm_of
from ..numerics.grids import ElementGrid, scale_grid
from ..numerics.random_streams import rank_stream
from .launching import launch

if TYPE_CHECKING or find_spec("triton") is not None:
    from .rounding_tiles import rounding_kernel, tensor_amax_kernel

logger = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The least that Triton supports.
_AMPERE = (8, 0)
# Across the contracted dimension, the least rows or columns of a block: lines of memory are read whole.
_LEAST_ROWS, _LEAST_COLUMNS = 16, 32
_LARGE_BLOCK = 4096
_MANTISSA_BITS = 23
_MOST_TARGETS = 2


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
    """Returns x, (R, C), as a GEMM in a format sees it, in FP32: quantized, times its scales; or only cast to FP32.

    It has no derivative.

    Args:
        x: (R, C).
        format: of the GEMM.
        operand: name of x in `gemms.OPERANDS`.
        contracts: the dimension of x that the GEMM contracts, 0 or 1.
        key: of the random numbers, for operands that are rounded stochastically or get noise; None, and other
            operands: rounding to nearest.
        rank, ranks, amax: as in `rounding.round_operand`.

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
    """Returns True if Triton compiles and runs a kernel on a device (it needs a C compiler); tries once."""
    if find_spec("triton") is None or capability(device) < _AMPERE:
        return False
    try:
        round_by_kernel(torch.ones(1, 1, device=device), REFERENCE, "activation", 1)
    except Exception as error:
        # torch gives the same results, more slowly.
        logger.warning("snip-hf: rounding takes 20 to 100 kernels instead of one, since Triton fails: %s", error)
        return False
    return True


def takes(format: NumberFormat, operand: str) -> bool:
    """Returns True if the kernel rounds this operand of a format.

    It does not take noise, more than two targets, and grids with 8 exponent bits, whose spacings are subnormal FP32
    numbers.
    """
    rule = format.operand(operand)
    grid = rule.grid or format.grid
    is_narrow = grid is None or (grid.min_exponent - grid.mantissa_bits >= -126 and grid.max < 2.0**127)
    return not rule.noise and len(rule.targets) <= _MOST_TARGETS and is_narrow


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
    """Returns `rounding.round_operand` by the kernel; x (R, C) is not empty, and the kernel `takes` its operand."""
    call = _call(format, operand, contracts)
    if call.needs_amax:
        if amax is None or call.stages > 0:
            amax = tensor_amax(x, call.block, call.stages, contracts)
        amax = amax.to(torch.float32)
    stream, first = (0, 0)
    is_random = key is not None and call.is_stochastic
    if key is not None and call.is_stochastic:
        stream, first = rank_stream(key, x.shape, rank, ranks)
    y = torch.empty(*x.shape, dtype=torch.float32, device=x.device)
    launch(
        rounding_kernel,
        _programs(x, call.block),
        (x, y, y if amax is None else amax),
        (*x.shape, *x.stride(), *call.numbers),
        (*call.tiles, is_random, *call.flags),
        (stream - 2**64 if stream >= 2**63 else stream, first),
        **call.options,
    )
    return y


class _Call(NamedTuple):
    """The arguments of a launch for an operand of a format that do not depend on its tensor."""

    block: tuple[int, int]
    stages: int
    """Stages of the rotation; 0: none."""
    is_stochastic: bool
    needs_amax: bool
    numbers: tuple[float, ...]
    """Kernel arguments from `largest` on."""
    tiles: tuple[Any, ...]
    """Constants from `TILES_DOWN` to `MANTISSA`."""
    flags: tuple[Any, ...]
    """Constants from `KIND` on."""
    options: dict[str, Any]


@cache
def _call(format: NumberFormat, operand: str, contracts: int) -> _Call:
    rule = format.operand(operand)
    grid = rule.grid or format.grid
    assert grid is not None
    is_rotated = gemm_of(operand, contracts) in format.rotated
    stages = format.rotation.bit_length() - 1 if is_rotated else 0
    block, kind = _block(rule, contracts), scale_grid(format.scale)
    rows, columns = block if rule.block is None else rule.tile(contracts)
    has_tensor_scale, has_two_targets = format.tensor_scale is not None, len(rule.targets) == _MOST_TARGETS
    return _Call(
        block,
        stages,
        rule.stochastic,
        rule.block is None or has_tensor_scale,
        (*grid_numbers(grid), *scale_numbers(format, rule, grid)),
        (block[0] // rows, rows, block[1] // columns, columns, grid.subnormals, grid.mantissa_bits > 0),
        (
            format.scale if kind is None else "grid",
            scale_rule(format, rule),
            rule.block is None,
            has_tensor_scale,
            kind is None or kind.mantissa_bits > 0,
            has_two_targets,
            stages,
            contracts,
        ),
        _options(block, stages > 0 or has_two_targets),
    )


def tensor_amax(x: Tensor, block: tuple[int, int], stages: int, contracts: int) -> Tensor:
    """Returns the largest magnitude of x (R, C), rotated in runs of 2**stages, (1,); not finite if x is not."""
    found = torch.zeros(1, dtype=torch.int32, device=x.device)
    numbers, constants = (*x.shape, *x.stride()), (*block, stages, contracts)
    launch(tensor_amax_kernel, _programs(x, block), (x, found), numbers, constants, **_options(block, stages > 0))
    return found.view(torch.float32)


def _block(rule: Operand, contracts: int) -> tuple[int, int]:
    """Returns the rows and columns that one program rounds: whole tiles, and whole runs of a rotation."""
    across = 1 if rule.block is None else rule.block[0]
    if contracts == 0:
        return TILE, max(across, _LEAST_COLUMNS)
    return max(across, _LEAST_ROWS), TILE


def _programs(x: Tensor, block: tuple[int, int]) -> tuple[int]:
    return (math.prod(-(-size // of_block) for size, of_block in zip(x.shape, block, strict=True)),)


def _options(block: tuple[int, int], is_wide: bool) -> dict[str, Any]:
    """Returns the compiler's options. is_wide: an element needs twice the registers that simple formats need."""
    warps = 8 if math.prod(block) > _LARGE_BLOCK else 4
    # Without fusion, since scaling and rounding are two roundings.
    return {"num_warps": warps * (1 + is_wide), "enable_fp_fusion": False}


def grid_numbers(grid: ElementGrid) -> tuple[float, int, int]:
    """Returns the largest value, the bits of the smallest normal power, and the shift from a power to its spacing."""
    return float(grid.max), (grid.min_exponent + 127) << _MANTISSA_BITS, grid.mantissa_bits << _MANTISSA_BITS


def scale_numbers(format: NumberFormat, rule: Operand, grid: ElementGrid) -> tuple[float, ...]:
    """Returns the arguments of `block_scales` from `target` on, with the second target after the first."""
    targets = rule.targets or (grid.max,)
    is_even = scale_rule(format, rule) == "floor" and format.rule_of(rule) == "even"
    carry = 1 << (_MANTISSA_BITS - grid.mantissa_bits - 1) if is_even else 0
    of_tensor = (format.tensor_scale or 1.0) * grid.max
    kind = scale_grid(format.scale) or grid
    largest, least, shift = grid_numbers(kind)
    top = math.floor(math.log2(grid.max))
    # Always of the same types: `launching` finds a kernel by equal numbers, and 6 equals 6.0.
    of_targets = float(targets[0]), float(targets[-1])
    return *of_targets, top, carry, float(of_tensor), largest, float(kind.smallest), least, shift


def scale_rule(format: NumberFormat, rule: Operand) -> str:
    """Returns the rule of the scales; "even" is "floor" after a carry was added."""
    name = format.rule_of(rule)
    return "floor" if name == "even" else name
