"""Does the data of a page hold what the files of the runs say, and does it stay small?"""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pages import decoded_divergences, decoded_plan
from written_runs import random_assignments, write_divergence, write_losses, write_run

from snip_hf.numerics.gemms import GEMMS
from snip_hf.records.interventions import Alarm, Retarget
from snip_hf.records.load import Run, load_run
from snip_hf.reporting import page_data as data_module
from snip_hf.reporting.page_data import page_data, shown_run
from snip_hf.reporting.series import curve


def data_of(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(page_data({"a run": run}, None), allow_nan=False))
    return found


def test_the_letters_of_each_plan_are_its_formats(tmp_path: Path) -> None:
    assignments = random_assignments(4)
    write_run(tmp_path, assignments, kept=(2,))
    run = data_of(load_run(tmp_path))["runs"][0]
    assert run["plan"]["steps"] == [0, 110, 310]
    assert [decoded_plan(run, column) for column in range(3)] == [assignments[i] for i in (0, 1, 3)]
    assert run["plan"]["mixed"] is True


def test_a_gemm_that_a_frozen_layer_does_not_have_has_no_format(tmp_path: Path) -> None:
    write_run(tmp_path, random_assignments(1))
    path = tmp_path / "snip" / "history.jsonl"
    record = json.loads(path.read_text())
    layer = "model.layers.1.mlp.down_proj"
    del record["plan"][layer]["grad_weight"], record["flops"][layer]["grad_weight"]
    path.write_text(json.dumps(record) + "\n")
    assert decoded_plan(data_of(load_run(tmp_path))["runs"][0], 0) == record["plan"]


def test_alarms_and_other_targets_are_told_and_marked_and_raised_formats_shown(tmp_path: Path) -> None:
    write_run(tmp_path, random_assignments(1))
    path = tmp_path / "snip" / "history.jsonl"
    (layer, row), *_ = json.loads(path.read_text())["plan"].items()
    changes = {f"{layer}:forward": (row["forward"], "bf16")}
    of_alarm: dict[str, Any] = {"figure": "loss", "value": None, "limit": None, "reason": "The loss is nan"}
    alarm = Alarm(step=7, action="raised", failures=1, changes=changes, fp4_fraction=0.25, **of_alarm)
    retarget = Retarget(step=9, fields={"target_fp4_fraction": (0.75, 0.5)})
    with path.open("a") as file:
        file.writelines(json.dumps(event.to_record()) + "\n" for event in (alarm, retarget))
    run = load_run(tmp_path)
    data = data_of(run)
    assert data["runs"][0]["notes"][:2] == [
        "Step 7: guard. The loss is nan; raised the formats of 1 GEMMs.",
        "Step 9: resumed with another target. target_fp4_fraction was 0.75 and is 0.5.",
    ]
    assert run.fp4_fractions[1:] == [(7, 0.25)]
    assert data["runs"][0]["plan"]["steps"] == [0, 7]
    assert decoded_plan(data["runs"][0], 1)[layer]["forward"] == "bf16"
    losses = {2: {"loss": 3.0}, 8: {"loss": 2.0}}
    [chart, *_] = page_data({"a run": replace(run, losses=losses)}, None)["charts"]
    assert [(mark["name"], mark["steps"], mark["kept"]) for mark in chart["marks"]] == [
        ("alarm of the guard", [7], True)
    ]


def test_divergences_keep_their_steps_and_their_values_to_half_a_percent(tmp_path: Path) -> None:
    assignments = random_assignments(2)
    write_run(tmp_path, assignments)
    layers = list(assignments[0])
    rng = random.Random(0)
    values = {
        step: {(layer, "layer"): (10 ** rng.uniform(-9, -2), rng.random()) for layer in layers} for step in (30, 1000)
    }
    values[30][layers[1], "layer"] = (0.0, 0.5)
    for step, table in values.items():
        write_divergence(tmp_path, step, table)
    data = data_of(load_run(tmp_path))
    found = data["runs"][0]["divergence"]
    assert found["steps"] == [30, 1000]
    assert [panel["name"] for panel in found["panels"]] == [
        "loss divergence, whole layer",
        "weight divergence, whole layer",
    ]
    for which, panel in enumerate(found["panels"]):
        for column, step in zip(decoded_divergences(data, panel), (30, 1000), strict=True):
            expected = [values[step][layer, "layer"][which] or None for layer in layers]
            assert column == [value and pytest.approx(value, rel=5e-3) for value in expected]


def test_equal_divergences_have_a_scale_too(tmp_path: Path) -> None:
    assignments = random_assignments(1)
    write_run(tmp_path, assignments)
    write_divergence(tmp_path, 10, {(layer, "layer"): (0.25, 0.0) for layer in assignments[0]})
    data = data_of(load_run(tmp_path))
    (panel,) = data["runs"][0]["divergence"]["panels"]
    assert decoded_divergences(data, panel) == [[pytest.approx(0.25)] * len(assignments[0])]


def test_losses_come_with_the_refreshes_and_a_run_in_bf16_beside_them(tmp_path: Path) -> None:
    write_run(tmp_path, random_assignments(4), kept=(2,))
    write_losses(tmp_path / "trainer_state.json", 100)
    data = page_data({"ours": load_run(tmp_path)}, ("theirs", {10: {"loss": 4.0}, 20: {"loss": math.inf}}))
    chart = data["charts"][0]
    assert [(one["name"], one["x"][:2], one["y"][:2]) for one in chart["series"]] == [
        ("ours, training", [10, 20], [9.9, 9.8]),
        ("ours, validation", [50, 100], [19.5, 19.0]),
        ("theirs, training", [10, 20], [4.0, None]),
    ]
    assert [(mark["name"], mark["steps"]) for mark in chart["marks"]] == [
        ("new plan in force", [110, 310]),
        ("plan kept", [200]),
    ]


def test_the_share_of_fp4_goes_on_to_the_last_step_with_its_target_beside_it(tmp_path: Path) -> None:
    assignments = [{layer: dict.fromkeys(GEMMS, name) for layer in random_assignments(1)[0]} for name in ("fp8", "fp4")]
    write_run(tmp_path, assignments)
    write_losses(tmp_path / "trainer_state.json", 400)
    share, target = page_data({"a run": load_run(tmp_path)}, None)["charts"][1]["series"]
    assert (share["x"], share["y"]) == ([0, 110, 400], [0.0, 50.0, 50.0])  # the history says 0.5
    assert (target["x"], target["y"], target["dashed"]) == ([0, 400], [50.0, 50.0], True)


def test_what_refreshes_took_and_found_are_curves_of_their_run(tmp_path: Path) -> None:
    write_run(tmp_path, random_assignments(3), kept=(2,))
    charts = {chart["title"]: chart for chart in data_of(load_run(tmp_path))["runs"][0]["charts"]}
    seconds = {one["name"]: one["y"] for one in charts["Seconds of each refresh"]["series"]}
    assert seconds == {"probe": [1.25, 1.25], "solver": [3.0, 3.0], "waited": [0.0, 0.0]}
    assert charts["Objective of the solver"]["series"][0]["x"] == [100]
    assert "Speed of the linears" not in charts and "FP4 share of each stage" not in charts


def test_spikes_stay_in_a_thinned_curve() -> None:
    losses = {step: {"loss": 2.0 + step % 2 / 100} for step in range(10_000)}
    losses[5000]["loss"], losses[7001]["loss"] = 90.0, math.nan
    points = dict(curve(losses, "loss", 400))
    assert len(points) <= 400
    assert points[5000] == 90.0 and math.isnan(points[7001])
    assert {0, 9999} <= points.keys() and list(points) == sorted(points)


def test_of_more_than_a_page_holds_some_are_left_out_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assignments = random_assignments(9)
    write_run(tmp_path, assignments)
    for step in range(100, 900, 100):
        write_divergence(tmp_path, step, {(layer, "layer"): (0.1, 0.2) for layer in assignments[0]})
    cells = len(assignments[0]) * len(GEMMS)
    monkeypatch.setattr(data_module, "_MOST_LETTERS", 6 * cells)
    monkeypatch.setattr(data_module, "_MOST_DIVERGENCES", 6 * 8 * len(assignments[0]))
    run = load_run(tmp_path)
    alone, among_two = shown_run(run, 1), shown_run(run, 2)
    assert alone.notes == ["The page shows 6 of 9 plans."]
    assert among_two.notes == ["The page shows 3 of 9 plans.", "The page shows 4 of 8 probes."]
    assert [decoded_plan(among_two.data, column) for column in range(3)] == [assignments[i] for i in (0, 4, 8)]
