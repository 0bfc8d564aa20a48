"""What reports say of a run in a few words, where its history has more than refreshes."""

from __future__ import annotations

import json
from pathlib import Path

from written_runs import random_assignments, write_run

from snip_hf.records.events import Alarm
from snip_hf.records.load import load_run
from snip_hf.reporting.facts import last_decided


def test_the_last_refresh_is_known_whatever_the_guard_raised_since(tmp_path: Path) -> None:
    assignments = random_assignments(3)
    write_run(tmp_path, assignments)
    assert last_decided(load_run(tmp_path)) == 200
    layer = next(iter(assignments[0]))
    alarm = Alarm(
        step=250,
        figure="loss",
        value=None,
        limit=None,
        action="raised",
        reason="The loss is nan",
        failures=1,
        changes={f"{layer}:forward": (assignments[2][layer]["forward"], "bf16")},
    )
    with (tmp_path / "snip" / "history.jsonl").open("a") as file:
        file.write(json.dumps(alarm.to_record()) + "\n")
    run = load_run(tmp_path)
    assert run.plans[-1][1].assignment[layer]["forward"] == "bf16"
    assert last_decided(run) == 200


def test_a_run_without_a_new_plan_has_decided_nothing(tmp_path: Path) -> None:
    write_run(tmp_path, random_assignments(2), kept=(1,))
    assert last_decided(load_run(tmp_path)) is None
