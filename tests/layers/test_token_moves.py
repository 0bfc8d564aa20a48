"""Tokens on their way to experts and back: torch's own indexing, and its gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from snip_hf.layers.experts import inverse, permuted, sorted_tokens

TOKENS, PER_TOKEN = 6, 3
ORDER = torch.randperm(TOKENS * PER_TOKEN, generator=torch.Generator().manual_seed(0))
BACK = torch.argsort(ORDER)


@pytest.mark.parametrize(
    ("move", "plain", "rows"),
    [
        (sorted_tokens, lambda x, order, back: x[order // PER_TOKEN], TOKENS),
        (permuted, lambda x, order, back: x[order], TOKENS * PER_TOKEN),
        (lambda x, order, back: permuted(x, back, order), lambda x, order, back: x[back], TOKENS * PER_TOKEN),
    ],
)
def test_rows_and_gradients_are_those_of_torchs_indexing(
    move: Callable[..., Tensor], plain: Callable[..., Tensor], rows: int
) -> None:
    x = torch.arange(rows * 4.0).view(rows, 4)  # whole numbers, whose sums are exact
    grad = torch.arange(TOKENS * PER_TOKEN * 4.0).view(-1, 4)
    found = []
    for function in (move, plain):
        leaf = x.clone().requires_grad_()
        y = function(leaf, ORDER, BACK)
        y.backward(grad)
        found.append((y.detach(), leaf.grad))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


def test_a_tokens_gradient_is_the_sum_of_its_pairs_in_the_order_of_the_batch_in_fp32() -> None:
    x = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    y = sorted_tokens(x, torch.tensor([2, 0, 1]), torch.tensor([1, 2, 0]))
    y.backward(torch.tensor([[1.0], [256.0], [1.0]]).bfloat16())
    assert x.grad is not None and x.grad.item() == 258.0  # one by one in BF16: 256


def test_the_inverse_of_an_order_says_where_each_pair_is_in_it() -> None:
    assert torch.equal(inverse(ORDER), BACK)


def test_there_may_be_no_tokens() -> None:
    x = torch.zeros(0, 4, requires_grad=True)
    order = torch.zeros(0, dtype=torch.int64)
    y = sorted_tokens(x, order, inverse(order))
    y.sum().backward()
    assert y.shape == (0, 4) and x.grad is not None and x.grad.shape == (0, 4)
