"""Do passes that are compared choose alike, and do all others choose for themselves?"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from snip_hf.estimation.routing import FixedRouting

FIRST = torch.tensor([[3.0, 1.0, 2.0, 0.0], [0.0, 5.0, 1.0, 4.0]])
OTHER = torch.tensor([[0.0, 1.0, 2.0, 3.0], [7.0, 5.0, 1.0, 4.0]])


def test_later_passes_take_their_own_scores_at_the_places_of_the_first() -> None:
    routing = FixedRouting()
    with routing.one_pass():
        assert torch.topk(FIRST, 2).indices.tolist() == [[0, 2], [1, 3]]
        assert FIRST.topk(1, dim=0, largest=False)[1].tolist() == [[1, 0, 1, 0]]
    for _ in range(2):
        with routing.one_pass():
            found = torch.topk(OTHER, 2, sorted=False)
            assert found.indices.tolist() == [[0, 2], [1, 3]] and found.values.tolist() == [[0.0, 2.0], [5.0, 4.0]]
            assert OTHER.topk(k=1, dim=0, largest=False).values.tolist() == [[7.0, 1.0, 1.0, 3.0]]
    assert torch.topk(OTHER, 2).indices.tolist() == [[3, 2], [0, 1]]


def test_maxima_along_a_dimension_are_choices_too() -> None:
    routing = FixedRouting()
    with routing.one_pass():
        assert FIRST.max(dim=-1)[1].tolist() == [0, 1]
        assert torch.max(FIRST, 0, keepdim=True).indices.tolist() == [[0, 1, 0, 1]]
    with routing.one_pass():
        found = OTHER.max(dim=-1)
        assert found.values.tolist() == [0.0, 5.0] and found.indices.tolist() == [0, 1]
        assert torch.max(OTHER, 0, keepdim=True).values.tolist() == [[0.0, 5.0, 2.0, 4.0]]
        assert OTHER.max() == 7 and torch.max(OTHER, FIRST).tolist() == [[3, 1, 2, 3], [7, 5, 1, 4]]
        assert OTHER[None, None].max(dim=-1).indices.tolist() == [[[3, 0]]]


def test_gradients_go_to_the_scores_that_were_taken() -> None:
    routing, scores = FixedRouting(), OTHER.clone().requires_grad_()
    with routing.one_pass():
        torch.topk(FIRST, 2)
    with routing.one_pass():
        (torch.topk(scores, 2).values * torch.tensor([1.0, 10.0])).sum().backward()
    assert scores.grad is not None and scores.grad.tolist() == [[1, 0, 10, 0], [0, 1, 0, 10]]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_block_that_is_recomputed_repeats_the_choices_of_its_own_forward(reentrant: bool) -> None:
    """Backward passes recompute the last block first."""
    routing, gradients = FixedRouting(), []

    def block(x: Tensor) -> Tensor:
        return torch.zeros_like(x).scatter(1, torch.topk(x, 2).indices, 3.0) * x

    for start in (FIRST, OTHER, OTHER):
        x = start.clone().requires_grad_()
        with routing.one_pass():
            is_plain = len(gradients) == 2
            y = block(block(x) + 1) if is_plain else x
            for shift in () if is_plain else (0, 1):
                y = checkpoint(block, y + shift, use_reentrant=reentrant)
            y.square().sum().backward()
        assert x.grad is not None
        gradients.append(x.grad)
    assert torch.equal(gradients[1], gradients[2]) and gradients[1].count_nonzero() == 4


def test_a_call_of_another_shape_is_another_one_and_chooses_for_itself() -> None:
    routing = FixedRouting()
    with routing.one_pass():
        torch.topk(FIRST, 2)
    with routing.one_pass():
        assert torch.topk(OTHER, 3).indices.tolist() == [[3, 2, 1], [0, 1, 3]]
        assert torch.topk(OTHER, 2).indices.tolist() == [[3, 2], [0, 1]]


def test_torch_is_as_it_was_after_a_pass_also_one_that_fails() -> None:
    before, methods = (torch.topk, torch.max), (torch.Tensor.topk, torch.Tensor.max)
    with pytest.raises(RuntimeError, match="not today"), FixedRouting().one_pass():
        assert torch.topk is not before[0] and torch.max is not before[1]
        raise RuntimeError("not today")
    assert (torch.topk, torch.max) == before and (torch.Tensor.topk, torch.Tensor.max) == methods
    assert not {"topk", "max"} & set(vars(torch.Tensor))
