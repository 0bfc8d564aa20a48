"""A resumed run continues exactly, and a state that does not belong to the weights is refused."""

from __future__ import annotations

import copy
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import fp4_config
from own_loop import Loop
from slow_cases import slow
from small import tiny_llama
from tiny_runs import SCHEDULE, Run, differing, train, weights
from transformers import TrainerCallback

from snip_hf import SnipCallback, SnipConfig
from snip_hf.layers.convert import convert_model
from snip_hf.records.events import Retarget, read_history
from snip_hf.training.checkpoint import weights_fingerprint

OPTIONS: dict[str, Any] = {**SCHEDULE, "granularity": "gemm"}


def config(**changes: Any) -> SnipConfig:
    return fp4_config(**{**OPTIONS, "target_fp4_fraction": 0.75} | changes)


def resumed(state: dict[str, Any], first: Loop, asked: SnipConfig, folder: Path) -> Loop:
    second = Loop(asked, folder)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    assert second.controller is not None
    second.controller.load_state_dict(state)
    second.step = state["step"]
    return second


def saved(at: int, asked: SnipConfig, folder: Path) -> tuple[Loop, dict[str, Any]]:
    loop = Loop(asked, folder).run(at)
    assert loop.controller is not None
    state: dict[str, Any] = json.loads(json.dumps(loop.controller.state_dict()))
    loop.controller.close()
    return loop, state


def refreshes(folder: Path) -> list[tuple[int, int | None, float]]:
    lines = [json.loads(line) for line in (folder / "snip" / "history.jsonl").read_text().splitlines()]
    return [(e["step"], e["applied_step"], round(e["fp4_fraction"], 2)) for e in lines if e["event"] == "refresh"]


def test_another_target_refreshes_at_once_and_keeps_the_plan_until_then(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, state = saved(4, config(), tmp_path)
    with caplog.at_level(logging.INFO, "snip_hf"):
        second = resumed(state, first, config(target_fp4_fraction=0.25), tmp_path)
    controller = second.controller
    assert controller is not None
    # Until the new plan is there, the old one is in force, with what was measured for it.
    assert controller.state_dict()["plan"] == state["plan"]
    second.run(7)
    assert [(step, applied) for step, applied, _ in refreshes(tmp_path)] == [(2, 4), (5, 7)]
    assert controller.plan.provenance.target_fp4_fraction == 0.25 and 0.25 <= controller.plan.fp4_fraction < 0.5
    events = list(read_history(tmp_path / "snip" / "history.jsonl"))
    told = [event for event in events if isinstance(event, Retarget)]
    assert told == [Retarget(step=5, fields={"target_fp4_fraction": (0.75, 0.25)})]
    assert [message for message in caplog.messages if "another target" in message] == [
        "snip-hf: resumed with another target: target_fp4_fraction was 0.75 and is 0.25."
    ]
    # The next state is the new run's, which goes on without a word.
    again = Loop(config(target_fp4_fraction=0.25))
    assert again.controller is not None
    again.controller.load_state_dict(json.loads(json.dumps(controller.state_dict())))
    assert sum("another target" in message for message in caplog.messages) == 1


def test_another_target_too_near_the_end_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, state = saved(4, config(), tmp_path)
    second = Loop(config(target_fp4_fraction=0.25), tmp_path)
    second.model.load_state_dict(first.model.state_dict())
    assert second.controller is not None
    second.controller._schedule.max_steps = 6
    second.controller.load_state_dict(state)
    assert (
        "snip-hf: training ends at step 6, before the plan of a refresh at step 5 would be applied after step 7: the "
        "plan in force stays. Train longer, or lower first_refresh or apply_delay."
    ) in caplog.messages


@pytest.mark.slow
def test_a_plan_for_the_old_target_that_still_waits_is_left_out(tmp_path: Path) -> None:
    first, state = saved(3, config(), tmp_path)
    assert state["pending"]["step"] == 2
    second = resumed(state, first, config(target_fp4_fraction=0.25), tmp_path)
    second.run(6)
    assert [(step, applied) for step, applied, _ in refreshes(tmp_path)] == [(4, 6)]
    # The same checkpoint a second time: the first try leaves nothing behind.
    resumed(state, first, config(target_fp4_fraction=0.5), tmp_path).run(6)
    events = list(read_history(tmp_path / "snip" / "history.jsonl"))
    assert [e.fields for e in events if isinstance(e, Retarget)] == [{"target_fp4_fraction": (0.75, 0.5)}]
    assert [(step, applied) for step, applied, _ in refreshes(tmp_path)] == [(4, 6)]


def test_before_the_first_refresh_nothing_is_asked_for(tmp_path: Path) -> None:
    first, state = saved(1, config(first_refresh=3), tmp_path)
    second = resumed(state, first, config(first_refresh=3, target_fp4_fraction=0.25), tmp_path).run(5)
    assert [(step, applied) for step, applied, _ in refreshes(tmp_path)] == [(3, 5)]
    assert second.controller is not None and second.controller.plan.fp4_fraction < 0.5


def test_a_policy_without_a_probe_makes_its_plan_at_once(tmp_path: Path) -> None:
    first, state = saved(2, fp4_config(policy="layer-position", target_fp4_fraction=0.75), tmp_path)
    other = fp4_config(policy="layer-position", target_fp4_fraction=0.25)
    second = resumed(state, first, other, tmp_path)
    assert second.controller is not None
    plan = second.controller.plan
    assert plan.provenance.target_fp4_fraction == 0.25 and plan.fp4_fraction < first.controller.plan.fp4_fraction
    assert second.formats() == {layer: dict(row) for layer, row in plan.assignment.items()}


@pytest.mark.parametrize("fixed", [False, True])
def test_without_a_target_another_share_is_not_mentioned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fixed: bool
) -> None:
    options: dict[str, Any] = {"policy": "uniform-fp4"}
    if fixed:
        Loop(fp4_config(**options)).controller.plan.save(tmp_path / "plan.json")
        options = {"fixed_plan": str(tmp_path / "plan.json")}
    first, state = saved(2, fp4_config(**options, target_fp4_fraction=0.75), tmp_path)
    with caplog.at_level(logging.INFO, "snip_hf"):
        second = resumed(state, first, fp4_config(**options, target_fp4_fraction=0.5), tmp_path)
    assert second.controller.plan == first.controller.plan
    assert not any("another target" in message for message in caplog.messages)
    events = read_history(tmp_path / "snip" / "history.jsonl")
    assert not any(isinstance(event, Retarget) for event in events)


def test_the_file_of_a_fixed_plan_may_have_another_name_but_not_another_plan(tmp_path: Path) -> None:
    plans = [Loop(fp4_config(policy=f"uniform-fp{bits}")).controller.plan for bits in (4, 4, 8)]
    paths = [tmp_path / f"{number}.json" for number in range(3)]
    for plan, path in zip(plans, paths, strict=True):
        plan.save(path)
    asked, moved, other = (fp4_config(fixed_plan=str(path)) for path in paths)
    first, state = saved(2, asked, tmp_path)
    assert resumed(state, first, moved, tmp_path).controller.plan.assignment == plans[0].assignment
    with pytest.raises(ValueError, match=r"this run asks for .* \(different fields: fixed_plan\)"):
        resumed(state, first, other, tmp_path)


@pytest.mark.slow
def test_a_speed_up_may_take_the_place_of_a_share_and_other_fields_are_refused_as_before(tmp_path: Path) -> None:
    first, state = saved(4, config(), tmp_path)
    asked = fp4_config(**OPTIONS, rates="ideal", target_linear_speedup=2.0)
    second = resumed(state, first, asked, tmp_path).run(7)
    assert second.controller is not None and second.controller.plan.linear_speedup() >= 2.0
    other = Loop(config(target_fp4_fraction=0.25, seed=3))
    assert other.controller is not None
    with pytest.raises(ValueError, match=r"trained with seed=0, this run asks for seed=3 \(different fields: seed\)"):
        other.controller.load_state_dict(state)


CONFIG = fp4_config(**SCHEDULE)
SAVING = {"save_strategy": "steps", "save_steps": 3, "max_steps": 9}
OTHER_WEIGHTS = (
    "Cannot resume from {path}: The SNIP state was saved with other weights than those that were loaded: they come "
    "from different runs, or one of them was replaced. Resume from the folder of the weights, or start a new plan from "
    "them: SnipCallback(..., resume=False), or no load_state_dict in a loop of your own. If the Trainer warned of "
    "missing keys, as it does for some mixtures of experts, load the model from the checkpoint by from_pretrained "
    "first."
)


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """Two runs that go on from copies of one run's first three steps, each in its own way."""
    folder = tmp_path_factory.mktemp("copies")
    first = train(folder / "first", CONFIG, **SAVING)
    found = []
    for name, norm in (("a", 0.5), ("b", 0.1)):
        (folder / name).mkdir()
        checkpoint = shutil.copytree(first.folder / "checkpoint-3", folder / name / "checkpoint-3")
        found.append(train(folder / name, CONFIG, resume=checkpoint, max_grad_norm=norm, **SAVING))
    assert differing(weights(found[0].model), weights(found[1].model))
    return found[0], found[1]


def copy_of(run: Run, folder: Path) -> Path:
    """Returns checkpoint-6 of a copy of the run, whose files may be changed."""
    shutil.copytree(run.folder, folder)
    return folder / "checkpoint-6"


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def refused(folder: Path, callback: SnipCallback, resume: Path) -> str:
    """Returns the message with which training is refused, after checking that not one file was changed."""
    before = files(folder)
    with pytest.raises(ValueError) as caught:
        train(folder, callback=callback, resume=resume, **SAVING)
    assert files(folder) == before
    return str(caught.value)


@pytest.mark.slow
def test_the_state_of_a_copy_that_went_its_own_way_is_refused(copies: tuple[Run, Run], tmp_path: Path) -> None:
    one, other = copies
    mine, theirs = copy_of(one, tmp_path / "one"), copy_of(other, tmp_path / "other")
    state = theirs / "snip_state.json"
    own = state.read_bytes()
    shutil.copy(mine / "snip_state.json", state)
    assert refused(mine.parent, SnipCallback(CONFIG), theirs) == OTHER_WEIGHTS.format(path=state)
    state.write_bytes(own)
    # Both ways that the message names work.
    resumed = train(mine.parent, callback=SnipCallback(CONFIG), resume=theirs, max_grad_norm=0.1, **SAVING)
    assert differing(weights(resumed.model), weights(other.model)) == []
    train(theirs.parent, callback=SnipCallback(CONFIG, resume=False), resume=theirs, **SAVING)


def test_weights_that_were_exchanged_by_hand_are_noticed(copies: tuple[Run, Run], tmp_path: Path) -> None:
    checkpoint = copy_of(copies[0], tmp_path / "run")
    shutil.copy(copies[1].folder / "checkpoint-6" / "model.safetensors", checkpoint)
    message = refused(tmp_path / "run", SnipCallback(CONFIG), checkpoint)
    assert message == OTHER_WEIGHTS.format(path=checkpoint / "snip_state.json")


def test_a_run_without_a_probe_takes_its_plan_from_its_configuration_and_not_from_weights(tmp_path: Path) -> None:
    config = fp4_config(policy="layer-position")
    train(tmp_path, config, save_strategy="steps", save_steps=1, max_steps=1)
    assert json.loads((tmp_path / "checkpoint-1" / "snip_state.json").read_text())["weights"] is None
    train(tmp_path, config, resume=tmp_path / "checkpoint-1", max_steps=2)


def test_a_fingerprint_is_that_of_the_weights_in_every_precision_wrapper_and_use() -> None:
    model = tiny_llama(hidden=32)
    expected = weights_fingerprint(model)
    assert expected == weights_fingerprint(tiny_llama(hidden=32).to(torch.bfloat16))
    assert expected == weights_fingerprint(torch.compile(model, backend="eager"))
    convert_model(model, CONFIG)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert expected == weights_fingerprint(model)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 3] += 0.5
    assert expected != weights_fingerprint(model)


class Exchanged(TrainerCallback):
    """Puts other weights into the model for the time of saving, as a moving average does."""

    def __init__(self, at: str) -> None:
        self.raw: dict[str, torch.Tensor] | None = None
        setattr(self, at, self.exchange)

    def exchange(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_save or state.global_step % SAVING["save_steps"] == 0:
            self.raw = weights(kwargs["model"])
            with torch.no_grad():
                for parameter in kwargs["model"].parameters():
                    parameter.mul_(0.5)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.raw is not None:
            kwargs["model"].load_state_dict(self.raw)
            self.raw = None


@pytest.mark.parametrize(("at", "before"), [("on_step_end", True), slow("on_save", False)])
def test_a_run_whose_weights_a_callback_exchanges_around_saving_resumes(tmp_path: Path, at: str, before: bool) -> None:
    callbacks = [Exchanged(at), SnipCallback(CONFIG)] if before else [SnipCallback(CONFIG), Exchanged(at)]
    train(tmp_path, callbacks=callbacks, **SAVING)
    resumed = train(tmp_path, CONFIG, resume=tmp_path / "checkpoint-6", **SAVING)
    assert max(resumed.losses) == 9
