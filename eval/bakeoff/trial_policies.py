"""Policies on trial in forks: SNIP with other forms of its loss divergence. They are no part of the package.

`greedy` ended below SNIP by GEMM at 90% (docs/results-objectives.md). Its figure of a layer differs from SNIP's in two
ways: it leaves the input's rounding out, and adds up magnitudes where SNIP's is a mean square. Each policy here takes a
part of the way from SNIP to it. All are ours.
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
        return Pending(sums.finishing.fisher_factor * rises[None], _first)


class WeightMagnitudes(LayerCriterion):
    """A loss divergence that adds up how far each weight's rounding moves the loss: sum |(G^T X) * eW|, as `greedy`."""

    def pending_loss_divergence(self, name: str, form: str, gradient: Tensor | None) -> Pending[float]:
        return Pending(self.sums.sizes.token_ratio * self.moved(name)[None], _first)

    def moved(self, name: str) -> Tensor:
        """Returns the sum of magnitudes over the sample, (), for this format."""
        sums = self.sums
        gradient = product(sums.g.t(), sums.x)  # (O, n) x (n, I)
        return (gradient * (sums.rounded("w", name, 1) - sums.w)).abs_().sum()


class Magnitudes(WeightMagnitudes):
    """As `WeightMagnitudes`, and the same for each of the layer's inputs: sum |(G W) * eX|."""

    def moved(self, name: str) -> Tensor:
        sums = self.sums
        gradient = product(sums.g, sums.w)  # (n, O) x (O, I)
        return super().moved(name) + (gradient * (sums.rounded("x", name, 1) - sums.x)).abs_().sum()


def _first(figures: list[float]) -> float:
    return figures[0]


TRIALS: dict[str, type[LayerCriterion]] = {
    "snip-weight-errors": WeightErrors,
    "snip-weight-magnitudes": WeightMagnitudes,
    "snip-magnitudes": Magnitudes,
}


def register_trial(name: str) -> None:
    """Registers a policy on trial, once; another policy's name does nothing."""
    if name in TRIALS and name not in POLICIES:
        register_policy(Policy(name=name, cost=snip_cost, criterion=TRIALS[name], weighs_updates=True))
