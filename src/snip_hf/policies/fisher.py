"""The policy "fisher": the diagonal Fisher information of each layer's output error. Source: docs/policies.md."""

from __future__ import annotations

import torch

from ..estimation.criterion import LayerCriterion, Rows, forward_only
from ..estimation.layer_sums import Deferred
from ..estimation.products import product
from .registry import register_criterion


class Fisher(LayerCriterion):
    """N sum over tokens and outputs of G^2 E^2, with E = Q(X) Q(W)^T - X W^T and N labelled tokens."""

    def rows(self, name: str) -> Deferred[Rows]:
        sums = self.sums
        # One product of twice the length replaces the difference of two products.
        left = torch.cat([sums.rounded("x", name, 1), -sums.x], 1)
        right = torch.cat([sums.rounded("w", name, 1), sums.w], 1)
        errors = product(left, right.t())  # (n, 2 I) x (2 I, O)
        # G is the gradient of a mean over N tokens, whose own losses have gradients N G (see the loss divergence).
        score = sums.batch.labelled * sums.sizes.scale * errors.mul_(sums.g).square_().sum()
        return Deferred(score[None], forward_only)


register_criterion("fisher", Fisher)
