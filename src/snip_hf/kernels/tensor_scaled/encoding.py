"""Formats whose rounded operands are E4M3 numbers times one factor of the tensor, and their parameters.

There are three kinds. With the grid E4M3 and one scale per tensor, FP32 or a power of two, this holds by definition.
With blocks whose scales are powers of two ("block formats"), a rounded element is value * 2**e for a value of the grid
and its block's exponent e. It is encoded as value * 2**(e - s), with one exponent s for the whole tensor, and the
product is multiplied by 2**s.

E4M3 represents value * 2**(e - s) exactly for all e - s from `Encoding.lowest` to `Encoding.highest`. For E2M1 these
are -8 to 6, 15 binades: 6 * 2**6 = 384 is at most 448, and 0.5 * 2**-8 is E4M3's smallest number. For the integers
-7..7 they are -9 to 6. Inside this range s changes no bit of a result. A block with a larger exponent saturates: its
elements are cut off at 448 * 2**s. A block with a smaller one is rounded as if its exponent were s + lowest. Its small
elements lose bits, without a bias if the format rounds stochastically.

The scale 2**s of a format with one power of two per tensor ("delayed format") is this exponent, too. Elements above
448 * 2**s saturate, and those below 2**(s - 6) lose bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ...numerics.formats import E4M3, FORMATS, ElementGrid, NumberFormat
from ...numerics.gemms import OPERANDS

BLOCK = 32
# Upper limit of a tensor's encoded magnitudes: 1.5 * 2**8, E2M1's largest number in its highest block. The integers'
# limit would be higher, 7 * 2**6.
TOP = 384.0
_TOP_EXPONENT, _TOP_MANTISSA = 8, 0x400000
# A grid with fewer binades would lose bits that MXFP4 keeps.
_LEAST_BINADES = 15

# Fields of an encoded layout's parameters, which products and kernels read: the scale of the tensor and its inverse;
# the factor that turns a block's largest magnitude into its exponent; the power of two below which the spacing in the
# lowest block is constant; the spacing between 1 and 2, 0 if the format has one FP32 scale, `DELAYED` if one power of
# two; the largest magnitude of a block that fits, and of a block that is too small to fit.
SCALE, INVERSE, CEILING, LEAST, SPACING, MOST, LOST = range(7)
PARAMETERS = 8
DELAYED = -1.0


@dataclass(frozen=True)
class Encoding:
    """The encoding of a format's blocks as E4M3."""

    grid: ElementGrid
    lowest: int
    """Exponent of the smallest block scale whose values E4M3 represents, relative to the tensor's."""
    highest: int


def encoding_of(format: NumberFormat) -> Encoding | None:
    """Returns the encoding of a block format; None if its blocks, scales, grid or rounding do not allow one."""
    grid, rules = format.grid, [format.operand(name) for name in OPERANDS]
    if grid is None or format.scale != "e8m0" or format.rotation or not format.gradient.stochastic:
        return None
    for rule in rules:
        if not rule.is_plain or rule.block != (1, BLOCK) or rule.grid not in (None, grid):
            return None
        if format.rule_of(rule) != "rceil":
            return None
    if not grid.subnormals or not 1 <= grid.mantissa_bits <= E4M3.mantissa_bits:
        return None
    highest = math.floor(math.log2(E4M3.max / grid.max))
    lowest = round(math.log2(E4M3.smallest / grid.smallest))
    if highest - lowest + 1 < _LEAST_BINADES or grid.max * 2.0**highest < TOP:
        return None
    return Encoding(grid, lowest, highest)


def has_one_scale(format: NumberFormat) -> bool:
    """Returns True if each operand of a format is E4M3 with one FP32 scale, rounded to nearest."""
    return format.scale == "fp32" and _is_whole_e4m3(format)


def is_delayed(format: NumberFormat) -> bool:
    """Returns True if each operand of a format is E4M3 with one power of two as its scale, rounded to nearest."""
    return format.scale == "e8m0" and _is_whole_e4m3(format)


def _is_whole_e4m3(format: NumberFormat) -> bool:
    rules = [format.operand(name) for name in OPERANDS]
    if format.grid != E4M3 or format.rotation:
        return False
    is_e4m3 = all(rule.quantized and rule.grid in (None, E4M3) and not rule.noise for rule in rules)
    return is_e4m3 and all(rule.block is None and not rule.stochastic for rule in rules)


def exponents_of(amax_bits: Tensor) -> Tensor:
    """Returns the smallest s with amax <= 384 * 2**s, for the bits of FP32 numbers amax >= 0 as int64."""
    return ((amax_bits + (0x7FFFFF - _TOP_MANTISSA)) >> 23) - 127 - _TOP_EXPONENT


def table_on(device: torch.device) -> Tensor:
    """Returns the parameters of all formats that are registered now, for kernels: (formats, PARAMETERS), FP32."""
    return _table(device, len(FORMATS))


@cache
def _table(device: torch.device, formats: int) -> Tensor:
    return torch.tensor([_row(format) for format in FORMATS.values()], dtype=torch.float32).to(device)


def _row(format: NumberFormat) -> list[float]:
    """Returns a format's parameters in the order of their fields; the first two are the tensor's."""
    encoding = encoding_of(format)
    if is_delayed(format):
        # Blocks count as too small if all of their elements become zero.
        return [0.0, 0.0, 0.0, 0.0, DELAYED, E4M3.max, E4M3.smallest / 2, 0.0]
    if encoding is None:
        return [0.0] * PARAMETERS
    grid = encoding.grid
    # The largest power of two in amax * ceiling is the block's scale by the rule "rceil" times 2**min_exponent: amax is
    # BF16, so that amax / max is either a power of two or at least 1 + 2**-8 times one.
    ceiling = (2.0 - 2.0**-10) / grid.max * 2.0**grid.min_exponent
    return [
        0.0,
        0.0,
        ceiling,
        2.0 ** (encoding.lowest + grid.min_exponent),
        2.0**-grid.mantissa_bits,
        grid.max * 2.0**encoding.highest,
        grid.max * 2.0 ** (encoding.lowest - 1),
        0.0,
    ]
