"""An optimizer's own step, taken on copies: for optimizers without a rule, and for trials on throwaway weights."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..numerics.random_state import random_state_kept
from .update_rules import UpdateContext

# bitsandbytes' global managers.
_COMMON = ("GlobalOptimManager", "GlobalPageManager")
SHAPES = ((8, 12), (64, 64))
"""Some optimizers treat small weights in another way (8-bit states from 4,096 elements on)."""


def own_step(optimizer: torch.optim.Optimizer, at: UpdateContext, gradient: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Runs the optimizer's step on copies of parameter, state and group, in the gradient's dtype, without hooks.

    Returns: the amount that it subtracts from the parameter, and the state after it.
    """
    twin = object.__new__(type(optimizer))
    parameter = nn.Parameter(at.parameter.to(gradient.dtype, copy=True))
    parameter.grad = gradient.clone()
    # References to the real optimizer become references to the copy.
    memo: dict[int, Any] = {id(optimizer): twin}
    # Hooks are not run, and a scheduler's wrapper around `step` would step the real one.
    attributes = {key: value for key, value in vars(optimizer).items() if key not in ("state", "param_groups", "step")}
    attributes |= {key: OrderedDict() for key in attributes if key.startswith("_optimizer_")}
    options = {key: value for key, value in at.group.items() if key != "params"}
    # References to parameters become meta tensors: no weight is copied, and none can be written to.
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    for one in parameters:
        memo[id(one)] = nn.Parameter(torch.empty(one.shape, dtype=one.dtype, device="meta"), one.requires_grad)
    memo[id(at.parameter)] = parameter
    # Global managers hold weights and states of all optimizers; they are shared and not copied.
    memo.update((id(value), value) for value in attributes.values() if type(value).__name__ in _COMMON)
    for name, value in attributes.items():
        setattr(twin, name, copy.deepcopy(value, memo))
    twin.param_groups = [{**copy.deepcopy(options, memo), "params": [parameter]}]
    twin.state = defaultdict(dict)
    if at.state:
        twin.state[parameter] = {key: _copied(value, at.parameter, gradient, memo) for key, value in at.state.items()}
    step: Any = type(optimizer).step
    with random_state_kept():
        # torch's wrapper runs the hooks of all optimizers.
        (step.__wrapped__ if getattr(step, "hooked", False) else step)(twin)
    return at.parameter.to(gradient.dtype) - parameter.detach(), dict(twin.state[parameter])


def _copied(value: Any, parameter: Tensor, gradient: Tensor, memo: dict[int, Any]) -> Any:
    """Returns a deep copy; tensors with one number per element are cast as the parameter is."""
    copied = copy.deepcopy(value, memo)
    if isinstance(copied, Tensor) and copied.is_floating_point() and copied.shape == parameter.shape:
        return copied.to(gradient.dtype)
    return copied


def trial(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], shape: tuple[int, int], dtype: torch.dtype
) -> tuple[UpdateContext, tuple[Tensor, Tensor]]:
    """Returns a throwaway weight's context after two steps with a group's hyperparameters, and two more gradients."""
    device = group["params"][0].device
    generator = torch.Generator().manual_seed(0)
    weight, *draws = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(5))
    options = {key: value for key, value in group.items() if key not in ("params", "state")}
    # A schedule may be at 0 now.
    options["lr"] = torch.ones_like(group["lr"]) if isinstance(group.get("lr"), Tensor) else 1.0
    # A schedule-free optimizer takes no step before `train()`.
    if "train_mode" in options:
        options["train_mode"] = True
    at = UpdateContext(options, _first_state(optimizer, options, weight), weight)
    for gradient in draws[:2]:
        at = UpdateContext(options, own_step(optimizer, at, gradient)[1], at.parameter)
    return at, (draws[2], draws[3])


def _first_state(optimizer: torch.optim.Optimizer, options: Mapping[str, Any], weight: Tensor) -> dict[str, Any]:
    """Returns the optimizer's state of a weight before its first step: for most, {}."""
    if type(optimizer).__module__ == "apollo_torch.apollo":
        return {"seed": 1}
    if not isinstance(optimizer, torch.optim.Adagrad):
        return {}
    # Adagrad makes its state when it is built; in torch 2.11 not in the step.
    built = torch.optim.Adagrad(
        [weight], initial_accumulator_value=options["initial_accumulator_value"], fused=options["fused"]
    )
    return dict(built.state[weight])
