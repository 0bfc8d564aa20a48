"""Rules exactly as published: the first and last blocks stay in BF16, and no target is met.

All other linears run in the least precise format of the run. `rules` has the variants that meet a target. Sources:
docs/policies.md.
"""

from __future__ import annotations

from collections.abc import Callable

from ..config import DoesNotFit, SnipConfig
from ..layers.state import block_of
from ..numerics.formats import UNQUANTIZED
from .registry import Policy, register_policy
from .setting import Setting

HighBlocks = Callable[[int], tuple[int, int]]
"""Number of blocks -> (first blocks, last blocks) that stay in BF16."""

# Alternative that errors suggest.
_RULE = "e.g. policy='first2-last8'"


def _refuse_without_bf16(config: SnipConfig) -> None:
    high = UNQUANTIZED.name
    if config.fixed_plan is None and (high not in config.formats or config.least_precise == high):
        raise ValueError(
            f"policy={config.policy!r} keeps some blocks in {high!r} and runs the others in a quantized format, but "
            f"formats={config.formats!r}. Set e.g. formats=('fp4', {high!r}), or use a rule that meets a target, "
            f"{_RULE}."
        )


def published(name: str, high_blocks: HighBlocks) -> Policy:
    """Returns the policy that leaves the first and last blocks of the whole model in BF16."""

    def assign(setting: Setting) -> dict[str, dict[str, str]]:
        blocks = list(dict.fromkeys(block_of(layer) for layer in setting.flops))
        first, last = high_blocks(len(blocks))
        if first + last >= len(blocks):
            raise DoesNotFit(
                f"policy={name!r} keeps the first {first} and the last {last} blocks in BF16, which are all of the "
                f"model's {len(blocks)} blocks. Use a rule that meets a target, {_RULE}."
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
