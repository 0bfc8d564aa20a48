"""Does the FP4 share reach the log history and the trackers that a Trainer reports to, with the callback alone?"""

from __future__ import annotations

import importlib.machinery
import logging
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tiny_runs import SCHEDULE, one_thread, train
from transformers.integrations import integration_utils

from snip_hf import SnipConfig

CONFIG = SnipConfig(start_format="bf16", **SCHEDULE)
STEPS = 5
# The plan of step 2 is applied after step 4.
SHARES = [(1, 0.0), (2, 0.0), (3, 0.0), (4, 0.7619), (5, 0.7619)]


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


class Writer:
    """What TensorBoard's SummaryWriter is to the Trainer."""

    made: ClassVar[list[Writer]] = []

    def __init__(self, log_dir: str) -> None:
        self.folder, self.scalars, self.is_closed = log_dir, [], False
        Path(log_dir).mkdir(parents=True, exist_ok=True)
        (Path(log_dir) / f"events.out.tfevents.{len(self.made)}").touch()
        self.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, step, value))

    def add_text(self, *args: Any) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def tensorboard(monkeypatch: pytest.MonkeyPatch) -> list[Writer]:
    monkeypatch.setattr(integration_utils, "is_tensorboard_available", lambda: True)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    module(monkeypatch, "tensorboardX", SummaryWriter=Writer)
    monkeypatch.setattr(Writer, "made", [])
    return Writer.made


class Config(dict):
    def update(self, *args: Any, **kwargs: Any) -> None:
        pass


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    made = module(monkeypatch, "wandb", run=None, config=Config(), logged=[], Settings=lambda **kwargs: None)

    def init(**kwargs: Any) -> Any:
        made.run = types.SimpleNamespace(summary={}, _label=lambda **kwargs: None, url="", id="", name="")
        return made.run

    vars(made).update(
        init=init,
        log=made.logged.append,
        define_metric=lambda *args, **kwargs: None,
        watch=lambda *args, **kwargs: None,
        finish=lambda: None,
    )
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
    made = module(monkeypatch, "trackio", __version__="0.30.0", config=Config(), logged=[], context_vars=variables)

    def init(**kwargs: Any) -> None:
        variables.current_run.value = "a run"

    vars(made).update(init=init, log=made.logged.append, finish=lambda: None)
    monkeypatch.setattr(integration_utils, "is_trackio_available", lambda: True)
    return made


def shares(lines: list[dict[str, Any]]) -> list[tuple[int, float]]:
    return [(line["train/global_step"], line["train/fp4_share"]) for line in lines if "train/fp4_share" in line]


def test_the_share_is_in_the_log_history_and_nothing_else_is_started(tmp_path: Path) -> None:
    run = train(tmp_path, CONFIG, max_steps=STEPS)
    lines = run.trainer.state.log_history
    assert [(line["step"], line["fp4_share"]) for line in lines if "fp4_share" in line] == SHARES
    assert ["fp4_share" in line for line in lines] == ["loss" in line for line in lines]
    of_model = [(line["fp4_coverage"], line["fp4_share_of_model"]) for line in lines if "loss" in line]
    assert of_model == [(1.0, share) for _, share in SHARES]
    assert not (tmp_path / "runs").exists()
    assert "wandb" not in sys.modules and "trackio" not in sys.modules


def test_the_share_reaches_tensorboard_in_the_run_that_the_trainer_writes(
    tensorboard: list[Writer], tmp_path: Path
) -> None:
    (tmp_path / "runs" / "an earlier one").mkdir(parents=True)
    train(tmp_path, CONFIG, max_steps=STEPS, report_to=["tensorboard"])
    trainers, own = tensorboard
    assert own.folder == trainers.folder
    assert [name for name, step, _ in trainers.scalars if step == 1 and "loss" in name] == ["train/loss"]
    # All of the model's products are covered.
    names = ("train/fp4_share", "train/fp4_coverage", "train/fp4_share_of_model")
    expected = [(name, step, 1.0 if name == names[1] else share) for step, share in SHARES for name in names]
    assert own.scalars == expected
    assert own.is_closed


def test_the_share_reaches_tensorboard_where_its_variable_says(
    tensorboard: list[Writer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "elsewhere"))
    train(tmp_path, CONFIG, max_steps=STEPS, report_to=["tensorboard"])
    assert [writer.folder for writer in tensorboard] == [str(tmp_path / "elsewhere")] * 2


def test_a_real_tensorboard_shows_the_share_beside_the_loss(tmp_path: Path) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(tmp_path, CONFIG, max_steps=STEPS, report_to=["tensorboard"])
    (folder,) = (tmp_path / "runs").iterdir()
    events = reading.EventAccumulator(str(folder)).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5]
    found = [(event.step, round(event.value, 4)) for event in events.Scalars("train/fp4_share")]
    assert found == SHARES


def test_the_share_reaches_wandb(wandb: types.ModuleType, tmp_path: Path) -> None:
    train(tmp_path, CONFIG, max_steps=STEPS, report_to=["wandb"])
    assert shares(wandb.logged) == SHARES
    assert sum("train/loss" in line for line in wandb.logged) == STEPS


def test_the_share_reaches_trackio(trackio: types.ModuleType, tmp_path: Path) -> None:
    train(tmp_path, CONFIG, max_steps=STEPS, report_to=["trackio"])
    assert shares(trackio.logged) == SHARES
    assert sum("train/loss" in line for line in trackio.logged) == STEPS


def test_a_tracker_that_fails_costs_its_figures_and_not_the_run(
    wandb: types.ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logged = wandb.logged

    def log(line: dict[str, Any]) -> None:
        if "train/fp4_share" in line:
            raise ConnectionError("no network")
        logged.append(line)

    wandb.log = log
    run = train(tmp_path, CONFIG, max_steps=STEPS, report_to=["wandb"])
    assert len(run.losses) == STEPS
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings.count("snip-hf: wandb gets no more figures of SNIP's: ConnectionError('no network')") == 1


def test_a_process_that_is_not_the_first_writes_nothing(wandb: types.ModuleType) -> None:
    from snip_hf.integrations.trackers import Trackers

    wandb.init()
    state = types.SimpleNamespace(is_world_process_zero=False, global_step=1)
    Trackers().log(types.SimpleNamespace(report_to=["wandb"]), state, None, {"fp4_share": 0.5})  # type: ignore[arg-type]
    assert wandb.logged == []
