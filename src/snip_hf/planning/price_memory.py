"""The memory of prices: their running mean over refreshes, so that plans change less by noise (ours).

What is averaged is each price's share of the total of its table, so that tables of other batches, losses and learning
rates compare. The mean in the unit of the new table takes the place of the new price.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..estimation.pending import LAYER
from ..estimation.table import Divergence, DivergenceTable
from ..policies.registry import Cost, cost_of
from ..policies.setting import Setting
from ..policies.totals import first_total
from .checked_values import finite

Prices = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Layer -> GEMM, or "layer" -> format -> share of the total of all layers in the least precise format."""


def with_memory(setting: Setting, table: DivergenceTable, before: Prices) -> tuple[DivergenceTable, Prices]:
    """Returns the table with a price in every row, and what the next refresh gets for `before`.

    A row that was not there before has its own price, alone. A layer that took no part in this probe (an expert without
    tokens) has a row of zeros with the price that it had. Where all prices are 0 nothing is learned: the table comes
    back as it is.

    Args:
        setting: the run's, with `estimate_memory`; at 0 nothing is remembered and rows get no price.
        table: of a probe.
        before: what the refresh before returned; {} at the first one.
    """
    memory = setting.config.estimate_memory
    if memory == 0:
        return table, {}
    cost = cost_of(setting.config, table)
    unit = _unit(setting, table, cost, before)
    if unit <= 0:
        return table, before
    shares: dict[str, dict[str, dict[str, float]]] = {
        layer: {gemm: dict(row) for gemm, row in gemms.items()}
        for layer, gemms in before.items()
        if layer in setting.flops
    }
    for row in table.rows:
        cell = shares.setdefault(row.layer, {}).setdefault(row.gemm, {})
        new = cost(row) / unit
        cell[row.format] = memory * cell[row.format] + (1 - memory) * new if row.format in cell else new
    rows = {(row.layer, row.gemm, row.format): row for row in table.rows}
    priced = tuple(
        rows.get((layer, gemm, name), _absent(setting, layer, gemm, name)).with_price(share * unit)
        for layer, gemms in shares.items()
        for gemm, cell in gemms.items()
        for name, share in cell.items()
    )
    return DivergenceTable(table.loss, _in_order(setting, priced)), shares


def _unit(setting: Setting, table: DivergenceTable, cost: Cost, before: Prices) -> float:
    """Returns what a share of 1 costs in this table; 0 if nothing costs anything.

    Layers that are known from before have the same share together as they had, whether or not others took part.
    """
    low = setting.config.least_precise
    own = {row.layer: abs(cost(row)) for row in table.rows if (row.gemm, row.format) == (LAYER, low)}
    known = {layer: abs(before[layer][LAYER][low]) for layer in own if low in before.get(layer, {}).get(LAYER, {})}
    costs, shares = math.fsum(own[layer] for layer in known), math.fsum(known.values())
    if costs > 0 and shares > 0:
        return costs / shares
    return first_total(setting.config, table, lambda row: abs(cost(row)))


def read_prices(saved: object) -> Prices:
    """Reads prices from JSON; raises KeyError, TypeError, ValueError or AttributeError if it is none."""
    table: Mapping[str, Mapping[str, Mapping[str, float]]] = dict(saved)  # type: ignore[call-overload]
    return {
        str(layer): {
            str(gemm): {str(name): finite(share, f"prices[{layer!r}]") for name, share in cell.items()}
            for gemm, cell in gemms.items()
        }
        for layer, gemms in table.items()
    }


def _absent(setting: Setting, layer: str, gemm: str, name: str) -> Divergence:
    row = setting.flops[layer]
    return Divergence(layer, gemm, name, 0.0, 0.0, sum(row.values()) if gemm == LAYER else row.get(gemm, 0.0))


def _in_order(setting: Setting, rows: tuple[Divergence, ...]) -> tuple[Divergence, ...]:
    order = {layer: index for index, layer in enumerate(setting.flops)}
    return tuple(sorted(rows, key=lambda row: order[row.layer]))
