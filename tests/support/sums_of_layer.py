"""`LayerSums` of one matrix in the default formats, read at once, as most tests of the sums want them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from configs import fp4_config
from torch import Tensor

from snip_hf.estimation import layer_sums
from snip_hf.estimation.extrapolation import BatchSizes, Squares
from snip_hf.estimation.samples import LayerSample

# The most precise first, as a refresh has them.
DEFAULT = fp4_config().formats[::-1]


class LayerSums(layer_sums.LayerSums):
    def __init__(
        self,
        sample: LayerSample,
        weight: Tensor,
        push: Callable[[Tensor], Tensor] | Tensor | None,
        micro_batches: int,
        batch: BatchSizes | None = None,
        formats: Sequence[str] = DEFAULT,
    ) -> None:
        of_matrices = [push] if isinstance(push, Tensor) else push
        super().__init__(sample, [weight], of_matrices, micro_batches, batch, formats=formats)

    def weight_divergences(self, name: str, keys: tuple[int, int]) -> dict[str, Squares]:  # type: ignore[override]
        return super().weight_divergences(name, keys).read()

    def loss_divergence(self, name: str, form: str) -> float:  # type: ignore[override]
        return super().loss_divergence(name, form).read()

    def errors(self, name: str) -> dict[str, tuple[float, float]]:  # type: ignore[override]
        return super().errors(name).read()
