"""Models that transformers shards itself, by `from_pretrained(..., distributed_config=...)`, or Accelerate by its
`ParallelismConfig`.

transformers saves no checkpoint of such a Trainer's run that can be resumed, so loops are.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from comparing import LOSS, WEIGHT, errors
from rank_processes import assert_succeeded, start_ranks
from run_distributed_config import (
    ONCE,
    THREE_ROWS,
    TRAINS_SHARDED,
    UNIFORM,
    WHY_NOT,
    by_trainer,
    one_process,
    save_mixture,
    save_model,
)
from run_parallelism_config import OF_FOUR, in_context
from run_sharded import ACCELERATE
from small import tiny_llama
from tiny_runs import differing, one_thread

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # all runs, where cores are shared
needs_new_transformers = pytest.mark.skipif(not TRAINS_SHARDED, reason=WHY_NOT)

Found = list[dict[str, Any]]
"""Rank -> folder/name -> what became of a run."""
Whole = tuple[Path, dict[str, Any]]
"""The folder of a model, and what one process found that trains it."""
SPLITS = {"tp": 2, "tp-tokens": 2, "fsdp-tp": 4, "tp-ep": 2, "fsdp-ep": 2, "fsdp-tp-ep": 4}
"""Tensor and expert parallelism, also with FSDP2 -> number of processes."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Whole]:
    """What one process finds: for a model whose halves are whole tiles of 128, one with experts, and a small one."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("llama", "mixture", "small")}
    save_model(folders["llama"])
    save_mixture(folders["mixture"])
    tiny_llama(hidden=32, layers=2).save_pretrained(folders["small"] / "model")
    with one_thread():
        found = {name: {"trainer": by_trainer(folder, "trainer", {})} for name, folder in folders.items()}
        for name in ("llama", "mixture"):
            found[name] |= one_process(folders[name])
    return {name: (folder, found[name]) for name, folder in folders.items()}


def model_of(part: str) -> str:
    """Returns which model a folder of runs has."""
    return "mixture" if part.endswith("ep") else "small" if part == "small" else "llama"


def run(folder: Path, ranks: int, whole: dict[str, Whole], *words: str) -> Found:
    splits = [name for name in SPLITS if SPLITS[name] == ranks and (TRAINS_SHARDED or "fsdp" not in name)]
    for name in (ACCELERATE, "small", *splits):
        (folder / name).mkdir()
        (folder / name / "model").symlink_to(whole[model_of(name)][0] / "model")
    words += tuple(f"{name}/{name}" for name in splits)
    words += tuple(f"{name}/trainer-{name}" for name in splits if name not in ONCE)
    assert_succeeded(start_ranks("run_sharded.py", folder, *words, folder=folder, ranks=ranks, timeout=500))
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(ranks)]


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory, whole: dict[str, Whole]) -> Found:
    names = ("dp-shard", "tp", "cp", "cp-loop", "cp-loop-resumed", "offloaded")
    words = [*(f"{ACCELERATE}/{name}" for name in names), "small/fsdp", "small/offloaded"]
    words += ["small/trainer-fsdp"] if TRAINS_SHARDED else []
    return run(tmp_path_factory.mktemp("two"), 2, whole, *words)


@pytest.fixture(scope="module")
def on_four(tmp_path_factory: pytest.TempPathFactory, whole: dict[str, Whole]) -> Found:
    words = [f"{ACCELERATE}/{name}" for name in OF_FOUR]
    words += ["small/hsdp", "small/trainer-hsdp"] if TRAINS_SHARDED else []
    return run(tmp_path_factory.mktemp("four"), 4, whole, *words)


@pytest.fixture(params=["fsdp", pytest.param("hsdp", marks=needs_new_transformers)])
def sharded(request: pytest.FixtureRequest) -> tuple[str, Found]:
    """Returns the name of what transformers' FSDP2 on two ranks, or its HSDP on four, found, and that."""
    return request.param, request.getfixturevalue("on_four" if request.param == "hsdp" else "on_two")


@needs_new_transformers
def test_a_sharded_models_plan_losses_and_divergences_are_those_of_one_process(
    sharded: tuple[str, Found], whole: dict[str, Whole]
) -> None:
    name, found = sharded
    ours, theirs = found[0][f"small/trainer-{name}"], whole["small"][1]["trainer"]
    for rank in found:
        assert rank[f"small/trainer-{name}"]["kinds"] == {"DTensor"}
        assert rank[f"small/trainer-{name}"]["plan"] == theirs["plan"]
    assert {fmt for row in theirs["plan"].values() for fmt in row.values()} == {"fp4", "fp8"}
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-4)
    assert list(ours["tables"]) == list(theirs["tables"]) == [1]
    # Of gradients that are summed in another order, a few fall on the other side of a rounding step.
    for column, bound in ((LOSS, 1e-5), (WEIGHT, 1e-2)):
        assert max(errors(ours["tables"][1], theirs["tables"][1], column)) < bound


def test_a_resumed_loop_of_a_sharded_model_is_the_uninterrupted_one_to_the_bit(sharded: tuple[str, Found]) -> None:
    name, found = sharded
    for rank in found:
        check_resumed(rank[f"small/{name}"], rank[f"small/{name}-resumed"])


def check_resumed(whole: dict[str, Any], again: dict[str, Any]) -> None:
    assert again["losses"] == whole["losses"][-len(again["losses"]) :]
    assert 0 < len(again["losses"]) < len(whole["losses"])
    assert again["plan"] == whole["plan"]
    assert differing(again["weights"], whole["weights"]) == []


def assert_only_shards_are_elsewhere(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Compares a run that offloads with one that does not."""
    assert ours["policies"] == {"CPUOffloadPolicy"} and theirs["policies"] == {"OffloadPolicy"}
    for what in ("losses", "plan", "tables"):
        assert ours[what] == theirs[what]
    assert {fmt for row in ours["plan"].values() for fmt in row.values()} == {"fp4", "fp8"}
    assert differing(ours["weights"], theirs["weights"]) == []


def test_a_loop_with_offloading_is_that_without_it_and_resumes_to_the_bit(on_two: Found) -> None:
    for rank in on_two:
        assert_only_shards_are_elsewhere(rank["small/offloaded"], rank["small/fsdp"])
        check_resumed(rank["small/offloaded"], rank["small/offloaded-resumed"])


class Split(NamedTuple):
    name: str
    found: list[dict[str, Any]]
    """Rank -> name -> what the processes that share the model found."""
    one: dict[str, Any]
    """What one process found."""


def of_splits(names: Iterable[str]) -> list[Any]:
    """Returns parameters of `split`."""
    return [pytest.param(name, marks=needs_new_transformers if "fsdp" in name else ()) for name in names]


@pytest.fixture(params=of_splits(SPLITS))
def split(request: pytest.FixtureRequest) -> Split:
    name = request.param
    found: Found = request.getfixturevalue({2: "on_two", 4: "on_four"}[SPLITS[name]])
    own = [{key.removeprefix(f"{name}/"): run for key, run in rank.items()} for rank in found]
    return Split(name, own, request.getfixturevalue("whole")[model_of(name)][1])


@pytest.mark.parametrize("fmt", UNIFORM)
def test_losses_of_a_split_model_are_those_of_one_process(split: Split, fmt: str) -> None:
    first, second = split.one[fmt]["losses"]
    for rank in split.found:
        assert rank[fmt]["losses"][0] == pytest.approx(first, rel=1e-6)
        # FP4 rounds gradients stochastically, by other numbers in parts of a weight's output features, and in experts.
        assert rank[fmt]["losses"][1] == pytest.approx(second, rel=1e-4 if fmt == "fp8" else 3e-3)


def test_divergences_and_the_plan_of_a_split_model_are_those_of_one_process(split: Split) -> None:
    name, found, theirs = split.name, split.found, split.one["probed"]
    for rank in found:
        assert "DTensor" in rank[name]["kinds"] and rank[name]["plan"] == theirs["plan"]
        assert rank[name]["coverage"] == theirs["coverage"] is not None
    assert {fmt for row in theirs["plan"].values() for fmt in row.values()} == {"fp4", "fp8"}
    ours = found[0][name]
    assert list(ours["tables"]) == list(theirs["tables"]) == [1]
    assert list(ours["tables"][1]) == list(theirs["tables"][1])
    assert max(errors(ours["tables"][1], theirs["tables"][1], LOSS)) < 1e-5
    # Of gradients that the ranks sum in another order, a few fall on the other side of a rounding step.
    assert max(errors(ours["tables"][1], theirs["tables"][1], WEIGHT)) < 1e-3
    assert ours["losses"][:3] == pytest.approx(theirs["losses"][:3], rel=1e-6)


@pytest.mark.parametrize("split", of_splits(name for name in SPLITS if name not in ONCE), indirect=True)
def test_the_trainer_plans_for_a_split_model_as_for_a_whole_one(split: Split) -> None:
    """Without a check of Accelerate's, which refuses tensor parallelism on CPUs."""
    theirs = split.one["trainer"]
    for rank in split.found:
        assert rank[f"trainer-{split.name}"]["plan"] == theirs["plan"]
        assert rank[f"trainer-{split.name}"]["losses"] == pytest.approx(theirs["losses"], rel=1e-3)


@pytest.mark.parametrize("split", of_splits(name for name in SPLITS if name not in ONCE), indirect=True)
def test_a_resumed_loop_of_a_split_model_is_the_uninterrupted_one_to_the_bit(split: Split) -> None:
    for rank in split.found:
        check_resumed(rank[split.name], rank[f"{split.name}-resumed"])


@pytest.mark.parametrize("split", of_splits(name for name in SPLITS if "tp" in name), indirect=True)
def test_ranks_that_split_a_model_and_see_different_data_are_refused_together(split: Split) -> None:
    for rank in split.found:
        assert "got different micro-batches" in rank["disagreeing"]


@pytest.mark.parametrize("name", ["dp-shard", "tp", "replicated", "cp-shard"])
def test_models_under_accelerates_parallelism_plan_and_lose_as_in_one_process(
    name: str, whole: dict[str, Whole], request: pytest.FixtureRequest
) -> None:
    found: Found = request.getfixturevalue("on_four" if name in OF_FOUR else "on_two")
    theirs = whole["llama"][1]["trainer"]
    for rank in found:
        ours = rank[f"{ACCELERATE}/{name}"]
        assert "DTensor" in ours["kinds"]
        assert ours["plan"] == theirs["plan"]
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-3)
    ours = found[0][f"{ACCELERATE}/{name}"]
    assert max(errors(ours["tables"][1], theirs["tables"][1], LOSS)) < 1e-5


def test_the_trainer_with_offloading_is_that_without_it_to_the_bit(on_two: Found) -> None:
    for rank in on_two:
        assert_only_shards_are_elsewhere(rank[f"{ACCELERATE}/offloaded"], rank[f"{ACCELERATE}/dp-shard"])


@pytest.mark.parametrize("name", ["cp", "cp-loop"])
def test_ranks_with_parts_of_sequences_plan_and_lose_as_one_process(
    on_two: Found, whole: dict[str, Whole], tmp_path: Path, name: str
) -> None:
    with one_thread():
        (tmp_path / "model").symlink_to(whole["llama"][0] / "model")
        theirs = by_trainer(tmp_path, name, {}, THREE_ROWS) if name == "cp" else in_context(tmp_path, name)
    found = [rank[f"{ACCELERATE}/{name}"] for rank in on_two]
    for ours in found:
        assert ours["plan"] == theirs["plan"]
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-3)
        assert ours["losses"][:3] == pytest.approx(theirs["losses"][:3], rel=1e-6)
    assert {fmt for row in theirs["plan"].values() for fmt in row.values()} == {"fp4", "fp8"}
    assert list(found[0]["tables"]) == list(theirs["tables"])
    for column, bound in ((LOSS, 1e-5), (WEIGHT, 1e-2)):
        assert max(errors(found[0]["tables"][1], theirs["tables"][1], column)) < bound


def test_a_resumed_loop_on_parts_of_sequences_is_the_uninterrupted_one_to_the_bit(on_two: Found) -> None:
    for rank in on_two:
        check_resumed(rank[f"{ACCELERATE}/cp-loop"], rank[f"{ACCELERATE}/cp-loop-resumed"])
