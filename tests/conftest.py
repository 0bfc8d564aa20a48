"""Keeps tests of one process apart from each other, and garbage collections from what no test frees."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from tiny_runs import Run


def pytest_configure(config: pytest.Config) -> None:
    """Tests that may share a GPU see one only, since the Trainer would put a model on all that it sees."""
    if "not alone" in config.option.markexpr:
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")


def pytest_collection() -> None:
    """Imports and collected tests stay: looking for garbage among them takes seconds and finds none."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Lets no garbage collection look at modules and tests.

    Each training of a Trainer collects all garbage, which takes 0.3 s with them and 0.01 s without.
    """
    gc.enable()
    gc.collect()
    gc.freeze()
    # Extension modules look for leaks when Python ends.
    atexit.register(gc.unfreeze)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Each test and its fixtures draw the same random numbers, whatever its process tested before."""
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def package_logs_as_by_default() -> Iterator[None]:
    """Recipes and benchmarks set the level of the package's messages, for good."""
    yield
    logging.getLogger("snip_hf").setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run that tests of faults disturb (`fault_runs`)."""
    import fault_runs  # not above: importing transformers takes seconds

    return fault_runs.undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture(scope="module")
def one_thread_only() -> Iterator[None]:
    """All runs of a module on one thread, so that they can be compared to the bit."""
    from tiny_runs import one_thread

    with one_thread():
        yield


@pytest.fixture(scope="module")
def sensitive_guard(one_thread_only: None) -> Iterator[None]:
    """The guard compares few losses, and raises the formats only after a large spike."""
    from snip_hf.training import guard

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard, "WINDOW", 8)
        patch.setattr(guard, "SPIKE", 20.0)
        yield


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
