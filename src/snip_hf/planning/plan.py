"""The precision plan: the format of each GEMM of each layer, and the origin of that decision.

A plan is checked whenever it is built, so a plan that exists can be applied.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

from torch import nn

from ..config import FORWARD
from ..costs.flops import Tokens, Work, executed, is_routed, linear_flops
from ..costs.rates import GemmTimes, linear_times, speedup
from ..costs.timing import MeasuredCost
from ..json_io import SCHEMA_VERSION, from_json, read_json, short, write_json_atomic
from ..layers.state import GRAD_WEIGHT, snip_linears
from ..numerics.formats import FORMATS, UNQUANTIZED, check_format
from ..numerics.gemms import GEMMS, Assignment
from ..text import printable

KIND = "snip-hf precision plan"
_COMPARE = "Was it made for another model? Run `snip-hf inspect PLAN --model MODEL` to compare."


@dataclass(frozen=True, kw_only=True)
class PlanProvenance:
    """The origin of a plan. None: does not apply, or unknown."""

    step: int
    """Optimizer step that the probe preceded; 0 for a plan made before training."""
    policy: str
    granularity: str | None = None
    target_fp4_fraction: float | None = None
    objective: float | None = None
    bound: float | None = None
    """Proven lower bound of the objective."""
    gap: float | None = None
    """(objective - bound) / objective."""
    solver: str | None = None
    solver_version: str | None = None
    seconds: float | None = None
    """Wall-clock time of the solver."""
    config: Mapping[str, Any] | None = None
    """The `SnipConfig` as a dict."""
    model_name: str | None = None

    def __post_init__(self) -> None:
        if self.config is not None:  # in JSON's types, so that a plan equals what is read from its file
            object.__setattr__(self, "config", json.loads(json.dumps(dict(self.config), allow_nan=False)))


@dataclass(frozen=True)
class PrecisionPlan:
    """Exact layer name and GEMM -> format. Immutable: the mappings are copied, ordered by stage and made read-only.

    A layer whose weight is frozen has no grad_weight; an entry for one without FLOPs is left out.

    Raises:
        ValueError: no layers; a layer without exactly the GEMMs that have FLOPs; an unknown format; FLOPs, measured
            times or tokens for other layers than the assignment's; stages that do not hold each layer exactly once, or
            have no FLOPs.
    """

    assignment: Assignment
    flops: Work
    stages: tuple[tuple[str, ...], ...]
    """Layer names of each (pipeline) stage; at least one stage."""
    provenance: PlanProvenance
    measured: MeasuredCost | None = None
    """The times that the target was met by (`budget="measured"`); None: it was met by FLOPs."""
    tokens: Tokens | None = None
    """{layer: tokens that it saw, and its GEMMs ran for}, from the last counted micro-batch. None: every layer and all
    its GEMMs saw the same number, or the model has experts and nothing was counted."""

    def __post_init__(self) -> None:
        flops, assignment = _table(self.flops, "flops", float), _table(self.assignment, "assignment", str)
        for layer in assignment.keys() ^ flops.keys():
            missing = "flops" if layer in assignment else "assignment"
            raise ValueError(
                f"{missing} has no entry for layer {short(layer)}; flops and assignment must name the same."
            )
        gemms = {layer: [gemm for gemm in row if gemm != GRAD_WEIGHT or row[gemm] > 0] for layer, row in flops.items()}
        for layer, row in assignment.items():
            if GRAD_WEIGHT in gemms[layer] and GRAD_WEIGHT not in row:
                raise ValueError(
                    f"assignment[{layer!r}] has no format for grad_weight, which has FLOPs: the plan was made for a "
                    "frozen weight. Freeze the weight, or use a plan that was made for a trained one."
                )
            for gemm in gemms[layer]:
                check_format(row[gemm], f"assignment[{layer!r}][{gemm!r}]")
                if flops[layer][gemm] < 0:
                    number = flops[layer][gemm]
                    raise ValueError(f"flops[{layer!r}][{gemm!r}] is {number}, expected a number of at least 0.")
        stages = _checked_stages(self.stages, flops)
        order = [layer for stage in stages for layer in stage]

        def ordered(table: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
            return MappingProxyType(
                {layer: MappingProxyType({gemm: table[layer][gemm] for gemm in gemms[layer]}) for layer in order}
            )

        if self.measured is not None:
            self.measured.check({layer: {gemm: flops[layer][gemm] for gemm in gemms[layer]} for layer in flops})
            object.__setattr__(self, "measured", replace(self.measured, seconds=ordered(self.measured.seconds)))
        object.__setattr__(self, "assignment", ordered(assignment))
        object.__setattr__(self, "flops", ordered(flops))
        object.__setattr__(self, "stages", stages)
        if self.tokens is not None:
            object.__setattr__(self, "tokens", self._checked_tokens())

    def _checked_tokens(self) -> Tokens:
        tokens = from_json(Tokens, self.tokens, "tokens")
        for layer in sorted(tokens.keys() ^ self.flops.keys()):
            raise ValueError(f"tokens and flops do not both name layer {short(layer)}; expected the same layers.")
        work = executed(self.flops, tokens)
        for index, stage in enumerate(self.stages):
            if not math.fsum(value for layer in stage for value in work[layer].values()) > 0:
                raise ValueError(
                    f"No layer of stages[{index}], such as {stage[0]!r}, saw a token of the micro-batch, so its FP4 "
                    "share means nothing. Leave its layers out (skip_modules), or let every micro-batch reach them."
                )
        return MappingProxyType({layer: tokens[layer] for layer in self.flops})

    @classmethod
    def uniform(
        cls, flops: Work, format: str, stages: Sequence[Sequence[str]], provenance: PlanProvenance
    ) -> PrecisionPlan:
        """The plan that runs every GEMM of every layer in `flops` in one format."""
        assignment = {layer: dict.fromkeys(row, format) for layer, row in flops.items()}
        return cls(assignment, flops, tuple(map(tuple, stages)), provenance)

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
        """True if `fp4_fraction` counts executed FLOPs; otherwise it assumes that experts see every token."""
        is_counted = self.tokens is not None or not any(map(is_routed, self.assignment))
        return is_counted or self.fp4_fraction in (0.0, 1.0)

    @property
    def stage_fp4_fractions(self) -> tuple[float, ...]:
        """`fp4_fraction` of each stage."""
        work = self.executed
        return tuple(self._fp4_fraction(stage, work) for stage in self.stages)

    @property
    def fp4_time_fraction(self) -> float | None:
        """Share (0..1) of the linears' measured time (`MeasuredCost.work`) that belongs to GEMMs in FP4, if any."""
        times = self.times
        return None if times is None else self._fp4_fraction(self.assignment, times.work)

    @property
    def stage_fp4_time_fractions(self) -> tuple[float, ...] | None:
        """`fp4_time_fraction` of each stage."""
        times = self.times
        if times is None:
            return None
        work = times.work
        return tuple(self._fp4_fraction(stage, work) for stage in self.stages)

    def linear_speedup(self) -> float | None:
        """Returns the time of the planned GEMMs in BF16 / their time in the plan; None: speeds or FLOPs are unknown.

        The speeds are the measured ones, or else those of the table that the plan's config names.
        """
        times = self._speeds()
        return None if times is None else speedup(self.assignment, self.assignment, times)

    def stage_linear_speedups(self) -> tuple[float, ...] | None:
        """`linear_speedup` of each stage."""
        times = self._speeds()
        return None if times is None else tuple(speedup(stage, self.assignment, times) for stage in self.stages)

    @property
    def speed_source(self) -> str:
        """Source of `linear_speedup`: "measured", or the table, e.g. "b200 rates"."""
        return "measured" if self.is_timed else f"{(self.provenance.config or {}).get('rates')} rates"

    @property
    def formats(self) -> set[str]:
        """The formats that GEMMs have."""
        return {name for row in self.assignment.values() for name in row.values()}

    @property
    def is_timed(self) -> bool:
        """True if there are measured times in every format of the plan."""
        return self.measured is not None and self.formats <= set(self.measured.formats)

    def _speeds(self) -> GemmTimes | None:
        if not self.is_share_known:
            return None
        own = (self.provenance.config or {}).get("rates")
        try:
            return linear_times(self.executed, self.formats, own, self.times if self.is_timed else None)
        except KeyError:  # no table
            return None

    def _fp4_fraction(self, layers: Iterable[str], work: Work, gemms: Collection[str] = GEMMS) -> float:
        """Returns the share of these layers' work in these GEMMs that is in FP4; 0 if there is no such work."""
        formats = [(layer, gemm, name) for layer in layers for gemm, name in self.assignment[layer].items()]
        pairs = [(name, work[layer][gemm]) for layer, gemm, name in formats if gemm in gemms]
        whole = math.fsum(weight for _, weight in pairs)
        return math.fsum(weight for name, weight in pairs if FORMATS[name].counts_as_fp4) / whole if whole > 0 else 0.0

    def changes(self, other: PrecisionPlan) -> dict[str, tuple[str, str]]:
        """Differences from this plan to `other`: {"layer:gemm": (format here, format in other)}.

        GEMMs that only one of them has (grad_weight of a frozen weight) are left out.

        Raises:
            ValueError: the two plans do not name the same layers.
        """
        missing, unexpected = self.mismatches(other.assignment)
        if missing or unexpected:
            layer = (missing + unexpected)[0]
            raise ValueError(f"Layer {layer!r} is in only one of the two plans; compare plans of the same model.")
        return {
            f"{layer}:{gemm}": (old, other.assignment[layer][gemm])
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
        if missing:
            raise KeyError(
                f"The plan has no entry for layer {missing[0]!r} (it names {len(self.assignment)} layers, "
                f"e.g. {next(iter(unexpected or self.assignment))!r}). {_COMPARE}"
            )
        if unexpected:
            raise KeyError(
                f"The plan names layer {unexpected[0]!r}, which is not a swapped layer of the model (it has "
                f"{len(present)}, e.g. {next(iter(present), None)!r}). {_COMPARE}"
            )

    def check_sizes(self, flops: Work) -> None:
        """Raises ValueError if layers that have these FLOPs per token are of other sizes than the plan's."""
        for layer, row in flops.items():
            planned = self.flops.get(layer, row)
            if planned[GEMMS[0]] != row[GEMMS[0]]:
                raise ValueError(
                    f"The plan is for a layer {layer!r} of {planned[GEMMS[0]]:g} FLOPs per token, the model's has "
                    f"{row[GEMMS[0]]:g}. {_COMPARE}"
                )

    def with_flops(self, flops: Work) -> PrecisionPlan:
        """Returns the plan with the FLOPs of the model that it is for, in which other weights may be frozen.

        Measured times stay only if the FLOPs are equal.

        Raises:
            KeyError, ValueError: as `check_layers` and `check_sizes`.
        """
        self.check_layers(flops)
        self.check_sizes(flops)
        own = {layer: dict(row) for layer, row in self.flops.items()}
        if own == {layer: dict(row) for layer, row in flops.items()}:
            return self
        return replace(self, flops=flops, measured=None)

    def describe(self) -> str:
        """Returns the FP4 shares, and the speed if it is known, for logs, reports and model cards."""
        if not self.is_share_known:
            return "an unknown FP4 share (no micro-batch was counted, and experts do not see every token)"
        text = f"{self.fp4_fraction:.1%} of the linear FLOPs in FP4{_by_stage(self.stage_fp4_fractions)}"
        forward = forward_shares(self)
        if forward is not None:
            text = f"{text}, {forward.describe()}"
        speedup = self.linear_speedup()
        if speedup is not None:
            text = f"{text}, linears at {speedup:.3f} times BF16's speed ({self.speed_source})"
        times = self.stage_fp4_time_fractions
        if times is None:
            return text
        return f"{text}, {self.fp4_time_fraction:.1%} of their time{_by_stage(times)}"

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain JSON data, layers in the order of the stages; "measured" and "tokens" only if they are."""
        document = {
            "schema_version": SCHEMA_VERSION,
            "kind": KIND,
            "assignment": {layer: dict(formats) for layer, formats in self.assignment.items()},
            "flops": {layer: dict(flops) for layer, flops in self.flops.items()},
            "stages": [list(stage) for stage in self.stages],
            "provenance": asdict(self.provenance),
        }
        if self.measured is not None:
            document["measured"] = self.measured.to_dict()
        return document if self.tokens is None else document | {"tokens": dict(self.tokens)}

    @classmethod
    def from_dict(cls, document: Any) -> PrecisionPlan:
        """The inverse of `to_dict`.

        Raises:
            ValueError: another schema version or kind, a missing or unknown key, or anything the plan itself refuses.
        """
        if not isinstance(document, Mapping):
            raise ValueError(f"the document is {short(document)}, expected an object.")
        for key, expected in (("kind", KIND), ("schema_version", SCHEMA_VERSION)):
            if document.get(key) != expected:
                raise ValueError(f"{key} is {short(document.get(key))}, expected {expected!r}.")
        values = {name: value for name, value in document.items() if name not in ("kind", "schema_version")}
        return from_json(cls, values)

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
        except ValueError as error:
            raise ValueError(
                f"{printable(path)} cannot be used as a precision plan: {error} Restore the file or let a "
                "run write it again."
            ) from error


def _table(table: Any, name: str, kind: type) -> dict[str, dict[str, Any]]:
    """{layer: {gemm: value}} with the GEMMs in their order; a layer may lack grad_weight (its weight is frozen)."""
    checked: dict[str, dict[str, Any]] = from_json(Mapping[str, Mapping[str, kind]], table, name)  # type: ignore[valid-type]
    if not checked:
        raise ValueError(f"{name} is empty, expected at least one layer.")
    for layer, row in checked.items():
        if not set(GEMMS) - {GRAD_WEIGHT} <= row.keys() <= set(GEMMS):
            got = short(", ".join(row))
            raise ValueError(f"{name}[{layer!r}] has the entries {got}; expected exactly {', '.join(GEMMS)}.")
        checked[layer] = {gemm: row[gemm] for gemm in GEMMS if gemm in row}
    return checked


def _checked_stages(stages: Any, flops: Work) -> tuple[tuple[str, ...], ...]:
    """The stages as tuples; refuses those that do not part the layers, or have no FLOPs."""
    checked: tuple[tuple[str, ...], ...] = from_json(tuple[tuple[str, ...], ...], stages, "stages")
    counts = Counter(layer for stage in checked for layer in stage)
    for layer in (*flops, *counts):
        if counts[layer] != (layer in flops):
            raise ValueError(f"stages name layer {layer!r} {counts[layer]} times, expected {int(layer in flops)}.")
    for index, stage in enumerate(checked):
        if not math.fsum(value for layer in stage for value in flops[layer].values()) > 0:
            raise ValueError(f"stages[{index}] has no FLOPs, so its FP4 share means nothing; leave the stage out.")
    return checked


def raised_plan(plan: PrecisionPlan, formats: Sequence[str]) -> PrecisionPlan:
    """Returns the plan in which all GEMMs have the next format of more bits; the last one is unquantized.

    Args:
        plan: in force; what is unquantized stays so.
        formats: of the run. Of several with as many bits, the first one is taken.
    """
    ladder = sorted(dict.fromkeys([*formats, UNQUANTIZED.name]), key=lambda name: FORMATS[name].bits)

    def raised(name: str) -> str:
        return next((other for other in ladder if FORMATS[other].bits > FORMATS[name].bits), name)

    assignment = {layer: {gemm: raised(name) for gemm, name in row.items()} for layer, row in plan.assignment.items()}
    return replace(plan, assignment=assignment)


@dataclass(frozen=True)
class ForwardShares:
    """Shares (0..1) of the forward GEMMs that run in FP4."""

    fp4_fraction: float
    """Share of their FLOPs."""
    stage_fp4_fractions: tuple[float, ...]
    """Share of their FLOPs in each stage."""
    fp4_time_fraction: float | None
    """Share of their measured time; None: nothing was measured."""

    def describe(self) -> str:
        """Returns text for the log, to follow the shares of all GEMMs."""
        time = "" if self.fp4_time_fraction is None else f" and {self.fp4_time_fraction:.1%} of their time"
        return f"{self.fp4_fraction:.1%} of the forward GEMMs only{_by_stage(self.stage_fp4_fractions)}{time}"


def _by_stage(shares: Sequence[float]) -> str:
    """Returns the shares of several stages in brackets; nothing for one stage."""
    return f" (per stage: {', '.join(f'{share:.1%}' for share in shares)})" if len(shares) > 1 else ""


def forward_shares(plan: PrecisionPlan) -> ForwardShares | None:
    """Returns the shares of a plan that decides on forward GEMMs only (`SnipConfig.decides`); None for other plans."""
    if (plan.provenance.config or {}).get("decides") != FORWARD:
        return None
    work, times = plan.executed, plan.times

    def share(layers: Iterable[str], work: Work) -> float:
        return plan._fp4_fraction(layers, work, GEMMS[:1])

    return ForwardShares(
        share(plan.assignment, work),
        tuple(share(stage, work) for stage in plan.stages),
        None if times is None else share(plan.assignment, times.work),
    )
