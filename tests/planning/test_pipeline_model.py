"""Are predicted times those of a simulated pipeline, and is the plan with one global constraint the best there is?"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

import pytest
from two_stages import ERRORS, FLOPS, STAGES, measured, plan, table

from snip_hf.numerics.gemms import GEMMS
from snip_hf.planning.pipeline_model import PipelineTimes, StageTimes, compare_constraints, pipeline_times
from snip_hf.planning.plan import PlanProvenance, PrecisionPlan


def pipeline(times: Sequence[float], micro_batches: int) -> PipelineTimes:
    stages = tuple(StageTimes((str(index),), 0.0, time, time) for index, time in enumerate(times))
    return PipelineTimes(stages, 0.0, micro_batches, measured=True)


def simulated(times: Sequence[float], micro_batches: int, schedule: str) -> float:
    """When the last of a step's passes ends, if forward is a third of each stage's time and nothing else takes any."""
    last, count = len(times) - 1, micro_batches
    orders = []
    for stage in range(last + 1):
        ahead = count if schedule == "gpipe" else min(count, last + 1 - stage)
        order = [("forward", index) for index in range(ahead)]
        for index in range(count):
            order.append(("backward", index))
            if ahead + index < count:
                order.append(("forward", ahead + index))
        orders.append(order)
    ended: dict[tuple[str, int, int], float] = {}
    free = [0.0] * (last + 1)
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                which, index = order[0]
                if which == "forward":
                    ready = ended.get((which, index, stage - 1)) if stage > 0 else 0.0
                else:
                    ready = ended.get((which, index, stage + 1) if stage < last else ("forward", index, stage))
                if ready is None:
                    break
                length = times[stage] * (1 if which == "forward" else 2) / 3
                free[stage] = ended[which, index, stage] = max(ready, free[stage]) + length
                order.pop(0)
    return max(free)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 1), (2, 8), (4, 4), (4, 16), (5, 7)])
def test_equal_stages_take_what_both_simulated_schedules_take(schedule: str, stages: int, micro_batches: int) -> None:
    expected = simulated([3.0] * stages, micro_batches, schedule)
    times = pipeline([3.0] * stages, micro_batches)
    assert times.step_time == pytest.approx(expected)
    assert times.bubble == pytest.approx(1 - micro_batches * 3.0 / expected, abs=1e-12)
    # The textbook's figure.
    assert times.bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1), abs=1e-12)


def test_unequal_stages_take_what_simulated_gpipe_takes_and_simulated_1f1b_takes_no_longer() -> None:
    rng = random.Random(0)
    for _ in range(200):
        stages = rng.randint(2, 6)
        micro_batches = stages * rng.choice((1, 2, 4))
        durations = [rng.uniform(0.5, 1.0) for _ in range(stages)]
        predicted = pipeline(durations, micro_batches).step_time
        assert simulated(durations, micro_batches, "gpipe") == pytest.approx(predicted)
        assert 0.8 * predicted <= simulated(durations, micro_batches, "1f1b") <= predicted * (1 + 1e-12)


def test_stages_of_scattered_layers_get_their_own_shares_and_times() -> None:
    times = pipeline_times(plan("ad"), 3)
    # FLOPs of stage 0: 30 in FP4 and 20 in FP8; of stage 1: 40 and 10. FP4 takes half the time, the unit is all in FP8.
    assert [stage.layers for stage in times.stages] == [("a", "c"), ("b", "d")]
    assert [stage.fp4_fraction for stage in times.stages] == pytest.approx([0.6, 0.8])
    assert [stage.time for stage in times.stages] == pytest.approx([0.35, 0.3])
    assert [stage.relative_time for stage in times.stages] == pytest.approx([0.7, 0.6])
    assert times.fp4_fraction == pytest.approx(0.7)
    assert times.work == pytest.approx(0.65)
    assert times.reference_work == pytest.approx(1.0)
    assert not times.measured
    assert times.step_time == pytest.approx(2 * 0.35 + 0.65)
    assert times.bubble == pytest.approx(1 - 3 * 0.325 / 1.35)


def test_measured_times_are_used_where_the_plan_has_them() -> None:
    # b has no grad_weight: stage 0 takes 3 * (0.8 * 1 + 2) s, stage 1 2 * 5 + 3 * 0.8 * 4 s.
    cost = measured({"a": 1.0, "b": 5.0, "c": 2.0, "d": 4.0})
    times = pipeline_times(plan("ad", measured=cost))
    assert times.measured
    assert times.micro_batches == 8
    assert [stage.time for stage in times.stages] == pytest.approx([8.4, 19.6])
    assert [stage.reference_time for stage in times.stages] == pytest.approx([9.0, 22.0])


def test_fewer_than_one_micro_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^micro_batches is 0, expected at least 1"):
        pipeline_times(plan("a"), 0)


def best(errors: Mapping[str, float], groups: Sequence[tuple[str, ...]], target: float) -> tuple[float, set[str]]:
    """Least sum of errors, and its layers in FP4, over all 16 choices with at least the target share in each group."""
    size = {layer: sum(FLOPS[layer].values()) for layer in FLOPS}
    sums = {}
    for count in range(5):
        for chosen in itertools.combinations(FLOPS, count):
            shares = [sum(size[x] for x in group if x in chosen) / sum(size[x] for x in group) for group in groups]
            if min(shares) >= target - 1e-12:
                sums[chosen] = sum(errors[x] for x in chosen)
    chosen = min(sums, key=lambda choice: sums[choice])
    return sums[chosen], set(chosen)


def test_what_the_constraints_of_two_stages_save_is_what_hand_computation_gives() -> None:
    # At 20% in each stage: a or c, and b or d. c is 0.4 of its stage and costs 2, a 0.6 and 1; b is 0.2 and costs 5.
    # At 20% of all 100 FLOPs: a alone, for 1. Both are the least of all 16 plans.
    assert best(ERRORS, STAGES, 0.2) == (6.0, {"a", "b"})
    assert best(ERRORS, [tuple(FLOPS)], 0.2) == (1.0, {"a"})
    result = compare_constraints(plan("ab"), table(ERRORS), 4)
    assert (result.per_stage_objective, result.single_objective) == pytest.approx((6.0, 1.0))
    assert [stage.fp4_fraction for stage in result.single.stages] == pytest.approx([0.6, 0.0])
    # Times 0.35 and 0.45 against 0.35 and 0.5.
    assert result.per_stage.step_time == pytest.approx(3 * 0.45 + 0.8)
    assert result.single.step_time == pytest.approx(3 * 0.5 + 0.85)
    assert result.time_saved == pytest.approx(1 - 2.15 / 2.35)
    assert result.bubble_saved == pytest.approx((1 - 4 * 0.425 / 2.35) - (1 - 4 * 0.4 / 2.15))


@pytest.mark.parametrize("seed", range(4))
def test_the_other_plan_is_the_best_of_all_under_one_constraint(seed: int) -> None:
    rng = random.Random(seed)
    errors = {layer: rng.uniform(1.0, 10.0) for layer in FLOPS}
    target = rng.choice((0.3, 0.5, 0.7))
    per_stage, in_fp4 = best(errors, STAGES, target)
    result = compare_constraints(plan("".join(in_fp4), {"target_fp4_fraction": target}), table(errors))
    objective, others = best(errors, [tuple(FLOPS)], target)
    assert result.per_stage_objective == pytest.approx(per_stage)
    assert result.single_objective == pytest.approx(objective)
    assert result.single == pipeline_times(plan("".join(others)))


def test_the_gemms_of_a_layer_are_chosen_apart_at_granularity_gemm() -> None:
    # Per unit of cost a's GEMMs have 10 FLOPs each, and 20% of all 100 FLOPs are the least two of them.
    errors = {"a": 1.0, "b": 9.0, "c": 9.0, "d": 9.0}
    start = plan("ab", {"granularity": "gemm"})
    result = compare_constraints(start, table(errors, GEMMS))
    assert result.single_objective == pytest.approx(2.0)
    assert result.single.stages[0].fp4_fraction == pytest.approx(0.4)
    # b is frozen and has two.
    assert result.per_stage_objective == pytest.approx(3 * 1 + 2 * 9)


def test_the_global_target_is_a_share_of_the_measured_time_where_that_was_the_target() -> None:
    # Times in FP8: 30, 2, 3 and 3 s of 38 s. c alone has a fifth of the FLOPs, and 3 / 38 of the time.
    errors = {"a": 5.0, "b": 9.0, "c": 1.0, "d": 9.0}
    by_time = plan("ab", {"budget": "measured"}, measured=measured({"a": 10.0, "b": 1.0, "c": 1.0, "d": 1.0}))
    assert compare_constraints(plan("ab"), table(errors)).single_objective == pytest.approx(1.0)
    assert compare_constraints(by_time, table(errors)).single_objective == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (plan("ab", stages=(tuple(FLOPS),)), "there is one stage, whose constraint is the global one."),
        (plan("ab", provenance=PlanProvenance(step=1, policy="snip")), "the plan does not say under which config"),
        (plan("ab", {"policy": "layer-type"}), "policy 'layer-type' decides without divergences."),
        (plan("ab", {"fixed_plan": "plan.json"}), "a plan file was held without divergences."),
        (plan("ab", {"budget": "measured"}), "the times that the plan was decided by are not known"),
        (PrecisionPlan.uniform(FLOPS, "bf16", STAGES, plan("a").provenance), "the plan was not decided by layer "),
    ],
)
def test_a_plan_without_a_problem_to_solve_again_is_refused_with_the_reason(made: PrecisionPlan, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        compare_constraints(made, table(ERRORS))
    assert str(caught.value).startswith(message)


def test_divergences_of_another_model_are_refused_by_layer() -> None:
    with pytest.raises(ValueError, match=r"^the divergences are of another model: the plan has no layer 'e'"):
        compare_constraints(plan("ab"), table({**ERRORS, "e": 1.0}))
