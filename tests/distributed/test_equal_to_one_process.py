"""Two ranks, each with half of every batch, train and plan as one process with the whole batches.

Whatever the ranks sum up is summed in another order, which is an error of 1e-7 relative. Two things make it larger:
- A number that lies next to a rounding threshold of FP8 or FP4 may be rounded to the other side (a flip): an error of
  1e-3 and more in that element. Flips change gradients and with them, from the next step on, everything.
- Derivatives of the probe are FP32 differences at a relative step of 1e-3: noise of some 1e-4, which is the same in
  both runs only if the directions are, to the bit: under SGD, whose answer does not depend on the gradient.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparing import LOSS, WEIGHT, distance, errors, share_below
from rank_cases import FOLLOWING, SHARED
from rank_runs import Following, some_slow

Runs = dict[str, dict[str, Any]]
PLANNED = [name for name in SHARED if not name.startswith("fp4")]
# Ranks -> of loss divergences, weight divergences and gradients. Thirds are no powers of two: sums and FP8 scales
# differ in their last bits, so that elements flip and directions differ. Which ones depends on the processor: with
# AVX-512 two loss divergences of 0.12% and 1e-8 of the table's largest change by 1.0e-4 and 1.3e-4 of themselves, and
# all others by at most 4e-5 (docs/log, 2026-11-26). With steps of the probe that no weight takes too far, weight
# divergences of one layer change by 1.2% in one of three tables (docs/log, 2026-11-28).
_BOUNDS_OF_FOLLOWING = {2: (1e-5, 1e-3, 1e-5), 3: (1e-3, 2e-2, 1e-2)}
ADAMW = [name for name in PLANNED if not name.startswith("sgd")]
# Until the plan of the second probe is applied. From there on weights of free runs under AdamW have drifted apart;
# `test_ranks_that_begin_every_step_where_one_process_does_find_its_tables` compares the later plans.
STEPS_OF_FIRST_PLAN = 5


@pytest.mark.parametrize("name", some_slow(PLANNED))
def test_all_ranks_have_the_same_plan_and_weights_to_the_bit(two: list[Runs], name: str) -> None:
    first, second = (found[name] for found in two)
    for what in ("plans", "losses", "clip_factors"):
        assert first[what] == second[what]
    for weight in first["own_weights"]:
        assert torch.equal(first["own_weights"][weight], second["own_weights"][weight])
    assert second["history"] == []  # the first one writes


@pytest.mark.parametrize("name", some_slow(PLANNED))
def test_every_plan_from_alike_weights_is_that_of_one_process(one: Runs, two: list[Runs], name: str) -> None:
    steps = STEPS_OF_FIRST_PLAN if name in FOLLOWING else SHARED[name].steps
    assert two[0][name]["plans"][:steps] == one[name]["plans"][:steps]
    ours, theirs = ([(line["step"], line.get("status")) for line in run[name]["history"]] for run in (two[0], one))
    assert ours == theirs
    if SHARED[name].steps > 1:  # and they change
        assert len({str(plan) for plan in one[name]["plans"]}) > 1


@pytest.mark.parametrize("name", some_slow(PLANNED))
def test_the_flops_that_are_counted_are_those_of_one_process(one: Runs, two: list[Runs], name: str) -> None:
    first, second = (found[name]["coverage"] for found in two)
    assert first == second and first["flops"] == first["covered"] > 0
    if name != "ragged":  # whose second rank has shorter sequences than one process
        alone = one[name]["coverage"]
        assert first | {"aside": None} == alone | {"aside": None}
        # In transformers 5.17 each process also multiplies to get the angles of positions, which all rows share.
        assert first["aside"] == pytest.approx(alone["aside"], rel=1e-4)


@pytest.mark.slow
def test_at_least_two_plans_of_a_run_follow_each_other(one: Runs) -> None:
    assert len({str(plan) for plan in one["adamw"]["plans"]}) >= 3
    assert [line["status"] for line in one["adamw"]["history"][1:]] == ["applied"] * 3


@pytest.mark.parametrize("name", some_slow(PLANNED))
def test_losses_are_those_of_one_process(one: Runs, two: list[Runs], name: str) -> None:
    ours, theirs = two[0][name]["losses"], one[name]["losses"]
    # Before anything was rounded otherwise; then up to flips, which Adam multiplies where gradients are nearly zero.
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
    assert ours == pytest.approx(theirs, rel=3e-4 if SHARED[name].eps == 1e-8 else 1e-4 if name in ADAMW else 2e-5)


@pytest.mark.parametrize("name", some_slow(name for name in PLANNED if name != "ragged"))
def test_the_table_of_equal_weights_is_that_of_one_process(one: Runs, two: list[Runs], name: str) -> None:
    ours, theirs = two[0][name]["tables"][1], one[name]["tables"][1]
    assert list(ours) == list(theirs)
    assert two[0][name]["probe_losses"][1] == pytest.approx(one[name]["probe_losses"][1], rel=1e-6)
    on_loss, on_weight = errors(ours, theirs, LOSS), errors(ours, theirs, WEIGHT)
    assert len(on_loss) >= 50 and len(on_weight) >= 50
    assert max(on_loss) < 1e-5
    if name in ADAMW:
        assert max(on_weight) < 5e-3  # other directions, so another noise of the differences
    else:
        assert share_below(1e-5, on_weight) > 0.9
        assert max(on_weight) < 1e-3


@pytest.mark.slow
def test_the_first_table_of_experts_is_that_of_one_process(one: Runs, two: list[Runs]) -> None:
    """After two steps in high precision. The rows of an expert are no whole tiles on each rank, as they are not in one
    process: estimates have tiles as that one has."""
    ours, theirs = two[0]["ddp-experts"]["tables"][3], one["ddp-experts"]["tables"][3]
    assert list(ours) == list(theirs)
    for column in (LOSS, WEIGHT):
        found = errors(ours, theirs, column)
        assert share_below(1e-4, found) > 0.5 and max(found) < 1e-2


def test_later_tables_are_those_of_one_process_up_to_flips_and_noise(one: Runs, two: list[Runs]) -> None:
    """SGD's weights differ no more than their gradients do."""
    name = "sgd-gemm-accumulated-clipped"
    assert len(one[name]["tables"]) > 1
    for step, theirs in one[name]["tables"].items():
        for column in (LOSS, WEIGHT):
            assert max(errors(two[0][name]["tables"][step], theirs, column)) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLLOWING)
def test_ranks_that_begin_every_step_where_one_process_does_find_its_tables(
    one: Runs, following: Following, name: str
) -> None:
    """Under AdamW free runs drift apart, because it makes whole steps of what flips change in small gradients: weights
    differ by up to 4e-5 of their norm after eight steps. Then a weight next to a rounding threshold is rounded to the
    other side. A loss divergence is a sum of squares over tokens of which one may hold 99%, so one such flip changed it
    by 0.7 of itself. One process differs as much from itself once its first weights are changed by 1e-7 (docs/log,
    2026-11-23). From equal weights and moments, what is left is made by the ranks.
    """
    ours, theirs = following.runs[name], one[name]
    assert len({str(plan) for plan in theirs["plans"]}) >= 3
    assert ours["plans"] == theirs["plans"]
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
    assert set(ours["tables"]) == set(theirs["tables"]) == {1, 5, 9}
    on_loss, on_weight, on_gradients = _BOUNDS_OF_FOLLOWING[following.ranks]
    for step, table in theirs["tables"].items():
        found, largest = ours["tables"][step], max(row[LOSS] for row in table.values())
        weighty = {key: row for key, row in table.items() if row[LOSS] > 0.01 * largest}
        assert max(errors(found, table, LOSS)) < on_loss
        assert max(errors({key: found[key] for key in weighty}, weighty, LOSS)) < min(on_loss, 1e-4)
        assert max(errors(ours["tables"][step], table, WEIGHT)) < on_weight
    assert distance(ours["gradients"], theirs["gradients"]) < on_gradients


@pytest.mark.slow
def test_ranks_with_shorter_sequences_find_what_one_process_finds_with_padding(one: Runs, two: list[Runs]) -> None:
    ours, theirs = two[0]["ragged"], one["ragged"]
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
    assert ours["probe_losses"][1] == pytest.approx(theirs["probe_losses"][1], rel=1e-6)
    table, expected = ours["tables"][1], theirs["tables"][1]
    assert max(errors(table, expected, LOSS)) < 1e-4  # padding has no labels
    # Padding is part of the tiles along the tokens, in which grad_weight is rounded.
    for gemm, bound in (("forward", 0.02), ("grad_input", 0.2), ("grad_weight", 2)):
        rows = {key: row for key, row in expected.items() if f" {gemm} " in key}
        assert max(errors({key: table[key] for key in rows}, rows, WEIGHT)) < bound
    assert distance(ours["gradients"], theirs["gradients"]) < 1e-5


def test_ranks_clip_by_the_factor_of_one_process(one: Runs, two: list[Runs]) -> None:
    name = "sgd-gemm-accumulated-clipped"
    ours, theirs = two[0][name], one[name]
    assert len(ours["clip_factors"]) == 2 and max(ours["clip_factors"]) < 0.9
    assert ours["clip_factors"] == pytest.approx(theirs["clip_factors"], rel=1e-4)
    expected = [SHARED[name].clip / theirs["norms"][step - 1] for step in theirs["tables"]]
    assert sorted(ours["clip_factors"]) == pytest.approx(sorted(expected), rel=1e-3)


def test_under_fp4_the_ranks_draw_together_the_random_numbers_of_one_process(one: Runs, two: list[Runs]) -> None:
    ours, theirs = two[0]["fp4"]["gradients"], one["fp4"]["gradients"]
    assert distance(ours, theirs) < 1e-5
    # Other random numbers give other gradients.
    assert distance(one["fp4-seed-1"]["gradients"], theirs) > 1e-2
