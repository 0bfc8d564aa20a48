"""Update rules of optimizers that scale a weight's update by a norm over all of it: StableAdamW and GrokAdamW."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .update_rules import Autograd, Situation

# What torch adds to a norm before it divides by it to clip.
_CLIP_EPS = 1e-6


def stable_adamw(at: Situation, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """StableAdamW (arXiv:2304.13013; package torch-optimi): AdamW, clipped where gradients outgrow their average."""
    eps, step = at.number("eps"), float(at.group.get("step", 0)) + 1
    taken1, taken2 = ((1 - beta) / (1 - beta**step) for beta in (at.number("beta1"), at.number("beta2")))
    first = at.average("exp_avg", gradient, taken1)
    second = at.average("exp_avg_sq", gradient.square(), taken2)
    growth = (gradient.square() / second.clamp(min=eps * eps)).mean().sqrt()
    touched = second > 0
    # 1 where nothing was ever seen, so that no derivative is infinite there.
    update = first / (torch.where(touched, second, 1).sqrt() + eps)
    # The decay shrinks with the learning rate, and so depends on the gradient.
    decay = at.number("weight_decay") / (at.number("max_lr") if at.group["decouple_lr"] else 1.0)
    return at.number("lr") / growth.clamp(min=1) * (update + decay * at.parameter), touched


def grokadamw(at: Situation, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """GrokAdamW (package grokadamw): AdamW on gradients, clipped weight by weight, to which their average is added."""
    group, beta1, beta2 = at.group, *(float(beta) for beta in at.group["betas"])
    bound = at.number("gradient_clipping")
    if bound > 0:
        gradient = gradient * (bound / (torch.linalg.vector_norm(gradient) + _CLIP_EPS)).clamp(max=1)
    kept = at.number("alpha_init") * math.exp(-at.number("grokking_signal_decay_rate") * _signal(group))
    amplified = gradient + at.number("lamb") * at.average("grok_ema", gradient, 1 - kept)
    of_layer = beta1 * (1 - at.number("gamma")) ** int(at.state.get("index", 0))
    first = at.average("exp_avg", amplified, 1 - of_layer)
    second = at.average("exp_avg_sq", amplified.square(), 1 - beta2)
    touched = second > 0
    update = first / (torch.where(touched, second, 1).sqrt() + at.number("eps"))
    return at.number("lr") * math.sqrt(1 - beta2**at.step) / (1 - beta1**at.step) * update, touched


def _signal(group: Mapping[str, Any]) -> float:
    """Returns how far the loss of evaluation is above that of training, as GrokAdamW takes it from its group."""
    of_training, of_evaluation = group.get("train_loss"), group.get("eval_loss")
    if of_training is None or of_evaluation is None:
        return 0.0
    largest = max(of_training, of_evaluation)
    return float(max(0, of_evaluation - of_training) / largest) if largest > 0 else 0.0


AUTOGRAD: Mapping[str, Autograd] = {"optimi.StableAdamW": stable_adamw, "grokadamw.GrokAdamW": grokadamw}


def grok_situation_of(optimizer: Any, group: Mapping[str, Any], parameter: Tensor) -> Situation:
    """Returns the situation of a parameter of GrokAdamW's, which keeps states in the group, on the CPU.

    Its momentum depends on the number of the parameter in the group.
    """
    trained = [one for one in group["params"] if one.requires_grad]
    index = next((number for number, one in enumerate(trained) if one is parameter), 0)
    held = group.get("state", {}).get(parameter, {})
    state = {key: value.to(parameter.device) if isinstance(value, Tensor) else value for key, value in held.items()}
    options = {key: value for key, value in group.items() if key != "state"}
    return Situation(options, {**state, "index": index}, parameter.detach())


def refusal(optimizer: Any) -> str | None:
    """Returns why one of these optimizers cannot be differentiated, although it has a rule; None if it can."""
    for group in optimizer.param_groups:
        if group.get("gradient_release"):
            return "with gradient_release it steps within the backward pass"
        if group.get("grokking_signal_fns"):
            return "its grokking_signal_fns decide how it averages gradients"
    return None
