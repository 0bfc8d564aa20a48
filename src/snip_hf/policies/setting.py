"""The setting of a policy: configuration, FLOPs, stages, and the groups of layers that share their formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..config import ALL, SnipConfig
from ..costs.flops import Tokens, Work, executed
from ..costs.timing import MeasuredCost
from ..numerics.gemms import GEMMS

Assignment = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Setting:
    """What every policy is told: the config, the FLOPs per token of each layer and GEMM, and the stages' layers."""

    config: SnipConfig
    flops: Mapping[str, Mapping[str, float]]
    stages: tuple[tuple[str, ...], ...]
    measured: MeasuredCost | None = None
    """The times that count in place of FLOPs, if any."""
    tokens: Tokens | None = None
    """What each layer saw of the last micro-batch that was counted; None: every layer the same."""

    @property
    def executed(self) -> Work:
        """Layer -> GEMM -> FLOPs that run, per token of the micro-batch."""
        return executed(self.flops, self.tokens)

    @property
    def times(self) -> MeasuredCost | None:
        """The measured times, by the tokens that layers saw."""
        return None if self.measured is None else self.measured.executed(self.tokens)

    @property
    def work(self) -> Work:
        """Layer -> GEMM -> what it counts in the efficiency constraint: FLOPs that run, or seconds."""
        times = self.times
        return self.executed if times is None else times.work

    def at_step(self, step: int) -> Setting:
        """Returns the setting of a plan made at an optimizer step, with the target of that step."""
        return replace(self, config=self.config.at_step(step))

    def decided(self, layer: str) -> tuple[str, ...]:
        """Returns the GEMMs of a layer that the plan decides on (`SnipConfig.decides`)."""
        return tuple(gemm for gemm in self.flops[layer] if self.config.decides == ALL or gemm == GEMMS[0])

    def groups(self, layers: Sequence[str]) -> list[str]:
        """Returns the names of the groups of these layers: "layer", or "layer:gemm" at granularity "gemm"."""
        if self.config.granularity == "layer":
            return list(layers)
        return [f"{layer}:{gemm}" for layer in layers for gemm in self.decided(layer)]

    def members(self, group: str) -> list[tuple[str, str]]:
        """Returns the (layer, GEMM) pairs of a group."""
        layer, _, gemm = group.rpartition(":")
        return [(layer, gemm)] if self.config.granularity == "gemm" else [(group, gemm) for gemm in self.flops[group]]

    def shares(self, stage: Sequence[str]) -> dict[str, float]:
        """Returns each group's share of what the stage's decided GEMMs work: FLOPs, or measured time."""
        work = self.work
        decided = {layer: self.decided(layer) for layer in stage}
        total = sum(sum(number for gemm, number in work[layer].items() if gemm in decided[layer]) for layer in stage)
        return {
            group: sum(work[layer][gemm] for layer, gemm in self.members(group)) / total for group in self.groups(stage)
        }

    def assignment(self, choices: Mapping[str, str]) -> dict[str, dict[str, str]]:
        """Returns layer -> GEMM -> format for a format per group; what is not decided is in the least precise one."""
        low = self.config.least_precise
        result = {
            layer: {gemm: low for gemm in row if gemm not in self.decided(layer)} for layer, row in self.flops.items()
        }
        for group, fmt in choices.items():
            for layer, gemm in self.members(group):
                result[layer][gemm] = fmt
        return result
