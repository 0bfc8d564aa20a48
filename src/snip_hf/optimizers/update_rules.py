"""The update rules of known optimizers: what one step subtracts from a weight, as a function of the gradient.

Rules are pure functions of the gradient, laid out as the model stores the weight, in the gradient's dtype; nothing is
written. An elementwise rule returns (update, slope, meaningful): h(g), h'(g) and where h' has a meaning. An autograd
rule returns (update, meaningful) and is differentiated with `torch.func`. Decoupled weight decay does not depend on the
gradient and is left out. For optimizers without a rule there is `own_step`.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ..kernels import adam_slopes as kernels
from ..numerics.random_state import RandomState
from ..parallel.sharding import own_part, whole
from ..python_state import Shared, binding_kept

# Lion's sign(c) becomes c / sqrt(c^2 + s^2) with s this part of mean|c| (ours; docs/method.md). For normal c, a change
# of c by 20% of its mean size (about what FP4 does to a gradient) is then first-order to 2%, and a quarter of all
# elements carries the sum of squares. With 0.1 that were 23% and 6% of the elements; larger ones are less of a sign.
LION_SMOOTHING = 0.5
# bitsandbytes' managers of all its optimizers.
_COMMON = ("GlobalOptimManager", "GlobalPageManager")
# Types of values that refer to no parameter.
_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)


@dataclass(frozen=True)
class Situation:
    """What a step knows besides the gradient: the parameter, its group, its state (empty before the first step)."""

    group: Mapping[str, Any]
    state: Mapping[str, Any]
    parameter: Tensor

    def gathered(self) -> Situation:
        """Returns the situation of the whole parameter; collective."""
        state = {key: whole(value) if isinstance(value, Tensor) else value for key, value in self.state.items()}
        return Situation(self.group, state, whole(self.parameter))

    def of_own_part(self) -> Situation:
        """Returns the situation of what this process holds of the parameter."""
        state = {key: own_part(value) if isinstance(value, Tensor) else value for key, value in self.state.items()}
        return Situation(self.group, state, own_part(self.parameter))

    def number(self, key: str) -> float:
        """Returns a hyperparameter that may be a tensor (capturable, torchao) as a float."""
        return float(self.group[key])

    @property
    def step(self) -> float:
        """The number of the step about to be taken, from 1."""
        return float(self.state.get("step", 0)) + 1

    def signed(self, gradient: Tensor) -> Tensor:
        """Returns the gradient of what is minimised."""
        return -gradient if self.group.get("maximize", False) else gradient

    def held(self, key: str, like: Tensor) -> Tensor:
        """Returns a state tensor, dequantized, in `like`'s dtype; zeros of its shape before the first step."""
        value = self.state.get(key)
        if value is None:
            return torch.zeros_like(like)
        dense: Tensor = value if type(value) is Tensor else value.dequantize()
        return dense.to(like.dtype)

    def average(self, key: str, new: Tensor, taken: float) -> Tensor:
        """Returns the running average of `key` after it has taken in that part of `new`."""
        return (1 - taken) * self.held(key, new) + taken * new

    def rms_of_parameter(self) -> float:
        return float(_rms(self.parameter.to(torch.float32)))


def sgd(at: Situation, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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


def adam(at: Situation, gradient: Tensor, decoupled: bool = False) -> tuple[Tensor, Tensor, Tensor]:
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


def adam_slopes(at: Situation, gradient: Tensor, tangent: Tensor, decoupled: bool = False) -> Tensor | None:
    """Returns h'(gradient) * tangent of `adam` from one kernel; None for tensors or options that it does not take."""
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


def lion(at: Situation, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Lion (arXiv:2302.06675), smoothed (ours): sign(c) -> c / sqrt(c^2 + s^2), s = LION_SMOOTHING * mean|c|.

    Of the layout that lion-pytorch has (state "exp_avg").
    """
    beta1 = float(at.group["betas"][0])
    mixed = at.average("exp_avg", gradient, 1 - beta1)
    size = mixed.abs().mean()
    # In units of s, so that no square underflows.
    relative = mixed / (LION_SMOOTHING * torch.where(size > 0, size, 1))
    return at.number("lr") * relative / (1 + relative.square()).sqrt(), (size > 0).expand_as(mixed)


def muon(at: Situation, gradient: Tensor) -> tuple[Tensor, Tensor]:
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
    """Returns the iterate that torch's Muon takes for the nearest semi-orthogonal matrix."""
    a, b, c = coefficients
    wide = matrix.t() if matrix.shape[0] > matrix.shape[1] else matrix
    wide = wide / _norm(wide).clamp(min=eps)
    for _ in range(steps):
        gram = wide @ wide.t()
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide.t() if matrix.shape[0] > matrix.shape[1] else wide


def adafactor(at: Situation, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """torch.optim.Adafactor. Of a vector's squares it keeps each, of a matrix's those of rows and columns."""
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


def adafactor_of_transformers(at: Situation, gradient: Tensor) -> tuple[Tensor, Tensor]:
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
    # An average that holds little but the floor has seen no gradient.
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
    """Returns the update, scaled down where its root mean square is above the threshold."""
    return update / (_rms(update) / threshold).clamp(min=1)


def _rms(tensor: Tensor) -> Tensor:
    return _norm(tensor) / math.sqrt(tensor.numel())


def _norm(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor)
    return norm


Elementwise = Callable[[Situation, Tensor], tuple[Tensor, Tensor, Tensor]]
Autograd = Callable[[Situation, Tensor], tuple[Tensor, Tensor]]
Slopes = Callable[[Situation, Tensor, Tensor], Tensor | None]
_adamw = partial(adam, decoupled=True)

# By package and class, so that transformers and torchao need not be imported.
ELEMENTWISE: Mapping[str, Elementwise] = {
    "torch.SGD": sgd,
    "torch.Adam": adam,
    "torch.AdamW": _adamw,
    **{f"torchao.Adam{bits}": adam for bits in ("8bit", "4bit", "Fp8")},
    **{f"torchao.AdamW{bits}": _adamw for bits in ("8bit", "4bit", "Fp8")},
}
# Rules whose derivative may come from a kernel.
SLOPES: Mapping[Elementwise, Slopes] = {adam: adam_slopes, _adamw: partial(adam_slopes, decoupled=True)}
AUTOGRAD: Mapping[str, Autograd] = {
    "torch.Adafactor": adafactor,
    "torch.Muon": muon,
    "transformers.Adafactor": adafactor_of_transformers,
    # No library that we require has one; `response.check_optimizer` tries whether a class of this name is Lion.
    "Lion": lion,
}


def own_step(optimizer: torch.optim.Optimizer, at: Situation, gradient: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Takes a step of the optimizer's own with copies of parameter, state and group, in the gradient's dtype.

    No hook sees it.

    Returns:
        What it subtracts from the parameter, and the state after it.
    """
    twin = object.__new__(type(optimizer))
    parameter = nn.Parameter(at.parameter.to(gradient.dtype, copy=True))
    parameter.grad = gradient.clone()
    # Whatever refers to the real optimizer refers to the copy.
    memo: dict[int, Any] = {id(optimizer): twin}
    # Hooks are not run, and a scheduler's wrapper around `step` would step the real one.
    own = {key: value for key, value in vars(optimizer).items() if key not in ("state", "param_groups", "step")}
    own |= {key: OrderedDict() for key in own if key.startswith("_optimizer_")}
    options = {key: value for key, value in at.group.items() if key != "params"}
    memo.update(_stand_ins(optimizer, [own, options, at.state]))
    memo[id(at.parameter)] = parameter
    # What all optimizers of a package have in common holds weights and states of all of them.
    memo.update((id(value), value) for value in own.values() if type(value).__name__ in _COMMON)
    for name, value in own.items():
        setattr(twin, name, copy.deepcopy(value, memo))
    twin.param_groups = [{**copy.deepcopy(options, memo), "params": [parameter]}]
    twin.state = defaultdict(dict)
    if at.state:
        twin.state[parameter] = {key: _copied(value, at.parameter, gradient, memo) for key, value in at.state.items()}
    random_state = RandomState.now()
    try:
        with _without_global_hooks():
            type(optimizer).step(twin)
        state = dict(twin.state[parameter])
    finally:
        random_state.restore()
    return at.parameter.to(gradient.dtype) - parameter.detach(), state


def _stand_ins(optimizer: torch.optim.Optimizer, copied: Sequence[Any]) -> dict[int, nn.Parameter]:
    """Returns the id of each parameter and buffer that an optimizer or a model that it holds has -> one without memory.

    So a copy of an optimizer that holds its model takes no memory for it, and can neither read nor write weights.

    Args:
        optimizer: has the parameters.
        copied: what is copied of it. If nothing in that can refer to a parameter, nothing is returned.
    """
    parts = [part for value in copied for part in _parts_in(value)]
    if all(isinstance(part, _PLAIN) or type(part) is Tensor for part in parts):
        return {}
    tensors = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for model in (part for part in parts if isinstance(part, nn.Module)):
        tensors += [*model.parameters(), *model.buffers()]
    return {id(one): nn.Parameter(torch.empty_like(one, device="meta"), one.requires_grad) for one in tensors}


def _parts_in(value: Any) -> Iterator[Any]:
    """Yields what plain containers hold, or the value if it is none."""
    if not isinstance(value, dict | list | tuple | set):
        yield value
        return
    for part in value.values() if isinstance(value, dict) else value:
        yield from _parts_in(part)


@contextmanager
def _unhooked() -> Iterator[None]:
    """Takes away the hooks that run before and after the steps of all optimizers."""
    every = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
    with binding_kept(every):
        for hooks in every:
            hooks.clear()
        yield


_without_global_hooks = Shared(_unhooked)


def _copied(value: Any, parameter: Tensor, gradient: Tensor, memo: dict[int, Any]) -> Any:
    """Returns a deep copy; tensors of numbers per element are cast as the parameter is, step counts are not."""
    copied = copy.deepcopy(value, memo)
    if isinstance(copied, Tensor) and copied.is_floating_point() and copied.shape == parameter.shape:
        return copied.to(gradient.dtype)
    return copied
