"""Do SNIP's quantities reach the log history and the trackers that a Trainer reports to, with the callback alone?

W&B and Trackio are stood in for, so that what the callback hands them is seen also where they are not installed; the
tests with their files run where they are.
"""

from __future__ import annotations

import importlib.machinery
import json
import logging
import math
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from configs import fp4_config
from events import counted_event, refresh_event, small_plan, start_event
from own_loop import CONFIG as LOOP_CONFIG
from own_loop import Loop
from slow_cases import slow
from tiny_runs import SCHEDULE, one_thread, train
from tracker_files import Stored, of_tensorboard, of_trackio, of_wandb, use_trackio_in, use_wandb_offline
from transformers import TrainerCallback
from transformers.integrations import integration_utils

from snip_hf import log_to
from snip_hf.integrations.trackers import quantities_in_force, quantities_of, step_of
from snip_hf.kernels.emulated import Emulated
from snip_hf.records.events import Alarm, Coverage, Refresh, Retarget

pytestmark = pytest.mark.usefixtures("one_thread_only")

CONFIG = fp4_config(start_format="bf16", target_fp4_fraction=0.75, **SCHEDULE)
STEPS = 5
# The plan of step 2 is applied after step 4.
SHARES = [(1, 0.0), (2, 0.0), (3, 0.0), (4, 0.754), (5, 0.754)]
IN_FORCE = {"fp4_share", "fp4_coverage", "fp4_share_of_model"}
OF_A_REFRESH = {
    "fp4_share",
    *(f"snip/{name}" for name in ("applied", "probed_step", "probed_loss", "layers_changed", "gemms_changed")),
    *(f"snip/{name}" for name in ("objective", "gap", "probe_seconds", "solver_seconds", "waited_seconds")),
    *(f"snip/{kind}_divergence_{name}" for kind in ("loss", "weight") for name in ("fp8", "fp4")),
}
ALL = IN_FORCE | OF_A_REFRESH | {"snip/gemms_changed_by_tokens"}


def module(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(made).update(content)
    monkeypatch.setitem(sys.modules, name, made)
    return made


class Config(dict):
    def update(self, values: dict[str, Any], allow_val_change: bool = True) -> None:  # type: ignore[override]
        super().update(values)


def tracker(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> types.ModuleType:
    """A module with one run, whose lines and configuration are seen as `logged` and `config`."""
    logged: list[dict[str, Any]] = []
    run = types.SimpleNamespace(
        config=Config(), log=logged.append, summary={}, _label=lambda **kwargs: None, url="", id="", name=""
    )
    made = module(monkeypatch, name, logged=logged, config=run.config)
    vars(made).update(log=lambda line: run.log(line), the_run=run, finish=lambda: None, **content)
    return made


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    nothing = dict.fromkeys(("define_metric", "watch"), lambda *args, **kwargs: None)
    made = tracker(monkeypatch, "wandb", run=None, **nothing)
    vars(made).update(init=lambda **kwargs: vars(made).update(run=made.the_run))
    monkeypatch.setattr(integration_utils, "is_wandb_available", lambda: True)
    for name in ("wandb.sdk", "wandb.sdk.lib", "wandb.sdk.lib.config_util"):
        module(monkeypatch, name, ConfigError=ValueError)
    return made


class Variable:
    def __init__(self, value: Any) -> None:
        self.value = value

    def get(self) -> Any:
        return self.value


@pytest.fixture
def trackio(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    variables = types.SimpleNamespace(
        current_space_id=Variable(None), current_project=Variable(None), current_run=Variable(None)
    )
    made = tracker(monkeypatch, "trackio", __version__="0.30.0", context_vars=variables)
    vars(made).update(init=lambda **kwargs: vars(variables.current_run).update(value=made.the_run))
    monkeypatch.setattr(integration_utils, "is_trackio_available", lambda: True)
    return made


def test_every_log_with_a_loss_has_the_share_and_every_event_an_entry_at_its_step(tmp_path: Path) -> None:
    run = train(tmp_path, CONFIG, max_steps=STEPS)
    lines = run.trainer.state.log_history
    beside = [line for line in lines if "loss" in line]
    assert [(line["step"], line["fp4_share"]) for line in beside] == SHARES
    assert [(line["fp4_coverage"], line["fp4_share_of_model"]) for line in beside] == [(1.0, x) for _, x in SHARES]
    counted, refresh = (line for line in lines if any(name.startswith("snip/") for name in line))
    assert (counted["step"], counted["fp4_coverage"]) == (1, 1.0)
    assert set(refresh) == OF_A_REFRESH | {"step", "epoch"}
    assert (refresh["step"], refresh["snip/probed_step"], refresh["snip/applied"]) == (4, 2, 1.0)
    assert (refresh["fp4_share"], refresh["snip/layers_changed"]) == (0.754, 14)


def test_without_a_tracker_nothing_is_started_or_shown_to_other_callbacks(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    class Watch(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
            seen.append(dict(logs))

    before = set(sys.modules)
    run = train(tmp_path, CONFIG, max_steps=STEPS, callbacks=[Watch()])
    assert len(seen) == STEPS + 1  # each step and the end of training
    assert not any(name.startswith("snip/") for line in seen for name in line)
    assert not (tmp_path / "runs").exists()
    assert not {"wandb", "trackio", "tensorboard"} & (set(sys.modules) - before)
    assert len(run.trainer.callback_handler.callbacks) == len({*map(type, run.trainer.callback_handler.callbacks)})


def check_stored(found: Stored) -> None:
    assert found.of_snip == ALL and len(ALL) >= 8
    share = next(name for name in found.numbers if name.endswith("fp4_share"))
    # Beside each loss and, in front of that of step 4, with the new plan.
    values = [*(value for _, value in SHARES[:3]), 0.754, *(value for _, value in SHARES[3:])]
    assert [round(value, 4) for value in found.numbers[share]] == values
    assert found.settings == json.loads(json.dumps(CONFIG.to_dict())) | {"ties": [], "backend_in_use": "emulated"}


def test_tensorboard_shows_all_in_the_run_that_the_trainer_writes(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    train(tmp_path, CONFIG, max_steps=STEPS, report_to=["tensorboard"])
    (folder,) = (tmp_path / "runs").iterdir()
    check_stored(of_tensorboard(folder))


@pytest.mark.slow
def test_wandb_stores_all_in_its_offline_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_wandb_offline(tmp_path, monkeypatch)
    train(tmp_path, CONFIG, max_steps=STEPS, report_to=["wandb"])
    sys.modules["wandb"].finish()
    check_stored(of_wandb(tmp_path))


@pytest.mark.slow
def test_trackio_stores_all_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_trackio_in(tmp_path / "trackio", monkeypatch)
    train(tmp_path, CONFIG, max_steps=STEPS, report_to=["trackio"])
    check_stored(of_trackio(tmp_path / "trackio"))


@pytest.mark.parametrize("name", ["wandb", slow("trackio")])
def test_a_tracker_gets_numbers_and_settings(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    made = request.getfixturevalue(name)
    train(tmp_path, CONFIG, max_steps=STEPS, report_to=[name])
    lines: list[dict[str, Any]] = made.logged
    steps = [(line["train/global_step"], line["train/fp4_share"]) for line in lines if "train/loss" in line]
    assert steps == SHARES
    (refresh,) = (line for line in lines if "train/snip/applied" in line)
    assert set(refresh) == {f"train/{name}" for name in OF_A_REFRESH} | {"train/global_step"}
    assert refresh["train/global_step"] == 4
    assert made.config["snip"]["target_fp4_fraction"] == 0.75
    assert made.config["snip"]["backend_in_use"] == "emulated"


def test_a_tracker_that_fails_costs_its_quantities_and_not_the_run(
    wandb: types.ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def log(line: dict[str, Any]) -> None:
        if "train/snip/applied" in line or "train/snip/gemms_changed_by_tokens" in line:
            raise ConnectionError("no network")
        wandb.logged.append(line)

    wandb.the_run.log = log
    run = train(tmp_path, CONFIG, max_steps=STEPS, report_to=["wandb"])
    assert len(run.losses) == STEPS
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    said = "snip-hf: WandbCallback failed, and gets no more events of SNIP: ConnectionError('no network')"
    assert warnings.count(said) == 1


@pytest.mark.slow
def test_a_second_run_of_the_trainer_is_told_as_the_first(wandb: types.ModuleType, tmp_path: Path) -> None:
    run = train(tmp_path, CONFIG, max_steps=STEPS, report_to=["wandb"])
    first = len(wandb.logged)
    with one_thread():
        run.trainer.train()
    names = [sorted(set(line) - {"train/train_loss"}) for line in wandb.logged]
    assert names[:first] == names[first:]


MEASURED: dict[str, Any] = {
    "loss": 3.5,
    "divergence": {"fp8": {"loss": 1e-7, "weight": 0.1}, "fp4": {"loss": 1e-5, "weight": None}},
    "memory_mib": {"measured": 10.0},
    "seconds": {"probe": 1.5, "solver": 0.5, "waited": 0.0},
}


def test_a_new_plan_has_what_was_probed_decided_and_spent() -> None:
    event = refresh_event(
        100,
        applied_step=120,
        decided_step=120,
        reason=None,
        changes={"a:forward": ("fp8", "fp4")},
        layers_changed=1,
        objective=0.25,
        bound=0.25,
        gap=0.0,
        solver="cbc",
        **MEASURED,
    )
    assert step_of(event) == 120
    assert quantities_of(event) == {
        "fp4_share": 1.0,
        "snip/applied": 1.0,
        "snip/probed_step": 100,
        "snip/probed_loss": 3.5,
        "snip/layers_changed": 1,
        "snip/gemms_changed": 1,
        "snip/objective": 0.25,
        "snip/gap": 0.0,
        "snip/loss_divergence_fp8": 1e-7,
        "snip/weight_divergence_fp8": 0.1,
        "snip/loss_divergence_fp4": 1e-5,
        "snip/probe_seconds": 1.5,
        "snip/solver_seconds": 0.5,
        "snip/waited_seconds": 0.0,
        "snip/memory_mib_measured": 10.0,
    }


def test_a_refresh_that_kept_the_plan_says_so() -> None:
    found = quantities_of(refresh_event(100))
    assert found == {
        "fp4_share": 1.0,
        "snip/applied": 0.0,
        "snip/probed_step": 100,
        "snip/layers_changed": 0,
        "snip/gemms_changed": 0,
    }


def test_counters_of_a_backend_survive_the_history_and_have_their_own_names() -> None:
    event = refresh_event(100, kernels={"saturated_share": 0.25, "saturated_operands": 3})
    again = Refresh.from_record(event.to_record())
    assert again == event
    found = quantities_of(again)
    assert (found["snip/saturated_share"], found["snip/saturated_operands"]) == (0.25, 3)


def test_stages_have_a_share_each_where_there_are_several() -> None:
    found = quantities_of(refresh_event(100, stage_fp4_fractions=(0.75, 0.8)))
    assert (found["fp4_share_of_stage_0"], found["fp4_share_of_stage_1"]) == (0.75, 0.8)
    assert not any("stage" in name for name in quantities_of(refresh_event(100, stage_fp4_fractions=(0.75,))))


def test_numbers_that_are_not_finite_are_left_out() -> None:
    found = quantities_of(refresh_event(100, loss=math.nan, linear_speedup=math.inf))
    assert "snip/probed_loss" not in found and "snip/linear_speedup" not in found


def test_an_alarm_has_its_figure_and_another_target_its_number() -> None:
    alarm = Alarm(step=7, figure="loss", value=9.5, limit=3.0, action="noted", reason="a spike", failures=2)
    assert quantities_of(alarm) == {
        "snip/guard_failures": 2.0,
        "snip/guard_value": 9.5,
        "snip/guard_limit": 3.0,
        "snip/guard_left_out_steps": 0.0,
    }
    assert quantities_of(replace(alarm, value=None, fp4_fraction=0.5))["fp4_share"] == 0.5
    other = Retarget(step=9, fields={"target_fp4_fraction": (0.75, 0.5), "rates": (None, "b200")})
    assert (step_of(other), quantities_of(other)) == (9, {"snip/new_target_fp4_fraction": 0.5})


def test_the_start_and_a_count_have_the_shares() -> None:
    assert quantities_of(start_event()) == {"fp4_share": 1.0}
    assert quantities_of(counted_event(1)) == {"fp4_coverage": 0.4, "snip/gemms_changed_by_tokens": 0}


def test_the_share_of_the_model_is_that_of_the_plan_times_coverage() -> None:
    plan = small_plan()
    assert quantities_in_force(plan, None) == {"fp4_share": 1.0}
    assert quantities_in_force(plan, Coverage(200.0, 80.0, [], {})) == {
        "fp4_share": 1.0,
        "fp4_coverage": 0.4,
        "fp4_share_of_model": 0.4,
    }


ALL_OF_A_LOOP = OF_A_REFRESH | {"fp4_coverage", "snip/gemms_changed_by_tokens"}


def run(name: str, folder: Path) -> None:
    """Five steps of a loop that logs its loss itself, as Accelerate's examples do."""
    accelerator = Accelerator(log_with=name, project_dir=folder / "logs", cpu=True, gradient_accumulation_steps=2)
    accelerator.init_trackers("a-project", config={"lr": 1e-2})
    loop = Loop(LOOP_CONFIG, folder, accelerator, accumulation=2)
    assert loop.controller is not None
    log_to(loop.controller, accelerator)
    for step in range(1, 6):
        loop.run(step)
        accelerator.log({"loss": loop.losses[-1]}, step=step)
    loop.controller.close()
    accelerator.end_training()


def check_stored_of_a_loop(found: Stored) -> None:
    assert found.of_snip == ALL_OF_A_LOOP and len(ALL_OF_A_LOOP) >= 8
    assert found.numbers["fp4_share"] == [0.0, pytest.approx(0.754)]  # at the start and after step 4
    assert len(found.numbers["loss"]) == 5
    assert found.settings["backend_in_use"] == "emulated"
    assert found.settings["refresh_every"] == json.loads(json.dumps(LOOP_CONFIG.to_dict()))["refresh_every"]


def test_accelerates_tensorboard_stores_all(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    run("tensorboard", tmp_path)
    check_stored_of_a_loop(of_tensorboard(tmp_path / "logs" / "a-project"))


@pytest.mark.slow
def test_accelerates_wandb_stores_all_in_its_offline_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_wandb_offline(tmp_path, monkeypatch)
    run("wandb", tmp_path)
    check_stored_of_a_loop(of_wandb(tmp_path))


@pytest.mark.slow
def test_accelerates_trackio_stores_all_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_trackio_in(tmp_path / "trackio", monkeypatch)
    run("trackio", tmp_path)
    check_stored_of_a_loop(of_trackio(tmp_path / "trackio"))


def test_a_function_gets_the_numbers_of_each_event_at_its_step() -> None:
    lines: list[tuple[int, dict[str, Any]]] = []
    loop = Loop()
    assert loop.controller is not None
    log_to(loop.controller, lambda values, step: lines.append((step, values)))
    loop.run(4)
    assert [step for step, _ in lines] == [0, 1, 4]
    start, counted, refresh = (values for _, values in lines)
    assert (start["fp4_share"], counted["fp4_coverage"]) == (0.0, 1.0)
    assert set(refresh) == OF_A_REFRESH


def test_counters_of_the_backend_are_logged_with_each_refresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Emulated, "counters", lambda self, layers: {"saturated_share": len(layers) / 100})
    lines: list[dict[str, Any]] = []
    loop = Loop()
    assert loop.controller is not None
    log_to(loop.controller, lambda values, step: lines.append(values))
    loop.run(4)
    assert [line["snip/saturated_share"] for line in lines if "snip/applied" in line] == [0.14]


def test_an_accelerator_without_trackers_gets_nothing(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loop = Loop(LOOP_CONFIG, tmp_path, accelerator)
    assert loop.controller is not None
    before = list(loop.controller._record._trackers)
    log_to(loop.controller, accelerator)
    assert loop.controller._record._trackers == before
