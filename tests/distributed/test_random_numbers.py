"""Each rank draws its own random numbers for its own tokens, whatever DDP does with buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

RANK, RANKS = 4, 5  # places in a layer's state, after three formats and the key


def test_ranks_with_the_same_tokens_round_them_with_other_random_numbers(two: list[dict[str, Any]]) -> None:
    first, second = (found["gradients"]["fp4"] for found in two)
    assert len(first) == 14
    assert [name for name in first if torch.equal(first[name], second[name])] == []


def test_without_random_rounding_they_find_the_same_to_the_bit(two: list[dict[str, Any]]) -> None:
    first, second = (found["gradients"]["fp8"] for found in two)
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize("order", ["before", "after"])
def test_ddp_which_broadcasts_buffers_leaves_the_layers_states_alone(two: list[dict[str, Any]], order: str) -> None:
    keys = []
    for rank, found in enumerate(two):
        states = found["states"][order]
        assert states["marker"] == 0.0  # the buffer of another kind is rank 0's everywhere
        assert len(states["layers"]) == 14
        assert {tuple(state[RANK : RANKS + 1].tolist()) for state in states["layers"].values()} == {(rank, 2)}
        keys.append({name: state[:RANK].tolist() for name, state in states["layers"].items()})
    assert keys[0] == keys[1]


@pytest.mark.slow
def test_weights_that_all_ranks_have_stay_the_same_to_the_bit_under_fp4(two: list[dict[str, Any]]) -> None:
    first, second = (found["adamw"] for found in two)
    assert sum("fp4" in row.values() for row in first["plans"][2].values()) >= 5  # seven more steps follow
    assert [
        name for name, own in first["own_weights"].items() if not torch.equal(own, second["own_weights"][name])
    ] == []
