"""Is a head of split products, taken in parts, the linear that it stands for?"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from snip_hf.estimation import split_linear
from snip_hf.estimation.split_linear import SplitLinear, split_linears


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_linear, "OUTPUTS", 10)


def operands(outputs: int = 37) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator) for shape in ((6, 16), (outputs, 16), (outputs,))]
    return drawn[0], drawn[1], drawn[2]


@pytest.mark.parametrize("has_bias", [False, True])
def test_outputs_and_gradients_are_those_of_torch_s_linear(small_parts: None, has_bias: bool) -> None:
    x, weight, bias = operands()
    given = bias.requires_grad_() if has_bias else None
    found, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    direction = torch.randn(6, 37, generator=torch.Generator().manual_seed(1))
    y = SplitLinear.apply(found, weight, given)
    (y * direction).sum().backward()
    grad_bias, bias.grad = bias.grad, None
    exact = nn.functional.linear(expected, weight, given)
    (exact * direction).sum().backward()
    torch.testing.assert_close(y, exact)
    torch.testing.assert_close(found.grad, expected.grad)
    assert not has_bias or torch.equal(grad_bias, bias.grad)


def test_a_loss_may_differentiate_its_gradient(small_parts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a penalty of gradients does; the kernels that split operands would count for constants."""

    def without_derivative(left: Tensor, right: Tensor) -> Tensor:
        return left.detach() @ right.detach()

    monkeypatch.setattr(split_linear, "product", without_derivative)
    x, weight = (one.double() for one in operands()[:2])
    found = []
    for function in (SplitLinear.apply, nn.functional.linear):
        at = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(function(at, weight, None).square().sum(), at, create_graph=True)
        gradient.square().sum().backward()
        found.append(at.grad)
    torch.testing.assert_close(*found)


def test_only_large_frozen_weights_are_taken_and_torch_s_function_comes_back(
    small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_linear, "is_split", lambda left, right: True)
    (x, weight, _), original = operands(), nn.functional.linear
    x.requires_grad_()
    trained = nn.Parameter(weight.clone())
    with split_linears():
        head = nn.functional.linear(x.view(2, 3, 16), weight)
        others = [nn.functional.linear(x, trained), nn.functional.linear(x, weight[:9])]
    assert head.shape == (2, 3, 37) and "SplitLinear" in type(head.grad_fn.next_functions[0][0]).__name__  # type: ignore[union-attr]
    assert all("SplitLinear" not in type(one.grad_fn).__name__ for one in others)
    assert nn.functional.linear is original


def test_on_a_cpu_linears_are_torch_s_own() -> None:
    x, weight, bias = operands(split_linear.OUTPUTS)
    expected = nn.functional.linear(x, weight, bias)
    with split_linears():
        assert torch.equal(nn.functional.linear(x, weight, bias), expected)
