"""Is h(g) the step that torch's optimizers really take, and h'(g) its derivative?"""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from snip_hf.optimizers import Response, check_optimizer, responses

SHAPES = {"first": (5, 7), "second": (4, 3)}
Parameters = dict[str, nn.Parameter]

RULES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
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


def draw(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def trained(rule: str, steps: int, device: str = "cpu", **more: Any) -> tuple[Parameters, torch.optim.Optimizer]:
    """Two parameters in two groups, the second with a fifth of the learning rate, after steps on random gradients."""
    kind, options = RULES[rule]
    parameters = {name: nn.Parameter(value.to(device)) for name, value in draw(100).items()}
    groups = [
        {"params": [parameters["first"]]},
        {"params": [parameters["second"]], "lr": options["lr"] / 5},
    ]
    optimizer = kind(groups, **{**options, **more})  # type: ignore[call-arg]
    for step in range(steps):
        take_step(parameters, optimizer, {name: value.to(device) for name, value in draw(step).items()})
    return parameters, optimizer


def take_step(parameters: Parameters, optimizer: torch.optim.Optimizer, gradients: dict[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.grad = gradients[name].to(parameter.dtype).clone()
    optimizer.step()
    optimizer.zero_grad()


def real_update(
    parameters: Parameters, optimizer: torch.optim.Optimizer, gradients: dict[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """What the next step of a copy subtracts, in dtype; decoupled weight decay is taken out."""
    copies = {name: nn.Parameter(value.detach().to(dtype, copy=True)) for name, value in parameters.items()}
    twin = type(optimizer)([{"params": [value]} for value in copies.values()], lr=0.0)  # type: ignore[call-arg]
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = {name: value.detach().clone() for name, value in copies.items()}
    take_step(copies, twin, gradients)
    updates = {}
    for group, (name, value) in zip(twin.param_groups, copies.items(), strict=True):
        decay = float(group["lr"]) * group["weight_decay"] if group.get("decoupled_weight_decay") else 0.0
        updates[name] = before[name] * (1 - decay) - value.detach()
    return updates


def check_update_and_derivative(parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
    answers = responses(optimizer, parameters)
    gradients = {name: value.to(parameters[name].device) for name, value in draw(55).items()}
    step = 1e-5

    def moved(sign: float) -> dict[str, Tensor]:
        ends = {name: value.double() + sign * step for name, value in gradients.items()}
        return real_update(parameters, optimizer, ends, torch.float64)

    in_fp32 = real_update(parameters, optimizer, gradients, torch.float32)
    in_fp64 = real_update(parameters, optimizer, {k: v.double() for k, v in gradients.items()}, torch.float64)
    up, down = moved(1), moved(-1)
    assert list(answers) == list(parameters)
    for name, answer in answers.items():
        update, derivative = answer.update(gradients[name]), answer.derivative(gradients[name])
        assert update.dtype == derivative.dtype == torch.float32
        assert update.shape == derivative.shape == parameters[name].shape
        # The weights are of size 1, so their own rounding (6e-8) is in the FP32 step.
        torch.testing.assert_close(update, in_fp32[name], rtol=1e-5, atol=5e-7)
        torch.testing.assert_close(update.double(), in_fp64[name], rtol=1e-5, atol=1e-7)
        slope = (up[name] - down[name]) / (2 * step)
        torch.testing.assert_close(derivative.double(), slope, rtol=1e-4, atol=2e-6)
        # Adam's first step is lr * sign(g) but for eps, so that there the slope is 0 but for eps.
        assert slope.abs().max() > 1e-3 or (not optimizer.state and not isinstance(optimizer, SGD))


@pytest.mark.parametrize("steps", [0, 1, 7])
@pytest.mark.parametrize("rule", RULES)
def test_update_and_derivative_are_those_of_the_real_optimizer(rule: str, steps: int) -> None:
    check_update_and_derivative(*trained(rule, steps))


@pytest.mark.gpu
@pytest.mark.parametrize("steps", [0, 7])
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"fused": True, "capturable": True}, {"capturable": True}])
def test_update_and_derivative_are_those_of_the_real_optimizer_on_cuda(steps: int, options: dict[str, bool]) -> None:
    check_update_and_derivative(*trained("AdamW decay", steps, device="cuda", **options))


def test_the_step_count_may_be_a_tensor_on_the_device_or_a_number() -> None:
    parameters, optimizer = trained("AdamW single", 5)
    wanted = responses(optimizer, parameters)["first"].update(draw(9)["first"])
    optimizer.state[parameters["first"]]["step"] = 5  # as in checkpoints of older torch versions
    assert torch.equal(responses(optimizer, parameters)["first"].update(draw(9)["first"]), wanted)


@pytest.mark.parametrize("rule", ["AdamW single", "AdamW maximize", "Adam L2", "SGD nesterov"])
def test_derivative_is_the_finite_difference_of_update(rule: str) -> None:
    parameters, optimizer = trained(rule, 3)
    gradient = draw(55)["first"]
    answer = responses(optimizer, parameters)["first"]
    difference = (answer.update(gradient + 1e-3).double() - answer.update(gradient - 1e-3).double()) / 2e-3
    torch.testing.assert_close(answer.derivative(gradient).double(), difference, rtol=1e-2, atol=1e-4)


def test_adamw_matches_the_formula_of_the_method_document() -> None:
    lr, beta1, beta2, eps, steps = 0.02, 0.8, 0.95, 1e-2, 4
    parameters, optimizer = trained("AdamW betas", steps)
    g = draw(55)["first"].double()
    state = optimizer.state[parameters["first"]]
    m = beta1 * state["exp_avg"].double() + (1 - beta1) * g
    v = beta2 * state["exp_avg_sq"].double() + (1 - beta2) * g**2
    t = steps + 1
    mh, vh = m / (1 - beta1**t), v / (1 - beta2**t)
    d = vh.sqrt() + eps
    slope = lr * ((1 - beta1) / (1 - beta1**t) / d - mh * (1 - beta2) / (1 - beta2**t) * g / (vh.sqrt() * d**2))
    answer = responses(optimizer, parameters)["first"]
    torch.testing.assert_close(answer.derivative(g.float()).double(), slope, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(answer.update(g.float()).double(), lr * mh / d, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_an_element_that_was_never_touched_has_derivative_0(amsgrad: bool) -> None:
    parameters, optimizer = trained("AdamW single", 0, amsgrad=amsgrad)
    gradient = draw(55)["first"]
    gradient[2] = 0
    for _ in range(3):
        take_step(parameters, optimizer, {"first": gradient, "second": draw(1)["second"]})
    derivative = responses(optimizer, parameters)["first"].derivative(gradient)
    assert torch.equal(derivative[2], torch.zeros(7))
    assert torch.isfinite(derivative).all()
    assert (derivative[[0, 1, 3, 4]] != 0).all()


@pytest.mark.parametrize("size", [1e-8, 1e-12, 1e-16])
@pytest.mark.parametrize("eps", [1e-8, 1e-15, 0.0])
def test_derivative_stays_right_for_tiny_gradients(size: float, eps: float) -> None:
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
    got = responses(optimizer, {"w": parameter})["w"].derivative(gradient)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))


def test_a_bfloat16_parameter_and_gradient_are_answered_in_float32() -> None:
    parameter = nn.Parameter(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).bfloat16())
    optimizer = AdamW([parameter], lr=0.1)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    answer = responses(optimizer, {"w": parameter})["w"]
    state = {key: value.float() for key, value in optimizer.state[parameter].items()}
    wide = Response(AdamW, optimizer.param_groups[0], state, parameter.detach().float())
    gradient = torch.full_like(parameter, 0.5)
    for name in ("update", "derivative"):
        got = getattr(answer, name)(gradient)
        assert got.dtype == torch.float32
        assert torch.equal(got, getattr(wide, name)(gradient.float()))


def test_every_parameter_answers_with_the_learning_rate_of_its_own_group() -> None:
    parameters, optimizer = trained("SGD plain", 0)
    slopes = {name: answer.derivative(draw(1)[name]) for name, answer in responses(optimizer, parameters).items()}
    assert torch.equal(slopes["first"], torch.full((5, 7), 0.1))
    assert torch.equal(slopes["second"], torch.full((4, 3), 0.02))


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
    assert torch.equal(answers["w"].derivative(gradient), torch.ones(3))
    assert responses(None, {"frozen": parameters["frozen"]}) == {}


def test_asking_changes_neither_state_nor_parameters() -> None:
    for rule in RULES:
        parameters, optimizer = trained(rule, 2)
        before = copy.deepcopy((optimizer.state_dict(), parameters))
        for name, answer in responses(optimizer, parameters).items():
            answer.update(draw(3)[name])
            answer.derivative(draw(3)[name])
        assert str(optimizer.state_dict()) == str(before[0])
        assert all(torch.equal(parameters[name], before[1][name]) for name in parameters)


def test_asking_before_the_first_step_creates_no_state() -> None:
    parameters, optimizer = trained("AdamW single", 0)
    responses(optimizer, parameters)["first"].derivative(draw(0)["first"])
    assert len(optimizer.state) == 0


def test_accelerates_wrapper_is_looked_through() -> None:
    states = (AcceleratorState, PartialState, GradientState)
    parameters, optimizer = trained("AdamW fused", 2)
    wanted = responses(optimizer, parameters)["first"].derivative(draw(3)["first"])
    for state in states:
        state._reset_state()
    try:
        wrapped = Accelerator(cpu=True).prepare(optimizer)
        assert type(wrapped) is not AdamW
        assert check_optimizer(wrapped) is optimizer
        assert torch.equal(responses(wrapped, parameters)["first"].derivative(draw(3)["first"]), wanted)
    finally:
        for state in states:
            state._reset_state()


class Nadamlike(AdamW):
    """A subclass may step in another way, so it is not taken for AdamW."""


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (torch.optim.Adagrad, "torch.optim.adagrad.Adagrad"),
        (torch.optim.RMSprop, "torch.optim.rmsprop.RMSprop"),
        (torch.optim.NAdam, "torch.optim.nadam.NAdam"),
        (torch.optim.Adafactor, "torch.optim.Adafactor"),
        (Nadamlike, f"{__name__}.Nadamlike"),
    ],
)
def test_an_optimizer_that_cannot_be_differentiated_is_refused_by_name(kind: Any, name: str) -> None:
    parameter = nn.Parameter(torch.ones(2))
    message = (
        f"Cannot differentiate the update of {name}; expected torch.optim.AdamW, Adam or SGD. Use one of these "
        "(Trainer: optim='adamw_torch' or 'adamw_torch_fused'), or a policy that needs no probe, such as "
        "policy='layer-position'."
    )
    for ask in (check_optimizer, lambda optimizer: responses(optimizer, {"w": parameter})):
        with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
            ask(kind([parameter]))
