"""`SnipConv1D`, which runs in place of transformers' `Conv1D` (the GPT-2 family), and the kind of layer that it is."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

# The class and not only its name: a swapped layer stays an instance of it, which adapters ask for.
from transformers.pytorch_utils import Conv1D

from .kinds import COMPUTED_WEIGHT, LayerKind, has_computed_weight, register_layer_kind
from .layer import SnipLayer


class SnipConv1D(SnipLayer, Conv1D):
    """A `Conv1D`, which stores its weight as (I, O): a `SnipLayer`."""

    __repr__ = nn.Module.__repr__

    @property
    def in_features(self) -> int:  # type: ignore[override]
        return int(self.nx)

    @property
    def out_features(self) -> int:  # type: ignore[override]
        return int(self.nf)

    def matrices(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (tensor.t(),)

    def laid_out(self, matrices: Sequence[Tensor]) -> Tensor:
        (matrix,) = matrices
        return matrix.t()

    def extra_repr(self) -> str:
        return f"nf={self.nf}, nx={self.nx}, formats={'/'.join(self.formats.values())}"


class Conv1DKind(LayerKind):
    """Every `Conv1D` of transformers. Subclasses are left alone, since their forward may be another one."""

    name = "conv1d"
    layer = SnipConv1D
    accepts = "transformers' Conv1D"

    def knows(self, module: nn.Module) -> bool:
        return isinstance(module, Conv1D)

    def refuses(self, module: nn.Module) -> str | None:
        if has_computed_weight(module):
            return COMPUTED_WEIGHT
        return None if type(module) is Conv1D else f"class {type(module).__name__}"


register_layer_kind(Conv1DKind())
