"""A policy's own criterion: one figure per layer, GEMM and format, beside the sums of a layer.

A criterion's rows, a GEMM or "layer" -> cost, add up in the integer program as SNIP's divergences do. The classes that
policies define are in their files under `policies`; the estimate takes one as an argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from ..numerics.gemms import GEMMS
from .layer_sums import LAYER, ROWS, LayerSums, Pending, read_all
from .samples import LayerSample

Rows = dict[str, float | None]


class LayerCriterion:
    """The criterion of one layer, prepared once for all formats. This class: no criterion, None in all rows.

    Args:
        sums: of the layer.
        trace: what `trace_of` returned for the layer.
    """

    along_noise: ClassVar[bool] = False
    """Whether the probe moves all weights, also frozen ones, along random noise z itself. The optimizer then has no
    part in the derivatives, and `trace_of` gets them."""

    def __init__(self, sums: LayerSums, trace: Tensor | None = None) -> None:
        self.sums, self.trace = sums, trace

    @classmethod
    def trace_of(cls, layer: str, sample: LayerSample, directions: Sequence[Tensor]) -> Tensor | None:
        """Returns what the criterion needs of the derivatives along `directions`, probe -> z (O, I)."""
        return None

    def rows(self, name: str) -> Rows:
        """Returns row -> what the criterion gives for this format; None in all rows without a criterion."""
        return read_all([self.pending_rows(name)])[0]

    def pending_rows(self, name: str) -> Pending[Rows]:
        """As `rows`, not waiting for the device where that can be avoided."""
        return Pending(self.sums.w.new_zeros(0), lambda figures: dict.fromkeys(ROWS))


def forward_only(figures: list[float]) -> Rows:
    """Returns the rows of a criterion that sees the forward GEMM only, from one figure."""
    return {row: figures[0] if row in ("forward", LAYER) else 0.0 for row in ROWS}


def by_gemm(figures: list[float]) -> Rows:
    """Returns the rows of a criterion that sees two operands per GEMM, from their figures."""
    sums = {gemm: figures[2 * index] + figures[2 * index + 1] for index, gemm in enumerate(GEMMS)}
    return {**sums, LAYER: sum(sums.values())}
