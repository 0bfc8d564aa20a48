"""Which runs do the tests of faults disturb, with what, and what may a fault cost?"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from configs import fp4_config
from tiny_runs import SCHEDULE, Run, differing, weights, without_seconds

from snip_hf.planning.solver.process import SolverProcess

CONFIG = fp4_config(**SCHEDULE)
WITHOUT_FIRST = fp4_config(**SCHEDULE | {"first_refresh": 6})
SHORT = {"max_steps": 8}
SAVING = {"save_strategy": "steps", "save_steps": 1}


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


def in_a_process(program: str, *words: Any, prefix: tuple[str, ...] = ()) -> str:
    """Runs a program in a Python of its own, with the modules of the tests; returns what it prints."""
    tests = Path(__file__).parents[1]
    path = os.pathsep.join(map(str, (tests, tests / "support", tests / "faults")))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), path]))
    command = [*prefix, sys.executable, "-W", "ignore", "-c", program, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


# What a field of a file may hold instead of what belongs there.
SWAPS: list[Any] = [
    *[None, True, False, 0, -1, 1.5, 1e300, 10**39, "", "x", "fp3", "../../etc/passwd", "/dev/null", "\x1b[2J", "\0"],
    *["\ud800", "x" * 5000, [], {}, [None], [[[]]], {"": {}}, {"forward": "fp4"}, ["a", "a"]],
]


def mutated(document: Any, rng: random.Random) -> Any:
    """A copy of JSON data in which one value was swapped, removed, doubled or renamed, anywhere."""
    if isinstance(document, dict) and document and rng.random() < 0.9:
        key = rng.choice(list(document))
        changed = dict(document)
        action = rng.random()
        if action < 0.1:
            del changed[key]
        elif action < 0.2:
            changed[rng.choice(["", "x", "../x", "\n", key + " "])] = changed.pop(key)
        else:
            changed[key] = mutated(document[key], rng)
        return changed
    if isinstance(document, list) and document and rng.random() < 0.9:
        index = rng.randrange(len(document))
        action = rng.random()
        if action < 0.2:
            return document[:index] + document[index + 1 :]
        if action < 0.3:
            return [*document, document[index]]
        return [*document[:index], mutated(document[index], rng), *document[index + 1 :]]
    return rng.choice(SWAPS)


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Bytes of which some were flipped, cut off, doubled or overwritten."""
    broken = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 5, 50])):
        start = rng.randrange(len(broken))
        action = rng.random()
        if action < 0.5:
            broken[start] ^= 1 << rng.randrange(8)
        elif action < 0.7:
            broken[start:start] = broken[start : start + rng.randrange(1, 100)]
        elif action < 0.9:
            piece = rng.choice([b"\0", b"\xff", b"[" * 99, b'"', b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b"{}"])
            broken[start : start + rng.randrange(10)] = piece
        else:
            del broken[start + 1 :]
    return bytes(broken)
