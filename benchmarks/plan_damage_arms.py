"""The arms of `plan_damage.py`: objectives of the integer program, and the assignments of formats that are trained."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from snip_hf import SnipConfig
from snip_hf.estimation.pending import LAYER
from snip_hf.estimation.table import Divergence, DivergenceTable
from snip_hf.numerics.gemms import GEMMS
from snip_hf.planning.program import problem
from snip_hf.planning.solver.process import SolverProcess
from snip_hf.planning.solver.solution import SolverError
from snip_hf.policies.registry import rule_assignment
from snip_hf.policies.setting import Setting
from snip_hf.policies.stages import find_stages

Assignment = dict[str, dict[str, str]]
Row = Mapping[str, Any]

SHARE = 0.75
# The paper's Q, which has no figures of single GEMMs.
SNIP_PAPER = "snip-paper"
# Policies whose own figures are columns of the table.
CRITERIA = ("greedy", "fisher")
PLAN_KINDS = ("rule", "program", "random-layer", "random-gemm")
# Measured for one step only: for the additivity of single damages.
ONE_STEP_KINDS = ("share-25", "share-50", "share-100", "layer-fp8", "gemm-fp8")
# In the order in which they run, so that a run that is stopped has measured what matters most.
KINDS = ("reference", *PLAN_KINDS, *ONE_STEP_KINDS, "gemm-kind", "layer", "gemm")


def _horizon(steps: int) -> Callable[[Row], float]:
    """The square of what n steps add up to: a part that repeats grows with n, one drawn anew with sqrt(n)."""
    return lambda row: (
        steps**2 * row["weight_bias"] ** 2 + steps * max(0.0, row["weight_divergence"] ** 2 - row["weight_bias"] ** 2)
    )


_SQUARES: dict[str, Callable[[Row], float]] = {
    "weight": lambda row: row["weight_divergence"] ** 2,
    "bias": lambda row: row["weight_bias"] ** 2,
    **{f"horizon-{steps}": _horizon(steps) for steps in (10, 100, 1000)},
}


def _root(square: Callable[[Row], float]) -> Callable[[Row], float]:
    return lambda row: math.sqrt(square(row))


# What an objective is made of: a row of the divergence table -> a number.
TERMS: dict[str, Callable[[Row], float]] = {
    "loss": lambda row: row["loss_divergence"],
    "taylor": lambda row: row["loss_taylor"],
    "absolute-error": lambda row: row["absolute_error"],
    "relative-error": lambda row: row["relative_error"],
    SNIP_PAPER: lambda row: row["snip_paper"],
    **{name: itemgetter(name) for name in CRITERIA},
    **{name: _root(square) for name, square in _SQUARES.items()},
    **{f"{name}^2": square for name, square in _SQUARES.items()},
}
# Objective -> the weights of the terms that it adds up, each divided by its total under "everything in FP4".
OBJECTIVES: dict[str, dict[str, float]] = {
    "paper": {"loss": 1.0, "weight": 1.0},
    "additive": {"loss": 1.0, "weight^2": 0.1},
    **{name: {name: 1.0} for name in TERMS},
    **{
        f"loss+{name}": {"loss": 1.0, name: 1.0}
        for name in TERMS
        if name.partition("^")[0] in _SQUARES and name != "weight"
    },
}


def costs(rows: Sequence[Row], objective: str) -> dict[tuple[str, str, str], float]:
    """Returns (layer, gemm or "layer", format) -> cost.

    Raises:
        KeyError, TypeError: the table lacks a column that the objective needs.
    """
    result = {(row["layer"], row["gemm"], row["format"]): 0.0 for row in rows}
    for term, weight in OBJECTIVES[objective].items():
        values = {key: TERMS[term](row) for key, row in zip(result, rows, strict=True)}
        total = sum(abs(value) for (_, gemm, fmt), value in values.items() if gemm == LAYER and fmt == "fp4")
        for key, value in values.items():
            result[key] += weight * value / total if total else 0.0
    return result


def available(rows: Sequence[Row]) -> list[str]:
    """Returns the objectives whose columns the table has."""
    names = []
    for name in OBJECTIVES:
        try:
            costs(rows, name)
        except (KeyError, TypeError):
            continue
        names.append(name)
    return names


@dataclass(frozen=True)
class Arm:
    """One assignment of formats that is trained with, or (kinds in `ONE_STEP_KINDS`) only measured for one step."""

    name: str
    kind: str
    assignment: Assignment
    granularity: str = "gemm"
    same_as: str | None = None
    """An earlier arm with the same assignment, which stands for this one."""


def make_arms(flops: Mapping[str, Mapping[str, float]], rows: Sequence[Row], options: Any) -> list[Arm]:
    """Returns all arms of the kinds asked for, in the order of `KINDS`."""
    layers = list(flops)

    def uniform(fmt: str) -> Assignment:
        return {layer: dict.fromkeys(GEMMS, fmt) for layer in layers}

    def single(layer: str, gemms: Iterable[str], fmt: str) -> Assignment:
        return uniform("bf16") | {layer: {gemm: fmt if gemm in gemms else "bf16" for gemm in GEMMS}}

    def rule(policy: str, share: float = SHARE, granularity: str = "layer", seed: int = 0) -> Assignment:
        config = SnipConfig(policy=policy, target_fp4_fraction=share, granularity=granularity, seed=seed)
        return rule_assignment(Setting(config, flops, find_stages(layers, config)))

    def backward_first() -> Assignment:
        forward = rule("layer-position", 3 * SHARE - 2)
        return {layer: {**dict.fromkeys(GEMMS, "fp4"), "forward": forward[layer]["forward"]} for layer in layers}

    def make(kind: str) -> Iterable[Arm]:
        base, _, part = kind.partition("-")
        if kind == "reference":
            return [
                Arm(name, kind, uniform(fmt))
                for name, fmt in (("bf16", "bf16"), ("uniform-fp8", "fp8"), ("uniform-fp4", "fp4"))
            ]
        if kind == "rule":
            positions = [Arm(name, kind, rule(name), "layer") for name in ("layer-type", "layer-position")]
            return [*positions, Arm("backward-first", kind, backward_first())]
        if kind == "program":
            return programs(flops, rows, options.objectives)
        if base == "random":
            return [Arm(f"{kind}-{i}", kind, rule("random", SHARE, part, i), part) for i in range(options.plans)]
        if base == "share":
            return [
                Arm(f"{kind}-{granularity}-{i}", kind, rule("random", int(part) / 100, granularity, i), granularity)
                for granularity in ("layer", "gemm")
                for i in range(1 if part == "100" else options.plans)
            ]
        if kind == "gemm-kind":
            sets = [s for size in (1, 2) for s in itertools.combinations(GEMMS, size)]
            return [
                Arm(f"fp4-{'+'.join(s)}", kind, {x: {g: "fp4" if g in s else "fp8" for g in GEMMS} for x in layers})
                for s in sets
            ]
        fmt = part or "fp4"
        if base == "layer":
            return [Arm(f"{kind}:{layer}", kind, single(layer, GEMMS, fmt), "layer") for layer in layers]
        return [Arm(f"{kind}:{layer}:{gemm}", kind, single(layer, [gemm], fmt)) for layer in layers for gemm in GEMMS]

    first: dict[str, str] = {}
    arms = []
    for arm in (arm for kind in KINDS if kind in options.kinds for arm in make(kind)):
        earlier = first.setdefault(json.dumps(arm.assignment, sort_keys=True), arm.name)
        arms.append(arm if earlier == arm.name else replace(arm, same_as=earlier))
    return arms


def programs(flops: Mapping[str, Mapping[str, float]], rows: Sequence[Row], objectives: Sequence[str]) -> list[Arm]:
    """Returns the integer program's plan for every objective that the table's rows have the columns for."""
    table = as_table(rows)
    in_force = {layer: dict.fromkeys(GEMMS, "fp8") for layer in flops}
    running = []
    for objective, granularity in itertools.product(objectives, ("layer", "gemm")):
        if objective not in available(rows) or (objective, granularity) == (SNIP_PAPER, "gemm"):
            continue
        price = costs(rows, objective)
        # The policy whose cost is one column, with the objective in that column.
        priced = tuple(replace(row, absolute_error=price[row.layer, row.gemm, row.format]) for row in table.rows)
        config = SnipConfig(policy="min-abs-err", target_fp4_fraction=SHARE, granularity=granularity)
        setting = Setting(config, flops, find_stages(list(flops), config))
        task = SolverProcess.start(problem(setting, replace(table, rows=priced), in_force))
        running.append((f"program-{granularity}:{objective}", granularity, setting, task))
    arms = []
    for name, granularity, setting, task in running:
        try:
            arms.append(Arm(name, "program", setting.assignment(task.result().choices), granularity))
        except SolverError as error:
            print(f"{name}: {error}", file=sys.stderr)
    return arms


def as_table(rows: Sequence[Row]) -> DivergenceTable:
    """Returns the rows as the program takes them."""
    fields = {field.name for field in dataclasses.fields(Divergence)}
    return DivergenceTable(
        0.0, tuple(Divergence(**{key: value for key, value in row.items() if key in fields}) for row in rows)
    )
