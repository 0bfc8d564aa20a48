"""States, plans, histories, divergences and times that earlier versions wrote still load and say the same."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from stored_runs import IDLE, PENDING, RUNS, stored_model

from snip_hf import PrecisionPlan, SnipConfig
from snip_hf.cli import main
from snip_hf.costs.gemm_timing import read_times
from snip_hf.field_names import current_names
from snip_hf.json_io import read_json
from snip_hf.layers.convert import convert_model
from snip_hf.layers.state import snip_linears
from snip_hf.records.load import load_run
from snip_hf.training.checkpoint import SavedState
from snip_hf.training.controller import SnipController

DATA = Path(__file__).parents[1] / "data"
STORED = [pytest.param(path, id=f"{path.parent.name}-{path.name}") for path in sorted(DATA.glob("*/*/"))]


def formats(model: torch.nn.Module) -> dict[str, dict[str, str]]:
    return {name: dict(layer.formats) for name, layer in snip_linears(model).items()}


def resumed(run: Path, step: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> SnipController:
    """A controller of the run's model that continues from the stored state of a step, in a copy of the run's folder."""
    shutil.copytree(run / "snip", folder / "snip")
    shutil.copy(run.parent / "times.json", folder)
    monkeypatch.chdir(folder)  # where the timing_file of the configuration is looked for
    state = read_json(run / f"checkpoint-{step}" / "snip_state.json")
    model = stored_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    controller = SnipController(model, optimizer, SnipConfig.from_dict(state["config"]), output_dir=folder)
    controller.load_state_dict(state, at_step=step)
    return controller


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "snip" / "history.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("run", STORED)
def test_a_stored_plan_loads_applies_and_says_the_same(run: Path, tmp_path: Path) -> None:
    path = run / "snip" / "plan.json"
    plan = PrecisionPlan.load(path)
    assert plan.to_dict() == json.loads(path.read_text())
    model = stored_model()
    convert_model(model, RUNS[run.name])
    plan.apply(model)
    assert formats(model) == {layer: dict(row) for layer, row in plan.assignment.items()}
    plan.save(tmp_path / "plan.json")
    assert PrecisionPlan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize("run", STORED)
def test_a_stored_plan_can_be_held_from_the_first_step(run: Path) -> None:
    path = run / "snip" / "plan.json"
    model = stored_model()
    optimizer = torch.optim.AdamW(model.parameters())
    controller = SnipController(model, optimizer, SnipConfig(fixed_plan=str(path)))
    try:
        assert formats(model) == json.loads(path.read_text())["assignment"]
    finally:
        controller.close()


@pytest.mark.parametrize("run", STORED)
def test_a_stored_state_between_two_refreshes_resumes(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = read_json(run / f"checkpoint-{IDLE}" / "snip_state.json")
    controller = resumed(run, IDLE, tmp_path, monkeypatch)
    try:
        assert controller.step == IDLE
        assert formats(controller.model) == stored["plan"]["assignment"]
        again = json.loads(json.dumps(controller.state_dict()))
        # Fields that a later version adds to the configuration have their defaults, those it renames their new names.
        expected = stored | {"config": SnipConfig().to_dict() | current_names(stored["config"])}
        assert {key: again.get(key) for key in expected.keys() - {"run"}} == {
            key: expected[key] for key in expected.keys() - {"run"}
        }
        # What the stored run did after the step is about to happen again.
        kept = [line for line in lines(run) if line.get("decided_step", line["step"]) <= IDLE]
        assert lines(tmp_path) == kept and len(kept) >= 2
        assert {path.name for path in tmp_path.glob("snip/divergence-*")} == {"divergence-2.json"}
    finally:
        controller.close()


def test_a_stored_state_resumes_where_skip_modules_names_what_was_not_swapped_then(tmp_path: Path) -> None:
    run = next(path for path in sorted(DATA.glob("*/layer")))
    state = read_json(run / f"checkpoint-{IDLE}" / "snip_state.json")
    config = SnipConfig.from_dict(state["config"])

    def resume(*skipped: str) -> SnipController:
        model = stored_model()
        # Of a kind that an earlier version left alone.
        model.model.layers[0].mlp.experts = torch.nn.Linear(32, 32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        controller = SnipController(model, optimizer, dataclasses.replace(config, skip_modules=skipped))
        controller.load_state_dict(state, at_step=IDLE)
        return controller

    with pytest.raises(KeyError, match=r"The plan has no entry for layer 'model\.layers\.0\.mlp\.experts'"):
        resume()
    with pytest.raises(ValueError, match=r"The checkpoint was trained with skip_modules=\[\], this run asks for"):
        resume("*.experts", "*.up_proj")
    controller = resume("*.experts")
    assert formats(controller.model) == state["plan"]["assignment"]
    controller.close()


def test_a_stored_state_by_layer_stays_by_layer_and_is_not_taken_for_the_default() -> None:
    run = next(path for path in sorted(DATA.glob("*/layer")))
    state = read_json(run / f"checkpoint-{IDLE}" / "snip_state.json")
    named = SnipConfig.from_dict(state["config"])
    left_out = SnipConfig.from_dict({**state["config"], "granularity": None})
    assert (named.granularity, left_out.granularity) == ("layer", "gemm")
    flops = SavedState.of(state).plan.flops
    assert SavedState.of(state).fitted(named, flops, IDLE, None).config["granularity"] == "layer"
    message = "The checkpoint was trained with granularity='layer', this run asks for granularity='gemm'"
    with pytest.raises(ValueError, match=f"^{message}"):
        SavedState.of(state).fitted(left_out, flops, IDLE, None)


def test_a_stored_state_with_the_former_default_of_the_loss_divergence_is_not_taken_for_the_default() -> None:
    run = next(path for path in sorted(DATA.glob("*/layer")))
    state = read_json(run / f"checkpoint-{IDLE}" / "snip_state.json")
    message = (
        "The checkpoint was trained with loss_estimator='token-fisher', this run asks for loss_estimator='saliency'"
    )
    for policy in ("snip", "fisher"):
        saved = SavedState.of(state | {"config": state["config"] | {"policy": policy}})
        named = SnipConfig.from_dict(saved.config)
        assert saved.fitted(named, saved.plan.flops, IDLE, None).config["loss_estimator"] == "token-fisher"
        left_out = {name: value for name, value in saved.config.items() if name != "loss_estimator"}
        with pytest.raises(ValueError, match=f"^{message}"):
            saved.fitted(SnipConfig.from_dict(left_out), saved.plan.flops, IDLE, None)


@pytest.mark.parametrize("run", STORED)
def test_a_stored_state_in_the_middle_of_a_refresh_ends_it_as_the_stored_run_did(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = resumed(run, PENDING, tmp_path, monkeypatch)
    try:
        controller.after_step(PENDING + 1)
        controller.after_step(PENDING + 2)
        stored = json.loads((run / "snip" / "plan.json").read_text())
        assert formats(controller.model) == stored["assignment"]
        last, expected = lines(tmp_path)[-1], lines(run)[-1]
        assert (last["status"], last["applied_step"]) == ("applied", PENDING + 2)
        fields = expected.keys() - {"seconds"}
        assert {field: last[field] for field in fields} == {field: expected[field] for field in fields}
    finally:
        controller.close()


@pytest.mark.parametrize("run", STORED)
def test_a_stored_run_reads_back_and_is_reported(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    read = load_run(run)
    assert read.notes == []
    # Fields that were added since are not in the file, those that were renamed have their new names.
    assert SnipConfig().to_dict() | dict(read.config) == RUNS[run.name].to_dict()
    assert [refresh.applied_step for refresh in read.refreshes] == [4, 8]
    assert list(read.losses) == list(range(1, 9))
    for step, records in read.divergences.items():
        stored = json.loads((run / "snip" / f"divergence-{step}.json").read_text())["records"]
        assert records == stored
    shutil.copytree(run, tmp_path / "run")
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path)]) == 0
    assert main(["inspect", str(run / "snip" / "plan.json")]) == 0
    shown = capsys.readouterr()
    assert ("of the measured time" in " ".join(shown.out.split())) == (RUNS[run.name].budget == "measured")
    assert shown.err == ""


@pytest.mark.parametrize("path", sorted(DATA.glob("*/times.json")), ids=lambda path: path.parent.name)
def test_stored_times_load(path: Path) -> None:
    rows = json.loads(path.read_text())["times"]
    times = read_times(path)
    assert list(times.values()) == [row["seconds"] for row in rows]
    assert len(rows) > 1
