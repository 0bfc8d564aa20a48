"""How measurements become a plan: `snip` and every baseline, behind one small interface.

A policy either needs a probe, and gives every choice a cost for the integer program, or is a rule, and gives the
assignment outright. Both meet the target share, of FLOPs or of measured time, in every stage, never from below. What
the program decides, or a rule orders, are groups: linears at granularity "layer", (linear, GEMM) pairs at granularity
"gemm".
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .config import SnipConfig
from .cost import MeasuredCost, Weights
from .criteria import CRITERIA
from .divergence import CHOICES, Divergence, DivergenceTable
from .formats import GEMMS
from .terms import LAYER

Assignment = Mapping[str, Mapping[str, str]]
# Shares are sums of floating-point numbers: what is short of the target by this much attains it.
_TOLERANCE = 1e-9


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

    def assignment(self, choices: Mapping[str, str]) -> dict[str, dict[str, str]]:
        """Returns layer -> GEMM -> format for a format per group."""
        result: dict[str, dict[str, str]] = {layer: {} for layer in self.flops}
        for group, fmt in choices.items():
            for layer, gemm in self.members(group):
                result[layer][gemm] = fmt
        return result


def needs_probe(config: SnipConfig) -> bool:
    """Tells whether the policy decides from measurements (and refreshes), or is a rule or a file (and stays)."""
    return config.plan is None and config.policy in _COSTS


def needs_weights(config: SnipConfig) -> bool:
    """Tells whether the policy aims at a share of FLOPs or time; the uniform ones and a plan file do not."""
    return config.plan is None and (config.policy in _COSTS or config.policy in _ORDERS)


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


def block_of(layer: str) -> str:
    """Returns the name of the block that a layer is in: up to and with the first number ("model.layers.3")."""
    match = re.match(r"(?:.*?\.)?\d+(?=\.|$)", layer)
    return match.group() if match else layer


def split_layer(layer: str) -> tuple[str, str]:
    """Returns block and rest: "a.layers.3.mlp.up_proj" -> ("a.layers.3", "mlp.up_proj"); ("", layer) if none."""
    block = block_of(layer)
    return ("", layer) if block == layer else (block, layer[len(block) + 1 :])


def problem(setting: Setting, table: DivergenceTable, in_force: Assignment) -> dict[str, Any]:
    """Returns the integer program (`snip_hf.ilp`) of a policy that needs a probe.

    Args:
        setting: as above.
        table: the measurements, with a row for every layer, GEMM and choice.
        in_force: the assignment in force, for the switching cost.
    """
    config = setting.config
    cost = cost_of(config, table)
    rows = {(row.layer, row.gemm, row.format): row for row in table.rows}
    groups, constraints = [], []
    count = sum(len(setting.groups(stage)) for stage in setting.stages)
    spare = _SPARE if config.policy in CRITERIA else 0.0
    for index, stage in enumerate(setting.stages):
        shares = setting.shares(stage)
        for group in shares:
            members = setting.members(group)
            layer, gemm = members[0] if config.granularity == "gemm" else (group, LAYER)
            options = []
            for fmt in CHOICES:
                changes = any(in_force[name][part] != fmt for name, part in members)
                # A layer that took no part in the probe (an expert without tokens) has no row and costs nothing.
                damage = cost(rows[layer, gemm, fmt]) if (layer, gemm, fmt) in rows else 0.0
                weight = shares[group] if fmt == "fp4" else 0.0
                extra = config.switching_cost / count * changes + spare * weight
                options.append({"name": fmt, "cost": damage + extra, "weight": weight})
            groups.append({"name": group, "options": options})
        constraints.append({"name": f"stage {index}", "groups": list(shares), "minimum": config.target_fp4_fraction})
    return {
        "groups": groups,
        "constraints": constraints,
        "ties": _ties(setting),
        "solver": "greedy" if config.policy == "greedy" else config.solver,
        "time_limit": config.solver_time_limit,
        "relative_gap": config.solver_gap,
    }


def cost_of(config: SnipConfig, table: DivergenceTable) -> Callable[[Divergence], float]:
    """Returns what a row of the table costs under a policy that needs a probe."""
    return _COSTS[config.policy](config, table)


def rule_assignment(setting: Setting) -> dict[str, dict[str, str]]:
    """Returns the assignment of a policy that needs no probe."""
    config = setting.config
    uniform = {"bf16": "bf16", "uniform-fp8": "fp8", "uniform-fp4": "fp4"}.get(config.policy)
    choices: dict[str, str] = {}
    for stage in setting.stages:
        if uniform is not None:
            choices |= dict.fromkeys(setting.groups(stage), uniform)
        else:
            choices |= _fill(setting, stage, _ORDERS[config.policy](setting, stage))
    return setting.assignment(choices)


def _fill(setting: Setting, stage: Sequence[str], order: Sequence[str]) -> dict[str, str]:
    """Returns group -> format for one stage: FP4 in the given order until the target is met, FP8 for the rest.

    Where the next unit would meet the target, the smallest remaining one that does takes its place; what then turns
    out not to be needed goes back to FP8, the last one first. Tied groups are one unit.
    """
    tied = {name: tuple(tie) for tie in _ties(setting) for name in tie}
    units = list(dict.fromkeys(tied.get(group, (group,)) for group in order))
    shares = setting.shares(stage)
    share = {unit: sum(shares[group] for group in unit) for unit in units}
    missing = setting.config.target_fp4_fraction - _TOLERANCE
    chosen: list[tuple[str, ...]] = []
    while missing > 0:
        unit = units[0]
        if share[unit] >= missing:
            unit = min((unit for unit in units if share[unit] >= missing), key=lambda unit: share[unit])
        units.remove(unit)
        chosen.append(unit)
        missing -= share[unit]
    for unit in reversed(list(chosen)):
        if missing + share[unit] <= 0:
            chosen.remove(unit)
            missing += share[unit]
    in_fp4 = {group for unit in chosen for group in unit}
    return {group: "fp4" if group in in_fp4 else "fp8" for group in order}


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


def _ties(setting: Setting) -> list[list[str]]:
    """Returns the lists of groups that must share a format."""
    if setting.config.granularity == "layer":
        return siblings(setting)
    return [[f"{layer}:{gemm}" for layer in layers] for layers in siblings(setting) for gemm in GEMMS]


def _random_order(setting: Setting, stage: Sequence[str]) -> list[str]:
    order = setting.groups(stage)
    random.Random(f"{setting.config.seed} {stage[0]}").shuffle(order)
    return order


def _type_order(setting: Setting, stage: Sequence[str]) -> list[str]:
    """Linears of the MLP first, attention's last (ours: the paper names "by layer type" without an order)."""
    return sorted(setting.groups(stage), key=lambda group: "attn" in group or "attention" in group)


def _block_order(setting: Setting, stage: Sequence[str], key: Callable[[float], float]) -> list[str]:
    """Orders by the block's position in the whole model: 0..1, of its centre. Groups of one block keep their order."""
    blocks = list(dict.fromkeys(block_of(layer) for layer in setting.flops))
    # Rounded: blocks that are symmetric to the middle are equally far from it.
    keys = {block: round(key((index + 0.5) / len(blocks)), 12) for index, block in enumerate(blocks)}
    return sorted(setting.groups(stage), key=lambda group: keys[block_of(setting.members(group)[0][0])])


def _position_order(setting: Setting, stage: Sequence[str]) -> list[str]:
    """Middle blocks of the model first, so that its first and last blocks stay in FP8 longest."""
    return _block_order(setting, stage, lambda position: abs(position - 0.5))


def _nvfp4_order(setting: Setting, stage: Sequence[str]) -> list[str]:
    """What stays in FP8 is split 2:8 between the model's beginning and its end (arXiv:2509.25149, section 4.1).

    There 2 + 8 of 62 blocks keep a higher precision; that 2:8 is kept at other depths and shares is ours.
    """
    return _block_order(setting, stage, lambda position: -min(position / 2, (1 - position) / 8))


def _front_order(setting: Setting, stage: Sequence[str]) -> list[str]:
    """The model's first blocks first, so that its last ones stay in FP8."""
    return _block_order(setting, stage, lambda position: position)


def _backward_order(setting: Setting, stage: Sequence[str]) -> list[str]:
    """The GEMMs of the backward pass first, then those of the forward pass, both by position (ours)."""
    return sorted(_position_order(setting, stage), key=lambda group: setting.members(group)[0][1] == "forward")


def _snip_cost(config: SnipConfig, table: DivergenceTable) -> Callable[[Divergence], float]:
    """Both divergences, each divided by its total under "everything in FP4" (docs/method.md, section 4)."""
    parts: list[tuple[float, Callable[[Divergence], float]]] = [
        (config.loss_weight, lambda row: row.loss_divergence),
        (config.weight_weight * _WEIGHT_SHARES[config.objective], _WEIGHT_PARTS[config.objective]),
    ]
    whole = [row for row in table.rows if row.format == "fp4" and row.gemm == LAYER]
    # Divergences in the form "taylor" may be below 0.
    totals = [sum(abs(part(row)) for row in whole) for _, part in parts]
    scaled = [(weight / total, part) for (weight, part), total in zip(parts, totals, strict=True) if total > 0]
    return lambda row: sum(weight * part(row) for weight, part in scaled)


def _over_steps(row: Divergence) -> float:
    """The square of what `_HORIZON` steps add up to: the bias grows with their number, the rest with its root."""
    square, bias = row.weight_divergence**2, (row.weight_bias or 0.0) ** 2
    return _HORIZON**2 * bias + _HORIZON * max(0.0, square - bias)


def _absolute_cost(config: SnipConfig, table: DivergenceTable) -> Callable[[Divergence], float]:
    return lambda row: row.absolute_error or 0.0


def _relative_cost(config: SnipConfig, table: DivergenceTable) -> Callable[[Divergence], float]:
    return lambda row: row.relative_error or 0.0


def _criterion_cost(config: SnipConfig, table: DivergenceTable) -> Callable[[Divergence], float]:
    """The criterion of `criteria`, divided by its total under "everything in FP4": some are of the size of 1e-9."""
    criteria = {(row.layer, row.gemm, row.format): row.criterion for row in table.rows}
    total = sum(value or 0.0 for (_, gemm, fmt), value in criteria.items() if gemm == LAYER and fmt == "fp4")
    missing = sum(value is None for value in criteria.values())
    if missing or total <= 0:
        raise ValueError(
            f"policy={config.policy!r} cannot decide: its criterion is missing in {missing} of {len(criteria)} rows, "
            f"and sums to {total} in FP4. Expected a table that was made under this policy, and a sum above 0."
        )
    return lambda row: (row.criterion or 0.0) / total


# Criteria give some groups no cost at all. That these do not go to FP4 beyond the target, what is in FP4 costs a
# thousandth of all cost per stage (ours); among plans that meet the target exactly it decides nothing.
_SPARE = 1e-3
_HORIZON = 100
_WEIGHT_PARTS: dict[str, Callable[[Divergence], float]] = {
    "additive": lambda row: row.weight_divergence**2,
    "horizon": _over_steps,
    "paper": lambda row: row.weight_divergence,
}
# Measured (docs/fidelity.md): over 100 and 1,000 steps the loss divergence alone ranks plans best. A tenth of the
# weight divergence changes next to nothing there and decides between GEMMs that the loss divergence does not see.
_WEIGHT_SHARES = {"additive": 0.1, "horizon": 0.1, "paper": 1.0}
_COSTS = {
    "snip": _snip_cost,
    "min-abs-err": _absolute_cost,
    "min-rel-err": _relative_cost,
    **dict.fromkeys(CRITERIA, _criterion_cost),
}
_ORDERS = {
    "random": _random_order,
    "layer-type": _type_order,
    "layer-position": _position_order,
    "first2-last8": _nvfp4_order,
    "last-15-percent": _front_order,
    "backward-first": _backward_order,
}
