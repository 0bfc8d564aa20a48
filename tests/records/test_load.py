"""At which steps the plans of a run were in force, as its history says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from written_runs import random_assignments, write_divergence, write_run

from snip_hf.records import load
from snip_hf.records.events import LOSS, Alarm, Retarget
from snip_hf.records.load import load_run, read_log
from snip_hf.reporting.page import comparison


def test_raised_formats_are_in_force_after_an_alarm(tmp_path: Path) -> None:
    write_run(tmp_path, random_assignments(1))
    path = tmp_path / "snip" / "history.jsonl"
    (layer, row), *_ = json.loads(path.read_text())["plan"].items()
    alarm = Alarm(
        step=5,
        figure=LOSS,
        value=None,
        limit=None,
        action="raised",
        reason="It went wrong",
        failures=1,
        changes={f"{layer}:forward": (row["forward"], "bf16")},
        fp4_fraction=0.25,
    )
    with path.open("a") as file:
        file.write(json.dumps(alarm.to_record()) + "\n")
    run = load_run(tmp_path)
    assert [step for step, _ in run.plans] == [0, 5]
    assert run.fp4_fractions[1:] == [(5, 0.25)]


def test_the_mean_share_is_not_known_if_that_of_a_plan_is_not(tmp_path: Path) -> None:
    write_run(tmp_path, random_assignments(3))
    assert load_run(tmp_path).mean_fp4_fraction is not None
    path = tmp_path / "snip" / "history.jsonl"
    path.write_text(path.read_text().replace('"fp4_fraction": 0.5', '"fp4_fraction": null', 1))  # experts, not counted
    assert load_run(tmp_path).mean_fp4_fraction is None


def test_the_losses_are_not_those_of_a_branch_that_the_run_left_when_it_was_resumed(tmp_path: Path) -> None:
    write_run(tmp_path, random_assignments(3))
    for step, probed, loss in ((250, 200, 3.0), (400, 300, 9.0)):
        refresh = {"step": probed + 10, "snip/probed_step": probed, "snip/objective": 12.345678}
        state = {"global_step": step, "log_history": [refresh, {"step": step, "loss": loss}]}
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps(state))
    run = load_run(tmp_path)
    assert run.losses == {250: {"loss": 3.0}}
    assert any(note.startswith("The losses end at step 250. A Trainer's log up to step 400") for note in run.notes)
    losses, _ = read_log(tmp_path, [])  # without a history the longest one counts
    assert losses == {400: {"loss": 9.0}}


def test_the_last_config_has_the_target_that_a_run_was_last_resumed_with(tmp_path: Path) -> None:
    write_run(tmp_path, random_assignments(1))
    assert load_run(tmp_path).last_config == load_run(tmp_path).config
    with (tmp_path / "snip" / "history.jsonl").open("a") as file:
        for step, (before, now) in {5: (0.75, 0.5), 9: (0.5, 0.6)}.items():
            event = Retarget(step=step, fields={"target_fp4_fraction": (before, now)})
            file.write(json.dumps(event.to_record()) + "\n")
    run = load_run(tmp_path)
    assert run.last_config == {**run.config, "target_fp4_fraction": 0.6}
    rows = dict(comparison({"": run}, {"": run.losses}, None))
    assert rows["Target"] == ["at least 60.0% of the linears' FLOPs in FP4"]


def test_of_many_tables_the_one_of_the_last_applied_refresh_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "_MOST_TABLES", 2)
    write_run(tmp_path, random_assignments(5), kept=(4,))
    for step in (100, 200, 300, 400):
        write_divergence(tmp_path, step, {("model.layers.0.mlp.down_proj", "forward"): (1.0, 1.0)})
    run = load_run(tmp_path)
    assert list(run.divergences) == [100, 300, 400]
    assert "The figure of the divergences shows 3 of 4 probes." in run.notes
