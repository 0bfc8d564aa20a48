"""Experts of mixture-of-experts models: modules that hold the weights of all experts in parameters of three dimensions.

Legend: S pairs of a token and an expert that it is routed to, E experts, I in_features, O out_features of a projection.

An experts module of transformers has no linears inside. It holds one parameter per projection, (E, O, I) or (E, I, O),
and dispatches its forward pass through `ExpertsInterface` by a name in its config. A swap gives every projection a
`SnipExperts`, one entry of plans whose E matrices are all in the same formats, and lets the module run through
`experts_forward`. Routers stay what they are.

A projection may be divided into groups of experts (`SnipConfig.expert_groups`). Then each group is a layer, with a
state, an entry and samples of its own (`expert_groups.py`), and the projection has none. It still runs as one operator
per GEMM.

The layers are children of the experts module, in a container that plain names leave out (`state.plain_name`), so that
plans call a projection as checkpoints call its parameter: `model.layers.0.mlp.experts.gate_up_proj`. They hold no
parameters. These stay with the experts module, where FSDP shards them and optimizers find them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.backend import Backend
from .experts_interface import LAYERS, Layout, holder_of, register, switch_off, switch_on
from .kinds import LayerKind, kind_of, register_layer_kind
from .layer import STATE, Dispatch, SnipLayer
from .state import without_group

# What transformers' `use_experts_implementation` sets on every experts module.
_FLAGS = {"has_gate", "has_bias", "is_transposed"}
# Names of configs for how many experts a token has.
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_k")
# The name of an experts module and of a parameter in it, or of one that is called as it would be in a linear.
_PROJECTION = re.compile(r"(^|\.)experts(\.mlp)?\.[^\W\d]\w*$|\.weight$")


def looks_like_experts(layer: str) -> bool:
    """Returns True if the name of a layer in a plan is like those of projections of experts, or of groups of them."""
    return _PROJECTION.search(without_group(layer)) is not None


class SnipExperts(SnipLayer):
    """One projection of an experts module: E matrices, each of which multiplies the tokens of its expert.

    Args:
        owner: the experts module, which holds the parameter, or whose child does.
        parameter: its name there.
        layout: how it is stored.
    """

    def __init__(self, owner: nn.Module, parameter: str, layout: Layout) -> None:
        super().__init__()
        # In a tuple, since a module's attribute that is a module is its child.
        self._owner = (owner,)
        self.groups: tuple[SnipExperts, ...] = ()
        """The layers that it is divided into, in the order of the experts; none: it is a layer itself."""
        self.parameter = parameter
        self.layout, self.is_transposed = layout, layout.is_transposed
        shape = _shape(self.holder[0]._parameters[self.holder[1]])
        stacked = layout.stacked(torch.empty(shape, device="meta"))
        self.num_matrices, self.out_features, self.in_features = stacked.shape

    @property
    def owner(self) -> nn.Module:
        """The experts module."""
        return self._owner[0]

    @property
    def holder(self) -> tuple[nn.Module, str]:
        return holder_of(self.owner, self.parameter)

    @property
    def rows_per_token(self) -> float:
        """To how many experts the router sends a token, if the model's config says so; else 1."""
        config = getattr(self.owner, "config", None)
        counts = (getattr(config, name, None) for name in _EXPERTS_PER_TOKEN)
        return float(next((count for count in counts if isinstance(count, int)), 1))

    @property
    def weight(self) -> Any:  # type: ignore[override]
        """The parameter, as `layout` says. FSDP replaces it, so that its holder is asked each time."""
        holder, name = self.holder
        return getattr(holder, name)

    @property
    def bias(self) -> Any:  # type: ignore[override]
        """(E, O) or None."""
        holder, name = self.holder
        return getattr(holder, f"{name}_bias", None)

    @property
    def stacked(self) -> Tensor:
        """The matrices as one tensor, (E, O, I)."""
        return self.layout.stacked(self.weight)

    def matrices(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return self.layout.stacked(tensor).unbind()

    def laid_out(self, matrices: Sequence[Tensor]) -> Tensor:
        return self.layout.laid_out(torch.stack(tuple(matrices)))

    @property
    def states(self) -> Tensor:
        """The state, or a row for each group."""
        return torch.stack([group.snip_state for group in self.groups]) if self.groups else self.snip_state

    def weight_name(self, name: str) -> str:
        return name

    def forward(self, input: Tensor, dispatch: Dispatch | None = None) -> Tensor:
        """Returns input @ weight[e]^T + bias[e] for the tokens of each expert e; (S, I) -> (S, O).

        Args:
            input: sorted by expert.
            dispatch: which token each row is, and where each expert's rows end.
        """
        assert dispatch is not None
        if self.groups and self.groups[0].snip_recorder is not None:
            return self._recorded(input, dispatch)
        if self.snip_recorder is not None:
            return self.snip_recorder(self, input, dispatch)
        is_cast = torch.is_autocast_enabled(input.device.type)
        dtype = torch.get_autocast_dtype(input.device.type) if is_cast else self.weight.dtype
        bias = self.bias
        bias = None if bias is None else bias.to(dtype)
        return self.snip_backend.grouped_forward(self, input.to(dtype), bias, dispatch.ends)

    def _recorded(self, input: Tensor, dispatch: Dispatch) -> Tensor:
        """Lets the recorders of the groups compute their output.

        Also of those without tokens: where weights are sharded, other ranks may have some and wait for this one.
        """
        outputs, start, first = [], 0, 0
        for group in self.groups:
            ends = dispatch.ends[first : first + group.num_matrices]
            stop = int(ends[-1])
            assert group.snip_recorder is not None
            own = Dispatch(ends - start, dispatch.token[start:stop], dispatch.tokens)
            outputs.append(group.snip_recorder(group, input[start:stop], own))
            start, first = stop, first + group.num_matrices
        return torch.cat([*outputs, outputs[0].new_zeros(len(input) - start, self.out_features)])

    def refused_by(self, backend: Backend) -> str | None:
        if not backend.runs_groups:
            return f"backend {backend.name} runs no grouped products"
        return backend.refuses_groups(self)

    def restore(self) -> None:
        """Takes the layer from its module, which runs as before the swap once it has none left."""
        self._buffers.pop(STATE, None)
        kind, (holder, name) = kind_of(self.owner), self.holder
        assert isinstance(kind, Experts)
        layers = holder._modules[LAYERS]
        assert isinstance(layers, nn.ModuleDict)
        del layers[name]
        if not layers:
            del holder._modules[LAYERS]
        if not kind.layers(self.owner):
            kind.switch_off(self.owner)
        self._end()

    def _end(self) -> None:
        """Lets whoever still holds it see that it is no layer any more."""
        vars(self).clear()
        self.__class__ = nn.Module  # type: ignore[assignment]
        nn.Module.__init__(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        register()  # in the process that unpickles the model

    def extra_repr(self) -> str:
        shape = f"{self.num_matrices} x (in_features={self.in_features}, out_features={self.out_features})"
        return shape if self.groups else f"{shape}{super().extra_repr()}"


class Experts(LayerKind):
    """Experts modules that dispatch through transformers' `ExpertsInterface`."""

    name = "experts"
    layer = SnipExperts
    can_divide = True
    accepts = "an experts module of transformers that runs through its ExpertsInterface"

    def knows(self, module: nn.Module) -> bool:
        return vars(module).keys() >= _FLAGS

    def refuses(self, module: nn.Module) -> str | None:
        if getattr(module, "_is_expert_parallel", False):
            return "experts spread over processes (expert parallelism)"
        if not hasattr(type(module).forward, "__wrapped__"):
            return f"class {type(module).__name__} has a forward of its own"
        if not hasattr(getattr(module, "config", None), "_experts_implementation"):
            return "no config that names an experts implementation"
        return self.lacks_parameters(module)

    def lacks_parameters(self, module: nn.Module) -> str | None:
        """Returns why a module's parameters are not those of experts; None if they are."""
        parts = self.parts(module)
        dimensions = {2 if self.layout(module, part).matrices else 3 for part in parts}
        if len(self.weights(module)) < len(parts) or {len(_shape(one)) for one in self.weights(module)} != dimensions:
            return f"no parameters {' and '.join(parts)} of {'two' if 2 in dimensions else 'three'} dimensions"
        return None

    def layout(self, module: nn.Module, part: str) -> Layout:
        """Returns how a parameter is stored."""
        return Layout(bool(module.is_transposed))

    def switch_on(self, module: nn.Module) -> None:
        """Lets the module run its projections through its layers."""
        switch_on(module)

    def switch_off(self, module: nn.Module) -> None:
        """Undoes `switch_on`."""
        switch_off(module)

    def parts(self, module: nn.Module) -> tuple[str, ...]:
        return ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")

    def weights(self, module: nn.Module) -> tuple[nn.Parameter, ...]:
        holders = (holder_of(module, part) for part in self.parts(module))
        found = (holder._parameters.get(name) for holder, name in holders)
        return tuple(weight for weight in found if weight is not None)

    def layers(self, module: nn.Module) -> dict[str, SnipExperts]:
        """Returns part -> its layer, of the parts that are swapped."""
        found = {}
        for part in self.parts(module):
            holder, name = holder_of(module, part)
            layers = holder._modules.get(LAYERS)
            if isinstance(layers, nn.ModuleDict) and name in layers:
                found[part] = layers[name]
        return found  # type: ignore[return-value]

    def swap(self, module: nn.Module) -> tuple[SnipLayer, ...]:
        present = self.layers(module)
        if not present:
            self.switch_on(module)
        missing = [part for part in self.parts(module) if part not in present]
        for part in missing:
            holder, name = holder_of(module, part)
            layers = holder._modules.setdefault(LAYERS, nn.ModuleDict())
            assert isinstance(layers, nn.ModuleDict)
            layers[name] = SnipExperts(module, part, self.layout(module, part))
            layers.train(module.training)
        found = self.layers(module)
        return tuple(found[part] for part in missing)

    def divide(self, module: nn.Module, groups: int) -> tuple[SnipLayer, ...]:
        from .expert_groups import divide

        found: tuple[SnipLayer, ...] = ()
        for part, layer in self.layers(module).items():
            if max(1, len(layer.groups)) != groups:
                found += divide(layer, part, groups)
        return found


def _shape(weight: nn.Parameter | None) -> tuple[int, ...]:
    """Returns the shape of the whole parameter; () without one."""
    # DeepSpeed's ZeRO-3 leaves an empty tensor on each rank.
    return () if weight is None else tuple(getattr(weight, "ds_shape", weight.shape))


register_layer_kind(Experts())
