"""The input of a policy: configuration, FLOPs, stages, groups and ties.

Each stage is a set of layers that meets the target on its own. A group is the unit of one decision: a layer, or one of
its GEMMs. Tied groups of sibling layers share a format (`SnipConfig.ties`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..config import ALL, DoesNotFit, SnipConfig
from ..costs.flops import Tokens, Work, executed
from ..costs.timing import MeasuredCost
from ..estimation.ties import Ties
from ..layers.state import blocks_of
from ..numerics.gemms import GEMMS


@dataclass(frozen=True)
class Setting:
    """The input of every policy: config, FLOPs per token of each layer and GEMM, and the layers of each stage."""

    config: SnipConfig
    flops: Mapping[str, Mapping[str, float]]
    stages: tuple[tuple[str, ...], ...]
    measured: MeasuredCost | None = None
    """Times that replace FLOPs in the target; None: FLOPs count."""
    tokens: Tokens | None = None
    """Tokens per layer in the last counted micro-batch; None if all layers saw the same number."""
    found_ties: Ties = ()
    """Ties found in the model, which hold if `config.ties` is "auto"."""

    @property
    def ties(self) -> Ties:
        """The last names of linears that share a format, tie by tie."""
        return self.found_ties if isinstance(self.config.ties, str) else self.config.ties

    @property
    def executed(self) -> Work:
        """Layer -> GEMM -> FLOPs that run, per token of the micro-batch."""
        return executed(self.flops, self.tokens)

    @property
    def times(self) -> MeasuredCost | None:
        """The measured times, scaled by the tokens of each layer."""
        return None if self.measured is None else self.measured.executed(self.tokens)

    @property
    def work(self) -> Work:
        """Layer -> GEMM -> weight in the target: FLOPs that run, or seconds."""
        times = self.times
        return self.executed if times is None else times.work

    def at_step(self, step: int) -> Setting:
        """Returns the setting with the target of an optimizer step."""
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
        """Returns each group's share of the stage's decided work: FLOPs, or measured time."""
        work = self.work
        decided = {layer: self.decided(layer) for layer in stage}
        total = sum(sum(number for gemm, number in work[layer].items() if gemm in decided[layer]) for layer in stage)
        return {
            group: sum(work[layer][gemm] for layer, gemm in self.members(group)) / total for group in self.groups(stage)
        }

    def assignment(self, choices: Mapping[str, str]) -> dict[str, dict[str, str]]:
        """Returns layer -> GEMM -> format from a format for each group; other GEMMs get the least precise format."""
        low = self.config.least_precise
        result = {
            layer: {gemm: low for gemm in row if gemm not in self.decided(layer)} for layer, row in self.flops.items()
        }
        for group, fmt in choices.items():
            for layer, gemm in self.members(group):
                result[layer][gemm] = fmt
        return result


def find_stages(layers: Sequence[str], config: SnipConfig) -> tuple[tuple[str, ...], ...]:
    """Returns the layer names of each stage, in the order of `layers`.

    Raises:
        DoesNotFit: there are more stages than blocks, or explicit stages do not hold every layer exactly once.
    """
    if config.stages is None:
        return (tuple(layers),)
    if isinstance(config.stages, int):
        block_of_layer = blocks_of(layers)
        blocks = list(dict.fromkeys(block_of_layer.values()))
        if config.stages > len(blocks):
            raise DoesNotFit(
                f"stages={config.stages}, but the model has {len(blocks)} blocks; expected at most one stage per block."
            )
        stage_of = {block: index * config.stages // len(blocks) for index, block in enumerate(blocks)}
        return tuple(
            tuple(layer for layer in layers if stage_of[block_of_layer[layer]] == stage)
            for stage in range(config.stages)
        )
    named = Counter(layer for stage in config.stages for layer in stage)
    swapped = set(layers)
    wrong = [layer for layer in (*named, *layers) if named[layer] != 1 or layer not in swapped]
    if wrong:
        raise DoesNotFit(
            f"stages: layer {wrong[0]!r} is named {named[wrong[0]]} times and is "
            f"{'a' if wrong[0] in layers else 'not a'} swapped layer; "
            "expected every swapped layer in exactly one stage."
        )
    return config.stages


def check_ties(setting: Setting) -> None:
    """Checks that ties fit the model.

    Raises:
        DoesNotFit: no swapped layer has a tied name, or tied siblings are in different stages.
    """
    stage_of = {layer: index for index, stage in enumerate(setting.stages) for layer in stage}
    last_names = {layer.rpartition(".")[2] for layer in stage_of}
    for names in setting.ties:
        for name in names:
            if name not in last_names:
                raise DoesNotFit(
                    f"ties: no swapped layer's last name is {name!r}; the last names are "
                    f"{', '.join(sorted(last_names))}."
                )
        stages: dict[str, int] = {}
        for layer, stage in stage_of.items():
            parent, _, last = layer.rpartition(".")
            if last in names and stages.setdefault(parent, stage) != stage:
                raise DoesNotFit(
                    f"ties: the tied layers of {parent!r} are in stages {stages[parent]} and {stage}; expected all of "
                    "them in one stage."
                )


def siblings(setting: Setting) -> list[list[str]]:
    """Returns the lists of tied layers: siblings whose last names are tied."""
    tied: list[list[str]] = []
    for stage in setting.stages:
        for names in setting.ties:
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
    # A sibling with a frozen weight has no grad_weight GEMM.
    tied = [
        [f"{layer}:{gemm}" for layer in layers if gemm in setting.decided(layer)]
        for layers in siblings(setting)
        for gemm in GEMMS
    ]
    return [groups for groups in tied if len(groups) > 1]
