"""What `benchmarks/moe_losses.py` makes of its lines."""

from __future__ import annotations

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
