"""The total of a figure over a model, by which prices are made free of units."""

from __future__ import annotations

from collections.abc import Callable

from ..config import SnipConfig
from ..estimation.table import LAYER, Divergence, DivergenceTable


def first_total(config: SnipConfig, table: DivergenceTable, figure: Callable[[Divergence], float]) -> float:
    """Returns the sum of a figure over all layers, each wholly in the least precise format.

    The total is no more than a unit: it need not be the largest of the formats' totals. Where it is not above 0, the
    next format's takes its place, so that what the others do still counts; 0 if no format has one.
    """
    for name in config.formats:
        total = sum(figure(row) for row in table.rows if row.format == name and row.gemm == LAYER)
        if total > 0:
            return total
    return 0.0
