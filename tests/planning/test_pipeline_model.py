"""Predicted times match a simulated pipeline."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from two_stages import measured, plan

from snip_hf.planning.pipeline_model import PipelineTimes, StageTimes, pipeline_times


def pipeline(times: Sequence[float], micro_batches: int) -> PipelineTimes:
    stages = tuple(StageTimes(time, time) for time in times)
    return PipelineTimes(stages, micro_batches, measured=True)


def simulated(times: Sequence[float], micro_batches: int, schedule: str) -> float:
    """Returns the end of a step's last pass, if forward is a third of each stage's time and all else is free."""
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
    assert [stage.time for stage in times.stages] == pytest.approx([0.35, 0.3])
    assert [stage.relative_time for stage in times.stages] == pytest.approx([0.7, 0.6])
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
