"""The experts implementation "snip" of transformers' `ExpertsInterface`, and its switch on a module.

Legend: T tokens, K experts per token, S = T * K pairs of a token and its expert, H hidden size.

The name of the implementation is in the config, which all modules of a model share. So a swapped module gets a shallow
copy of its config that names "snip", and the config itself, which others read and `save_pretrained` writes, stays as it
is. The module keeps the original, and gets it back.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..kernels.grouped import unquantized
from .layer import Dispatch
from .token_moves import inverse, permuted, sorted_tokens, unsorted

IMPLEMENTATION = "snip"
# Where a module that holds experts' parameters holds their layers.
LAYERS = "snip_layers"
# Where transformers' configs hold the name of the implementation. The public setter writes it to nested configs too,
# which the copy shares with the original.
_CHOICE = "_experts_implementation_internal"
_ORIGINAL = "snip_config"


def switch_on(module: Any) -> None:
    """Lets an experts module run through `experts_forward`."""
    register()
    vars(module)[_ORIGINAL] = module.config
    own = copy.copy(module.config)
    vars(own)[_CHOICE] = IMPLEMENTATION
    vars(module)["config"] = own


def switch_off(module: Any) -> None:
    """Undoes `switch_on`."""
    vars(module)["config"] = vars(module).pop(_ORIGINAL)


def register() -> None:
    """Registers the implementation with transformers, if that is not done yet."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Returns the weighted sum of the outputs of each token's experts, (T, H), as transformers' "grouped_mm" does.

    Where all layers compute plainly, the implementation that the model's own config names does it.

    Args:
        self: the experts module.
        hidden_states: (T, H).
        top_k_index: (T, K); a number of experts or more stands for none.
        top_k_weights: (T, K).
    """
    if computes_plainly(self):
        found: Tensor = _own_implementation(self)(self, hidden_states, top_k_index, top_k_weights)
        return found
    order, dispatch = dispatched(top_k_index, self.num_experts)
    back = inverse(order)
    x = sorted_tokens(hidden_states, order, back)
    inner = project(self, "gate_up_proj" if self.has_gate else "up_proj", x, dispatch)
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    output = project(self, "down_proj", inner, dispatch)
    if getattr(self, "has_post_expert_norm", False):
        output = self.post_expert_norm(output)
    return weighted_sum(output, order, back, top_k_weights).to(hidden_states.dtype)


def computes_plainly(self: Any) -> bool:
    """Returns True if no layer of an experts module has formats, and none is recorded."""
    containers = (holder._modules.get(LAYERS) for holder in (self, *self.children()))
    layers = [layer for container in containers if container is not None for layer in container.children()]
    return all(layer.snip_is_plain and layer.snip_recorder is None for layer in layers)


def _own_implementation(self: Any) -> Any:
    """Returns the function that runs an experts module which is not swapped."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    name = getattr(self, _ORIGINAL)._experts_implementation
    return ALL_EXPERTS_FUNCTIONS.get_interface(name, type(self).forward.__wrapped__)


def dispatched(top_k_index: Tensor, experts: int) -> tuple[Tensor, Dispatch]:
    """Returns the order (S,) that sorts pairs of a token and its expert (T, K) by expert, and what goes where then."""
    # Stable, so that the order of an expert's tokens, by which random numbers are drawn, is theirs in the batch.
    found, order = torch.sort(top_k_index.reshape(-1), stable=True)
    ends = torch.searchsorted(found, torch.arange(experts, device=found.device), right=True)
    return order, Dispatch(ends, order // top_k_index.shape[1], top_k_index.shape[0])


def weighted_sum(output: Tensor, order: Tensor, back: Tensor, top_k_weights: Tensor) -> Tensor:
    """Returns the sum of each token's outputs (S, H), sorted by `order`, with its weights (T, K): (T, H).

    `back` is the order's inverse.
    """
    weighted = output * permuted(top_k_weights.reshape(-1), order, back).unsqueeze(-1)
    # In the order of the batch again, so that the sum over a token's experts has a fixed order.
    return unsorted(weighted, order, back).view(*top_k_weights.shape, -1).sum(dim=1)


class Layout(NamedTuple):
    """How a parameter stores the matrices of a projection: (E, O, I), unless said otherwise."""

    is_transposed: bool = False
    """As (E, I, O)."""
    matrices: int | None = None
    """E, if the parameter has two dimensions: the first two of the three in one."""

    def stacked(self, tensor: Tensor) -> Tensor:
        """Returns a tensor that is laid out as the parameter, as (E, O, I)."""
        if self.matrices is not None:
            tensor = tensor.reshape(self.matrices, -1, tensor.shape[-1])
        return tensor.transpose(1, 2) if self.is_transposed else tensor

    def laid_out(self, stacked: Tensor) -> Tensor:
        """The inverse of `stacked`."""
        tensor = stacked.transpose(1, 2) if self.is_transposed else stacked
        return tensor if self.matrices is None else tensor.reshape(-1, tensor.shape[-1])


def project(self: Any, name: str, x: Tensor, dispatch: Dispatch, layout: Layout | None = None) -> Tensor:
    """Returns what a projection makes of x (S, I): by its layer, or in high precision where it is not swapped.

    Args:
        self: the experts module.
        name: of the projection's parameter, in the module.
        x: sorted by expert.
        dispatch: which token each row is.
        layout: of the parameter; None: one of three dimensions, as the module's `is_transposed` says.
    """
    holder, own_name = holder_of(self, name)
    layers = holder._modules.get(LAYERS)
    if isinstance(layers, nn.ModuleDict) and own_name in layers:
        y: Tensor = layers[own_name](x, dispatch)
        return y
    layout = Layout(self.is_transposed) if layout is None else layout
    weight, bias = getattr(holder, own_name), getattr(holder, f"{own_name}_bias", None)
    return unquantized(x, layout.stacked(weight), bias, dispatch.ends)


def holder_of(module: nn.Module, part: str) -> tuple[nn.Module, str]:
    """Returns which module holds a projection's parameter, an experts module itself or a child, and its name there."""
    child, _, name = part.rpartition(".")
    found = module._modules.get(child) if child else module
    return module if found is None else found, name
