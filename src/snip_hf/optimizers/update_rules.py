"""The update rules of known optimizers: the amount that one step subtracts, as a function of the gradient.

Rules are pure functions of the gradient, laid out as the model stores the weight, in the gradient's dtype; nothing is
written. An elementwise rule returns (update, slope, meaningful): h(g), h'(g) and a mask of the elements at which h' has
a meaning. An autograd rule returns (update, meaningful) and is differentiated with `torch.func`. Decoupled weight decay
does not depend on the gradient and is left out. Optimizers without a rule are differentiated numerically (`own_step`).

The schedule-free optimizers (arXiv:2405.15682; package schedulefree) hold two sequences of weights: z takes the steps
of the base optimizer, and the model computes gradients at y, an interpolation of z and the running average x. The
parameter is y between the optimizer's `train()` and `eval()`, so h is the amount that one step subtracts from y. z
moves by another multiple of the same change. Weight decay and the pull of y towards z are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..kernels import adam_slopes as kernels
from ..parallel.sharding import on_compute_device, own_part, whole

# Lion's sign(c) becomes c / sqrt(c^2 + s^2) with s this part of mean|c| (ours; docs/method.md). For normal c, a change
# of c by 20% of its mean size (about FP4's effect on a gradient) is then first-order to 2%, and a quarter of all
# elements carries the sum of squares. With 0.1 that were 23% and 6% of the elements; larger ones are less of a sign.
LION_SMOOTHING = 0.5


@dataclass(frozen=True)
class UpdateContext:
    """Everything that a step depends on besides the gradient; the state is empty before the first step."""

    group: Mapping[str, Any]
    state: Mapping[str, Any]
    parameter: Tensor

    def gathered(self) -> UpdateContext:
        """Returns the context of the whole parameter; collective."""
        state = {key: whole(value) if isinstance(value, Tensor) else value for key, value in self.state.items()}
        return UpdateContext(self.group, state, whole(self.parameter))

    def of_own_part(self) -> UpdateContext:
        """Returns the context of this process's part of the parameter, on the device that passes use."""
        state = {
            key: own_part(on_compute_device(value)) if isinstance(value, Tensor) else value
            for key, value in self.state.items()
        }
        return UpdateContext(self.group, state, own_part(on_compute_device(self.parameter)))

    def number(self, key: str) -> float:
        """Returns a hyperparameter that may be a tensor (capturable, torchao) as a float."""
        return float(self.group[key])

    @property
    def step(self) -> float:
        """The number of the next step, from 1."""
        return float(self.state.get("step", 0)) + 1

    def signed(self, gradient: Tensor) -> Tensor:
        """Returns the gradient of the minimised function."""
        return -gradient if self.group.get("maximize", False) else gradient

    def held(self, key: str, like: Tensor) -> Tensor:
        """Returns a state tensor, dequantized, in `like`'s dtype; zeros of its shape before the first step."""
        value = self.state.get(key)
        if value is None:
            return torch.zeros_like(like)
        dense: Tensor = value if type(value) is Tensor else value.dequantize()
        return dense.to(like.dtype)

    def average(self, key: str, new: Tensor, taken: float) -> Tensor:
        """Returns the running average of `key` after a step that gives `new` this weight."""
        return (1 - taken) * self.held(key, new) + taken * new

    def rms_of_parameter(self) -> float:
        return float(_rms(self.parameter.to(torch.float32)))


def gradient_itself(at: UpdateContext, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The update is the gradient, whatever the optimizer."""
    return gradient, torch.ones_like(gradient), torch.ones_like(gradient, dtype=torch.bool)


def sgd(at: UpdateContext, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """torch.optim.SGD: momentum, dampening, Nesterov, coupled decay."""
    lr, momentum = at.number("lr"), at.number("momentum")
    gradient = gradient + at.number("weight_decay") * at.parameter
    # torch starts the buffer with the whole first gradient, without dampening.
    started = at.state.get("momentum_buffer") is not None
    taken = 1.0 - at.number("dampening") if started else 1.0
    moved = momentum * at.held("momentum_buffer", gradient) + taken * gradient
    if momentum == 0:
        moved, slope = gradient, 1.0
    elif at.group["nesterov"]:
        moved, slope = gradient + momentum * moved, 1.0 + momentum * taken
    else:
        slope = taken
    return lr * moved, torch.full_like(gradient, lr * slope), torch.ones_like(gradient, dtype=torch.bool)


def adam(at: UpdateContext, gradient: Tensor, decoupled: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Adam and AdamW, of torch (foreach, fused, capturable, amsgrad) and of torchao (quantized states)."""
    lr, eps, step = at.number("lr"), at.number("eps"), at.step
    beta1, beta2 = (float(beta) for beta in at.group["betas"])
    if not (decoupled or at.group.get("decoupled_weight_decay", False)):
        gradient = gradient + at.number("weight_decay") * at.parameter
    first = at.average("exp_avg", gradient, 1 - beta1)
    second = at.average("exp_avg_sq", gradient.square(), 1 - beta2)
    # d second / d gradient
    second_slope = 2 * (1 - beta2) * gradient
    if at.group["amsgrad"]:
        largest = at.held("max_exp_avg_sq", second)
        second_slope = torch.where(second >= largest, second_slope, 0)
        second = torch.maximum(second, largest)
    unbiased1, unbiased2 = 1 - beta1**step, 1 - beta2**step
    root = (second / unbiased2).sqrt_()
    divisor = root + eps
    mean = first / unbiased1
    # h = lr * mean / divisor; docs/method.md, section 3, guarded for elements that were never touched
    # (grouped so that nothing underflows: root * divisor^2 would be 0 for small gradients under a tiny eps)
    slope = ((1 - beta1) / unbiased1 - mean / divisor * (second_slope / (2 * unbiased2) / root)) / divisor
    touched = second > 0
    return lr * mean / divisor, torch.where(touched, lr * slope, 0), touched


def adam_slopes(at: UpdateContext, gradient: Tensor, tangent: Tensor, decoupled: bool = False) -> Tensor | None:
    """Returns h'(gradient) * tangent of `adam` from one kernel; None for unsupported tensors or options."""
    first, second = at.state.get("exp_avg"), at.state.get("exp_avg_sq")
    is_coupled = not (decoupled or at.group.get("decoupled_weight_decay", False)) and at.number("weight_decay") != 0
    if is_coupled or at.group["amsgrad"] or at.group.get("maximize", False):
        return None
    if not kernels.takes(gradient, first, second, tangent):
        return None
    beta1, beta2 = (float(beta) for beta in at.group["betas"])
    unbiased1, unbiased2 = 1 - beta1**at.step, 1 - beta2**at.step
    numbers = kernels.AdamNumbers(
        first_kept=1 - (1 - beta1),
        first_taken=1 - beta1,
        second_kept=1 - (1 - beta2),
        second_taken=1 - beta2,
        second_slope=2 * (1 - beta2),
        inverse_unbiased_first=1 / unbiased1,
        inverse_unbiased_second=1 / unbiased2,
        eps=at.number("eps"),
        mean_slope=(1 - beta1) / unbiased1,
        inverse_twice_unbiased_second=1 / (2 * unbiased2),
        lr=at.number("lr"),
    )
    return kernels.adam_slopes(gradient, at.state["exp_avg"], at.state["exp_avg_sq"], tangent, numbers)


def lion(at: UpdateContext, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Lion (arXiv:2302.06675), smoothed (ours): sign(c) -> c / sqrt(c^2 + s^2), s = LION_SMOOTHING * mean|c|.

    The state has the layout of lion-pytorch ("exp_avg").
    """
    beta1 = float(at.group["betas"][0])
    mixed = at.average("exp_avg", gradient, 1 - beta1)
    size = mixed.abs().mean()
    # In units of s, so that no square underflows.
    relative = mixed / (LION_SMOOTHING * torch.where(size > 0, size, 1))
    return at.number("lr") * relative / (1 + relative.square()).sqrt(), (size > 0).expand_as(mixed)


def muon(at: UpdateContext, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """torch.optim.Muon, for weights of two dimensions.

    Its own step runs the Newton-Schulz iteration in BF16; here it runs in the gradient's dtype (our model of it).
    """
    momentum = at.number("momentum")
    moved = at.average("momentum_buffer", gradient, 1 - momentum)
    if at.group["nesterov"]:
        moved = (1 - momentum) * gradient + momentum * moved
    update = _newton_schulz(moved, at.group["ns_coefficients"], at.group["ns_steps"], at.number("eps"))
    rows, columns = gradient.shape
    adjust = at.group["adjust_lr_fn"]
    factor = max(1, rows / columns) ** 0.5 if adjust in (None, "original") else 0.2 * max(rows, columns) ** 0.5
    return at.number("lr") * factor * update, torch.ones_like(gradient, dtype=torch.bool)


def _newton_schulz(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Returns the Newton-Schulz iterate of torch's Muon, close to the nearest semi-orthogonal matrix."""
    a, b, c = coefficients
    wide = matrix.t() if matrix.shape[0] > matrix.shape[1] else matrix
    wide = wide / torch.linalg.vector_norm(wide).clamp(min=eps)
    for _ in range(steps):
        gram = wide @ wide.t()
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide.t() if matrix.shape[0] > matrix.shape[1] else wide


def adafactor(at: UpdateContext, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """torch.optim.Adafactor: averages of squares per element of a vector, per row and column of a matrix."""
    floor, least_size = at.group["eps"]
    floor = torch.finfo(at.parameter.dtype).eps if floor is None else float(floor)
    rate = min(at.number("lr"), at.step**-0.5) * max(float(least_size), at.rms_of_parameter())
    taken = at.step ** at.number("beta2_decay")
    squares = gradient.square()
    if gradient.dim() > 1:
        row = at.average("row_var", squares.mean(-1, keepdim=True), taken)
        column = at.average("col_var", squares.mean(-2, keepdim=True), taken)
        touched = (row > 0) & (column > 0)
        second = row * column / row.mean(-2, keepdim=True).clamp(min=floor)
    else:
        second = at.average("variance", squares, taken)
        touched = second > 0
    # 1 where nothing was ever seen, so that no derivative is 0 * infinity there.
    second = torch.where(touched, second, 1).clamp(min=floor * floor)
    return rate * _clipped(gradient * second.rsqrt(), at.number("d")), touched


def adafactor_of_transformers(at: UpdateContext, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """transformers.optimization.Adafactor with all its options."""
    group, step = at.group, at.step
    floor, least_size = (float(eps) for eps in group["eps"])
    if group["relative_step"]:
        rate = min(1e-6 * step if group["warmup_init"] else 1e-2, step**-0.5)
    else:
        rate = at.number("lr")
    if group["scale_parameter"]:
        rate *= max(least_size, at.rms_of_parameter())
    taken = step ** at.number("decay_rate")
    squares = gradient.square() + floor
    # An average of little but the floor has seen no gradient.
    if gradient.dim() > 1:
        row = at.average("exp_avg_sq_row", squares.mean(-1), taken).unsqueeze(-1)
        column = at.average("exp_avg_sq_col", squares.mean(-2), taken).unsqueeze(-2)
        seen = (row > 10 * floor) & (column > 10 * floor)
        scale = torch.where(row > 10 * floor, row / row.mean(-2, keepdim=True), 1).rsqrt()
        scale = scale * torch.where(column > 10 * floor, column, 1).rsqrt()
    else:
        second = at.average("exp_avg_sq", squares, taken)
        seen = second > 10 * floor
        # Smaller ones, to the power -3/2, are beyond FP32.
        scale = torch.where(second > 1e-25, second, 1).rsqrt()
    update = rate * _clipped(gradient * scale, at.number("clip_threshold"))
    if group["beta1"] is not None:
        update = at.average("exp_avg", update, 1 - at.number("beta1"))
    return update, seen


def _clipped(update: Tensor, threshold: float) -> Tensor:
    """Returns the update, scaled down to a root mean square of at most the threshold."""
    return update / (_rms(update) / threshold).clamp(min=1)


def _rms(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor) / math.sqrt(tensor.numel())


def schedule_free_sgd(at: UpdateContext, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """SGDScheduleFree."""
    rate = _rate_of_y(at, _warmed_up(at), at.number("momentum"))
    return rate * gradient, torch.full_like(gradient, rate), torch.ones_like(gradient, dtype=torch.bool)


def schedule_free_adamw(at: UpdateContext, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """AdamWScheduleFree."""
    return _schedule_free_step(at, gradient, _rate_of_y(at, _warmed_up(at), float(at.group["betas"][0])))


def schedule_free_radam(at: UpdateContext, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """RAdamScheduleFree: SGD, or no step at all, until the average of squares has enough terms."""
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
        return _schedule_free_step(at, gradient, rate)
    return rate * gradient, torch.full_like(gradient, rate), torch.ones_like(gradient, dtype=torch.bool)


def _schedule_free_step(at: UpdateContext, gradient: Tensor, rate: float) -> tuple[Tensor, Tensor, Tensor]:
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


def _warmed_up(at: UpdateContext) -> float:
    """Returns the learning rate of the step."""
    done, steps = float(at.group["k"]), float(at.group["warmup_steps"])
    return at.number("lr") * ((done + 1) / steps if done < steps else 1.0)


def _rate_of_y(at: UpdateContext, rate: float, momentum: float) -> float:
    """Returns the factor of the base optimizer's direction in y's step, given z's factor `rate`."""
    largest = max(rate, at.number("lr_max"))
    weight = (float(at.group["k"]) + 1) ** at.number("r") * largest ** at.number("weight_lr_power")
    total = at.number("weight_sum") + weight
    taken = weight / total if total > 0 else 0.0
    return rate * (1 - momentum * (1 - taken))


def stable_adamw(at: UpdateContext, gradient: Tensor) -> tuple[Tensor, Tensor]:
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


Elementwise = Callable[[UpdateContext, Tensor], tuple[Tensor, Tensor, Tensor]]
Autograd = Callable[[UpdateContext, Tensor], tuple[Tensor, Tensor]]
Slopes = Callable[[UpdateContext, Tensor, Tensor], Tensor | None]
_adamw = partial(adam, decoupled=True)

# By package and class, so that transformers and torchao need not be imported.
ELEMENTWISE: Mapping[str, Elementwise] = {
    "torch.SGD": sgd,
    "torch.Adam": adam,
    "torch.AdamW": _adamw,
    **{f"torchao.Adam{bits}": adam for bits in ("8bit", "4bit", "Fp8")},
    **{f"torchao.AdamW{bits}": _adamw for bits in ("8bit", "4bit", "Fp8")},
    "schedulefree.AdamWScheduleFree": schedule_free_adamw,
    "schedulefree.RAdamScheduleFree": schedule_free_radam,
    "schedulefree.SGDScheduleFree": schedule_free_sgd,
}
# Rules whose derivative may come from a kernel.
SLOPES: Mapping[Elementwise, Slopes] = {adam: adam_slopes, _adamw: partial(adam_slopes, decoupled=True)}
AUTOGRAD: Mapping[str, Autograd] = {
    "torch.Adafactor": adafactor,
    "torch.Muon": muon,
    "transformers.Adafactor": adafactor_of_transformers,
    # No library that we require has one; `response.check_optimizer` tries whether a class of this name is Lion.
    "Lion": lion,
    "optimi.StableAdamW": stable_adamw,
}
