"""Ranks that differ are refused before the first step, and ranks that wait in vain are told for what."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rank_processes import assert_succeeded, start_ranks
from run_disagreements import BOUND

pytestmark = pytest.mark.slow

Found = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Returns rank -> scenario -> error, seconds and messages."""
    folder = tmp_path_factory.mktemp("disagreements")
    assert_succeeded(start_ranks("run_disagreements.py", folder, folder=folder, timeout=120))
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


DIFFERENCES = {
    "plans": "model.layers.0.self_attn.q_proj is fp4/fp4/fp4 on rank 1 and fp8/fp8/fp8 on rank 0",
    "layers": "model.layers.2.self_attn.q_proj is missing on rank 1 and 32x32, trained on rank 0",
    "frozen": "model.layers.1.mlp.up_proj is 80x32, frozen on rank 1 and 80x32, trained on rank 0",
    "max_steps": "max_steps is 11 on rank 1 and 10 on rank 0",
    "attention": "attn_implementation is eager on rank 1 and sdpa on rank 0",
}
SHARING = {
    "odd features": "tp_size=2 does not divide the 45 features of layer 'model.layers.0.mlp.gate_proj' that it splits. "
    "Load the model with a tp_size that divides them.",
    "one head": "tp_size=2 does not divide the 1 head of layer 'model.layers.0.self_attn.k_proj' that it splits. Load "
    "the model with a tp_size that divides them.",
    "three experts": "Cannot evenly shard 3 experts across 2 expert-parallel ranks.",  # transformers'
    "stages": "The model is pipeline-parallel (pp_size), so each rank knows only some of its layers. Load it with "
    "tp_size, fsdp_size or dp_replicate_size instead, or run stages by torch.distributed.pipelining and give "
    "SnipController(..., pipeline=Pipeline(run)).",
}


@pytest.mark.parametrize("scenario", DIFFERENCES)
def test_ranks_that_do_not_have_the_same_are_refused_on_all_of_them(two: Found, scenario: str) -> None:
    for found in two:
        assert found[scenario]["error"] == (
            f"ValueError: Rank 1 differs from rank 0: {DIFFERENCES[scenario]}. Expected the same config, model, "
            "plan and max_steps on all ranks."
        )
        assert found[scenario]["seconds"] < BOUND


@pytest.mark.parametrize("scenario", SHARING)
def test_models_that_cannot_be_shared_are_refused_on_all_ranks(two: Found, scenario: str) -> None:
    for found in two:
        assert found[scenario]["error"] == f"ValueError: {SHARING[scenario]}"
        assert found[scenario]["seconds"] < BOUND


def test_experts_that_are_spread_train_by_a_rule(two: Found) -> None:
    for found in two:
        assert (found["experts by a rule"]["error"], found["experts by a rule"]["messages"]) == ("", [])


def test_all_ranks_refuse_at_once_if_one_does(two: Found) -> None:
    first, second = (found["refused"]["error"] for found in two)
    assert second.startswith("TypeError: Cannot differentiate the update of torch.optim.rprop.Rprop")
    assert first.startswith(f"ValueError: On rank 1: {second[:60]}")


def test_states_of_different_plans_are_refused_before_they_change_anything(two: Found) -> None:
    for found in two:
        assert found["states"]["error"].startswith(
            "ValueError: Rank 1 differs from rank 0: model.layers.0.self_attn.q_proj is fp4/fp8/fp8 on rank 1 "
            "and fp8/fp8/fp8 on rank 0."
        )


def test_a_layer_that_one_rank_replaced_in_mid_run_costs_all_of_them_the_refresh(two: Found) -> None:
    assert [found["restored"]["error"] for found in two] == ["", ""]
    (message,) = two[0]["restored"]["messages"]
    assert message.startswith(
        "snip-hf: the refresh of step 2 failed, the plan in force stays: ValueError: On rank 1: ValueError: 3 of the "
        "14 swapped layers were replaced or wrapped since training began, e.g. 'model.layers.1.mlp.gate_proj' (now "
        "Linear)"
    )
    assert two[1]["restored"]["messages"] == []


def test_packs_whose_last_sequence_has_no_end_on_one_rank_cost_all_of_them_the_refresh(two: Found) -> None:
    assert [found["packs"]["error"] for found in two] == ["", ""]
    reason = (
        "ValueError: On rank 1: ValueError: cu_seq_lens_q ends at 100, but the batch has 1 row(s) of 128 tokens; "
        "expected one row that ends there. Give the ends of all its sequences, padding being one of them."
    )
    attention, counting, refresh = two[0]["packs"]["messages"]
    assert attention.startswith("snip-hf: probes use 'sdpa' in place of attn_implementation='half_attention'.")
    assert counting.startswith("snip-hf: the FLOPs of the micro-batch of step 1 could not be counted.")
    assert counting.endswith(f": {reason}")
    assert refresh == f"snip-hf: the refresh of step 2 failed, the plan in force stays: {reason}"
    assert two[1]["packs"]["messages"] == []
    assert max(found["packs"]["seconds"] for found in two) < BOUND


def test_the_first_rank_of_a_sharded_model_tells_its_weights_as_one_process_does(two: Found) -> None:
    assert [found["sharded"]["error"] for found in two] == ["", ""]


@pytest.mark.parametrize(
    ("scenario", "place"),
    [
        (
            "batches",
            "at the refresh of step 2 (a rank that runs out of batches, as under DDP's Join, never comes to it)",
        ),
        ("callback", "at the start (every rank needs a SnipCallback, or a SnipController in a loop of your own)"),
    ],
)
def test_a_rank_that_waits_in_vain_says_so_soon_and_ends_within_the_bound(
    two: Found, scenario: str, place: str
) -> None:
    found, bound = two[0][scenario], BOUND + (0.5 if scenario == "callback" else 0.0)
    assert found["messages"] == [
        f"snip-hf: rank 0 of 2 has waited for the others for 0.5 s, {place}; it gives up after {bound:g} s."
    ]
    assert found["error"].startswith(
        f"RankError: Rank 0 of 2 waited for the others, for at most {bound:g} s, and one of them did not answer or is "
        f"gone, {place}: "
    )
    assert found["error"].endswith("Look into the logs of the other ranks; start them again from the last checkpoint.")
    assert bound - 1 < found["seconds"] < bound + 15
    assert two[1][scenario]["error"] == ""
