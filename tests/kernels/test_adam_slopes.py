"""Is the derivative of the kernel that of Adam's rule?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_runs import Run
from torch import Tensor

from snip_hf.kernels import adam_slopes
from snip_hf.kernels.adam_slopes import AdamNumbers, takes
from snip_hf.optimizers.update_rules import UpdateContext, adam

LR, BETAS, EPS, STEP = 3e-3, (0.9, 0.95), 1e-8, 7.0
GROUP = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": 0.1, "amsgrad": False}


def numbers() -> AdamNumbers:
    (beta1, beta2), unbiased1, unbiased2 = BETAS, 1 - BETAS[0] ** STEP, 1 - BETAS[1] ** STEP
    averages = (beta1, 1 - beta1, beta2, 1 - beta2)
    rest = (EPS, (1 - beta1) / unbiased1, 1 / (2 * unbiased2), LR)
    return AdamNumbers(*averages, 2 * (1 - beta2), 1 / unbiased1, 1 / unbiased2, *rest)


def tensors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A gradient, both moments, and a tangent; with elements that were never touched."""
    generator = torch.Generator().manual_seed(0)
    gradient, first, second, tangent = (torch.randn(41, 67, generator=generator) for _ in range(4))
    gradient *= torch.exp(3 * torch.randn(41, 67, generator=generator))
    second = second.square()
    for one in (gradient, first, second):
        one[3:5] = 0.0
    return gradient, first.to(dtype), second.to(dtype), tangent


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_derivative_times_a_tangent_is_that_of_adam_s_rule(run: Run, dtype: torch.dtype) -> None:
    gradient, first, second, tangent = tensors(dtype)
    state = {"step": STEP - 1, "exp_avg": first, "exp_avg_sq": second}
    _, slope, touched = adam(UpdateContext(GROUP, state, torch.zeros(41, 67)), gradient, decoupled=True)
    for along in (tangent, torch.tensor(2.0).expand(41, 67)):
        found = run("adam_slopes", gradient, first, second, along, tuple(numbers()))
        torch.testing.assert_close(found, slope * along, rtol=1e-5, atol=float(slope.abs().max()) * 1e-6)
        assert not found[~touched].any()


class Quantized(Tensor):
    """A tensor of another class."""


@pytest.mark.parametrize(
    "change",
    [
        {"first": None},
        {"first": torch.zeros(41, 67, dtype=torch.float16), "second": torch.zeros(41, 67, dtype=torch.float16)},
        {"second": torch.zeros(41, 67, dtype=torch.bfloat16)},
        {"second": torch.zeros(67, 41).t()},
        {"first": torch.zeros(41, 67).as_subclass(Quantized)},
        {"tangent": torch.zeros(67, 41).t()},
        {"first": torch.zeros(41, 67, device="meta"), "second": torch.zeros(41, 67, device="meta")},
        {"tangent": torch.zeros(41, 67, device="meta")},
    ],
    ids=[
        "no state",
        "FP16",
        "two dtypes",
        "transposed",
        "quantized",
        "transposed tangent",
        "moments elsewhere",
        "tangent elsewhere",
    ],
)
def test_other_tensors_are_left_to_the_rule(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("gradient", "first", "second", "tangent")
    given = dict(zip(names, tensors(), strict=True))
    assert not takes(**given)  # on a CPU
    monkeypatch.setattr(adam_slopes, "has_kernels", lambda device: True)
    assert takes(**given) and not takes(**(given | change))
