"""Does the slope of ReLU change over a width in a probe, and do compared passes choose the same experts?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from configs import fp4_config
from same_samples import assert_same_samples
from small import Block, TinyLM, relative_error, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from snip_hf.estimation.batch import Batch
from snip_hf.estimation.memory import NO_SAVINGS, Savings
from snip_hf.estimation.nonsmooth import RELATIVE_WIDTH, FixedRouting, SmoothKinks
from snip_hf.estimation.probe import Probe, ProbeSettings, run_probe
from snip_hf.layers.convert import convert_model
from snip_hf.layers.state import snip_linears
from snip_hf.parallel.ranks import Processes


def slope_of(x: Tensor) -> Tensor:
    width = ((x - x.mean(-1, keepdim=True)) ** 2).mean(-1, keepdim=True).sqrt()
    # A normal distribution whose width each row has for itself.
    return 0.5 * (1 + torch.erf(x / (RELATIVE_WIDTH * width * 2**0.5)))


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "nn.ReLU": nn.ReLU(),
    "nn.ReLU in place": nn.ReLU(inplace=True),
    "torch.relu": torch.relu,
    "torch.relu_": torch.relu_,
    "method": Tensor.relu,
    "method in place": Tensor.relu_,
}


@pytest.mark.parametrize("case", CALLS)
def test_values_stay_and_slopes_change_over_a_width_of_each_token_s_own(case: str) -> None:
    call = CALLS[case]
    x = torch.randn(3, 500, generator=torch.Generator().manual_seed(0)) * torch.tensor([[0.1], [1.0], [10.0]])
    x.requires_grad_()
    expected, weights = call(x * 1.0), torch.randn(3, 500)
    with SmoothKinks():
        y = call(x * 1.0)
        y.backward(weights)
    assert torch.equal(y, expected)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, weights * slope_of(x.detach()), rtol=1e-4, atol=1e-5)


def test_at_exactly_zero_and_in_tokens_of_equal_features_slopes_are_torch_s() -> None:
    x = torch.tensor([[0.0, 1.0, -1.0], [0.0, 0.0, 0.0], [2.0, 2.0, 2.0], [-2.0, -2.0, -2.0]], requires_grad=True)
    module = nn.ReLU()
    with SmoothKinks():
        module(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]


# ----------------------------------------------------------------------------------------------------------- in a probe


class KinkedBlock(Block):
    """Its own forward names ReLU: what is recomputed is what runs smoothed."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Kinked(TinyLM):
    def __init__(self, **options: Any) -> None:
        super().__init__(hidden=32, inner=128, **options)
        self.layers = nn.ModuleList([KinkedBlock(32, 128, 0.0) for _ in range(2)])


def kinked(**options: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Kinked(**options)
    convert_model(model, fp4_config())
    return model


INPUTS = tokens(rows=8, length=64)


def probed(
    model: nn.Module,
    step: float = 1e-3,
    savings: Savings = NO_SAVINGS,
    processes: Processes | None = None,
    inputs: Mapping[str, Tensor] = INPUTS,
) -> Probe:
    pullbacks = dict.fromkeys(snip_linears(model), lambda z: z * 1.0)
    return run_probe(
        model, Batch.of(inputs), pullbacks, ProbeSettings(1, relative_step=step, savings=savings), processes
    )


def test_derivatives_do_not_depend_on_the_step_of_the_difference() -> None:
    model = kinked()
    layers, finer = probed(model).layers, probed(model, step=2.5e-4).layers
    for name in ("layers.0.up", "layers.0.down", "layers.1.up"):
        assert relative_error(layers[name].grad_output_dot[0], finer[name].grad_output_dot[0]) < 0.03


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_blocks_that_are_recomputed_give_the_same_numbers(reentrant: bool | None) -> None:
    savings = NO_SAVINGS if reentrant is not None else Savings(("layers.0", "layers.1"), frozenset(("layers.0.up",)))
    assert_same_samples(probed(kinked(reentrant=reentrant), savings=savings).layers, probed(kinked()).layers)


def test_a_pipeline_s_chunks_give_the_numbers_of_the_whole() -> None:
    """Each runs forward and backward by itself, as in a schedule that a user's `run` starts."""
    model = kinked()

    def run(kwargs: Mapping[str, Tensor]) -> float:
        total = 0.0
        for rows in range(0, 8, 2):
            loss = model(**{name: value[rows : rows + 2] for name, value in kwargs.items()})["loss"] / 4
            loss.backward()
            total += float(loss.detach())
        return total

    assert_same_samples(probed(model, processes=Processes(run=run)).layers, probed(model).layers)


def test_a_pass_without_derivatives_is_torch_s_own() -> None:
    """Nothing is moved there, so that no kink lies between two sides."""
    model = kinked()
    found = run_probe(model, Batch.of(INPUTS), {}, ProbeSettings(0)).layers["layers.1.up"]
    x = found.x @ model.layers[1].up.weight.t() + model.layers[1].up.bias
    assert torch.equal(found.grad_output[x < 0], torch.zeros_like(found.grad_output[x < 0]))


@pytest.mark.gpu
def test_blocks_that_torch_recomputes_in_threads_of_its_own_give_the_same_numbers() -> None:
    inputs = {name: value.cuda() for name, value in INPUTS.items()}
    savings = Savings(("layers.0", "layers.1"))
    found, expected = (probed(kinked().cuda(), savings=one, inputs=inputs) for one in (savings, NO_SAVINGS))
    assert_same_samples(found.layers, expected.layers)


# ------------------------------------------------------------------------------------------------------------- routing


FIRST = torch.tensor([[3.0, 1.0, 2.0, 0.0], [0.0, 5.0, 1.0, 4.0]])
OTHER = torch.tensor([[0.0, 1.0, 2.0, 3.0], [7.0, 5.0, 1.0, 4.0]])


def test_later_passes_take_their_own_scores_at_the_places_of_the_first() -> None:
    routing = FixedRouting()
    with routing.one_pass(nn.Identity()):
        assert torch.topk(FIRST, 2).indices.tolist() == [[0, 2], [1, 3]]
        assert FIRST.topk(1, dim=0, largest=False)[1].tolist() == [[1, 0, 1, 0]]
    for _ in range(2):
        with routing.one_pass(nn.Identity()):
            found = torch.topk(OTHER, 2, sorted=False)
            assert found.indices.tolist() == [[0, 2], [1, 3]] and found.values.tolist() == [[0.0, 2.0], [5.0, 4.0]]
            assert OTHER.topk(k=1, dim=0, largest=False).values.tolist() == [[7.0, 1.0, 1.0, 3.0]]
    assert torch.topk(OTHER, 2).indices.tolist() == [[3, 2], [0, 1]]


def test_maxima_along_a_dimension_are_choices_too() -> None:
    routing = FixedRouting()
    with routing.one_pass(nn.Identity()):
        assert FIRST.max(dim=-1)[1].tolist() == [0, 1]
        assert torch.max(FIRST, 0, keepdim=True).indices.tolist() == [[0, 1, 0, 1]]
    with routing.one_pass(nn.Identity()):
        found = OTHER.max(dim=-1)
        assert found.values.tolist() == [0.0, 5.0] and found.indices.tolist() == [0, 1]
        assert torch.max(OTHER, 0, keepdim=True).values.tolist() == [[0.0, 5.0, 2.0, 4.0]]
        assert OTHER.max() == 7 and torch.max(OTHER, FIRST).tolist() == [[3, 1, 2, 3], [7, 5, 1, 4]]
        assert OTHER[None, None].max(dim=-1).indices.tolist() == [[[3, 0]]]


def test_gradients_go_to_the_scores_that_were_taken() -> None:
    routing, scores = FixedRouting(), OTHER.clone().requires_grad_()
    with routing.one_pass(nn.Identity()):
        torch.topk(FIRST, 2)
    with routing.one_pass(nn.Identity()):
        (torch.topk(scores, 2).values * torch.tensor([1.0, 10.0])).sum().backward()
    assert scores.grad is not None and scores.grad.tolist() == [[1, 0, 10, 0], [0, 1, 0, 10]]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_block_that_is_recomputed_repeats_the_choices_of_its_own_forward(reentrant: bool) -> None:
    """Backward passes recompute the last block first."""
    routing, gradients = FixedRouting(), []

    class Router(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.zeros_like(x).scatter(1, torch.topk(x, 2).indices, 3.0) * x

    block = Router()
    for start in (FIRST, OTHER, OTHER):
        x = start.clone().requires_grad_()
        with routing.one_pass(block):
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
    with routing.one_pass(nn.Identity()):
        torch.topk(FIRST, 2)
    with routing.one_pass(nn.Identity()):
        assert torch.topk(OTHER, 3).indices.tolist() == [[3, 2, 1], [0, 1, 3]]
        assert torch.topk(OTHER, 2).indices.tolist() == [[3, 2], [0, 1]]


def test_after_a_pass_also_one_that_fails_torch_chooses_for_itself() -> None:
    routing = FixedRouting()
    with routing.one_pass(nn.Identity()):
        torch.topk(FIRST, 2)
    with pytest.raises(RuntimeError, match="not today"), routing.one_pass(nn.Identity()):
        assert torch.topk(OTHER, 2).indices.tolist() == [[0, 2], [1, 3]]
        raise RuntimeError("not today")
    assert torch.topk(OTHER, 2).indices.tolist() == [[3, 2], [0, 1]] and OTHER.max(dim=-1).indices.tolist() == [3, 0]
