"""The policy "snip": the weighted sum of loss and weight divergence (docs/method.md, section 4)."""

from __future__ import annotations

from collections.abc import Callable

from ..config import SnipConfig
from ..estimation.table import Divergence, DivergenceTable
from .registry import Policy, first_total, register_policy

# Objective -> weight and form of the weight divergence. Measured (docs/fidelity.md): over 100 and 1,000 steps, the loss
# divergence "token-fisher" ranks plans best. Adding a tenth of the weight divergence hardly changes the ranking, and it
# decides between GEMMs without a loss divergence.
_SQUARED: tuple[float, Callable[[Divergence], float]] = (0.1, lambda row: row.weight_divergence**2)
_UPDATES = {"additive": _SQUARED, "gradients": _SQUARED, "paper": (1.0, lambda row: row.weight_divergence)}


def snip_cost(config: SnipConfig, table: DivergenceTable) -> Callable[[Divergence], float]:
    """Prices by both divergences, each divided by its total with everything in the least precise format."""
    parts = [(1.0, lambda row: row.loss_divergence), _UPDATES[config.objective]]
    totals = [first_total(config, table, part) for _, part in parts]
    scaled = [(weight / total, part) for (weight, part), total in zip(parts, totals, strict=True) if total > 0]
    return lambda row: sum(weight * part(row) for weight, part in scaled)


register_policy(Policy(name="snip", cost=snip_cost, weighs_updates=True))
