"""How the optimizer's next update answers to the gradient: h(g) and its derivative h'(g), elementwise.

The weight divergence asks how far a changed gradient moves the next update. Known are torch's Adam, AdamW (their
foreach, fused and capturable states too) and SGD; wrappers such as Accelerate's are looked through. Weight decay that
does not depend on the gradient is no part of h.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Response:
    """The update that one parameter is about to get, as a function of its gradient.

    `update` and `derivative` map a gradient (the parameter's shape, FP32) to h and h', of the same shape; h is the
    amount that the step subtracts, in the parameter's units.
    """

    kind: type[torch.optim.Optimizer]
    group: Mapping[str, Any]
    state: Mapping[str, Any]
    parameter: Tensor

    def update(self, gradient: Tensor) -> Tensor:
        """Returns h(gradient)."""
        return self._evaluate(gradient)[0]

    def derivative(self, gradient: Tensor) -> Tensor:
        """Returns h'(gradient); 0 where it has no meaning (an Adam element whose second moment is 0)."""
        return self._evaluate(gradient)[1]

    def _evaluate(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        sign = -1.0 if self.group["maximize"] else 1.0
        rule = self._sgd if self.kind is torch.optim.SGD else self._adam
        update, slope = rule(sign * gradient.to(torch.float32))
        return update, sign * slope

    def _sgd(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        group, lr, momentum = self.group, _number(self.group["lr"]), _number(self.group["momentum"])
        gradient = gradient + _number(group["weight_decay"]) * self.parameter
        buffer = self.state.get("momentum_buffer")
        # torch starts the buffer with the whole first gradient, without dampening.
        taken = 1.0 if buffer is None else 1.0 - _number(group["dampening"])
        moved = taken * gradient if buffer is None else momentum * buffer.to(torch.float32) + taken * gradient
        if momentum == 0:
            moved, slope = gradient, 1.0
        elif group["nesterov"]:
            moved, slope = gradient + momentum * moved, 1.0 + momentum * taken
        else:
            slope = taken
        return lr * moved, torch.full_like(gradient, lr * slope)

    def _adam(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        group, lr, eps = self.group, _number(self.group["lr"]), _number(self.group["eps"])
        beta1, beta2 = (_number(beta) for beta in group["betas"])
        if self.kind is torch.optim.Adam and not group.get("decoupled_weight_decay", False):
            gradient = gradient + _number(group["weight_decay"]) * self.parameter
        zeros = torch.zeros_like(gradient)
        step = _number(self.state.get("step", 0)) + 1
        first = beta1 * self.state.get("exp_avg", zeros).to(torch.float32) + (1 - beta1) * gradient
        second = beta2 * self.state.get("exp_avg_sq", zeros).to(torch.float32) + (1 - beta2) * gradient.square()
        # d second / d gradient
        second_slope = 2 * (1 - beta2) * gradient
        if group["amsgrad"]:
            largest = self.state.get("max_exp_avg_sq", zeros).to(torch.float32)
            second_slope = torch.where(second >= largest, second_slope, zeros)
            second = torch.maximum(second, largest)
        unbiased1, unbiased2 = 1 - beta1**step, 1 - beta2**step
        root = (second / unbiased2).sqrt_()
        divisor = root + eps
        mean = first / unbiased1
        # h = lr * mean / divisor; docs/method.md, section 3, guarded for elements that were never touched
        # (grouped so that nothing underflows: root * divisor^2 would be 0 for small gradients under a tiny eps)
        slope = ((1 - beta1) / unbiased1 - mean / divisor * (second_slope / (2 * unbiased2) / root)) / divisor
        return lr * mean / divisor, torch.where(second > 0, lr * slope, zeros)


def responses(optimizer: torch.optim.Optimizer | None, parameters: Mapping[str, Tensor]) -> dict[str, Response]:
    """Returns name -> `Response` for every parameter that the optimizer updates; frozen ones are left out.

    Args:
        optimizer: Adam, AdamW or SGD, also inside a wrapper with an `optimizer` attribute; None means plain SGD, lr 1.
        parameters: the weights asked about, by name.

    Raises:
        TypeError: an optimizer whose update this module cannot differentiate.
    """
    if optimizer is None:
        trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained or [torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    inner = check_optimizer(optimizer)
    groups = {id(parameter): group for group in inner.param_groups for parameter in group["params"]}
    return {
        name: Response(type(inner), groups[id(parameter)], inner.state.get(parameter, {}), parameter.detach())
        for name, parameter in parameters.items()
        if id(parameter) in groups and parameter.requires_grad
    }


def check_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Returns the torch optimizer inside any wrappers.

    Raises:
        TypeError: it is not one whose update can be differentiated here.
    """
    inner: torch.optim.Optimizer = optimizer
    while hasattr(inner, "optimizer"):
        inner = inner.optimizer
    if type(inner) not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        raise TypeError(
            f"Cannot differentiate the update of {type(inner).__module__}.{type(inner).__name__}; expected "
            "torch.optim.AdamW, Adam or SGD. Use one of these (Trainer: optim='adamw_torch' or 'adamw_torch_fused'), "
            "or a policy that needs no probe, such as policy='layer-position'."
        )
    return inner


def _number(value: Any) -> float:
    """Returns a hyperparameter or step count that may be a tensor (capturable, fused) as a float."""
    return float(value)
