"""The step from a number to the nearest value of a grid, or to one of its two neighbours at random."""

from __future__ import annotations

import torch
from torch import Tensor

from .grids import ElementGrid

_EXPONENT_MASK = 0x7F800000


def spacing_of(x: Tensor, grid: ElementGrid) -> Tensor:
    """Returns the spacing of the grid around each element of x, FP32.

    It is 2**(exponent of x - mantissa bits), not below that of the subnormals. All of these are powers of two, so that
    dividing and multiplying by them is exact.
    """
    power = (x.view(torch.int32) & _EXPONENT_MASK).view(torch.float32)
    least = 2.0**grid.min_exponent
    if grid.subnormals:
        return power.clamp_min(least).mul_(2.0**-grid.mantissa_bits)
    return torch.where(power < least, least, power * 2.0**-grid.mantissa_bits)


def _ties_by_exponent(steps: Tensor, spacing: Tensor, grid: ElementGrid) -> Tensor:
    """Sends ties between two powers of two to the even code, which without mantissa bits is an even exponent's."""
    field = (spacing.view(torch.int32) >> 23) - 127 - grid.min_exponent + 1
    return torch.where((steps.abs() == 1.5) & (field % 2 == 0), steps.sign(), steps)


def round_to_grid(x: Tensor, grid: ElementGrid, random: Tensor | None = None) -> Tensor:
    """Rounds every element to the grid, saturating; NaN stays NaN.

    Args:
        x: any shape, FP32.
        grid: the values that an element can take.
        random: None for nearest, ties to even. Otherwise numbers of x's shape as `uniform` gives them: x + (random -
            1/2) * (spacing of the grid around x) is rounded to nearest, so that x goes to either neighbour with the
            probability that keeps its mean.

    Returns: x's shape, FP32.
    """
    spacing = spacing_of(x, grid)
    steps = x / spacing
    if random is not None:
        steps += random - 0.5
    if grid.mantissa_bits == 0:
        steps = _ties_by_exponent(steps, spacing, grid)
    rounded = steps.round_().copysign_(x)  # ties to even; copysign keeps the sign of what becomes 0
    return rounded.mul_(spacing).clamp_(-grid.max, grid.max)
