"""A reference Lion (arXiv:2302.06675, algorithm 2) to test against, with the state and options of lion-pytorch."""

from __future__ import annotations

from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                average = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                mixed = beta1 * average + (1 - beta1) * parameter.grad
                parameter.mul_(1 - lr * group["weight_decay"]).sub_(lr * mixed.sign())
                average.mul_(beta2).add_(parameter.grad, alpha=1 - beta2)
