"""Do two ranks, whose weights are copied or sharded, find the criteria that one process with all the data finds?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import CRITERION, errors
from rank_cases import JUDGED
from rank_processes import launch_ranks
from trainings import train

pytestmark = pytest.mark.slow
Runs = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> list[Runs]:
    """Returns rank -> name -> what two ranks found."""
    folder = tmp_path_factory.mktemp("judged")
    launch_ranks("run_trainings.py", folder, "judged", folder=folder)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
@pytest.mark.parametrize("policy", ("fisher", "hessian-trace", "greedy", "kl"))
def test_criteria_and_plans_are_those_of_one_process(
    policy: str, wrapper: str, judged: list[Runs], tmp_path: Path
) -> None:
    name = f"{wrapper}-{policy}"
    one = train(JUDGED[f"ddp-{policy}"], tmp_path)
    ours, theirs = judged[0][name]["tables"][1], one.tables[1]
    assert any(row[CRITERION] for row in theirs.values())
    # A trace is a sum with either sign of FP32 differences, the others differ by the order of their sums.
    assert max(errors(ours, theirs, CRITERION)) < (1e-2 if policy == "hessian-trace" else 1e-3)
    for found in judged:
        assert found[name]["plans"] == one.plans
        assert found[name]["plans"][-1] != found[name]["plans"][0]
