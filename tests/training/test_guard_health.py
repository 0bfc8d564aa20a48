"""The rule that separates spikes from healthy steps, and the count of alarms."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from statistics import fmean, pstdev

import pytest

from snip_hf.json_io import from_json
from snip_hf.training import guard
from snip_hf.training.guard import Finding, Health

PATIENCE = 5
HEALTHY = [2.0, 2.5, 1.5, 2.0]


@pytest.fixture(autouse=True)
def eight_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "WINDOW", 8)


def look(health: Health, step: int, **figures: float | None) -> Finding | None:
    return health.look(step, {name.replace("_", " "): value for name, value in figures.items()}, PATIENCE)


def fed(values: list[float]) -> Health:
    health = Health()
    for step, value in enumerate(values, 1):
        assert look(health, step, loss=value) is None
    return health


def test_the_limit_is_the_mean_and_six_deviations_of_the_last_healthy_values() -> None:
    assert fed(HEALTHY[:3]).limit("loss", PATIENCE) is None
    assert fed(HEALTHY).limit("loss", PATIENCE) == pytest.approx(fmean(HEALTHY) + 6 * pstdev(HEALTHY))
    # The window has eight values and forgets earlier ones; the deviation is at least a tenth of the mean.
    assert fed([*HEALTHY, *[3.0] * 8]).limit("loss", PATIENCE) == pytest.approx(3.0 * 1.6)
    assert fed([-2.0] * 4).limit("loss", PATIENCE) == pytest.approx(-2.0 + 6 * 0.2)


def test_a_spike_is_found_and_does_not_count_for_later_ones() -> None:
    health = fed(HEALTHY)
    limit = health.limit("loss", PATIENCE)
    assert limit is not None
    assert look(health, 5, loss=limit) is None
    found = look(health, 6, loss=9.0, gradient_norm=1.0)
    assert found is not None and (found.figure, found.value, found.is_finite) == ("loss", 9.0, True)
    assert 9.0 not in health.recent["loss"] and list(health.recent["gradient norm"]) == [1.0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_found_from_the_first_step_on(value: float) -> None:
    health = Health()
    found = look(health, 1, loss=2.0, gradient_norm=value)
    assert found is not None and not found.is_finite and found.figure == "gradient norm"
    assert found.reason == f"The gradient norm is {value}"
    # Nothing of such a step counts.
    assert health.recent == {}


def test_raised_formats_have_their_time_in_which_only_what_is_not_finite_is_an_alarm() -> None:
    health = fed(HEALTHY)
    assert look(health, 5, loss=9.0) is not None
    health.note_alarm(5)
    # A value among them that is healthy, so that they do not last.
    found = [look(health, step, loss=2.0 if step == 8 else 9.0) is None for step in range(6, 12)]
    assert found == [True] * 5 + [False]
    assert look(health, 8, loss=math.nan) is not None


def test_spikes_that_last_as_long_as_the_patience_are_the_level() -> None:
    health = fed(HEALTHY)
    assert look(health, 5, loss=9.0) is not None
    health.note_alarm(5)
    assert all(look(health, step, loss=9.0) is None for step in range(6, 20))
    assert health.limit("loss", PATIENCE) == pytest.approx(9.0 * 1.6)
    # A later rise is an alarm of its own; what is not finite stays one.
    assert look(health, 20, loss=20.0) is not None and look(health, 21, loss=math.nan) is not None


def test_alarms_far_apart_are_no_failure() -> None:
    health = fed(HEALTHY)
    health.note_alarm(5)
    health.note_calm(15, PATIENCE)
    health.note_alarm(15)
    assert health.failures == 2
    health.note_calm(25, PATIENCE)
    assert health.failures == 2
    health.note_calm(26, PATIENCE)
    assert (health.failures, health.alarmed) == (0, None)


def test_figures_that_nobody_knows_are_left_out() -> None:
    health = Health()
    assert look(health, 1, loss=None, gradient_norm=1.0) is None
    assert list(health.recent) == ["gradient norm"]


def test_the_health_goes_through_a_state() -> None:
    health = fed(HEALTHY)
    look(health, 5, loss=9.0)
    assert health.risen == {"loss": [9.0]}
    health.note_alarm(5)
    assert from_json(Health, json.loads(json.dumps(asdict(health)))) == health
