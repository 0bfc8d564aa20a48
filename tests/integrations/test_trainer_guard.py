"""The guard under a real Trainer: it sees raw losses and norms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from configs import fp4_config
from tiny_runs import SCHEDULE, Run, arguments, data, model_with_dropout, train, weights
from torch import nn
from transformers import Trainer, TrainerCallback

from snip_hf import SnipCallback, SnipConfig
from snip_hf.layers.state import snip_linears
from snip_hf.records.events import Alarm, read_history
from snip_hf.reporting.run_report import run_report

pytestmark = pytest.mark.usefixtures("sensitive_guard")

OPTIONS: dict[str, Any] = {**SCHEDULE, "guard": "raise", "guard_patience": 3}
# At 1e-2, as elsewhere in these tests, a model this small has spikes of its own.
LOW: dict[str, Any] = {"learning_rate": 1e-3}


def config(**changes: Any) -> SnipConfig:
    return fp4_config(**{**OPTIONS, **changes})


class Provoke(TrainerCallback):
    """Multiplies the loss of some steps, as the model returns it; notes the formats after each step."""

    def __init__(self, model: nn.Module, factors: dict[int, float]) -> None:
        self.step, self.factors = 0, factors
        self.formats: dict[int, set[str]] = {}
        inner = model.loss_function
        model.loss_function = lambda **kwargs: inner(**kwargs) * self.factors.get(self.step, 1.0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step = state.global_step + 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        layers = snip_linears(kwargs["model"]).values()
        self.formats[state.global_step] = {name for layer in layers for name in layer.formats.values()}


def provoked(folder: Path, asked: SnipConfig, factors: dict[int, float], **options: Any) -> tuple[Run, Provoke]:
    model = model_with_dropout()
    provoke = Provoke(model, factors)
    return train(folder, asked, model=model, callbacks=[provoke], **LOW | options), provoke


def alarms(folder: Path) -> list[Alarm]:
    return [event for event in read_history(folder / "snip" / "history.jsonl") if isinstance(event, Alarm)]


def test_a_loss_that_the_trainers_log_hides_raises_formats_after_its_step(tmp_path: Path) -> None:
    run, provoke = provoked(tmp_path, config(), {7: float("nan")}, max_steps=13)
    assert all(loss == loss for loss, _ in run.losses.values())  # `logging_nan_inf_filter`
    (alarm,) = alarms(tmp_path)
    assert (alarm.step, alarm.figure, alarm.value, alarm.action, alarm.left_out) == (7, "loss", None, "raised", True)
    assert provoke.formats[6] == {"fp4", "fp8"} and provoke.formats[7] == {"fp8", "bf16"}
    # The refresh of step 6 waited for its plan; the next one comes when the patience is over.
    assert [(line["step"], line["applied_step"]) for line in run.refreshes] == [(2, 4), (6, None), (11, 13)]
    assert all(torch.isfinite(tensor).all() for tensor in weights(run.model).values())


@pytest.mark.slow
def test_the_loss_and_the_norm_of_a_step_are_those_that_the_trainer_logs(tmp_path: Path) -> None:
    """Also of the tenth step, the last one of the epoch, which has one micro-batch in place of two."""
    run = train(
        tmp_path, config(guard="raise", policy="uniform-fp4"), max_steps=10, gradient_accumulation_steps=2, **LOW
    )
    assert run.callback is not None and run.callback.controller is not None
    recent = run.callback.controller.state_dict()["guard"]["recent"]
    logged = [run.losses[step] for step in range(3, 11)]
    assert recent["loss"] == pytest.approx([loss for loss, _ in logged], abs=1e-3)
    assert recent["gradient norm"] == pytest.approx([norm for _, norm in logged], rel=1e-4)


@pytest.mark.slow
def test_a_trainer_gets_its_own_training_step_back(tmp_path: Path) -> None:
    run = train(tmp_path, config(), max_steps=2)
    assert "training_step" not in vars(run.trainer)
    plain = train(tmp_path / "off", config(guard="off"), max_steps=2)
    assert "training_step" not in vars(plain.trainer)


@pytest.mark.slow
def test_alarms_are_in_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    provoked(tmp_path, config(policy="uniform-fp4"), {3: float("nan")}, max_steps=4)
    run_report(tmp_path, tmp_path / "figures")
    text = " ".join(capsys.readouterr().out.split())
    assert "Step 3: guard. The loss is nan; raised the formats of 42 GEMMs, and skipped the step." in text


def test_the_callback_in_the_docs_goes_back_to_the_last_good_checkpoint(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text(encoding="utf-8")
    code = page.partition("## Rolling back")[2].partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {}
    exec(code, names)
    saving: dict[str, Any] = LOW | {"save_strategy": "steps", "save_steps": 2, "max_steps": 12}
    found = []
    for factors, resume in (({5: float("nan"), 6: float("nan")}, None), ({}, str(tmp_path / "checkpoint-4"))):
        model, snip = model_with_dropout(), SnipCallback(config(policy="uniform-fp4"))
        back = names["RollBack"](snip, most=2)
        callbacks = [snip, back, Provoke(model, factors)]
        trainer = Trainer(model, arguments(tmp_path, **saving), train_dataset=data(), callbacks=callbacks)
        trainer.train(resume_from_checkpoint=resume)
        found.append((back.stopped, back.checkpoint, trainer.state.global_step))
    assert found == [(True, str(tmp_path / "checkpoint-4"), 6), (False, str(tmp_path / "checkpoint-12"), 12)]
