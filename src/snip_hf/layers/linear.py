"""`SnipLinear`, which runs in place of `nn.Linear`, and the kind of layer that it is."""

from __future__ import annotations

from torch import nn

from .kinds import COMPUTED_WEIGHT, LayerKind, has_computed_weight, register_layer_kind
from .layer import SnipLayer
from .linear_classes import LINEAR_CLASSES


class SnipLinear(SnipLayer, nn.Linear):
    """An `nn.Linear` whose three GEMMs run in the formats that its `snip_state` buffer names: a `SnipLayer`."""


class Linear(LayerKind):
    """Every `nn.Linear`, and subclasses that are known to multiply as it does. Others are left alone.

    Those are routers with a softmax, adapters, classes that nobody has registered, and those with a computed weight.
    """

    name = "linear"
    layer = SnipLinear

    @property
    def accepts(self) -> str:
        return f"nn.Linear itself or {', '.join(entry.shown_name for entry in LINEAR_CLASSES.values())}"

    def knows(self, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear)

    def refuses(self, module: nn.Module) -> str | None:
        if has_computed_weight(module):
            return COMPUTED_WEIGHT
        kind = type(module)
        known = kind is nn.Linear or any(entry.is_of(kind) for entry in LINEAR_CLASSES.values())
        return None if known else f"class {kind.__name__}"


register_layer_kind(Linear())
