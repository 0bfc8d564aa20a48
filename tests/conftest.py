"""Keeps tests of one process apart from each other."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def package_logs_as_by_default() -> Iterator[None]:
    """Recipes and benchmarks set the level of the package's messages, for good."""
    yield
    logging.getLogger("snip_hf").setLevel(logging.NOTSET)
