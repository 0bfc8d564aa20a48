"""Loops of users: calls out of order, two controllers on one model, adapters in mid-run."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import fp4_config
from own_loop import Loop
from peft import LoraConfig, inject_adapter_in_model
from small import tiny_llama
from tiny_runs import SCHEDULE, history

from snip_hf import SnipConfig, SnipController, restore_model

CONFIG = fp4_config(**SCHEDULE)


def calls(loop: Loop, step: Any, order: str = "cbsa") -> None:
    """One optimizer step of a loop: capture and pass, before_optimizer_step, the optimizer's step, after_step."""
    for call in order:
        if call == "c":
            loop.controller.capture(loop.batch(1))
            loop.model(**loop.batch(1))["loss"].backward()
        elif call == "b":
            loop.controller.before_optimizer_step(step)
        elif call == "s":
            loop.optimizer.step()
        else:
            loop.optimizer.zero_grad()
            loop.controller.after_step(step)


@pytest.mark.parametrize(("steps", "got"), [([3, 6], (3, 0, 1)), ([1, 3], (3, 1, 2)), ([1, 2, 2], (2, 2, 3))], ids=str)
def test_numbers_with_gaps_and_repeated_ones_are_refused_at_the_first(
    steps: list[int], got: tuple[int, int, int]
) -> None:
    loop = Loop()
    expected = "before_optimizer_step got the step {} after {} optimizer steps, expected {}: count optimizer steps"
    with pytest.raises(ValueError, match=expected.format(*got)):
        for step in steps:
            calls(loop, step)


def test_the_two_calls_of_a_step_have_one_number() -> None:
    loop = Loop()
    calls(loop, 1, "cbs")
    with pytest.raises(ValueError, match="after_step got the step 2 after 0 optimizer steps, expected 1"):
        loop.controller.after_step(2)
    loop.controller.after_step(1)


def test_after_its_number_of_steps_is_set_a_controller_goes_on_from_there() -> None:
    loop = Loop()
    loop.controller.step = 100
    calls(loop, 101)
    assert loop.controller.step == 101


@pytest.mark.parametrize("step", [1.0, None, "1"])
def test_a_step_that_is_no_integer_is_refused(step: Any) -> None:
    controller = Loop().controller
    for call in (controller.before_optimizer_step, controller.after_step):
        with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
            call(step)


def test_a_closed_controller_says_so(tmp_path: Path) -> None:
    loop = Loop(CONFIG).run(1)
    assert loop.controller is not None
    loop.controller.close()
    for call, argument in (("capture", loop.batch(2)), ("before_optimizer_step", 2), ("after_step", 2)):
        with pytest.raises(ValueError, match=rf"^{call} was called after close\(\)\. Build a new SnipController"):
            getattr(loop.controller, call)(argument)


def test_a_loop_without_after_step_is_refused_at_its_second_step() -> None:
    loop = Loop()
    calls(loop, 1, "cbs")
    with pytest.raises(ValueError, match="before_optimizer_step was called again without after_step"):
        calls(loop, 2, "cbs")


def test_a_step_that_was_given_up_for_an_earlier_state_may_begin_again() -> None:
    loop = Loop()
    state = loop.controller.state_dict()
    calls(loop, 1, "cb")
    loop.controller.load_state_dict(state)
    calls(loop, 1)


@pytest.mark.parametrize("config", [CONFIG, fp4_config(policy="uniform-fp4", guard="raise")])
def test_a_loop_without_before_optimizer_step_is_told_so_once(
    config: SnipConfig, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(config)
    for step in (1, 2, 3):
        calls(loop, step, "csa")
    loop.controller.close()
    assert caplog.messages == [
        "snip-hf: after_step was called without before_optimizer_step: no plan can be made, and a guard sees nothing. "
        "Call before_optimizer_step(step) before each optimizer step, once the gradients are complete and clipped."
    ]


def test_before_optimizer_step_after_the_step_is_told_once_and_costs_the_refreshes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(folder=tmp_path)
    calls(loop, 1, "csba")
    late = (
        "before_optimizer_step was called after optimizer.step(): no plan can be made, since the optimizer's state has "
        "the step's gradients by then. Call it before optimizer.step(), once the gradients are complete and clipped."
    )
    assert caplog.messages == [f"snip-hf: {late}"]
    calls(loop, 2, "csba")
    assert [line["reason"] for line in history(tmp_path)[1:]] == [f"ValueError: {late}"]
    for step in (3, 4, 5, 6):
        calls(loop, step)
    loop.controller.close()
    assert [line["status"] for line in history(tmp_path)[1:]] == ["kept", "kept"]
    assert "training ended" in history(tmp_path)[-1]["reason"]
    assert caplog.messages.count(f"snip-hf: {late}") == 1


# ----------------------------------------------------------------------------------------------------- two controllers


def test_a_second_controller_of_one_model_is_refused_until_the_first_is_closed() -> None:
    first = Loop()

    def second() -> SnipController:
        return SnipController(first.model, first.optimizer, CONFIG)

    with pytest.raises(ValueError, match="Another SnipController drives this model, expected one at a time"):
        second()
    calls(first, 1)  # goes on
    first.controller.close()
    third = second()
    with pytest.raises(ValueError, match=r"call its close\(\), or restore_model\(model\) if it is out of reach"):
        second()
    restore_model(first.model)
    last = second()
    third.close()
    with pytest.raises(ValueError, match="Another SnipController"):
        second()
    last.close()


def test_a_controller_that_nobody_holds_or_that_was_refused_drives_nothing() -> None:
    model = tiny_llama(hidden=32)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(TypeError) as refused:
        SnipController(model, object(), CONFIG)
    gc.disable()
    try:
        controller = SnipController(model, optimizer, CONFIG)
        del controller
        SnipController(model, optimizer, CONFIG)
    finally:
        gc.enable()
    assert refused.value.__traceback__ is not None  # which holds what was built so far


# ------------------------------------------------------------------------------------- another optimizer in mid-run


def with_adapters(loop: Loop) -> list[torch.nn.Parameter]:
    """Puts adapters on the model, freezes all else, and returns what is trained from here on."""
    inject_adapter_in_model(LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), loop.model)
    return [parameter for parameter in loop.model.parameters() if parameter.requires_grad]


def test_adapters_with_an_optimizer_of_their_own_keep_the_plan_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(folder=tmp_path).run(4)
    loop.optimizer = torch.optim.AdamW(with_adapters(loop), lr=1e-2)
    loop.run(8)
    assert [(line["step"], line["status"]) for line in history(tmp_path)[1:]] == [(2, "applied"), (6, "kept")]
    assert "optimizer holds no trained parameter of the model" in history(tmp_path)[-1]["reason"]
    assert any("To continue with another optimizer, close the controller" in message for message in caplog.messages)


def test_adapters_that_the_same_optimizer_trains_cost_no_refresh(tmp_path: Path) -> None:
    loop = Loop(folder=tmp_path).run(4)
    loop.optimizer.add_param_group({"params": with_adapters(loop)})
    loop.run(8)
    assert [(line["step"], line["status"]) for line in history(tmp_path)[1:]] == [(2, "applied"), (6, "applied")]
    assert history(tmp_path)[-1]["divergence"]["fp4"]["weight"] > 0
