"""Scales of blocks: from a block's largest magnitude to the number that its elements are divided by.

A NaN scale marks a block with a NaN or an infinity. Scales have a smallest value above 0; smaller ones, such as those
of blocks of zeros, are raised to it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .formats import NumberFormat, Operand
from .grids import ElementGrid, round_to_grid, scale_grid, spacing_of

_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
_LARGEST = torch.finfo(torch.float32).max
_MANTISSA_BITS = 23
_MANTISSA = (1 << _MANTISSA_BITS) - 1
# The exponent bias of E8M0, whose values are 2**-127 to 2**127.
_BIAS = 127
# The bits of 2**-127, the only one of these that is subnormal in FP32.
_LEAST_POWER = 1 << (_MANTISSA_BITS - 1)


class Scales(NamedTuple):
    """The factors of each block's elements after rounding (`scales`) and before it (`factors`)."""

    scales: Tensor
    factors: Tensor


def block_scales(
    amax: Tensor, format: NumberFormat, rule: Operand, target: float, tensor_amax: Tensor | None
) -> Scales:
    """Returns the scales of blocks.

    Args:
        amax: the largest magnitude of each block, FP32; NaN or infinity if the block contains one.
        format: gives the kind of the scales.
        rule: of the operand.
        target: value to which the largest magnitude of a block is scaled: the grid's largest value, or an alternative
            (`Operand.targets`).
        tensor_amax: the largest magnitude of the whole tensor, one element, for formats with a scale of the tensor.
    """
    grid = rule.grid or format.grid
    assert grid is not None
    scale_rule = format.rule_of(rule)
    if format.scale == "fp32":
        scales = fp32_scales(amax, target)
        return Scales(scales, scales.reciprocal())
    if format.scale == "e8m0":
        exponents = _exponents(amax, grid, scale_rule)
        is_finite = torch.isfinite(amax)
        scales, factors = (torch.where(is_finite, _power(e), torch.nan) for e in (exponents, -exponents))
        return Scales(scales, factors)
    return _two_level(amax, format, grid, scale_rule, target, tensor_amax)


def fp32_scales(amax: Tensor, target: float) -> Tensor:
    """Returns amax / target, at least the smallest normal number; NaN if amax is not finite."""
    # The floor keeps an all-zero tile's scale above 0 (and its elements from 0 * inf = NaN).
    # Divided by a tensor, since for a Python number CUDA multiplies by its rounded reciprocal, one bit off.
    scales = (amax / amax.new_full((1,), target)).clamp_min(_SMALLEST_NORMAL)
    return torch.where(torch.isfinite(amax), scales, torch.nan)


def _two_level(
    amax: Tensor, format: NumberFormat, grid: ElementGrid, scale_rule: str, target: float, tensor_amax: Tensor | None
) -> Scales:
    """Returns block scales on their own grid, times one FP32 scale of the tensor if the format has one.

    The order of the operations is torchao's (`nvfp4_quantize`).
    """
    kind = scale_grid(format.scale)
    assert kind is not None
    scales, of_tensor = amax / amax.new_full((1,), target), amax.new_ones(1)
    if format.tensor_scale is not None:
        assert tensor_amax is not None
        of_tensor = fp32_scales(tensor_amax, format.tensor_scale * grid.max)
    rounded = _rounded(scales / of_tensor, kind, scale_rule)
    rounded = torch.where(torch.isfinite(amax) & torch.isfinite(of_tensor), rounded, torch.nan)
    # For a tensor of tiny numbers the quotient would be infinite.
    factors = (of_tensor.reciprocal() / rounded).clamp_max(_LARGEST)
    return Scales(of_tensor * rounded, factors)


def _rounded(scales: Tensor, kind: ElementGrid, scale_rule: str) -> Tensor:
    """Returns scales on their grid, to nearest or up, within its values above 0."""
    rounded = round_to_grid(scales, kind)
    if scale_rule == "up":
        rounded = torch.where(rounded < scales, rounded + spacing_of(scales, kind), rounded)
    return rounded.clamp(kind.smallest, kind.max)


def _exponents(amax: Tensor, grid: ElementGrid, scale_rule: str) -> Tensor:
    """Returns the exponents of E8M0 scales, int32, -127..127; arbitrary if amax is not finite."""
    top = math.floor(math.log2(grid.max))
    if scale_rule == "rceil":
        quotient = amax / amax.new_full((1,), grid.max)
        exponents = _ceil_log2(quotient)
    elif scale_rule == "ceil":
        exponents = _ceil_log2(amax) - top
    else:
        bits = amax.view(torch.int32)
        if scale_rule == "even":  # rounds as the largest element will be rounded; a carry goes into the exponent
            bits = bits + (1 << (_MANTISSA_BITS - grid.mantissa_bits - 1))
        exponents = (bits >> _MANTISSA_BITS) - _BIAS - top
    return exponents.clamp(-_BIAS, _BIAS)


def _ceil_log2(x: Tensor) -> Tensor:
    """Returns the exponent of the smallest power of two that is not below x >= 0, int32; -127 for 0."""
    bits = x.view(torch.int32)
    field, mantissa = bits >> _MANTISSA_BITS, bits & _MANTISSA
    is_above = torch.where(field == 0, mantissa > _LEAST_POWER, mantissa > 0)
    return field - _BIAS + is_above.to(torch.int32)


def _power(exponents: Tensor) -> Tensor:
    """Returns 2**exponents, FP32, exactly, for int32 exponents -127..127."""
    bits = (exponents + _BIAS) << _MANTISSA_BITS
    return torch.where(exponents == -_BIAS, _LEAST_POWER, bits).to(torch.int32).view(torch.float32)
