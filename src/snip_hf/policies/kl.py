"""The policy "kl": KL divergence between histograms of each operand before and after rounding (docs/policies.md)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..estimation.criterion import LayerCriterion, Rows, by_gemm
from ..estimation.layer_sums import Deferred, LayerSums
from ..numerics.gemms import CONTRACTIONS, GEMMS
from .registry import register_criterion

# Bins of equal width (our choice). All layers use the same number, so that their divergences are comparable.
BINS = 100
# Added to the count of every bin (Jeffreys prior): otherwise a bin that rounding empties gives an infinite divergence.
_UNSEEN = 0.5
_SAMPLES = {"activation": "x", "gradient": "g", "weight": "w"}


class KL(LayerCriterion):
    """KL(before || after) of histograms, in nats, summed over the operands of a GEMM and over the GEMMs of a layer.

    Computing a histogram synchronizes with the GPU.
    """

    def __init__(self, sums: LayerSums, trace: Tensor | None = None) -> None:
        super().__init__(sums, trace)
        # Operand -> inner bin edges and counts before rounding.
        self._before: dict[str, tuple[Tensor, Tensor]] = {}

    def rows(self, name: str) -> Deferred[Rows]:
        figures = [
            self._of_operand(_SAMPLES[operand], contracts, name)
            for gemm in GEMMS
            for operand, contracts in CONTRACTIONS[gemm]
        ]
        return Deferred(torch.stack(figures), by_gemm)

    def _of_operand(self, operand: str, contracts: int, name: str) -> Tensor:
        if operand not in self._before:
            values = getattr(self.sums, operand)
            edges = inner_edges(values)
            self._before[operand] = edges, histogram(values, edges)
        edges, before = self._before[operand]
        return kl_divergence(before, histogram(self.sums.rounded(operand, name, contracts), edges))


def inner_edges(values: Tensor) -> Tensor:
    """Returns the edges between `BINS` bins of equal width over the range of the values, (BINS - 1,).

    The first and last bins are open, so values beyond the range count there.
    """
    if values.numel() == 0:
        return values.new_zeros(BINS - 1)
    least, most = values.aminmax()
    return least + (most - least) * (torch.arange(1, BINS, dtype=values.dtype, device=values.device) / BINS)


def histogram(values: Tensor, edges: Tensor) -> Tensor:
    """Returns the number of values in each bin, (BINS,); a value on an edge belongs to the bin above it.

    The counts are exact for any number of values. Waiting for the GPU costs less than sorting would.
    """
    return torch.bucketize(values.flatten(), edges, out_int32=True, right=True).bincount(minlength=BINS)


def kl_divergence(before: Tensor, after: Tensor) -> Tensor:
    """Returns sum p log(p / q) for two histograms, in nats, (), FP32."""
    p, q = (counts.to(torch.float64) + _UNSEEN for counts in (before, after))
    p, q = p / p.sum(), q / q.sum()
    return (p * (p / q).log()).sum().to(torch.float32)


register_criterion("kl", KL)
