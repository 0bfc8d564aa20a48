"""Reads what a run has written, and measures how far two runs' tables and tensors differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from events import records_of
from torch import Tensor

Table = Mapping[str, Sequence[float]]
LOSS, WEIGHT, CRITERION = 0, 1, 2  # columns


def errors(ours: Table, theirs: Table, column: int) -> list[float]:
    """Returns the relative errors of the rows that are not 0; those that are 0 must be so in both."""
    assert set(ours) == set(theirs)
    assert [key for key in theirs if theirs[key][column] == 0] == [key for key in theirs if ours[key][column] == 0]
    return [abs(ours[key][column] / row[column] - 1) for key, row in theirs.items() if row[column] != 0]


def share_below(bound: float, numbers: Sequence[float]) -> float:
    return sum(number < bound for number in numbers) / len(numbers)


def distance(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Returns the largest |ours - theirs| / |theirs| of all tensors."""
    assert set(ours) == set(theirs) and theirs
    return max(
        float((ours[name].double() - tensor.double()).norm() / tensor.double().norm().clamp_min(1e-30))
        for name, tensor in theirs.items()
    )


def equal_share(plans: list[Any], others: list[Any]) -> float:
    """Returns the share of a run's choices, of all steps, that another run has made alike."""
    pairs = [
        (formats[gemm], other[name][gemm])
        for plan, other in zip(plans, others, strict=True)
        for name, formats in plan.items()
        for gemm in formats
    ]
    return sum(ours == theirs for ours, theirs in pairs) / len(pairs)


def read_run(folder: Path) -> tuple[list[dict[str, Any]], dict[int, float], dict[int, Table]]:
    """Returns the lines of the history, step -> loss of the probe, and step -> "layer gemm format" -> loss and weight
    divergence and criterion.

    Args:
        folder: the `snip/` folder of a run.
    """
    history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    history = [line for line in history if line["event"] != "coverage"]
    losses, tables = {}, {}
    columns = ("loss_divergence", "weight_divergence", "criterion")
    for path in folder.glob("divergence-*.json"):
        found = json.loads(path.read_text())
        losses[found["step"]] = found["loss"]
        tables[found["step"]] = {
            f"{row['layer']} {row['gemm']} {row['format']}": [row[column] for column in columns]
            for row in records_of(found)
        }
    return history, losses, tables
