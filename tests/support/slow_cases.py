"""Leaves cases of a test that repeat what others show to the slow tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """One case, of these arguments."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_but(cases: Iterable[Any], *fast: Any) -> list[Any]:
    """Cases of one argument, in their order; all of them are slow but those named."""
    return [case if case in fast else slow(case) for case in cases]
