"""All ranks act at the same step on what one rank's guard sees; the norm counts every part of the gradients once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import assert_succeeded, start_ranks
from rank_runs import on_two_gpus
from tiny_runs import differing

from snip_hf.records.events import Alarm, read_history

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["gloo", pytest.param("nccl", marks=on_two_gpus)])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guard")
    assert_succeeded(start_ranks("run_guard.py", folder, request.param, folder=folder))
    return folder


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(folder / f"rank{rank}.pt", "cpu", weights_only=True) for rank in (0, 1)]


def alarms(folder: Path) -> list[Alarm]:
    return [event for event in read_history(folder / "snip" / "history.jsonl") if isinstance(event, Alarm)]


def test_formats_are_raised_on_both_ranks_after_the_step_that_one_of_them_saw(
    two: list[dict[str, Any]], folder: Path
) -> None:
    one, other = (found["raised"] for found in two)
    assert one["formats"] == other["formats"]
    assert one["formats"][5] == ["fp4", "fp8"] and one["formats"][6] == ["bf16", "fp8"] == one["formats"][8]
    assert differing(one["weights"], other["weights"]) == []
    (alarm,) = alarms(folder / "raised")
    assert (alarm.step, alarm.figure, alarm.action) == (6, "loss", "raised")


def test_the_norm_is_the_same_on_both_ranks_whether_gradients_are_sharded_or_not(two: list[dict[str, Any]]) -> None:
    for wrapper in ("ddp", "fsdp2"):
        assert len(two[0]["norms"][wrapper]) == 3
        assert two[0]["norms"][wrapper] == two[1]["norms"][wrapper]
    assert two[0]["norms"]["fsdp2"] == pytest.approx(two[0]["norms"]["ddp"], rel=1e-3)


def test_a_model_that_fsdp2_shards_is_plain_again_and_still_sharded(two: list[dict[str, Any]]) -> None:
    for found in two:
        assert found["plain"]["sharded"] and found["plain"]["layers"] == 0
        low, plain = found["plain"]["losses"]
        assert low != plain and abs(low - plain) < 0.5
