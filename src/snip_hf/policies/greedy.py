"""The policy "greedy": first-order moves of the loss, and the greedy solver. Source: docs/policies.md."""

from __future__ import annotations

from ..estimation.criterion import LayerCriterion, Rows, forward_only
from ..estimation.pending import Pending
from ..estimation.products import product
from .criterion_cost import register_criterion


class Greedy(LayerCriterion):
    """sum over elements of |G^T X * eW|: by how much each element's rounding can move the loss, to first order."""

    def pending_rows(self, name: str) -> Pending[Rows]:
        sums = self.sums
        error = sums.rounded("w", name, 1) - sums.w
        # Of the weight, (O, n) x (n, I), as far as the sample shows it.
        gradient = product(sums.g.t(), sums.x)
        moves = sums.sizes.token_ratio * error.mul_(gradient).abs_().sum()
        return Pending(moves[None], forward_only)


register_criterion("greedy", Greedy, solver="greedy")
