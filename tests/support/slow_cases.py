"""Leaves cases of a test that repeat what others show to the slow tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A slow case with these arguments."""
    return pytest.param(*values, marks=pytest.mark.slow)


def pairwise(names: Sequence[str]) -> list[tuple[str, str, str]]:
    """Nine of the 27 triples of three names, in which any two places have every pair of names once."""
    return [(one, other, names[(i + j) % 3]) for i, one in enumerate(names) for j, other in enumerate(names)]


def slow_but(cases: Iterable[Any], *fast: Any) -> list[Any]:
    """Cases of one argument, in their order; all of them are slow but those named."""
    return [case if case in fast else slow(case) for case in cases]
