"""The runs of several processes that the tests look at; each is started once."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from rank_cases import FOLLOWING
from rank_processes import assert_succeeded, start_ranks
from rank_runs import Following, OneOfTwo, OneProcess, found_by


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[OneOfTwo]:
    """Returns rank -> name -> what two ranks found."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all workers
    return [OneOfTwo(rank, folder) for rank in (0, 1)]


@pytest.fixture(scope="session")
def one(tmp_path_factory: pytest.TempPathFactory) -> OneProcess:
    """Returns name -> what one process found that has all the data."""
    return OneProcess(tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="session", params=[2, 3], ids=["two", "three"])
def following(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, one: OneProcess) -> Following:
    """Returns what two or three ranks found that began every step with the weights and moments of one process."""
    folder = tmp_path_factory.mktemp("following")
    torch.save({name: one[name]["states"] for name in FOLLOWING}, folder / "states.pt")
    assert_succeeded(start_ranks("run_trainings.py", folder, "following", folder=folder, ranks=request.param))
    return Following(request.param, found_by(0, folder))


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Returns rank -> what a pipeline of four stages on two processes found."""
    folder = tmp_path_factory.mktemp("pipeline")
    assert_succeeded(start_ranks("run_pipeline.py", folder, folder=folder))
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
