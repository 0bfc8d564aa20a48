"""The memory of prices: their running mean over refreshes, so that plans change less by noise (ours).

What is averaged is each price's share of its table's total, by which tables of other batches, losses and learning rates
compare. The mean times the new table's total takes the place of the new price.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..estimation.layer_sums import LAYER
from ..estimation.table import Divergence, DivergenceTable
from ..policies.registry import cost_of
from ..policies.setting import Setting
from ..policies.totals import first_total

Prices = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Layer -> GEMM, or "layer" -> format -> share of the total; as JSON has it."""


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
    total = first_total(setting.config, table, lambda row: abs(cost(row)))
    if total <= 0:
        return table, before
    shares: dict[str, dict[str, dict[str, float]]] = {
        layer: {gemm: dict(row) for gemm, row in gemms.items()}
        for layer, gemms in before.items()
        if layer in setting.flops
    }
    for row in table.rows:
        cell = shares.setdefault(row.layer, {}).setdefault(row.gemm, {})
        new = cost(row) / total
        cell[row.format] = memory * cell[row.format] + (1 - memory) * new if row.format in cell else new
    rows = {(row.layer, row.gemm, row.format): row for row in table.rows}
    priced = tuple(
        rows.get((layer, gemm, name), _absent(setting, layer, gemm, name)).with_price(share * total)
        for layer, gemms in shares.items()
        for gemm, cell in gemms.items()
        for name, share in cell.items()
    )
    return DivergenceTable(table.loss, _in_order(setting, priced)), shares


def read_prices(saved: object) -> Prices:
    """Reads prices from JSON; raises KeyError, TypeError, ValueError or AttributeError if it is none."""
    table: Mapping[str, Mapping[str, Mapping[str, float]]] = dict(saved)  # type: ignore[call-overload]
    return {
        str(layer): {
            str(gemm): {str(name): float(share) for name, share in cell.items()} for gemm, cell in gemms.items()
        }
        for layer, gemms in table.items()
    }


def _absent(setting: Setting, layer: str, gemm: str, name: str) -> Divergence:
    row = setting.flops[layer]
    return Divergence(layer, gemm, name, 0.0, 0.0, sum(row.values()) if gemm == LAYER else row.get(gemm, 0.0))


def _in_order(setting: Setting, rows: tuple[Divergence, ...]) -> tuple[Divergence, ...]:
    order = {layer: index for index, layer in enumerate(setting.flops)}
    return tuple(sorted(rows, key=lambda row: order[row.layer]))
