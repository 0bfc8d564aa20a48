"""Do TRL's trainers, with adapters and without, train, refresh, save and resume on two ranks as on one?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_processes import assert_succeeded, start_ranks
from tiny_runs import differing

pytest.importorskip("trl")
pytest.importorskip("peft")

from run_trl import CASES

pytestmark = pytest.mark.slow
Found = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Rank -> case -> what `run_trl` found."""
    folder = tmp_path_factory.mktemp("trl")
    assert_succeeded(start_ranks("run_trl.py", folder, folder=folder))
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]


@pytest.mark.parametrize("case", CASES)
def test_the_ranks_train_alike_under_one_plan_of_two_refreshes(case: str, two: Found) -> None:
    one, other = (found[case]["whole"] for found in two)
    assert one["ranks"] == other["ranks"] == 2
    assert one["refreshes"] == [(2, "applied"), (6, "applied")]
    assert one["plan"] == other["plan"]
    assert {"fp4", "fp8"} == {fmt for formats in one["plan"].values() for fmt in formats.values()}
    assert differing(one["weights"], other["weights"]) == []


@pytest.mark.parametrize("case", [name for name in CASES if name.startswith("DPO")])
def test_margins_of_the_first_step_are_0_on_both_ranks(case: str, two: Found) -> None:
    logged = two[0][case]["whole"]["logged"]
    assert logged[0]["rewards/margins"] == logged[0]["rewards/chosen"] == 0.0
    assert logged[1]["rewards/margins"] != 0


def test_a_reference_of_its_own_has_the_plan_on_each_rank(two: Found) -> None:
    for found in two:
        assert found["DPO"]["whole"]["reference"] == found["DPO"]["whole"]["plan"]


@pytest.mark.parametrize("case", [name for name in CASES if name.endswith("adapters")])
def test_plans_of_a_frozen_base_have_no_grad_weight(case: str, two: Found) -> None:
    assert {gemm for formats in two[0][case]["whole"]["plan"].values() for gemm in formats} == {
        "forward",
        "grad_input",
    }


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_goes_on_to_the_bit_on_each_rank(case: str, two: Found) -> None:
    for rank, found in enumerate(two):
        whole, resumed = found[case]["whole"], found[case]["resumed"]
        assert differing(resumed["weights"], whole["weights"]) == [], f"rank {rank}"
        assert resumed["plan"] == whole["plan"]
        assert resumed["refreshes"] == whole["refreshes"]
        assert resumed["logged"] == whole["logged"]
