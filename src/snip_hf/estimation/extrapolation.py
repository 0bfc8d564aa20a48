"""Extrapolates sums over the sample of one layer to all tokens of an optimizer step.

Legend: T tokens that the layer saw, n of them sampled, R pieces of the sample, N tokens with a label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Squares:
    """Squared divergence of one step, and the part of it that comes back at every step (the bias).

    Both contain differences of noisy sums, so they may be below 0 if the true value is small.
    """

    step: float
    bias: float

    def __add__(self, other: Squares) -> Squares:
        return Squares(self.step + other.step, self.bias + other.bias)

    @classmethod
    def mean(cls, squares: Sequence[Squares]) -> Squares:
        """Returns the mean; zeros of none."""
        count = max(1, len(squares))
        return cls(sum(one.step for one in squares) / count, sum(one.bias for one in squares) / count)


class BatchSizes(NamedTuple):
    """Sizes of the batch that was run, a micro-batch or a part of one, on all data ranks together."""

    tokens: int
    labelled: float
    """N: G is the gradient of the mean loss over so many tokens."""
    micro_batch_tokens: int
    micro_batch_labelled: float

    @property
    def parts(self) -> float:
        """Number of such batches in the micro-batch's mean loss."""
        return max(1, self.micro_batch_labelled) / max(1, self.labelled)


class Sizes(NamedTuple):
    """The factors that extrapolate sums over a sample."""

    token_ratio: float
    """T / n"""
    scale: float
    """Factor of sums of squares, from the sample to all T tokens."""
    pieces: int
    micro_batches: float
    """Batches of that size in the optimizer step."""

    def of_pieces(self, by_piece: float, total: float) -> Squares:
        """Returns the squares over all tokens of all micro-batches from sums over the pieces c_r of the sample.

        Args:
            by_piece: sum over the R pieces of |c_r|^2.
            total: |sum of c_r|^2. Its cross terms are R (R - 1) times the square of the mean piece.
        """
        mean = (total - by_piece) / (self.pieces * (self.pieces - 1)) if self.pieces > 1 else 0.0
        count = self.pieces * self.scale
        # Over k micro-batches there are k * count pieces, each of 1 / k the weight.
        batches = self.micro_batches
        step = count * by_piece / self.pieces / batches + count * (count - 1 / batches) * mean
        return Squares(step, count**2 * mean)

    def of_tokens(
        self,
        elements: float,
        by_token: float,
        by_piece: float,
        total: float,
        by_piece_across: float = 0.0,
        total_across: float = 0.0,
    ) -> Squares:
        """Returns the squares of errors of operands that are rounded to nearest.

        Elements are independent except for what they share with their token or channel, or across both.

        Args:
            elements: sum of their squares.
            by_token: sum over tokens of the squared sum over channels.
            by_piece: sum over channels and pieces of the squared sum over the piece's tokens.
            total: sum over channels of the squared sum over tokens.
            by_piece_across: sum over pairs of tokens of the same piece across channels (`common_errors`).
            total_across: the same sum over all pairs of tokens.
        """
        by_channel = self.of_pieces(by_piece + by_piece_across, total + total_across)
        # Elements are in both sums, and count once.
        return Squares(by_channel.step + self.scale / self.micro_batches * (by_token - elements), by_channel.bias)

    def of_random_tokens(self, elements: float) -> Squares:
        """Returns the squares under stochastic rounding: every error is independent and unbiased."""
        return Squares(self.scale / self.micro_batches * elements, 0.0)
