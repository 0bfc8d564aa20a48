"""What `benchmarks/moe_losses.py` makes of its lines."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import moe_losses
import pytest


def test_the_learning_rate_rises_over_a_tenth_of_the_steps_and_falls_to_zero() -> None:
    assert [moe_losses.rate(20, step) for step in (0, 1, 2)] == [0.5, 1.0, 1.0]
    assert moe_losses.rate(20, 19) == pytest.approx(1 / 18) and moe_losses.rate(20, 20) == 0.0


def test_arms_are_compared_seed_by_seed_and_failed_ones_are_left_out() -> None:
    rows = [
        {"arm": "BF16", "seed": 1, "held_out": 4.0},
        {"arm": "BF16", "seed": 0, "held_out": 5.0},
        {"arm": "MXFP4", "seed": 0, "held_out": 5.05},
        {"arm": "MXFP4", "seed": 1, "held_out": 4.08},
        {"arm": "MXFP4", "seed": 2, "held_out": 1.0},
        {"arm": "MXFP4, emulated", "seed": 0, "error": "OutOfMemoryError"},
    ]
    assert moe_losses.paired(rows, "MXFP4", "BF16", "held_out") == pytest.approx([1.0, 2.0])
    assert moe_losses.paired(rows, "MXFP4, emulated", "BF16", "held_out") == []
    assert moe_losses.with_error([1.0, 2.0]) == "+1.50 ± 0.50" and moe_losses.with_error([-1.0]) == "-1.00"


def test_the_line_of_an_arm_is_written_before_the_next_one_begins(tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    options = options_of(output, deadline=time.monotonic() + 1000)
    written: list[list[str]] = []

    def measure(arm: str) -> Iterator[dict[str, Any]]:
        written.append(arms_in(output))
        if arm == "MXFP4":
            raise ValueError("of this arm")
        yield {"held_out": 4.0}

    moe_losses.run_arms(options, measure)
    assert written == [[], ["BF16"], ["BF16", "MXFP4"]]
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row.get("error") for row in rows] == [None, "ValueError: of this arm", None]
    assert all(row["seed"] == 3 and row["experts"] == 4 and row["commit"] == "abc" for row in rows)


def test_an_arm_that_would_end_too_late_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    output = tmp_path / "rows.jsonl"

    def measure(arm: str) -> Iterator[dict[str, Any]]:
        clock[0] += 10.0
        yield {"held_out": 4.0}

    moe_losses.run_arms(options_of(output, deadline=125.0), measure)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert ["error" in row for row in rows] == [False, False, True] and clock[0] == 120.0


def options_of(output: Path, deadline: float) -> argparse.Namespace:
    arms = ["BF16", "MXFP4", "MXFP4, emulated"]
    own = {"arms": arms, "seed": 3, "steps": 2, "output": output, "deadline": deadline}
    return argparse.Namespace(**own, size=moe_losses.moe_speed.TINY, origin={"commit": "abc"})


def arms_in(path: Path) -> list[str]:
    return [json.loads(line)["arm"] for line in path.read_text().splitlines()] if path.exists() else []
