"""Which numbers do trackers get of an event, and by which names?"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from events import counted_event, refresh_event, small_plan, start_event

from snip_hf.integrations.trackers import quantities_in_force, quantities_of, step_of
from snip_hf.records.events import Alarm, Coverage, Refresh, Retarget

MEASURED: dict[str, Any] = {
    "loss": 3.5,
    "divergence": {"fp8": {"loss": 1e-7, "weight": 0.1}, "fp4": {"loss": 1e-5, "weight": None}},
    "memory_mib": {"predicted": 10.0, "measured": None},
    "seconds": {"probe": 1.5, "solver": 0.5, "waited": 0.0},
}


def test_a_new_plan_has_what_was_probed_decided_and_spent() -> None:
    event = refresh_event(
        100,
        applied_step=120,
        decided_step=120,
        reason=None,
        changes={"a:forward": ("fp8", "fp4")},
        layers_changed=1,
        objective=0.25,
        bound=0.25,
        gap=0.0,
        solver="cbc",
        **MEASURED,
    )
    assert step_of(event) == 120
    assert quantities_of(event) == {
        "fp4_share": 1.0,
        "snip/applied": 1.0,
        "snip/probed_step": 100,
        "snip/probed_loss": 3.5,
        "snip/layers_changed": 1,
        "snip/gemms_changed": 1,
        "snip/objective": 0.25,
        "snip/gap": 0.0,
        "snip/loss_divergence_fp8": 1e-7,
        "snip/weight_divergence_fp8": 0.1,
        "snip/loss_divergence_fp4": 1e-5,
        "snip/probe_seconds": 1.5,
        "snip/solver_seconds": 0.5,
        "snip/waited_seconds": 0.0,
        "snip/memory_mib_predicted": 10.0,
    }


def test_a_refresh_that_kept_the_plan_says_so() -> None:
    found = quantities_of(refresh_event(100))
    assert found == {
        "fp4_share": 1.0,
        "snip/applied": 0.0,
        "snip/probed_step": 100,
        "snip/layers_changed": 0,
        "snip/gemms_changed": 0,
    }


def test_what_a_backend_counts_survives_the_history_and_has_its_own_names() -> None:
    event = refresh_event(100, kernels={"saturated_share": 0.25, "saturated_operands": 3})
    again = Refresh.from_record(event.to_record())
    assert again == event
    found = quantities_of(again)
    assert (found["snip/saturated_share"], found["snip/saturated_operands"]) == (0.25, 3)


def test_stages_have_a_share_each_where_there_are_several() -> None:
    found = quantities_of(refresh_event(100, stage_fp4_fractions=(0.75, 0.8)))
    assert (found["fp4_share_of_stage_0"], found["fp4_share_of_stage_1"]) == (0.75, 0.8)
    assert not any("stage" in name for name in quantities_of(refresh_event(100, stage_fp4_fractions=(0.75,))))


def test_numbers_that_are_not_finite_are_left_out() -> None:
    found = quantities_of(refresh_event(100, loss=math.nan, linear_speedup=math.inf))
    assert "snip/probed_loss" not in found and "snip/linear_speedup" not in found


def test_an_alarm_has_its_figure_and_another_target_its_number() -> None:
    alarm = Alarm(step=7, figure="loss", value=9.5, limit=3.0, action="noted", reason="a spike", failures=2)
    assert quantities_of(alarm) == {
        "snip/guard_failures": 2.0,
        "snip/guard_value": 9.5,
        "snip/guard_limit": 3.0,
        "snip/guard_left_out_steps": 0.0,
    }
    assert quantities_of(replace(alarm, value=None, fp4_fraction=0.5))["fp4_share"] == 0.5
    other = Retarget(step=9, fields={"target_fp4_fraction": (0.75, 0.5), "rates": (None, "b200")})
    assert (step_of(other), quantities_of(other)) == (9, {"snip/new_target_fp4_fraction": 0.5})


def test_the_start_and_a_count_have_the_shares() -> None:
    assert quantities_of(start_event()) == {"fp4_share": 1.0}
    assert quantities_of(counted_event(1)) == {"fp4_coverage": 0.4, "snip/gemms_changed_by_tokens": 0}


def test_the_share_of_the_model_is_that_of_the_plan_times_coverage() -> None:
    plan = small_plan()
    assert quantities_in_force(plan, None) == {"fp4_share": 1.0}
    assert quantities_in_force(plan, Coverage(200.0, 80.0, [], {})) == {
        "fp4_share": 1.0,
        "fp4_coverage": 0.4,
        "fp4_share_of_model": 0.4,
    }
