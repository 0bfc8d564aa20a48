"""The random Hadamard transform of an operand: x H along the contracted dimension, in runs of 2^k elements.

Rotating both operands of a product does not change the product, because a rotation is orthogonal. It spreads an outlier
over its run, so that the other elements of its block keep more bits. As in NVIDIA's recipe (arXiv:2509.25149), the
random signs are drawn once and are the same for all layers and steps; here they are the first bits of pi.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

# 128 bits of the fraction of pi: 1 flips the sign.
_BITS = 0x243F6A8885A308D313198A2E03707344
LARGEST = 128


def rotate(x: Tensor, size: int, dim: int) -> Tensor:
    """Returns x (R, C), FP32 or FP64, rotated along `dim` in runs of `size` elements, a power of two.

    A last, shorter run is rotated in runs of smaller powers of two. The transform consists of sums, differences and one
    product with 1 / sqrt(size), so that every device gives the same numbers.
    """
    return _along_last(_rotated, x, size, dim)


def rotate_back(x: Tensor, size: int, dim: int) -> Tensor:
    """Undoes `rotate`."""
    return _along_last(_rotated_back, x, size, dim)


def signs(size: int) -> list[float]:
    """Returns the signs of a run's elements."""
    return [-1.0 if _BITS >> (LARGEST - 1 - index) & 1 else 1.0 for index in range(size)]


def _along_last(function: Callable[[Tensor, int], Tensor], x: Tensor, size: int, dim: int) -> Tensor:
    if dim == 0:
        return _along_last(function, x.t(), size, 1).t().contiguous()
    whole = x.shape[1] // size * size
    parts = [function(x[:, :whole], size)] if whole else []
    while whole < x.shape[1]:
        run = 1 << ((x.shape[1] - whole).bit_length() - 1)
        parts.append(function(x[:, whole : whole + run], run))
        whole += run
    return torch.cat(parts, 1) if len(parts) != 1 else parts[0]


def _rotated(x: Tensor, size: int) -> Tensor:
    runs = x.reshape(x.shape[0], -1, size)
    return _hadamard(runs * runs.new_tensor(signs(size))).view(x.shape)


def _rotated_back(x: Tensor, size: int) -> Tensor:
    runs = _hadamard(x.reshape(x.shape[0], -1, size))
    return (runs * runs.new_tensor(signs(size))).view(x.shape)


def _hadamard(runs: Tensor) -> Tensor:
    """Returns runs (R, count, size) times the Hadamard matrix / sqrt(size) (Sylvester's, which is symmetric)."""
    shape, size, half = runs.shape, runs.shape[-1], 1
    while half < size:
        one, other = runs.reshape(-1, size // (2 * half), 2, half).unbind(2)
        runs = torch.stack([one + other, one - other], 2)
        half *= 2
    return runs.reshape(shape) * (1.0 / math.sqrt(size))
