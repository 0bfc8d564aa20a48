"""`LayerSums` of one matrix in the paper's formats, read at once, as most tests of the sums want them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from configs import fp4_config
from torch import Tensor

from snip_hf.estimation import layer_sums
from snip_hf.estimation.extrapolation import BatchSizes, Squares
from snip_hf.estimation.layer_sums import read_all
from snip_hf.estimation.samples import LayerSample

# The most precise first, as a refresh has them.
DEFAULT = fp4_config().formats[::-1]


class LayerSums(layer_sums.LayerSums):
    def __init__(
        self,
        sample: LayerSample,
        weight: Tensor,
        push: Callable[[Tensor], Tensor] | Tensor | None,
        micro_batches: int,
        batch: BatchSizes | None = None,
        formats: Sequence[str] = DEFAULT,
    ) -> None:
        of_matrices = [push] if isinstance(push, Tensor) else push
        # By default each token of a whole micro-batch has a label.
        batch = batch or BatchSizes(*(sample.tokens,) * 4)
        super().__init__(sample, [weight], of_matrices, micro_batches, batch, formats=formats)

    def weight_divergences(self, name: str, keys: tuple[int, int]) -> dict[str, Squares]:  # type: ignore[override]
        return read_all([super().weight_divergences(name, keys)])[0]

    def loss_divergence(self, name: str, form: str) -> float:  # type: ignore[override]
        return read_all([super().loss_divergence(name, form)])[0]

    def errors(self, name: str) -> dict[str, tuple[float, float]]:  # type: ignore[override]
        return read_all([super().errors(name)])[0]


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
    """A single piece."""
    return [slice(0, n)]


def alike(n: int, kinds: int, channels: int, seed: int) -> Tensor:
    """Rows of a few kinds, (n, channels)."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(kinds, channels, generator=generator)
    return rows[torch.randint(0, kinds, (n,), generator=generator)]
