"""Models that transformers shards itself, by `from_pretrained(..., distributed_config=...)`, or Accelerate by its
`ParallelismConfig`.

transformers saves no checkpoint of such a Trainer's run that can be resumed, so loops are.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from comparing import LOSS, WEIGHT, errors
from rank_processes import assert_succeeded, start_ranks
from run_distributed_config import (
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
from small import tiny_llama
from tiny_runs import differing, one_thread

pytestmark = pytest.mark.slow
needs_new_transformers = pytest.mark.skipif(not TRAINS_SHARDED, reason=WHY_NOT)

Found = list[dict[str, Any]]
"""Rank -> name -> what became of a run."""


def run(folder: Path, ranks: int, *names: str, script: str = "run_distributed_config.py") -> Found:
    assert_succeeded(start_ranks(script, folder, *names, folder=folder, ranks=ranks))
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(ranks)]


@pytest.fixture(scope="module", params=["fsdp", pytest.param("hsdp", marks=needs_new_transformers)])
def sharded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Found]:
    """Returns the name of what transformers' FSDP2 on two ranks, or its HSDP on four, found, and that."""
    folder = tmp_path_factory.mktemp("distributed_config")
    tiny_llama(hidden=32, layers=2).save_pretrained(folder / "model")
    name = request.param
    by_trainer = [f"trainer-{name}", "ddp"] if TRAINS_SHARDED else []
    return name, run(folder, 4 if name == "hsdp" else 2, *by_trainer, name)


@needs_new_transformers
def test_a_sharded_models_plan_losses_and_divergences_are_those_under_ddp(sharded: tuple[str, Found]) -> None:
    name, found = sharded
    ours, theirs = found[0][f"trainer-{name}"], found[0]["ddp"]
    for rank in found:
        assert rank[f"trainer-{name}"]["kinds"] == {"DTensor"}
        assert rank[f"trainer-{name}"]["plan"] == theirs["plan"]
    assert {fmt for row in theirs["plan"].values() for fmt in row.values()} == {"fp4", "fp8"}
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-4)
    assert list(ours["tables"]) == list(theirs["tables"]) == [1]
    # Of gradients that are summed in another order, a few fall on the other side of a rounding step.
    for column, bound in ((LOSS, 1e-5), (WEIGHT, 1e-2)):
        assert max(errors(ours["tables"][1], theirs["tables"][1], column)) < bound


def test_a_resumed_loop_of_a_sharded_model_is_the_uninterrupted_one_to_the_bit(sharded: tuple[str, Found]) -> None:
    name, found = sharded
    for rank in found:
        check_resumed(rank[name], rank[f"{name}-resumed"])


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


def test_a_loop_with_offloading_is_that_without_it_and_resumes_to_the_bit(tmp_path: Path) -> None:
    tiny_llama(hidden=32, layers=2).save_pretrained(tmp_path / "model")
    for rank in run(tmp_path, 2, "fsdp", "offloaded"):
        assert_only_shards_are_elsewhere(rank["offloaded"], rank["fsdp"])
        check_resumed(rank["offloaded"], rank["offloaded-resumed"])


Whole = tuple[Path, dict[str, Any]]
"""The folder of a model, and what one process found that trains it."""


def trained_whole(folder: Path, save: Callable[[Path], None]) -> Whole:
    save(folder)
    with one_thread():
        return folder, {**one_process(folder), "trainer": by_trainer(folder, "trainer", {})}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Trains a model whose halves are whole tiles of 128."""
    return trained_whole(tmp_path_factory.mktemp("one"), save_model)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Trains a model with experts."""
    return trained_whole(tmp_path_factory.mktemp("mixture"), save_mixture)


class Split(NamedTuple):
    name: str
    found: Found
    """What the processes that share the model found."""
    one: dict[str, Any]
    """What one process found."""


SPLITS = {"tp": 2, "tp-tokens": 2, "fsdp-tp": 4, "tp-ep": 2, "fsdp-ep": 2, "fsdp-tp-ep": 4}
"""Tensor and expert parallelism, also with FSDP2 -> number of processes."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=needs_new_transformers if "fsdp" in name else ()) for name in SPLITS],
)
def split(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Split:
    folder, name = tmp_path_factory.mktemp("split"), request.param
    model, one = request.getfixturevalue("mixture" if name.endswith("ep") else "one")
    (folder / "model").symlink_to(model / "model")
    return Split(name, run(folder, SPLITS[name], name, f"trainer-{name}"), one)


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


def test_the_trainer_plans_for_a_split_model_as_for_a_whole_one(split: Split) -> None:
    """Without a check of Accelerate's, which refuses tensor parallelism on CPUs."""
    theirs = split.one["trainer"]
    for rank in split.found:
        assert rank[f"trainer-{split.name}"]["plan"] == theirs["plan"]
        assert rank[f"trainer-{split.name}"]["losses"] == pytest.approx(theirs["losses"], rel=1e-3)


def test_a_resumed_loop_of_a_split_model_is_the_uninterrupted_one_to_the_bit(split: Split) -> None:
    for rank in split.found:
        check_resumed(rank[split.name], rank[f"{split.name}-resumed"])


def test_ranks_that_split_a_model_and_see_different_data_are_refused_together(split: Split) -> None:
    if "tp" not in split.name:
        pytest.skip("the ranks have different data")
    for rank in split.found:
        assert "got different micro-batches" in rank["disagreeing"]


@pytest.fixture(scope="module")
def configured(tmp_path_factory: pytest.TempPathFactory, one: Whole) -> Found:
    """Returns what two ranks found under Accelerate's `ParallelismConfig`."""
    folder = tmp_path_factory.mktemp("parallelism_config")
    (folder / "model").symlink_to(one[0] / "model")
    names = ("ddp", "dp-shard", "tp", "cp", "cp-loop", "cp-loop-resumed", "sharded", "offloaded")
    return run(folder, 2, *names, script="run_parallelism_config.py")


@pytest.fixture(scope="module")
def replicated(tmp_path_factory: pytest.TempPathFactory, one: Whole) -> Found:
    """Returns what four ranks found."""
    folder = tmp_path_factory.mktemp("replicated")
    (folder / "model").symlink_to(one[0] / "model")
    return run(folder, 4, "ddp", "replicated", "cp-shard", script="run_parallelism_config.py")


@pytest.mark.parametrize("name", ["dp-shard", "tp", "replicated", "cp-shard"])
def test_models_under_accelerates_parallelism_plan_and_lose_as_under_ddp(
    name: str, request: pytest.FixtureRequest
) -> None:
    found: Found = request.getfixturevalue("replicated" if name in OF_FOUR else "configured")
    for rank in found:
        ours, theirs = rank[name], rank["ddp"]
        assert "DTensor" in ours["kinds"] and theirs["kinds"] == {"Tensor"}
        assert ours["plan"] == theirs["plan"]
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-3)
    assert max(errors(found[0][name]["tables"][1], found[0]["ddp"]["tables"][1], LOSS)) < 1e-5


def test_the_trainer_with_offloading_is_that_without_it_to_the_bit(configured: Found) -> None:
    for rank in configured:
        assert_only_shards_are_elsewhere(rank["offloaded"], rank["sharded"])


@pytest.mark.parametrize("name", ["cp", "cp-loop"])
def test_ranks_with_parts_of_sequences_plan_and_lose_as_one_process(
    configured: Found, one: Whole, tmp_path: Path, name: str
) -> None:
    with one_thread():
        (tmp_path / "model").symlink_to(one[0] / "model")
        theirs = by_trainer(tmp_path, name, {}, THREE_ROWS) if name == "cp" else in_context(tmp_path, name)
    for rank in configured:
        assert rank[name]["plan"] == theirs["plan"]
        assert rank[name]["losses"] == pytest.approx(theirs["losses"], rel=1e-3)
        assert rank[name]["losses"][:3] == pytest.approx(theirs["losses"][:3], rel=1e-6)
    assert {fmt for row in theirs["plan"].values() for fmt in row.values()} == {"fp4", "fp8"}
    ours = configured[0][name]
    assert list(ours["tables"]) == list(theirs["tables"])
    for column, bound in ((LOSS, 1e-5), (WEIGHT, 1e-2)):
        assert max(errors(ours["tables"][1], theirs["tables"][1], column)) < bound


def test_a_resumed_loop_on_parts_of_sequences_is_the_uninterrupted_one_to_the_bit(configured: Found) -> None:
    for rank in configured:
        check_resumed(rank["cp-loop"], rank["cp-loop-resumed"])
