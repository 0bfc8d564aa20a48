"""Keeps tests of one process apart from each other, and garbage collections from what the tests never free."""

from __future__ import annotations

import atexit
import gc
import logging
from collections.abc import Iterator

import pytest


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


@pytest.fixture(autouse=True)
def package_logs_as_by_default() -> Iterator[None]:
    """Recipes and benchmarks set the level of the package's messages, for good."""
    yield
    logging.getLogger("snip_hf").setLevel(logging.NOTSET)
