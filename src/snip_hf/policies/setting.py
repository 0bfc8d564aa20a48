"""The setting of a policy: configuration, FLOPs, stages, and the groups of layers that share their formats."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..config import SnipConfig
from ..costs.budget import MeasuredCost
from ..costs.flops import Weights
from ..costs.rates import linear_times
from ..numerics.formats import FORMATS, UNQUANTIZED
from ..numerics.gemms import GEMMS

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


def find_stages(layers: Sequence[str], config: SnipConfig) -> tuple[tuple[str, ...], ...]:
    """Returns the layer names of each stage; the order of `layers` is kept.

    Raises:
        ValueError: more stages than blocks, or explicit stages that do not hold every layer exactly once.
    """
    if config.stages is None:
        return (tuple(layers),)
    if isinstance(config.stages, int):
        blocks = list(dict.fromkeys(block_of(layer) for layer in layers))
        if config.stages > len(blocks):
            raise ValueError(
                f"stages={config.stages} but the model has {len(blocks)} blocks; expected at most one stage each."
            )
        stage_of = {block: index * config.stages // len(blocks) for index, block in enumerate(blocks)}
        return tuple(
            tuple(layer for layer in layers if stage_of[block_of(layer)] == stage) for stage in range(config.stages)
        )
    named = Counter(layer for stage in config.stages for layer in stage)
    swapped = set(layers)
    wrong = [layer for layer in (*named, *layers) if named[layer] != 1 or layer not in swapped]
    if wrong:
        raise ValueError(
            f"stages: layer {wrong[0]!r} is named {named[wrong[0]]} times and is "
            f"{'a' if wrong[0] in layers else 'no'} swapped layer; expected every swapped layer in exactly one stage."
        )
    return config.stages


def check_ties(setting: Setting) -> None:
    """Refuses ties that could not hold.

    Raises:
        ValueError: a name that no swapped layer ends in, or siblings in different stages.
    """
    stage_of = {layer: index for index, stage in enumerate(setting.stages) for layer in stage}
    last_names = {layer.rpartition(".")[2] for layer in stage_of}
    for names in setting.config.ties:
        for name in names:
            if name not in last_names:
                raise ValueError(
                    f"ties: no swapped layer's last name is {name!r}; the last names are "
                    f"{', '.join(sorted(last_names))}."
                )
        stages: dict[str, int] = {}
        for layer, stage in stage_of.items():
            parent, _, last = layer.rpartition(".")
            if last in names and stages.setdefault(parent, stage) != stage:
                raise ValueError(
                    f"ties: the tied layers of {parent!r} are in stages {stages[parent]} and {stage}; expected all of "
                    "them in one stage."
                )


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
            raise ValueError(
                f"target_linear_speedup={target!r} is out of reach in stage {index}: with every GEMM in the fastest of "
                f"the formats {', '.join(formats)} it is {1 / (1 - largest):.4g}, the largest attainable. Lower it, or "
                "add a faster format."
            )


def block_of(layer: str) -> str:
    """Returns the name of the block that a layer is in: up to and with the first number ("model.layers.3")."""
    match = re.match(r"(?:.*?\.)?\d+(?=\.|$)", layer)
    return match.group() if match else layer


def split_layer(layer: str) -> tuple[str, str]:
    """Returns block and rest: "a.layers.3.mlp.up_proj" -> ("a.layers.3", "mlp.up_proj"); ("", layer) if none."""
    block = block_of(layer)
    return ("", layer) if block == layer else (block, layer[len(block) + 1 :])


def siblings(setting: Setting) -> list[list[str]]:
    """Returns the lists of layers that share their formats: siblings whose last names `config.ties` puts together."""
    tied: list[list[str]] = []
    for stage in setting.stages:
        for names in setting.config.ties:
            parents: dict[str, list[str]] = {}
            for layer in stage:
                parent, _, last = layer.rpartition(".")
                if last in names:
                    parents.setdefault(parent, []).append(layer)
            tied += [layers for layers in parents.values() if len(layers) > 1]
    return tied


def tied_groups(setting: Setting) -> list[list[str]]:
    """Returns the lists of groups that must share a format."""
    if setting.config.granularity == "layer":
        return siblings(setting)
    return [[f"{layer}:{gemm}" for layer in layers] for layers in siblings(setting) for gemm in GEMMS]
