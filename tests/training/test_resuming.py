"""Another target at a resume: what was measured stays, and the plan is made for it."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from own_loop import Loop
from tiny_runs import SCHEDULE

from snip_hf import SnipConfig
from snip_hf.records.history import read_history
from snip_hf.records.interventions import Retarget

OPTIONS: dict[str, Any] = {**SCHEDULE, "granularity": "gemm"}


def config(**changes: Any) -> SnipConfig:
    return SnipConfig(**{**OPTIONS, "target_fp4_fraction": 0.75} | changes)


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
        "snip-hf: resumed with another target: target_fp4_fraction was 0.75 and is 0.25. From here on step 5 "
        "refreshes the plan for it."
    ]
    # The next state is the new run's, which goes on without a word.
    again = Loop(config(target_fp4_fraction=0.25))
    assert again.controller is not None
    again.controller.load_state_dict(json.loads(json.dumps(controller.state_dict())))
    assert sum("another target" in message for message in caplog.messages) == 1


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
    first, state = saved(1, config(), tmp_path)
    second = resumed(state, first, config(target_fp4_fraction=0.25), tmp_path).run(4)
    assert [(step, applied) for step, applied, _ in refreshes(tmp_path)] == [(2, 4)]
    assert second.controller is not None and second.controller.plan.fp4_fraction < 0.5


def test_a_policy_without_a_probe_makes_its_plan_at_once(tmp_path: Path) -> None:
    first, state = saved(2, SnipConfig(policy="layer-position", target_fp4_fraction=0.75), tmp_path)
    other = SnipConfig(policy="layer-position", target_fp4_fraction=0.25)
    second = resumed(state, first, other, tmp_path)
    assert second.controller is not None
    plan = second.controller.plan
    assert plan.provenance.target_fp4_fraction == 0.25 and plan.fp4_fraction < first.controller.plan.fp4_fraction
    assert second.formats() == {layer: dict(row) for layer, row in plan.assignment.items()}


@pytest.mark.slow
def test_a_speed_up_may_take_the_place_of_a_share_and_other_fields_are_refused_as_before(tmp_path: Path) -> None:
    first, state = saved(4, config(), tmp_path)
    asked = SnipConfig(**OPTIONS, rates="ideal", target_linear_speedup=2.0)
    second = resumed(state, first, asked, tmp_path).run(7)
    assert second.controller is not None and second.controller.plan.linear_speedup() >= 2.0
    other = Loop(config(target_fp4_fraction=0.25, seed=3))
    assert other.controller is not None
    with pytest.raises(ValueError, match=r"trained with seed=0, this run asks for seed=3 \(different fields: seed\)"):
        other.controller.load_state_dict(state)
