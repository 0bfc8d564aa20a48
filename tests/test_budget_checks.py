"""The budget by speed, as the configuration checks it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from snip_hf.budget_checks import RATES
from snip_hf.config import SnipConfig

THREE = ("fp4", "fp8", "bf16")


def test_without_either_budget_three_quarters_of_the_flops_are_in_fp4() -> None:
    assert SnipConfig().target_fp4_fraction == SnipConfig(target_fp4_fraction=None).target_fp4_fraction == 0.75


def test_a_speed_up_takes_the_place_of_the_share() -> None:
    config = SnipConfig(target_linear_speedup=2.5, rates="ideal")
    assert config.target_fp4_fraction is None
    assert SnipConfig.from_dict(config.to_dict()) == config


def test_configs_saved_without_a_speed_up_load_as_they_were() -> None:
    saved = SnipConfig(target_fp4_fraction=0.6).to_dict()
    del saved["target_linear_speedup"], saved["rates"]
    assert SnipConfig.from_dict(saved) == SnipConfig(target_fp4_fraction=0.6)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"target_fp4_fraction": 0.75, "target_linear_speedup": 2.0, "rates": "ideal"},
            "target_fp4_fraction=0.75 and target_linear_speedup=2.0 are two targets; expected one of them. Leave the "
            "other one out, or set it to None.",
        ),
        (
            {"target_linear_speedup": 2.0},
            "target_linear_speedup=2.0 needs to know how fast each format runs. Set rates to one of ideal, h100, b200, "
            "gb300, rtx50, mi355, or set budget='measured'.",
        ),
        (
            {"rates": "a100"},
            "Unknown table of rates 'a100' for rates. Did you mean 'h100'? Expected one of ideal, h100, b200, gb300, "
            "rtx50, mi355.",
        ),
        (
            {"rates": "ideal", "budget": "measured"},
            "rates='ideal' and budget='measured' are two sources of speed; expected one of them. Set rates=None, or "
            "budget='flops'.",
        ),
        (
            {"target_linear_speedup": 2.5, "rates": "h100"},
            "target_linear_speedup=2.5 is out of reach: with every GEMM in the fastest of the formats fp4, fp8 it is 2 "
            "by rates='h100', the largest attainable. Lower it, or add a faster format.",
        ),
    ],
)
def test_budgets_that_cannot_hold_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        SnipConfig(**values)


def test_a_format_that_the_hardware_does_not_run_is_refused_with_those_that_it_runs() -> None:
    with pytest.raises(ValueError, match=r"^rates='b200' has no rate of the format 'fp4', which .* it has bf16, fp8"):
        SnipConfig(rates="b200")
    SnipConfig(rates="b200", formats=("fp8", "bf16"), target_linear_speedup=1.5)


def test_the_largest_attainable_speed_up_itself_is_accepted() -> None:
    assert SnipConfig(target_linear_speedup=4, rates="ideal").target_linear_speedup == 4
    assert SnipConfig(target_linear_speedup=1, rates="ideal", formats=THREE).target_linear_speedup == 1


def test_a_rule_reaches_what_its_two_formats_reach() -> None:
    """It uses the first and the last of the formats, and no others."""
    assert SnipConfig(policy="random", target_linear_speedup=4, rates="ideal", formats=THREE)
    options: dict[str, Any] = {"rates": "h100", "formats": ("fp4", "bf16")}
    assert SnipConfig(policy="random", target_linear_speedup=2, **options)
    with pytest.raises(ValueError, match="formats fp4, bf16 it is 2 by rates='h100'"):
        SnipConfig(policy="random", target_linear_speedup=2.01, **options)


@pytest.mark.parametrize("policy", ["bf16", "uniform-fp8", "first-last-bf16"])
def test_a_speed_up_is_refused_with_a_policy_without_a_target(policy: str) -> None:
    expected = f"target_linear_speedup=1.5 with policy='{policy}' has no effect: that policy meets no target. Leave it"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}"):
        SnipConfig(policy=policy, target_linear_speedup=1.5, rates="ideal", formats=THREE)
    assert SnipConfig(policy=policy, target_fp4_fraction=0.9, formats=THREE).target_fp4_fraction == 0.9


def test_a_share_is_attainable_where_any_of_the_formats_counts() -> None:
    """Noise on the weights is the least precise of these, but no format of 4 bits."""
    formats = ("fp4-pqt", "nvfp4", "fp8")
    assert SnipConfig(formats=formats, target_fp4_fraction=0.5).formats == formats
    assert SnipConfig(formats=("fp4-pqt", "nvfp4"), policy="random", target_fp4_fraction=0.5)


def test_rates_alone_only_report() -> None:
    config = SnipConfig(rates="h100")
    assert (config.target_fp4_fraction, config.target_linear_speedup) == (0.75, None)


def test_every_table_says_where_its_figures_come_from() -> None:
    assert all(table.source for table in RATES.values())
