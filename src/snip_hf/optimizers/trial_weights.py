"""Throwaway weights on which an optimizer's own step is tried, with the hyperparameters of a group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .update_rules import Situation, own_step

SHAPES = ((8, 12), (64, 64))
"""Some optimizers treat small weights in another way (8-bit states from 4,096 elements on)."""


def trial(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], shape: tuple[int, int], dtype: torch.dtype
) -> tuple[Situation, tuple[Tensor, Tensor]]:
    """Returns a throwaway weight's situation after two steps with a group's hyperparameters, and two more gradients."""
    device = group["params"][0].device
    generator = torch.Generator().manual_seed(0)
    weight, *draws = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(5))
    options = {key: value for key, value in group.items() if key not in ("params", "state")}
    # A schedule may be at 0 now.
    options["lr"] = torch.ones_like(group["lr"]) if isinstance(group.get("lr"), Tensor) else 1.0
    # A schedule-free optimizer takes no step before `train()`.
    if "train_mode" in options:
        options["train_mode"] = True
    at = Situation(options, _first_state(optimizer, options, weight), weight)
    for gradient in draws[:2]:
        at = Situation(options, own_step(optimizer, at, gradient)[1], at.parameter)
    return at, (draws[2], draws[3])


def _first_state(optimizer: torch.optim.Optimizer, options: Mapping[str, Any], weight: Tensor) -> dict[str, Any]:
    """Returns what the optimizer holds of a weight before its first step: for most, nothing."""
    if type(optimizer).__module__ == "apollo_torch.apollo":
        return {"seed": 1}
    if not isinstance(optimizer, torch.optim.Adagrad):
        return {}
    # It makes its state when it is built; newer versions make what is missing in the step, that of torch 2.11 does not.
    built = torch.optim.Adagrad(
        [weight], initial_accumulator_value=options["initial_accumulator_value"], fused=options["fused"]
    )
    return dict(built.state[weight])
