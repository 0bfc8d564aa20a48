"""Sensitivity of an optimizer's next update to the gradient: h(g), and products with its derivative.

The weight divergence asks how far a changed gradient moves the next update. Three ways to know it (docs/optimizers.md):

analytic   elementwise rules, of Adam and its kin
autograd   rules that are not elementwise, as torch functions
numerical  any other elementwise `torch.optim.Optimizer`: differences of its own step, on copies

Wrappers such as Accelerate's are unwrapped, and combinations of several optimizers are taken apart. Weight decay that
does not depend on the gradient may be part of h or not: it drops out of differences and derivatives.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from ..parallel.sharding import is_sharded
from ..text import WITHOUT_PROBE
from . import bitsandbytes_states, low_rank, update_rules
from .own_step import SHAPES, own_step, trial
from .update_rules import SLOPES, Autograd, Elementwise, UpdateContext, lion

logger = logging.getLogger(__name__)

ELEMENTWISE: Mapping[str, Elementwise] = {**update_rules.ELEMENTWISE, **bitsandbytes_states.ELEMENTWISE}
AUTOGRAD: Mapping[str, Autograd] = {**update_rules.AUTOGRAD, **bitsandbytes_states.AUTOGRAD, **low_rank.AUTOGRAD}
DEFAULT = "adamw_torch' or 'adamw_torch_fused"
"""Values of the Trainer's `optim` that always work."""

# Packages whose rules are tested with the versions that snip-hf supports.
_TESTED_PACKAGES = ("torch", "torchao", "transformers")
# Packages in which several modules have classes of one name.
_BY_MODULE = ("galore_torch", "apollo_torch")
# Packages whose states cannot be sharded: not one number per element, or held elsewhere.
_UNSHARDED = ("bitsandbytes", "galore_torch", "apollo_torch")
_IN_BACKWARD = "it updates weights within the backward pass, so that the gradients of a step are never there together"
_NO_FP64 = "no rule describes it, and its kernels take no FP64, in which differences of its steps are taken"
_LITTLE_MEMORY = "adafactor' or 'paged_adamw_8bit', which need little memory too, or '" + DEFAULT
_REFUSED: Mapping[str, tuple[str, str]] = {
    "lomo_optim.Lomo": (_IN_BACKWARD, _LITTLE_MEMORY),
    "lomo_optim.AdaLomo": (_IN_BACKWARD, _LITTLE_MEMORY),
    "transformers.LayerWiseDummyOptimizer": (_IN_BACKWARD, "galore_adamw' or 'apollo_adamw"),
    "grokadamw.GrokAdamW": ("it keeps its states outside the optimizer's state", DEFAULT),
    "galore_torch.adamw8bit.AdamW8bit": (
        "it gives bitsandbytes the arguments of an old version, which now mean max_unorm=100 and skip_zeros=True",
        "galore_adamw' or 'adamw_8bit",
    ),
}
# Step of numerical differences, relative to the gradient's element and to the root mean square of all elements.
RELATIVE_STEP = 1e-3
LEAST_STEP = 1e-5
# If the slope over half the distance differs by more than this part, the update has a jump there.
SMOOTH = 0.25
# Optimizers that passed: a refresh neither tries nor logs them again.
_tried: WeakSet[torch.optim.Optimizer] = WeakSet()


@dataclass(frozen=True)
class Response(ABC):
    """The update that one parameter is about to get, as a function h of its gradient; J = dh/dg.

    All arguments and results have the parameter's shape; results are FP32. h is the amount that the step subtracts, in
    the parameter's units. Nothing is written, and nothing is kept between calls.
    """

    at: UpdateContext

    @property
    def is_spread(self) -> bool:
        """True if its context is spread over ranks, so that `gathered` is collective."""
        return is_sharded(self.at.parameter)

    def gathered(self) -> Response:
        """Returns the response of the whole parameter: itself, or a gathered one (collective) if it is sharded."""
        return replace(self, at=self.at.gathered()) if self.is_spread else self

    def of_own_part(self) -> Response | None:
        """Returns the response of this process's part of the parameter; None if it depends on the rest."""
        return None

    @abstractmethod
    def update(self, gradient: Tensor) -> Tensor:
        """Returns h(gradient)."""

    @abstractmethod
    def pushforward(self, gradient: Tensor, tangent: Tensor) -> Tensor:
        """Returns J tangent, with J at `gradient`; elements that are not `meaningful` are 0 and count as 0."""

    def linearized(self, gradient: Tensor) -> Callable[[Tensor], Tensor]:
        """Returns tangent -> J tangent, as `pushforward`; cheaper for several tangents."""
        return partial(self.pushforward, gradient)

    @abstractmethod
    def pullback(self, gradient: Tensor, cotangent: Tensor) -> Tensor:
        """Returns J^T cotangent, with J at `gradient`; elements that are not `meaningful` are 0 and count as 0."""

    @abstractmethod
    def meaningful(self, gradient: Tensor) -> Tensor:
        """Returns a mask of the elements with a meaningful J: they have seen gradients, and h has no jump there."""


class ElementwiseResponse(Response):
    """J is diagonal."""

    @abstractmethod
    def _slope(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Returns h'(gradient), 0 if not meaningful, and the mask of meaningful elements."""

    def pushforward(self, gradient: Tensor, tangent: Tensor) -> Tensor:
        return self._slope(gradient)[0] * tangent.to(torch.float32)

    def pullback(self, gradient: Tensor, cotangent: Tensor) -> Tensor:
        return self.pushforward(gradient, cotangent)

    def meaningful(self, gradient: Tensor) -> Tensor:
        return self._slope(gradient)[1]


@dataclass(frozen=True)
class AnalyticResponse(ElementwiseResponse):
    rule: Elementwise

    def of_own_part(self) -> Response:
        return replace(self, at=self.at.of_own_part())

    def update(self, gradient: Tensor) -> Tensor:
        return self.rule(self.at, self.at.signed(gradient.to(torch.float32)))[0]

    def pushforward(self, gradient: Tensor, tangent: Tensor) -> Tensor:
        fused = SLOPES.get(self.rule)
        found = None if fused is None else fused(self.at, gradient, tangent)
        return super().pushforward(gradient, tangent) if found is None else found

    def _slope(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        _, slope, meaningful = self.rule(self.at, self.at.signed(gradient.to(torch.float32)))
        return self.at.signed(slope), meaningful


@dataclass(frozen=True)
class _Automatic(Response):
    """J by autograd. An element that is not meaningful has gradient 0 and so does not move others."""

    rule: Autograd

    def _evaluate(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return self.rule(self.at, self.at.signed(gradient))

    def update(self, gradient: Tensor) -> Tensor:
        return self._evaluate(gradient.to(torch.float32))[0]

    def pushforward(self, gradient: Tensor, tangent: Tensor) -> Tensor:
        return self.linearized(gradient)(tangent)

    def linearized(self, gradient: Tensor) -> Callable[[Tensor], Tensor]:
        transposed, meaningful = self._transposed(gradient)
        # J is the transpose of the linear map J^T. (torch.func.jvp would import more, with warnings.)
        forward = torch.func.vjp(transposed, torch.zeros_like(meaningful, dtype=torch.float32))[1]
        return lambda tangent: torch.where(meaningful, forward(tangent.to(torch.float32))[0], 0)

    def pullback(self, gradient: Tensor, cotangent: Tensor) -> Tensor:
        transposed, meaningful = self._transposed(gradient)
        return torch.where(meaningful, transposed(cotangent.to(torch.float32)), 0)

    def _transposed(self, gradient: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor]:
        """Returns cotangent -> J^T cotangent, and the mask of meaningful elements."""
        at = gradient.to(torch.float32)
        _, pull, meaningful = torch.func.vjp(self._evaluate, at, has_aux=True)  # type: ignore[misc]
        return lambda cotangent: pull(cotangent)[0], meaningful

    def meaningful(self, gradient: Tensor) -> Tensor:
        return self._evaluate(gradient.to(torch.float32))[1]


@dataclass(frozen=True)
class _Numerical(ElementwiseResponse):
    """Differences of the optimizer's own steps, taken on copies in FP64."""

    optimizer: torch.optim.Optimizer

    def update(self, gradient: Tensor) -> Tensor:
        return self._update_fp64(gradient.to(torch.float64)).to(torch.float32)

    def _update_fp64(self, gradient: Tensor) -> Tensor:
        return own_step(self.optimizer, self.at, gradient)[0]

    def _slope(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        at = gradient.to(torch.float64)
        # An all-zero gradient has no scale.
        step = RELATIVE_STEP * at.abs() + LEAST_STEP * (float(at.square().mean().sqrt()) or 1e-5)
        wide, narrow = (
            (self._update_fp64(at + part * step) - self._update_fp64(at - part * step)) / (2 * part * step)
            for part in (1.0, 0.5)
        )
        meaningful = (wide - narrow).abs() <= SMOOTH * torch.maximum(wide.abs(), narrow.abs())
        # Richardson's extrapolation removes the error of order step^2.
        slope = torch.where(meaningful, (4 * narrow - wide) / 3, 0)
        return slope.to(torch.float32), meaningful


def responses(
    optimizer: torch.optim.Optimizer | None, parameters: Mapping[str, Tensor], of_gradients: bool = False
) -> dict[str, Response]:
    """Returns name -> `Response` for every parameter that the optimizer updates; frozen ones are left out.

    Args:
        optimizer: as in `check_optimizer`, in the state before its next step; None means plain SGD, lr 1.
        parameters: the weights asked about, by name, as the model stores them; optimizers with an elementwise rule take
            any shape, the others matrices.
        of_gradients: returns `gradient_itself` for each.

    Raises:
        TypeError: an optimizer whose update this module cannot differentiate.
    """
    if optimizer is None:
        trained = dict.fromkeys(parameter for parameter in parameters.values() if parameter.requires_grad)
        optimizer = torch.optim.SGD(list(trained) or [torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    parts = check_optimizer(optimizer)
    groups = {id(one): (part, group) for part in parts for group in part.param_groups for one in group["params"]}
    found = {}
    for name, parameter in parameters.items():
        if id(parameter) in groups and parameter.requires_grad:
            part, group = groups[id(parameter)]
            answer = gradient_itself(parameter) if of_gradients else _response(part, context_of(part, group, parameter))
            found[name] = answer
    return _with_steps(found)


def gradient_itself(parameter: Tensor) -> Response:
    """Returns the response of an update that is the gradient."""
    return AnalyticResponse(UpdateContext({}, {}, parameter.detach()), update_rules.gradient_itself)


def _with_steps(responses: dict[str, Response]) -> dict[str, Response]:
    """Returns responses with their step numbers on the host; fused optimizers hold them on the device.

    They are read once for all responses: each rule that reads its own would wait for the device.
    """
    held = {
        name: step
        for name, response in responses.items()
        if isinstance(response, AnalyticResponse) and type(step := response.at.state.get("step")) is Tensor
    }
    if not held:
        return responses
    device = next(iter(held.values())).device
    steps = torch.stack([step.reshape(()).to(device, torch.float64) for step in held.values()]).tolist()
    for name, step in zip(held, steps, strict=True):
        at = responses[name].at
        responses[name] = replace(responses[name], at=replace(at, state={**at.state, "step": step}))
    return responses


def trained_by(optimizer: Any) -> Callable[[Tensor], bool]:
    """Returns parameter -> True if the optimizer (as in `responses`) updates it."""
    if optimizer is None:
        return lambda parameter: parameter.requires_grad
    parts = check_optimizer(optimizer)
    held = {id(parameter) for part in parts for group in part.param_groups for parameter in group["params"]}
    return lambda parameter: parameter.requires_grad and id(parameter) in held


def _response(optimizer: torch.optim.Optimizer, at: UpdateContext) -> Response:
    rule = rule_name(type(optimizer))
    if rule in ELEMENTWISE:
        return AnalyticResponse(at, ELEMENTWISE[rule])
    return _Automatic(at, AUTOGRAD[rule]) if rule in AUTOGRAD else _Numerical(at, optimizer)


def check_optimizer(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Returns the torch optimizers inside any wrappers, and logs once how their updates are differentiated.

    An optimizer without a rule is tried on throwaway weights, with the hyperparameters of every group: its update of an
    element must depend on that element's gradient and on no other. For packages that are not tested with every version,
    the step on such weights must match the rule.

    Raises:
        TypeError: the update of one of them cannot be differentiated.
    """
    parts = parts_of(optimizer)
    for part in parts:
        _check(part)
    return parts


def _check(optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise _refusal(optimizer, "it is not a torch.optim.Optimizer")
    if optimizer in _tried:
        return
    if refused := refusal(optimizer):
        raise _refusal(optimizer, *refused)
    kind = type(optimizer)
    if is_tried(kind):
        for group in optimizer.param_groups:
            for shape in SHAPES if group["params"] else ():
                try:
                    reason = _try(optimizer, group, shape)
                except Exception as error:
                    raise _refusal(optimizer, f"its step on a copy failed ({type(error).__name__}: {error})") from error
                if reason:
                    raise _refusal(optimizer, reason)
    logger.info("snip-hf: the update of %s is differentiated by the %s rule.", shown_name(kind), differentiation(kind))
    _tried.add(optimizer)


def _refusal(optimizer: Any, reason: str, instead: str = DEFAULT) -> TypeError:
    return TypeError(
        f"Cannot differentiate the update of {type(optimizer).__module__}.{type(optimizer).__name__}: {reason}. "
        "Expected an optimizer that docs/optimizers.md lists, or one whose update of an element depends on that "
        f"element's gradient only. Use one of these (Trainer: optim='{instead}'), or {WITHOUT_PROBE}."
    )


def _try(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], shape: tuple[int, int]) -> str | None:
    """Returns why the optimizer's own step on a throwaway weight cannot be differentiated; None if it can."""
    if differentiation(type(optimizer)) == "numerical":
        return _not_elementwise(optimizer, group, shape)
    # Kernels of several packages need FP32.
    at, gradients = trial(optimizer, group, shape, torch.float32)
    # Decoupled weight decay drops out of the difference; coupled decay would flip some of Lion's signs.
    before, after = (own_step(optimizer, at, gradient)[0] for gradient in gradients)
    if AUTOGRAD.get(rule_name(type(optimizer))) in (lion, bitsandbytes_states.smoothed_lion):
        return _no_lion(at, gradients, after - before)
    answer = _response(optimizer, at)
    expected = answer.update(gradients[1]) - answer.update(gradients[0])
    if not torch.allclose(after - before, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())):
        return "its step is not the one that its rule describes; its package may be of a version that steps otherwise"
    return None


def _not_elementwise(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], shape: tuple[int, int]) -> str | None:
    """Returns why the optimizer's own step cannot be differentiated element by element; None if it can."""
    at, (gradient, _) = trial(optimizer, group, shape, torch.float64)
    in_fp32, (gradient_fp32, _) = trial(optimizer, group, shape, torch.float32)
    answer = _Numerical(at, optimizer)
    if not torch.allclose(
        answer.update(gradient), own_step(optimizer, in_fp32, gradient_fp32)[0], rtol=0.01, atol=1e-5
    ):
        return "its step in FP64 is not the one that it takes in FP32"
    moved = torch.arange(gradient.numel(), device=gradient.device).view_as(gradient) % 3 == 0
    before, after = answer.update(gradient), answer.update(torch.where(moved, 1.5 * gradient, gradient))
    if not torch.allclose(before[~moved], after[~moved], rtol=1e-5, atol=1e-6 * float(before.abs().max())):
        return "its update of one element depends on the gradients of others"
    if not answer.pushforward(gradient, torch.ones_like(gradient)).any():
        return "its update does not depend on the size of the gradient"
    return None


def _no_lion(at: UpdateContext, gradients: tuple[Tensor, Tensor], change: Tensor) -> str | None:
    """Returns why `update_rules.lion` does not describe an optimizer; None if it does.

    Args:
        at: a weight's context.
        gradients: two gradients.
        change: of the optimizer's own step, from the first gradient to the second.
    """
    at = bitsandbytes_states.unpacked(at) if "state1" in at.state else at
    momentum = at.state.get("exp_avg")
    if momentum is None or momentum.dtype != torch.float32:
        return "it is named Lion but holds no momentum in full precision as state 'exp_avg'"
    beta1 = float(at.group["betas"][0])
    before, after = (torch.sign(beta1 * momentum + (1 - beta1) * gradient) for gradient in gradients)
    if not torch.allclose(change / at.number("lr"), after - before, atol=0.1):
        return "it is named Lion but does not subtract lr * sign(beta1 * momentum + (1 - beta1) * gradient)"
    return None


def rule_name(kind: type) -> str:
    """Returns the key of this class in `ELEMENTWISE` or `AUTOGRAD`, if it has one."""
    package = kind.__module__.split(".")[0]
    if kind.__name__ == "Lion" and package != "bitsandbytes":
        return "Lion"
    return f"{kind.__module__ if package in _BY_MODULE else package}.{kind.__qualname__}"


def shown_name(kind: type) -> str:
    """Returns the name of this class for messages: with its package, except for torch's own."""
    return rule_name(kind).removeprefix("torch.")


def differentiation(kind: type) -> str:
    """Returns how the updates of this class are differentiated: "analytic", "autograd" or "numerical"."""
    name = rule_name(kind)
    return "analytic" if name in ELEMENTWISE else "autograd" if name in AUTOGRAD else "numerical"


def is_tried(kind: type) -> bool:
    """Returns True if the step of this class is compared at the start with its rule."""
    name = rule_name(kind)
    return name.split(".")[0] not in _TESTED_PACKAGES or differentiation(kind) == "numerical"


def refusal(optimizer: Any) -> tuple[str, str] | None:
    """Returns why this optimizer is refused, and values of the Trainer's `optim` to use instead; None if it is not."""
    kind = type(optimizer)
    name, package = rule_name(kind), kind.__module__.split(".")[0]
    if name in _REFUSED:
        return _REFUSED[name]
    if differentiation(kind) == "numerical":
        return (_NO_FP64, "adamw_8bit' or 'adamw_torch") if package == "bitsandbytes" else None
    if package in _UNSHARDED and any(is_sharded(one) for group in optimizer.param_groups for one in group["params"]):
        return "its states cannot be put together where FSDP2 shards the weights", DEFAULT
    reason = None
    if package == "bitsandbytes":
        reason = bitsandbytes_states.refusal(optimizer)
    elif any(group.get("gradient_release") for group in optimizer.param_groups):  # StableAdamW
        reason = "with gradient_release it steps within the backward pass"
    return None if reason is None else (reason, DEFAULT)


def context_of(optimizer: Any, group: Mapping[str, Any], parameter: Tensor) -> UpdateContext:
    """Returns the context of the next update of a parameter of this group."""
    if rule_name(type(optimizer)).startswith("bitsandbytes."):
        return bitsandbytes_states.context_of(optimizer, group, parameter)
    return UpdateContext(group, optimizer.state.get(parameter, {}), parameter.detach())


def parts_of(optimizer: Any) -> list[Any]:
    """Returns the torch optimizers that take the steps; an unknown object is returned as it is.

    Unwraps wrappers (`.optimizer`, as Accelerate's), lists, tuples and dicts of optimizers, and objects that hold such
    a collection as `.optimizers`, e.g. Muon for matrices and AdamW for the rest.
    """
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    several = optimizer if isinstance(optimizer, list | tuple | dict) else getattr(optimizer, "optimizers", None)
    if isinstance(several, Mapping):
        several = list(several.values())
    if not isinstance(several, list | tuple):
        return [optimizer]
    return [part for one in several for part in parts_of(one)]


def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    """Returns the parameter groups of all parts."""
    return [group for part in parts_of(optimizer) for group in part.param_groups]
