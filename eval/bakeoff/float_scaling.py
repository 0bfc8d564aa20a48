"""What the scaling law for floating-point training says of a format: "Capybara", arXiv:2501.02423v3.

    L(N, D, E, M, B) = n / N^alpha + d / D^beta + epsilon
                       + D^beta / N^alpha * log2(B) / (gamma (E + 0.5)^delta (M + 0.5)^nu)

for N parameters, D tokens, E exponent and M mantissa bits and B elements to a scale: equation 26 and table 2 there,
fitted to 41M to 679M parameters and 10B to 100B tokens. Its runs quantize the weights in forward and grad_input and the
activations in grad_weight, with scales of high precision, rounded to nearest.
"""

from __future__ import annotations

import math

from snip_hf.numerics.formats import NumberFormat

from .format_noise import is_predicted

_N, _ALPHA = 69.2343, 0.2368
_D, _BETA = 68973.0621, 0.5162
_EPSILON = 1.9061
_GAMMA, _DELTA, _NU = 11334.5197, 3.1926, 2.9543


def loss_in_high_precision(parameters: float, tokens: float) -> float:
    """Returns the law's loss of BF16."""
    return float(_N / parameters**_ALPHA + _D / tokens**_BETA + _EPSILON)


def added_loss(parameters: float, tokens: float, exponent_bits: float, mantissa_bits: float, block: float) -> float:
    """Returns what the law adds for quantized training."""
    precision = _GAMMA * (exponent_bits + 0.5) ** _DELTA * (mantissa_bits + 0.5) ** _NU
    return float(tokens**_BETA / parameters**_ALPHA * math.log2(block) / precision)


def critical_tokens(parameters: float, exponent_bits: float, mantissa_bits: float, block: float) -> float:
    """Returns the tokens beyond which the law's loss rises (equation 21)."""
    added_by_one_token = added_loss(parameters, 1, exponent_bits, mantissa_bits, block)
    return float((_D / added_by_one_token) ** (1 / (2 * _BETA)))


def added_loss_of(format: NumberFormat, parameters: float, tokens: float) -> float | None:
    """Returns what the law adds for a registered format, read by its activations.

    Integers of b bits are E0M(b - 1), as in the paper's own runs with E0M7. The law has no term for the kind of the
    scales, for square blocks and for stochastic rounding.

    Returns: None where the law does not speak: rotations, blocks that choose between scales, and scales of a whole
        tensor, whose equivalent block size has constants that are not published.
    """
    rule = format.activation
    grid = rule.grid or format.grid
    if grid is None or not is_predicted(format) or format.rotation or rule.block is None:
        return None
    is_integer = grid.exponent_bits == 0
    mantissa_bits = format.bits - 1 if is_integer else grid.mantissa_bits
    return added_loss(parameters, tokens, grid.exponent_bits, mantissa_bits, rule.block[1])
