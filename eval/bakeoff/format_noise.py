"""The noise that rounding to a format adds, by theory: signal to noise in decibels (QSNR), as others define it.

Two theories. `gaussian_noise` is ours: the mean squared error on normal random numbers, integrated over every cell of
the grid and over the largest magnitude of a block, with the format's own rule for scales. `published_qsnr` has the
formulas of "INT v.s. FP" (arXiv:2510.25602, theorems 1 and 2), which know a block by its crest factor alone.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from scipy.special import ndtr, ndtri

from snip_hf.numerics.formats import ElementGrid, NumberFormat, Operand
from snip_hf.numerics.gemms import OPERANDS
from snip_hf.numerics.scales import block_scales

Array = np.ndarray[Any, Any]

# Quantiles of a block's largest magnitude that the integral is a mean over.
_NODES = 1024
# How far a scale is above the one that is just large enough, in the figures of arXiv:2510.25602. For E4M3 scales the
# text says 1, but its crossover of NVINT4 and NVFP4 (2.39) comes out with 1.05 and not with 1 (2.46).
_EXCESS = {"fp32": 1.0, "e8m0": 1.5, "e4m3": 1.05}


def decibels(noise: float) -> float:
    """Returns the signal to noise ratio in decibels of a relative mean squared error."""
    return math.inf if noise == 0 else -10 * math.log10(noise)


def is_predicted(format: NumberFormat) -> bool:
    """Whether theory speaks of a format: it rounds all operands, and no block chooses between scales."""
    rules = [format.operand(name) for name in OPERANDS]
    return format.is_quantized and all(rule.quantized and not rule.noise and not rule.targets for rule in rules)


def block_size(rule: Operand, elements: int) -> int:
    """Returns how many elements share a scale; `elements` is the size of the tensor."""
    return elements if rule.block is None else rule.block[0] * rule.block[1]


def magnitudes(grid: ElementGrid) -> Array:
    """Returns the values of a grid that are not negative, in order."""
    count = 2**grid.mantissa_bits
    found = [step * grid.smallest for step in range(count)] if grid.subnormals else [0.0]
    exponent = grid.min_exponent
    while 2.0**exponent <= grid.max:
        found += [2.0 ** (exponent - grid.mantissa_bits) * (count + step) for step in range(count)]
        exponent += 1
    values = np.array(found)
    return values[values <= grid.max]


def largest_of(count: int, quantiles: Array) -> Array:
    """Returns quantiles of the largest magnitude of `count` independent normal random numbers."""
    return -np.asarray(ndtri(-0.5 * np.expm1(np.log(quantiles) / count)))


def mean_crest(count: int) -> float:
    """Returns the mean of the largest magnitude of `count` independent normal random numbers."""
    return float(largest_of(count, _middles()).mean())


def gaussian_noise(format: NumberFormat, operand: str, elements: int) -> float:
    """Returns the relative mean squared error of an operand whose elements are independent normal random numbers.

    A rotation changes nothing: such numbers stay what they are.

    Args:
        format: one that `is_predicted`.
        operand: "activation", "weight" or "gradient".
        elements: of the tensor, which decide its largest magnitude. It counts as known, its median.
    """
    rule = format.operand(operand)
    grid = rule.grid or format.grid
    assert grid is not None
    count = block_size(rule, elements)
    amax = largest_of(count, _middles())
    tensor_amax = torch.tensor(largest_of(elements, np.array([0.5])), dtype=torch.float32)
    amaxes = torch.tensor(amax, dtype=torch.float32)
    scales = block_scales(amaxes, format, rule, grid.max, tensor_amax).scales.double().numpy()
    of_others = _noise_below(amax, scales, magnitudes(grid), rule.stochastic) / (2 * ndtr(amax) - 1)
    of_largest = _noise_at(amax, scales, magnitudes(grid), rule.stochastic)
    return float(np.mean(of_others * (count - 1) + of_largest) / count)


def published_qsnr(format: NumberFormat, operand: str, crest: float) -> float | None:
    """Returns what theorems 1 and 2 of arXiv:2510.25602 say, for rounding to nearest; None for other scales.

    Args:
        format: one that `is_predicted`.
        operand: whose grid and block count.
        crest: largest magnitude of a block by the root of its mean square.
    """
    rule = format.operand(operand)
    grid = rule.grid or format.grid
    assert grid is not None
    if format.scale not in _EXCESS:
        return None
    excess = _EXCESS[format.scale]
    # With scales that are no powers of two the largest element of a block has no error. A whole tensor has so many
    # elements that this does not matter.
    share = 0.0 if format.scale == "e8m0" or rule.block is None else 1 / block_size(rule, 0)
    if grid.exponent_bits == 0:
        bits = grid.mantissa_bits + 2
        return 4.78 + 6.02 * bits - 20 * math.log10(excess * crest) - 10 * math.log10(1 - share)
    bias, mantissa = 1 - grid.min_exponent, grid.mantissa_bits
    threshold = excess * crest * 2.0**grid.min_exponent / grid.max
    density = math.exp(-(threshold**2) / 2) / math.sqrt(2 * math.pi)
    normal_energy = 2 * (threshold * density + 1 - float(ndtr(threshold)))
    below_normal = 2 * float(ndtr(threshold)) - 1
    of_normal = max(0.0, normal_energy - share * crest**2) / (24 * 4**mantissa)
    of_subnormal = 4.0 ** (1 - bias - mantissa) / (12 * grid.max**2) * (excess * crest) ** 2 * below_normal
    return decibels(of_normal + of_subnormal)


def _middles() -> Array:
    return (np.arange(_NODES) + 0.5) / _NODES


def _noise_below(amax: Array, scales: Array, values: Array, stochastic: bool) -> Array:
    """Returns the integral of the squared error times the normal density over |x| <= amax, for each block."""
    points = scales[:, None] * values
    if stochastic:  # the mean squared error between two values is (x - lower) * (upper - x)
        edges = np.minimum(points, amax[:, None])
        zeroth, first, second = _moments(edges[:, :-1], edges[:, 1:])
        lower, upper = points[:, :-1], points[:, 1:]
        cells = (lower + upper) * first - second - lower * upper * zeroth
    else:
        middles = (points[:, 1:] + points[:, :-1]) / 2
        edges = np.minimum(middles, amax[:, None])
        lowest = np.concatenate([np.zeros_like(points[:, :1]), edges], axis=1)
        highest = np.concatenate([edges, amax[:, None]], axis=1)
        zeroth, first, second = _moments(lowest, highest)
        cells = second - 2 * points * first + points**2 * zeroth
    return np.asarray(2 * cells.sum(axis=1))


def _noise_at(amax: Array, scales: Array, values: Array, stochastic: bool) -> Array:
    """Returns the mean squared error of the largest element of each block."""
    points = scales[:, None] * values
    distances = np.sort(np.abs(points - amax[:, None]), axis=1)
    if not stochastic:
        return np.asarray(distances[:, 0] ** 2)
    # Its neighbours are the two nearest values only where they lie on both sides.
    upper = np.where(points >= amax[:, None], points, np.inf).min(axis=1)
    lower = np.where(points <= amax[:, None], points, 0).max(axis=1)
    return np.where(np.isinf(upper), 0.0, (amax - lower) * (upper - amax))


def _moments(lower: Array, upper: Array) -> tuple[Array, Array, Array]:
    """Returns the integrals of 1, x and x^2 times the normal density."""
    density_lower, density_upper = (np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi) for x in (lower, upper))
    zeroth = ndtr(upper) - ndtr(lower)
    return zeroth, density_lower - density_upper, zeroth - (upper * density_upper - lower * density_lower)
