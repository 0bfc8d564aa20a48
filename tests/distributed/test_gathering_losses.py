"""A rank that fails inside a probed loss, which gathers over the ranks, costs all of them one refresh at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rank_processes import assert_succeeded, start_ranks
from run_gathering_loss import FAILING, MEMORY, TIMEOUT, WRAPPERS

pytestmark = pytest.mark.slow
Found = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Rank -> scenario -> what became of it."""
    folder = tmp_path_factory.mktemp("gathering")
    assert_succeeded(start_ranks("run_gathering_loss.py", folder, folder=folder, timeout=150))
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_loss_that_gathers_is_probed_at_each_refresh(wrapper: str, two: Found) -> None:
    first, second = (found[f"{wrapper} None"] for found in two)
    assert [(line["step"], line["applied_step"]) for line in first["history"]] == [(2, 4), (6, 8)]
    assert first["plans"] == second["plans"] and first["losses"] == second["losses"]
    assert first["messages"] == second["messages"] == []


@pytest.mark.parametrize("name", FAILING)
def test_a_rank_that_fails_inside_such_a_loss_costs_all_of_them_that_refresh(name: str, two: Found) -> None:
    first, second = (found[name] for found in two)
    expected = two[0][f"{name.split()[0]} without first"]
    kept, *others = first["history"]
    assert (kept["step"], kept["status"]) == (2, "kept")
    assert kept["reason"] == f"FailedElsewhere: On rank 1: OutOfMemoryError: {MEMORY}"
    assert others == expected["history"]
    for found in (first, second):
        assert found["losses"] == expected["losses"] and found["plans"] == expected["plans"]
        assert found["seconds"] < 20  # of waits that last 120 s and longer
    assert first["messages"] == [f"snip-hf: the refresh of step 2 failed, the plan in force stays: {kept['reason']}"]
    assert second["messages"] == []


def test_a_rank_whose_shards_others_wait_for_says_at_once_that_it_failed(tmp_path: Path) -> None:
    start_ranks("run_gathering_loss.py", tmp_path, "shards", folder=tmp_path, timeout=60)
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert second["messages"][0] == (
        f"snip-hf: rank 1 of 2 failed in the probe: OutOfMemoryError: {MEMORY}. The others may wait for its shards "
        "until the timeout of training's process group, which then ends the run."
    )
    assert first["ended"] == second["ended"] == "RuntimeError"
    assert TIMEOUT - 1 < first["seconds"] < TIMEOUT + 30
