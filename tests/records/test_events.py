"""Events are written and read back to the byte, and what is no event is refused with the field's name."""

from __future__ import annotations

import dataclasses
import json
import pickle
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from events import counted_event, refresh_event, small_plan, start_event

from snip_hf.planning.solver.process import SolverResult
from snip_hf.records import events as events_module
from snip_hf.records.events import (
    Alarm,
    Event,
    Refresh,
    RefreshBegun,
    Retarget,
    Start,
    installed_versions,
    read_event,
    read_history,
)

BEGUN = RefreshBegun(
    step=2,
    loss=4.5,
    divergence={"fp8": {"loss": 0.25, "weight": 0.5}, "fp4": {"loss": 1.0, "weight": 2.0}},
    memory_mib={"measured": None},
    seconds={"probe": 0.125, "solver": None, "waited": None},
)
RESULT = SolverResult("optimal", {}, 0.5, 0.25, 0.5, {}, "greedy", "1", 0.75)
CHANGES = {f"a:{gemm}": ("fp8", "fp4") for gemm in ("forward", "grad_input", "grad_weight")}
COVERAGE = counted_event().coverage.to_dict()
SECONDS = {"probe": 0.125, "solver": 0.75, "waited": 0.0}
APPLIED = dataclasses.replace(BEGUN, seconds=SECONDS).applied(4, small_plan(), CHANGES, RESULT)
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
    again = read_event(record)
    assert type(again) is type(event) and again.to_record() == record
    assert isinstance(event, Start) or again == event
    # A tracker may hand it on.
    assert isinstance(event, Start) or pickle.loads(pickle.dumps(event)) == event
    assert isinstance(event, Start) or dataclasses.asdict(event)["step"] == event.step


def test_a_line_of_a_refresh_has_all_its_fields_and_its_status() -> None:
    names = [field.name for field in dataclasses.fields(Refresh)]
    for event, status in ((APPLIED, "applied"), (RefreshBegun(step=6).kept(6, small_plan(), "no"), "kept")):
        record = event.to_record()
        assert list(record) == ["event", *names, "status"] and record["status"] == status
    record = APPLIED.to_record()
    assert (record["layers_changed"], record["changes"]) == (1, {cell: list(pair) for cell, pair in CHANGES.items()})
    assert record["seconds"] == {"probe": 0.125, "solver": 0.75, "waited": 0.0}


@pytest.mark.parametrize(
    ("event", "changes", "message"),
    [
        (APPLIED, {"decided_step": "1"}, "decided_step is '1', expected an integer."),
        (APPLIED, {"divergence": {"fp4": 3}}, "divergence['fp4'] is 3, expected an object."),
        (APPLIED, {"changes": {"a:forward": ["fp8"]}}, "changes['a:forward'] is a list of 1, expected two values."),
        (ALARM, {"value": "x"}, "value is 'x', expected a finite number or null."),
        (RETARGET, {"fields": {"rates": [0]}}, "fields['rates'] is a list of 1, expected two values."),
        (
            RETARGET,
            {"event": "tomorrow"},
            "event is 'tomorrow', expected one of start, refresh, coverage, guard, target.",
        ),
        (start_event(), {"versions": {"torch": 2.13}}, "versions['torch'] is 2.13, expected text."),
        (counted_event(), {"coverage": COVERAGE | {"uncovered": [{}]}}, "coverage.uncovered[0] has no entry 'name'."),
        (counted_event(), {"tokens": {"a": "x"}}, "tokens['a'] is 'x', expected a finite number or an object."),
    ],
)
def test_a_value_that_no_run_writes_is_refused_with_its_field(
    event: Event, changes: dict[str, Any], message: str
) -> None:
    record = json.loads(json.dumps(event.to_record()))
    with pytest.raises(ValueError) as caught:
        read_event(record | changes)
    assert str(caught.value).startswith(message)


def test_the_line_and_the_field_are_named_of_a_history_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    lines = [event.to_record() for event in (start_event(), refresh_event(2), refresh_event(6, loss="x"))]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError) as caught:
        list(read_history(path))
    assert str(caught.value) == (
        f"Line 3 of {path} is not a line of a snip-hf history: loss is 'x', expected a finite number or null."
    )
    notes: list[str] = []
    assert [event.step for event in read_history(path, notes)] == [0, 2]
    assert notes == ["The last line of history.jsonl is not complete and is left out."]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "is empty; expected a line with the start of the run."),
        ([refresh_event(2)], "Line 1 of .* expected one start, in the first line."),
        ([start_event(), start_event()], "Line 2 of .* expected one start, in the first line."),
    ],
)
def test_a_history_that_no_run_writes_is_refused(lines: list[Event], message: str, tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text("".join(json.dumps(event.to_record()) + "\n" for event in lines))
    with pytest.raises(ValueError, match=message):
        list(read_history(path))


def test_versions_are_those_of_python_and_of_the_installed_packages() -> None:
    found = installed_versions()
    assert found["python"] == platform.python_version()
    assert found["torch"] == metadata.version("torch")
    assert found["transformers"] == metadata.version("transformers")


def test_a_package_that_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "_PACKAGES", ("torch", "no-such-package-as-this"))
    assert set(installed_versions()) == {"python", "torch"}
