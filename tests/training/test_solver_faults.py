"""A solver that dies, hangs or prints garbage costs a run only one refresh."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from configs import fp4_config
from fault_runs import CONFIG, SHORT, assert_cost_only_the_first_refresh, children, first_start
from processes import members, wait_until
from tiny_runs import SCHEDULE, Run, begun_late, differing, train, weights, without_seconds
from transformers import TrainerCallback

from snip_hf.planning.solver.process import SolverProcess
from snip_hf.training import refresh

pytestmark = pytest.mark.usefixtures("no_children_of_other_tests")

START = SolverProcess.start


def program(text: str) -> Callable[[dict[str, Any]], SolverProcess]:
    return lambda problem: START(problem, [sys.executable, "-S", "-c", text])


def test_a_solver_that_fails_costs_one_refresh_and_no_loss_changes(
    without_first: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first_start(monkeypatch, program("print('Welcome to the CBC MILP Solver')"))
    run = train(tmp_path, CONFIG, **SHORT)
    assert_cost_only_the_first_refresh(run, without_first, "not a solution (it begins with 'Welcome", caplog.messages)


@dataclass
class _Signal(TrainerCallback):
    """Sends a signal to the solver's process group, while it runs, after step 3."""

    started: list[SolverProcess]
    number: int

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            process = self.started[0]._process
            assert process.poll() is None
            os.killpg(process.pid, self.number)


def test_a_solver_whose_process_group_is_killed_costs_one_refresh(
    without_first: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started = first_start(monkeypatch, lambda problem: START(problem, ["sh", "-c", "sleep 600 & wait"]))
    run = train(tmp_path, CONFIG, **SHORT, callbacks=[_Signal(started, signal.SIGKILL)])
    assert_cost_only_the_first_refresh(run, without_first, "crashed (exit code -9)", caplog.messages)


def test_a_solver_that_hangs_is_waited_for_no_longer_than_its_limit(
    without_first: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started = first_start(monkeypatch, program("import time; time.sleep(600)"))
    waits: list[float] = []
    result = SolverProcess.result

    def timed(process: SolverProcess, timeout: float = 600.0) -> Any:
        began = time.monotonic()
        try:
            return result(process, timeout)
        finally:
            waits.append(time.monotonic() - began)

    monkeypatch.setattr(SolverProcess, "result", timed)
    # The limit is no part of what decides a run, so that the runs compare.
    config = fp4_config(**SCHEDULE, solver_time_limit=1.0)
    monkeypatch.setattr(refresh, "GRACE", 0.2)
    run = train(tmp_path, config, callbacks=[_Signal(started, signal.SIGSTOP)], **SHORT)
    reason = "SolverError: The solver ran past the 1.2 s that it had and was killed."
    assert_cost_only_the_first_refresh(run, without_first, reason, caplog.messages)
    assert 1.2 <= waits[0] < 1.2 + 5
    assert started[0]._process.returncode == -signal.SIGKILL


class _Breaks(TrainerCallback):
    """Ends training after step 3."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_a_solver_ends_at_once_when_an_error_ends_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error, the frames that it holds, the Trainer and the model all stay, as in a notebook."""
    started = first_start(monkeypatch, lambda problem: START(problem, ["sleep", "600"]))
    with pytest.raises(KeyboardInterrupt) as caught:
        train(tmp_path, fp4_config(**SCHEDULE), callbacks=[_Breaks()], **SHORT)
    assert caught.value.__traceback__ is not None
    group = started[0]._process.pid
    wait_until(lambda: members(group) == [], 10.0)
    wait_until(lambda: children() == set(), 10.0)  # it is reaped a moment after it ended


def test_a_solver_that_is_slow_is_waited_for_and_its_plan_applied_at_the_same_step(
    undisturbed: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_start(monkeypatch, program(begun_late(monkeypatch, tmp_path)))
    run = train(tmp_path, CONFIG, **SHORT)
    assert run.losses == undisturbed.losses
    assert differing(weights(run.model), weights(undisturbed.model)) == []
    assert without_seconds(run.refreshes) == without_seconds(undisturbed.refreshes)
    seconds = run.refreshes[0]["seconds"]
    assert seconds["waited"] >= 0.5
    assert seconds["solver"] < seconds["waited"]
