"""The target of a stage: the contribution of each option, the required sum, and a check that it can be reached."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..config import FORWARD, POLICIES, read_shares, shares_text
from ..costs.rates import linear_times
from ..numerics.formats import FORMATS, UNQUANTIZED
from .setting import Setting, tied_groups

# Floating-point error allowed when a sum of contributions is compared with the target.
TOLERANCE = 1e-9


def describe_target(config: Mapping[str, Any]) -> str | None:
    """Describes the target of a run, for logs, reports and model cards; None without one.

    Args:
        config: fields of a `SnipConfig`, perhaps from a damaged file. An unknown policy is assumed to have a target.
    """
    policy = POLICIES.get(config.get("policy", ""))
    if config.get("fixed_plan") or (policy is not None and not policy.aims_at_share):
        return None
    speedup, share = config.get("target_linear_speedup"), config.get("target_fp4_fraction")
    if speedup is not None:
        return f"linears at {speedup} times BF16's speed"
    shares = read_shares(share) or share
    if not isinstance(shares, tuple | float | int):
        return None
    gemms = "the forward GEMMs'" if config.get("decides") == FORWARD else "the linears'"
    unit = "measured time" if config.get("budget") == "measured" else "FLOPs"
    return f"at least {shares_text(shares, '.1%')} of {gemms} {unit} in FP4"


def least_sum(setting: Setting) -> float:
    """Returns the smallest sum of `contributions` with which a stage meets its target.

    A speed-up of s corresponds to a saving of 1 - 1/s. A target that changes by step needs `Setting.at_step` first.
    """
    config = setting.config
    if config.target_linear_speedup is not None:
        return 1 - 1 / config.target_linear_speedup
    share = config.target_fp4_fraction
    assert isinstance(share, float | int), share
    return share


def contributions(setting: Setting, stage: Sequence[str]) -> dict[str, dict[str, float]]:
    """Returns group -> format -> contribution to the target of the stage.

    Under `target_fp4_fraction`, formats of at most 4 bits contribute the group's share and all others 0. Under
    `target_linear_speedup`, a format contributes the time that it saves against BF16, divided by the BF16 time of the
    stage. BF16 contributes 0, and slower formats a negative number.
    """
    formats = setting.config.formats
    if setting.config.target_linear_speedup is None:
        return {
            group: {name: share if FORMATS[name].counts_as_fp4 else 0.0 for name in formats}
            for group, share in setting.shares(stage).items()
        }
    times = linear_times(setting.executed, formats, setting.config.rates, setting.times)
    high = UNQUANTIZED.name
    whole = math.fsum(row[high] for layer in stage for row in times[layer].values())
    cells = {group: [times[layer][gemm] for layer, gemm in setting.members(group)] for group in setting.groups(stage)}
    return {
        group: {name: math.fsum(row[high] - row[name] for row in rows) / whole for name in formats}
        for group, rows in cells.items()
    }


def check_attainable(setting: Setting, formats: Sequence[str]) -> None:
    """Refuses a speed-up that cannot be reached even with every GEMM in the fastest of the formats.

    Raises:
        ValueError: names the stage and the largest speed-up that it can reach.
    """
    target = setting.config.target_linear_speedup
    if target is None:
        return
    tied = {name: tuple(tie) for tie in tied_groups(setting) for name in tie}
    for index, stage in enumerate(setting.stages):
        counted = contributions(setting, stage)
        units = dict.fromkeys(tied.get(group, (group,)) for group in counted)
        largest = sum(max(sum(counted[group][name] for group in unit) for name in formats) for unit in units)
        if largest < least_sum(setting) - TOLERANCE:
            advice = "Lower it, or add a faster format."
            if largest <= 0:
                advice = (
                    "None of them is faster than BF16 here. Set target_fp4_fraction instead, or use the rates of other "
                    "hardware, e.g. rates='b200' with budget='flops'."
                )
            raise ValueError(
                f"target_linear_speedup={target!r} is out of reach in stage {index}: with every GEMM in the fastest of "
                f"the formats {', '.join(formats)}, the speed-up is {1 / (1 - largest):.4g}. {advice}"
            )
