"""Sensitivity of an optimizer's next update to the gradient: h(g), and products with its derivative.

The weight divergence asks how far a changed gradient moves the next update. Three ways to know it (docs/method.md):

analytic   Adam, AdamW (torch's with foreach, fused and capturable states; torchao's 8-bit, 4-bit and FP8) and SGD
autograd   torch's and transformers' Adafactor, torch's Muon, Lion (smoothed): not elementwise
numerical  any other elementwise `torch.optim.Optimizer`: differences of its own step, on copies

Wrappers such as Accelerate's are looked through. Weight decay that does not depend on the gradient may be part of h or
not: it drops out of differences and derivatives.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..parallel.sharding import is_sharded
from ..text import WITHOUT_PROBE
from .update_rules import AUTOGRAD, ELEMENTWISE, Autograd, Elementwise, Situation, own_step, rule_name

logger = logging.getLogger(__name__)

# Numerical steps: this part of the gradient's element, and this part of the root mean square of all elements.
RELATIVE_STEP = 1e-3
LEAST_STEP = 1e-5
# Two slopes that differ by more than this part, one taken over half the distance of the other, are those of a jump.
SMOOTH = 0.25
# Some optimizers treat small weights in another way (8-bit states from 4,096 elements on).
_TRIAL_SHAPES = ((8, 12), (64, 64))
# Optimizers that passed, with the number of their groups then: a refresh neither tries nor logs them again.
_tried: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()


@dataclass(frozen=True)
class Response(ABC):
    """The update that one parameter is about to get, as a function h of its gradient; J = dh/dg.

    All arguments and results have the parameter's shape; results are FP32. h is the amount that the step subtracts, in
    the parameter's units. Nothing is written, and nothing is kept between calls.
    """

    at: Situation

    @property
    def is_spread(self) -> bool:
        """Whether the ranks have to put together what it knows: `gathered` is collective."""
        return is_sharded(self.at.parameter)

    def gathered(self) -> Response:
        """Returns the response of the whole parameter where it is sharded; collective there, itself elsewhere."""
        return replace(self, at=self.at.gathered()) if self.is_spread else self

    def of_own_part(self) -> Response | None:
        """Returns the response of what this process holds of the parameter; None where that depends on the rest."""
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
        """Returns where J means something (bool): not where no gradient was ever seen, and not at a jump of h."""


class ElementwiseResponse(Response):
    """J is diagonal."""

    @abstractmethod
    def _slope(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Returns h'(gradient), 0 where it is not meaningful, and where it is."""

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

    def _slope(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        _, slope, meaningful = self.rule(self.at, self.at.signed(gradient.to(torch.float32)))
        return self.at.signed(slope), meaningful


@dataclass(frozen=True)
class _Automatic(Response):
    """J of a function, by autograd. An element that is not meaningful has gradient 0 and so does not move others."""

    rule: Autograd

    def _evaluate(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return self.rule(self.at, self.at.signed(gradient))

    def update(self, gradient: Tensor) -> Tensor:
        return self._evaluate(gradient.to(torch.float32))[0]

    def pushforward(self, gradient: Tensor, tangent: Tensor) -> Tensor:
        return self.linearized(gradient)(tangent)

    def linearized(self, gradient: Tensor) -> Callable[[Tensor], Tensor]:
        transposed, meaningful = self._transposed(gradient)
        # J is the transpose of the linear map J^T. (torch.func.jvp would load, with warnings, what is not needed here.)
        forward = torch.func.vjp(transposed, torch.zeros_like(meaningful, dtype=torch.float32))[1]
        return lambda tangent: torch.where(meaningful, forward(tangent.to(torch.float32))[0], 0)

    def pullback(self, gradient: Tensor, cotangent: Tensor) -> Tensor:
        transposed, meaningful = self._transposed(gradient)
        return torch.where(meaningful, transposed(cotangent.to(torch.float32)), 0)

    def _transposed(self, gradient: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor]:
        """Returns cotangent -> J^T cotangent, and where it is meaningful."""
        at = gradient.to(torch.float32)
        _, pull, meaningful = torch.func.vjp(self._evaluate, at, has_aux=True)  # type: ignore[misc]
        return lambda cotangent: pull(cotangent)[0], meaningful

    def meaningful(self, gradient: Tensor) -> Tensor:
        return self._evaluate(gradient.to(torch.float32))[1]


@dataclass(frozen=True)
class _Numerical(ElementwiseResponse):
    """Steps of the optimizer's own, taken in FP64 with copies."""

    optimizer: torch.optim.Optimizer

    def update(self, gradient: Tensor) -> Tensor:
        return self._update_fp64(gradient.to(torch.float64)).to(torch.float32)

    def _update_fp64(self, gradient: Tensor) -> Tensor:
        return own_step(self.optimizer, self.at, gradient)[0]

    def _slope(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        at = gradient.to(torch.float64)
        # An all-zero gradient has no size to go by.
        step = RELATIVE_STEP * at.abs() + LEAST_STEP * (float(at.square().mean().sqrt()) or 1e-5)
        wide, narrow = (
            (self._update_fp64(at + part * step) - self._update_fp64(at - part * step)) / (2 * part * step)
            for part in (1.0, 0.5)
        )
        meaningful = (wide - narrow).abs() <= SMOOTH * torch.maximum(wide.abs(), narrow.abs())
        # Richardson's extrapolation takes the error of order step^2 out.
        slope = torch.where(meaningful, (4 * narrow - wide) / 3, 0)
        return slope.to(torch.float32), meaningful


def responses(optimizer: torch.optim.Optimizer | None, parameters: Mapping[str, Tensor]) -> dict[str, Response]:
    """Returns name -> `Response` for every parameter that the optimizer updates; frozen ones are left out.

    Args:
        optimizer: as in `check_optimizer`, in the state before its next step; None means plain SGD, lr 1.
        parameters: the weights asked about, by name, as the model stores them; optimizers with an elementwise rule take
            any shape, the others matrices.

    Raises:
        TypeError: an optimizer whose update this module cannot differentiate.
    """
    if optimizer is None:
        trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained or [torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    inner = check_optimizer(optimizer)
    groups = {id(parameter): group for group in inner.param_groups for parameter in group["params"]}
    return {
        name: _response(inner, Situation(groups[id(parameter)], inner.state.get(parameter, {}), parameter.detach()))
        for name, parameter in parameters.items()
        if id(parameter) in groups and parameter.requires_grad
    }


def trained_by(optimizer: torch.optim.Optimizer | None) -> Callable[[Tensor], bool]:
    """Returns what tells whether an optimizer, as `responses` takes it, updates a parameter."""
    if optimizer is None:
        return lambda parameter: parameter.requires_grad
    groups = check_optimizer(optimizer).param_groups
    held = {id(parameter) for group in groups for parameter in group["params"]}
    return lambda parameter: parameter.requires_grad and id(parameter) in held


def _response(optimizer: torch.optim.Optimizer, at: Situation) -> Response:
    rule = rule_name(type(optimizer))
    if rule in ELEMENTWISE:
        return AnalyticResponse(at, ELEMENTWISE[rule])
    return _Automatic(at, AUTOGRAD[rule]) if rule in AUTOGRAD else _Numerical(at, optimizer)


def check_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Returns the torch optimizer inside any wrappers, and logs once how its update is differentiated.

    An optimizer without a rule is tried on throwaway weights, with the hyperparameters of every group: its update of an
    element must depend on the size of that element's gradient and on no other. A class named Lion is tried too.

    Raises:
        TypeError: it is not one whose update can be differentiated here.
    """
    inner = optimizer
    while hasattr(inner, "optimizer"):
        inner = inner.optimizer
    if not isinstance(inner, torch.optim.Optimizer):
        raise _refusal(inner, "it is no torch.optim.Optimizer")
    if _tried.get(inner) == len(inner.param_groups):
        return inner
    rule = rule_name(type(inner))
    if rule == "Lion" or (rule not in ELEMENTWISE and rule not in AUTOGRAD):
        for group in inner.param_groups:
            for shape in _TRIAL_SHAPES if group["params"] else ():
                try:
                    reason = (_no_lion if rule == "Lion" else _not_elementwise)(inner, group, shape)
                except Exception as error:
                    raise _refusal(inner, f"its step on a copy failed ({type(error).__name__}: {error})") from error
                if reason:
                    raise _refusal(inner, reason)
    if inner not in _tried:
        way = "analytic" if rule in ELEMENTWISE else "autograd" if rule in AUTOGRAD else "numerical"
        logger.info("snip-hf: the update of %s is differentiated by the %s rule.", type(inner).__name__, way)
    _tried[inner] = len(inner.param_groups)
    return inner


def _refusal(optimizer: Any, reason: str) -> TypeError:
    return TypeError(
        f"Cannot differentiate the update of {type(optimizer).__module__}.{type(optimizer).__name__}: {reason}. "
        "Expected AdamW, Adam, SGD, Adafactor or Muon of torch.optim, Adafactor of transformers, AdamW or Adam of "
        "torchao.optim, Lion, or an optimizer whose update of an element depends on that element's gradient alone. "
        f"Use one of these (Trainer: optim='adamw_torch' or 'adamw_torch_fused'), or {WITHOUT_PROBE}."
    )


def _not_elementwise(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], shape: tuple[int, int]) -> str | None:
    """Returns why the optimizer's own step cannot be differentiated element by element; None if it can."""
    at, (gradient, _) = _trial(optimizer, group, shape, torch.float64)
    in_fp32, (gradient_fp32, _) = _trial(optimizer, group, shape, torch.float32)
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


def _no_lion(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], shape: tuple[int, int]) -> str | None:
    """Returns why `rules.lion` does not describe a class named Lion; None if it does."""
    # FP32, which bitsandbytes' kernels need.
    at, (one, other) = _trial(optimizer, group, shape, torch.float32)
    momentum = at.state.get("exp_avg", at.state.get("state1"))
    if momentum is None or momentum.dtype != torch.float32:
        return "it is named Lion but holds no momentum in full precision as state 'exp_avg' or 'state1'"
    beta1 = float(at.group["betas"][0])
    signs = torch.sign(beta1 * momentum + (1 - beta1) * one) - torch.sign(beta1 * momentum + (1 - beta1) * other)
    # Decoupled weight decay drops out of the difference; coupled decay would turn some of the signs around.
    found = own_step(optimizer, at, one)[0] - own_step(optimizer, at, other)[0]
    if not torch.allclose(found / at.number("lr"), signs, atol=0.1):
        return "it is named Lion but does not subtract lr * sign(beta1 * momentum + (1 - beta1) * gradient)"
    return None


def _trial(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], shape: tuple[int, int], dtype: torch.dtype
) -> tuple[Situation, tuple[Tensor, Tensor]]:
    """Returns a throwaway weight's situation after two steps with a group's hyperparameters, and two more gradients."""
    device = group["params"][0].device
    generator = torch.Generator().manual_seed(0)
    weight, *draws = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(5))
    options = {key: value for key, value in group.items() if key != "params"}
    # A schedule may be at 0 now.
    options["lr"] = torch.ones_like(group["lr"]) if isinstance(group.get("lr"), Tensor) else 1.0
    at = Situation(options, _first_state(optimizer, options, weight), weight)
    for gradient in draws[:2]:
        at = Situation(options, own_step(optimizer, at, gradient)[1], at.parameter)
    return at, (draws[2], draws[3])


def _first_state(optimizer: torch.optim.Optimizer, options: Mapping[str, Any], weight: Tensor) -> dict[str, Any]:
    """Returns what the optimizer holds of a weight before its first step: nothing, but for torch's Adagrad."""
    if not isinstance(optimizer, torch.optim.Adagrad):
        return {}
    # It makes its state when it is built; newer versions make what is missing in the step, that of torch 2.11 does not.
    built = torch.optim.Adagrad(
        [weight], initial_accumulator_value=options["initial_accumulator_value"], fused=options["fused"]
    )
    return dict(built.state[weight])
