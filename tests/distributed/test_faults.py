"""A fault on one rank costs all ranks the same refresh; a lost rank ends the run.

What costs a refresh is compared, to the bit, with the run in which that refresh was never made.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from processes import alive, wait_until
from rank_processes import assert_succeeded, start_ranks
from run_faults import BOUND, ENDED, FAULTS, POISONS, SURVIVED

from snip_hf.parallel.ranks import RankError
from snip_hf.training.micro_batches import NOT_CAPTURED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # all waves of groups, where cores are shared
# Seconds beyond the bound for what comes before and after the wait on a busy machine, where all groups run at once.
SLACK = 15.0
Found = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the files of all groups of ranks."""
    folder = tmp_path_factory.mktemp("faults")
    assert_succeeded(start_ranks("run_faults.py", folder, folder=folder, ranks=1, timeout=560))
    return folder


@pytest.fixture(scope="module")
def survived(folder: Path) -> Found:
    """Returns scenario -> rank -> what became of it."""
    ranks = [{}, {}]
    for wrapper in ("ddp", "fsdp2"):
        assert ended(folder, wrapper)["codes"] == [0, 0], log(folder, wrapper)
        for rank in (0, 1):
            ranks[rank] |= json.loads((folder / wrapper / f"rank{rank}.json").read_text())
    return {name: [found[name] for found in ranks] for name in SURVIVED}


def ended(folder: Path, group: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "ended.json").read_text())[group]
    return found


def log(folder: Path, group: str) -> str:
    return "\n".join((folder / group / f"log-{rank}.txt").read_text(errors="replace")[-3000:] for rank in (0, 1))


NOT_FINITE = "The gradient of layer 'model.layers.0.self_attn.q_proj' is not finite; expected finite numbers."
GRADIENT = "The divergences of layer 'model.layers.0.self_attn.q_proj' are not finite; expected finite activations"
LOSS = "The loss of the probed micro-batch is nan; expected a finite number."
MEMORY = "OutOfMemoryError: CUDA out of memory (simulated)"
# Faults of rank 1, unless stated otherwise. Training's gradients are those of all ranks when they are checked.
REASONS = {
    "ddp loss": f"ValueError: {NOT_FINITE}",
    "fsdp2 shard": "ValueError: On rank 1: ValueError: The gradient of layer 'model.layers.1.mlp.down_proj' is not",
    "probe's loss": f"ValueError: On rank 1: ValueError: {LOSS}",
    "probe's loss on rank 0": f"ValueError: {LOSS}",
    "probe's gradient": f"ValueError: {GRADIENT}",
    "no labels": "ValueError: On rank 1: ValueError: The batch has no labels (its keys are input_ids)",
    "not captured": f"ValueError: On rank 1: ValueError: {NOT_CAPTURED}",
    "out of memory in the sums": f"ValueError: On rank 1: {MEMORY}",
    "solver hangs": "SolverError: The solver ran past the 5 s that it had and was killed.",
    "ddp out of memory in the probe": f"ValueError: On rank 1: {MEMORY}",
    "ddp out of memory after the probe": f"ValueError: On rank 1: {MEMORY}",
}
COSTS_A_REFRESH = [name for name in SURVIVED if name in REASONS or name.split(maxsplit=1)[1] in REASONS]


def test_all_faults_are_looked_at() -> None:
    others = {f"{wrapper} {run}" for wrapper in ("ddp", "fsdp2") for run in ("undisturbed", "without first")}
    others |= {f"{name} without first" for name in POISONS} | {"ddp solver slow", "ddp full disk"}
    others |= {"ddp not captured when a plan is due"}
    assert set(SURVIVED) - others == set(COSTS_A_REFRESH)
    assert {reason.removeprefix("ddp ").removeprefix("fsdp2 ") for reason in REASONS} >= set(FAULTS)


def test_the_runs_that_others_are_compared_with_differ(survived: Found) -> None:
    for wrapper in ("ddp", "fsdp2"):
        undisturbed, without = (survived[f"{wrapper} {name}"][0] for name in ("undisturbed", "without first"))
        assert [(line["step"], line["applied_step"]) for line in undisturbed["history"]] == [(2, 4), (6, 8)]
        assert [(line["step"], line["applied_step"]) for line in without["history"]] == [(6, 8)]
        assert undisturbed["losses"]["4"] == without["losses"]["4"]
        assert undisturbed["losses"]["5"] != without["losses"]["5"]
        assert undisturbed["messages"] == without["messages"] == []
    for name in POISONS:
        assert ("NaN" in json.dumps(survived[name][0]["losses"])) == (name.split()[1] in ("loss", "activation"))


@pytest.mark.parametrize("name", COSTS_A_REFRESH)
def test_a_fault_on_one_rank_costs_all_of_them_one_refresh_and_no_more(survived: Found, name: str) -> None:
    first, second = survived[name]
    wrapper, fault = name.split(maxsplit=1)
    expected = survived[f"{name if name in POISONS else wrapper} without first"][0]
    for found in (first, second):
        assert json.dumps(found["losses"]) == json.dumps(expected["losses"])  # as text, in which NaN equals NaN
        assert found["plans"] == expected["plans"]
    kept, *others = first["history"]
    assert (kept["step"], kept["status"], kept["applied_step"], kept["changes"]) == (2, "kept", None, {})
    assert kept["reason"].startswith(REASONS.get(name) or REASONS[fault])
    assert others == expected["history"] and [line["status"] for line in others] == ["applied"]
    # Said once, by the first rank.
    assert first["messages"] == [f"snip-hf: the refresh of step 2 failed, the plan in force stays: {kept['reason']}"]
    assert second["messages"] == [] and second["history"] == []


def test_a_slow_solver_is_waited_for_by_all_and_its_plan_applied_at_the_same_step(survived: Found) -> None:
    for slow, undisturbed in zip(survived["ddp solver slow"], survived["ddp undisturbed"], strict=True):
        assert slow["seconds"] > 2
        for key in ("losses", "plans", "history", "messages"):
            assert slow[key] == undisturbed[key]


def test_a_plan_is_applied_on_all_ranks_when_one_of_them_misses_the_capture_of_its_step(survived: Found) -> None:
    first, second = survived["ddp not captured when a plan is due"]
    assert first["plans"] == second["plans"] and first["losses"] == second["losses"]
    assert first["plans"]["6"] != first["plans"]["5"]
    applied, kept = first["history"]
    assert (applied["step"], applied["applied_step"], kept["step"], kept["status"]) == (2, 6, 6, "kept")
    assert kept["reason"] == f"ValueError: On rank 1: ValueError: {NOT_CAPTURED}"


def test_a_full_disk_of_the_first_rank_costs_its_record_and_nothing_else(survived: Found) -> None:
    for full, undisturbed in zip(survived["ddp full disk"], survived["ddp undisturbed"], strict=True):
        assert full["losses"] == undisturbed["losses"] and full["plans"] == undisturbed["plans"]
        assert full["history"] == []
    first, second = survived["ddp full disk"]
    assert second["messages"] == []
    assert first["messages"]
    assert all("training continues: [Errno 28] No space left on device" in message for message in first["messages"])


@pytest.mark.parametrize("name", ENDED)
def test_a_rank_that_is_lost_in_a_refresh_ends_the_others_within_the_bound(folder: Path, name: str) -> None:
    struck = ENDED[name][0]
    other = 1 - struck
    codes, times = ended(folder, name)["codes"], ended(folder, name)["times"]
    assert codes[struck] == (None if "stops" in name else -9), log(folder, name)
    assert codes[other] == 1, log(folder, name)
    found = json.loads((folder / name / f"rank{other}.json").read_text())
    assert found["error"].startswith(f"Rank {other} of 2 waited for the others, for at most {BOUND:g} s, and one of ")
    assert RankError.__name__ in (folder / name / f"log-{other}.txt").read_text()
    # Before the plan, the first rank waits for its solver too.
    bound = BOUND + (4.0 if "before the plan" in name else 0.0)
    assert found["seconds"] < bound + SLACK
    if "stops" in name:
        assert found["seconds"] > bound - 1
    assert times[other] - found["began"] < bound + 2 * SLACK  # its end too
    solver = folder / name / "solver"
    assert solver.exists() == ("plan" in name)
    if solver.exists():
        wait_until(lambda: not alive(int(solver.read_text())), 5.0)
