"""From sums over the sample of one layer to those over all tokens of an optimizer step.

Legend: T tokens that the layer saw, n of them sampled, R pieces of the sample, N tokens with a label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Squares:
    """Squared divergence of one step, and the part of it that comes back at every step.

    Both hold differences of noisy sums, and may come out below 0 where the true figure is small.
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
    """How large the batch is that was run, a micro-batch or a part of one, on all data ranks together."""

    tokens: int
    labelled: int
    """N: the tokens over whose mean loss G is a gradient."""
    micro_batch_tokens: int
    micro_batch_labelled: int

    @classmethod
    def complete(cls, tokens: int, labelled: int) -> BatchSizes:
        """Of a whole micro-batch."""
        return cls(tokens, labelled, tokens, labelled)

    @property
    def parts(self) -> float:
        """How many such batches make the micro-batch's mean loss."""
        return max(1, self.micro_batch_labelled) / max(1, self.labelled)


class Sizes(NamedTuple):
    """What the sums over a sample are extrapolated by."""

    token_ratio: float
    """T / n"""
    scale: float
    """Sums of squares: from the sample to all T tokens."""
    pieces: int
    micro_batches: float
    """Batches of that size in the optimizer step."""

    def of_pieces(self, own: float, total: float) -> Squares:
        """From the pieces of the sample to all tokens of all micro-batches.

        Args:
            own: sum over the R pieces of |c_r|^2.
            total: |sum of c_r|^2. Its cross terms are R (R - 1) times the square of what a piece does on the average.
        """
        mean = (total - own) / (self.pieces * (self.pieces - 1)) if self.pieces > 1 else 0.0
        count = self.pieces * self.scale
        # Over k micro-batches there are k * count pieces, each of 1 / k the weight.
        batches = self.micro_batches
        step = count * own / self.pieces / batches + count * (count - 1 / batches) * mean
        return Squares(step, count**2 * mean)

    def of_tokens(
        self,
        elements: float,
        by_token: float,
        own: float,
        total: float,
        own_across: float = 0.0,
        total_across: float = 0.0,
    ) -> Squares:
        """The errors of operands that are rounded to nearest.

        Elements are independent but for what they share with their token or channel, or across both.

        Args:
            elements: sum of their squares.
            by_token: sum over tokens of the squared sum over channels.
            own: sum over channels and pieces of the squared sum over the piece's tokens.
            total: sum over channels of the squared sum over tokens.
            own_across: what pairs of tokens of the same piece add across channels (`common_errors`).
            total_across: what all pairs of tokens add so.
        """
        by_channel = self.of_pieces(own + own_across, total + total_across)
        # Elements are in both sums, and count once.
        return Squares(by_channel.step + self.scale / self.micro_batches * (by_token - elements), by_channel.bias)

    def of_random_tokens(self, elements: float) -> Squares:
        """The same under stochastic rounding, which makes every element independent and unbiased."""
        return Squares(self.scale / self.micro_batches * elements, 0.0)
