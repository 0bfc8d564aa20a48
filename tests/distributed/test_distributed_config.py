"""Models that transformers shards itself, by `from_pretrained(..., distributed_config=...)`.

transformers saves no checkpoint of such a Trainer's run that can be resumed, so loops are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import LOSS, WEIGHT, errors, share_below
from rank_processes import assert_succeeded, start_ranks
from small import tiny_llama
from tiny_runs import differing

pytestmark = pytest.mark.slow

Found = list[dict[str, Any]]
"""Rank -> name -> what became of a run."""


def run(folder: Path, ranks: int, *names: str) -> Found:
    assert_succeeded(start_ranks("run_distributed_config.py", folder, *names, folder=folder, ranks=ranks))
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(ranks)]


@pytest.fixture(scope="module", params=[("fsdp", 2), ("hsdp", 4)], ids=["fsdp", "hsdp"])
def sharded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Found]:
    """Returns the name of what transformers' FSDP2 on two ranks, or its HSDP on four, found, and that."""
    folder = tmp_path_factory.mktemp("distributed_config")
    tiny_llama(hidden=32, layers=2).save_pretrained(folder / "model")
    name, ranks = request.param
    return name, run(folder, ranks, f"trainer-{name}", name)


def test_a_sharded_models_plan_losses_and_divergences_are_those_under_ddp(sharded: tuple[str, Found]) -> None:
    name, found = sharded
    ours, theirs = found[0][f"trainer-{name}"], found[0]["ddp"]
    for rank in found:
        assert rank[f"trainer-{name}"]["kinds"] == {"DTensor"}
        assert rank[f"trainer-{name}"]["plan"] == theirs["plan"]
    assert {fmt for row in theirs["plan"].values() for fmt in row.values()} == {"fp4", "fp8"}
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-4)
    assert list(ours["tables"]) == list(theirs["tables"]) == [2]
    for column in (LOSS, WEIGHT):
        assert share_below(1e-4, errors(ours["tables"][2], theirs["tables"][2], column)) > 0.5


def test_a_resumed_loop_of_a_sharded_model_is_the_uninterrupted_one_to_the_bit(sharded: tuple[str, Found]) -> None:
    name, found = sharded
    for rank in found:
        check_resumed(rank[name], rank[f"{name}-resumed"])


def check_resumed(whole: dict[str, Any], again: dict[str, Any]) -> None:
    assert again["losses"] == whole["losses"][-len(again["losses"]) :]
    assert 0 < len(again["losses"]) < len(whole["losses"])
    assert again["plan"] == whole["plan"]
    assert differing(again["weights"], whole["weights"]) == []
