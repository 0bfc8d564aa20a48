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

from ..costs.flops import Tokens, Work, as_json, executed, is_routed, linear_flops
from ..costs.measured_cost import MeasuredCost
from ..costs.rates import GemmTimes, linear_times, speedup
from ..json_io import read_json, write_json_atomic
from ..layers.state import GRAD_WEIGHT, snip_linears
from ..numerics.formats import FORMATS, check_format
from ..numerics.gemms import GEMMS
from ..registry import UnknownName
from ..text import printable
from .checked_tables import (
    as_stages,
    check_same_gemms,
    check_same_layers,
    checked_measured,
    checked_stages,
    checked_table,
    checked_tokens,
    read_measured,
    without_idle,
)
from .checked_values import MAX_TEXT, check_keys, check_type, finite, short
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
            have no FLOPs; measured times or tokens for other layers, or no time for a GEMM that has FLOPs.
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
    tokens: Tokens | None = None
    """{layer: tokens that it saw, and its GEMMs ran for}, of the last micro-batch that was counted; None: every layer
    saw the same number, and so did all its GEMMs, or, of a model with experts, nothing was counted."""

    def __post_init__(self) -> None:
        flops = checked_table(self.flops, "flops", lambda value, where: finite(value, where, minimum=0.0))
        flops = {layer: without_idle(row, row) for layer, row in flops.items()}
        assignment = checked_table(self.assignment, "assignment", check_format)
        check_same_layers(assignment, flops)
        assignment = {layer: without_idle(row, flops[layer]) for layer, row in assignment.items()}
        check_same_gemms(assignment, flops)
        stages = checked_stages(self.stages, flops)
        if not isinstance(self.provenance, PlanProvenance):
            raise ValueError(f"provenance is {short(self.provenance)}, expected a PlanProvenance.")
        ordered = [layer for stage in stages for layer in stage]
        if self.measured is not None:
            object.__setattr__(self, "measured", checked_measured(self.measured, flops, ordered))
        if self.tokens is not None:
            object.__setattr__(self, "tokens", checked_tokens(self.tokens, flops, stages))
        object.__setattr__(self, "assignment", MappingProxyType({layer: assignment[layer] for layer in ordered}))
        object.__setattr__(self, "flops", MappingProxyType({layer: flops[layer] for layer in ordered}))
        object.__setattr__(self, "stages", stages)

    @classmethod
    def uniform(
        cls, flops: Flops, format: str, stages: Sequence[Sequence[str]], provenance: PlanProvenance
    ) -> PrecisionPlan:
        """The plan that runs every GEMM of every layer in `flops` in one format."""
        assignment = {layer: dict.fromkeys(row, format) for layer, row in flops.items()}
        return cls(assignment, flops, as_stages(stages), provenance)

    @property
    def executed(self) -> Work:
        """Layer -> GEMM -> FLOPs that run, per token of the micro-batch."""
        return executed(self.flops, self.tokens)

    @property
    def times(self) -> MeasuredCost | None:
        """The measured times, by the tokens that layers saw."""
        return None if self.measured is None else self.measured.executed(self.tokens)

    @property
    def fp4_fraction(self) -> float:
        """Share (0..1) of the planned linears' executed FLOPs that are in FP4; not a reduction of FLOPs."""
        return self._fp4_fraction(self.assignment, self.executed)

    @property
    def is_share_known(self) -> bool:
        """Whether `fp4_fraction` counts what runs. Else it takes experts to see every token, which they do not."""
        is_counted = self.tokens is not None or not any(map(is_routed, self.assignment))
        return is_counted or self.fp4_fraction in (0.0, 1.0)

    @property
    def stage_fp4_fractions(self) -> tuple[float, ...]:
        """`fp4_fraction` of each stage alone."""
        work = self.executed
        return tuple(self._fp4_fraction(stage, work) for stage in self.stages)

    @property
    def fp4_time_fraction(self) -> float | None:
        """Share (0..1) of the linears' measured time (`MeasuredCost.work`) that belongs to GEMMs in FP4, if any."""
        times = self.times
        return None if times is None else self._fp4_fraction(self.assignment, times.work)

    @property
    def stage_fp4_time_fractions(self) -> tuple[float, ...] | None:
        """`fp4_time_fraction` of each stage alone."""
        times = self.times
        if times is None:
            return None
        work = times.work
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
            return linear_times(self.executed, self._used, rates, None)
        own = (self.provenance.config or {}).get("rates")
        try:
            return linear_times(self.executed, self._used, own, self.times if self.is_timed else None)
        except (KeyError, TypeError):  # no table, or a plan from elsewhere whose config names anything
            return None

    def _fp4_fraction(self, layers: Iterable[str], work: Work) -> float:
        pairs = [(name, work[layer][gemm]) for layer in layers for gemm, name in self.assignment[layer].items()]
        return math.fsum(weight for name, weight in pairs if FORMATS[name].counts_as_fp4) / math.fsum(
            weight for _, weight in pairs
        )

    def changes(self, other: PrecisionPlan) -> dict[str, list[str]]:
        """What changes from this plan to `other`: {"layer:gemm": [format here, format in other]}, equal ones left out.

        So are GEMMs that only one of them has: the grad_weight of a layer whose weight is frozen in the other.

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
            if old != other.assignment[layer].get(gemm, old)
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
            ValueError: the model has no swapped layers, or layers of other sizes than the plan's, or trains a weight
                that was frozen when the plan was made.
        """
        linears = snip_linears(model)
        present = [*linears, *elsewhere]
        if not present:
            raise ValueError(
                f"{type(model).__name__} has no swapped layers that a plan could give formats. Call "
                "convert_model(model, config) before, with the skip_modules of the run that made the plan."
            )
        self.check_layers(present)
        self.check_sizes(linear_flops(model))
        for layer, linear in linears.items():
            if linear.weight.requires_grad and GRAD_WEIGHT not in self.assignment[layer]:
                raise ValueError(
                    f"The plan has no format for the grad_weight of layer {layer!r}, whose weight is trained; the plan "
                    "was made while it was frozen. Freeze it again, or begin a new run with it trained."
                )
        for layer, linear in linears.items():
            linear.set_formats(self.formats_of(layer))

    def formats_of(self, layer: str) -> dict[str, str]:
        """Returns GEMM -> format of a layer for all three GEMMs."""
        formats = self.assignment[layer]
        # A frozen weight's gradient never runs; its format is that of the forward GEMM.
        return {GRAD_WEIGHT: formats[GEMMS[0]], **formats}

    def check_layers(self, layers: Iterable[str]) -> None:
        """Raises KeyError unless the plan names exactly these layers, those that a model has."""
        present = list(dict.fromkeys(layers))
        missing, unexpected = self.mismatches(present)
        if present and {*present}.isdisjoint(self.assignment):
            raise KeyError(
                f"The plan is for another kind of model: it names layers such as {next(iter(self.assignment))!r}, and "
                f"the model has layers such as {present[0]!r}."
            )
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

    def check_sizes(self, flops: Flops) -> None:
        """Raises ValueError if layers that have these FLOPs per token are of other sizes than the plan's."""
        for layer, row in flops.items():
            planned = self.flops.get(layer, row)
            if planned[GEMMS[0]] != row[GEMMS[0]]:
                raise ValueError(
                    f"The plan is for a layer {layer!r} of {planned[GEMMS[0]]:g} FLOPs per token, the model's has "
                    f"{row[GEMMS[0]]:g}. Was it made for another model? Run `snip-hf inspect PLAN --model MODEL` "
                    "to compare."
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
        """The plan as plain JSON data, layers in the order of the stages; "measured" and "tokens" only if they are."""
        document = {
            "schema_version": SCHEMA_VERSION,
            "kind": KIND,
            "assignment": {layer: dict(formats) for layer, formats in self.assignment.items()},
            "flops": {layer: dict(flops) for layer, flops in self.flops.items()},
            "stages": [list(stage) for stage in self.stages],
            "provenance": self.provenance.to_dict(),
        }
        if self.measured is not None:
            document["measured"] = self.measured.to_dict()
        return document if self.tokens is None else document | {"tokens": as_json(self.tokens)}

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
        optional = [name for name in ("measured", "tokens") if name in document]
        keys = ("schema_version", "kind", "assignment", "flops", "stages", "provenance", *optional)
        check_keys(document, keys, "the document")
        provenance = document["provenance"]
        check_type(provenance, Mapping, "provenance", "a JSON object")
        check_keys(provenance, tuple(field.name for field in fields(PlanProvenance)), "provenance")
        return cls(
            document["assignment"],
            document["flops"],
            document["stages"],
            PlanProvenance(**provenance),
            read_measured(document["measured"]) if "measured" in document else None,
            document.get("tokens"),
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
