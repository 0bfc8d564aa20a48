"""snip-hf leaves no trace in the training of two ranks unless it quantizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

Runs = dict[str, dict[str, Any]]


@pytest.mark.slow  # fast in one process: tests/invariants/test_probe_leaves_no_trace.py
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_probes_in_every_step_change_no_bit_of_weights_and_optimizer(two: list[Runs], wrapper: str) -> None:
    """The runs are in BF16, with plans that are never applied and dropout, whose random numbers are training's."""
    for found in two:
        ours, theirs = found[f"{wrapper}-with"], found[f"{wrapper}-without"]
        for what in ("gradients", "weights", "own_weights", "state"):
            assert set(ours[what]) == set(theirs[what]) and len(ours[what]) >= 20
            assert [name for name in ours[what] if not torch.equal(ours[what][name], theirs[what][name])] == []
        assert ours["losses"] == theirs["losses"]
    refreshes = two[0][f"{wrapper}-with"]["history"][1:]
    assert [line["reason"] for line in refreshes] == ["OSError: no solver in this test"] * 3
    assert list(two[0][f"{wrapper}-with"]["tables"]) and two[0][f"{wrapper}-without"]["tables"] == {}
