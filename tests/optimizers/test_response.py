"""Is h(g) the step that the real optimizers take, and are the products those with its derivative?"""

from __future__ import annotations

import copy
import logging
import random
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from configs import fp4_config
from own_loop import Loop
from shared import small_models as reference
from small import text, tiny_llama
from tiny_runs import SCHEDULE, model_with_dropout, one_thread, refreshes, train
from torch import Tensor, nn, optim
from torch.optim import SGD, Adam, AdamW
from transformers.optimization import Adafactor as TransformersAdafactor

from snip_hf import SnipController
from snip_hf.optimizers import response, update_rules
from snip_hf.optimizers.own_step import own_step
from snip_hf.optimizers.response import Response, check_optimizer, groups_of, parts_of, responses
from snip_hf.optimizers.update_rules import UpdateContext

SHAPES = {"first": (5, 7), "second": (4, 3)}
Parameters = dict[str, nn.Parameter]
Rule = tuple[type[optim.Optimizer], dict[str, Any]]


class OtherAdamW(AdamW):
    """A subclass may step in another way, so it is not taken for AdamW but differentiated numerically."""


class EagerAdagrad(optim.Adagrad):
    """Adagrad of torch 2.11: all state is made when the optimizer is built, none in a step."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                assert self.state[parameter].keys() == {"step", "sum"}
        return super().step(closure)


class NotLion(reference.Lion):
    """Not named Lion."""


TRANSFORMERS = {"scale_parameter": False, "relative_step": False}

ANALYTIC: dict[str, Rule] = {
    "AdamW single": (AdamW, {"lr": 0.05, "foreach": False, "weight_decay": 0.0}),
    "AdamW foreach": (AdamW, {"lr": 0.05, "foreach": True}),
    "AdamW fused": (AdamW, {"lr": 0.05, "fused": True}),
    "AdamW decay": (AdamW, {"lr": 0.05, "weight_decay": 0.3}),
    "AdamW betas": (AdamW, {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-2}),
    "AdamW no momentum": (AdamW, {"lr": 0.02, "betas": (0.0, 0.9)}),
    "AdamW tensor lr": (AdamW, {"lr": torch.tensor(0.05), "foreach": False}),
    "AdamW amsgrad": (AdamW, {"lr": 0.05, "betas": (0.9, 0.7), "amsgrad": True}),
    "AdamW amsgrad fused": (AdamW, {"lr": 0.05, "betas": (0.9, 0.7), "amsgrad": True, "fused": True}),
    "AdamW maximize": (AdamW, {"lr": 0.05, "maximize": True, "weight_decay": 0.3}),
    "Adam plain": (Adam, {"lr": 0.05}),
    "Adam L2": (Adam, {"lr": 0.05, "weight_decay": 0.3}),
    "Adam L2 fused": (Adam, {"lr": 0.05, "weight_decay": 0.3, "fused": True}),
    "Adam L2 maximize": (Adam, {"lr": 0.05, "weight_decay": 0.3, "maximize": True}),
    "Adam decoupled": (Adam, {"lr": 0.05, "weight_decay": 0.3, "decoupled_weight_decay": True}),
    "SGD plain": (SGD, {"lr": 0.1}),
    "SGD decay": (SGD, {"lr": 0.1, "weight_decay": 0.2}),
    "SGD momentum": (SGD, {"lr": 0.1, "momentum": 0.9}),
    "SGD momentum decay": (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.2}),
    "SGD dampening": (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.4}),
    "SGD nesterov": (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.2}),
    "SGD nesterov foreach": (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}),
    "SGD fused": (SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "SGD maximize": (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.2, "maximize": True}),
}
AUTOGRAD: dict[str, Rule] = {
    "Adafactor": (optim.Adafactor, {"lr": 0.05, "weight_decay": 0.0}),
    "Adafactor decay": (optim.Adafactor, {"lr": 0.05, "weight_decay": 0.3}),
    "Adafactor unclipped": (optim.Adafactor, {"lr": 0.05, "d": 50.0, "beta2_decay": -0.3}),
    "Adafactor relative": (optim.Adafactor, {"lr": 10.0}),
    "Adafactor floor": (optim.Adafactor, {"lr": 0.05, "eps": (1.0, 5.0)}),
    "Adafactor foreach": (optim.Adafactor, {"lr": 0.05, "foreach": True}),
    "Adafactor maximize": (optim.Adafactor, {"lr": 0.05, "maximize": True, "weight_decay": 0.3}),
    "transformers": (TransformersAdafactor, {"lr": 0.05, **TRANSFORMERS}),
    "transformers decay": (TransformersAdafactor, {"lr": 0.05, **TRANSFORMERS, "weight_decay": 0.3}),
    "transformers momentum": (TransformersAdafactor, {"lr": 0.05, **TRANSFORMERS, "beta1": 0.8}),
    "transformers unclipped": (TransformersAdafactor, {"lr": 0.05, **TRANSFORMERS, "clip_threshold": 50.0}),
    "transformers floor": (TransformersAdafactor, {"lr": 0.05, **TRANSFORMERS, "eps": (1e-2, 1e-3)}),
    "transformers scaled": (TransformersAdafactor, {"lr": 0.05, "scale_parameter": True, "relative_step": False}),
    "transformers relative": (TransformersAdafactor, {}),
    "transformers warm-up": (TransformersAdafactor, {"warmup_init": True, "decay_rate": -0.5}),
}
NUMERICAL: dict[str, Rule] = {
    "Adagrad": (optim.Adagrad, {"lr": 0.05, "weight_decay": 0.1, "initial_accumulator_value": 0.1}),
    "Adagrad maximize": (optim.Adagrad, {"lr": 0.05, "lr_decay": 0.1, "maximize": True}),
    "Adagrad eager": (EagerAdagrad, {"lr": 0.05, "initial_accumulator_value": 0.1}),
    "Adagrad fused": (optim.Adagrad, {"lr": 0.05, "fused": True}),
    "RMSprop": (optim.RMSprop, {"lr": 0.05, "weight_decay": 0.1}),
    "RMSprop centered": (optim.RMSprop, {"lr": 0.05, "centered": True, "momentum": 0.9, "eps": 1e-2}),
    "RMSprop tensor lr": (optim.RMSprop, {"lr": torch.tensor(0.05), "foreach": False}),
    "Adamax": (optim.Adamax, {"lr": 0.05, "weight_decay": 0.1}),
    "NAdam": (optim.NAdam, {"lr": 0.05, "decoupled_weight_decay": True, "weight_decay": 0.3}),
    "RAdam": (optim.RAdam, {"lr": 0.05, "weight_decay": 0.1}),
    "Adadelta": (optim.Adadelta, {"lr": 0.5, "weight_decay": 0.1}),
    "ASGD": (optim.ASGD, {"lr": 0.05, "weight_decay": 0.1}),
    "AdamW by another name": (OtherAdamW, {"lr": 0.05, "weight_decay": 0.3}),
}
IN_FP64 = {**ANALYTIC, **AUTOGRAD, **NUMERICAL}
LION: Rule = (reference.Lion, {"lr": 0.05, "betas": (0.8, 0.95), "weight_decay": 0.3})
MUON: dict[str, Rule] = {
    "Muon": (optim.Muon, {"lr": 0.05}),
    "Muon plain momentum": (optim.Muon, {"lr": 0.05, "nesterov": False, "momentum": 0.7, "weight_decay": 0.0}),
    "Muon rms": (optim.Muon, {"lr": 0.05, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3, "weight_decay": 0.3}),
    "Muon cubic": (optim.Muon, {"lr": 0.05, "adjust_lr_fn": "original", "ns_coefficients": (1.5, -0.5, 0.0)}),
}
ALL = {**IN_FP64, "Lion": LION, **MUON}


def draw(seed: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def built(rule: Rule, parameters: Parameters, **more: Any) -> optim.Optimizer:
    """An optimizer of two groups, the second with a fifth of the learning rate."""
    kind, options = rule
    first, second = parameters.values()
    slower = {"lr": options["lr"] / 5} if "lr" in options else {"clip_threshold": 0.2}
    return kind([{"params": [first]}, {"params": [second], **slower}], **{**options, **more})  # type: ignore[call-arg]


def trained(rule: Rule, steps: int, device: str = "cpu", **more: Any) -> tuple[Parameters, optim.Optimizer]:
    """Two parameters after steps on random gradients."""
    parameters = {name: nn.Parameter(value.to(device)) for name, value in draw(100).items()}
    optimizer = built(rule, parameters, **more)
    for step in range(steps):
        take_step(parameters, optimizer, {name: value.to(device) for name, value in draw(step).items()})
    return parameters, optimizer


def take_step(parameters: Parameters, optimizer: optim.Optimizer, gradients: dict[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.grad = gradients[name].to(parameter.dtype).clone()
    optimizer.step()
    optimizer.zero_grad()


def real_update(
    rule: Rule, parameters: Parameters, optimizer: optim.Optimizer, gradients: dict[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Returns the amount that the next step of a copy subtracts, in this dtype, with all weight decay."""
    copies = {name: nn.Parameter(value.detach().to(dtype, copy=True)) for name, value in parameters.items()}
    twin = built(rule, copies)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = {name: value.detach().clone() for name, value in copies.items()}
    take_step(copies, twin, gradients)
    return {name: before[name] - value.detach() for name, value in copies.items()}


def decoupled_decay(rule: Rule, optimizer: optim.Optimizer, index: int, parameter: Tensor) -> Tensor:
    """Returns the weight decay that analytic and autograd rules leave out; numerical ones have it in their steps."""
    kind, options = rule
    group = optimizer.param_groups[index]
    if kind in (AdamW, optim.Adafactor, TransformersAdafactor) or (
        kind is Adam and "decoupled_weight_decay" in options
    ):
        return float(group["lr"] or 0) * group["weight_decay"] * parameter.detach()
    return torch.zeros_like(parameter)


def slope(answer: Response, gradient: Tensor) -> Tensor:
    return answer.pushforward(gradient, torch.ones_like(gradient))


def check_against_real_steps(rule: Rule, parameters: Parameters, optimizer: optim.Optimizer, steps: int) -> None:
    answers = responses(optimizer, parameters)
    assert list(answers) == list(parameters)
    device = parameters["first"].device
    gradients, tangents, cotangents = (
        {name: value.to(device) for name, value in draw(seed).items()} for seed in (55, 56, 57)
    )
    step = 1e-5

    def moved(sign: float) -> dict[str, Tensor]:
        ends = {name: gradients[name].double() + sign * step * tangents[name] for name in gradients}
        return real_update(rule, parameters, optimizer, ends, torch.float64)

    in_fp32 = real_update(rule, parameters, optimizer, gradients, torch.float32)
    in_fp64 = real_update(rule, parameters, optimizer, {k: v.double() for k, v in gradients.items()}, torch.float64)
    up, down = moved(1), moved(-1)
    for index, (name, answer) in enumerate(answers.items()):
        gradient, parameter = gradients[name], parameters[name]
        update, forward = answer.update(gradient), answer.pushforward(gradient, tangents[name])
        pulled = answer.pullback(gradient, cotangents[name])
        assert torch.equal(answer.linearized(gradient)(tangents[name]), forward)
        for result in (update, forward, pulled):
            assert result.dtype == torch.float32
            assert result.shape == parameter.shape
            assert not result.requires_grad
        assert answer.meaningful(gradient).dtype == torch.bool
        assert answer.meaningful(gradient).all()
        left_out = decoupled_decay(rule, optimizer, index, parameter)
        # The weights are of size 1, so their own rounding (6e-8) is in the FP32 step.
        torch.testing.assert_close(update, in_fp32[name] - left_out, rtol=2e-5, atol=6e-7)
        size = float(update.abs().max())
        torch.testing.assert_close(update.double(), in_fp64[name] - left_out, rtol=2e-5, atol=2e-6 * size)
        difference = (up[name] - down[name]) / (2 * step)
        torch.testing.assert_close(forward.double(), difference, rtol=1e-4, atol=1e-5 * size + 2e-11)
        # <z, J e> = <J^T z, e>
        wanted = float((cotangents[name] * difference).sum())
        assert float((pulled * tangents[name]).sum()) == pytest.approx(wanted, rel=1e-4, abs=2e-5 * size)
        # The first step of most adaptive optimizers is lr * sign(g) but for eps.
        assert difference.abs().max() > 0.02 * size or steps == 0


@pytest.mark.parametrize("steps", [1, 7])
@pytest.mark.parametrize("rule", AUTOGRAD)
def test_vectors_are_answered_too_where_matrices_are_factored(rule: str, steps: int) -> None:
    """Norms, biases and vectors of adapters are examples."""
    kind, options = AUTOGRAD[rule]
    vector, *draws = torch.randn(steps + 3, 12, generator=torch.Generator().manual_seed(4))
    parameter = nn.Parameter(vector)
    optimizer = kind([parameter], **options)  # type: ignore[call-arg]
    for gradient in draws[:steps]:
        parameter.grad = gradient.clone()
        optimizer.step()
    gradient, tangent = draws[steps:]
    answer = responses(optimizer, {"": parameter})[""]

    def real(at: Tensor) -> Tensor:
        return own_step(optimizer, answer.at, at)[0]

    found = answer.update(gradient + 0.1 * tangent) - answer.update(gradient)
    expected = real((gradient + 0.1 * tangent).double()) - real(gradient.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)
    if not answer.meaningful(gradient).all():  # under a floor that is not far below the squares
        return
    slope = (real(gradient.double() + 1e-5 * tangent) - real(gradient.double() - 1e-5 * tangent)) / 2e-5
    torch.testing.assert_close(answer.pushforward(gradient, tangent).double(), slope, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("steps", [0, 7])
@pytest.mark.parametrize("rule", IN_FP64)
def test_update_and_products_are_those_of_the_real_optimizer(rule: str, steps: int) -> None:
    check_against_real_steps(IN_FP64[rule], *trained(IN_FP64[rule], steps), steps)


@pytest.mark.gpu
@pytest.mark.parametrize("steps", [0, 7])
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"fused": True, "capturable": True}, {"capturable": True}])
def test_update_and_products_are_those_of_the_real_optimizer_on_cuda(steps: int, options: dict[str, bool]) -> None:
    rule = ANALYTIC["AdamW decay"]
    check_against_real_steps((rule[0], {**rule[1], **options}), *trained(rule, steps, device="cuda", **options), steps)


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ["Adagrad", "RMSprop centered", "NAdam", "Adafactor", "transformers momentum"])
def test_the_other_ways_to_differentiate_work_on_cuda_too(rule: str) -> None:
    check_against_real_steps(IN_FP64[rule], *trained(IN_FP64[rule], 3, device="cuda"), 3)


def test_the_way_in_which_an_optimizer_is_differentiated_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    ways = {"analytic": ANALYTIC, "numerical": NUMERICAL, "autograd": {**AUTOGRAD, **MUON, "Lion": LION}}
    for way, rules in ways.items():
        for rule in rules.values():
            caplog.clear()
            parameters, optimizer = trained(rule, 0)
            with caplog.at_level(logging.INFO):
                for _ in range(3):
                    responses(optimizer, parameters)
            name, package = type(optimizer).__name__, type(optimizer).__module__.partition(".")[0]
            name = name if package == "torch" or name == "Lion" else f"{package}.{name}"
            wanted = f"snip-hf: the update of {name} is differentiated by the {way} rule."
            assert [record.getMessage() for record in caplog.records] == [wanted]


def test_the_step_count_may_be_a_tensor_on_the_device_or_a_number() -> None:
    parameters, optimizer = trained(ANALYTIC["AdamW single"], 5)
    wanted = responses(optimizer, parameters)["first"].update(draw(9)["first"])
    optimizer.state[parameters["first"]]["step"] = 5  # as in checkpoints of older torch versions
    assert torch.equal(responses(optimizer, parameters)["first"].update(draw(9)["first"]), wanted)


def test_adamw_matches_the_formula_of_the_method_document() -> None:
    lr, beta1, beta2, eps, steps = 0.02, 0.8, 0.95, 1e-2, 4
    parameters, optimizer = trained(ANALYTIC["AdamW betas"], steps)
    g = draw(55)["first"].double()
    state = optimizer.state[parameters["first"]]
    m = beta1 * state["exp_avg"].double() + (1 - beta1) * g
    v = beta2 * state["exp_avg_sq"].double() + (1 - beta2) * g**2
    t = steps + 1
    mh, vh = m / (1 - beta1**t), v / (1 - beta2**t)
    d = vh.sqrt() + eps
    wanted = lr * ((1 - beta1) / (1 - beta1**t) / d - mh * (1 - beta2) / (1 - beta2**t) * g / (vh.sqrt() * d**2))
    answer = responses(optimizer, parameters)["first"]
    torch.testing.assert_close(slope(answer, g.float()).double(), wanted, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(answer.update(g.float()).double(), lr * mh / d, rtol=1e-5, atol=1e-7)


def untouched(rule: Rule, **more: Any) -> tuple[Response, Tensor]:
    """A response whose third row of 7 never saw a gradient, and a gradient that is 0 there, too."""
    parameters, optimizer = trained(rule, 0, **more)
    gradient = draw(55)["first"]
    gradient[2] = 0
    for _ in range(3):
        take_step(parameters, optimizer, {"first": gradient, "second": draw(1)["second"]})
    return responses(optimizer, parameters)["first"], gradient


@pytest.mark.parametrize(
    ("rule", "more"),
    [
        (ANALYTIC["AdamW single"], {}),
        (ANALYTIC["AdamW single"], {"amsgrad": True}),
        (AUTOGRAD["Adafactor"], {}),
        (AUTOGRAD["Adafactor"], {"eps": (1e-30, 1e-3)}),
        (AUTOGRAD["transformers"], {}),
        (AUTOGRAD["transformers momentum"], {}),
        ((OtherAdamW, {"lr": 0.05}), {}),
        ((optim.RMSprop, {"lr": 0.05}), {}),
    ],
)
def test_an_element_that_was_never_touched_has_no_meaningful_derivative_and_answers_0(
    rule: Rule, more: dict[str, Any]
) -> None:
    answer, gradient = untouched(rule, **more)
    touched = torch.ones(5, 7, dtype=torch.bool)
    touched[2] = False
    assert torch.equal(answer.meaningful(gradient), touched)
    for product in (answer.pushforward, answer.pullback):
        moved = product(gradient, draw(8)["first"])
        assert torch.equal(moved[2], torch.zeros(7))
        assert torch.isfinite(moved).all()
        assert (moved[[0, 1, 3, 4]] != 0).all()
        # An input there does not affect other outputs.
        other = draw(8)["first"]
        other[2] = 1e6
        assert torch.equal(product(gradient, other), moved)


@pytest.mark.parametrize("size", [1e-8, 1e-12, 1e-16])
@pytest.mark.parametrize("eps", [1e-8, 1e-15, 0.0])
def test_the_derivative_of_adamw_stays_right_for_tiny_gradients(size: float, eps: float) -> None:
    parameter = nn.Parameter(torch.zeros(6))
    optimizer = AdamW([parameter], lr=0.1, eps=eps, betas=(0.9, 0.9), weight_decay=0.0)
    for step in range(3):
        parameter.grad = size * torch.randn(6, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    gradient = size * torch.randn(6, generator=torch.Generator().manual_seed(9))
    state, moved = optimizer.state[parameter], 1e-5 * size

    def update(g: Tensor) -> Tensor:
        m = 0.9 * state["exp_avg"].double() + 0.1 * g
        v = 0.9 * state["exp_avg_sq"].double() + 0.1 * g**2
        return 0.1 * m / (1 - 0.9**4) / ((v / (1 - 0.9**4)).sqrt() + eps)

    wanted = (update(gradient.double() + moved) - update(gradient.double() - moved)) / (2 * moved)
    got = slope(responses(optimizer, {"w": parameter})["w"], gradient)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))


@pytest.mark.parametrize("rule", ["AdamW decay", "Adafactor", "transformers", "RMSprop", "AdamW by another name"])
def test_gradients_of_the_size_that_large_models_have_are_answered_as_well(rule: str) -> None:
    """1e-6: weights of size 1 hide nothing, and squares do not underflow."""
    kind, options = IN_FP64[rule]
    parameters = {name: nn.Parameter(value) for name, value in draw(100).items()}
    optimizer = built((kind, {**options, "weight_decay": 0.0}), parameters)
    for step in range(3):
        take_step(parameters, optimizer, {name: 1e-6 * value for name, value in draw(step).items()})
    gradient, tangent = 1e-6 * draw(55)["first"], 1e-6 * draw(56)["first"]
    answer = responses(optimizer, parameters)["first"]
    ends = [answer.update(gradient + sign * 1e-2 * tangent).double() for sign in (1, -1)]
    difference = (ends[0] - ends[1]) / 2e-2
    got = answer.pushforward(gradient, tangent).double()
    assert float((got - difference).norm() / difference.norm()) < 1e-3
    assert difference.abs().max() > 1e-3


def test_a_bfloat16_parameter_and_gradient_are_answered_in_float32() -> None:
    parameter = nn.Parameter(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).bfloat16())
    for make in (AdamW, optim.Adafactor, optim.RMSprop):
        optimizer = make([parameter], lr=0.1)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        answer = responses(optimizer, {"w": parameter})["w"]
        gradient = torch.full_like(parameter, 0.5)
        for got in (answer.update(gradient), slope(answer, gradient), answer.pullback(gradient, gradient)):
            assert got.dtype == torch.float32
        assert torch.equal(answer.update(gradient), answer.update(gradient.float()))
        assert torch.equal(slope(answer, gradient), slope(answer, gradient.float()))


def test_parameters_that_are_frozen_or_in_no_group_have_no_response() -> None:
    parameters = {name: nn.Parameter(torch.ones(2)) for name in ("trained", "frozen", "forgotten")}
    parameters["frozen"].requires_grad_(False)
    optimizer = AdamW([parameters["trained"], parameters["frozen"]])
    assert list(responses(optimizer, parameters)) == ["trained"]


def test_no_optimizer_means_plain_sgd_with_learning_rate_1() -> None:
    parameters = {"w": nn.Parameter(torch.ones(3)), "frozen": nn.Parameter(torch.ones(3), requires_grad=False)}
    answers = responses(None, parameters)
    gradient = torch.tensor([0.5, -2.0, 0.0])
    assert list(answers) == ["w"]
    assert torch.equal(answers["w"].update(gradient), gradient)
    assert torch.equal(slope(answers["w"], gradient), torch.ones(3))
    assert responses(None, {"frozen": parameters["frozen"]}) == {}


# Lion


def test_lion_without_smoothing_is_the_real_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_rules, "LION_SMOOTHING", 1e-9)
    for steps in (0, 3):
        parameters, optimizer = trained(LION, steps)
        real = real_update(LION, parameters, optimizer, draw(55), torch.float32)
        for index, (name, answer) in enumerate(responses(optimizer, parameters).items()):
            lr = optimizer.param_groups[index]["lr"]
            torch.testing.assert_close(answer.update(draw(55)[name]), real[name] - lr * 0.3 * parameters[name].detach())


@pytest.mark.parametrize("steps", [0, 3])
def test_lion_s_products_are_those_with_the_derivative_of_the_smoothed_update(steps: int) -> None:
    parameters, optimizer = trained(LION, steps)
    check_own_differences(parameters, optimizer, 1e-6)


def test_lion_s_smoothed_update_is_the_written_out_formula() -> None:
    parameters, optimizer = trained(LION, 3)
    g = draw(55)["second"]
    c = 0.8 * optimizer.state[parameters["second"]]["exp_avg"] + 0.2 * g
    s = 0.5 * c.abs().mean()
    got = responses(optimizer, parameters)["second"].update(g)
    torch.testing.assert_close(got, 0.01 * c / (c**2 + s**2).sqrt())


def test_a_smoothed_sign_is_first_order_for_a_change_of_the_size_that_fp4_makes() -> None:
    generator = torch.Generator().manual_seed(0)
    gradient, change = (torch.randn(200, 200, generator=generator) for _ in range(2))
    parameter = nn.Parameter(torch.zeros(200, 200))
    answer = responses(reference.Lion([parameter], lr=1.0), {"w": parameter})["w"]
    change *= 0.2 * gradient.abs().mean()
    moved = answer.update(gradient + change) - answer.update(gradient)
    first_order = answer.pushforward(gradient, change)
    assert float(first_order.norm() / moved.norm()) == pytest.approx(1.0, abs=0.03)


def test_a_lion_that_steps_in_another_way_is_refused_although_it_has_the_name() -> None:
    class Lion(reference.Lion):
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:  # coupled decay
                parameter.grad = parameter.grad + 0.1 * parameter.detach()
            super().step()

    message = "it is named Lion but does not subtract lr"
    with pytest.raises(TypeError, match=message):
        check_optimizer(Lion([nn.Parameter(torch.ones(3, 3))], lr=1e-4))

    Lion.step = lambda self, closure=None: None  # type: ignore[method-assign]
    with pytest.raises(TypeError, match="it is named Lion but holds no momentum in full precision"):
        check_optimizer(Lion([nn.Parameter(torch.ones(3, 3))], lr=1e-4))


def test_a_sign_under_another_name_is_refused_since_it_has_no_derivative() -> None:
    with pytest.raises(TypeError, match="its update does not depend on the size of the gradient"):
        check_optimizer(NotLion([nn.Parameter(torch.ones(3, 3))], lr=1e-4))


# Muon


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("rule", MUON)
def test_muon_s_update_is_the_real_step_but_for_its_bfloat16_iteration(rule: str, steps: int) -> None:
    parameters, optimizer = trained(MUON[rule], steps)
    real = real_update(MUON[rule], parameters, optimizer, draw(55), torch.float32)
    for index, (name, answer) in enumerate(responses(optimizer, parameters).items()):
        group = optimizer.param_groups[index]
        wanted = real[name] - group["lr"] * group["weight_decay"] * parameters[name].detach()
        got = answer.update(draw(55)[name])
        # BF16 keeps 8 bits, so 0.4% per operation and element.
        assert float((got - wanted).norm() / wanted.norm()) < 0.03


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("rule", MUON)
def test_muon_s_products_are_those_with_the_derivative_of_our_update(rule: str, steps: int) -> None:
    parameters, optimizer = trained(MUON[rule], steps)
    check_own_differences(parameters, optimizer, 1e-6)


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("rule", MUON)
def test_muon_s_derivative_is_that_of_the_real_step_but_for_its_bfloat16_iteration(rule: str, steps: int) -> None:
    shapes = {"first": (24, 40), "second": (40, 16)}
    parameters = {name: nn.Parameter(value) for name, value in draw(100, shapes).items()}
    optimizer = built(MUON[rule], parameters)
    for step in range(steps):
        take_step(parameters, optimizer, draw(step, shapes))
    gradients, tangents = draw(55, shapes), draw(56, shapes)
    # A tenth of the gradient: a smaller change drowns in BF16's rounding, a larger one is not first-order.
    up, down = (
        real_update(
            MUON[rule],
            parameters,
            optimizer,
            {name: gradients[name] + sign * 0.1 * tangents[name] for name in gradients},
            torch.float32,
        )
        for sign in (1, -1)
    )
    for name, answer in responses(optimizer, parameters).items():
        difference = (up[name] - down[name]) / 0.2
        got = answer.pushforward(gradients[name], tangents[name])
        assert float((got - difference).norm() / difference.norm()) < 0.16


def check_own_differences(parameters: Parameters, optimizer: optim.Optimizer, step: float) -> None:
    """Against central differences of the rule itself in FP64, and each product against the other."""
    for name, answer in responses(optimizer, parameters).items():
        gradient, tangent, cotangent = (draw(seed)[name] for seed in (55, 56, 57))
        index = list(parameters).index(name)
        state = {key: value.double() for key, value in optimizer.state.get(parameters[name], {}).items()}
        at = UpdateContext(optimizer.param_groups[index], state, parameters[name].detach().double())
        rule = response.AUTOGRAD[response.rule_name(type(optimizer))]
        ends = [rule(at, gradient.double() + sign * step * tangent)[0] for sign in (1, -1)]
        difference = (ends[0] - ends[1]) / (2 * step)
        forward = answer.pushforward(gradient, tangent)
        torch.testing.assert_close(forward.double(), difference, rtol=1e-4, atol=1e-5 * float(difference.abs().max()))
        backward = answer.pullback(gradient, cotangent)
        size = float(cotangent.norm() * difference.norm())
        assert float((backward * tangent).sum()) == pytest.approx(float((cotangent * forward).sum()), abs=1e-5 * size)
        assert answer.meaningful(gradient).all()


# torchao's quantized states


@pytest.fixture
def torchao_optim(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torchao.optim whose steps run uncompiled."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    import torchao.optim

    return torchao.optim


LARGE = {"first": (64, 128), "second": (3, 5)}


@pytest.mark.parametrize("kind", ["AdamW8bit", "Adam8bit", "AdamW4bit", "Adam4bit", "AdamWFp8", "AdamFp8"])
def test_torchao_s_quantized_adam_is_torch_s_on_the_dequantized_state(torchao_optim: Any, kind: str) -> None:
    parameters = {name: nn.Parameter(value) for name, value in draw(100, LARGE).items()}
    options = {"lr": 0.05, "weight_decay": 0.3}
    optimizer = built((getattr(torchao_optim, kind), options), parameters)
    for step in range(3):
        take_step(parameters, optimizer, draw(step, LARGE))
    assert type(optimizer.state[parameters["first"]]["exp_avg"]) is not Tensor
    check_against_torch_s_adam(parameters, optimizer, AdamW if "AdamW" in kind else Adam, options)
    before = {name: value.detach().clone() for name, value in parameters.items()}
    answers = responses(optimizer, parameters)
    states = bits(codes(optimizer))
    updates = {name: answer.update(draw(55, LARGE)[name]) for name, answer in answers.items()}
    assert bits(codes(optimizer)) == states
    take_step(parameters, optimizer, draw(55, LARGE))
    for index, (name, parameter) in enumerate(parameters.items()):
        decay = float(optimizer.param_groups[index]["lr"]) * 0.3 * before[name] if "AdamW" in kind else 0.0
        torch.testing.assert_close(updates[name], before[name] - parameter.detach() - decay, rtol=2e-5, atol=1e-6)


def codes(optimizer: optim.Optimizer) -> list[Tensor]:
    """Returns the numbers that the quantized states hold."""
    states = [value for state in optimizer.state.values() for value in state.values() if type(value) is not Tensor]
    return [getattr(state, name) for state in states for name in ("codes", "scale")]


def check_against_torch_s_adam(
    parameters: Parameters, optimizer: optim.Optimizer, kind: type[optim.Optimizer], options: dict[str, Any]
) -> None:
    copies = {name: nn.Parameter(value.detach().clone()) for name, value in parameters.items()}
    plain = built((kind, options), copies)
    for name, value in parameters.items():
        state = optimizer.state[value].items()
        plain.state[copies[name]] = {k: v if type(v) is Tensor else v.dequantize() for k, v in state}
    wanted, gradients = responses(plain, copies), draw(55, LARGE)
    for name, answer in responses(optimizer, parameters).items():
        assert torch.equal(answer.update(gradients[name]), wanted[name].update(gradients[name]))
        assert torch.equal(slope(answer, gradients[name]), slope(wanted[name], gradients[name]))


def test_torchao_s_adam_answers_before_its_first_step(torchao_optim: Any) -> None:
    parameters = {name: nn.Parameter(value) for name, value in draw(100, LARGE).items()}
    optimizer = built((torchao_optim.AdamW8bit, {"lr": 0.05, "weight_decay": 0.0}), parameters)
    got = responses(optimizer, parameters)["first"].update(draw(55, LARGE)["first"])
    torch.testing.assert_close(got, 0.05 * draw(55, LARGE)["first"].sign(), rtol=0, atol=1e-4)


# Numerical differences


def test_an_all_zero_gradient_has_a_finite_numerical_derivative() -> None:
    parameters, optimizer = trained((optim.RMSprop, {"lr": 0.05}), 3)
    mean = 0.99 * optimizer.state[parameters["first"]]["square_avg"]
    got = slope(responses(optimizer, parameters)["first"], torch.zeros(5, 7))
    torch.testing.assert_close(got, 0.05 / (mean.sqrt() + 1e-8), rtol=1e-3, atol=0)


class Noisy(optim.Optimizer):
    """Plain descent that draws random numbers, counts its steps and is told of by a hook."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.log: list[float] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.log.append(random.random())
                scale = 1 + 0.1 * torch.rand(parameter.shape)
                self.state[parameter]["seen"] = [*self.state[parameter].get("seen", []), len(self.log)]
                parameter.sub_(group["lr"] * scale * parameter.grad)


def test_a_step_on_copies_touches_no_generator_no_attribute_and_no_hook() -> None:
    parameters, optimizer = trained((Noisy, {"lr": 0.5}), 2)
    called: list[optim.Optimizer] = []
    optimizer.register_step_pre_hook(lambda *arguments: called.append(optimizer))
    optimizer.register_step_post_hook(lambda *arguments: called.append(optimizer))
    before = copy.deepcopy((optimizer.state_dict(), vars(optimizer)["log"]))
    states = torch.get_rng_state(), random.getstate()
    answer = responses(optimizer, parameters)["first"]
    update, derivative = answer.update(draw(3)["first"]), slope(answer, draw(3)["first"])
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (optimizer.state_dict(), vars(optimizer)["log"]) == before
    assert called == []
    # Both ends of a difference draw the same numbers.
    torch.testing.assert_close(derivative, update / draw(3)["first"])
    assert derivative.std() > 0.005


class HoldsItsModel(optim.Adagrad):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.models = {"of mine": [model]}


def test_the_model_that_an_optimizer_holds_is_neither_copied_nor_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer, weight, gradient = HoldsItsModel(model), model[0].weight, torch.ones(4, 4)
    copied: list[Tensor] = []
    monkeypatch.setattr(nn.Parameter, "__deepcopy__", lambda self, memo: copied.append(self))
    monkeypatch.setattr(Tensor, "__deepcopy__", lambda self, memo: self.clone())
    at = UpdateContext(optimizer.param_groups[0], optimizer.state[weight], weight)
    update, _ = own_step(optimizer, at, gradient)
    assert copied == []
    weight.grad = gradient
    before = weight.detach().clone()
    optimizer.step()
    torch.testing.assert_close(update, before - weight.detach())


def test_a_scheduler_s_wrapper_around_step_is_not_run() -> None:
    parameters, optimizer = trained(NUMERICAL["Adagrad"], 2)
    scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step == 0 else 1.0)
    assert "step" in vars(optimizer)
    before = {name: value.detach().clone() for name, value in parameters.items()}
    answers = responses(optimizer, parameters)  # at learning rate 0
    assert not answers["first"].update(draw(3)["first"]).any()
    optimizer.step()
    scheduler.step()
    assert answers["first"].update(draw(3)["first"]).any()
    assert all(torch.equal(parameters[name], before[name]) for name in before)


def test_own_step_returns_what_the_real_step_subtracts_and_the_state_after_it() -> None:
    parameters, optimizer = trained(NUMERICAL["Adagrad"], 2)
    first = parameters["first"]
    at = UpdateContext(optimizer.param_groups[0], optimizer.state[first], first.detach())
    update, state = own_step(optimizer, at, draw(7)["first"])
    before = first.detach().clone()
    take_step(parameters, optimizer, draw(7))
    assert torch.equal(before - first.detach(), update)
    assert torch.equal(optimizer.state[first]["sum"], state["sum"])
    assert optimizer.state[first]["step"] == state["step"] == 3


# Nothing is left behind


def bits(value: Any) -> Any:
    """Everything in an optimizer's state, comparable with ==."""
    if isinstance(value, Tensor):
        return (value.dtype, value.tolist())
    if isinstance(value, dict):
        return {key: bits(inner) for key, inner in value.items()}
    return [bits(inner) for inner in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("rule", ALL)
def test_asking_changes_neither_state_nor_parameters(rule: str) -> None:
    parameters, optimizer = trained(ALL[rule], 2)
    before = bits(optimizer.state_dict()), bits(parameters)
    random_state = torch.get_rng_state()
    entries = len(optimizer.state)
    for name, answer in responses(optimizer, parameters).items():
        answer.update(draw(3)[name])
        answer.pushforward(draw(3)[name], draw(4)[name])
        answer.pullback(draw(3)[name], draw(4)[name])
        answer.meaningful(draw(3)[name])
    assert (bits(optimizer.state_dict()), bits(parameters)) == before
    assert len(optimizer.state) == entries
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(parameter.grad is None for parameter in parameters.values())


def test_accelerates_wrapper_is_looked_through() -> None:
    states = (AcceleratorState, PartialState, GradientState)
    parameters, optimizer = trained(ANALYTIC["AdamW fused"], 2)
    wanted = slope(responses(optimizer, parameters)["first"], draw(3)["first"])
    for state in states:
        state._reset_state()
    try:
        wrapped = Accelerator(cpu=True).prepare(optimizer)
        assert type(wrapped) is not AdamW
        assert check_optimizer(wrapped) == [optimizer]
        assert torch.equal(slope(responses(wrapped, parameters)["first"], draw(3)["first"]), wanted)
    finally:
        for state in states:
            state._reset_state()


# Refusals


class Normed(optim.Optimizer):
    """Subtracts the gradient in units of its own norm."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * parameter.grad / parameter.grad.norm())


class OtherMuon(optim.Muon):
    """Not exactly torch's."""


class InHalfPrecision(optim.Optimizer):
    """Ignores parameters that are not FP32, as a compiled kernel might."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.dtype == torch.float32:
                parameter.sub_(0.1 * parameter.grad)


OTHERS = "its update of one element depends on the gradients of others"
SIZE = "its update does not depend on the size of the gradient"


@pytest.mark.parametrize(
    ("kind", "name", "reason"),
    [
        (Normed, f"{__name__}.Normed", OTHERS),
        (OtherMuon, f"{__name__}.OtherMuon", OTHERS),
        (InHalfPrecision, f"{__name__}.InHalfPrecision", "its step in FP64 is not the one that it takes in FP32"),
        (optim.Rprop, "torch.optim.rprop.Rprop", SIZE),
        (
            optim.LBFGS,
            "torch.optim.lbfgs.LBFGS",
            "its step on a copy failed (TypeError: LBFGS.step() missing 1 required positional argument: 'closure')",
        ),
        (
            optim.SparseAdam,
            "torch.optim.sparse_adam.SparseAdam",
            "its step on a copy failed (RuntimeError: SparseAdam does not support dense gradients, please consider "
            "Adam instead)",
        ),
        (lambda params: object(), "builtins.object", "it is not a torch.optim.Optimizer"),
    ],
)
def test_an_optimizer_that_cannot_be_differentiated_is_refused_by_name(
    kind: Callable[[Any], Any], name: str, reason: str
) -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    message = (
        f"Cannot differentiate the update of {name}: {reason}. Expected an optimizer that docs/optimizers.md lists, or "
        "one whose update of an element depends on that element's gradient only. Use one of these (Trainer: "
        "optim='adamw_torch' or 'adamw_torch_fused'), or a policy that needs no probe, such as "
        "policy='layer-position'."
    )
    for ask in (check_optimizer, lambda optimizer: responses(optimizer, {"w": parameter})):
        with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
            ask(kind([parameter]))


def test_every_group_is_tried_with_its_own_hyperparameters() -> None:
    class Sometimes(Normed):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(parameter.grad / (parameter.grad.norm() if group["normed"] else 1))

    first, second = (nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    check_optimizer(Sometimes([{"params": [first], "normed": False}, {"params": [], "normed": True}]))
    with pytest.raises(TypeError, match=OTHERS):
        check_optimizer(Sometimes([{"params": [first], "normed": False}, {"params": [second], "normed": True}]))


CONFIG = fp4_config(**SCHEDULE)


def split(model: nn.Module) -> tuple[optim.Muon, optim.AdamW]:
    """Muon for the blocks' matrices, AdamW for the rest."""
    matrices = {name for name, value in model.named_parameters() if value.dim() == 2 and "layers" in name}
    named = dict(model.named_parameters())
    rest = [value for name, value in named.items() if name not in matrices]
    return optim.Muon([named[name] for name in sorted(matrices)], lr=2e-3), optim.AdamW(rest, lr=1e-3)


class Combined(optim.Optimizer):
    """Looks like one optimizer and holds several, as users write it."""

    def __init__(self, *optimizers: optim.Optimizer) -> None:
        self.optimizers = list(optimizers)
        self.defaults: dict[str, Any] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for one in self.optimizers for group in one.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        return {key: value for one in self.optimizers for key, value in one.state.items()}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.optimizers:
            one.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.optimizers:
            one.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {str(index): one.state_dict() for index, one in enumerate(self.optimizers)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for index, one in enumerate(self.optimizers):
            one.load_state_dict(state_dict[str(index)])


def two() -> tuple[dict[str, nn.Parameter], list[optim.Optimizer]]:
    weights = {name: nn.Parameter(torch.ones(2, 2)) for name in ("first", "second")}
    return weights, [optim.SGD([weights["first"]], lr=0.5), optim.SGD([weights["second"]], lr=0.25)]


@pytest.mark.parametrize("around", [list, tuple, lambda both: dict(enumerate(both)), lambda both: Combined(*both)])
def test_each_weight_is_answered_for_by_its_own_optimizer(around: Any) -> None:
    weights, both = two()
    together = SimpleNamespace(optimizer=around(both))  # as Accelerate wraps it
    assert check_optimizer(together) == parts_of(together) == both
    assert [group["lr"] for group in groups_of(together)] == [0.5, 0.25]
    found = {name: answer.update(torch.ones(2, 2)) for name, answer in responses(together, weights).items()}
    assert {name: update.unique().tolist() for name, update in found.items()} == {"first": [0.5], "second": [0.25]}


def test_each_of_a_list_may_be_wrapped() -> None:
    _, both = two()
    assert parts_of([SimpleNamespace(optimizer=one) for one in both]) == both


def test_one_of_several_that_cannot_be_differentiated_is_refused_by_name() -> None:
    weights, (first, _) = two()
    with pytest.raises(TypeError, match=r"^Cannot differentiate the update of torch\.optim\.rprop\.Rprop: "):
        check_optimizer([first, optim.Rprop([weights["second"]])])
    with pytest.raises(TypeError, match=r"^Cannot differentiate the update of builtins\.str: it is not a torch\.optim"):
        check_optimizer([first, "adamw"])


def test_a_trainer_with_muon_and_adamw_in_one_object_refreshes_its_plan(tmp_path: Path) -> None:
    model = model_with_dropout()
    combined = Combined(*split(model))
    scheduler = optim.lr_scheduler.LambdaLR(combined.optimizers[0], lambda step: 1.0)
    run = train(tmp_path, CONFIG, model=model, trainer={"optimizers": (combined, scheduler)}, max_steps=4)
    ((step, status, weight),) = [
        (line["step"], line["status"], line["divergence"]["fp4"]["weight"]) for line in run.refreshes
    ]
    assert (step, status) == (2, "applied") and weight > 0


def test_a_loop_of_one_s_own_gives_both(tmp_path: Path) -> None:
    model = tiny_llama(hidden=32)
    both = list(split(model))
    controller = SnipController(model, both, CONFIG, output_dir=tmp_path)
    with one_thread():
        for step in range(1, 5):
            batch = text(2, 24, step)
            controller.capture(batch)
            model(**batch).loss.backward()
            controller.before_optimizer_step(step)
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
            controller.after_step(step)
        controller.close()
    assert [line["status"] for line in refreshes(tmp_path)] == ["applied"]


def test_another_one_that_trains_no_layer_may_stand_still(tmp_path: Path) -> None:
    loop = Loop(CONFIG, tmp_path)
    assert len(loop.optimizer.param_groups) == 1
    idle = optim.AdamW([nn.Parameter(torch.ones(2))], lr=1e-3)
    loop.controller.close()
    loop.controller = SnipController(loop.model, [loop.optimizer, idle], CONFIG, output_dir=tmp_path)
    loop.run(7)
    assert [line["status"] for line in refreshes(tmp_path)] == ["applied"]
