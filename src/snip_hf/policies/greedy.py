"""The policy "greedy": first-order changes of the loss, and the greedy solver. Source: docs/policies.md."""

from __future__ import annotations

from ..estimation.criterion import LayerCriterion, Rows, forward_only
from ..estimation.layer_sums import Deferred
from .registry import register_criterion


class Greedy(LayerCriterion):
    """sum over elements of |G^T X * eW|: the first-order effect of each element's rounding on the loss."""

    def rows(self, name: str) -> Deferred[Rows]:
        return Deferred(self.sums.sizes.token_ratio * self.sums.saliency_sums[name], forward_only)


register_criterion("greedy", Greedy, solver="greedy")
