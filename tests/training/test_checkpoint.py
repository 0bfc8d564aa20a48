"""A state that does not belong to the weights is refused, e.g. after a run was copied or a file exchanged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_cases import slow
from small import tiny_llama
from tiny_runs import SCHEDULE, Run, differing, train, weights
from torch import nn
from transformers import TrainerCallback

from snip_hf import SnipCallback, SnipConfig
from snip_hf.layers.convert import convert_model
from snip_hf.training.fingerprint import weights_fingerprint

CONFIG = SnipConfig(**SCHEDULE)
SAVING = {"save_strategy": "steps", "save_steps": 3, "max_steps": 9}
OTHER_WEIGHTS = (
    "Cannot resume from {path}: The SNIP state was saved with other weights than those that were loaded: the two are "
    "of different runs, or one of them was exchanged. Name the folder of the weights in SnipCallback(resume=FOLDER), "
    "or say SnipCallback(resume=False) to start a new plan from them. If the Trainer warned of missing keys, as it "
    "does for some mixtures of experts, load the model from the checkpoint by from_pretrained first."
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
    message = refused(mine.parent, SnipCallback(CONFIG, resume=mine), theirs)
    assert message == OTHER_WEIGHTS.format(path=mine / "snip_state.json")
    # Both ways that the message names work, and by default the state is the one beside the weights.
    resumed = train(mine.parent, callback=SnipCallback(CONFIG), resume=theirs, max_grad_norm=0.1, **SAVING)
    assert differing(weights(resumed.model), weights(other.model)) == []
    train(theirs.parent, callback=SnipCallback(CONFIG, resume=False), resume=theirs, **SAVING)


def test_weights_that_were_exchanged_by_hand_are_noticed(copies: tuple[Run, Run], tmp_path: Path) -> None:
    checkpoint = copy_of(copies[0], tmp_path / "run")
    shutil.copy(copies[1].folder / "checkpoint-6" / "model.safetensors", checkpoint)
    message = refused(tmp_path / "run", SnipCallback(CONFIG), checkpoint)
    assert message == OTHER_WEIGHTS.format(path=checkpoint / "snip_state.json")


def test_a_state_that_knows_nothing_of_its_weights_is_still_loaded(copies: tuple[Run, Run], tmp_path: Path) -> None:
    checkpoint = copy_of(copies[0], tmp_path / "run")
    path = checkpoint / "snip_state.json"
    state = json.loads(path.read_text())
    assert len(state.pop("weights")) == 64
    path.write_text(json.dumps(state))
    resumed = train(tmp_path / "run", CONFIG, resume=checkpoint, **SAVING)
    assert differing(weights(resumed.model), weights(copies[0].model)) == []


def test_a_run_without_a_probe_takes_its_plan_from_its_configuration_and_not_from_weights(tmp_path: Path) -> None:
    config = SnipConfig(policy="layer-position")
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


def test_a_fingerprint_of_adapters_is_that_of_earlier_versions_states() -> None:
    model, layer = nn.Module(), nn.Module()
    layer.base_layer, layer.lora_A = nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)
    model.base_model = nn.Module()
    model.base_model.model = nn.Module()
    model.base_model.model.model = nn.ModuleDict({"layers": nn.ModuleList([layer])})
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    assert weights_fingerprint(model) == "995b86cefc99a8801acf0641aff9d10dfb8f3beb1ea836e3c732d2bced10d611"


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
