"""A budget over the forward GEMMs only: all policies meet it, and backward GEMMs run in the least precise format."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from configs import fp4_config
from own_loop import Loop
from policy_settings import (
    LISTS,
    RULES,
    TIES,
    assert_complete,
    decided,
    llama_flops,
    plain_flops,
    plan_of,
    random_table,
    setting_of,
)
from rich.console import Console
from tiny_runs import SCHEDULE, history

from snip_hf import PrecisionPlan
from snip_hf.costs.timing import Machine, MeasuredCost
from snip_hf.integrations.model_card import trained_section
from snip_hf.integrations.trackers import quantities_in_force
from snip_hf.numerics.gemms import GEMMS
from snip_hf.planning.plan import forward_shares
from snip_hf.planning.program import problem
from snip_hf.policies.setting import Setting
from snip_hf.records.load import load_run
from snip_hf.reporting.figures import write_figures
from snip_hf.reporting.run_report import print_run, refresh_table

PROBED = ("snip", "min-abs-err", "min-rel-err", "fisher", "hessian-trace", "greedy", "kl")
FORWARD = {"granularity": "gemm", "decides": "forward"}


@pytest.mark.parametrize("policy", [*RULES, *PROBED])
@pytest.mark.parametrize("formats", [("fp4", "fp8"), ("mxfp4", "mxfp8", "bf16")], ids=["two", "three"])
@pytest.mark.parametrize(("stages", "ties"), [(None, ()), (2, TIES), (LISTS, ())], ids=["one", "two-tied", "lists"])
def test_every_stage_meets_the_share_of_its_forward_gemms_and_all_others_are_least_precise(
    policy: str, formats: tuple[str, ...], stages: Any, ties: Any
) -> None:
    for target in (0.0, 0.5, 0.8, 1.0):
        setting = setting_of(
            llama_flops(),
            policy=policy,
            formats=formats,
            stages=stages,
            ties=ties,
            target_fp4_fraction=target,
            solver="greedy",
            **FORWARD,
        )
        assignment = decided(setting)
        assert_complete(setting, assignment)
        backward = {assignment[layer][gemm] for layer in setting.flops for gemm in GEMMS[1:]}
        assert backward == {formats[0]}
        shares = forward_shares(plan_of(setting, assignment))
        assert shares is not None
        assert min(shares.stage_fp4_fractions) >= target - 1e-9
        for names in ties:
            for layer, row in assignment.items():
                parent, _, last = layer.rpartition(".")
                assert last not in names or all(assignment[f"{parent}.{name}"] == row for name in names)


@pytest.mark.parametrize("policy", PROBED)
def test_the_program_chooses_forward_formats_by_their_shares_of_the_forward_flops(policy: str) -> None:
    setting = setting_of(plain_flops(4.0, 2.0, 1.0, 1.0), policy=policy, target_fp4_fraction=0.5, **FORWARD)
    program = problem(setting, random_table(setting))
    assert [group["name"] for group in program["groups"]] == [f"layers.{index}.fc:forward" for index in range(4)]
    assert [group["options"][-1]["weight"] for group in program["groups"]] == [0.5, 0.25, 0.125, 0.125]


def test_a_frozen_weight_has_one_backward_gemm_less_and_the_budget_counts_its_forward_one() -> None:
    flops = plain_flops(1.0, 1.0)
    del flops["layers.0.fc"]["grad_weight"]
    setting = setting_of(flops, policy="last-15-percent", target_fp4_fraction=0.5, **FORWARD)
    assert decided(setting) == {
        "layers.0.fc": {"forward": "fp4", "grad_input": "fp4"},
        "layers.1.fc": {"forward": "fp8", "grad_input": "fp4", "grad_weight": "fp4"},
    }


def test_with_measured_time_the_share_is_one_of_the_forward_gemms_time() -> None:
    """By FLOPs the first layer is half of the forward work, by time four fifths of it."""
    flops = plain_flops(1.0, 1.0)
    seconds = {
        layer: {gemm: dict.fromkeys(("fp8", "bf16", "fp4"), time) for gemm in GEMMS}
        for layer, time in zip(flops, (4.0, 1.0), strict=True)
    }
    machine = Machine("cpu", "emulated", "float32", "2.0")
    measured = MeasuredCost(machine=machine, tokens=8, seconds=seconds)
    config = fp4_config(
        policy="last-15-percent", target_fp4_fraction=0.8, budget="measured", timing_tokens=8, **FORWARD
    )
    setting = Setting(config, flops, (tuple(flops),), measured)
    assignment = decided(setting)
    assert [row["forward"] for row in assignment.values()] == ["fp4", "fp8"]
    found = forward_shares(plan_of(setting, assignment))
    assert found is not None
    assert (found.fp4_fraction, found.fp4_time_fraction) == (0.5, 0.8)
    assert found.describe() == "50.0% of the forward GEMMs only and 80.0% of their time"


def test_a_plan_that_decides_on_all_gemms_has_no_shares_of_its_own_for_forward_ones() -> None:
    setting = setting_of(plain_flops(1.0), granularity="gemm")
    assert forward_shares(plan_of(setting, decided(setting))) is None


def test_a_run_says_everywhere_which_share_counts_what(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="snip_hf")
    loop = Loop(fp4_config(**SCHEDULE, **FORWARD, target_fp4_fraction=0.5, stages=2), tmp_path).run(4)
    assert loop.controller is not None
    plan = loop.controller.plan
    loop.controller.close()
    found = forward_shares(plan)
    assert found is not None
    assert {row[gemm] for row in plan.assignment.values() for gemm in GEMMS[1:]} == {"fp4"}
    assert min(found.stage_fp4_fractions) >= 0.5 - 1e-9
    assert plan.fp4_fraction == pytest.approx((2 + found.fp4_fraction) / 3)
    [line] = history(tmp_path)[1:]
    assert line["forward_fp4_fraction"] == found.fp4_fraction
    assert line["stage_forward_fp4_fractions"] == list(found.stage_fp4_fractions)
    assert line["fp4_fraction"] == plan.fp4_fraction
    assert f"{found.fp4_fraction:.1%} of the forward GEMMs only" in caplog.text
    assert load_run(tmp_path).refreshes[-1].forward_fp4_fraction == found.fp4_fraction
    printed = io.StringIO()
    print_run(load_run(tmp_path), Console(file=printed, width=160))
    text = " ".join(printed.getvalue().split())
    target = "at least 50.0% of the forward GEMMs' FLOPs in FP4"
    assert f"target {target}, attained {plan.describe()}" in text and found.describe() in plan.describe()
    assert "Pipeline of 8 micro-batches:" in text
    narrow = io.StringIO()
    Console(file=narrow, width=80).print(refresh_table(load_run(tmp_path)))
    assert "FP4 of" in narrow.getvalue() and "…" not in narrow.getvalue()
    assert "price: extra cost of FP4 per share of the stage's forward FLOPs" in text
    assert text.count(f"{found.fp4_fraction:.4f}") >= 2  # of the refresh, and of the stages together
    assert len(write_figures(load_run(tmp_path), tmp_path)) == 2
    card = trained_section(plan, None, "emulated", None)
    assert "| target | at least 50.0% of the forward GEMMs' FLOPs in FP4 |" in card
    assert f"{found.fp4_fraction:.1%} of the forward GEMMs only" in card
    assert PrecisionPlan.load(tmp_path / "snip" / "plan.json").provenance.config["decides"] == "forward"  # type: ignore[index]


def test_trackers_get_the_share_of_the_forward_gemms_beside_that_of_all() -> None:
    setting = setting_of(plain_flops(1.0, 1.0), policy="last-15-percent", target_fp4_fraction=0.5, **FORWARD)
    found = quantities_in_force(plan_of(setting, decided(setting)), None)
    assert found == {"fp4_share": 0.8333, "fp4_share_of_forward": 0.5}
