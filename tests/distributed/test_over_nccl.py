"""Two ranks with a GPU each, over NCCL, train as one process, resume, and survive the faults of one.

These are the runs of the tests beside this file, fewer of them. A GPU sums in another order when it has half of the
rows, so a number next to a rounding threshold may be rounded to its other neighbour (test_equal_to_one_process.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import equal_share
from devices import NCCL
from rank_processes import assert_succeeded, start_ranks
from rank_runs import found_by, on_two_gpus
from run_faults import ON_GPUS as FAULTY
from run_gathering_loss import MEMORY
from run_gathering_loss import ON_GPUS as GATHERING
from run_saving import ON_GPUS as RESUMED
from run_saving import SAVED
from tiny_runs import differing

pytestmark = on_two_gpus
Runs = dict[str, dict[str, Any]]
SECONDS = 140  # for each start of ranks: a collective that nobody answers ends after 60
WITHOUT = "without first"
REASONS = {
    "probe's loss": "ValueError: On rank 1: ValueError: The loss of the probed micro-batch is nan",
    "out of memory in the sums": f"ValueError: On rank 1: OutOfMemoryError: {MEMORY}",
}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Name -> what one process found that has all the data, on one GPU."""
    folder = tmp_path_factory.mktemp("one-gpu")
    assert_succeeded(start_ranks("run_trainings.py", folder, "gpu", NCCL, folder=folder, ranks=1, timeout=SECONDS))
    return found_by(0, folder)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Runs]:
    """Rank -> name -> what it found."""
    folder = tmp_path_factory.mktemp("two-gpus")
    assert_succeeded(start_ranks("run_trainings.py", folder, "gpus", NCCL, folder=folder, timeout=SECONDS))
    return [found_by(rank, folder) for rank in (0, 1)]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> list[Runs]:
    folder = tmp_path_factory.mktemp("saved-by-gpus")
    assert_succeeded(start_ranks("run_saving.py", folder, NCCL, folder=folder, timeout=SECONDS))
    return [found_by(rank, folder) for rank in (0, 1)]


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> list[Runs]:
    folder = tmp_path_factory.mktemp("faulty-gpus")
    assert_succeeded(start_ranks("run_faults.py", folder, NCCL, folder=folder, timeout=SECONDS))
    return noted(folder)


@pytest.fixture(scope="module")
def gathering(tmp_path_factory: pytest.TempPathFactory) -> list[Runs]:
    """The runs that both ranks finished; each test looks whether its own run is there."""
    folder = tmp_path_factory.mktemp("gathering-gpus")
    ended = start_ranks("run_gathering_loss.py", folder, NCCL, folder=folder, timeout=SECONDS)
    print(*(log[-3000:] for log in ended.logs), sep="\n")
    return noted(folder)


def noted(folder: Path) -> list[Runs]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def refreshes(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [line for line in found["history"] if line["event"] == "refresh"]


@pytest.mark.parametrize("name", ["emulated", "hopper"])
def test_both_ranks_have_the_same_plans_losses_and_copies(two: list[Runs], name: str) -> None:
    for wrapper in ("ddp", "fsdp2"):
        first, second = (found[f"{wrapper}-{name}"] for found in two)
        for what in ("plans", "losses", "clip_factors"):
            assert first[what] == second[what]
        assert [(line["step"], line["status"]) for line in refreshes(first)] == [(1, "applied"), (5, "applied")]
        assert second["history"] == []
    first, second = (found[f"ddp-{name}"]["own_weights"] for found in two)
    assert differing(first, second) == []
    assert all(sharding["kinds"] == {"DTensor"} for sharding in two[1][f"fsdp2-{name}"]["sharding"])


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_two_gpus_train_and_plan_as_one(one: Runs, two: list[Runs], wrapper: str) -> None:
    ours, theirs = two[0][f"{wrapper}-emulated"], one["ddp-emulated"]
    assert ours["losses"][0] == pytest.approx(theirs["losses"][0], rel=1e-5)
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-3)
    assert ours["clip_factors"] == pytest.approx(theirs["clip_factors"], rel=1e-2)
    assert len({str(plan) for plan in theirs["plans"]}) > 1
    assert equal_share(ours["plans"], theirs["plans"]) > 0.9


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_two_gpus_lose_as_one_in_the_formats_of_fp8_tensor_cores(one: Runs, two: list[Runs], wrapper: str) -> None:
    """Each rank's tensors have scales of their own in BF16, so losses agree as far as these formats do."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs GPUs of compute capability 8.9 or later")
    ours, theirs = two[0][f"{wrapper}-hopper"], one["ddp-hopper"]
    assert [found["backend"] for found in (ours, two[1][f"{wrapper}-hopper"], theirs)] == ["tensor-scaled"] * 3
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-2)
    for found in (ours, theirs):
        assert {fmt for row in found["plans"][-1].values() for fmt in row.values()} == {"mxfp4", "fp8-delayed"}


@pytest.mark.parametrize("name", RESUMED)
def test_two_gpus_go_on_from_the_middle_of_a_refresh(resumed: list[Runs], name: str) -> None:
    """Equal to the bit, but for exponents of FP8 tensor cores: the second rank goes on with those of the first one, and
    blocks outside their range are rounded otherwise (docs/kernels.md)."""
    for found in resumed:
        whole, again = found[name], found[f"{name}-resumed"]
        losses, plans = ({at: value for at, value in whole[what].items() if at > SAVED} for what in ("losses", "plans"))
        assert list(again["losses"]) == list(losses)
        assert whole["plans"][SAVED] != again["plans"][SAVED + 1] == plans[SAVED + 1]
        if name == "hopper":
            assert list(again["losses"].values()) == pytest.approx(list(losses.values()), rel=1e-3)
            assert equal_share(list(again["plans"].values()), list(plans.values())) > 0.9
        else:
            assert again["losses"] == losses and again["plans"] == plans
            assert differing(again["weights"], whole["weights"]) == []


def assert_costs_one_refresh(runs: list[Runs], name: str, reason: str) -> None:
    """The fault of a rank costs the first refresh, of step 2; that of step 6 is made."""
    first, second = (found[name] for found in runs)
    expected = runs[0][f"{name.split()[0]} {WITHOUT}"]
    for found in (first, second):
        assert found["plans"] == expected["plans"]
        assert list(found["losses"].values()) == pytest.approx(list(expected["losses"].values()), rel=1e-5)
    kept, applied = refreshes(first)
    assert (kept["step"], kept["status"], applied["step"], applied["status"]) == (2, "kept", 6, "applied")
    assert kept["reason"].startswith(reason)
    said = f"snip-hf: the refresh of step 2 failed, the plan in force stays: {kept['reason']}"
    assert said in first["messages"] and said not in second["messages"]


@pytest.mark.parametrize("name", [name for name in FAULTY if WITHOUT not in name])
def test_a_fault_of_one_gpu_in_a_refresh_costs_that_refresh_alone(faulty: list[Runs], name: str) -> None:
    assert_costs_one_refresh(faulty, name, REASONS[name.split(maxsplit=1)[1]])


@pytest.mark.parametrize("name", [name for name in GATHERING if WITHOUT not in name])
def test_a_gpu_that_fails_in_a_loss_that_gathers_costs_that_refresh_alone(gathering: list[Runs], name: str) -> None:
    """Also where the others are in collectives of a backward pass, which autograd runs in threads of its own."""
    assert all(name in found for found in gathering), "the ranks did not come to its end; their logs are above"
    assert_costs_one_refresh(gathering, name, f"FailedElsewhere: On rank 1: OutOfMemoryError: {MEMORY}")
