"""The events of a run, one class each: a line of history.jsonl is what `to_record` gives, and `from_record` reads it.

A history may come from elsewhere and hold anything: `from_record` checks every value before anybody works with it, and
names the field that it refuses. Entries that it does not know are left out, since a later version may write more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from ..costs.flops import as_json
from ..planning.forward_shares import forward_shares
from ..planning.plan import PrecisionPlan
from ..planning.provenance import PlanProvenance
from ..planning.solver.process import SolverResult
from ..text import printable
from .coverage import Counted
from .interventions import Alarm, Retarget
from .values import changes_of, check_event, entry_of, list_of, mapping_of, number_of, short, step_of, text_of

# The last one: of a backend, in one refresh.
_MOST_LAYERS, _MOST_PACKAGES, _MOST_FIGURES = 100_000, 1000, 100
# Of a refresh, which may be absent.
_NUMBERS = ("forward_fp4_fraction", "fp4_time_fraction", "linear_speedup", "objective", "bound", "gap")


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """A run begins. The first line of a history."""

    event: ClassVar[str] = "start"

    step: int
    """Optimizer steps that were done before; above 0 for a run that continues a checkpoint without SNIP."""
    config: Mapping[str, Any]
    """The `SnipConfig` as a dict."""
    plan: PrecisionPlan
    """The plan in force from here on."""
    model_name: str | None
    versions: Mapping[str, str] = field(default_factory=dict)
    """Package -> version (`records.versions`); empty for a run of an earlier version."""

    def to_record(self) -> dict[str, Any]:
        return {
            "event": self.event,
            "step": self.step,
            "config": dict(self.config),
            "plan": {layer: dict(formats) for layer, formats in self.plan.assignment.items()},
            "flops": {layer: dict(flops) for layer, flops in self.plan.flops.items()},
            "stages": [list(stage) for stage in self.plan.stages],
            "model_name": self.model_name,
            **({} if self.plan.tokens is None else {"tokens": as_json(self.plan.tokens)}),
            **({"versions": dict(self.versions)} if self.versions else {}),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Start:
        """Reads a line.

        Raises:
            ValueError: it is none of a start; names the field.
        """
        check_event(record, cls.event)
        config = mapping_of(entry_of(record, "config"), "config")
        assignment = mapping_of(entry_of(record, "plan"), "plan")
        if len(assignment) > _MOST_LAYERS:
            raise ValueError(f"plan names {len(assignment):,} layers, expected at most {_MOST_LAYERS:,}.")
        provenance = PlanProvenance(
            step=step_of(entry_of(record, "step"), "step"),
            policy=entry_of(config, "policy"),
            config=config,
            model_name=entry_of(record, "model_name") or None,
        )
        flops, stages = entry_of(record, "flops"), entry_of(record, "stages")
        plan = PrecisionPlan(assignment, flops, stages, provenance, tokens=record.get("tokens"))
        return cls(
            step=provenance.step,
            config=config,
            plan=plan,
            model_name=provenance.model_name,
            versions=_versions(record.get("versions", {})),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RefreshBegun:
    """A refresh so far: as a checkpoint holds it while the solver works, and the first part of its line."""

    event: ClassVar[str] = "refresh"

    step: int
    """Optimizer step that was probed; of a policy without a probe, the one at which its target changed."""
    target_fp4_fraction: float | None = None
    """That the refresh aims at, where a run has several; None: that of the config, or the refresh failed before."""
    loss: float | None = None
    """Of the probed micro-batch; None, as all that follows is empty: the refresh failed before."""
    divergence: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    """Format -> {"loss", "weight"}: the totals over all layers."""
    memory_mib: Mapping[str, float | None] = field(default_factory=dict)
    """"predicted" and "measured"."""
    seconds: Mapping[str, float | None] = field(default_factory=dict)
    """"probe", "solver" and "waited"."""
    kernels: Mapping[str, float | None] = field(default_factory=dict)
    """What the backend counted on the first rank since the refresh before (`Backend.figures`); empty: it counts
    nothing."""

    def to_record(self) -> dict[str, Any]:
        record: dict[str, Any] = {"event": self.event, "step": self.step}
        for name in ("target_fp4_fraction", "loss"):
            if getattr(self, name) is not None:
                record[name] = getattr(self, name)
        if self.divergence:
            record["divergence"] = {name: dict(totals) for name, totals in self.divergence.items()}
        for name in ("memory_mib", "seconds", "kernels"):
            if values := getattr(self, name):
                record[name] = dict(values)
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> RefreshBegun:
        """Reads the part of a line.

        Raises:
            ValueError: it is none of a refresh; names the field.
        """
        return cls(**_begun(record))

    def with_seconds(self, **seconds: float) -> RefreshBegun:
        """Returns the same with further times."""
        return replace(self, seconds={**self.seconds, **seconds})

    def applied(
        self, step: int, plan: PrecisionPlan, changes: Mapping[str, Any], result: SolverResult | None
    ) -> Refresh:
        """Returns the event of its end: its plan is in force.

        Args:
            step: the optimizer step after which it was applied.
            plan: the new one.
            changes: as `PrecisionPlan.changes` tells them from the plan before.
            result: the solver's; None: nothing was solved.
        """
        found = ("objective", "bound", "gap", "solver", "solver_version")
        return Refresh(
            **_values(self),
            applied_step=step,
            decided_step=step,
            reason=None,
            **_shares(plan),
            changes={cell: (old, new) for cell, (old, new) in changes.items()},
            layers_changed=len({cell.rpartition(":")[0] for cell in changes}),
            **({} if result is None else {name: getattr(result, name) for name in found}),
        )

    def kept(self, step: int, plan: PrecisionPlan, reason: str) -> Refresh:
        """Returns the event of its end: it came to nothing.

        Args:
            step: the optimizer step at which that is known.
            plan: the one in force, which stays.
            reason: why.
        """
        return Refresh(**_values(self), applied_step=None, decided_step=step, reason=reason, **_shares(plan))


@dataclass(frozen=True, kw_only=True, slots=True)
class Refresh(RefreshBegun):
    """A refresh has ended: its plan was applied, or the one in force was kept."""

    applied_step: int | None
    """None: the plan in force was kept, for `reason`."""
    decided_step: int
    reason: str | None
    fp4_fraction: float | None
    """Of the plan that is in force now, as the fractions that follow."""
    stage_fp4_fractions: tuple[float | None, ...] = ()
    forward_fp4_fraction: float | None = None
    """Of the forward GEMMs alone, where plans decide on these alone; None: they decide on all."""
    stage_forward_fp4_fractions: tuple[float | None, ...] = ()
    fp4_time_fraction: float | None = None
    """None: nothing was measured."""
    stage_fp4_time_fractions: tuple[float | None, ...] = ()
    linear_speedup: float | None = None
    """None: neither rates nor times tell."""
    stage_linear_speedups: tuple[float | None, ...] = ()
    changes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """"layer:gemm" -> (old format, new format)."""
    layers_changed: int = 0
    objective: float | None = None
    """None, as what follows: the plan was kept, or nothing was solved."""
    bound: float | None = None
    gap: float | None = None
    solver: str | None = None
    solver_version: str | None = None

    @property
    def status(self) -> str:
        """ "applied" or "kept"."""
        return "kept" if self.applied_step is None else "applied"

    def to_record(self) -> dict[str, Any]:
        record = RefreshBegun.to_record(self) | {
            "applied_step": self.applied_step,
            "decided_step": self.decided_step,
            "status": self.status,
            "reason": self.reason,
            "fp4_fraction": self.fp4_fraction,
            "stage_fp4_fractions": list(self.stage_fp4_fractions),
        }
        if self.forward_fp4_fraction is not None:
            record["forward_fp4_fraction"] = self.forward_fp4_fraction
            record["stage_forward_fp4_fractions"] = list(self.stage_forward_fp4_fractions)
        if self.fp4_time_fraction is not None:
            record["fp4_time_fraction"] = self.fp4_time_fraction
            record["stage_fp4_time_fractions"] = list(self.stage_fp4_time_fractions)
        if self.linear_speedup is not None:
            record["linear_speedup"] = self.linear_speedup
            record["stage_linear_speedups"] = list(self.stage_linear_speedups)
        record["changes"] = {cell: list(pair) for cell, pair in self.changes.items()}
        record["layers_changed"] = self.layers_changed
        if self.applied_step is not None:
            names = ("objective", "bound", "gap", "solver", "solver_version")
            record |= {name: getattr(self, name) for name in names}
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, Any], cells: Mapping[str, str] | None = None) -> Refresh:
        """Reads a line.

        Args:
            record: the line as JSON data.
            cells: the texts "layer:gemm" to use for equal ones, since a history names each layer very often.

        Raises:
            ValueError: it is none of a refresh; names the field.
        """
        begun = _begun(record)
        applied = entry_of(record, "applied_step")
        applied_step = None if applied is None else step_of(applied, "applied_step")
        decided = record.get("decided_step", begun["step"] if applied_step is None else applied_step)
        numbers: dict[str, Any] = {name: number_of(record.get(name), name) for name in _NUMBERS}
        texts: dict[str, Any] = {name: text_of(record.get(name), name) for name in ("solver", "solver_version")}
        found = cls(
            **begun,
            applied_step=applied_step,
            decided_step=step_of(decided, "decided_step"),
            reason=text_of(entry_of(record, "reason"), "reason"),
            fp4_fraction=number_of(entry_of(record, "fp4_fraction"), "fp4_fraction"),
            layers_changed=step_of(entry_of(record, "layers_changed"), "layers_changed"),
            changes=changes_of(entry_of(record, "changes"), cells or {}),
            stage_fp4_fractions=_numbers(record, "stage_fp4_fractions"),
            stage_forward_fp4_fractions=_numbers(record, "stage_forward_fp4_fractions"),
            stage_fp4_time_fractions=_numbers(record, "stage_fp4_time_fractions"),
            stage_linear_speedups=_numbers(record, "stage_linear_speedups"),
            **numbers,
            **texts,
        )
        if record.get("status", found.status) != found.status:
            raise ValueError(
                f"status is {short(record['status'])}, expected {found.status!r} where applied_step is {applied_step}."
            )
        return found


LaterEvent = Refresh | Counted | Alarm | Retarget
Event = Start | LaterEvent


def later_event(record: Mapping[str, Any], cells: Mapping[str, str] | None = None) -> LaterEvent:
    """Reads a line after the first one; `cells` as in `Refresh.from_record`.

    Raises:
        ValueError: it is none; names the field.
    """
    if entry_of(record, "event") == Retarget.event:
        return Retarget.from_record(record)
    if record["event"] == Counted.event:
        return Counted.from_record(record, cells)
    if record["event"] == Alarm.event:
        return Alarm.from_record(record, cells)
    return Refresh.from_record(record, cells)


def _values(event: RefreshBegun) -> dict[str, Any]:
    return {one.name: getattr(event, one.name) for one in fields(event)}


def _begun(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of `RefreshBegun`."""
    check_event(record, RefreshBegun.event)
    totals = mapping_of(record.get("divergence", {}), "divergence")
    return {
        "step": step_of(entry_of(record, "step"), "step"),
        **{name: number_of(record.get(name), name) for name in ("target_fp4_fraction", "loss")},
        "divergence": {name: _parts(totals, name, ("loss", "weight"), "divergence.") for name in totals},
        "memory_mib": _parts(record, "memory_mib", ("predicted", "measured")),
        "seconds": _parts(record, "seconds", ("probe", "solver", "waited")),
        "kernels": _parts(record, "kernels", _names(record, "kernels")),
    }


def _versions(value: object) -> dict[str, str]:
    found = mapping_of(value, "versions")
    if len(found) > _MOST_PACKAGES:
        raise ValueError(f"versions has {len(found):,} entries, expected at most {_MOST_PACKAGES}.")
    return {name: text_of(version, f"versions[{printable(name)!r}]") or "" for name, version in found.items()}


def _parts(record: Mapping[str, Any], name: str, parts: tuple[str, ...], where: str = "") -> Mapping[str, float | None]:
    """Returns the numbers of an entry that has one for each part; empty if there is no entry."""
    if name not in record:
        return {}
    shown = where + printable(name)
    values = mapping_of(record[name], shown)
    return {part: number_of(values.get(part), f"{shown}.{part}") for part in parts}


def _names(record: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Returns the names in an entry of numbers, which are the backend's own."""
    found = mapping_of(record.get(name, {}), name)
    if len(found) > _MOST_FIGURES:
        raise ValueError(f"{name} has {len(found):,} entries, expected at most {_MOST_FIGURES}.")
    return tuple(found)


def _numbers(record: Mapping[str, Any], name: str) -> tuple[float | None, ...]:
    return tuple(number_of(value, name) for value in list_of(record.get(name, []), name))


def _shares(plan: PrecisionPlan) -> dict[str, Any]:
    forward = forward_shares(plan)
    if not plan.is_share_known:
        return {"fp4_fraction": None}
    return {
        "fp4_fraction": plan.fp4_fraction,
        "stage_fp4_fractions": plan.stage_fp4_fractions,
        "forward_fp4_fraction": None if forward is None else forward.fp4_fraction,
        "stage_forward_fp4_fractions": () if forward is None else forward.stage_fp4_fractions,
        "fp4_time_fraction": plan.fp4_time_fraction,
        "stage_fp4_time_fractions": plan.stage_fp4_time_fractions or (),
        "linear_speedup": plan.linear_speedup(),
        "stage_linear_speedups": plan.stage_linear_speedups() or (),
    }
