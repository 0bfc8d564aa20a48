"""Are the rules of packages the steps that their optimizers take? By stand-ins, and by packages that are installed."""

from __future__ import annotations

import copy
import importlib
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optimizer_stand_ins as stand_ins
import pytest
import torch
from configs import fp4_config
from tiny_runs import FAST, SCHEDULE, Run, differing, model_with_dropout, train, weights, without_seconds
from torch import Tensor, nn, optim
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

from snip_hf.optimizers import response
from snip_hf.optimizers.bitsandbytes_states import dequantized
from snip_hf.optimizers.response import check_optimizer, responses
from snip_hf.optimizers.update_rules import UpdateContext

# One of each is above the 4,096 elements from which states are in 8 bits; one is higher than wide.
SHAPES = {"wide": (64, 96), "tall": (48, 16)}
Parameters = dict[str, nn.Parameter]
Make = Callable[[Any], optim.Optimizer]


def low_rank(**more: Any) -> dict[str, Any]:
    return {"rank": 4, "update_proj_gap": 5, "scale": 0.25, "proj_type": "std", **more}


def apollo(**more: Any) -> dict[str, Any]:
    return low_rank(**{"proj": "random", "scale_type": "channel", "scale": 2.0, **more})


Case = tuple[str, str, dict[str, Any], dict[str, Any]]
"""Package, class, arguments, and those of the parameters' group."""
ELEMENTWISE: dict[str, Case] = {
    "AdamW in 8 bits": ("bitsandbytes.optim", "AdamW", {"lr": 1e-2, "optim_bits": 8, "weight_decay": 0.1}, {}),
    "AdamW in 32 bits": ("bitsandbytes.optim", "AdamW", {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-3}, {}),
    "AdEMAMix in 8 bits": ("bitsandbytes.optim", "AdEMAMix", {"lr": 1e-2, "optim_bits": 8}, {}),
    "AdEMAMix warming up": ("bitsandbytes.optim", "AdEMAMix", {"lr": 1e-2, "t_alpha": 20, "t_beta3": 20}, {}),
    "AdEMAMix warmed up": ("bitsandbytes.optim", "AdEMAMix", {"lr": 1e-2, "t_alpha": 5, "t_beta3": 5}, {}),
    "RMSprop in 8 bits": ("bitsandbytes.optim", "RMSprop", {"lr": 1e-2, "optim_bits": 8}, {}),
    "RMSprop in 32 bits": ("bitsandbytes.optim", "RMSprop", {"lr": 1e-2, "alpha": 0.9, "weight_decay": 0.1}, {}),
    "schedule-free AdamW": ("schedulefree", "AdamWScheduleFree", {"lr": 1e-2, "weight_decay": 0.1}, {}),
    "schedule-free warm-up": ("schedulefree", "AdamWScheduleFree", {"lr": 1e-2, "warmup_steps": 20}, {}),
    "schedule-free RAdam": ("schedulefree", "RAdamScheduleFree", {"lr": 1e-2, "betas": (0.9, 0.95)}, {}),
    "schedule-free SGD": ("schedulefree", "SGDScheduleFree", {"lr": 0.5, "weight_decay": 0.1, "warmup_steps": 3}, {}),
}
AUTOGRAD: dict[str, Case] = {
    "GaLore": ("galore_torch", "GaLoreAdamW", {"lr": 1e-2, "weight_decay": 0.1}, low_rank()),
    "GaLore reverse": ("galore_torch", "GaLoreAdamW", {"lr": 1e-2}, low_rank(proj_type="reverse_std")),
    "GaLore left": ("galore_torch", "GaLoreAdamW", {"lr": 1e-2}, low_rank(proj_type="left")),
    "GaLore full": ("galore_torch", "GaLoreAdamW", {"lr": 1e-2}, low_rank(proj_type="full")),
    "GaLore without rank": ("galore_torch", "GaLoreAdamW", {"lr": 1e-2, "weight_decay": 0.1}, {}),
    "GaLore Adafactor": (
        "galore_torch",
        "GaLoreAdafactor",
        {"lr": 1e-2, "scale_parameter": False, "relative_step": False},
        low_rank(),
    ),
    "APOLLO": ("apollo_torch", "APOLLOAdamW", {"lr": 1e-2, "weight_decay": 0.1}, apollo()),
    "APOLLO by tensor": ("apollo_torch", "APOLLOAdamW", {"lr": 1e-2}, apollo(scale_type="tensor", proj_type="left")),
    "APOLLO by SVD": ("apollo_torch", "APOLLOAdamW", {"lr": 1e-2}, apollo(proj="svd", update_proj_gap=100)),
    "APOLLO without rank": ("apollo_torch", "APOLLOAdamW", {"lr": 1e-2}, {}),
    "StableAdamW": ("optimi", "StableAdamW", {"lr": 1e-2, "weight_decay": 0.1, "foreach": False, "triton": False}, {}),
    "StableAdamW apart": (
        "optimi",
        "StableAdamW",
        {"lr": 1e-2, "decouple_lr": True, "max_lr": 0.1, "foreach": False, "triton": False},
        {},
    ),
}
CASES = ELEMENTWISE | AUTOGRAD
LION: dict[str, Case] = {
    "Lion in 8 bits": ("bitsandbytes.optim", "Lion", {"lr": 1e-2, "optim_bits": 8, "weight_decay": 0.1}, {}),
    "Lion in 32 bits": ("bitsandbytes.optim", "Lion", {"lr": 1e-2, "betas": (0.8, 0.95)}, {}),
}


def draw(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.fixture(params=["stand-in", "real"])
def source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Case], Make]:
    """Makes a case's optimizer, of the stand-in or of the package."""

    def find(case: Case) -> Make:
        package, name, arguments, options = case
        if request.param == "real":
            warnings.simplefilter("ignore")
            pytest.importorskip(package.split(".")[0])
            kind = getattr(importlib.import_module(package), name)
        else:
            kind = getattr(stand_ins, name)
        return lambda parameters: kind([{"params": list(parameters), **options}], **arguments)

    with warnings.catch_warnings():
        yield find


def trained(make: Make, steps: int) -> tuple[Parameters, optim.Optimizer]:
    parameters = {name: nn.Parameter(value) for name, value in draw(100).items()}
    optimizer = make(parameters.values())
    if hasattr(optimizer, "train"):
        optimizer.train()
    for step in range(steps):
        take_step(parameters, optimizer, draw(step))
    return parameters, optimizer


def take_step(parameters: Parameters, optimizer: optim.Optimizer, gradients: dict[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.grad = gradients[name].to(parameter.dtype).clone()
    optimizer.step()


def real_update(
    make: Make, parameters: Parameters, optimizer: optim.Optimizer, gradients: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Returns the amount that the next step of a copy subtracts."""
    copies = {name: nn.Parameter(value.detach().clone()) for name, value in parameters.items()}
    twin, memo = make(copies.values()), {id(value): copies[name] for name, value in parameters.items()}
    for group, other in zip(optimizer.param_groups, twin.param_groups, strict=True):
        other.update({key: copy.deepcopy(value, memo) for key, value in group.items() if key != "params"})
    twin.state.update({memo[id(key)]: copy.deepcopy(value) for key, value in optimizer.state.items()})
    take_step(copies, twin, gradients)
    return {name: parameters[name].detach() - value.detach() for name, value in copies.items()}


@pytest.mark.parametrize("steps", [0, 9])
@pytest.mark.parametrize("case", CASES)
def test_the_change_of_the_update_is_that_of_the_real_step(
    case: str, steps: int, source: Callable[[Case], Make]
) -> None:
    make = source(CASES[case])
    parameters, optimizer = trained(make, steps)
    answers, (gradients, others) = responses(optimizer, parameters), map(draw, (55, 56))
    before, after = (real_update(make, parameters, optimizer, one) for one in (gradients, others))
    for name, answer in answers.items():
        expected = after[name] - before[name]
        got = answer.update(others[name]) - answer.update(gradients[name])
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()) + 6e-8)


@pytest.mark.parametrize("case", CASES | LION)
def test_the_products_are_those_with_the_derivative_of_the_update(case: str, source: Callable[[Case], Make]) -> None:
    parameters, optimizer = trained(source((CASES | LION)[case]), 9)
    name = response.rule_name(type(optimizer))
    for key, answer in responses(optimizer, parameters).items():
        gradient, tangent, cotangent = (draw(seed)[key] for seed in (55, 56, 57))
        rule, exact = (response.ELEMENTWISE | response.AUTOGRAD)[name], in_fp64(answer.at)  # type: ignore[operator]
        ends = [rule(exact, gradient.double() + sign * 1e-6 * tangent)[0] for sign in (1, -1)]
        difference = (ends[0] - ends[1]) / 2e-6
        size = float(difference.abs().max())
        assert size > 0
        forward, backward = answer.pushforward(gradient, tangent), answer.pullback(gradient, cotangent)
        torch.testing.assert_close(forward.double(), difference, rtol=1e-3, atol=1e-4 * size)
        wanted, norms = float((cotangent * difference).sum()), float(cotangent.norm() * difference.norm())
        assert float((backward * tangent).sum()) == pytest.approx(wanted, abs=1e-4 * norms)
        assert answer.meaningful(gradient).all()


def test_a_random_projection_that_the_step_renews_is_the_new_one(source: Callable[[Case], Make]) -> None:
    make = source(AUTOGRAD["APOLLO"])
    parameters, optimizer = trained(make, 5)  # the sixth step renews it
    before, after = (real_update(make, parameters, optimizer, draw(seed)) for seed in (55, 56))
    for name, answer in responses(optimizer, parameters).items():
        got = answer.update(draw(56)[name]) - answer.update(draw(55)[name])
        torch.testing.assert_close(got, after[name] - before[name], rtol=1e-3, atol=1e-6)


def in_fp64(at: UpdateContext) -> UpdateContext:
    return UpdateContext(at.group, at.state, at.parameter.double())


@pytest.mark.parametrize("case", CASES | LION)
def test_asking_changes_neither_states_nor_weights(case: str, source: Callable[[Case], Make]) -> None:
    make = source((CASES | LION)[case])
    (parameters, optimizer), (others, untouched) = trained(make, 3), trained(make, 3)
    for name, answer in responses(optimizer, parameters).items():
        answer.update(draw(55)[name])
        answer.pushforward(draw(55)[name], draw(56)[name])
    for pair in ((parameters, optimizer), (others, untouched)):
        take_step(*pair, draw(7))
    assert all(torch.equal(parameters[name], others[name]) for name in parameters)


@pytest.mark.parametrize("case", LION)
def test_lion_s_smoothed_step_is_torch_s_formula_on_the_dequantized_state(
    case: str, source: Callable[[Case], Make]
) -> None:
    parameters, optimizer = trained(source(LION[case]), 3)
    state, gradient = optimizer.state[parameters["wide"]], draw(55)["wide"]
    momentum = state["state1"]
    if momentum.dtype == torch.uint8:
        momentum = dequantized(momentum, state["qmap1"], state["absmax1"])
    beta = optimizer.param_groups[0]["betas"][0]
    mixed = beta * momentum + (1 - beta) * gradient
    expected = 1e-2 * mixed / (mixed**2 + (0.5 * mixed.abs().mean()) ** 2).sqrt()
    torch.testing.assert_close(responses(optimizer, parameters)["wide"].update(gradient), expected)


@pytest.mark.parametrize(
    ("size", "block"), [(4096, 256), (6144, 256), (5000, 256), (513, 256), (200, 256), (8192, 2048)]
)
def test_blocks_are_of_the_size_that_gives_their_number(size: int, block: int) -> None:
    codes = torch.arange(size).remainder(256).to(torch.uint8)
    scales = 1.0 + torch.arange(-(-size // block))
    got = dequantized(codes, torch.arange(256.0), scales)
    assert got.tolist() == [float(number % 256) * (1 + number // block) for number in range(size)]


def test_bitsandbytes_own_dequantization_gives_the_same_numbers() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        functional = pytest.importorskip("bitsandbytes").functional
        codes, state = functional.quantize_blockwise(draw(1)["wide"], blocksize=256)
        expected = functional.dequantize_blockwise(codes, state)
    assert torch.equal(dequantized(codes, state.code, state.absmax), expected)


def test_an_option_overridden_for_one_weight_counts_for_it_only(source: Callable[[Case], Make]) -> None:
    make = source(("bitsandbytes.optim", "RMSprop", {"lr": 1e-2}, {}))
    parameters, optimizer = trained(make, 2)
    before = {name: answer.update(draw(5)[name]) for name, answer in responses(optimizer, parameters).items()}
    optimizer.mng.pid2config[id(parameters["wide"])] = {"lr": 3e-2}  # type: ignore[attr-defined]
    try:
        after = {name: answer.update(draw(5)[name]) for name, answer in responses(optimizer, parameters).items()}
    finally:
        del optimizer.mng.pid2config[id(parameters["wide"])]  # type: ignore[attr-defined]
    torch.testing.assert_close(after["wide"], 3 * before["wide"])
    assert torch.equal(after["tall"], before["tall"])


# In the Trainer


def test_a_schedule_free_run_with_evaluations_resumes_to_the_bit(tmp_path: Path) -> None:
    """The weights that are saved are those of evaluation, where one came before."""

    def run(folder: Path, resume: Path | None = None) -> Run:
        model = model_with_dropout()
        optimizer = stand_ins.AdamWScheduleFree(model.parameters(), lr=1e-2)
        scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        # Refreshes at steps 2 and 4, applied after steps 3 and 5.
        config = fp4_config(**FAST, first_refresh=2, refresh_every=2, apply_delay=1)
        often = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3}
        return train(
            folder,
            config,
            model=model,
            resume=resume,
            trainer={"optimizers": (optimizer, scheduler)},
            max_steps=5,
            gradient_accumulation_steps=1,
            **often,
        )

    full = run(tmp_path / "full")
    assert [line["status"] for line in full.refreshes] == ["applied", "applied"]
    assert all(line["divergence"]["fp4"]["weight"] > 0 for line in full.refreshes)
    for part in ("snip", "checkpoint-3"):
        shutil.copytree(full.folder / part, tmp_path / "resumed" / part)
    resumed = run(tmp_path / "resumed", tmp_path / "resumed" / "checkpoint-3")
    assert differing(weights(resumed.model), weights(full.model)) == []
    assert without_seconds(resumed.history) == without_seconds(full.history)


@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("bitsandbytes", "paged_adamw_8bit"),
        ("bitsandbytes", "ademamix_8bit"),
        ("bitsandbytes", "lion_8bit"),
        ("schedulefree", "schedule_free_radam"),
        ("galore_torch", "galore_adafactor"),
        ("apollo_torch", "apollo_adamw"),
    ],
)
def test_the_trainer_s_names_train_and_refresh(package: str, name: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(package)
        is_low = package in ("galore_torch", "apollo_torch")
        low = {"optim_target_modules": "all-linear", "optim_args": "rank=4,update_proj_gap=5"} if is_low else {}
        run = train(tmp_path, fp4_config(**SCHEDULE), optim=name, max_steps=8, **low)
    assert [line["status"] for line in run.refreshes] == ["applied", "applied"]
    assert run.refreshes[1]["divergence"]["fp4"]["weight"] > 0


def test_the_log_names_the_package_of_an_optimizer_whose_class_has_the_name_of_torch_s(
    caplog: pytest.LogCaptureFixture,
) -> None:
    named = {}
    for case in ("GaLore", "APOLLO", "AdamW in 8 bits", "schedule-free AdamW"):
        _, name, arguments, options = CASES[case]
        optimizer = getattr(stand_ins, name)([{"params": [nn.Parameter(torch.zeros(8, 8))], **options}], **arguments)
        caplog.clear()
        with caplog.at_level("INFO", "snip_hf"):
            check_optimizer(optimizer)
        named[case] = caplog.messages
    assert named == {
        "GaLore": ["snip-hf: the update of galore_torch.adamw.AdamW is differentiated by the autograd rule."],
        "APOLLO": ["snip-hf: the update of apollo_torch.apollo.AdamW is differentiated by the autograd rule."],
        "AdamW in 8 bits": ["snip-hf: the update of bitsandbytes.AdamW is differentiated by the analytic rule."],
        "schedule-free AdamW": [
            "snip-hf: the update of schedulefree.AdamWScheduleFree is differentiated by the analytic rule."
        ],
    }


# Refusals


def refusal(optimizer: Any) -> str:
    with pytest.raises(TypeError) as caught:
        check_optimizer(optimizer)
    return str(caught.value)


IN_BACKWARD = "it updates weights within the backward pass, so that the gradients of a step are never there together"


def test_optimizers_in_the_backward_pass_are_refused_with_others_that_save_memory() -> None:
    message = refusal(stand_ins.Lomo(nn.Linear(2, 2), lr=0.1))
    assert message.startswith(f"Cannot differentiate the update of lomo_optim.lomo.Lomo: {IN_BACKWARD}. ")
    assert (
        "(Trainer: optim='adafactor' or 'paged_adamw_8bit', which need little memory too, or 'adamw_torch' or "
        "'adamw_torch_fused')" in message
    )
    message = refusal(LayerWiseDummyOptimizer(optimizer_dict={}))
    assert f"LayerWiseDummyOptimizer: {IN_BACKWARD}. " in message
    assert "(Trainer: optim='galore_adamw' or 'apollo_adamw')" in message
    stable = stand_ins.StableAdamW([nn.Parameter(torch.ones(2, 2))], lr=0.1)
    stable.param_groups[0]["gradient_release"] = True
    assert ": with gradient_release it steps within the backward pass. " in refusal(stable)


def test_options_that_make_bitsandbytes_updates_depend_on_others_are_refused() -> None:
    def adamw(**settings: Any) -> optim.Optimizer:
        optimizer = stand_ins.AdamW([nn.Parameter(torch.ones(2, 2))])
        vars(optimizer.args).update(settings)
        return optimizer

    assert ": max_unorm=1.0 makes its update of one element depend on the gradients of others. " in refusal(
        adamw(max_unorm=1.0)
    )
    assert ": percentile_clipping=5 scales gradients by the norms of earlier ones. " in refusal(
        adamw(percentile_clipping=5)
    )
    assert ": skip_zeros=True leaves out elements whose gradient is 0. " in refusal(adamw(skip_zeros=True))
    assert ": no rule describes it, and its kernels take no FP64" in refusal(
        stand_ins.LAMB([nn.Parameter(torch.ones(2, 2))])
    )


def test_states_that_cannot_be_put_together_are_refused_for_weights_in_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response, "is_sharded", lambda parameter: True)
    message = refusal(stand_ins.AdamW([nn.Parameter(torch.ones(2, 2))]))
    assert ": its states cannot be put together where FSDP2 shards the weights. " in message


def test_a_package_that_steps_in_another_way_is_refused_before_training() -> None:
    class Next(stand_ins.StableAdamW):
        """Steps as a later version might."""

        def one(self, group: dict[str, Any], parameter: Tensor) -> None:
            super().one({**group, "lr": group["lr"] * float(parameter.grad.norm())}, parameter)

    Next.__module__, Next.__qualname__ = "optimi.stableadamw", "StableAdamW"
    message = refusal(Next([nn.Parameter(torch.ones(2, 2))], lr=0.1))
    assert (
        ": its step is not the one that its rule describes; its package may be of a version that steps otherwise. "
        in message
    )


def test_rules_of_torch_torchao_and_transformers_are_not_tried() -> None:
    assert not any(map(response.is_tried, (optim.AdamW, optim.Muon, optim.Adafactor, optim.SGD)))
    assert all(map(response.is_tried, (stand_ins.AdamW, stand_ins.GaLoreAdamW, stand_ins.Lion, optim.RMSprop)))
