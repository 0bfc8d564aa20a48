"""Experts of mixture-of-experts models: modules that hold the weights of all experts in parameters of three dimensions.

Legend: T tokens, K experts per token, S = T * K pairs of a token and one of its experts, E experts, H hidden size, I
in_features, O out_features of a projection.

An experts module of transformers contains no linears. It holds one parameter per projection, (E, O, I) or (E, I, O),
and dispatches its forward pass through `ExpertsInterface` by a name in its config. A swap gives every projection a
`SnipExperts`: one entry of plans, whose E matrices share their formats. The module then runs `experts_forward`, the
implementation "snip" of that interface. Routers stay as they are.

The layers are children of the experts module, in a container that plain names omit (`state.plain_name`), so that
plans call a projection as checkpoints call its parameter: `model.layers.0.mlp.experts.gate_up_proj`. (With
`load_state_dict(assign=True)`, a child of the parameter's own name would be overwritten.) They hold no parameters.
Those stay with the experts module, where FSDP shards them and optimizers find them.

Under expert parallelism (`parallel.tensor_parallel`) a rank holds some of the E experts and its module's `num_experts`
counts only these. In training, the module runs them on the tokens that transformers sends to this rank. Plans, shapes
and probes are those of all E.

All modules of a model share the config that names the implementation. So a swapped module gets a shallow copy that
names "snip". The config itself, which others read and `save_pretrained` writes, does not change. The module keeps the
original and gets it back when it is restored.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.emulated import unquantized
from ..parallel.zero3 import whole_shape
from .kinds import LayerKind, register_layer_kind
from .layer import STATE, Dispatch, SnipLayer

IMPLEMENTATION = "snip"
# The attribute of an experts module that holds its layers.
LAYERS = "snip_layers"
# The attribute of transformers' configs that holds the implementation's name. The public setter would also write it to
# nested configs, which the copy shares with the original.
_CHOICE = "_experts_implementation_internal"
_ORIGINAL = "snip_config"
# The attributes that transformers' `use_experts_implementation` sets on every experts module.
_FLAGS = {"has_gate", "has_bias", "is_transposed"}
# Fields of configs for the number of experts per token.
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_k")


class SnipExperts(SnipLayer):
    """One projection of an experts module: E matrices, each of which multiplies the tokens of its expert.

    Args:
        owner: the experts module, which holds the parameter.
        parameter: its name there.
    """

    def __init__(self, owner: nn.Module, parameter: str) -> None:
        super().__init__()
        # In a tuple, since a module that is an attribute becomes a child.
        self._owner = (owner,)
        self.parameter = parameter
        self.is_transposed = bool(owner.is_transposed)
        """True if the parameter is stored as (E, I, O)."""
        shape = whole_shape(owner.get_parameter(parameter))
        self.num_matrices = shape[0]
        self.out_features, self.in_features = shape[:0:-1] if self.is_transposed else shape[1:]

    @property
    def owner(self) -> nn.Module:
        """The experts module."""
        return self._owner[0]

    @property
    def holder(self) -> tuple[nn.Module, str]:
        return self.owner, self.parameter

    @property
    def rows_per_token(self) -> float:
        """The number of experts per token if the model's config names it, else 1."""
        config = getattr(self.owner, "config", None)
        counts = (getattr(config, name, None) for name in _EXPERTS_PER_TOKEN)
        return float(next((count for count in counts if isinstance(count, int)), 1))

    @property
    def weight(self) -> Any:  # type: ignore[override]
        """The parameter. Read from the owner each time, since FSDP replaces it."""
        return getattr(self.owner, self.parameter)

    @property
    def bias(self) -> Any:  # type: ignore[override]
        """(E, O) or None."""
        return getattr(self.owner, f"{self.parameter}_bias", None)

    @property
    def matrix(self) -> Tensor:
        """The matrices as one tensor, (E, O, I)."""
        return self._turned(self.weight)

    def matrices(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return self._turned(tensor).unbind()

    def laid_out(self, matrices: Sequence[Tensor]) -> Tensor:
        return self._turned(torch.stack(tuple(matrices)))

    def _turned(self, tensor: Tensor) -> Tensor:
        """Converts the parameter's layout to (E, O, I), and back."""
        return tensor.transpose(1, 2) if self.is_transposed else tensor

    def weight_name(self, name: str) -> str:
        return name

    def restore(self) -> None:
        """Removes the layer from its module, which runs as before the swap once it has none left."""
        self._buffers.pop(STATE, None)
        owner = self.owner
        layers = owner._modules[LAYERS]
        assert isinstance(layers, nn.ModuleDict)
        del layers[self.parameter]
        if not layers:
            del owner._modules[LAYERS]
            vars(owner)["config"] = vars(owner).pop(_ORIGINAL)
        # Anyone who still holds the layer sees an ordinary, empty module.
        vars(self).clear()
        self.__class__ = nn.Module  # type: ignore[assignment]
        nn.Module.__init__(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _register()  # in the process that unpickles the model

    def extra_repr(self) -> str:
        shape = f"{self.num_matrices} x (in_features={self.in_features}, out_features={self.out_features})"
        return f"{shape}{super().extra_repr()}"


class Experts(LayerKind):
    """Experts modules that dispatch through transformers' `ExpertsInterface`."""

    name = "experts"
    layer = SnipExperts
    accepts = "an experts module of transformers that runs through its ExpertsInterface"

    def knows(self, module: nn.Module) -> bool:
        return vars(module).keys() >= _FLAGS

    def refuses(self, module: nn.Module) -> str | None:
        if getattr(vars(module).get("forward"), "__module__", "").startswith("liger_kernel."):
            return "Liger's kernel runs these experts; liger_kernel_config={'swiglu': False} lets snip-hf run them"
        if not hasattr(type(module).forward, "__wrapped__"):
            return f"class {type(module).__name__} has a forward of its own"
        if not hasattr(getattr(module, "config", None), "_experts_implementation"):
            return "no config that names an experts implementation"
        parts = self.parts(module)
        if [len(whole_shape(weight)) for weight in self.weights(module)] != [3] * len(parts):
            return f"no parameters {' and '.join(parts)} of three dimensions"
        return None

    def parts(self, module: nn.Module) -> tuple[str, ...]:
        return ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")

    def weights(self, module: nn.Module) -> tuple[nn.Parameter, ...]:
        found = (module._parameters.get(part) for part in self.parts(module))
        return tuple(weight for weight in found if weight is not None)

    def swap(self, module: nn.Module) -> tuple[SnipLayer, ...]:
        if LAYERS not in module._modules:
            _register()
            vars(module)[_ORIGINAL] = module.config
            own = copy.copy(module.config)
            vars(own)[_CHOICE] = IMPLEMENTATION
            vars(module)["config"] = own
        layers = module._modules.setdefault(LAYERS, nn.ModuleDict())
        assert isinstance(layers, nn.ModuleDict)
        missing = [part for part in self.parts(module) if part not in layers]
        for part in missing:
            layers[part] = SnipExperts(module, part)
        layers.train(module.training)
        return tuple(layers[part] for part in missing)  # type: ignore[misc]


register_layer_kind(Experts())


def _register() -> None:
    """Registers the implementation with transformers."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Returns the weighted sum of the outputs of each token's experts, (T, H), as transformers' "grouped_mm" does.

    If all layers compute plainly, calls the implementation that the model's own config names.

    Args:
        self: the experts module.
        hidden_states: (T, H).
        top_k_index: (T, K); the number of experts, or more, stands for no expert.
        top_k_weights: (T, K).
    """
    if all(layer.snip_is_plain and layer.snip_recorder is None for layer in self._modules[LAYERS].children()):
        return _original_implementation(self)(self, hidden_states, top_k_index, top_k_weights)
    # Stable, so that each expert sees its tokens in the order of the batch, by which random numbers are drawn.
    sorted_experts, order = torch.sort(top_k_index.reshape(-1), stable=True)
    ends = torch.searchsorted(sorted_experts, torch.arange(self.num_experts, device=sorted_experts.device), right=True)
    dispatch = Dispatch(ends, order // top_k_index.shape[1], top_k_index.shape[0])
    back = inverse(order)
    x = sorted_tokens(hidden_states, order, back)
    inner = _project(self, "gate_up_proj" if self.has_gate else "up_proj", x, dispatch)
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    output = _project(self, "down_proj", inner, dispatch)
    if getattr(self, "has_post_expert_norm", False):
        output = self.post_expert_norm(output)
    weighted = output * permuted(top_k_weights.reshape(-1), order, back).unsqueeze(-1)
    # Back in the order of the batch, so that the sum over a token's experts has a fixed order.
    y = permuted(weighted, back, order).view(*top_k_weights.shape, -1).sum(dim=1)
    return y.to(hidden_states.dtype)


def _original_implementation(self: Any) -> Any:
    """Returns the function that would run the experts module without the swap."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    name = getattr(self, _ORIGINAL)._experts_implementation
    return ALL_EXPERTS_FUNCTIONS.get_interface(name, type(self).forward.__wrapped__)


def _project(self: Any, name: str, x: Tensor, dispatch: Dispatch) -> Tensor:
    """Returns a projection of x (S, I), sorted by expert; in high precision if it is not swapped."""
    layers = self._modules[LAYERS]
    weight = getattr(self, name)
    if not torch.is_autocast_enabled(x.device.type):
        x = x.to(weight.dtype)
    if name in layers:
        return layers[name](x, dispatch)
    weight = weight.transpose(1, 2) if self.is_transposed else weight
    return unquantized(x, weight, getattr(self, f"{name}_bias", None), dispatch.ends)


# The gradients below are summed in a fixed order. torch's own gradient of `x[index]` adds into zeros, which compiled
# code does by atomic operations on GPUs, in any order. An order is a permutation of the pairs, so that each gradient is
# read from its place instead. `back` is everywhere `inverse(order)`, computed once per pass.


def inverse(order: Tensor) -> Tensor:
    """Returns the position of each pair of the batch in an order, (S,)."""
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0], device=order.device)
    return back


def sorted_tokens(hidden_states: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """Returns the token of each pair, (S, *), for hidden_states (T, *) and the order of the pairs (S,)."""
    return _Sorted.apply(hidden_states, order, back)


def permuted(x: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """Returns x[order] for x (S, *)."""
    return _Permuted.apply(x, order, back)


class _Sorted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        tokens = hidden_states.shape[0]
        ctx.shape = tokens, max(order.shape[0] // max(tokens, 1), 1)
        return hidden_states[order // ctx.shape[1]]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (back,) = ctx.saved_tensors
        return grad[back].view(*ctx.shape, *grad.shape[1:]).sum(1), None, None


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (back,) = ctx.saved_tensors
        return grad[back], None, None
