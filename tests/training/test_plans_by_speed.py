"""Whole runs with three formats and a budget by speed."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import fp4_config
from own_loop import Loop
from rich.console import Console
from tiny_runs import SCHEDULE, refreshes

from snip_hf import PrecisionPlan, SnipConfig
from snip_hf.costs import timing as gemm_timing_module
from snip_hf.costs.timing import GemmShape
from snip_hf.records.load import load_run
from snip_hf.reporting.figures import write_figures
from snip_hf.reporting.run_report import print_run

THREE = ("fp4", "fp8", "bf16")


def config(**changes: Any) -> SnipConfig:
    return fp4_config(**{**SCHEDULE, "formats": THREE, "granularity": "gemm", **changes})


def test_each_refresh_records_the_speed_that_its_plan_reaches_in_every_stage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="snip_hf")
    loop = Loop(config(target_linear_speedup=2.2, rates="ideal", stages=2), tmp_path).run(8)
    loop.controller.close()
    for line in refreshes(tmp_path):
        assert line["status"] == "applied"
        assert min(line["stage_linear_speedups"]) >= 2.2 - 1e-9
    plan = PrecisionPlan.load(tmp_path / "snip" / "plan.json")
    assert refreshes(tmp_path)[-1]["linear_speedup"] == plan.linear_speedup()
    assert f"linears at {plan.linear_speedup():.3f} times BF16's speed (ideal rates)" in caplog.text
    assert load_run(tmp_path).refreshes[-1].linear_speedup == plan.linear_speedup()


def test_the_report_shows_target_and_speed_and_all_three_formats(tmp_path: Path) -> None:
    Loop(config(target_linear_speedup=2.0, rates="ideal"), tmp_path).run(8).controller.close()
    printed = io.StringIO()
    print_run(load_run(tmp_path), Console(file=printed, width=100))
    text = " ".join(printed.getvalue().split())
    speedup = PrecisionPlan.load(tmp_path / "snip" / "plan.json").linear_speedup()
    assert "target linears at 2.0 times BF16's speed, attained" in text
    assert f"linears at {speedup:.3f} times BF16's speed (ideal rates)" in text
    assert "extra cost of FP4 per share of the stage's time in BF16 that it saves" in text
    assert len(write_figures(load_run(tmp_path))) == 2


def test_a_share_with_bf16_is_warned_of_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    Loop(config()).controller.close()
    assert "FP8 will hardly be used: BF16 costs nothing and counts the same." in caplog.text


@pytest.fixture
def slow_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """FP4 takes half of the time of BF16, and FP8 a fifth more."""
    seconds = {"bf16": 1.0, "fp8": 1.2, "fp4": 0.5}

    def time(backend: str, device: torch.device, shape: GemmShape, format: str) -> float:
        return seconds[format] * shape.in_features * shape.out_features

    monkeypatch.setattr(gemm_timing_module, "time_gemm", time)


@pytest.mark.usefixtures("slow_fp8")
def test_measured_times_make_a_budget_of_speed(tmp_path: Path) -> None:
    loop = Loop(config(target_linear_speedup=1.5, budget="measured"), tmp_path).run(4)
    plan = loop.controller.plan
    loop.controller.close()
    assert plan.linear_speedup() >= 1.5 - 1e-9
    assert {name for row in plan.assignment.values() for name in row.values()} == {"fp4", "bf16"}
    assert plan.speed_source == "measured"


def test_gemms_that_are_faster_in_bf16_stay_in_bf16(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def time(backend: str, device: torch.device, shape: GemmShape, format: str) -> float:
        is_slow = shape.gemm == "grad_input" and format != "bf16"
        return {"bf16": 1.0, "fp8": 0.6, "fp4": 0.5}[format] * (3 if is_slow else 1)

    monkeypatch.setattr(gemm_timing_module, "time_gemm", time)
    loop = Loop(config(target_linear_speedup=1.4, budget="measured"), tmp_path).run(4)
    plan = loop.controller.plan
    loop.controller.close()
    assert plan.linear_speedup() >= 1.4 - 1e-9
    assert {row["grad_input"] for row in plan.assignment.values()} == {"bf16"}


@pytest.mark.usefixtures("slow_fp8")
def test_a_measured_speed_up_out_of_reach_is_refused_before_training_where_tokens_are_known() -> None:
    with pytest.raises(
        ValueError, match=r"^target_linear_speedup=2\.1 is out of reach in stage 0: .* the speed-up is 2"
    ):
        Loop(config(target_linear_speedup=2.1, budget="measured", timing_tokens=48))


@pytest.mark.usefixtures("slow_fp8")
def test_a_machine_on_which_no_format_is_faster_than_bf16_is_named_as_such() -> None:
    slow = {"target_linear_speedup": 1.5, "budget": "measured", "timing_tokens": 48, "formats": ("fp8",)}
    with pytest.raises(ValueError) as error:
        Loop(config(**slow))
    assert str(error.value) == (
        "target_linear_speedup=1.5 is out of reach in stage 0: with every GEMM in the fastest of the formats fp8, the "
        "speed-up is 0.8333. None of them is faster than BF16 here. Set target_fp4_fraction instead, or use the rates "
        "of other hardware, e.g. rates='b200' with budget='flops'."
    )


@pytest.mark.usefixtures("slow_fp8")
def test_a_measured_speed_up_out_of_reach_otherwise_costs_the_refreshes(tmp_path: Path) -> None:
    loop = Loop(config(target_linear_speedup=2.1, budget="measured"), tmp_path).run(4)
    assert set(loop.formats()["model.layers.0.mlp.up_proj"].values()) == {"bf16"}
    loop.controller.close()
    (line,) = refreshes(tmp_path)
    assert line["status"] == "kept" and "the speed-up is 2" in line["reason"]


@pytest.mark.usefixtures("slow_fp8")
def test_a_run_that_timed_at_its_start_keeps_the_times_in_its_first_plan(tmp_path: Path) -> None:
    loop = Loop(config(target_linear_speedup=1.5, budget="measured", timing_tokens=48), tmp_path)
    assert loop.controller.plan.measured is not None
    loop.run(4).controller.close()
    assert loop.controller.plan.linear_speedup() >= 1.5 - 1e-9
