"""A model that DeepSpeed's ZeRO-3 partitions trains and plans as under ZeRO-2, and resumes to the bit."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import LOSS, WEIGHT, Table, distance, errors, read_run
from rank_processes import assert_succeeded, start_ranks
from run_zero3 import SAVED, STEPS
from tiny_runs import differing

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")]
Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zero3")
    assert_succeeded(start_ranks("run_zero3.py", folder, folder=folder))
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[Found]:
    """Returns rank -> run -> what `run_zero3.train` returned there."""
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


def tables(folder: Path, run: str) -> dict[int, Table]:
    return read_run(folder / run / "snip")[2]


def test_until_the_first_plan_nothing_differs_from_a_run_without_snip(ranks: list[Found]) -> None:
    for found in ranks:
        with_snip, plain = found["zero3"]["losses"], found["plain"]["losses"]
        assert [with_snip[step] for step in (1, 2)] == [plain[step] for step in (1, 2)]  # to the bit, with the norms
        assert with_snip[3] != plain[3]


@pytest.mark.parametrize(
    ("zero3", "zero2", "steps"),
    [("zero3", "zero2", [1, 4]), ("offloaded", "experts", [1]), ("gradients3", "gradients2", [1])],
    ids=["dense", "experts", "gradients"],
)
def test_divergences_are_those_under_zero2(folder: Path, zero3: str, zero2: str, steps: list[int]) -> None:
    ours, theirs = tables(folder, zero3), tables(folder, zero2)
    assert sorted(ours) == sorted(theirs) == steps
    for step, table in theirs.items():
        assert max(errors(ours[step], table, LOSS)) < 1e-5
        # Differences of FP32 passes at nearly equal weights.
        assert max(errors(ours[step], table, WEIGHT)) < 2e-2


def test_plans_coverage_losses_and_weights_are_those_under_zero2(ranks: list[Found]) -> None:
    for zero3, zero2 in (("zero3", "zero2"), ("experts, offloaded", "experts")):
        for found in ranks:
            ours, theirs = found[zero3], found[zero2]
            assert ours["plan"] == theirs["plan"] == ranks[0][zero2]["plan"]
            assert ours["coverage"] == theirs["coverage"] is not None
            for step, losses in theirs["losses"].items():
                assert ours["losses"][step] == pytest.approx(losses, rel=1e-5)
            assert distance(ours["weights"], theirs["weights"]) < 1e-3


def test_a_run_that_is_resumed_in_the_middle_of_a_refresh_ends_with_the_same_bits(ranks: list[Found]) -> None:
    for found in ranks:
        whole, resumed = found["zero3"], found["resumed"]
        for step in range(SAVED + 1, STEPS + 1):
            assert resumed["losses"][step] == whole["losses"][step]
        assert differing(resumed["weights"], whole["weights"]) == []
        assert resumed["plan"] == whole["plan"]


def test_a_model_that_is_built_in_parts_is_probed(folder: Path, ranks: list[Found]) -> None:
    assert list(tables(folder, "parts")) == [1]
    assert len(set(map(str, ranks[0]["in parts"]["plan"].values()))) > 1
    assert ranks[0]["in parts"]["plan"] == ranks[1]["in parts"]["plan"]


def test_a_policy_without_a_probe_knows_its_coverage(ranks: list[Found]) -> None:
    assert ranks[0]["rule"]["coverage"] == ranks[0]["zero3"]["coverage"]
