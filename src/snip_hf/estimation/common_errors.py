"""The part of a sum of squares that rounding errors share across tokens and channels.

Legend: n sampled tokens in R pieces of L, C channels; e (n, C) the errors of an operand, m (n, C) their factors, such
as Gdot W for errors of X.

Tokens with similar rows have similar errors: equal tokens in the first blocks, and all tokens after an activation
function, whose small values round to zero. Products of errors of different tokens t and s in different channels i and j
then do not cancel:

    sum over t != s and i != j of <m_ti m_sj> e_ti e_sj          <.>: the mean over random directions

A single direction estimates this sum poorly. So the mean is approximated by a product of two factors, one for the
tokens and one for the channels:

    <m_ti m_sj> = (m_t . m_s) (m^T m)_ij / |m|^2

Both factors are sums of many products, which one direction estimates well. At i = j the sum is also known without the
approximation; the ratio of the two bounds the share of the approximate sum that is used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from .products import rough_product, roughly


def prepared(factors: Tensor) -> ByChannels | ByTokens:
    """Prepares factors (R, L, C), FP32, for the errors of any number of formats; shorter pieces end in zeros."""
    tokens, channels = factors.shape[0] * factors.shape[1], factors.shape[2]
    # Both give the same sums; one multiplies (C, C), the other (n, n) matrices.
    return ByChannels(factors) if channels < tokens else ByTokens(factors)


class _Factors(ABC):
    """The factors of errors, (R, L, C), with the parts of the sums that all formats share."""

    def __init__(self, factors: Tensor) -> None:
        self.factors = factors

    def across_channels(self, errors: Tensor, found_in_channel: Tensor | None = None) -> Tensor:
        """Returns the sum above over pairs of tokens of the same piece, and over all pairs, (2,).

        Args:
            errors: (R, L, C), laid out as the factors.
            found_in_channel: the exact sum over i = j, if it is known.
        """
        every, in_channel = self.product_form(errors)
        if found_in_channel is None:
            products = (self.factors * errors).flatten(0, 1)
            found_in_channel = products.sum(0).square().sum() - products.square().sum()
        share = torch.where(in_channel[1] > 0, found_in_channel / in_channel[1], 0.0).clamp(0.0, 1.0)
        return share * (every - in_channel)

    @abstractmethod
    def product_form(self, errors: Tensor) -> tuple[Tensor, Tensor]:
        """Returns, in the product form, the sums over all i and j, and over i = j, of t != s; (2,) each."""


class ByChannels(_Factors):
    """Holds (m^T m) / |m|^2, (C, C)."""

    def __init__(self, factors: Tensor) -> None:
        super().__init__(factors)
        m = factors.flatten(0, 1)
        unit = roughly(_of_norm_1(m))
        moments = rough_product(unit.t(), unit)  # (C, n) x (n, C)
        self._diagonal, self._moments, self._rough_factors = moments.diagonal(), roughly(moments), roughly(factors)
        self._of_tokens = m.square().sum(1)

    def product_form(self, errors: Tensor) -> tuple[Tensor, Tensor]:
        e, diagonal = errors.flatten(0, 1), self._diagonal
        spread = rough_product(e, self._moments)  # (n, C) x (C, C)
        first = rough_product(self._rough_factors.mT, errors)  # (R, C, L) x (R, L, C)
        second = rough_product(self._rough_factors.mT, spread.view_as(errors))
        found = []
        for other, spread_e in ((second, spread), (first * diagonal, e * diagonal)):
            own, total = (first * other).sum(), (first.sum(0) * other.sum(0)).sum()
            found.append(torch.stack([own, total]) - (self._of_tokens * (spread_e * e).sum(1)).sum())
        return found[0], found[1]


class ByTokens(_Factors):
    """Holds m m^T without its diagonal, (n, n), and m / |m|."""

    def __init__(self, factors: Tensor) -> None:
        super().__init__(factors)
        m = factors.flatten(0, 1)
        unit, rough = _of_norm_1(m), roughly(m)
        self._unit, self._squares = roughly(unit), unit.square().sum(0)
        self._weights = rough_product(rough, rough.t())  # (n, C) x (C, n)
        self._weights.diagonal().zero_()

    def product_form(self, errors: Tensor) -> tuple[Tensor, Tensor]:
        e, sizes = errors.flatten(0, 1), self.factors.shape[:2]
        along = rough_product(e, self._unit.t())  # (n, C) x (C, n)
        found = []
        along = roughly(along)
        for left, right in ((along, along), (e * self._squares, e)):
            pairs = (self._weights * rough_product(left, right.t())).view(*sizes, *sizes)
            found.append(torch.stack([pairs.diagonal(dim1=0, dim2=2).sum(), pairs.sum()]))
        return found[0], found[1]


def _of_norm_1(m: Tensor) -> Tensor:
    """Returns m / |m|, so that products of four numbers stay within FP32's range; zeros of zeros."""
    return m * m.square().sum().clamp_min(torch.finfo(m.dtype).tiny).rsqrt()
