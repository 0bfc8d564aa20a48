"""Undoes what a recipe registered, after each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from registries import restored

from snip_hf.config import POLICIES


@pytest.fixture(autouse=True)
def registered_for_one_test() -> Iterator[None]:
    with restored(POLICIES):
        yield
