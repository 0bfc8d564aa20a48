"""Events are written and read back to the byte, and what is no event is refused with the field's name."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from events import counted_event, refresh_event, small_plan, start_event

from snip_hf.planning.solver.process import SolverResult
from snip_hf.records.events import Event, Refresh, RefreshBegun, Start, later_event
from snip_hf.records.history import read_history
from snip_hf.records.interventions import Alarm, Retarget

BEGUN = RefreshBegun(
    step=2,
    loss=4.5,
    divergence={"fp8": {"loss": 0.25, "weight": 0.5}, "fp4": {"loss": 1.0, "weight": 2.0}},
    memory_mib={"predicted": 0.5, "measured": None},
    seconds={"probe": 0.125, "solver": None, "waited": None},
)
RESULT = SolverResult("optimal", {}, 0.5, 0.25, 0.5, {}, "greedy", "1", 0.75)
CHANGES = {f"a:{gemm}": ["fp8", "fp4"] for gemm in ("forward", "grad_input", "grad_weight")}
APPLIED = BEGUN.with_seconds(solver=0.75, waited=0.0).applied(4, small_plan(), CHANGES, RESULT)
ALARM = Alarm(
    step=8,
    figure="gradient norm",
    value=9.5,
    limit=2.0,
    action="raised",
    reason="a spike",
    failures=1,
    left_out=True,
    changes={"a:forward": ("fp4", "fp8")},
    fp4_fraction=0.5,
)
RETARGET = Retarget(step=5, fields={"target_fp4_fraction": (0.75, [[1, 0.9], [8, 0.5]]), "rates": (None, "b200")})
EVENTS: list[Event] = [
    start_event(),
    start_event(versions={"torch": "2.13.0"}),
    APPLIED,
    BEGUN.kept(3, small_plan(), "no"),
    RefreshBegun(step=6).kept(6, small_plan(), "no"),
    counted_event(),
    counted_event(7, tokens={"a": 0.5}, changes={"a:forward": ("fp8", "fp4")}),
    ALARM,
    Alarm(step=9, figure="loss", value=None, limit=None, action="noted", reason="no", failures=3),
    RETARGET,
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: f"{event.event}-{event.step}")
def test_an_event_comes_back_from_its_line(event: Event) -> None:
    record = json.loads(json.dumps(event.to_record()))
    again = Start.from_record(record) if isinstance(event, Start) else later_event(record)
    assert type(again) is type(event) and again.to_record() == record
    assert isinstance(event, Start) or again == event
    # A tracker may hand it on.
    assert isinstance(event, Start) or pickle.loads(pickle.dumps(event)) == event
    assert isinstance(event, Start) or dataclasses.asdict(event)["step"] == event.step


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        (["2.13.0"], "versions is a list of 1, expected a JSON object."),
        ({"torch": 2.13}, "versions['torch'] is 2.13, expected text or null."),
        ({str(number): "1" for number in range(1001)}, "versions has 1,001 entries, expected at most 1000."),
    ],
)
def test_versions_that_are_none_are_refused(versions: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Start.from_record(start_event().to_record() | {"versions": versions})


def test_a_line_of_an_applied_refresh_has_these_entries_in_this_order() -> None:
    record = APPLIED.to_record()
    assert list(record) == [
        *("event", "step", "loss", "divergence", "memory_mib", "seconds", "applied_step", "decided_step", "status"),
        *("reason", "fp4_fraction", "stage_fp4_fractions", "changes", "layers_changed"),
        *("objective", "bound", "gap", "solver", "solver_version"),
    ]
    assert (record["status"], record["layers_changed"], record["changes"]) == ("applied", 1, CHANGES)
    assert record["seconds"] == {"probe": 0.125, "solver": 0.75, "waited": 0.0}


def test_a_line_of_a_refresh_that_failed_before_its_probe_ends_with_what_did_not_change() -> None:
    assert RefreshBegun(step=6).kept(6, small_plan(), "no").to_record() == {
        **{"event": "refresh", "step": 6, "applied_step": None, "decided_step": 6, "status": "kept", "reason": "no"},
        **{"fp4_fraction": 1.0, "stage_fp4_fractions": [1.0], "changes": {}, "layers_changed": 0},
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"status": "kept"}, "status is 'kept', expected 'applied' where applied_step is 4."),
        ({"decided_step": -1}, "decided_step is -1, expected an integer from 0 to 9007199254740992."),
        ({"divergence": {"fp4": 3}}, "divergence.fp4 is 3, expected a JSON object."),
        ({"divergence": {"fp4": {"loss": "x"}}}, "divergence.fp4.loss is 'x', expected a number up to 1e+100 in size."),
        ({"memory_mib": []}, "memory_mib is a list of 0, expected a JSON object."),
        ({"stage_fp4_fractions": 1}, "stage_fp4_fractions is 1, expected a list."),
        ({"solver": 1}, "solver is 1, expected text or null."),
        ({"loss": True}, "loss is True, expected a number up to 1e+100 in size."),
    ],
)
def test_a_value_that_no_run_writes_is_refused_with_its_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Refresh.from_record(APPLIED.to_record() | changes)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("event", "changes", "message"),
    [
        (
            ALARM,
            {"figure": "mood"},
            "figure is 'mood', expected one of loss, gradient norm.",
        ),
        (ALARM, {"action": []}, "action is a list of 0, expected one of noted, raised."),
        (ALARM, {"failures": -1}, "failures is -1, expected an integer from 0 to 9007199254740992."),
        (ALARM, {"value": "x"}, "value is 'x', expected a number up to 1e+100 in size."),
        (RETARGET, {"fields": {"seed": [0, 1]}}, "fields names 'seed', expected one of target_fp4_fraction, "),
        (RETARGET, {"fields": {"rates": [0]}}, "fields['rates'] is a list of 1, expected the old and the new value."),
    ],
)
def test_an_alarm_or_a_target_that_no_run_writes_is_refused_with_its_field(
    event: Alarm | Retarget, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        later_event(event.to_record() | changes)
    assert str(caught.value).startswith(message)


def test_a_refresh_of_before_there_were_all_of_its_entries_is_read() -> None:
    names = ("event", "step", "applied_step", "reason", "fp4_fraction", "changes", "layers_changed")
    record = APPLIED.to_record()
    found = Refresh.from_record({name: record[name] for name in names} | {"of_tomorrow": 1})
    assert (found.status, found.decided_step, found.seconds, found.stage_fp4_fractions) == ("applied", 4, {}, ())


def test_a_history_of_before_frozen_layers_had_no_grad_weight_is_read_without_it(tmp_path: Path) -> None:
    name, gemms = "model.layers.0.q_proj", ("forward", "grad_input", "grad_weight")
    start = start_event().to_record() | {
        "plan": {name: dict.fromkeys(gemms, "fp8")},
        "flops": {name: {"forward": 1.0, "grad_input": 1.0, "grad_weight": 0.0}},
        "stages": [[name]],
    }
    refresh = APPLIED.to_record() | {"changes": {f"{name}:{gemm}": ["fp8", "fp4"] for gemm in gemms}}
    path = tmp_path / "history.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (start, refresh)))
    found, changed = read_history(path)
    assert isinstance(found, Start) and isinstance(changed, Refresh)
    expected = {"model.layers.0.q_proj": {"forward": "fp8", "grad_input": "fp8"}}
    assert {layer: dict(row) for layer, row in found.plan.assignment.items()} == expected
    assert list(changed.changes) == ["model.layers.0.q_proj:forward", "model.layers.0.q_proj:grad_input"]


def test_the_line_and_the_field_are_named_of_a_history_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    lines = [event.to_record() for event in (start_event(), refresh_event(2), refresh_event(6, loss="x"))]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError) as caught:
        list(read_history(path))
    assert str(caught.value) == (
        f"Line 3 of {path} is not a line of a snip-hf history: loss is 'x', expected a number up to 1e+100 in size."
    )
    notes: list[str] = []
    assert [event.step for event in read_history(path, notes)] == [0, 2]
    assert notes == ["The last line of history.jsonl is not complete and is left out."]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"flops": -1}, "'flops' is -1.0, expected a number of at least 0."),
        ({"covered": 201.0}, "covered is 201, expected at most flops, 200."),
        ({"uncovered": {}}, "uncovered is a JSON object of 0, expected a list."),
        ({"uncovered": [{}]}, "it has no entry 'name'."),
        ({"uncovered": [{"name": "a", "kind": 3, "share": 0, "reason": "b"}]}, "uncovered[0].kind is 3, expected text"),
        (
            {"uncovered": [{"name": "a", "kind": "b", "share": 1.5, "reason": "c"}]},
            "uncovered[0].share is 1.5, expected",
        ),
        ({"aside": {"x": None}}, "'x' is None, expected a number of at least 0."),
        ({"tokens": {"a": -1}}, "tokens['a'] is -1.0, expected a number of at least 0."),
        ({"tokens": {"a": "x"}}, "tokens['a'] is 'x', expected a number up to 1e+100 in size."),
        (
            {"changes": {"a:forward": ["fp8"]}},
            "changes['a:forward'] is a list of 1, expected the old and the new format.",
        ),
        ({"step": -1}, "step is -1, expected an integer"),
    ],
)
def test_a_count_that_is_none_is_refused_by_its_field(changes: dict[str, Any], message: str) -> None:
    record = json.loads(json.dumps(counted_event().to_record())) | changes
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        later_event(record)
