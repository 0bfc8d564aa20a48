"""The optimizers that have an update rule, or a reason to be refused, by package and class. None is imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..parallel.sharding import is_sharded
from . import bitsandbytes_states, low_rank, schedule_free, update_rules, whole_weight
from .update_rules import Autograd, Elementwise, Situation

ELEMENTWISE: Mapping[str, Elementwise] = {
    **update_rules.ELEMENTWISE,
    **schedule_free.ELEMENTWISE,
    **bitsandbytes_states.ELEMENTWISE,
}
AUTOGRAD: Mapping[str, Autograd] = {
    **update_rules.AUTOGRAD,
    **bitsandbytes_states.AUTOGRAD,
    **low_rank.AUTOGRAD,
    **whole_weight.AUTOGRAD,
}
DEFAULT = "adamw_torch' or 'adamw_torch_fused"
"""What the Trainer's `optim` may be in any case."""

# Packages of which several modules have classes of one name.
_BY_MODULE = ("galore_torch", "apollo_torch")
# Their states are not one number per element, or lie elsewhere.
_UNSHARDED = ("bitsandbytes", "galore_torch", "apollo_torch", "grokadamw")
_IN_BACKWARD = "it updates weights within the backward pass, so that the gradients of a step are never there together"
_NO_FP64 = "no rule describes it, and its kernels take no FP64, in which differences of its steps are taken"
_LITTLE_MEMORY = "adafactor' or 'paged_adamw_8bit', which need little memory too, or '" + DEFAULT
_REFUSED: Mapping[str, tuple[str, str]] = {
    "lomo_optim.Lomo": (_IN_BACKWARD, _LITTLE_MEMORY),
    "lomo_optim.AdaLomo": (_IN_BACKWARD, _LITTLE_MEMORY),
    "transformers.LayerWiseDummyOptimizer": (_IN_BACKWARD, "galore_adamw' or 'apollo_adamw"),
    "galore_torch.adamw8bit.AdamW8bit": (
        "it gives bitsandbytes the arguments of an old version, which now mean max_unorm=100 and skip_zeros=True",
        "galore_adamw' or 'adamw_8bit",
    ),
}


def rule_name(kind: type) -> str:
    """Returns the key under which `ELEMENTWISE` or `AUTOGRAD` has this class, if it has it."""
    package = kind.__module__.split(".")[0]
    if kind.__name__ == "Lion" and package != "bitsandbytes":
        return "Lion"
    return f"{kind.__module__ if package in _BY_MODULE else package}.{kind.__qualname__}"


def shown_name(kind: type) -> str:
    """Returns the name by which messages call this class: with its package, but for torch's own."""
    return rule_name(kind).removeprefix("torch.")


def way(kind: type) -> str:
    """Returns how the updates of this class are differentiated: "analytic", "autograd" or "numerical"."""
    name = rule_name(kind)
    return "analytic" if name in ELEMENTWISE else "autograd" if name in AUTOGRAD else "numerical"


def is_tried(kind: type) -> bool:
    """Returns True if the step of this class is compared at the start with what is known of it.

    The rules of torch, torchao and transformers are tested with the versions that snip-hf supports.
    """
    name = rule_name(kind)
    return name == "Lion" or (name not in update_rules.ELEMENTWISE and name not in update_rules.AUTOGRAD)


def refusal(optimizer: Any) -> tuple[str, str] | None:
    """Returns why this optimizer cannot be differentiated, whatever its rule, and what to use instead; None if it can.

    The latter are values of the Trainer's `optim`.
    """
    kind = type(optimizer)
    name, package = rule_name(kind), kind.__module__.split(".")[0]
    if name in _REFUSED:
        return _REFUSED[name]
    if way(kind) == "numerical":
        return (_NO_FP64, "adamw_8bit' or 'adamw_torch") if package == "bitsandbytes" else None
    if package in _UNSHARDED and any(is_sharded(one) for group in optimizer.param_groups for one in group["params"]):
        return "its states cannot be put together where FSDP2 shards the weights", DEFAULT
    reason = None
    if package == "bitsandbytes":
        reason = bitsandbytes_states.refusal(optimizer)
    elif name in whole_weight.AUTOGRAD:
        reason = whole_weight.refusal(optimizer)
    return None if reason is None else (reason, DEFAULT)


def situation_of(optimizer: Any, group: Mapping[str, Any], parameter: Tensor) -> Situation:
    """Returns what the optimizer's next update of a parameter of this group depends on, besides the gradient."""
    name = rule_name(type(optimizer))
    if name == "grokadamw.GrokAdamW":
        return whole_weight.grok_situation_of(optimizer, group, parameter)
    if name.startswith("bitsandbytes."):
        return bitsandbytes_states.situation_of(optimizer, group, parameter)
    return Situation(group, optimizer.state.get(parameter, {}), parameter.detach())
