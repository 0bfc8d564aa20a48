"""Refreshes in loops of users that scale, zero or replace gradients and layers."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import fp4_config
from own_loop import Loop
from small import text, tiny_llama
from tiny_runs import FAST, SCHEDULE, differing, history, one_thread, refreshes, weights
from torch import nn

from snip_hf import SnipController
from snip_hf.layers.convert import restore_model
from snip_hf.layers.state import snip_linears

CONFIG = fp4_config(**SCHEDULE)
OFTEN = fp4_config(first_refresh=2, refresh_every=2, apply_delay=1, **FAST)
UP = "model.layers.1.mlp.up_proj"


def outcomes(folder: Path) -> list[tuple[int, str, str | None]]:
    lines = refreshes(folder)
    return [(line["step"], line["status"], line["reason"]) for line in lines]


def reasons(folder: Path) -> dict[int, str | None]:
    return {step: reason for step, _, reason in outcomes(folder)}


# ---------------------------------------------------------------------------------------------------------- optimizer


def test_steps_that_a_loop_leaves_out_cost_no_refresh(tmp_path: Path) -> None:
    """torch's GradScaler skips steps in this way when gradients overflow."""
    loop = Loop(CONFIG, tmp_path).run(2)
    step, loop.optimizer.step = loop.optimizer.step, lambda: None
    loop.run(5)
    loop.optimizer.step = step
    loop.run(8)
    assert [(number, status) for number, status, _ in outcomes(tmp_path)] == [(2, "applied"), (6, "applied")]


def test_freezing_weights_and_adding_groups_in_mid_run_cost_no_refresh(tmp_path: Path) -> None:
    loop = Loop(OFTEN, tmp_path).run(3)
    loop.model.get_submodule(UP).weight.requires_grad_(False)
    loop.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    loop.run(5)
    assert reasons(tmp_path) == {2: None, 4: None}


def test_an_optimizer_that_is_watched_copies_and_pickles_and_is_left_as_it_was(tmp_path: Path) -> None:
    loop = Loop(CONFIG).run(3)
    for other in (copy.deepcopy(loop.optimizer), pickle.loads(pickle.dumps(loop.optimizer))):
        assert other._optimizer_step_post_hooks == {}
        assert str(other.state_dict()) == str(loop.optimizer.state_dict())
    torch.save(loop.optimizer, tmp_path / "optimizer.pt")
    loop.controller.close()
    assert loop.optimizer._optimizer_step_post_hooks == {}


# ---------------------------------------------------------------------------------------------------------- gradients

ALL_ZERO = (
    "ValueError: Every gradient of the step is 0. The loss has no gradient at this step (in reinforcement learning, if "
    "all rewards of a group are equal; otherwise, if no label counts); or, in a loop of your own, gradients were "
    "zeroed before before_optimizer_step. Call it with the gradients of the whole step in place."
)
NO_GRADIENT = (
    "ValueError: No trained weight has a gradient before the optimizer's step: the optimizer steps within the backward "
    "pass, which needs a policy without a probe; or, in a loop of your own, gradients were set to None before "
    "before_optimizer_step. Call it with the gradients of the whole step in place."
)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_were_zeroed_before_the_probe_keep_the_plan(set_to_none: bool, tmp_path: Path) -> None:
    loop = Loop(CONFIG, tmp_path)
    loop.clip = lambda: loop.optimizer.zero_grad(set_to_none=set_to_none)
    loop.run(4)
    assert outcomes(tmp_path) == [(2, "kept", NO_GRADIENT if set_to_none else ALL_ZERO)]


def test_an_optimizer_in_the_backward_pass_keeps_the_plan(tmp_path: Path) -> None:
    model = tiny_llama(hidden=32)
    optimizers = {parameter: torch.optim.AdamW([parameter], lr=1e-2) for parameter in model.parameters()}
    whole = torch.optim.AdamW(model.parameters(), lr=1e-2)
    controller = SnipController(model, whole, CONFIG, output_dir=tmp_path)

    def step_at_once(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_at_once)
    with one_thread():
        for step in range(1, 5):
            batch = text(2, 24, step)
            controller.capture(batch)
            model(**batch).loss.backward()
            controller.before_optimizer_step(step)
            controller.after_step(step)
    assert outcomes(tmp_path) == [(2, "kept", NO_GRADIENT)]


def _scaled(folder: Path, scale: float, unscales: bool, clips: bool) -> None:
    model = tiny_llama(hidden=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    controller = SnipController(model, optimizer, CONFIG, output_dir=folder)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    with one_thread():
        for step in range(1, 5):
            batch = text(2, 24, step)
            controller.capture(batch)
            scaler.scale(model(**batch).loss).backward()
            if unscales:
                scaler.unscale_(optimizer)
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            controller.before_optimizer_step(step)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            controller.after_step(step)


@pytest.mark.parametrize(("unscales", "clips"), [(False, False), (True, True)])
def test_gradients_that_a_scaler_left_scaled_keep_the_plan(unscales: bool, clips: bool, tmp_path: Path) -> None:
    _scaled(tmp_path, 65536.0, unscales, clips)
    ((number, status, reason),) = outcomes(tmp_path)
    if unscales:
        assert (number, status, reason) == (2, "applied", None)
        _scaled(tmp_path / "1", 1.0, unscales, clips)
        weight, expected = (history(folder)[1]["divergence"]["fp4"]["weight"] for folder in (tmp_path, tmp_path / "1"))
        # The scale that is found in the gradients is a power of two; here it is 65,536.
        assert weight == pytest.approx(expected, rel=0.01)
        return
    assert (number, status) == (2, "kept")
    assert reason.endswith(
        " times those of the model's loss (norms at layer 'model.layers.1.mlp.down_proj'), expected about 1. With a "
        "GradScaler, unscale them (scaler.unscale_(optimizer)) before before_optimizer_step; otherwise train on the "
        "loss that the model returns."
    )
    factor = float(reason.removeprefix("ValueError: The gradients are about ").split()[0])
    assert 30000 < factor < 130000


@pytest.mark.parametrize("factor", [1e-5, 1e-2, 30.0])
def test_a_loss_that_is_multiplied_costs_refreshes_only_where_it_is_by_more_than_a_batch_explains(
    factor: float, tmp_path: Path
) -> None:
    """Sums over micro-batches in place of means, auxiliary terms and the like stay far below a thousand."""
    loop = Loop(CONFIG, tmp_path, max_norm=1e9)
    model = loop.model
    loop.model = lambda **batch: {"loss": model(**batch)["loss"] * factor}
    loop.clip = lambda: None
    loop.run(4)
    ((_, status, reason),) = outcomes(tmp_path)
    assert status == ("kept" if factor == 1e-5 else "applied")
    if factor == 1e-5:
        assert reason.startswith("ValueError: The gradients are about ") and "e-0" in reason.split()[5]


# ------------------------------------------------------------------------------------------------------ frozen weights


def _with_trained_norms() -> tuple[Any, torch.optim.Optimizer]:
    """A model whose swapped weights are frozen."""
    model = tiny_llama(hidden=32)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.requires_grad_(False)
    norms = [parameter for name, parameter in model.named_parameters() if "norm" in name]
    return model, torch.optim.AdamW(norms, lr=1e-2)


def test_if_swapped_weights_are_not_trained_the_updates_of_all_trained_parameters_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = _with_trained_norms()
    Loop(OFTEN, tmp_path, model=model, optimizer=optimizer).run(5)
    assert reasons(tmp_path) == {2: None, 4: None}
    totals = [line["divergence"]["fp4"]["weight"] for line in history(tmp_path)[1:]]
    assert all(total > 0 for total in totals)
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_an_optimizer_of_nothing_in_the_model_is_said_once_at_the_start_and_costs_no_refresh(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "snip_hf")
    loop = Loop(OFTEN, tmp_path, optimizer=torch.optim.AdamW([nn.Parameter(torch.zeros(2))]))
    said = (
        "snip-hf: the optimizer holds no trained parameter of the model (make it from those of the prepared or sharded "
        "model), so only the loss divergence decides."
    )
    assert caplog.messages[-1] == said
    loop.run(5)
    assert reasons(tmp_path) == {2: None, 4: None}
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == [said]


def test_after_swapped_weights_are_frozen_in_mid_run_the_updates_of_the_others_count(tmp_path: Path) -> None:
    loop = Loop(OFTEN, tmp_path).run(3)
    for layer in snip_linears(loop.model).values():
        layer.weight.requires_grad_(False)
    loop.run(7)
    assert reasons(tmp_path) == {2: None, 4: None, 6: None}
    assert history(tmp_path)[-1]["divergence"]["fp4"]["weight"] > 0


# -------------------------------------------------------------------------------------------------------------- layers


class Wrapper(nn.Module):
    """The linear goes on inside, under another name."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.inner = base

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def _replace(model: nn.Module) -> None:
    model.set_submodule(UP, nn.Linear(32, 80, bias=False))


def _wrap(model: nn.Module) -> None:
    model.set_submodule(UP, Wrapper(model.get_submodule(UP)))


CHANGES = {"replaced": (_replace, "Linear"), "wrapped": (_wrap, "Wrapper"), "restored": (restore_model, "Linear")}


@pytest.mark.parametrize("change", CHANGES)
def test_layers_that_were_replaced_or_wrapped_keep_the_plan_and_are_named(
    change: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(CONFIG, tmp_path).run(4)
    make, now = CHANGES[change]
    make(loop.model)
    loop.run(6)
    count, layer = (14, "model.layers.0.self_attn.q_proj") if change == "restored" else (1, UP)
    expected = (
        f"ValueError: {count} of the 14 swapped layers were replaced or wrapped since training began, e.g. "
        f"{layer!r} (now {now}). No plan can be made for the model as it is, and the FP4 share still counts them. "
        "Change a model before training begins."
    )
    assert reasons(tmp_path) == {2: None, 6: expected}
    warnings = [message for message in caplog.messages if "failed" in message]
    assert warnings == [f"snip-hf: the refresh of step 6 failed, the plan in force stays: {expected}"]
    assert json.loads(json.dumps(loop.controller.state_dict()))["step"] == 6
    loop.controller.close()


# --------------------------------------------------------------------------------- refreshes that could not be applied


def test_refreshes_whose_plan_would_be_due_after_the_last_step_are_not_run(tmp_path: Path) -> None:
    full = Loop(fp4_config(**SCHEDULE | {"refresh_every": 3}), tmp_path / "full").run(6)
    full.controller.close()
    assert [(step, status) for step, status, _ in outcomes(tmp_path / "full")] == [*[(2, "applied"), (5, "kept")]]
    short = Loop(fp4_config(**SCHEDULE | {"refresh_every": 3}), tmp_path / "short")
    short.controller._schedule.max_steps = 6
    short.run(6)
    short.controller.close()
    assert [(step, status) for step, status, _ in outcomes(tmp_path / "short")] == [(2, "applied")]
    assert not (tmp_path / "short" / "snip" / "divergence-5.json").exists()
    assert short.losses == full.losses and differing(weights(short.model), weights(full.model)) == []


def test_a_plan_that_is_due_at_the_last_step_is_still_made(tmp_path: Path) -> None:
    loop = Loop(None)
    loop.controller = SnipController(loop.model, loop.optimizer, CONFIG, output_dir=tmp_path, max_steps=4)
    loop.run(4)
    assert outcomes(tmp_path) == [(2, "applied", None)]


def test_a_run_that_is_resumed_to_more_steps_goes_on_by_the_schedule(tmp_path: Path) -> None:
    config = fp4_config(**SCHEDULE | {"refresh_every": 2})
    first = Loop(config, tmp_path)
    first.controller._schedule.max_steps = 5
    first.run(5)
    state = json.loads(json.dumps(first.controller.state_dict()))
    first.controller.close()
    second = Loop(config, tmp_path)
    second.controller._schedule.max_steps = 8
    second.controller.load_state_dict(state)
    second.step = 5
    second.run(8)
    assert [(step, status) for step, status, _ in outcomes(tmp_path)] == [(2, "applied"), (6, "applied")]


def test_a_refresh_that_the_end_of_training_dropped_is_recorded_once_when_it_goes_on(tmp_path: Path) -> None:
    first = Loop(CONFIG, tmp_path).run(3)
    state = json.loads(json.dumps(first.controller.state_dict()))
    first.controller.close()
    assert [(step, status) for step, status, _ in outcomes(tmp_path)] == [(2, "kept")]
    second = Loop(CONFIG, tmp_path)
    second.controller.load_state_dict(state)
    second.step = 3
    second.run(4)
    assert [(step, status) for step, status, _ in outcomes(tmp_path)] == [(2, "applied")]


def test_layers_whose_states_were_moved_in_mid_run_draw_the_same_random_numbers() -> None:
    """As `module.to(device)` moves them."""
    losses = []
    for is_moved in (False, True):
        loop = Loop(fp4_config(policy="uniform-fp4"))
        for step in range(1, 5):
            for layer in snip_linears(loop.model).values() if is_moved else ():
                layer.snip_state = layer.snip_state.clone()
            loop.run(step)
        losses.append(loop.losses)
    assert losses[0] == losses[1]
