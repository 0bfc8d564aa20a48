"""Update rules of the schedule-free optimizers (arXiv:2405.15682; package schedulefree): AdamW, RAdam and SGD.

They hold two sequences of weights: z takes the steps of the base optimizer, and the model computes gradients at y, an
interpolation of z and the running average x. The parameter is y between the optimizer's `train()` and `eval()`, and so
h is what one step subtracts from y. z moves by another multiple of the same change. Weight decay and the pull of y
towards z do not depend on the gradient and are left out.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .update_rules import Elementwise, Situation


def sgd(at: Situation, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """SGDScheduleFree."""
    rate = _rate_of_y(at, _warmed_up(at), at.number("momentum"))
    return rate * gradient, torch.full_like(gradient, rate), torch.ones_like(gradient, dtype=torch.bool)


def adamw(at: Situation, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """AdamWScheduleFree."""
    return _normalized(at, gradient, _rate_of_y(at, _warmed_up(at), float(at.group["betas"][0])))


def radam(at: Situation, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """RAdamScheduleFree: SGD, or no step at all, until the average of the squares holds enough of them."""
    beta1, beta2 = (float(beta) for beta in at.group["betas"])
    step = float(at.group["k"]) + 1
    most = 2 / (1 - beta2) - 1
    held = most - 2 * step * beta2**step / (1 - beta2**step)
    is_adaptive = held > 4
    if is_adaptive:
        rectification = ((held - 4) * (held - 2) * most / ((most - 4) * (most - 2) * held)) ** 0.5
    else:
        rectification = float(not at.group["silent_sgd_phase"])
    rate = _rate_of_y(at, at.number("lr") * rectification, beta1)
    if is_adaptive:
        return _normalized(at, gradient, rate)
    return rate * gradient, torch.full_like(gradient, rate), torch.ones_like(gradient, dtype=torch.bool)


def _normalized(at: Situation, gradient: Tensor, rate: float) -> tuple[Tensor, Tensor, Tensor]:
    """The step of Adam without momentum."""
    beta2, eps = float(at.group["betas"][1]), at.number("eps")
    unbiased = 1 - beta2 ** (float(at.group["k"]) + 1)
    second = at.average("exp_avg_sq", gradient.square(), 1 - beta2)
    root = (second / unbiased).sqrt_()
    divisor = root + eps
    normalized = gradient / divisor
    # grouped so that nothing underflows
    slope = (1 - normalized * ((1 - beta2) * gradient / unbiased / root)) / divisor
    touched = second > 0
    return rate * normalized, torch.where(touched, rate * slope, 0), touched


def _warmed_up(at: Situation) -> float:
    """Returns the learning rate of the step."""
    done, steps = float(at.group["k"]), float(at.group["warmup_steps"])
    return at.number("lr") * ((done + 1) / steps if done < steps else 1.0)


def _rate_of_y(at: Situation, rate: float, momentum: float) -> float:
    """Returns by how many times the base optimizer's direction y moves, where z moves by `rate` times it."""
    largest = max(rate, at.number("lr_max"))
    weight = (float(at.group["k"]) + 1) ** at.number("r") * largest ** at.number("weight_lr_power")
    total = at.number("weight_sum") + weight
    taken = weight / total if total > 0 else 0.0
    return rate * (1 - momentum * (1 - taken))


ELEMENTWISE: Mapping[str, Elementwise] = {
    "schedulefree.AdamWScheduleFree": adamw,
    "schedulefree.RAdamScheduleFree": radam,
    "schedulefree.SGDScheduleFree": sgd,
}
