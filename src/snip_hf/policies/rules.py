"""Policies that follow a fixed order and measure nothing: published rules and the paper's baselines.

Each policy orders the groups of a stage. The first groups get the least precise format until the target is met. All
others get the most precise format.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from ..json_io import short
from ..layers.state import block_of
from .registry import Policy, register_policy
from .setting import Setting, tied_groups
from .target import TOLERANCE, check_attainable, contributions, least_sum


def _fill(setting: Setting, stage: Sequence[str], order: Sequence[str]) -> dict[str, str]:
    """Returns group -> format for one stage: the least precise format in the given order until the target is met.

    Tied groups form one unit. If the next unit would meet the target, the smallest remaining unit that also meets it is
    chosen instead. Units that are then no longer needed return to the most precise format, last chosen first.
    """
    config = setting.config
    low, high = config.least_precise, config.most_precise
    counted = contributions(setting, stage)
    tied = {name: tuple(tie) for tie in tied_groups(setting) for name in tie}
    gains = {
        unit: sum(counted[group][low] - counted[group][high] for group in unit)
        for unit in dict.fromkeys(tied.get(group, (group,)) for group in order)
    }
    units = [unit for unit, gain in gains.items() if gain > 0]
    missing = least_sum(setting) - sum(row[high] for row in counted.values()) - TOLERANCE
    chosen: list[tuple[str, ...]] = []
    while missing > 0:
        unit = units[0]
        if gains[unit] >= missing:
            unit = min((unit for unit in units if gains[unit] >= missing), key=lambda unit: gains[unit])
        units.remove(unit)
        chosen.append(unit)
        missing -= gains[unit]
    for unit in reversed(list(chosen)):
        if missing + gains[unit] <= 0:
            chosen.remove(unit)
            missing += gains[unit]
    in_low = {group for unit in chosen for group in unit}
    return {group: low if group in in_low else high for group in order}


def _random_order(setting: Setting, stage: Sequence[str]) -> list[str]:
    order = setting.groups(stage)
    random.Random(f"{setting.config.seed} {stage[0]}").shuffle(order)
    return order


def _type_order(setting: Setting, stage: Sequence[str]) -> list[str]:
    """MLP linears first, attention linears last (our choice: the paper does not say in which order types go)."""
    return sorted(setting.groups(stage), key=lambda group: bool(re.search("attn|attention", group, re.IGNORECASE)))


def _block_order(setting: Setting, stage: Sequence[str], key: Callable[[float], float]) -> list[str]:
    """Orders groups by `key` of the centre of their block, where the model spans 0..1; stable within a block."""
    blocks = list(dict.fromkeys(block_of(layer) for layer in setting.flops))
    # Rounded, so that blocks at equal distances from the middle tie exactly.
    keys = {block: round(key((index + 0.5) / len(blocks)), 12) for index, block in enumerate(blocks)}
    return sorted(setting.groups(stage), key=lambda group: keys[block_of(setting.members(group)[0][0])])


def _position_order(setting: Setting, stage: Sequence[str]) -> list[str]:
    """Middle blocks first, so that the first and last blocks stay in FP8 longest."""
    return _block_order(setting, stage, lambda position: abs(position - 0.5))


def _nvfp4_order(setting: Setting, stage: Sequence[str]) -> list[str]:
    """Splits the blocks that stay in FP8 2:8 between the model's beginning and end (arXiv:2509.25149, section 4.1).

    The paper keeps the first 2 and last 8 of 62 blocks in higher precision. Applying the ratio 2:8 to other depths and
    shares is our choice.
    """
    return _block_order(setting, stage, lambda position: -min(position / 2, (1 - position) / 8))


def _front_order(setting: Setting, stage: Sequence[str]) -> list[str]:
    """First blocks first, so that the last blocks stay in FP8."""
    return _block_order(setting, stage, lambda position: position)


def _backward_order(setting: Setting, stage: Sequence[str]) -> list[str]:
    """Backward GEMMs first, then forward GEMMs, both by position (our choice)."""
    return sorted(_position_order(setting, stage), key=lambda group: setting.members(group)[0][1] == "forward")


def rule(name: str, order: Callable[[Setting, Sequence[str]], list[str]], **facts: Any) -> Policy:
    """Returns the policy that fills each stage in the order of `order(setting, layers)`."""

    def assign(setting: Setting) -> dict[str, dict[str, str]]:
        check_attainable(setting, (setting.config.least_precise, setting.config.most_precise))
        choices: dict[str, str] = {}
        for stage in setting.stages:
            groups, known = order(setting, stage), setting.groups(stage)
            if sorted(groups) != sorted(known):
                raise ValueError(
                    f"The order of policy={name!r} has {len(groups)} names (first: {short(next(iter(groups), None))}); "
                    f"expected each of the {len(known)} groups once, such as {known[0]!r}."
                )
            choices |= _fill(setting, stage, groups)
        return setting.assignment(choices)

    return Policy(name=name, assign=assign, **facts)


register_policy(rule("random", _random_order))
register_policy(rule("layer-type", _type_order))
register_policy(rule("layer-position", _position_order))
register_policy(rule("first2-last8", _nvfp4_order))
register_policy(rule("last-15-percent", _front_order))
register_policy(rule("backward-first", _backward_order, granularities=("gemm",)))
