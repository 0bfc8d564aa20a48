"""Policies of gradient.yaml and smollm2-gradient.yaml: the program of "snip" with another cost of an update's error.

"snip-gradient" takes the squared change of the gradient, over all trained parameters. "snip-fisher" takes the squared
change of the next update times the parameter's mean squared gradient, where "snip" divides by |W|^2. They replace parts
of the estimate while a probe of theirs runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import snip_hf.training.gradients as gradients
from snip_hf.estimation.optimizer_step import ComparedParameters, OptimizerStep, RelativeUpdates, trained_beside
from snip_hf.layers.layer import SnipLayer
from snip_hf.policies.registry import Policy, register_policy
from snip_hf.policies.snip import snip_cost
from snip_hf.training.refresh import Refresher

NAMES = ("snip-gradient", "snip-fisher")
_running: list[str] = []
"""The policy whose probe runs."""
_divergences, _of = Refresher._divergences, RelativeUpdates.of
_compared_parameters, _responses = gradients.compared_parameters, gradients.responses


def _divergences_under(self: Refresher, *arguments: Any) -> Any:
    name = self._config.policy
    _running[:] = [name] if name in NAMES else []
    try:
        return _divergences(self, *arguments)
    finally:
        _running.clear()


def _compared(model: Any, layers: Mapping[str, SnipLayer], is_trained: Any, stages: Any = None) -> ComparedParameters:
    if _running != ["snip-gradient"]:
        return _compared_parameters(model, layers, is_trained, stages)
    weights = {name: layer.weight for name, layer in layers.items()}
    return ComparedParameters(weights, trained_beside(model, layers, is_trained))


def _responses_under(optimizer: Any, parameters: Any) -> Any:
    return _responses(None if _running == ["snip-gradient"] else optimizer, parameters)


def _relative(step: OptimizerStep, layers: Mapping[str, SnipLayer]) -> RelativeUpdates:
    found = _of(step, layers)
    if not _running:
        return found
    squares = {name: step.gradients[name].to(torch.float32).square().mean().item() for name in found.norms}
    norms = {name: 1.0 if "snip-gradient" in _running else one**-0.5 for name, one in squares.items() if one > 0}
    return RelativeUpdates(step, norms, found.of_several)


for _place, _name, _new in (
    (Refresher, "_divergences", _divergences_under),
    (RelativeUpdates, "of", staticmethod(_relative)),
    (gradients, "compared_parameters", _compared),
    (gradients, "responses", _responses_under),
):
    setattr(_place, _name, _new)
for _name in NAMES:
    register_policy(Policy(name=_name, cost=snip_cost, weighs_updates=True))
