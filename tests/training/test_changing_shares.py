"""An FP4 share that changes during a run: new plans, records, and resumed runs."""

from __future__ import annotations

import copy
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import fp4_config
from own_loop import Loop
from rich.console import Console
from tiny_runs import SCHEDULE, history

from snip_hf import PrecisionPlan, SnipConfig
from snip_hf.estimation.divergence import divergences_at
from snip_hf.integrations.model_card import trained_section
from snip_hf.policies.registry import POLICIES
from snip_hf.records.load import load_run
from snip_hf.reporting.run_report import print_run
from snip_hf.training import refresh
from snip_hf.training.schedule import Schedule

SHARES = ((1, 0.25), (5, 0.75))


def refreshes(folder: Path) -> list[tuple[int, int | None, float | None]]:
    return [(line["step"], line["applied_step"], line.get("target_fp4_fraction")) for line in history(folder)[1:]]


def probed_steps(config: SnipConfig, until: int, max_steps: int | None = None) -> list[int]:
    """Steps that a schedule refreshes at, where every plan is applied."""
    schedule = Schedule(config, max_steps, None)  # type: ignore[arg-type]
    found: list[int] = []
    for step in range(1, until + 1):
        made = found[-1] if found else 0
        is_planned = made > 0 and (
            step <= made + config.apply_delay or config.target_at(made) == config.target_at(step)
        )
        if schedule.refreshes(step, is_planned):
            schedule.note_probe(step)
            found.append(step)
    return found


# ------------------------------------------------------------------------------------------------------------- schedule


@pytest.mark.parametrize(
    ("shares", "options", "expected"),
    [
        # Between two refreshes; the next one is counted from it.
        (((1, 0.9), (15, 0.5)), {}, [10, 15, 25, 35]),
        # At a step that refreshes anyway.
        (((1, 0.9), (20, 0.5)), {}, [10, 20, 30, 40]),
        # While the plan of step 10 waits for its application after step 13.
        (((1, 0.9), (12, 0.5)), {}, [10, 13, 23, 33]),
        # Before the first refresh, and at it.
        (((1, 0.9), (4, 0.5)), {}, [10, 20, 30, 40]),
        (((1, 0.9), (10, 0.5)), {}, [10, 20, 30, 40]),
        # Two changes while one plan waits: the last one counts. One that is taken back counts for nothing.
        (((1, 0.9), (11, 0.5), (12, 0.4)), {}, [10, 13, 23, 33]),
        (((1, 0.9), (11, 0.5), (12, 0.9)), {}, [10, 20, 30, 40]),
        # A step that names the same share once more.
        (((1, 0.9), (15, 0.9)), {}, [10, 20, 30, 40]),
        # Without regular refreshes.
        (((1, 0.9), (15, 0.5), (30, 0.4)), {"refresh_every": None}, [10, 15, 30]),
        # Applied at once.
        (((1, 0.9), (11, 0.5), (12, 0.4)), {"apply_delay": 0}, [10, 11, 12, 22, 32]),
    ],
)
def test_a_step_with_a_new_share_is_refreshed(shares: Any, options: dict[str, Any], expected: list[int]) -> None:
    values = {"first_refresh": 10, "refresh_every": 10, "apply_delay": 3, **options}
    assert probed_steps(fp4_config(target_fp4_fraction=shares, **values), 40) == expected


def test_a_change_whose_plan_would_come_after_the_last_step_is_left_out() -> None:
    config = fp4_config(target_fp4_fraction=((1, 0.9), (15, 0.5)), first_refresh=10, refresh_every=20, apply_delay=3)
    assert probed_steps(config, 20, max_steps=18) == [10, 15]
    assert probed_steps(config, 20, max_steps=17) == [10]


@pytest.mark.parametrize(
    ("done", "last_probe", "expected"),
    [
        (15, 10, [30, 50, 70]),  # to more steps, whose first refresh would be step 100
        (129, None, [130, 150, 170]),  # trained without SNIP beyond the first refresh
    ],
)
def test_a_resumed_run_waits_for_no_first_refresh(done: int, last_probe: int | None, expected: list[int]) -> None:
    schedule = Schedule(fp4_config(first_refresh=None, refresh_every=20, apply_delay=1), 1000, None)  # type: ignore[arg-type]
    schedule.last_probe = last_probe
    found = []
    for step in range(done + 1, expected[-1] + 1):
        if schedule.refreshes(step, is_planned=schedule.last_probe is not None):
            schedule.note_probe(step)
            found.append(step)
    assert found == expected


# ----------------------------------------------------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Loop, Path]:
    """Refreshes at steps 2 (share 1/4), 5 (3/4) and 9, each applied two steps later."""
    folder = tmp_path_factory.mktemp("run")
    loop = Loop(fp4_config(**SCHEDULE, target_fp4_fraction=SHARES, granularity="gemm"), folder).run(8)
    assert loop.controller is not None
    loop.controller.close()
    return loop, folder


def test_a_plan_has_the_share_of_the_step_that_was_probed(run: tuple[Loop, Path]) -> None:
    _, folder = run
    assert refreshes(folder) == [(2, 4, 0.25), (5, 7, 0.75)]
    first, second = history(folder)[1:]
    assert 0.25 <= first["fp4_fraction"] < 0.3
    assert 0.75 <= second["fp4_fraction"] < 0.8
    plan = PrecisionPlan.load(folder / "snip" / "plan.json")
    assert (plan.provenance.step, plan.provenance.target_fp4_fraction) == (5, 0.75)
    assert plan.provenance.config["target_fp4_fraction"] == [[1, 0.25], [5, 0.75]]  # type: ignore[index]
    assert [event.target_fp4_fraction for event in load_run(folder).refreshes] == [0.25, 0.75]


def test_the_report_says_the_shares_their_mean_and_why_the_last_plan_is_as_it_is(run: tuple[Loop, Path]) -> None:
    _, folder = run
    found = load_run(folder)
    shares = [refresh.fp4_fraction for refresh in found.refreshes]
    # Known up to step 7: FP8 up to step 4, the first plan for three steps.
    assert (found.last_step, found.mean_fp4_fraction) == (7, pytest.approx(shares[0] * 3 / 7))
    printed = io.StringIO()
    print_run(found, Console(file=printed, width=120))
    text = " ".join(printed.getvalue().split())
    assert "target at least 25.0% from step 1, 75.0% from step 5 of the linears' FLOPs in FP4, attained" in text
    assert (
        f"Mean up to step 7, the last in the files of the run: {found.mean_fp4_fraction:.4f} of the linear FLOPs in "
        f"FP4, with a target of {(4 * 0.25 + 3 * 0.75) / 7:.4f}."
    ) in text
    assert "Why (probe of step 5;" in text
    card = trained_section(PrecisionPlan.load(folder / "snip" / "plan.json"), None, "emulated", None)
    assert "at least 25.0% from step 1, 75.0% from step 5 of the linears' FLOPs in FP4" in card


def test_a_resumed_run_follows_the_same_shares(run: tuple[Loop, Path], tmp_path: Path) -> None:
    """While the plan after the change waits."""
    saved_at = 6
    config = fp4_config(**SCHEDULE, target_fp4_fraction=SHARES, granularity="gemm")
    first = Loop(config).run(saved_at)
    assert first.controller is not None
    state = json.loads(json.dumps(first.controller.state_dict()))
    generator = torch.get_rng_state()
    second = Loop(config, tmp_path)
    assert second.controller is not None
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    second.controller.load_state_dict(state)
    second.step = saved_at
    torch.set_rng_state(generator)
    second.run(8)
    first.controller.close()
    second.controller.close()
    assert second.losses == run[0].losses[saved_at:]
    assert second.formats() == run[0].formats()


def test_a_rule_makes_its_plan_again_without_a_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="snip_hf")
    monkeypatch.setattr(refresh, "divergences_at", lambda *_, **__: pytest.fail("probed"))
    shares = ((1, 0.25), (3, 0.75), (5, 0.5))
    config = fp4_config(policy="last-15-percent", granularity="gemm", target_fp4_fraction=shares)
    loop = Loop(config, tmp_path, dropout=0.0)
    assert loop.controller is not None
    attained = []
    for step in range(1, 7):
        loop.run(step)
        attained.append(loop.controller.plan.provenance.target_fp4_fraction)
        assert loop.controller.plan.fp4_fraction >= attained[-1] - 1e-9
        assert (
            loop.controller.plan.formats_of("model.layers.0.self_attn.q_proj")
            == loop.formats()["model.layers.0.self_attn.q_proj"]
        )
    loop.controller.close()
    # In force from the step after the one that names the share.
    assert attained == [0.25, 0.25, 0.75, 0.75, 0.5, 0.5]
    assert refreshes(tmp_path) == [(3, 3, 0.75), (5, 5, 0.5)]
    assert PrecisionPlan.load(tmp_path / "snip" / "plan.json").provenance.step == 5
    assert "plan for the share of step 5 applied" in caplog.text
    printed = io.StringIO()
    print_run(load_run(tmp_path), Console(file=printed, width=120))
    assert "New plans" in printed.getvalue() and "Refreshes" not in printed.getvalue()
    fraction = [refresh.fp4_fraction for refresh in load_run(tmp_path).refreshes]
    assert fraction[0] > fraction[1] >= 0.5


def test_the_report_of_a_policy_without_a_target_has_no_mean_of_it(tmp_path: Path) -> None:
    loop = Loop(fp4_config(policy="uniform-fp4", target_fp4_fraction=SHARES), tmp_path, dropout=0.0).run(2)
    assert loop.controller is not None
    loop.controller.close()
    found = replace(load_run(tmp_path), losses={2: {"loss": 1.0}})
    printed = io.StringIO()
    print_run(found, Console(file=printed, width=120))
    assert "no target" in printed.getvalue() and "Mean over" not in printed.getvalue()


def test_a_rule_that_fails_keeps_its_plan_and_is_not_asked_again_for_the_same_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = fp4_config(policy="last-15-percent", target_fp4_fraction=((1, 0.25), (2, 0.75)))
    loop = Loop(config, tmp_path, dropout=0.0).run(1)
    assert loop.controller is not None
    before = loop.formats()

    def fail(_: Any) -> Any:
        raise ValueError("no plan today")

    object.__setattr__(POLICIES["last-15-percent"], "assign", (assign := POLICIES["last-15-percent"].assign) and fail)
    try:
        loop.run(4)
    finally:
        object.__setattr__(POLICIES["last-15-percent"], "assign", assign)
    assert loop.formats() == before
    loop.controller.close()
    assert caplog.text.count("no plan today") == 1
    assert refreshes(tmp_path) == [(2, None, 0.75)]


def test_a_failed_refresh_at_a_new_share_is_tried_again_where_there_are_no_regular_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def fail_once(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["step"])
        if kwargs["step"] == 5:
            raise ValueError("no luck")
        return divergences_at(*args, **kwargs)

    monkeypatch.setattr(refresh, "divergences_at", fail_once)
    values = {**SCHEDULE, "refresh_every": None, "target_fp4_fraction": SHARES}
    loop = Loop(fp4_config(**values), tmp_path).run(9)
    assert loop.controller is not None
    loop.controller.close()
    # first_refresh=2 steps later.
    assert calls == [2, 5, 7]
    assert [line[:2] for line in refreshes(tmp_path)] == [(2, 4), (5, None), (7, 9)]
