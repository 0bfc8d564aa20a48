"""Runs of one process and of several, each started when a test first asks for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from rank_cases import CASES, SHARDED, SHARED
from rank_processes import assert_succeeded, start_ranks
from slow_cases import slow_but
from trainings import train

on_two_gpus = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
"""Marks of tests whose ranks have a GPU each and exchange tensors over NCCL."""


class OneProcess(dict[str, dict[str, Any]]):
    """Name -> what one process found that has all the data."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, name: str) -> dict[str, Any]:
        self[name] = asdict(train((SHARED | SHARDED)[name], self._folder / name))
        return self[name]


class OneOfTwo(dict[str, dict[str, Any]]):
    """Name -> what one of two ranks found. All runs of a group are made at once, for both ranks."""

    def __init__(self, rank: int, folder: Path) -> None:
        super().__init__()
        self._rank, self._folder = rank, folder

    def __missing__(self, name: str) -> dict[str, Any]:
        group = "more" if name in CASES["more"] else "two"
        folder = self._folder / group
        if not folder.exists():
            assert_succeeded(start_ranks("run_trainings.py", folder, group, folder=folder))
        self.update(found_by(self._rank, folder))
        return self[name]


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
