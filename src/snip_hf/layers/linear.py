"""`SnipLinear`, which runs in place of `nn.Linear`, and the kind of layer that it is."""

from __future__ import annotations

from torch import nn

from .kinds import LayerKind, register_layer_kind
from .layer import SnipLayer


class SnipLinear(SnipLayer, nn.Linear):
    """An `nn.Linear` whose three GEMMs run in the formats that its `snip_state` buffer names: a `SnipLayer`."""


class Linear(LayerKind):
    """Every `nn.Linear`. Subclasses are left alone, since their forward may be another one."""

    name = "linear"
    layer = SnipLinear
    # Subclasses whose forward is the same product. Others (routers with a softmax, adapters) are not swapped.
    same_forward = ("FalconLinear",)
    accepts = f"nn.Linear itself or {', '.join(same_forward)}"

    def knows(self, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear)

    def refuses(self, module: nn.Module) -> str | None:
        kind = type(module)
        return None if kind is nn.Linear or kind.__name__ in self.same_forward else f"class {kind.__name__}"


register_layer_kind(Linear())
