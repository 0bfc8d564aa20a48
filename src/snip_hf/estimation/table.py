"""The table of divergences that an estimate or a measurement returns: one row per layer, GEMM and format."""

from __future__ import annotations

from dataclasses import dataclass

from ..numerics.gemms import GEMMS
from .ties import Ties

LAYER = "layer"
"""Stands for the three GEMMs of a layer together."""
ROWS = (*GEMMS, LAYER)


@dataclass(frozen=True)
class Divergence:
    """One row: the effects of quantizing one GEMM (or, for gemm "layer", all three) of one layer to one format."""

    layer: str
    gemm: str
    format: str
    loss_divergence: float
    """dL: relative move of the loss by `SnipConfig.loss_estimator`; in a measurement, its relative rise."""
    weight_divergence: float
    """dW: sqrt(sum over all swapped layers m of |change of m's next update|^2 / |W_m|^2); if some of their weights are
    not trained, sqrt(sum over all trained parameters p of |change of p's next update|^2 / |p's next update|^2)."""
    flops: float
    """FLOPs per token of the quantized GEMMs."""
    weight_bias: float | None = None
    """The part of the weight divergence that comes back at every step (its square is a part of the whole's square);
    None if not measured."""
    absolute_error: float | None = None
    """Sum of the Frobenius norms of the operands' quantization errors; None if not asked for."""
    relative_error: float | None = None
    """The same, each error divided by its operand's Frobenius norm."""
    criterion: float | None = None
    """Value of the policy's own criterion (`criterion`); None if the policy has none."""


@dataclass(frozen=True)
class DivergenceTable:
    """Rows for every layer, GEMM and format, and the loss (mean over the tokens with a label)."""

    loss: float
    rows: tuple[Divergence, ...]
    ties: Ties = ()
    """Last names of siblings that received the same tensor in every block; () of a measurement."""

    def totals(self, fmt: str) -> dict[str, float]:
        """Returns the sums of the loss and weight divergence over all layers, each wholly in `fmt`."""
        rows = [row for row in self.rows if row.format == fmt and row.gemm == LAYER]
        return {"loss": sum(row.loss_divergence for row in rows), "weight": sum(row.weight_divergence for row in rows)}
