"""The setting of a policy: configuration, FLOPs, stages, and the groups of layers that share their formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..config import SnipConfig
from ..costs.flops import Tokens, Work, executed
from ..costs.measured_cost import MeasuredCost

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

    def groups(self, layers: Sequence[str]) -> list[str]:
        """Returns the names of the groups of these layers: "layer", or "layer:gemm" at granularity "gemm"."""
        if self.config.granularity == "layer":
            return list(layers)
        return [f"{layer}:{gemm}" for layer in layers for gemm in self.flops[layer]]

    def members(self, group: str) -> list[tuple[str, str]]:
        """Returns the (layer, GEMM) pairs of a group."""
        layer, _, gemm = group.rpartition(":")
        return [(layer, gemm)] if self.config.granularity == "gemm" else [(group, gemm) for gemm in self.flops[group]]

    def shares(self, stage: Sequence[str]) -> dict[str, float]:
        """Returns each group's share of the stage's work: of its linear FLOPs, or of its linears' measured time."""
        work = self.work
        total = sum(sum(work[layer].values()) for layer in stage)
        return {
            group: sum(work[layer][gemm] for layer, gemm in self.members(group)) / total for group in self.groups(stage)
        }

    def assignment(self, choices: Mapping[str, str]) -> dict[str, dict[str, str]]:
        """Returns layer -> GEMM -> format for a format per group."""
        result: dict[str, dict[str, str]] = {layer: {} for layer in self.flops}
        for group, fmt in choices.items():
            for layer, gemm in self.members(group):
                result[layer][gemm] = fmt
        return result
