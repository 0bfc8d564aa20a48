"""Which tests does one worker of `pytest -n` take? Those of a file; all that start other processes are one lot."""

from __future__ import annotations

from pathlib import Path

import pytest

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        path = item.path.relative_to(_HERE)
        lot = "distributed" if path.parts[0] == "distributed" else str(path)
        item.add_marker(pytest.mark.xdist_group(lot))
