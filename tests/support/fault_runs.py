"""The runs that tests of faults disturb, and what a fault may cost them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from configs import fp4_config
from tiny_runs import SCHEDULE, Run, differing, train, weights, without_seconds

from snip_hf.planning.solver.process import SolverProcess

CONFIG = fp4_config(**SCHEDULE)
WITHOUT_FIRST = fp4_config(**SCHEDULE | {"first_refresh": 6})
SHORT = {"max_steps": 8}
SAVING = {"save_strategy": "steps", "save_steps": 1}


def undisturbed(folder: Path) -> Run:
    """Refreshes at steps 2 and 6, applied after 4 and 8, and a checkpoint after each of its 8 steps."""
    run = train(folder, CONFIG, **SHORT, **SAVING)
    assert [(line["step"], line["applied_step"]) for line in run.refreshes] == [(2, 4), (6, 8)]
    return run


def without_first(folder: Path, undisturbed: Run) -> Run:
    """The same run, if the refresh of step 2 had never been."""
    run = train(folder, WITHOUT_FIRST, **SHORT)
    assert [(line["step"], line["applied_step"]) for line in run.refreshes] == [(6, 8)]
    # The plan of step 2 is in force after step 4, so that the losses tell the two runs apart.
    assert run.losses[4] == undisturbed.losses[4]
    assert run.losses[5] != undisturbed.losses[5]
    return run


def assert_cost_only_the_first_refresh(run: Run, without_first: Run, reason: str, messages: list[str]) -> None:
    """The plan was kept at step 2, with a warning and a line that say why, and all else is as if it had never been."""
    first, *others = run.refreshes
    assert (first["step"], first["status"], first["applied_step"], first["changes"]) == (2, "kept", None, {})
    assert reason in first["reason"]
    warnings = [message for message in messages if message.startswith("snip-hf: ")]
    assert warnings == [f"snip-hf: the refresh of step 2 failed, the plan in force stays: {first['reason']}"]
    assert str(run.losses) == str(without_first.losses)  # as text, in which NaN equals NaN
    assert differing(weights(run.model), weights(without_first.model)) == []
    assert [line["status"] for line in others] == ["applied"] * len(others)
    assert without_seconds(others) == without_seconds(without_first.refreshes)
    assert children() == set()


def first_start(monkeypatch: Any, start: Callable[[dict[str, Any]], SolverProcess]) -> list[SolverProcess | None]:
    """Lets `start` start the solver of a run's first refresh; returns a list that fills with the processes."""
    real = SolverProcess.start
    started: list[SolverProcess | None] = []

    def replacement(problem: dict[str, Any]) -> SolverProcess:
        started.append(None)
        started[-1] = start(problem) if len(started) == 1 else real(problem)
        return started[-1]

    monkeypatch.setattr(SolverProcess, "start", replacement)
    return started


# Process ids of other tests' children, which serve several tests.
_OTHERS: set[str] = set()


def forget_children() -> None:
    """Leaves out of `children` from now on what is running already."""
    _OTHERS.update(children())


def children() -> set[str]:
    """Process ids of this thread's children, zombies too; without Python's own, which serves all pools of a process."""
    found = set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())
    return found - {str(resource_tracker._resource_tracker._pid)} - _OTHERS  # type: ignore[attr-defined]


def in_a_process(program: str, *words: Any, code: int = 0) -> str:
    """Runs a program in a Python of its own, with the modules of the tests; returns what it prints."""
    tests = Path(__file__).parents[1]
    path = os.pathsep.join(map(str, (tests, tests / "support")))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), path]))
    command = [sys.executable, "-W", "ignore", "-c", program, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == code, done.stderr
    return done.stdout
