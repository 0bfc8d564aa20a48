"""TRL's trainers train, refresh, save and resume on two ranks, with adapters, packs and shards, and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparing import distance
from rank_processes import assert_succeeded, start_ranks
from tiny_runs import differing

pytest.importorskip("trl")
pytest.importorskip("peft")

from run_trl import CASES, RESUMED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # all cases, where cores are shared
Found = list[dict[str, dict[str, Any]]]
# Case under FSDP2 -> the same under DDP.
SHARDED = {"SFT in shards": "SFT", "DPO in shards of adapters": "DPO of adapters"}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Rank -> case -> what `run_trl` found."""
    folder = tmp_path_factory.mktemp("trl")
    assert_succeeded(start_ranks("run_trl.py", folder, folder=folder, timeout=500))
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]


@pytest.mark.parametrize("case", CASES)
def test_the_ranks_train_alike_under_one_plan_of_two_refreshes(case: str, two: Found) -> None:
    one, other = (found[case]["whole"] for found in two)
    assert one["ranks"] == other["ranks"] == 2
    assert one["refreshes"] == [(2, "applied"), (6, "applied")]
    assert one["plan"] == other["plan"]
    assert {"fp4", "fp8"} == {fmt for formats in one["plan"].values() for fmt in formats.values()}
    assert differing(one["weights"], other["weights"]) == []


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_is_sharded_under_fsdp2_and_none_under_ddp(case: str, two: Found) -> None:
    for found in two:
        for run in found[case].values():
            assert run["are_sharded"] == {CASES[case].shards}


@pytest.mark.parametrize(("sharded", "copied"), SHARDED.items())
def test_shards_train_under_the_plan_and_with_the_losses_of_copies(sharded: str, copied: str, two: Found) -> None:
    ours, theirs = two[0][sharded]["whole"], two[0][copied]["whole"]
    assert ours["plan"] == theirs["plan"]
    assert [line["loss"] for line in ours["logged"]] == pytest.approx(
        [line["loss"] for line in theirs["logged"]], rel=2e-5
    )
    assert distance(ours["weights"], theirs["weights"]) < 1e-3


@pytest.mark.parametrize(("sharded", "copied"), [*SHARDED.items(), ("SFT in shards of packs", "SFT of packs")])
def test_shards_are_counted_as_copies(sharded: str, copied: str, two: Found) -> None:
    assert two[0][sharded]["whole"]["coverage"] == two[0][copied]["whole"]["coverage"] is not None


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
    assert {gemm for formats in two[0][case]["whole"]["plan"].values() for gemm in formats} == {"forward", "grad_input"}


@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_run_goes_on_to_the_bit_on_each_rank(case: str, two: Found) -> None:
    for rank, found in enumerate(two):
        whole, resumed = found[case]["whole"], found[case]["resumed"]
        assert differing(resumed["weights"], whole["weights"]) == [], f"rank {rank}"
        assert resumed["plan"] == whole["plan"]
        assert resumed["refreshes"] == whole["refreshes"]
        assert resumed["logged"] == whole["logged"]
