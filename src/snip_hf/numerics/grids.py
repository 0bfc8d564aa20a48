"""Grids of small numbers: the values that an element or a block's scale can take, and rounding to them."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

# Limits of users' formats: FP32 arithmetic rounds exactly up to these bits.
_MOST_EXPONENT_BITS, _MOST_MANTISSA_BITS = 8, 10
_EXPONENT_MASK = 0x7F800000
_SCALE_KIND = re.compile(r"e([1-8])m([0-7])")


@dataclass(frozen=True)
class ElementGrid:
    """The values of one element, before its scale: a small floating-point format with a sign bit.

    Values are `significand * 2**exponent` with `mantissa_bits` fractional bits, subnormals included. Rounding
    saturates: a magnitude above `max` becomes `max`. Infinity and NaN are not values of a grid. Integers -n..n form a
    grid, too (`integers`).
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    min_exponent: int
    """Exponent of the smallest normal number; below it the spacing stays constant (subnormals)."""
    max: float
    """Largest finite value."""
    subnormals: bool = True
    """False: there are no values between 0 and the smallest normal number."""

    @property
    def smallest(self) -> float:
        """The smallest value above 0."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits * self.subnormals)

    @property
    def bits(self) -> int:
        """Bits of an element: sign, exponent and mantissa; for integers -n..n, enough for 2n + 1 values."""
        if self.exponent_bits == 0:
            return int(2 * self.max).bit_length()
        return 1 + self.exponent_bits + self.mantissa_bits


def integers(largest: int) -> ElementGrid:
    """Returns the grid of the integers -largest..largest: all of them are subnormals with the spacing 1.

    Raises:
        ValueError: `largest` is not in 1..2047, whose integers take at most 12 bits.
    """
    if not 1 <= largest < 2 ** (_MOST_MANTISSA_BITS + 1):
        raise ValueError(f"integers({largest!r}): expected 1 to {2 ** (_MOST_MANTISSA_BITS + 1) - 1}.")
    bits = largest.bit_length()
    return ElementGrid("int" + str(bits + 1), 0, bits - 1, bits - 1, float(largest))


def floats(
    exponent_bits: int, mantissa_bits: int, *, subnormals: bool = True, infinities: bool = False, nans: bool = False
) -> ElementGrid:
    """Returns the grid of a floating-point format with the bias 2**(exponent_bits - 1) - 1.

    Args:
        exponent_bits: 1 to 8.
        mantissa_bits: 0 to 10.
        subnormals: False reserves the lowest exponent for 0.
        infinities: True reserves the highest exponent for infinity and NaN, as in IEEE 754 and E5M2.
        nans: True reserves the largest number's code for NaN, as in E4M3.

    Raises:
        ValueError: the bits are out of range, no number remains, or the largest one exceeds FP32.
    """
    name = "e" + str(exponent_bits) + "m" + str(mantissa_bits)
    if not (1 <= exponent_bits <= _MOST_EXPONENT_BITS and 0 <= mantissa_bits <= _MOST_MANTISSA_BITS):
        raise ValueError(
            f"floats({exponent_bits!r}, {mantissa_bits!r}): expected 1 to {_MOST_EXPONENT_BITS} exponent bits and 0 to "
            f"{_MOST_MANTISSA_BITS} mantissa bits."
        )
    bias = 2 ** (exponent_bits - 1) - 1
    top, significand = 2**exponent_bits - 1, 2.0 - 2.0**-mantissa_bits
    if infinities or (nans and mantissa_bits == 0):
        top -= 1
    elif nans:
        significand -= 2.0**-mantissa_bits
    if top == 0:  # nothing but subnormals
        significand = 1.0 - 2.0**-mantissa_bits if subnormals else 0.0
    largest = significand * 2.0 ** (max(top, 1) - bias)
    if not 0 < largest < 2.0**128:
        raise ValueError(
            f"{name} with subnormals={subnormals}, infinities={infinities}, nans={nans} has the largest value "
            f"{largest:g}; expected one above 0 that FP32 can hold. Reserve other codes, or take other bits."
        )
    return ElementGrid(name, exponent_bits, mantissa_bits, 1 - bias, largest, subnormals)


# OCP Microscaling (MX) v1.0: FP4 E2M1 (values 0, .5, 1, 1.5, 2, 3, 4, 6), and both FP6.
E2M1 = floats(2, 1)
E2M3 = floats(2, 3)
E3M2 = floats(3, 2)
# OCP FP8 (arXiv:2209.05433): E4M3 without infinity ("fn"), and E5M2.
E4M3 = floats(4, 3, nans=True)
E5M2 = floats(5, 2, infinities=True)


def scale_grid(kind: str) -> ElementGrid | None:
    """Returns the grid of block scales of a kind "eYmZ"; None for "fp32" and "e8m0", which have no grid.

    The sign is unused. "e4m3" and "e5m2" are OCP's; the others reserve one code for NaN.

    Raises:
        ValueError: the kind is unknown.
    """
    if kind in ("fp32", "e8m0"):
        return None
    found = _SCALE_KIND.fullmatch(kind)
    if found is None:
        raise ValueError(f"{kind!r} is not a kind of scale; expected 'fp32', 'e8m0' or 'eYmZ', e.g. 'e4m3'.")
    if kind == E5M2.name:
        return E5M2
    try:
        return floats(int(found[1]), int(found[2]), nans=True)
    except ValueError:
        lack = "values beyond FP32" if int(found[1]) > 1 else "no value above 0"
        raise ValueError(f"{kind!r} has {lack}; expected 2 to 7 exponent bits, e.g. 'e4m3', or 'e8m0'.") from None


def spacing_of(x: Tensor, grid: ElementGrid) -> Tensor:
    """Returns the spacing of the grid around each element of x, FP32.

    It is 2**(exponent of x - mantissa bits), at least that of the subnormals. Multiplying and dividing by such powers
    of two is exact.
    """
    power = (x.view(torch.int32) & _EXPONENT_MASK).view(torch.float32)
    least = 2.0**grid.min_exponent
    if grid.subnormals:
        return power.clamp_min(least).mul_(2.0**-grid.mantissa_bits)
    return torch.where(power < least, least, power * 2.0**-grid.mantissa_bits)


def _ties_by_exponent(steps: Tensor, spacing: Tensor, grid: ElementGrid) -> Tensor:
    """Rounds ties between two powers of two to the even code; without mantissa bits, that of an even exponent."""
    field = (spacing.view(torch.int32) >> 23) - 127 - grid.min_exponent + 1
    return torch.where((steps.abs() == 1.5) & (field % 2 == 0), steps.sign(), steps)


def round_to_grid(x: Tensor, grid: ElementGrid, random: Tensor | None = None) -> Tensor:
    """Rounds every element to the grid, saturating; NaN stays NaN.

    Args:
        x: any shape, FP32.
        grid: the values that an element can take.
        random: None rounds to nearest, ties to even. Otherwise numbers from `uniform` in x's shape: x + (random - 1/2)
            * (spacing of the grid around x) is rounded to nearest, so that the mean is x.

    Returns: x's shape, FP32.
    """
    spacing = spacing_of(x, grid)
    steps = x / spacing
    if random is not None:
        steps += random - 0.5
    if grid.mantissa_bits == 0:
        steps = _ties_by_exponent(steps, spacing, grid)
    rounded = steps.round_().copysign_(x)  # ties to even; copysign keeps the sign of zeros
    return rounded.mul_(spacing).clamp_(-grid.max, grid.max)
