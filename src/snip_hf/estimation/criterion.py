"""A policy's own criterion: one number per layer, GEMM and format, beside the divergences.

A criterion's rows, a GEMM or "layer" -> cost, add up in the integer program as SNIP's divergences do. The classes that
policies define are in their files under `policies`; the estimate takes one as an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from ..layers.layer import SnipLayer
from ..numerics.gemms import GEMMS
from .extrapolation import Squares
from .layer_sums import Deferred, LayerSums
from .samples import LayerSample
from .table import LAYER, ROWS

Rows = dict[str, float | None]


class LayerCriterion:
    """The criterion of one layer, prepared once for all formats. This class: no criterion, None in all rows.

    Args:
        sums: of the layer.
        trace: what `trace_of` returned for the layer.
    """

    along_noise: ClassVar[bool] = False
    """True if the probe moves all weights, including frozen ones, along random noise z itself. The derivatives then do
    not depend on the optimizer, and `trace_of` gets them."""
    noise: ClassVar[float | None] = None
    """Relative size of the noise that the probe's passes add instead of moving weights (`noise.Noise`). The criterion
    then computes both divergences itself, and `trace_of` gets the changes by noise, without directions."""

    def __init__(self, sums: LayerSums, trace: Tensor | None = None) -> None:
        self.sums, self.trace = sums, trace

    @classmethod
    def check_layers(cls, layers: Mapping[str, SnipLayer], is_trained: Callable[[Tensor], bool]) -> None:
        """Refuses layers that the criterion cannot judge. This class: none.

        Args:
            layers: the swapped ones.
            is_trained: returns True for a parameter that the optimizer updates.

        Raises:
            ValueError: names the layer.
        """

    @classmethod
    def trace_of(cls, layer: str, sample: LayerSample, directions: Sequence[Tensor]) -> Tensor | None:
        """Returns the criterion's sums of the derivatives along `directions`, probe -> z (O, I)."""
        return None

    def rows(self, name: str) -> Deferred[Rows]:
        """Returns row -> value of the criterion for this format; None in all rows without a criterion."""
        return self.no_rows(self.sums.x)

    @staticmethod
    def no_rows(like: Tensor) -> Deferred[Rows]:
        return Deferred(like.new_zeros(0), lambda values: dict.fromkeys(ROWS))

    def weight_divergences(self, name: str, keys: tuple[int, int]) -> Deferred[dict[str, Squares]]:
        """Returns row -> squared weight divergence, as `LayerSums.weight_divergences`; by default that of the sums."""
        return self.sums.weight_divergences(name, keys)

    def loss_divergence(self, name: str, form: str) -> Deferred[float]:
        """Returns the loss divergence, as `LayerSums.loss_divergence`; by default that of the sums."""
        return self.sums.loss_divergence(name, form)


def forward_only(values: list[float]) -> Rows:
    """Returns the rows of a criterion that sees the forward GEMM only, from one figure."""
    (figure,) = values
    return {row: figure if row in ("forward", LAYER) else 0.0 for row in ROWS}


def by_gemm(values: list[float]) -> Rows:
    """Returns the rows of a criterion that sees two operands per GEMM, from their values."""
    pairs = zip(GEMMS, values[::2], values[1::2], strict=True)
    sums = {gemm: one + other for gemm, one, other in pairs}
    return {**sums, LAYER: sum(sums.values())}
