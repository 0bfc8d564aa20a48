"""A model that FSDP2 shards trains and plans as under DDP, and a probe leaves its sharding as it was."""

from __future__ import annotations

import math
from typing import Any

import pytest
from comparing import LOSS, WEIGHT, distance, errors, share_below
from rank_cases import SHARDED
from rank_runs import some_slow
from slow_cases import slow
from wrapped_models import CASES, counted

Runs = dict[str, dict[str, Any]]
SGD = "sgd-gemm-accumulated-clipped"
LORA = "fsdp2-lora"
# Runs to compare with the same under DDP. The last one accumulates gradients, which FSDP2 sums up in another order.
# Without PEFT there are no runs of adapters.
PAIRS = {
    sharded: copied
    for sharded, copied in {
        "fsdp2-adamw": "ddp-adamw",
        "fsdp2-conv1d": "ddp-conv1d",
        "fsdp2-experts": "ddp-experts",
        "fsdp2-mamba": "ddp-mamba",
        "fsdp2-gradients": "ddp-gradients",
        LORA: "ddp-lora",
        f"fsdp2-{SGD}": SGD,
    }.items()
    if sharded in SHARDED
}
pairs = pytest.mark.parametrize(
    ("sharded", "copied"),
    [(sharded, copied) if copied == SGD else slow(sharded, copied) for sharded, copied in PAIRS.items()],
)


@pytest.mark.parametrize("name", some_slow(PAIRS))
def test_the_ranks_hold_shards(two: list[Runs], name: str) -> None:
    parts = [found[name]["own_weights"] for found in two]
    for weight, whole in two[0][name]["weights"].items():
        assert sum(part[weight].numel() for part in parts) == whole.numel()
        assert max(part[weight].numel() for part in parts) < whole.numel()


@pairs
def test_plans_are_those_under_ddp(two: list[Runs], sharded: str, copied: str) -> None:
    for found in two:
        assert found[sharded]["plans"] == two[0][copied]["plans"]
    assert len({str(plan) for plan in two[0][copied]["plans"]}) > 2


@pairs
def test_the_flops_that_are_counted_are_those_under_ddp(two: list[Runs], sharded: str, copied: str) -> None:
    assert two[0][sharded]["coverage"] == two[1][sharded]["coverage"] == two[0][copied]["coverage"] is not None


@pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning")  # PEFT calls transformers by old names
@pytest.mark.parametrize("case", CASES)
def test_blocks_that_are_wrapped_and_sharded_are_counted_as_plain_ones(two: list[Runs], case: str) -> None:
    if case == "LoRA":
        pytest.importorskip("peft")
    expected = counted(case, on_ranks=False)
    assert two[0]["wrapped"][case] == two[1]["wrapped"][case] == expected
    assert expected["covered"] > 0


@pairs
def test_losses_are_those_under_ddp(two: list[Runs], sharded: str, copied: str) -> None:
    assert two[0][sharded]["losses"] == pytest.approx(two[0][copied]["losses"], rel=2e-5)


@pairs
def test_divergences_are_those_under_ddp(two: list[Runs], sharded: str, copied: str) -> None:
    ours, theirs = two[0][sharded]["tables"], two[0][copied]["tables"]
    first, *later = sorted(theirs)
    assert later and list(ours[first]) == list(theirs[first])
    # One element that falls on the other side of a rounding step moves all rows of its layer; how many there are is up
    # to the processor's order of summation.
    for column in (LOSS, WEIGHT):
        assert share_below(1e-5, errors(ours[first], theirs[first], column)) > 0.5
        assert max(errors(ours[first], theirs[first], column)) < 1e-2
    for step in later:
        for column in (LOSS, WEIGHT):
            assert max(errors(ours[step], theirs[step], column)) < 0.1


@pytest.mark.slow
def test_a_frozen_base_has_finite_divergences_and_no_grad_weight(two: list[Runs]) -> None:
    pytest.importorskip("peft")
    tables = two[0][LORA]["tables"]
    assert len(tables) == 2
    for table in tables.values():
        assert {key.split()[1] for key in table} == {"forward", "grad_input", "layer"}
        assert all(math.isfinite(number) for row in table.values() for number in row[: WEIGHT + 1])
    for found in two:
        assert {gemm for row in found[LORA]["plans"][-1].values() for gemm in row} == {"forward", "grad_input"}


@pairs
def test_weights_after_training_are_those_under_ddp(two: list[Runs], sharded: str, copied: str) -> None:
    assert distance(two[0][sharded]["weights"], two[0][copied]["weights"]) < 1e-3


def test_the_clip_factor_is_that_under_ddp(two: list[Runs]) -> None:
    assert len(two[0][SGD]["clip_factors"]) == 2
    assert two[0][f"fsdp2-{SGD}"]["clip_factors"] == pytest.approx(two[0][SGD]["clip_factors"], rel=1e-4)


@pytest.mark.parametrize("name", some_slow([*PAIRS, "fsdp2-with"]))
def test_after_a_probe_all_parameters_are_sharded_again_with_all_hooks_and_nothing_gathered(
    two: list[Runs], name: str
) -> None:
    for found in two:
        assert len(found[name]["sharding"]) == len(found[name]["losses"])
        for sharding in found[name]["sharding"]:
            assert sharding["groups"] >= 3  # two decoder layers and what is around them
            assert sharding["states"] == {"SHARDED"}
            assert sharding["kinds"] == {"DTensor"}
            assert sharding["gathered_bytes"] == 0
            assert sharding["hooks_kept"]
