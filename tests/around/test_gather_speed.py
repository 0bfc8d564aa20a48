"""What `benchmarks/gather_speed.py` gathers."""

from __future__ import annotations

import gather_speed
import torch


def test_weights_folded_before_a_gather_are_the_bytes_of_those_folded_after_it() -> None:
    layers = [gather_speed.Layer("small", torch.device("cpu"), rank, 2) for rank in range(2)]
    for way in gather_speed.PASSES:
        found = {}
        for carrier in gather_speed.CARRIERS:
            first, second = (layer.part(carrier, way) for layer in layers)
            first.before()
            second.before()
            first.gathered.copy_(torch.cat([first.own, second.own]))
            first.after()
            found[carrier] = torch.cat([layout.flatten() for layout in first.layouts])
        assert found["byte"].count_nonzero() > 0.9 * found["byte"].numel()
        assert torch.equal(found["byte"], found["BF16"]) and torch.equal(found["BF16"], found["FP32"])
