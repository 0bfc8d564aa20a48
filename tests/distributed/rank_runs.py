"""Runs of one process and of several, each started when a test first asks for it."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import pytest
import torch
from devices import FAILURES, NCCL
from filelock import FileLock
from rank_cases import CASES, SHARDED, SHARED
from rank_processes import TAIL, Ended, assert_succeeded, start_ranks
from slow_cases import slow_but
from trainings import train

on_two_gpus = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
"""Marks of tests whose two ranks exchange tensors over NCCL. They have a GPU each, or share the only one."""


class OneProcess(dict[str, dict[str, Any]]):
    """Name -> what one process found that has all the data."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, name: str) -> dict[str, Any]:
        self[name] = asdict(train((SHARED | SHARDED)[name], self._folder / name))
        return self[name]


class OneOfTwo(dict[str, dict[str, Any]]):
    """Name -> what one of two ranks found. All runs of a group are made at once, for both ranks and all workers."""

    def __init__(self, rank: int, folder: Path) -> None:
        super().__init__()
        self._rank, self._folder = rank, folder

    def __missing__(self, name: str) -> dict[str, Any]:
        group = "more" if name in CASES["more"] else "two"
        folder = self._folder / group
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                assert_succeeded(start_ranks("run_trainings.py", folder, group, folder=folder))
        self.update(found_by(self._rank, folder))
        return self[name]


class OnTwoGpus:
    """Runs of one script on two GPUs, which go on while others are started, or tests look at others.

    Args:
        folder: gets rank<N>.pt and the logs.
        script: uses `devices.Survivors`.
        words: its further arguments.
    """

    _SECONDS = 170.0

    def __init__(self, folder: Path, script: str, *words: str) -> None:
        self.folder = folder
        self._ended: Future[Ended] = Future()
        Thread(target=self._run, args=(script, *words), daemon=True).start()

    def _run(self, script: str, *words: str) -> None:
        try:
            folder = self.folder
            self._ended.set_result(start_ranks(script, folder, *words, NCCL, folder=folder, timeout=self._SECONDS))
        except BaseException as error:
            self._ended.set_exception(error)

    def __getitem__(self, name: str) -> list[Any]:
        """Returns rank -> what became of a run. Waits for the script.

        Raises:
            AssertionError: a rank did not finish the run; with its traceback, or else with the ends of all logs.
        """
        ended = self._ended.result()
        found = []
        for rank in range(len(ended.logs)):
            runs = found_by(rank, self.folder) if (self.folder / f"rank{rank}.pt").exists() else {}
            failure = runs.get(FAILURES, {}).get(name)
            assert failure is None, f"{name!r} failed on rank {rank}:\n{failure[-TAIL:]}"
            found.append(runs)
        logs = "\n".join(f"rank {rank}:\n{log[-TAIL:]}" for rank, log in enumerate(ended.logs))
        assert all(name in runs for runs in found), f"{name!r} was not finished, exit statuses {ended.codes}.\n{logs}"
        return [runs[name] for runs in found]


class Following(NamedTuple):
    """The results of the first of several ranks that began every step where one process began it."""

    ranks: int
    runs: dict[str, dict[str, Any]]
    """By name."""


def found_by(rank: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Reads what `run_trainings.py` has left in a folder."""
    found: dict[str, dict[str, Any]] = torch.load(folder / f"rank{rank}.pt", "cpu", weights_only=True)
    return found


def some_slow(names: Iterable[str]) -> list[Any]:
    """Returns the parameters of a test over runs of two ranks, of which those that few need are slow."""
    return slow_but(names, *CASES["two"])
