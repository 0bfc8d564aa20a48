"""Rules as their papers describe them: some blocks of the model stay in BF16, without a target.

All other linears run in the least precise format of the run. Variants that meet a target are in `rules`. Sources:
docs/policies.md.
"""

from __future__ import annotations

from collections.abc import Callable

from ..config import DoesNotFit, SnipConfig
from ..layers.state import block_of
from ..numerics.formats import UNQUANTIZED
from .registry import Policy, register_policy
from .setting import Setting

Kept = Callable[[int], tuple[int, int]]
"""Number of blocks -> how many of the first and of the last ones stay in BF16."""

# Errors suggest this instead.
_RULE = "e.g. policy='first2-last8'"


def _refuse_without_bf16(config: SnipConfig) -> None:
    high = UNQUANTIZED.name
    if config.fixed_plan is None and (high not in config.formats or config.least_precise == high):
        raise ValueError(
            f"policy={config.policy!r} keeps some blocks in {high!r} and runs the others in a quantized format, but "
            f"formats={config.formats!r}. Set e.g. formats=('fp4', {high!r}), or take a rule that meets a target, "
            f"{_RULE}."
        )


def published(name: str, kept: Kept) -> Policy:
    """Returns the policy that leaves the first and last blocks of the whole model in BF16."""

    def assign(setting: Setting) -> dict[str, dict[str, str]]:
        blocks = list(dict.fromkeys(block_of(layer) for layer in setting.flops))
        first, last = kept(len(blocks))
        if first + last >= len(blocks):
            raise DoesNotFit(
                f"policy={name!r} keeps {first} blocks at the beginning and {last} at the end in BF16, which leaves "
                f"none of the model's {len(blocks)}. Take a rule that meets a target, {_RULE}."
            )
        high = {*blocks[:first], *blocks[len(blocks) - last :]}
        low = setting.config.least_precise
        choices = {
            group: UNQUANTIZED.name if block_of(setting.members(group)[0][0]) in high else low
            for stage in setting.stages
            for group in setting.groups(stage)
        }
        return setting.assignment(choices)

    return Policy(name=name, assign=assign, aims_at_share=False, check=_refuse_without_bf16)


register_policy(published("first2-last8-bf16", lambda blocks: (2, 8)))
register_policy(published("last-15-percent-bf16", lambda blocks: (0, blocks - 85 * blocks // 100)))
register_policy(published("first-last-bf16", lambda blocks: (1, 1)))
