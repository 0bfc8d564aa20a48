"""Gradients that are views of DDP's buckets give the same training."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.mark.slow
def test_gradients_that_are_views_of_buckets_change_no_bit(two: list[dict[str, dict[str, Any]]]) -> None:
    for found in two:
        views, copies = found["ddp-views-adamw"], found["ddp-adamw"]
        assert (views["losses"], views["plans"]) == (copies["losses"], copies["plans"])
        assert all(torch.equal(value, copies["weights"][name]) for name, value in views["weights"].items())
    tables = two[0]["ddp-views-adamw"]["tables"]  # the first rank has them
    assert tables == two[0]["ddp-adamw"]["tables"] and len(tables) > 1
