"""Policies with three and more formats, BF16 among them, under a share of FP4 and under a speed-up."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from policy_settings import (
    LISTS,
    RULES_AT,
    TIES,
    assert_complete,
    decided,
    llama_flops,
    plain_flops,
    plan_of,
    random_table,
    setting_by_layer,
    setting_of,
    stage_shares,
)
from registries import restored

from snip_hf.config import RATES, SnipConfig
from snip_hf.costs.rates import Rates, register_rates
from snip_hf.costs.timing import Machine, MeasuredCost
from snip_hf.estimation.table import ROWS, Divergence, DivergenceTable
from snip_hf.numerics.formats import E2M1, FORMATS, NumberFormat, Operand, register_format
from snip_hf.numerics.gemms import GEMMS
from snip_hf.planning.program import problem
from snip_hf.planning.solver import ilp
from snip_hf.policies.registry import rule_assignment
from snip_hf.policies.setting import Setting
from snip_hf.policies.target import contributions

BY_GEMM = ("snip", "min-abs-err", "min-rel-err", "fisher", "hessian-trace", "greedy", "kl")
PROBED_AT = [*itertools.product(BY_GEMM, ("layer", "gemm")), ("snip-paper", "layer")]
THREE = ("fp4", "fp8", "bf16")
FIVE = ("fp4", "half", "fp8", "fast8", "bf16")


@pytest.fixture(autouse=True)
def more_formats() -> Iterator[None]:
    """Two formats more, and rates that are halves, so that sums of weights are exact."""
    with restored(FORMATS), restored(RATES):
        register_format(
            NumberFormat(
                name="half",
                grid=E2M1,
                bits=4,
                activation=Operand((1, 32)),
                gradient=Operand((1, 32)),
                weight=Operand((32, 32)),
                speed=2.0,
                label="HALF",
                colour="#009e73",
            )
        )
        register_format(dataclasses.replace(FORMATS["fp8"], name="fast8", speed=2.0, label="FAST8"))
        register_rates(Rates(name="mine", rates={"fp4": 4, "half": 4, "fp8": 2, "fast8": 4}, source="made up"))
        yield


# ---------------------------------------------------------------------------------------------------------- the targets


@pytest.mark.parametrize(("policy", "granularity"), [*RULES_AT, *PROBED_AT])
@pytest.mark.parametrize(
    ("formats", "stages", "ties"), [(THREE, 2, TIES), (FIVE, LISTS, ())], ids=["three-two-tied", "five-lists"]
)
def test_every_stage_meets_either_target(
    policy: str, granularity: str, formats: tuple[str, ...], stages: Any, ties: Any
) -> None:
    options: dict[str, Any] = {"policy": policy, "granularity": granularity, "stages": stages, "ties": ties}
    for target in (0.25, 0.75, 1.0):
        setting = setting_of(llama_flops(), formats=formats, target_fp4_fraction=target, solver="greedy", **options)
        assignment = decided(setting)
        assert_complete(setting, assignment)
        assert min(stage_shares(setting, assignment)) >= target - 1e-9
    for target in (1.0, 1.6, 2.5, 4.0):
        setting = setting_of(
            llama_flops(), formats=formats, target_linear_speedup=target, rates="mine", solver="greedy", **options
        )
        assignment = decided(setting)
        assert_complete(setting, assignment)
        speedups = plan_of(setting, assignment).stage_linear_speedups()
        assert speedups is not None and min(speedups) >= target * (1 - 1e-8)


# ------------------------------------------------------------------------------------------------- what the options are


def test_options_come_most_precise_first_and_bf16_costs_and_saves_nothing() -> None:
    flops = plain_flops(1.0, 3.0)
    setting = setting_by_layer(flops, formats=THREE, target_linear_speedup=2.0, rates="ideal")
    program = problem(setting, random_table(setting))
    first, second = (group["options"] for group in program["groups"])
    assert [option["name"] for option in first] == ["bf16", "fp8", "fp4"]
    assert first[0] == {"name": "bf16", "cost": 0.0, "weight": 0.0}
    # Shares 1/4 and 3/4 of the time in BF16; FP8 saves a half and FP4 three quarters of it.
    assert [option["weight"] for option in first] == [0.0, 0.125, 0.1875]
    assert [option["weight"] for option in second] == [0.0, 0.375, 0.5625]
    assert program["constraints"][0]["minimum"] == 0.5


def damage(fp8: float, fp4: float, layers: int = 4) -> DivergenceTable:
    figures = {"fp8": fp8, "fp4": fp4}
    rows = [
        Divergence(f"layers.{index}.fc", gemm, name, value * (1 + index / 10), 0.0, 1.0)
        for index in range(layers)
        for gemm in ROWS
        for name, value in figures.items()
    ]
    return DivergenceTable(1.0, tuple(rows))


def formats_chosen(setting: Setting, table: DivergenceTable) -> list[str]:
    return list(ilp.solve({**problem(setting, table), "relative_gap": 0.0})["choices"].values())


def test_beside_a_share_of_fp4_bf16_takes_all_the_rest_and_under_a_speed_up_fp8_has_a_place() -> None:
    flops = plain_flops(*[1.0] * 4)
    share = setting_by_layer(flops, formats=THREE, target_fp4_fraction=0.5)
    assert formats_chosen(share, damage(0.01, 1.0)) == ["fp4", "fp4", "bf16", "bf16"]
    speed = setting_by_layer(flops, formats=THREE, target_linear_speedup=2.0, rates="ideal")
    assert formats_chosen(speed, damage(0.01, 1.0)) == ["fp8"] * 4
    # 4 / (1/4 + 3/2) = 2.29
    speed = setting_by_layer(flops, formats=THREE, target_linear_speedup=2.2, rates="ideal")
    assert formats_chosen(speed, damage(0.01, 1.0)) == ["fp4", "fp8", "fp8", "fp8"]


def test_a_less_precise_format_that_does_less_damage_takes_the_others_place() -> None:
    flops = plain_flops(*[1.0] * 4)
    for target in ({"target_fp4_fraction": 0.25}, {"target_linear_speedup": 1.5, "rates": "ideal"}):
        setting = setting_by_layer(flops, formats=("fp4", "fp8"), **target)
        assert formats_chosen(setting, damage(1.0, 0.5)) == ["fp4"] * 4


def test_a_total_of_0_in_the_least_precise_format_does_not_hide_what_the_others_do() -> None:
    """FP4 does nothing here: by its total no damage of FP8 would have a price."""
    flops = plain_flops(1.0, 1.0)
    rows = []
    for layer, gemm in itertools.product(flops, ROWS):
        figure = 0.25 if layer == "layers.0.fc" else 0.75
        rows.append(Divergence(layer, gemm, "fp8", figure, 0.0, 1.0, criterion=figure))
        rows.append(Divergence(layer, gemm, "fp4", 0.0, 0.0, 1.0, criterion=0.0))
    for policy in ("snip", "fisher"):
        setting = setting_by_layer(flops, policy=policy, target_fp4_fraction=0.0)
        program = problem(setting, DivergenceTable(1.0, tuple(rows)))
        assert [group["options"][0]["cost"] for group in program["groups"]] == [0.25, 0.75]


# --------------------------------------------------------------------------------------------------------------- rules


@pytest.mark.parametrize(("policy", "granularity"), RULES_AT)
def test_a_rule_exceeds_a_speed_up_by_less_than_one_group(policy: str, granularity: str) -> None:
    flops = plain_flops(*[1.0] * 20)
    for target in (1.0, 1.25, 2.0, 3.2):
        setting = setting_of(
            flops, policy=policy, granularity=granularity, formats=THREE, target_linear_speedup=target, rates="ideal"
        )
        assignment = rule_assignment(setting)
        used = {name for formats in assignment.values() for name in formats.values()}
        assert used <= {"fp4", "bf16"}
        saved = sum(0.75 for formats in assignment.values() for name in formats.values() if name == "fp4") / 60
        one = 0.75 / (20 if granularity == "layer" else 60)
        assert 1 - 1 / target - 1e-9 <= saved < 1 - 1 / target + one


def test_if_both_formats_of_a_rule_count_towards_the_target_the_more_precise_one_runs() -> None:
    setting = setting_of(plain_flops(1.0, 1.0), policy="random", formats=("fp4", "half"), target_fp4_fraction=0.5)
    assert rule_assignment(setting) == {layer: dict.fromkeys(GEMMS, "half") for layer in setting.flops}


def low_blocks(policy: str, blocks: int, **options: Any) -> list[int]:
    flops = plain_flops(*[1.0] * blocks)
    assignment = rule_assignment(setting_of(flops, policy=policy, **{"formats": THREE, **options}))
    low = [index for index, formats in enumerate(assignment.values()) if set(formats.values()) == {"fp4"}]
    assert all(
        set(formats.values()) == {"bf16"} for index, formats in enumerate(assignment.values()) if index not in low
    )
    return low


@pytest.mark.parametrize("options", [{}, {"stages": 2}, {"granularity": "gemm"}, {"target_fp4_fraction": 0.1}])
def test_published_rules_keep_their_blocks_in_bf16_whatever_the_target(options: dict[str, Any]) -> None:
    assert low_blocks("first2-last8-bf16", 62, **options) == list(range(2, 54))
    assert low_blocks("first2-last8-bf16", 12, **options) == [2, 3]
    assert low_blocks("last-15-percent-bf16", 32, **options) == list(range(27))
    assert low_blocks("last-15-percent-bf16", 20, **options) == list(range(17))
    assert low_blocks("first-last-bf16", 4, **options) == [1, 2]


def test_a_published_rule_that_leaves_no_block_is_refused() -> None:
    with pytest.raises(
        ValueError, match="keeps the first 2 and the last 8 blocks in BF16, which are all of the model's 10"
    ):
        low_blocks("first2-last8-bf16", 10)


@pytest.mark.parametrize("policy", ["first2-last8-bf16", "last-15-percent-bf16", "first-last-bf16"])
def test_a_published_rule_needs_bf16_among_the_formats(policy: str) -> None:
    for formats in (("fp4", "fp8"), ("bf16",)):
        with pytest.raises(ValueError, match=f"^policy='{policy}' keeps some blocks in 'bf16' and runs the others in"):
            SnipConfig(policy=policy, formats=formats)


# ------------------------------------------------------------------------------------------------------- measured speed


def timed(setting: Setting, **seconds: float) -> Setting:
    """The same setting with these times of every GEMM."""
    times = {layer: {gemm: dict(seconds) for gemm in GEMMS} for layer in setting.flops}
    machine = Machine("a GPU", "2.11.0", "hopper", "bfloat16")
    return dataclasses.replace(setting, measured=MeasuredCost(machine=machine, tokens=64, seconds=times))


def test_measured_savings_are_of_each_gemm_and_below_0_where_a_format_is_slower_than_bf16() -> None:
    setting = setting_by_layer(plain_flops(1.0, 1.0), formats=THREE, target_linear_speedup=1.2, budget="measured")
    setting = timed(setting, bf16=4.0, fp8=5.0, fp4=2.0)
    assert contributions(setting, setting.stages[0]) == {
        layer: {"fp4": 0.25, "fp8": -0.125, "bf16": 0.0} for layer in setting.flops
    }
    # One layer in FP4 gives 8 / 6, two 2.
    assert formats_chosen(setting, damage(0.0, 1.0, layers=2)) == ["fp4", "bf16"]


@pytest.mark.parametrize("policy", ["snip", "random"])
def test_a_speed_up_that_measured_times_rule_out_is_refused_with_stage_and_largest(policy: str) -> None:
    flops = plain_flops(1.0, 1.0)
    options: dict[str, Any] = {"policy": policy, "stages": 2, "budget": "measured", "timing_tokens": 64}
    setting = setting_of(flops, formats=("fp4", "bf16"), target_linear_speedup=2.5, **options)
    setting = timed(setting, bf16=4.0, fp8=2.0, fp4=2.0)
    with pytest.raises(
        ValueError, match=r"^target_linear_speedup=2\.5 is out of reach in stage 0: .* the speed-up is 2"
    ):
        decided(setting)
    assert decided(timed(setting, bf16=5.0, fp8=2.0, fp4=2.0)) == {
        layer: dict.fromkeys(GEMMS, "fp4") for layer in flops
    }
