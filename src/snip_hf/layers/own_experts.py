"""Experts modules of transformers that do not run through `ExpertsInterface`: their forward passes, written anew.

Legend: S pairs of a token and an expert, E experts, I in_features, O out_features, H hidden size. A swap gives such a
module a class derived from its own, with the forward pass that is named here. Every function computes what the class's
own forward does, with the products in the layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .experts import Experts
from .experts_interface import Layout, computes_plainly, dispatched, experts_forward, project, weighted_sum
from .kinds import register_layer_kind
from .layer import Dispatch
from .token_moves import inverse, sorted_tokens


def _llama4(self: Any, hidden_states: Tensor) -> Tensor:
    """Every expert runs all tokens, (E * T, H), weighted before: with zeros where the router did not choose it."""
    tokens = hidden_states.shape[0] // self.num_experts
    ends = torch.arange(1, self.num_experts + 1, device=hidden_states.device) * tokens
    dispatch = Dispatch(ends, torch.arange(tokens, device=ends.device).repeat(self.num_experts), tokens)
    gate, up = project(self, "gate_up_proj", hidden_states, dispatch).chunk(2, dim=-1)
    return project(self, "down_proj", up * self.act_fn(gate), dispatch)


def _inkling_shared(self: Any, hidden_states: Tensor, gammas: Tensor) -> Tensor:
    """Every expert runs all tokens, and weighs them inside."""
    tokens, experts = hidden_states.flatten(0, -2), self.n_shared_experts
    ends = torch.arange(1, experts + 1, device=tokens.device) * len(tokens)
    dispatch = Dispatch(ends, torch.arange(len(tokens), device=ends.device).repeat(experts), len(tokens))
    x, weights = tokens.repeat(experts, 1), gammas.reshape(-1, experts).t().reshape(-1, 1)
    inner = self.act_fn(project(self, "gate_proj", x, dispatch)) * project(self, "up_proj", x, dispatch) * weights
    output = project(self, "down_proj", inner, dispatch).view(experts, *hidden_states.shape)
    return output.float().sum(dim=0).to(hidden_states.dtype)


def _longcat_flash(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Experts behind the last routed one give back what they get. gate_up_proj has matrices for them too."""
    order, dispatch = dispatched(top_k_index, self.num_routed_experts)
    back = inverse(order)
    x, last = sorted_tokens(hidden_states, order, back), dispatch.ends[-1:]
    of_all = dispatch._replace(ends=torch.cat([dispatch.ends, last.expand(self.zero_expert_num)]))
    gate, up = project(self, "gate_up_proj", x, of_all).chunk(2, dim=-1)
    is_routed = torch.arange(len(order), device=order.device) < last
    output = torch.where(is_routed[:, None], project(self, "down_proj", self.act_fn(gate) * up, dispatch), x)
    return weighted_sum(output, order, back, top_k_weights).to(hidden_states.dtype)


def _jetmoe(self: Any, inputs: Tensor, expert_size: Sequence[int]) -> Tensor:
    """One projection, of rows that are sorted already. Which of them are one token is not known here."""
    ends = torch.tensor(expert_size, device=inputs.device).cumsum(0)
    return project(self, "weight", inputs, Dispatch(ends, torch.arange(len(inputs), device=ends.device), len(inputs)))


def _dbrx(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The parameters are those of a child. Each has the rows of all experts below each other."""

    def run(name: str, x: Tensor) -> Tensor:
        return project(self, name, x, dispatch, _dbrx_layout(self, name))

    tokens = hidden_states.reshape(-1, self.hidden_size)
    order, dispatch = dispatched(top_k_index, self.num_experts)
    back = inverse(order)
    x = sorted_tokens(tokens, order, back)
    inner = self.mlp.activation_fn(run("mlp.w1", x)) * run("mlp.v1", x)
    output = weighted_sum(run("mlp.w2", inner), order, back, top_k_weights).to(hidden_states.dtype)
    return output.view(hidden_states.shape[0], -1, self.hidden_size)


def _dbrx_layout(module: Any, part: str) -> Layout:
    return Layout(is_transposed=part == "mlp.w2", matrices=module.num_experts)


@dataclass(frozen=True)
class OwnForward:
    """A class of experts modules, and what a swapped one runs."""

    name: str
    forward: Callable[..., Tensor]
    parts: tuple[str, ...] = ("gate_up_proj", "down_proj")
    is_transposed: bool = False
    layout: Callable[[Any, str], Layout] | None = None
    """(module, part) -> how its parameter is stored; None: in three dimensions."""


# Of the classes in transformers.models that these forward passes were written after.
_CLASSES = {
    own.name: own
    for own in (
        OwnForward("Llama4TextExperts", _llama4, is_transposed=True),
        OwnForward("InklingSharedExperts", _inkling_shared, parts=("gate_proj", "up_proj", "down_proj")),
        OwnForward("LongcatFlashExperts", _longcat_flash),
        OwnForward("JetMoeParallelExperts", _jetmoe, parts=("weight",)),
        OwnForward("Step3p7Experts", experts_forward),
        OwnForward("DbrxExperts", _dbrx, parts=("mlp.w1", "mlp.v1", "mlp.w2"), layout=_dbrx_layout),
    )
}


# A class -> that of its modules when they are swapped.
_SWAPPED: dict[type[nn.Module], type[nn.Module]] = {}


class SwappedExperts(nn.Module):
    """What a swapped module's class derives from, beside its own class."""

    snip_original_class: type[nn.Module]
    has_gate = True

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Its class is made at run time, so that no name leads to it.
        return _new, (self.snip_original_class,), self.__getstate__()


class OwnExperts(Experts):
    """Experts modules of transformers whose classes are named here."""

    name = "own-experts"
    accepts = f"an experts module of transformers of the classes {', '.join(_CLASSES)}"

    def knows(self, module: nn.Module) -> bool:
        return _own_forward(_original(module)) is not None

    def refuses(self, module: nn.Module) -> str | None:
        if isinstance(module, SwappedExperts):
            return None
        own = self._own(module)
        found, expected = (list(inspect.signature(f).parameters) for f in (type(module).forward, own.forward))
        if found[1:] != expected[1:] and own.forward is not experts_forward:
            return f"its forward takes {', '.join(found[1:])}, expected {', '.join(expected[1:])}"
        return self.lacks_parameters(module)

    def parts(self, module: nn.Module) -> tuple[str, ...]:
        return self._own(module).parts

    def layout(self, module: nn.Module, part: str) -> Layout:
        own = self._own(module)
        return Layout(own.is_transposed) if own.layout is None else own.layout(module, part)

    def switch_on(self, module: nn.Module) -> None:
        module.__class__, original = _swapped(type(module)), type(module)
        vars(module)["snip_original_class"] = original

    def switch_off(self, module: nn.Module) -> None:
        module.__class__ = vars(module).pop("snip_original_class")

    def _own(self, module: nn.Module) -> OwnForward:
        own = _own_forward(_original(module))
        assert own is not None
        return own


def _original(module: nn.Module) -> type[nn.Module]:
    return module.snip_original_class if isinstance(module, SwappedExperts) else type(module)


def _own_forward(cls: type[nn.Module]) -> OwnForward | None:
    return _CLASSES.get(cls.__name__) if cls.__module__.startswith("transformers.models.") else None


def _swapped(original: type[nn.Module]) -> type[nn.Module]:
    """Returns the class of swapped modules that had this class."""
    if original not in _SWAPPED:
        own = _own_forward(original)
        assert own is not None

        def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
            found: Tensor = (original.forward if computes_plainly(self) else own.forward)(self, *args, **kwargs)
            return found

        members = {"forward": forward, "is_transposed": own.is_transposed}
        _SWAPPED[original] = type(f"Snip{original.__name__}", (SwappedExperts, original), members)
    return _SWAPPED[original]


def _new(original: type[nn.Module]) -> nn.Module:
    cls = _swapped(original)
    return cls.__new__(cls)


register_layer_kind(OwnExperts())
