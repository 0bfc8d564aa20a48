"""Do ReLU and its kin keep their values in a probe, and do their slopes change over a width instead of at once?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any

import pytest
import torch
from configs import fp4_config
from small import Block, TinyLM, relative_error, tiny_llama, tokens
from torch import Tensor, nn
from torch.nn.functional import relu

from snip_hf.estimation.batch import Batch
from snip_hf.estimation.kinks import RELATIVE_WIDTH, smooth_kinks
from snip_hf.estimation.memory import NO_SAVINGS, Savings
from snip_hf.estimation.probe import Probe, ProbeSettings, run_probe
from snip_hf.layers.convert import convert_model
from snip_hf.layers.state import snip_linears
from snip_hf.parallel.ranks import Processes


class Calling(nn.Module):
    """Calls a function by the name of an attribute; only the attribute tells which one it is."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.act = function

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x)


def gated(x: Tensor) -> Tensor:
    return relu(x)


class ByFunctionBeside(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return gated(x)


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


class ByItsOwnMethods(nn.Module):
    @decorated
    def forward(self, x: Tensor) -> Tensor:
        return self.by_method(x)

    def by_method(self, x: Tensor) -> Tensor:
        return self.by_static(x)

    @staticmethod
    def by_static(x: Tensor) -> Tensor:
        return nn.functional.relu(x)


class ByMethodOfTensor(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu()


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 1.0
        torch.relu_(y)
        return y


def slope_of(x: Tensor, left: float = 0.0, bottom: float = 0.0, top: float | None = None) -> Tensor:
    def step(x: Tensor) -> Tensor:
        # Of a normal distribution over a width of every row's own.
        return 0.5 * (1 + torch.erf(x / (RELATIVE_WIDTH * width * 2**0.5)))

    width = ((x - x.mean(-1, keepdim=True)) ** 2).mean(-1, keepdim=True).sqrt()
    return left + (1 - left) * step(x - bottom) - (0.0 if top is None else step(x - top))


MODULES: dict[str, tuple[nn.Module, Callable[[Tensor], Tensor]]] = {
    "nn.ReLU": (nn.ReLU(), slope_of),
    "nn.ReLU in place": (nn.Sequential(nn.Identity(), nn.ReLU(inplace=True)), slope_of),
    "nn.ReLU6": (nn.ReLU6(), partial(slope_of, top=6.0)),
    "nn.Hardtanh": (nn.Hardtanh(-0.5, 2.0), partial(slope_of, bottom=-0.5, top=2.0)),
    "nn.LeakyReLU": (nn.LeakyReLU(0.2), partial(slope_of, left=0.2)),
    "attribute": (Calling(torch.relu), slope_of),
    "functional attribute": (Calling(nn.functional.relu), slope_of),
    "function beside the class": (ByFunctionBeside(), slope_of),
    "methods of the class": (ByItsOwnMethods(), slope_of),
    "method of a tensor": (ByMethodOfTensor(), slope_of),
    "in place": (InPlace(), slope_of),
}


@pytest.mark.parametrize("case", MODULES)
def test_values_stay_and_slopes_change_over_a_width_of_each_token_s_own(case: str) -> None:
    module, slope = MODULES[case]
    x = torch.randn(3, 500, generator=torch.Generator().manual_seed(0)) * torch.tensor([[0.1], [1.0], [10.0]])
    x.requires_grad_()
    expected, weights = module(x * 1.0), torch.randn(3, 500)
    with smooth_kinks(module):
        y = module(x * 1.0)
        y.backward(weights)
    assert torch.equal(y, expected)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, weights * slope(x.detach()), rtol=1e-4, atol=1e-5)


def test_at_exactly_zero_and_in_tokens_of_equal_features_slopes_are_torch_s() -> None:
    x = torch.tensor([[0.0, 1.0, -1.0], [0.0, 0.0, 0.0], [2.0, 2.0, 2.0], [-2.0, -2.0, -2.0]], requires_grad=True)
    module = nn.ReLU()
    with smooth_kinks(module):
        module(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]


def test_modules_without_such_functions_run_as_they_are_and_all_are_put_back() -> None:
    model = nn.ModuleList([tiny_llama(hidden=32), nn.ReLU(), Calling(torch.tanh)])
    own = model[1].forward = partial(nn.functional.relu, inplace=False)
    before = [dict(vars(module)) for module in model.modules()]
    with smooth_kinks(model):
        changed = [name for name, module in model.named_modules() if "forward" in vars(module)]
        assert model[1].forward is not own
    assert changed == ["1"]
    assert [dict(vars(module)) for module in model.modules()] == before


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


def equal(one: Probe, other: Probe) -> bool:
    assert one.layers.keys() == other.layers.keys()
    return all(
        torch.equal(left, right)
        for name, sample in one.layers.items()
        for left, right in zip(tensors_of(sample), tensors_of(other.layers[name]), strict=True)
    )


def tensors_of(sample: Any) -> list[Tensor]:
    return [sample.x, sample.grad_output, *sample.x_dot, *sample.grad_output_dot]


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_blocks_that_are_recomputed_give_the_same_numbers(reentrant: bool | None) -> None:
    savings = NO_SAVINGS if reentrant is not None else Savings(("layers.0", "layers.1"), frozenset(("layers.0.up",)))
    assert equal(probed(kinked(reentrant=reentrant), savings=savings), probed(kinked()))


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

    assert equal(probed(model, processes=Processes(run=run)), probed(model))


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
    assert equal(probed(kinked().cuda(), savings=savings, inputs=inputs), probed(kinked().cuda(), inputs=inputs))
