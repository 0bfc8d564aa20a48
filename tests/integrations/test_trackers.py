"""Do SNIP's quantities reach the log history and the trackers that a Trainer reports to, with the callback alone?

W&B and Trackio are stood in for, so that what the callback hands them is seen also where they are not installed; the
tests with their files run where they are.
"""

from __future__ import annotations

import importlib.machinery
import json
import logging
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from configs import fp4_config
from slow_cases import slow
from tiny_runs import SCHEDULE, one_thread, train
from tracker_files import Stored, of_tensorboard, of_trackio, of_wandb, use_trackio_in, use_wandb_offline
from transformers import TrainerCallback
from transformers.integrations import integration_utils

CONFIG = fp4_config(start_format="bf16", **SCHEDULE)
STEPS = 5
# The plan of step 2 is applied after step 4.
SHARES = [(1, 0.0), (2, 0.0), (3, 0.0), (4, 0.754), (5, 0.754)]
IN_FORCE = {"fp4_share", "fp4_coverage", "fp4_share_of_model"}
OF_A_REFRESH = {
    "fp4_share",
    *(f"snip/{name}" for name in ("applied", "probed_step", "probed_loss", "layers_changed", "gemms_changed")),
    *(f"snip/{name}" for name in ("objective", "gap", "probe_seconds", "solver_seconds", "waited_seconds")),
    *(f"snip/{kind}_divergence_{name}" for kind in ("loss", "weight") for name in ("fp8", "fp4")),
    "snip/memory_mib_predicted",
}
ALL = IN_FORCE | OF_A_REFRESH | {"snip/gemms_changed_by_tokens"}


@pytest.fixture(autouse=True, scope="module")
def threads() -> Iterator[None]:
    with one_thread():
        yield


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
    assert "_Front" not in run.trainer.callback_handler.callback_list


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
    said = "snip-hf: WandbCallback fails, and gets no more events of SNIP: ConnectionError('no network')"
    assert warnings.count(said) == 1


@pytest.mark.slow
def test_a_second_run_of_the_trainer_is_told_as_the_first(wandb: types.ModuleType, tmp_path: Path) -> None:
    run = train(tmp_path, CONFIG, max_steps=STEPS, report_to=["wandb"])
    first = len(wandb.logged)
    with one_thread():
        run.trainer.train()
    names = [sorted(set(line) - {"train/train_loss"}) for line in wandb.logged]
    assert names[:first] == names[first:]
