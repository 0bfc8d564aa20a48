"""Update rules of bitsandbytes' optimizers, with states in 8 bits or 32, paged or not.

A step dequantizes the states, updates weight and states in FP32, and quantizes the states again. So the update is that
of the full-precision optimizer on the dequantized state. Codes index a table, and 256 neighbours (2,048 in old
versions) share a scale (arXiv:2110.02861). Pages lie in memory that CPU and GPU share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .update_rules import Autograd, Elementwise, UpdateContext, adam, lion


def dequantized(codes: Tensor, table: Tensor, largest: Tensor) -> Tensor:
    """Returns the FP32 numbers of a quantized tensor.

    Args:
        codes: uint8, of any shape.
        table: (256,), code -> number in units of its block's scale.
        largest: the scale of each block of neighbours.
    """
    # The block size is a power of two.
    block = 2 ** math.ceil(math.log2(codes.numel() / largest.numel()))
    numbers = table.to(torch.float32)[codes.flatten().to(torch.int64)]
    return (numbers * largest.repeat_interleave(block)[: codes.numel()]).view(codes.shape)


def unpacked(at: UpdateContext) -> UpdateContext:
    """Returns the context with dequantized states under their names in torch."""
    state: dict[str, Any] = {"step": at.state.get("step", 0)}
    for name, number in (("exp_avg", 1), ("exp_avg_sq", 2)):
        if f"state{number}" in at.state:
            state[name] = _numbers(at, number)
    return UpdateContext({**at.group, "amsgrad": False}, state, at.parameter)


def _numbers(at: UpdateContext, number: int) -> Tensor:
    device = at.parameter.device
    held: Tensor = at.state[f"state{number}"].to(device)
    if held.dtype != torch.uint8:
        return held
    table, largest = (at.state[f"{name}{number}"].to(device) for name in ("qmap", "absmax"))
    if largest.dim() == 1:
        return dequantized(held, table, largest)
    # AdEMAMix holds two averages in one tensor.
    return torch.stack([dequantized(*pair) for pair in zip(held, [table] * len(held), largest, strict=True)])


def adamw(at: UpdateContext, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Adam and AdamW, both of which decouple weight decay."""
    return adam(unpacked(at), gradient, decoupled=True)


def ademamix(at: UpdateContext, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """AdEMAMix (arXiv:2409.03137): Adam with a second, slow average in its numerator."""
    at = unpacked(at)
    lr, eps, step = at.number("lr"), at.number("eps"), at.step
    beta1, beta2, beta3, alpha = _scheduled(at)
    averages = at.state.get("exp_avg")
    fast, slow = (torch.zeros_like(gradient),) * 2 if averages is None else averages.to(gradient.dtype)
    unbiased1, unbiased2 = 1 - beta1**step, 1 - beta2**step
    fast, slow = beta1 * fast + (1 - beta1) * gradient, beta3 * slow + (1 - beta3) * gradient
    second = at.average("exp_avg_sq", gradient.square(), 1 - beta2)
    root = (second / unbiased2).sqrt_()
    divisor = root + eps
    mixed = fast / unbiased1 + alpha * slow
    mixed_slope = (1 - beta1) / unbiased1 + alpha * (1 - beta3)
    slope = (mixed_slope - mixed / divisor * ((1 - beta2) * gradient / unbiased2 / root)) / divisor
    touched = second > 0
    return lr * mixed / divisor, torch.where(touched, lr * slope, 0), touched


def _scheduled(at: UpdateContext) -> tuple[float, float, float, float]:
    """Returns AdEMAMix's three betas and alpha at this step, during and after their warm-ups."""
    beta1, beta2, beta3 = (float(beta) for beta in at.group["betas"])
    alpha, ends = at.number("alpha"), at.group.get("t_beta3")
    if at.group.get("t_alpha"):
        alpha = min(at.step * alpha / at.number("t_alpha"), alpha)
    if ends:
        done, fast, slow = at.step / float(ends), math.log(beta1), math.log(beta3)
        beta3 = min(math.exp(fast * slow / ((1 - done) * slow + done * fast)), beta3)
    return beta1, beta2, beta3, alpha


def rmsprop(at: UpdateContext, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """RMSprop, which is not centred and has no momentum."""
    at = unpacked(at)
    lr, eps, beta = at.number("lr"), at.number("eps"), float(at.group["betas"][0])
    gradient = gradient + at.number("weight_decay") * at.parameter
    mean = at.average("exp_avg", gradient.square(), 1 - beta)
    root = mean.sqrt()
    divisor = root + eps
    update = gradient / divisor
    touched = mean > 0
    return lr * update, torch.where(touched, lr * (1 - update * ((1 - beta) * gradient / root)) / divisor, 0), touched


def smoothed_lion(at: UpdateContext, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Lion, smoothed as `update_rules.lion`."""
    return lion(unpacked(at), gradient)


def _named(kind: str, *more: str) -> list[str]:
    """Returns the names of an optimizer's classes."""
    return [f"bitsandbytes.{paged}{kind}{bits}" for paged in ("", *more) for bits in ("", "8bit", "32bit")]


ELEMENTWISE: Mapping[str, Elementwise] = {
    **dict.fromkeys([*_named("Adam", "Paged"), *_named("AdamW", "Paged")], adamw),
    **dict.fromkeys(_named("AdEMAMix", "Paged"), ademamix),
    **dict.fromkeys(_named("RMSprop"), rmsprop),
}
AUTOGRAD: Mapping[str, Autograd] = dict.fromkeys(_named("Lion", "Paged"), smoothed_lion)


def refusal(optimizer: Any) -> str | None:
    """Returns the option that keeps an optimizer of bitsandbytes from being differentiated; None if there is none."""
    settings = optimizer.args
    if getattr(settings, "max_unorm", 0.0) > 0:
        return f"max_unorm={settings.max_unorm} makes its update of one element depend on the gradients of others"
    if getattr(settings, "percentile_clipping", 100) < 100:
        return f"percentile_clipping={settings.percentile_clipping} scales gradients by the norms of earlier ones"
    if getattr(settings, "skip_zeros", False):
        return "skip_zeros=True leaves out elements whose gradient is 0"
    return None


def context_of(optimizer: Any, group: Mapping[str, Any], parameter: Tensor) -> UpdateContext:
    """Returns the context of a parameter, with the overrides of `GlobalOptimManager`."""
    overrides = optimizer.mng.pid2config.get(id(parameter), {})
    return UpdateContext({**group, **overrides}, optimizer.state.get(parameter, {}), parameter.detach())
