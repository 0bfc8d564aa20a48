"""Do forks share the tasks of a process, each once, and does one that fails do no harm?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from snip_hf.kernels import side_by_side

# Forked from a process without other threads, as the one that compiles is.
PROGRAM = """
import os, signal, sys, time
from functools import partial
from pathlib import Path
from snip_hf.kernels.side_by_side import SideBySide
folder, results = Path(sys.argv[1]), {}
def task(number):
    with open(folder / str(number), "x"):
        results[str(number)] = str(os.getpid())
    time.sleep(0.1)
def fail():
    raise ValueError("A task.")
def die():
    if os.getpid() != own:
        os._exit(3)
own = os.getpid()
"""


def ran(program: str, folder: Path) -> tuple[list[str], str]:
    """The lines that a program prints, and what it says."""
    paths = os.pathsep.join(entry for entry in sys.path if entry)
    command = [sys.executable, "-c", PROGRAM + program, str(folder)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.splitlines(), done.stderr


def test_each_task_is_run_once_and_told(tmp_path: Path) -> None:
    program = """
for forks in (0, 1, 3):
    results.clear()
    (folder := Path(sys.argv[1]) / str(forks)).mkdir()
    work = SideBySide([partial(task, number) for number in range(12)], results, forks, lambda parent: None)
    work.help()
    work.end()
    print(*sorted(results, key=int)); print(len(set(results.values())))
"""
    told, said = ran(program, tmp_path)
    assert told[::2] == [" ".join(map(str, range(12)))] * 3 and told[1::2] == ["1", "2", "4"] and said == ""
    assert [len(list((tmp_path / forks).iterdir())) for forks in "013"] == [12, 12, 12]


def test_what_fails_leaves_the_others_alone(tmp_path: Path) -> None:
    program = """
tasks = [fail, die, *[partial(task, number) for number in range(8)], fail]
work = SideBySide(tasks, results, 2, lambda parent: None)
time.sleep(0.2)
work.end()
print(*sorted(results, key=int))
"""
    (told,), said = ran(program, tmp_path)
    # A fork that dies does not tell what it did.
    assert len(list(tmp_path.iterdir())) == 8 and 4 <= len(told.split()) <= 8
    assert said.count("ValueError: A task.") == 2


def test_a_fork_has_the_bounds_of_its_parent(tmp_path: Path) -> None:
    program = """
def note():
    results[str(os.getpid())] = f"{signal.getitimer(signal.ITIMER_REAL)[0] > 50} {os.nice(0)}"
    time.sleep(0.2)
os.nice(3); signal.alarm(60)
begun = []
def begin(parent):
    results["begun"] = str(parent == own)
work = SideBySide([note, note], results, 1, begin)
work.help(); work.end()
print(results.pop("begun")); print(*results.values(), sep="\\n")
"""
    begun, *noted = ran(program, tmp_path)[0]
    assert begun == "True" and noted == [f"True {os.nice(0) + 3}"] * 2


def test_without_forks_this_process_does_it_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fork() -> int:
        raise OSError("Too many processes.")

    monkeypatch.setattr(os, "fork", fork)
    done: list[int] = []
    work = side_by_side.SideBySide([lambda: done.append(1), lambda: done.append(2)], {}, 3, lambda parent: None)
    work.end()
    assert done == [1, 2] and "0 forks: OSError: Too many processes." in capsys.readouterr().err


@pytest.mark.parametrize(("cores", "processes"), [(1, 1), (2, 1), (7, 1), (8, 2), (16, 4), (128, 4)])
def test_small_machines_compile_in_one_process(cores: int, processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    assert side_by_side.processes_here() == processes
