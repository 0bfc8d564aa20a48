"""Which runs of several processes do the tests look at? Each is started once."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_cases import SHARED
from rank_processes import assert_succeeded, launch_ranks, start_ranks
from trainings import train

RunsByRank = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> RunsByRank:
    """Returns rank -> name -> what two ranks found."""
    return _trained("two", 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="session")
def three(tmp_path_factory: pytest.TempPathFactory) -> RunsByRank:
    return _trained("three", 3, tmp_path_factory.mktemp("three"))


def _trained(group: str, ranks: int, folder: Path) -> RunsByRank:
    launch_ranks("run_trainings.py", folder, group, folder=folder, ranks=ranks)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(ranks)]


@pytest.fixture(scope="session")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Returns name -> what one process found that has all the data."""
    folder = tmp_path_factory.mktemp("one")
    return {name: asdict(train(training, folder / name)) for name, training in SHARED.items()}


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Returns rank -> what a pipeline of four stages on two processes found."""
    folder = tmp_path_factory.mktemp("pipeline")
    assert_succeeded(start_ranks("run_pipeline.py", folder, folder=folder))
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
