"""Do folders and modules with any characters in their names train, save and resume, and are they shown escaped?"""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fault_runs import CONFIG, SAVING, SHORT
from slow_cases import slow_but
from small import tiny_llama
from tiny_runs import SCHEDULE, differing, train, weights
from torch import Tensor, nn

from snip_hf import PrecisionPlan, SnipConfig, SnipController
from snip_hf.json_io import read_json
from snip_hf.records.load import load_run

# A no-break space, an ideographic and a zero-width one, a letter that turns the writing direction, an accent, a line
# separator.
ODD = "a\u00a0b\u3000c\u200bd\u202ee\u0301\u2028"
# What Python makes of a byte that is no UTF-8.
SURROGATE = os.fsdecode(b"caf\xe9")
ESCAPED = r"a\xa0b\u3000c\u200bd\u202e"


class OddMLP(nn.Module):
    """A block of two linears of given names."""

    def __init__(self, hidden: int, first: str, second: str) -> None:
        super().__init__()
        self.names = (first, second)
        self.add_module(first, nn.Linear(hidden, 2 * hidden))
        self.add_module(second, nn.Linear(2 * hidden, hidden))

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.get_submodule(name) for name in self.names)
        return second(torch.tanh(first(x)))


def odd_model(first: str, second: str = "down") -> nn.Module:
    model = tiny_llama(hidden=32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model.model.layers[0].mlp = OddMLP(32, first, second)
    return model


@pytest.fixture
def logged() -> Iterator[io.TextIOWrapper]:
    """All that the package logs, as a terminal gets it: a handler that cannot write a line raises an error."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    handler = logging.StreamHandler(stream)

    def fail(record: logging.LogRecord) -> None:
        raise

    handler.handleError = fail
    package = logging.getLogger("snip_hf")
    level = package.level
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    yield stream
    package.removeHandler(handler)
    package.setLevel(level)


def lines(stream: io.TextIOWrapper) -> list[str]:
    found = stream.buffer.getvalue().decode("utf-8").split("\n")
    assert all(line.isprintable() for line in found)
    return found


def test_a_folder_of_an_odd_name_takes_a_run_and_its_resumption(tmp_path: Path, logged: io.TextIOWrapper) -> None:
    folder = tmp_path / ODD

    def model() -> nn.Module:
        made = odd_model(ODD)
        made.config._name_or_path = str(folder)
        return made

    run = train(folder, CONFIG, model=model(), **SHORT, **SAVING)
    layer = f"model.layers.0.mlp.{ODD}"
    assert [line["status"] for line in run.refreshes] == ["applied", "applied"]
    assert layer in PrecisionPlan.load(folder / "snip" / "plan.json").assignment
    read = load_run(folder)
    assert layer in {record["layer"] for record in read.divergences[2]}
    assert [refresh.applied_step for refresh in read.refreshes] == [4, 8]

    state = read_json(folder / "checkpoint-6" / "snip_state.json")
    assert state["pending"]["step"] == 6 and layer in state["plan"]["assignment"]
    resumed = train(folder, CONFIG, model=model(), resume=folder / "checkpoint-6", **SHORT)
    assert resumed.losses == run.losses
    assert differing(weights(resumed.model), weights(run.model)) == []
    assert any("resuming from" in line and ESCAPED in line for line in lines(logged))


@pytest.mark.slow
def test_a_folder_whose_name_is_no_utf8_takes_a_run_and_a_plan(tmp_path: Path, logged: io.TextIOWrapper) -> None:
    """Checkpoints of the weights it does not take: safetensors refuses such a path."""
    folder = tmp_path / SURROGATE
    config = SnipConfig(**SCHEDULE, budget="measured", timing_file=str(folder / "times.json"))
    run = train(folder, config, **SHORT)
    assert [line["status"] for line in run.refreshes] == ["applied", "applied"]
    assert (folder / "times.json").is_file()
    plan = folder / "snip" / "plan.json"
    held = train(folder, SnipConfig(fixed_plan=str(plan)), max_steps=2)
    assert held.callback.controller.plan.assignment == run.callback.controller.plan.assignment
    assert held.history[0]["config"]["fixed_plan"] == str(plan)
    assert any("moved what an earlier run recorded" in line and r"caf\udce9" in line for line in lines(logged))


@pytest.mark.parametrize("solver", slow_but(["greedy", "highs", "cbc"], "greedy"))
def test_a_module_of_any_name_is_planned_saved_and_resumed(
    solver: str, tmp_path: Path, logged: io.TextIOWrapper
) -> None:
    config = SnipConfig(**SCHEDULE | {"solver": solver, "granularity": "gemm", "target_fp4_fraction": 0.5})
    first, second = SURROGATE, ODD
    states = []
    for state in (None, "saved"):
        model = odd_model(first, second)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        controller = SnipController(model, optimizer, config, output_dir=tmp_path)
        if state is not None:
            controller.load_state_dict(json.loads(json.dumps(states[0])))
        batch = {"input_ids": torch.arange(48).view(2, 24), "labels": torch.arange(48).view(2, 24)}
        for step in range(controller.step + 1, 5):
            controller.capture(batch)
            model(**batch).loss.backward()
            controller.before_optimizer_step(step)
            optimizer.step()
            optimizer.zero_grad()
            controller.after_step(step)
            if step == 3 and state is None:
                states.append(controller.state_dict())
        assert controller.plan.provenance.step == 2, (tmp_path / "snip" / "history.jsonl").read_text()
        states.append(controller.plan.assignment)
        controller.close()
    _, planned, resumed = states
    assert planned == resumed
    assert {f"model.layers.0.mlp.{name}" for name in (first, second)} <= planned.keys()
    assert PrecisionPlan.load(tmp_path / "snip" / "plan.json").assignment == planned
    lines(logged)


def test_a_model_of_any_path_has_a_name_without_control_characters(tmp_path: Path) -> None:
    model = tiny_llama(hidden=32)
    model.config._name_or_path = "mod\tel\x1b[31m\u00a0" + "x" * 5000
    controller = SnipController(model, torch.optim.AdamW(model.parameters()), CONFIG, output_dir=tmp_path)
    controller.start()
    name = PrecisionPlan.load(tmp_path / "snip" / "plan.json").provenance.model_name
    assert name.startswith(r"mod\tel\x1b[31m\xa0xxx") and len(name) == 4096
    controller.close()


def test_errors_about_files_show_their_names_escaped(tmp_path: Path) -> None:
    path = tmp_path / f"{ODD}{SURROGATE}.json"
    path.write_text("{")
    with pytest.raises(ValueError) as caught:
        PrecisionPlan.load(path)
    assert ESCAPED in str(caught.value) and str(caught.value).isprintable()
