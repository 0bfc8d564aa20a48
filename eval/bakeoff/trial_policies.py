"""Policies on trial in forks: SNIP with other forms of its loss divergence. They are no part of the package.

`greedy` ended below SNIP by GEMM at 90% (docs/results-objectives.md). Its figure of a layer differs from SNIP's in two
ways: it leaves the input's rounding out, and adds up magnitudes where SNIP's is a mean square. Each policy here takes a
part of the way from SNIP to it. All are ours, and for layers of one matrix: experts get SNIP's own figure.
"""

from __future__ import annotations

from torch import Tensor

from snip_hf.config import POLICIES
from snip_hf.estimation.criterion import LayerCriterion
from snip_hf.estimation.pending import Pending
from snip_hf.estimation.products import product
from snip_hf.policies.registry import Policy, register_policy
from snip_hf.policies.snip import snip_cost


class WeightErrors(LayerCriterion):
    """The loss divergence of the form "token-fisher" with the weight alone rounded: E = X eW^T."""

    def pending_loss_divergence(self, name: str, form: str, gradient: Tensor | None) -> Pending[float]:
        sums = self.sums
        error = product(sums.x, (sums.rounded("w", name, 1) - sums.w).t())  # (n, I) x (I, O)
        rises = (sums.g * error).sum(1).square_().sum()
        return sums.finishing.loss_divergence("token-fisher", rises[None])


class WeightMagnitudes(LayerCriterion):
    """A loss divergence that adds up how far each weight's rounding moves the loss, as the form "saliency" does."""

    def pending_loss_divergence(self, name: str, form: str, gradient: Tensor | None) -> Pending[float]:
        return self.sums.pending_loss_divergence(name, "saliency")


class Magnitudes(LayerCriterion):
    """As `WeightMagnitudes`, and the same for each of the layer's inputs: sum |(G W) * eX|."""

    def pending_loss_divergence(self, name: str, form: str, gradient: Tensor | None) -> Pending[float]:
        sums = self.sums
        of_input = product(sums.g, sums.w) * (sums.rounded("x", name, 1) - sums.x)  # (n, O) x (O, I)
        return sums.finishing.loss_divergence("saliency", sums.saliency_sums[name] + of_input.abs_().sum())


TRIALS: dict[str, type[LayerCriterion]] = {
    "snip-weight-errors": WeightErrors,
    "snip-weight-magnitudes": WeightMagnitudes,
    "snip-magnitudes": Magnitudes,
}


def register_trial(name: str) -> None:
    """Registers a policy on trial, once; another policy's name does nothing."""
    if name in TRIALS and name not in POLICIES:
        register_policy(Policy(name=name, cost=snip_cost, criterion=TRIALS[name], weighs_updates=True))
