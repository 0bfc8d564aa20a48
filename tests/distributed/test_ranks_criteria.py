"""Two ranks, with copied or sharded weights, find the criteria that one process with all the data finds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from comparing import CRITERION, LOSS, WEIGHT, errors
from rank_cases import JUDGED, JUDGES
from trainings import train

pytestmark = pytest.mark.slow
Runs = dict[str, dict[str, Any]]


@pytest.mark.parametrize(("wrapper", "policy"), JUDGES[:4])
def test_criteria_and_plans_are_those_of_one_process(
    wrapper: str, policy: str, two: list[Runs], tmp_path: Path
) -> None:
    name = f"{wrapper}-{policy}"
    one = train(replace(JUDGED[name], wrapper="ddp"), tmp_path)
    ours, theirs = two[0][name]["tables"][1], one.tables[1]
    assert any(row[CRITERION] for row in theirs.values())
    # A trace is a sum with either sign of FP32 differences, the others differ by the order of their sums.
    assert max(errors(ours, theirs, CRITERION)) < (1e-2 if policy == "hessian-trace" else 1e-3)
    for found in two:
        assert found[name]["plans"] == one.plans
        assert found[name]["plans"][-1] != found[name]["plans"][0]


def test_estimates_from_noise_are_the_same_on_all_ranks_and_whether_weights_are_sharded_or_not(
    two: list[Runs], tmp_path: Path
) -> None:
    """Ranks draw noise of their own, so that one process finds other figures, but not by much."""
    one = train(JUDGED["ddp-snip-paper"], tmp_path).tables[1]
    names = ("ddp-snip-paper", "fsdp2-snip-paper")
    tables = [two[0][name]["tables"][1] for name in names]
    for table in tables:
        ratios = [row[WEIGHT] / one[key][WEIGHT] for key, row in table.items() if one[key][WEIGHT]]
        assert min(ratios) > 0.6 and max(ratios) < 1.6
        assert max(errors(table, one, LOSS)) < 1e-3
    assert max(errors(*tables, WEIGHT)) < 1e-3
    for found in two:
        for name in names:
            assert found[name]["plans"] == two[0][names[0]]["plans"]
