"""Does anything depend on the wall clock, which may jump by hours while a refresh is pending?"""

from __future__ import annotations

import ast
import time
from pathlib import Path
from typing import Any

import pytest
from fault_runs import CONFIG, SHORT, first_start
from sources import SOURCES, names
from tiny_runs import SCHEDULE, Run, differing, train, weights, without_seconds
from transformers import TrainerCallback

from snip_hf import SnipCallback, SnipConfig
from snip_hf.planning.solver.process import SolverProcess
from snip_hf.planning.solver.solution import SolverError
from snip_hf.training.refresh import Solving

# The wall clock's names; monotonic and perf_counter go on evenly whatever is done to it.
WALL_CLOCK = {f"time.{name}" for name in ("time", "time_ns", "localtime", "gmtime", "ctime", "strftime", "asctime")}


class _Jumps(TrainerCallback):
    """Sets the wall clock of this process hours forward and back, step by step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.offset = 0.0
        now, now_ns = time.time, time.time_ns
        monkeypatch.setattr(time, "time", lambda: now() + self.offset)
        monkeypatch.setattr(time, "time_ns", lambda: now_ns() + int(self.offset * 1e9))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.offset = {2: 6 * 3600.0, 3: -30 * 3600.0, 6: -1e6, 7: 1e6}.get(state.global_step, self.offset)


def test_a_wall_clock_that_jumps_while_a_refresh_is_pending_changes_nothing(
    undisturbed: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(tmp_path, CONFIG, callbacks=[_Jumps(monkeypatch)], **SHORT)
    assert run.losses == undisturbed.losses
    assert differing(weights(run.model), weights(undisturbed.model)) == []
    assert without_seconds(run.history) == without_seconds(undisturbed.history)
    seconds = [value for line in run.refreshes for value in line["seconds"].values()]
    assert all(0 <= value < 3600 for value in seconds)


def test_a_hung_solver_is_killed_in_time_although_the_wall_clock_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = SolverProcess.start
    first_start(monkeypatch, lambda problem: start(problem, ["sleep", "600"]))
    began = time.monotonic()
    config = SnipConfig(**SCHEDULE, solver_time_limit=0.5)
    callback = SnipCallback(config, solving=Solving(grace=0.0))
    run = train(tmp_path, callback=callback, callbacks=[_Jumps(monkeypatch)], **SHORT)
    assert time.monotonic() - began < 60
    assert [line["status"] for line in run.refreshes] == ["kept", "applied"]


def test_the_limit_of_a_solver_is_one_of_the_monotonic_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes when that clock has passed it, and by no other clock."""
    process = SolverProcess.start({"time_limit": 60.0}, ["sleep", "600"])
    wall, steady = time.time, time.monotonic
    monkeypatch.setattr(time, "time", lambda: wall() + 1e9)
    assert not process.poll()
    monkeypatch.setattr(time, "monotonic", lambda: steady() + 91)
    assert process.poll()
    monkeypatch.undo()
    with pytest.raises(SolverError, match="ran past its limit of 90 s"):
        process.result()


def test_no_module_reads_the_wall_clock() -> None:
    assert len(SOURCES) > 20
    for path in SOURCES:
        used = names(ast.parse(path.read_text()), lambda name: name in WALL_CLOCK or name.split(".")[0] == "datetime")
        assert set(used) <= {"datetime.timedelta"}, path  # a length of time, which asks no clock
    assert names(ast.parse("import time; time.time()"), WALL_CLOCK.__contains__) == ["time.time"]
