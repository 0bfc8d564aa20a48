"""The checks of a plan's tables: formats, FLOPs, stages, tokens and measured times, as a file may hold anything."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

from ..costs.flops import FORWARD, GRAD_INPUT, Tokens, Work, executed
from ..costs.gemm_timing import Machine, check_seconds
from ..costs.measured_cost import MeasuredCost
from ..layers.state import GRAD_WEIGHT
from ..numerics.formats import check_format
from ..numerics.gemms import GEMMS
from .checked_values import check_keys, check_text, check_type, finite, short


def checked_table(table: Any, name: str, check: Callable[[object, str], Any]) -> dict[str, Mapping[str, Any]]:
    """A read-only copy of {layer: {gemm: value}}, every value passed through `check(value, where)`.

    A layer may lack grad_weight, which does not run where the weight is frozen.
    """
    check_type(table, Mapping, name, "a mapping from layer names")
    if not table:
        raise ValueError(f"{name} is empty, expected at least one layer.")
    checked: dict[str, Mapping[str, Any]] = {}
    for layer, row in table.items():
        check_text(layer, f"a layer name in {name}")
        check_type(row, Mapping, f"{name}[{layer!r}]", "a mapping from GEMMs")
        gemms = tuple(gemm for gemm in GEMMS if gemm in row or gemm != GRAD_WEIGHT)
        check_keys(row, gemms, f"{name}[{layer!r}]")
        checked[layer] = MappingProxyType({gemm: check(row[gemm], f"{name}[{layer!r}][{gemm!r}]") for gemm in gemms})
    return checked


def without_idle(row: Mapping[str, Any], flops: Mapping[str, float]) -> Mapping[str, Any]:
    """Returns the row of a table without a grad_weight that has no FLOPs."""
    if GRAD_WEIGHT not in row or flops.get(GRAD_WEIGHT, 0.0) > 0:
        return row
    return MappingProxyType({gemm: value for gemm, value in row.items() if gemm != GRAD_WEIGHT})


def check_same_layers(assignment: Mapping[str, Any], flops: Work) -> None:
    for layer in (*assignment, *flops):
        if layer not in assignment or layer not in flops:
            missing = "flops" if layer in assignment else "assignment"
            raise ValueError(f"{missing} has no entry for layer {layer!r}; both must name the same layers.")


def check_same_gemms(assignment: Mapping[str, Mapping[str, str]], flops: Work) -> None:
    for layer, row in assignment.items():
        if row.keys() != flops[layer].keys():
            raise ValueError(
                f"assignment[{layer!r}] has no format for grad_weight, which has FLOPs: the plan was made for a frozen "
                "weight. Freeze the weight, or use a plan that was made for a trained one."
            )


def as_stages(stages: Any) -> tuple[tuple[Any, ...], ...]:
    check_type(stages, (list, tuple), "stages", "a list of lists of layer names")
    for index, stage in enumerate(stages):
        check_type(stage, (list, tuple), f"stages[{index}]", "a list of layer names")
    return tuple(tuple(stage) for stage in stages)


def checked_stages(stages: Any, flops: Work) -> tuple[tuple[str, ...], ...]:
    """`stages` as tuples, after checking that they part the layers of `flops` and that each has FLOPs."""
    checked = as_stages(stages)
    seen: dict[str, int] = {}
    for index, stage in enumerate(checked):
        for layer in stage:
            check_text(layer, f"a layer name in stages[{index}]")
            if layer not in flops:
                raise ValueError(f"stages[{index}] names layer {layer!r}, which the assignment does not have.")
            if layer in seen:
                raise ValueError(f"layer {layer!r} is in stages[{seen[layer]}] and stages[{index}], expected in one.")
            seen[layer] = index
        if not math.fsum(value for layer in stage for value in flops[layer].values()) > 0:
            raise ValueError(f"stages[{index}] has no FLOPs, so its FP4 share means nothing; leave the stage out.")
    for layer in flops:
        if layer not in seen:
            raise ValueError(f"layer {layer!r} is in no stage, expected in exactly one.")
    return checked


def checked_tokens(tokens: Any, flops: Work, stages: Sequence[Sequence[str]]) -> Tokens:
    """A read-only copy, after checking that every layer has a number and every stage has FLOPs that run."""
    check_type(tokens, Mapping, "tokens", "a mapping from layer names")
    for layer in tokens.keys() ^ flops.keys():
        raise ValueError(f"tokens and flops do not both name layer {short(layer)}; expected the same layers.")
    checked = {layer: _checked_tokens(tokens[layer], f"tokens[{layer!r}]") for layer in flops}
    work = executed(flops, checked)
    for index, stage in enumerate(stages):
        if not math.fsum(value for layer in stage for value in work[layer].values()) > 0:
            raise ValueError(
                f"No layer of stages[{index}], such as {stage[0]!r}, saw a token of the micro-batch, so its FP4 share "
                "means nothing. Leave its layers out (skip_modules), or let every micro-batch reach them."
            )
    return MappingProxyType(checked)


def _checked_tokens(own: Any, where: str) -> float | Mapping[str, float]:
    if not isinstance(own, Mapping):
        return finite(own, where, minimum=0.0)
    check_keys(own, (FORWARD, GRAD_INPUT), where)
    found = {gemm: finite(own[gemm], f"{where}[{gemm!r}]", minimum=0.0) for gemm in (FORWARD, GRAD_INPUT)}
    if found[GRAD_INPUT] > found[FORWARD]:
        raise ValueError(f"{where} has more tokens of {GRAD_INPUT} than of {FORWARD}, expected at most as many.")
    return MappingProxyType(found)


def read_measured(document: Any) -> MeasuredCost:
    """Reads `MeasuredCost.to_dict`; raises ValueError if it is not that."""
    check_type(document, Mapping, "measured", "a JSON object")
    document = {"reference": MeasuredCost.reference, **document}  # plans of earlier versions do not name it
    check_keys(document, tuple(field.name for field in fields(MeasuredCost)), "measured")
    machine = document["machine"]
    check_type(machine, Mapping, "measured.machine", "a JSON object")
    check_keys(machine, tuple(field.name for field in fields(Machine)), "measured.machine")
    return MeasuredCost(**{**document, "machine": Machine(**machine)})


def checked_measured(measured: Any, flops: Work, order: Sequence[str]) -> MeasuredCost:
    """A read-only copy, after checking that every GEMM that has FLOPs has a time in each format."""
    check_type(measured, MeasuredCost, "measured", "a MeasuredCost")
    for field in fields(Machine):
        check_text(getattr(measured.machine, field.name), f"measured.machine.{field.name}")
    if type(measured.tokens) is not int or measured.tokens < 1:
        raise ValueError(f"measured.tokens is {short(measured.tokens)}, expected an integer of at least 1.")
    check_format(measured.reference, "measured.reference")
    table = checked_table(measured.seconds, "measured.seconds", lambda value, where: value)
    table = {layer: without_idle(row, flops.get(layer, {})) for layer, row in table.items()}
    for layer in table.keys() ^ flops.keys():
        raise ValueError(f"measured.seconds and flops do not both name layer {layer!r}; expected the same layers.")
    seconds: dict[str, Mapping[str, Mapping[str, float]]] = {}
    formats: list[str] = []
    for layer in order:
        row: dict[str, Mapping[str, float]] = {}
        check_keys(table[layer], tuple(flops[layer]), f"measured.seconds[{layer!r}]")
        for gemm in flops[layer]:
            where, times = f"measured.seconds[{layer!r}][{gemm!r}]", table[layer][gemm]
            if flops[layer][gemm] > 0:
                row[gemm] = check_seconds(times, where, measured.reference)
            elif not isinstance(times, Mapping) or any(number != 0 for number in times.values()):
                raise ValueError(f"{where} is {short(times)}, expected 0 in every format: the GEMM has no FLOPs.")
            else:
                row[gemm] = {str(fmt): 0.0 for fmt in times}
            formats = formats or list(row[gemm])
            if set(row[gemm]) != set(formats):
                raise ValueError(f"{where} has times in {', '.join(row[gemm])}; the others have {', '.join(formats)}.")
        seconds[layer] = MappingProxyType({gemm: MappingProxyType(times) for gemm, times in row.items()})
    checked: MeasuredCost = replace(measured, seconds=MappingProxyType(seconds))
    return checked
