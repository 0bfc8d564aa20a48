"""The setting of a policy: configuration, FLOPs, stages, and the groups of layers that share their formats."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..config import SnipConfig
from ..costs.flops import Weights
from ..costs.measured_cost import MeasuredCost
from ..costs.rates import linear_times
from ..numerics.formats import FORMATS, UNQUANTIZED
from ..numerics.gemms import GEMMS
from .ties import tied_groups

# Weights are sums of floating-point numbers: what is short of the target by this much attains it.
TOLERANCE = 1e-9

Assignment = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Setting:
    """What every policy is told: the config, the FLOPs per token of each layer and GEMM, and the stages' layers."""

    config: SnipConfig
    flops: Mapping[str, Mapping[str, float]]
    stages: tuple[tuple[str, ...], ...]
    measured: MeasuredCost | None = None
    """The times that count in place of FLOPs, if any."""

    @property
    def weights(self) -> Weights:
        """Layer -> GEMM -> what it counts in the efficiency constraint: seconds in FP8 if measured, else FLOPs."""
        return self.flops if self.measured is None else self.measured.weights

    def groups(self, layers: Sequence[str]) -> list[str]:
        """Returns the names of the groups of these layers: "layer", or "layer:gemm" at granularity "gemm"."""
        if self.config.granularity == "layer":
            return list(layers)
        return [f"{layer}:{gemm}" for layer in layers for gemm in GEMMS]

    def members(self, group: str) -> list[tuple[str, str]]:
        """Returns the (layer, GEMM) pairs of a group."""
        layer, _, gemm = group.rpartition(":")
        return [(layer, gemm)] if self.config.granularity == "gemm" else [(group, gemm) for gemm in GEMMS]

    def shares(self, stage: Sequence[str]) -> dict[str, float]:
        """Returns each group's share of the stage's weight: of its linear FLOPs, or of its linears' measured time."""
        weights = self.weights
        total = sum(sum(weights[layer].values()) for layer in stage)
        return {
            group: sum(weights[layer][gemm] for layer, gemm in self.members(group)) / total
            for group in self.groups(stage)
        }

    @property
    def least_weight(self) -> float:
        """What the chosen options of a stage add up to at least (`option_weights`): the target.

        A speed-up of s is a saving of 1 - 1/s.
        """
        config = self.config
        if config.target_linear_speedup is not None:
            return 1 - 1 / config.target_linear_speedup
        assert config.target_fp4_fraction is not None
        return config.target_fp4_fraction

    def option_weights(self, stage: Sequence[str]) -> dict[str, dict[str, float]]:
        """Returns group -> format -> what the option counts towards the target of its stage.

        Under `target_fp4_fraction` a format of at most 4 bits counts the group's share, any other one nothing. Under
        `target_linear_speedup` each counts what it saves: the group's time in BF16 less its time in the format, by the
        time of the whole stage in BF16. BF16 counts 0, what is slower than BF16 less than 0.
        """
        formats = self.config.formats
        if self.config.target_linear_speedup is None:
            return {
                group: {name: share if FORMATS[name].counts_as_fp4 else 0.0 for name in formats}
                for group, share in self.shares(stage).items()
            }
        times = linear_times(self.flops, formats, self.config.rates, self.measured)
        high = UNQUANTIZED.name
        whole = math.fsum(times[layer][gemm][high] for layer in stage for gemm in GEMMS)
        cells = {group: [times[layer][gemm] for layer, gemm in self.members(group)] for group in self.groups(stage)}
        return {
            group: {name: math.fsum(row[high] - row[name] for row in rows) / whole for name in formats}
            for group, rows in cells.items()
        }

    def assignment(self, choices: Mapping[str, str]) -> dict[str, dict[str, str]]:
        """Returns layer -> GEMM -> format for a format per group."""
        result: dict[str, dict[str, str]] = {layer: {} for layer in self.flops}
        for group, fmt in choices.items():
            for layer, gemm in self.members(group):
                result[layer][gemm] = fmt
        return result


def check_attainable(setting: Setting, formats: Sequence[str]) -> None:
    """Refuses a speed-up that not even the fastest of the formats reaches, which measured times may show.

    Raises:
        ValueError: says which stage, and the largest attainable.
    """
    target = setting.config.target_linear_speedup
    if target is None:
        return
    tied = {name: tuple(tie) for tie in tied_groups(setting) for name in tie}
    for index, stage in enumerate(setting.stages):
        weights = setting.option_weights(stage)
        units = dict.fromkeys(tied.get(group, (group,)) for group in weights)
        largest = sum(max(sum(weights[group][name] for group in unit) for name in formats) for unit in units)
        if largest < setting.least_weight - TOLERANCE:
            advice = "Lower it, or add a faster format."
            if largest <= 0:
                advice = (
                    "None of them is faster than BF16 here. Set target_fp4_fraction in place of target_linear_speedup, "
                    "or count by the rates of other hardware, e.g. rates='b200' with budget='flops'."
                )
            raise ValueError(
                f"target_linear_speedup={target!r} is out of reach in stage {index}: with every GEMM in the fastest of "
                f"the formats {', '.join(formats)} it is {1 / (1 - largest):.4g}, the largest attainable. {advice}"
            )
