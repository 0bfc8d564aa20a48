"""Random numbers for stochastic rounding: pure functions of a key and an element's position."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF
# Uniform numbers have the variance 1/12.
_TERMS = 12


def stream_key(seed: int, step: int, micro_batch: int, layer: Any, operand: int) -> Any:
    """Returns the 64-bit key of one operand's stream of random numbers; for an array of layers (uint64), an array.

    The same five numbers give the same stream, also in a resumed run and in the recomputation of activation
    checkpointing. Other numbers give another stream.
    """
    low, high = 0x243F6A88, 0x85A308D3  # the first bits of pi
    for word in (seed, seed >> 32, step, micro_batch, layer, operand):
        low = _mix(low ^ (word & _MASK32))
        high = _mix((high + low) & _MASK32)
    return (high << 32) | low


def matrix_keys(key: int, matrices: int) -> list[int]:
    """Returns a key for each matrix of a layer, from the layer's key."""
    return stream_key(key, 0, 0, np.arange(matrices, dtype=np.uint64), 0).tolist()


def uniform(
    key: int, shape: tuple[int, int] | torch.Size, device: torch.device | str = "cpu", rank: int = 0, ranks: int = 1
) -> Tensor:
    """Returns numbers (k + 1/2) / 256, k = 0 ... 255, one per element: a pure function of (key, rank, ranks, element).

    One 32-bit hash serves a run of four neighbours in a column, which a kernel holds together: rows 4 i ... 4 i + 3
    take its bytes, the lowest first, at position i * C + c after that of `rank_stream`, modulo 2**32. NVIDIA's
    stochastic conversion to FP4 also uses eight bits. With them, the mean of a rounded number is within 2**-9 spacings
    of the number. The hash consists of two multiplications (constants of Wellons' `lowbias32`), with the halves of the
    key inserted before and between them. Integer operations wrap, so that a kernel in any language can repeat it bit
    for bit.

    Args:
        key: 64 bits.
        shape: (R, C).
        device: of the numbers.
        rank: index, from 0, of the part of a tensor, split along its rows, that gets the numbers.
        ranks: number of parts.
    """
    rows, columns = shape
    runs = (rows + 3) // 4
    bits = _hash(*rank_stream(key, shape, rank, ranks), runs * columns, device).view(runs, 1, columns)
    numbers = torch.cat([bits, bits >> 8, bits >> 16, bits >> 24], 1).bitwise_and_(0xFF)
    return numbers.to(torch.float32).add_(0.5).mul_(2.0**-8).view(4 * runs, columns)[:rows]


def normal(key: int, shape: tuple[int, int] | torch.Size, device: torch.device | str = "cpu") -> Tensor:
    """Returns numbers of mean 0 and variance 1, one per element: sums of twelve uniform ones, minus 6.

    Their distribution is N(0, 1) except for an excess kurtosis of -0.1 and a largest magnitude of 6. They are a pure
    function of (key, element), the same on every device, and independent of `uniform(key, ...)`.
    """
    low, high = key & _MASK32, key >> 32
    total = torch.full(tuple(shape), -float(_TERMS // 2), dtype=torch.float32, device=device)
    for _ in range(_TERMS):
        low = _mix(low ^ 0x13198A2E)  # further bits of pi
        high = _mix((high + low) & _MASK32)
        total += uniform((high << 32) | low, shape, device)
    return total


def rank_stream(key: int, shape: tuple[int, int] | torch.Size, rank: int, ranks: int) -> tuple[int, int]:
    """Returns the key of the hash and its first position for one rank's tensor (R, C).

    Positions of lower ranks come first. The key depends on the number of runs on all ranks, assuming that all have as
    many as this one. So ranks with equal numbers of rows, a multiple of 4, together draw the numbers that one process
    draws for all rows, and ranks with other numbers of rows draw from separate streams.
    """
    runs = (shape[0] + 3) // 4
    all_runs = ranks * runs
    # Odd constants from the golden ratio and from MurmurHash3, one for each half. Without the second constant, similar
    # numbers would give correlated streams (up to 0.6).
    low = (key ^ all_runs * 0x9E3779B9) & _MASK32
    high = ((key >> 32) + all_runs * 0x85EBCA6B) & _MASK32
    return (high << 32) | low, rank * runs * shape[1] & _MASK32


def _hash(key: int, first: int, count: int, device: torch.device | str) -> Tensor:
    """Returns the key's 32 random bits for positions first ... first + count - 1, int32."""
    x = torch.arange(count, dtype=torch.int64 if count > 2**31 - 1 else torch.int32, device=device).to(torch.int32)
    low, high = _signed(key & _MASK32), _signed(key >> 32)
    x = _shift_xor(x.add_(_signed(first)).bitwise_xor_(low), 16).mul_(0x7FEB352D)
    x = _shift_xor(x.add_(high), 15).mul_(_signed(0x846CA68B))
    return _shift_xor(x, 16)


def _shift_xor(x: Tensor, bits: int) -> Tensor:
    """Returns x ^ (x >> bits) with a logical shift (torch's is arithmetic on signed integers), in place."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (32 - bits)) - 1))


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def _mix(x: Any) -> Any:
    """Computes Wellons' `lowbias32` of a Python integer, or of a uint64 array of numbers below 2**32."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)
