"""A solver that dies, hangs, prints garbage or is missing costs a run only one refresh."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from configs import fp4_config
from fault_runs import CONFIG, SHORT, assert_cost_only_the_first_refresh, children, first_start
from processes import members, wait_until
from slow_cases import slow_but
from tiny_runs import SCHEDULE, Run, begun_late, differing, train, weights, without_seconds
from transformers import TrainerCallback

from snip_hf.planning.solver import ilp
from snip_hf.planning.solver.process import SolverProcess
from snip_hf.training import refresh

pytestmark = pytest.mark.usefixtures("no_children_of_other_tests")

START = SolverProcess.start
RUN_ILP = f"import runpy; runpy.run_path({ilp.__file__!r}, run_name='__main__')"
# A whole solution that is none: the numbers of a solver that lost its way.
NOT_FINITE = """
import json, sys
problem = json.load(sys.stdin)
print(json.dumps({"status": "optimal", "choices": {group["name"]: "fp4" for group in problem["groups"]},
                  "objective": 1.0, "bound": float("nan"), "gap": 0.0, "constraints": {}, "solver": "x",
                  "solver_version": "1", "seconds": float("inf")}))
"""


def program(text: str) -> Callable[[dict[str, Any]], SolverProcess]:
    return lambda problem: START(problem, [sys.executable, "-S", "-c", text])


def without_cbc(problem: dict[str, Any]) -> SolverProcess:
    return START(problem | {"solver": "cbc"}, [sys.executable, "-S", ilp.__file__])


def without_memory(problem: dict[str, Any]) -> SolverProcess:
    """The real solver, with less address space than its libraries need."""
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_AS, (90 << 20, 90 << 20)); {RUN_ILP}"
    return START(problem | {"solver": "highs"}, [sys.executable, "-c", limit])


def without_descriptors(problem: dict[str, Any]) -> SolverProcess:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1 + max(map(int, os.listdir("/proc/self/fd"))), hard))
    try:
        held = []
        try:
            while True:
                held.append(os.dup(2))
        except OSError:
            pass
        try:
            return START(problem)
        finally:
            for descriptor in held:
                os.close(descriptor)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def without_temporary_folder(problem: dict[str, Any]) -> SolverProcess:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", "/nowhere")
        return START(problem)


def without_processes(problem: dict[str, Any]) -> SolverProcess:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        return START(problem)


FAULTS: dict[str, tuple[Callable[[dict[str, Any]], SolverProcess], str]] = {
    "killed as the OOM killer does": (program("import os; os.kill(os.getpid(), 9)"), "crashed (exit code -9)"),
    "out of memory": (
        program("import resource as r; r.setrlimit(r.RLIMIT_AS, (1 << 28, 1 << 28)); bytearray(1 << 29)"),
        "crashed (exit code 1): ",
    ),
    "its libraries without memory": (without_memory, "SolverError: The solver "),
    "printing garbage": (program("print('Welcome to the CBC MILP Solver')"), "no solution (it begins with 'Welcome"),
    "printing numbers that are none": (program(NOT_FINITE), "no solution (it begins with"),
    "CBC is missing": (without_cbc, "SolverError: solver='cbc' cannot be used by "),
    "the program is missing": (lambda problem: START(problem, ["/nowhere/solver"]), "could not be started: [Errno 2]"),
    "no descriptor is left": (without_descriptors, "could not be started: [Errno 24]"),
    "no process can be started": (without_processes, "could not be started: [Errno 11]"),
    "no temporary file can be made": (without_temporary_folder, "could not be started: [Errno 2]"),
}


@pytest.mark.parametrize("fault", slow_but(FAULTS, "printing garbage", "CBC is missing"))
def test_a_solver_that_fails_costs_one_refresh_and_no_loss_changes(
    fault: str,
    without_first: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    start, reason = FAULTS[fault]
    first_start(monkeypatch, start)
    run = train(tmp_path, CONFIG, **SHORT)
    assert_cost_only_the_first_refresh(run, without_first, reason, caplog.messages)


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


@pytest.mark.parametrize("how", slow_but(["ignores signals", "is stopped"], "is stopped"))
def test_a_solver_that_hangs_is_waited_for_no_longer_than_its_limit(
    how: str,
    without_first: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ignore = "[signal.signal(number, signal.SIG_IGN) for number in (1, 2, 15)]; " if how == "ignores signals" else ""
    started = first_start(monkeypatch, program(f"import signal, time; {ignore}time.sleep(600)"))
    waits: list[float] = []
    result = SolverProcess.result

    def timed(process: SolverProcess, timeout: float = 600.0) -> Any:
        began = time.monotonic()
        try:
            return result(process, timeout)
        finally:
            waits.append(time.monotonic() - began)

    monkeypatch.setattr(SolverProcess, "result", timed)
    stop = [_Signal(started, signal.SIGSTOP)] if how == "is stopped" else []
    # The limit is no part of what decides a run, so that the runs compare.
    config = fp4_config(**SCHEDULE, solver_time_limit=1.0)
    monkeypatch.setattr(refresh, "GRACE", 0.2)
    run = train(tmp_path, config, callbacks=stop, **SHORT)
    reason = "SolverError: The solver ran past the 1.2 s that it had and was killed."
    assert_cost_only_the_first_refresh(run, without_first, reason, caplog.messages)
    assert 1.2 <= waits[0] < 1.2 + 5
    assert started[0]._process.returncode == -signal.SIGKILL


@dataclass
class _Breaks(TrainerCallback):
    """Ends training by an error after step 3."""

    error: BaseException

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise self.error


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
@pytest.mark.slow
def test_a_solver_ends_at_once_when_an_error_ends_training(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error, the frames that it holds, the Trainer and the model all stay, as in a notebook."""
    started = first_start(monkeypatch, lambda problem: START(problem, ["sleep", "600"]))
    with pytest.raises(type(error)) as caught:
        train(tmp_path, fp4_config(**SCHEDULE), callbacks=[_Breaks(error)], **SHORT)
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
