"""BF16 values, all of them, in the blocks of a format; and the comparison of FP32 tensors bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

# Magnitudes of finite BF16 values are 64 runs of so many codes (4 binades): what one block can hold with some bits
# left of each. Their ends have many significands, since 510 is no multiple of the 128 codes of a binade.
_WINDOW = 510


def every_pattern() -> Tensor:
    """The 65,536 bit patterns in the order of their codes, those of infinities and NaN among them."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def every_value() -> Tensor:
    """All 65,280 finite values."""
    values = every_pattern()
    return values[values.isfinite()]


def with_partners(block: tuple[int, int], seed: int = 0) -> list[Tensor]:
    """Tensors of whole blocks that hold every finite value, beside values of its size and one larger partner.

    Blocks are below each other. The partner, which decides the block's scale, is 1 to 8 times as large as the others.
    """
    generator = torch.Generator().manual_seed(seed)
    codes = torch.arange(64 * _WINDOW, dtype=torch.int16).view(64, _WINDOW)
    signed = torch.cat([codes, codes - 2**15], 1)
    order = torch.rand(signed.shape, generator=generator).argsort(1)
    windows = signed.gather(1, order)
    others = block[0] * block[1] - 1
    if others > windows.shape[1]:  # again, until a block is full
        chunks = windows.repeat(1, -(-others // windows.shape[1]))[:, :others]
    else:
        flat = windows.flatten()
        chunks = torch.cat([flat, flat[: -len(flat) % others]]).view(-1, others)
    values = chunks.contiguous().view(torch.bfloat16)
    factors = (3 * torch.rand(len(values), 1, generator=generator)).exp2()
    largest = values.abs().amax(1, keepdim=True).double() * factors
    partners = largest.clamp_max(torch.finfo(torch.bfloat16).max).to(torch.bfloat16)
    blocks = torch.cat([partners, values], 1).view(-1, block[1])
    return list(blocks.split(len(blocks) // 64))


def in_order(block: tuple[int, int]) -> list[Tensor]:
    """Tensors of whole blocks that hold every bit pattern, in order."""
    return list(every_pattern().view(-1, block[1]).split(max(block[0], 4096 // block[1])))


def assert_same_bits(got: Tensor, expected: Tensor) -> None:
    """FP32 tensors are equal bit for bit, zeros' signs included; all NaN are equal."""
    got, expected = got.contiguous(), expected.contiguous()
    assert got.dtype == expected.dtype == torch.float32 and got.shape == expected.shape
    differ = (got.view(torch.int32) != expected.view(torch.int32)) & ~(got.isnan() & expected.isnan())
    wrong = differ.nonzero()
    assert len(wrong) == 0, f"{len(wrong)} differ, first at {wrong[0].tolist()}."
