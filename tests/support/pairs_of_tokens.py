"""docs/method.md, section 3, B(m, e): what pairs of tokens add across channels, written out in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def across_channels(meets: Tensor, errors: Tensor, pieces: list[slice]) -> tuple[float, float]:
    """Returns the sum over pairs of different tokens of the same piece, and over all pairs; (n, C) both."""
    m, e = meets.double(), errors.double()
    of_tokens, of_channels = m @ m.t(), m.t() @ m / (m * m).sum()
    in_form = of_tokens * (e @ of_channels @ e.t())
    in_channel = of_tokens * ((e * of_channels.diagonal()) @ e.t())
    products = m * e
    found_in_channel = (products @ products.t()).fill_diagonal_(0).sum().item()
    expected_in_channel = in_channel.clone().fill_diagonal_(0).sum().item()
    share = min(1.0, max(0.0, found_in_channel / expected_in_channel)) if expected_in_channel > 0 else 0.0
    pairs = share * (in_form - in_channel).fill_diagonal_(0)
    return sum(pairs[piece, piece].sum().item() for piece in pieces), pairs.sum().item()


def whole(n: int) -> list[slice]:
    """One piece."""
    return [slice(0, n)]


def alike(n: int, kinds: int, channels: int, seed: int) -> Tensor:
    """Rows of a few kinds, (n, channels)."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(kinds, channels, generator=generator)
    return rows[torch.randint(0, kinds, (n,), generator=generator)]
