"""Is a plan, a state or a solver's answer that somebody or something spoiled refused, in time, by the file's name?

Whatever the bytes: a valid plan comes out, or a ValueError or OSError that names the file, and nothing is executed,
opened or waited for on its behalf.
"""

from __future__ import annotations

import copy
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from events import refresh_event, start_event
from fault_runs import CONFIG, damaged, mutated
from slow_cases import slow
from small_problem import make_problem
from tiny_runs import Run, model_with_dropout

from snip_hf import PrecisionPlan, SnipController
from snip_hf.json_io import MAX_JSON_BYTES, append_json_line, parse_json, read_json
from snip_hf.numerics.gemms import GEMMS
from snip_hf.planning.plan import PlanProvenance
from snip_hf.planning.solver import ilp
from snip_hf.planning.solver.process import SolverProcess
from snip_hf.planning.solver.solution import SolverError, SolverResult, check_solution
from snip_hf.records.run_folder import RunFolder

# Seconds that one file of a few kB may take on a busy machine; most take a millisecond.
BOUND = 5.0


@contextmanager
def in_time(seconds: float = BOUND) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


@pytest.fixture(scope="module")
def plan(undisturbed: Run) -> PrecisionPlan:
    return PrecisionPlan.load(undisturbed.folder / "snip" / "plan.json")


def refusal(path: Path, *kinds: type[Exception]) -> str:
    with in_time(), pytest.raises(kinds or ValueError) as caught:
        PrecisionPlan.load(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_a_spoiled_plan_is_refused_by_its_name_or_is_another_valid_plan(plan: PrecisionPlan, tmp_path: Path) -> None:
    good = plan.to_dict()
    data = json.dumps(good).encode()
    path = tmp_path / "plan.json"
    rng = random.Random(0)
    refused = 0
    for _ in range(600):
        if rng.random() < 0.5:
            path.write_bytes(damaged(data, rng))
        else:
            path.write_text(json.dumps(mutated(good, rng)))
        try:
            with in_time():
                loaded = PrecisionPlan.load(path)
        except (ValueError, OSError) as error:
            assert str(path) in str(error)
            assert len(str(error)) < 2000
            refused += 1
        else:
            loaded.save(tmp_path / "again.json")
            assert PrecisionPlan.load(tmp_path / "again.json") == loaded
    assert refused > 400


TEXTS = {
    "deep lists": ("[" * 10**6, "nested too deeply"),
    "deep and closed": ('{"kind": ' + "[" * 500 + "]" * 500 + "}", "nested too deeply"),
    "deeper than any file of ours": ('{"kind": ' + "[" * 40 + "]" * 40 + "}", "nested too deeply"),
    "a huge integer": ('{"schema_version": ' + "9" * 10**6 + "}", "an integer of 1000000 digits"),
    "a huge negative integer": ('{"schema_version": -' + "9" * 10**6 + "}", "an integer of 1000000 digits"),
    "an integer beyond all floats": ('{"schema_version": 1' + "0" * 400 + "}", "an integer of 401 digits"),
    "a number of many digits": ('{"schema_version": 0.' + "1" * 10**6 + "}", "kind is None"),
    "a float beyond all floats": ('{"schema_version": -1e999}', "it holds -1e999, which is too large"),
    "not a number": ('{"schema_version": NaN}', "it holds NaN"),
    "infinity": ('{"schema_version": -Infinity}', "it holds -Infinity"),
    "the same key twice": ('{"kind": 1, "kind": 1}', "the key 'kind' occurs 2 times"),
    "a null byte": ('{"kind": "\0"}', "not valid JSON"),
    "many objects": ("[" + "{}," * 10**5 + "{}]", "expected a JSON object"),
    "a byte order mark": ("\ufeff{}", "not valid JSON"),
    "a half surrogate": ('{"kind": "\\ud800"}', "kind is '\\ud800'"),
    "python": ("__import__('os').system('true')", "not valid JSON"),
    "a pickle": ("\x80\x04.", "not valid JSON"),
}


@pytest.mark.parametrize("text", TEXTS)
def test_text_that_is_no_plan_is_refused_in_time(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    content, reason = TEXTS[text]
    path.write_text(content)
    message = refusal(path)
    assert reason in message
    assert len(message) < 2000


@pytest.mark.parametrize("data", [b"\xff\xfe{}", b'{"kind": "\xc3\x28"}', bytes(4096), b"\x80\x04\x95"])
def test_bytes_that_are_no_text_are_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(data)
    refusal(path)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    with open(path, "wb") as file:
        file.truncate(2**40)  # a terabyte of nothing
    assert f"the file is larger than {MAX_JSON_BYTES} bytes" in refusal(path)
    # One that grows under the reader's eyes is read no further than that.
    fstat = os.fstat
    monkeypatch.setattr(os, "fstat", lambda file: SimpleNamespace(st_size=0, st_mode=fstat(file).st_mode))
    with pytest.raises(ValueError, match="larger than 100 bytes"):
        read_json(path, 100)


def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    os.mkfifo(path)
    refusal(path, OSError)
    path.unlink()
    path.mkdir()
    refusal(path, IsADirectoryError)
    path.rmdir()
    path.symlink_to(path)
    refusal(path, OSError)
    path.unlink()
    path.symlink_to("/dev/zero")
    refusal(path, OSError)
    path.unlink()
    path.symlink_to(tmp_path / "nothing")
    refusal(path, FileNotFoundError)


def test_a_link_to_a_plan_is_the_plan(plan: PrecisionPlan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    (tmp_path / "link.json").symlink_to(tmp_path / "plan.json")
    assert PrecisionPlan.load(tmp_path / "link.json") == plan


@pytest.mark.parametrize("name", ["\x1b]0;title\x07", "a\nb", "a\0b", "\x7f", "\x9b2J", "", "x" * 4097])
def test_a_name_with_control_characters_or_of_great_length_is_refused(name: str, tmp_path: Path) -> None:
    row = dict.fromkeys(GEMMS, 1.0)
    good = PrecisionPlan.uniform({"good": row}, "fp8", [["good"]], PlanProvenance(step=0, policy="snip")).to_dict()
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(good).replace('"good"', json.dumps(name)))
    message = refusal(path)
    assert message.isprintable()
    assert len(message) < 1000


_OPENED: list[str] = []
_WATCHING: list[bool] = []


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if _WATCHING and event.split(".")[0] in ("open", "os", "subprocess", "shutil", "import", "exec", "compile"):
        _OPENED.append(f"{event} {arguments}")


def test_names_are_never_paths(plan: PrecisionPlan, tmp_path: Path) -> None:
    """Every event of the interpreter is watched while a plan of such names is read, compared, written and applied."""
    sys.addaudithook(_note)  # stays, and does nothing when it is not wanted
    names = ["../../../../etc/passwd", "/etc/passwd", "~/.ssh/id_rsa", "C:\\boot.ini", "file:///etc/passwd", "$(id)"]
    flops = dict.fromkeys(names, dict.fromkeys(GEMMS, 1.0))
    hostile = PrecisionPlan.uniform(flops, "fp4", [names], PlanProvenance(step=0, policy="snip"))
    hostile.save(tmp_path / "plan.json")
    model = model_with_dropout()
    controller = SnipController(model, torch.optim.AdamW(model.parameters()), CONFIG)
    _WATCHING.append(True)
    try:
        loaded = PrecisionPlan.load(tmp_path / "plan.json")
        loaded.save(tmp_path / "again.json")
        loaded.changes(hostile)
        with pytest.raises(KeyError, match="for another kind of model"):
            loaded.apply(model)
        with pytest.raises(KeyError, match="for another kind of model"):
            controller.load_state_dict(controller.state_dict() | {"plan": loaded.to_dict()})
    finally:
        _WATCHING.clear()
    assert loaded == hostile
    assert any("again.json" in event for event in _OPENED)
    assert [event for event in _OPENED for name in names if name in event] == []
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["again.json", "plan.json"]


# ---------------------------------------------------------------------------------------------- the state of a run


class _NoProcess:
    def kill(self) -> None: ...


@pytest.mark.parametrize(("seed", "draws"), [(0, 100), slow(1, 400)])
def test_a_spoiled_state_is_refused_or_continues_and_changes_nothing_if_refused(
    seed: int, draws: int, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems: list[Any] = []
    monkeypatch.setattr(SolverProcess, "start", lambda problem: (problems.append(problem), _NoProcess())[1])
    good = read_json(undisturbed.folder / "checkpoint-3" / "snip_state.json")
    data = json.dumps(good).encode()
    model = model_with_dropout()
    controller = SnipController(model, torch.optim.AdamW(model.parameters()), CONFIG)
    fresh = json.dumps(controller.state_dict())
    rng = random.Random(seed)
    refused = 0
    for _ in range(draws):
        try:
            state = parse_json(damaged(data, rng)) if rng.random() < 0.3 else mutated(good, rng)
            # As it comes out of a file: a document that cannot be one never gets here.
            state = parse_json(json.dumps(state).encode())
        except ValueError:
            continue
        before = json.dumps(controller.state_dict())
        try:
            with in_time():
                controller.load_state_dict(copy.deepcopy(state))
        except (ValueError, KeyError) as error:
            assert len(str(error)) < 10_000
            assert json.dumps(controller.state_dict()) == before
            refused += 1
        else:
            json.dumps(controller.state_dict(), allow_nan=False)
            controller.load_state_dict(json.loads(fresh))
    assert refused > draws // 4
    assert problems


# ------------------------------------------------------------------------------------------- the answer of a solver


def test_a_spoiled_answer_of_the_solver_is_refused_or_holds() -> None:
    problem = make_problem(solver="greedy")
    good = ilp.solve(problem)
    rng = random.Random(0)
    refused = 0
    for _ in range(600):
        try:
            reply = parse_json(json.dumps(mutated(good, rng)).encode())
        except ValueError:
            continue
        try:
            with in_time():
                result = check_solution(problem, reply)
        except SolverError as error:
            assert error.reason in ("garbage", "rejected", "infeasible")
            assert len(str(error)) < 1000
            refused += 1
        else:
            assert result.objective == 4.0
            json.dumps([result.bound, result.gap, result.seconds, result.solver], allow_nan=False)
    assert refused > 300


def test_spoiled_output_of_the_solvers_process_is_a_solver_error_or_holds(tmp_path: Path) -> None:
    problem = make_problem(solver="greedy")
    data = json.dumps(ilp.solve(problem)).encode()
    rng = random.Random(0)
    path = tmp_path / "answer"
    outcomes = set()
    for _ in range(60):
        path.write_bytes(damaged(data, rng))
        with SolverProcess.start(problem, ["cat", str(path)]) as process:
            try:
                result = process.result(30.0)
            except SolverError as error:
                outcomes.add(error.reason)
            else:
                assert isinstance(result, SolverResult)
                assert result.objective == 4.0
    assert "garbage" in outcomes
    assert outcomes <= {"garbage", "rejected", "infeasible"}


# --------------------------------------------------------------------------------------------- the history of a run


@pytest.mark.parametrize("kind", ["pipe", "directory", "device", "loop"])
def test_a_history_that_is_no_file_costs_the_record_and_is_not_waited_for(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "snip" / "history.jsonl"
    path.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/full" if kind == "device" else path)
    folder = RunFolder(tmp_path)
    with in_time():
        folder.append(start_event())
    assert len(caplog.messages) == 1
    with in_time():
        folder.cut(3, None, start_event())
    assert len(caplog.messages) == 2
    assert all("training goes on" in message for message in caplog.messages)


def test_a_spoiled_history_keeps_its_good_lines_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "snip" / "history.jsonl"
    path.parent.mkdir()
    start = {"event": "start", "step": 0}
    good = [{"event": "refresh", "step": step, "decided_step": step + 1} for step in (2, 6, 10)]
    spoiled = [
        *[b"", b"{", b"\xff\xff", b"[]", b"null", b"[" * 10**5, b'{"event": "refresh", "step": ' + b"9" * 5000 + b"}"],
        *[b'{"event": "refresh", "step": "x"}', b'{"event": "refresh", "step": 1, "decided_step": null}'],
        b'{"step": NaN}',
    ]
    rng = random.Random(0)
    for _ in range(30):
        lines = [json.dumps(line).encode() for line in good]
        for line in rng.sample(spoiled, 3):
            lines.insert(rng.randrange(len(lines) + 1), line)
        path.write_bytes(b"\n".join([json.dumps(start).encode(), *lines]) + b'\n{"event": "refr')
        with in_time():
            RunFolder(tmp_path).cut(8, None, start_event())
        assert [json.loads(line) for line in path.read_text().splitlines()] == [start, *good[:2]]


def test_a_number_that_is_not_finite_costs_the_line_and_is_never_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunFolder(tmp_path)
    folder.append(start_event())
    folder.append(refresh_event(2, loss=float("nan")))
    assert len(caplog.messages) == 1
    append_json_line(tmp_path / "snip" / "history.jsonl", {"event": "refresh"})
    first = json.dumps(start_event().to_record())
    assert (tmp_path / "snip" / "history.jsonl").read_text() == first + '\n{"event": "refresh"}\n'
