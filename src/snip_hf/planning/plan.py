"""The precision plan: the format of each GEMM of each layer, and where that decision came from.

A plan is data: exact layer name and GEMM -> format, the FLOPs behind its FP4 share, the stages that each had to meet
the target, its provenance, and the measured times where these were what had to meet it. It is checked whenever it is
built, so a plan that exists is a plan that can be applied.
Files are JSON, read strictly: a plan may come from the Hub or from a disk that filled up.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from torch import nn

from ..costs.flops import Work
from ..costs.gemm_timing import Machine, check_seconds
from ..costs.measured_cost import MeasuredCost
from ..costs.rates import GemmTimes, linear_times, speedup
from ..json_io import read_json, write_json_atomic
from ..layers.state import GRAD_WEIGHT, snip_linears, with_plain_names
from ..numerics.formats import FORMATS, check_format
from ..numerics.gemms import GEMMS
from ..registry import UnknownName
from ..text import printable
from .checked_values import (
    MAX_TEXT,
    check_keys,
    check_text,
    check_type,
    checked_table,
    finite,
    short,
    without_idle,
)
from .provenance import PlanProvenance

SCHEMA_VERSION = 1
KIND = "snip-hf precision plan"

Assignment = Mapping[str, Mapping[str, str]]
Flops = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class PrecisionPlan:
    """Exact layer name and GEMM -> format. Immutable: the mappings are copied, ordered by stage and made read-only.

    A layer whose weight is frozen has no grad_weight. An entry for it, which earlier versions wrote with 0 FLOPs and
    which a plan has that was made for a trained weight, is left out.

    Raises:
        ValueError: no layers; a layer without exactly the GEMMs that have FLOPs; an unknown format; FLOPs for other
            layers than the assignment's, negative or not finite; stages that do not hold each layer exactly once, or
            have no FLOPs; measured times for other layers, or none for a GEMM that has FLOPs.
    """

    assignment: Assignment
    """{layer: {gemm: format}}"""
    flops: Flops
    """{layer: {gemm: FLOPs per token}}"""
    stages: tuple[tuple[str, ...], ...]
    """Layer names of each (pipeline) stage; at least one stage."""
    provenance: PlanProvenance
    measured: MeasuredCost | None = None
    """The times that the target was met by (`budget="measured"`); None: it was met by FLOPs."""

    def __post_init__(self) -> None:
        flops = checked_table(self.flops, "flops", lambda value, where: finite(value, where, minimum=0.0))
        flops = {layer: without_idle(row, row) for layer, row in flops.items()}
        assignment = checked_table(self.assignment, "assignment", check_format)
        _check_same_layers(assignment, flops)
        assignment = {layer: without_idle(row, flops[layer]) for layer, row in assignment.items()}
        _check_same_gemms(assignment, flops)
        stages = _checked_stages(self.stages, flops)
        if not isinstance(self.provenance, PlanProvenance):
            raise ValueError(f"provenance is {short(self.provenance)}, expected a PlanProvenance.")
        ordered = [layer for stage in stages for layer in stage]
        if self.measured is not None:
            object.__setattr__(self, "measured", _checked_measured(self.measured, flops, ordered))
        object.__setattr__(self, "assignment", MappingProxyType({layer: assignment[layer] for layer in ordered}))
        object.__setattr__(self, "flops", MappingProxyType({layer: flops[layer] for layer in ordered}))
        object.__setattr__(self, "stages", stages)

    @classmethod
    def uniform(
        cls, flops: Flops, format: str, stages: Sequence[Sequence[str]], provenance: PlanProvenance
    ) -> PrecisionPlan:
        """The plan that runs every GEMM of every layer in `flops` in one format."""
        assignment = {layer: dict.fromkeys(row, format) for layer, row in flops.items()}
        return cls(assignment, flops, _as_stages(stages), provenance)

    @property
    def fp4_fraction(self) -> float:
        """Share (0..1) of the planned linears' FLOPs that run in FP4; not a reduction of FLOPs."""
        return self._fp4_fraction(self.assignment, self.flops)

    @property
    def stage_fp4_fractions(self) -> tuple[float, ...]:
        """`fp4_fraction` of each stage alone."""
        return tuple(self._fp4_fraction(stage, self.flops) for stage in self.stages)

    @property
    def fp4_time_fraction(self) -> float | None:
        """Share (0..1) of the linears' measured time (`MeasuredCost.work`) that belongs to GEMMs in FP4, if any."""
        return None if self.measured is None else self._fp4_fraction(self.assignment, self.measured.work)

    @property
    def stage_fp4_time_fractions(self) -> tuple[float, ...] | None:
        """`fp4_time_fraction` of each stage alone."""
        if self.measured is None:
            return None
        work = self.measured.work
        return tuple(self._fp4_fraction(stage, work) for stage in self.stages)

    def linear_speedup(self, rates: str | None = None) -> float | None:
        """Returns the time of the planned GEMMs in BF16 by their time in the plan; None: nothing tells the speeds.

        Args:
            rates: a table of `costs.rates`. None: the measured times, or else the table that the plan's config names.

        Raises:
            KeyError: there is no such table, or it does not have a format of the plan.
        """
        times = self._times(rates)
        return None if times is None else speedup(self.assignment, self.assignment, times)

    def stage_linear_speedups(self, rates: str | None = None) -> tuple[float, ...] | None:
        """`linear_speedup` of each stage alone."""
        times = self._times(rates)
        return None if times is None else tuple(speedup(stage, self.assignment, times) for stage in self.stages)

    @property
    def speed_source(self) -> str:
        """What `linear_speedup` goes by, where that is not None: "measured", or the table, e.g. "b200 rates"."""
        return "measured" if self.is_timed else f"{(self.provenance.config or {}).get('rates')} rates"

    @property
    def _used(self) -> set[str]:
        return {name for row in self.assignment.values() for name in row.values()}

    @property
    def is_timed(self) -> bool:
        """Whether there are measured times in every format of the plan."""
        return self.measured is not None and self._used <= set(self.measured.formats)

    def _times(self, rates: str | None) -> GemmTimes | None:
        if rates is not None:
            return linear_times(self.flops, self._used, rates, None)
        own = (self.provenance.config or {}).get("rates")
        try:
            return linear_times(self.flops, self._used, own, self.measured if self.is_timed else None)
        except (KeyError, TypeError):  # no table, or a plan from elsewhere whose config names anything
            return None

    def _fp4_fraction(self, layers: Iterable[str], work: Work) -> float:
        pairs = [(name, work[layer][gemm]) for layer in layers for gemm, name in self.assignment[layer].items()]
        return math.fsum(weight for name, weight in pairs if FORMATS[name].counts_as_fp4) / math.fsum(
            weight for _, weight in pairs
        )

    def changes(self, other: PrecisionPlan) -> dict[str, list[str]]:
        """What changes from this plan to `other`: {"layer:gemm": [format here, format in other]}, equal ones left out.

        Raises:
            ValueError: the two plans do not name the same layers.
        """
        missing, unexpected = self.mismatches(other.assignment)
        if missing or unexpected:
            layer = (missing + unexpected)[0]
            raise ValueError(f"Layer {layer!r} is in only one of the two plans; compare plans of the same model.")
        return {
            f"{layer}:{gemm}": [old, other.assignment[layer][gemm]]
            for layer, formats in self.assignment.items()
            for gemm, old in formats.items()
            if old != other.assignment[layer][gemm]
        }

    def mismatches(self, layers: Iterable[str]) -> tuple[list[str], list[str]]:
        """Compares with the layers of a model: (those without an entry here, those named here but not there)."""
        present = dict.fromkeys(layers)
        return [x for x in present if x not in self.assignment], [x for x in self.assignment if x not in present]

    def apply(self, model: nn.Module, elsewhere: Iterable[str] = ()) -> None:
        """Sets the formats of every swapped layer of `model`, by exact name; all of them or, on an error, none.

        Args:
            model: the model, or a part of it.
            elsewhere: names of layers that other processes hold.

        Raises:
            KeyError: the model has a swapped layer that the plan does not name, or the other way round.
        """
        linears = snip_linears(model)
        self.check_layers([*linears, *elsewhere])
        for layer, linear in linears.items():
            if linear.weight.requires_grad and GRAD_WEIGHT not in self.assignment[layer]:
                raise ValueError(
                    f"The plan has no format for the grad_weight of layer {layer!r}, whose weight is trained; the plan "
                    "was made while it was frozen. Freeze it again, or begin a new run with it trained."
                )
        for layer, linear in linears.items():
            # A frozen weight's gradient never runs; its format is that of the forward GEMM.
            formats = self.assignment[layer]
            linear.set_formats({GRAD_WEIGHT: formats[GEMMS[0]], **formats})

    def check_layers(self, layers: Iterable[str]) -> None:
        """Raises KeyError unless the plan names exactly these layers, those that a model has."""
        present = list(dict.fromkeys(layers))
        missing, unexpected = self.mismatches(present)
        advice = "Was it made for another model? Run `snip-hf inspect PLAN --model MODEL` to compare."
        if missing:
            raise KeyError(
                f"The plan has no entry for layer {missing[0]!r} (it names {len(self.assignment)} layers, "
                f"e.g. {next(iter(self.assignment))!r}). {advice}"
            )
        if unexpected:
            raise KeyError(
                f"The plan names layer {unexpected[0]!r}, which is no swapped layer of the model (it has "
                f"{len(present)}, e.g. {next(iter(present), None)!r}). {advice}"
            )

    def with_flops(self, flops: Flops) -> PrecisionPlan:
        """Returns the plan with a model's own FLOPs in place of a file's, so that its FP4 shares are the model's.

        Measured times stay only where the FLOPs are the same, since others are not of this model.

        Raises:
            KeyError: as `check_layers`.
        """
        self.check_layers(flops)
        own = {layer: dict(row) for layer, row in self.flops.items()}
        if own == {layer: dict(row) for layer, row in flops.items()}:
            return self
        return replace(self, flops=flops, measured=None)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain JSON data, layers in the order of the stages; "measured" only where there is any."""
        document = {
            "schema_version": SCHEMA_VERSION,
            "kind": KIND,
            "assignment": {layer: dict(formats) for layer, formats in self.assignment.items()},
            "flops": {layer: dict(flops) for layer, flops in self.flops.items()},
            "stages": [list(stage) for stage in self.stages],
            "provenance": self.provenance.to_dict(),
        }
        return document if self.measured is None else document | {"measured": self.measured.to_dict()}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> PrecisionPlan:
        """The inverse of `to_dict`.

        Raises:
            ValueError: another schema version or kind, a missing or unknown key, or anything the plan itself refuses.
        """
        check_type(document, Mapping, "the document", "a JSON object")
        if document.get("kind") != KIND:
            raise ValueError(f"kind is {short(document.get('kind'))}, expected {KIND!r}.")
        version = document.get("schema_version")
        if type(version) is not int or version != SCHEMA_VERSION:
            raise ValueError(f"schema_version is {short(version)}, expected {SCHEMA_VERSION}.")
        measured = ("measured",) if "measured" in document else ()
        keys = ("schema_version", "kind", "assignment", "flops", "stages", "provenance", *measured)
        check_keys(document, keys, "the document")
        provenance = document["provenance"]
        check_type(provenance, Mapping, "provenance", "a JSON object")
        check_keys(provenance, tuple(field.name for field in fields(PlanProvenance)), "provenance")
        return cls(
            with_plain_names(document["assignment"]),
            with_plain_names(document["flops"]),
            with_plain_names(document["stages"]),
            PlanProvenance(**provenance),
            read_measured(with_plain_names(document["measured"])) if measured else None,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON; the file at `path` is the old one or the whole new one, never a part."""
        write_json_atomic(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PrecisionPlan:
        """Reads a plan that `save` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not exactly a plan; names the file, the field and what to do.
        """
        try:
            return cls.from_dict(read_json(path))
        except UnknownName as error:
            raise UnknownName(
                f"{printable(path, MAX_TEXT)} cannot be read: {error} Otherwise, restore the file or let a run "
                "write it again."
            ) from error
        except ValueError as error:
            raise ValueError(
                f"{printable(path, MAX_TEXT)} is not a usable precision plan: {error} Restore the file or let a "
                "run write it again."
            ) from error


def _check_same_layers(assignment: Assignment, flops: Flops) -> None:
    for layer in (*assignment, *flops):
        if layer not in assignment or layer not in flops:
            missing = "flops" if layer in assignment else "assignment"
            raise ValueError(f"{missing} has no entry for layer {layer!r}; both must name the same layers.")


def _check_same_gemms(assignment: Assignment, flops: Flops) -> None:
    for layer, row in assignment.items():
        if row.keys() != flops[layer].keys():
            raise ValueError(
                f"assignment[{layer!r}] has no format for grad_weight, which has FLOPs: the plan was made for a frozen "
                "weight. Freeze the weight, or use a plan that was made for a trained one."
            )


def _as_stages(stages: Any) -> tuple[tuple[Any, ...], ...]:
    check_type(stages, (list, tuple), "stages", "a list of lists of layer names")
    for index, stage in enumerate(stages):
        check_type(stage, (list, tuple), f"stages[{index}]", "a list of layer names")
    return tuple(tuple(stage) for stage in stages)


def _checked_stages(stages: Any, flops: Flops) -> tuple[tuple[str, ...], ...]:
    """`stages` as tuples, after checking that they part the layers of `flops` and that each has FLOPs."""
    checked = _as_stages(stages)
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


def read_measured(document: Any) -> MeasuredCost:
    check_type(document, Mapping, "measured", "a JSON object")
    document = {"reference": MeasuredCost.reference, **document}  # plans of earlier versions do not name it
    check_keys(document, tuple(field.name for field in fields(MeasuredCost)), "measured")
    machine = document["machine"]
    check_type(machine, Mapping, "measured.machine", "a JSON object")
    check_keys(machine, tuple(field.name for field in fields(Machine)), "measured.machine")
    return MeasuredCost(**{**document, "machine": Machine(**machine)})


def _checked_measured(measured: Any, flops: Flops, order: Sequence[str]) -> MeasuredCost:
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
