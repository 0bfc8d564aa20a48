"""Notices about configurations that work otherwise than one may think."""

from __future__ import annotations

from typing import Any

import pytest
from configs import fp4_config

from snip_hf.config import SnipConfig
from snip_hf.policies.registry import config_warnings

THREE = ("fp4", "fp8", "bf16")


@pytest.mark.parametrize(
    ("values", "beginnings"),
    [
        ({}, []),
        ({"formats": ("fp4", "bf16")}, []),
        (
            {"formats": THREE},
            ["target_fp4_fraction does not say how fast the rest must be, so FP8 will hardly be used"],
        ),
        ({"formats": THREE, "target_linear_speedup": 2, "rates": "ideal"}, []),
        (
            {"formats": THREE, "policy": "random"},
            ["policy='random' only uses the first and the last of formats; FP8 will not run."],
        ),
        ({"formats": THREE, "policy": "uniform-fp8"}, []),
        ({"formats": THREE, "policy": "first-last-bf16"}, []),
        (
            {"formats": THREE, "policy": "first-last-bf16", "target_fp4_fraction": 0.9},
            ["target_fp4_fraction=0.9 has no effect with policy='first-last-bf16', which has no target."],
        ),
        ({"formats": THREE, "fixed_plan": "plan.json"}, []),
        (
            {"fixed_plan": "plan.json", "granularity": "gemm", "decides": "forward"},
            ["decides='forward' has no effect with fixed_plan='plan.json': the plan in the file is applied"],
        ),
    ],
)
def test_formats_and_targets_without_effect_are_named(values: dict[str, Any], beginnings: list[str]) -> None:
    said = config_warnings(fp4_config(**values), recompiles_for_bf16=False)
    assert len(said) == len(beginnings)
    assert all(text.startswith(beginning) for text, beginning in zip(said, beginnings, strict=True))


def test_recompilation_is_told_where_plans_may_change_to_and_from_bf16() -> None:
    speed: dict[str, Any] = {"target_linear_speedup": 2, "rates": "ideal"}
    (said,) = config_warnings(SnipConfig(formats=THREE, **speed), recompiles_for_bf16=True)
    assert said.startswith("under torch.compile, a layer whose GEMMs change to or from BF16 is compiled again")
    assert config_warnings(fp4_config(**speed), recompiles_for_bf16=True) == []
    assert (
        config_warnings(SnipConfig(formats=("fp4", "bf16"), policy="first-last-bf16"), recompiles_for_bf16=True) == []
    )
