"""The events of a run, one class each. `to_record` returns the line of history.jsonl, and `read_event` parses it.

`RunRecord` writes them to the run's folder and passes them to the user's trackers; `read_history` reads them back.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

from ..costs.flops import Tokens
from ..estimation.coverage import Coverage
from ..json_io import MAX_JSON_BYTES, SCHEMA_VERSION, check_schema, from_json, parse_json, short
from ..numerics.formats import check_format
from ..planning.plan import PlanProvenance, PrecisionPlan, forward_shares
from ..planning.solver.process import SolverResult
from ..registry import UnknownName

LOSS, GRADIENT_NORM = "loss", "gradient norm"
NOTED, RAISED = "noted", "raised"
# Fields of a config that may change when a run is resumed; each change is an event.
TARGETS = ("target_fp4_fraction", "target_linear_speedup", "rates")
_PACKAGES = ("snip-hf", "torch", "torchao", "transformers", "accelerate", "trl", "peft", "mip", "scipy")

Changes = Mapping[str, tuple[str, str]]
"""`layer:gemm` -> (old format, new format)."""
Numbers = Mapping[str, float | None]


class _Line:
    """Writes and reads an event whose entries are its fields."""

    __slots__ = ()

    event: ClassVar[str]

    def to_record(self) -> dict[str, Any]:
        """Returns JSON data, with lists for tuples."""
        return json.loads(json.dumps({"event": self.event, **_values(self)}, default=asdict))

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Any:
        """Parses a line; raises ValueError, naming the field, if it is not such an event."""
        return from_json(cls, _entries(record))


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """A run begins. The first line of a history."""

    event: ClassVar[str] = "start"

    step: int
    """Optimizer steps done before; above 0 for a run that continues a checkpoint without SNIP."""
    config: Mapping[str, Any]
    """The `SnipConfig` as a dict."""
    plan: PrecisionPlan
    """The plan in force from here on."""
    model_name: str | None
    versions: Mapping[str, str] = field(default_factory=dict)
    """Package -> version (`installed_versions`)."""

    def to_record(self) -> dict[str, Any]:
        plan = self.plan.to_dict()
        return {
            "event": self.event,
            "schema_version": SCHEMA_VERSION,
            "step": self.step,
            "config": dict(self.config),
            "plan": plan["assignment"],
            "flops": plan["flops"],
            "stages": plan["stages"],
            "model_name": self.model_name,
            **({} if self.plan.tokens is None else {"tokens": plan["tokens"]}),
            **({"versions": dict(self.versions)} if self.versions else {}),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Start:
        """Parses a line; raises ValueError, naming the field, if it is not a start."""
        line = from_json(_StartLine, _entries(record))
        check_schema(line.schema_version)
        policy = line.config.get("policy")
        if not isinstance(policy, str):
            raise ValueError(f"config.policy is {short(policy)}, expected text.")
        provenance = PlanProvenance(step=line.step, policy=policy, config=line.config, model_name=line.model_name)
        plan = PrecisionPlan(line.plan, line.flops, line.stages, provenance, tokens=line.tokens)
        return cls(step=line.step, config=line.config, plan=plan, model_name=line.model_name, versions=line.versions)


@dataclass(frozen=True)
class _StartLine:
    """The layout of the line of a `Start`."""

    schema_version: int
    step: int
    config: Mapping[str, Any]
    plan: Mapping[str, Mapping[str, str]]
    flops: Mapping[str, Mapping[str, float]]
    stages: tuple[tuple[str, ...], ...]
    model_name: str | None
    tokens: Tokens | None = None
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class RefreshBegun(_Line):
    """The first part of a refresh, which a checkpoint holds while the solver works."""

    event: ClassVar[str] = "refresh"

    step: int
    """Optimizer step that was probed. Without a probe, the step at which the target changed."""
    target_fp4_fraction: float | None = None
    """Target of this refresh if the target changes during the run; else None."""
    loss: float | None = None
    """Loss of the probed micro-batch. None, and all further fields empty, if the refresh failed before."""
    divergence: Mapping[str, Numbers] = field(default_factory=dict)
    """Format -> {"loss", "weight"}: the totals over all layers."""
    memory_mib: Numbers = field(default_factory=dict)
    """"measured"."""
    seconds: Numbers = field(default_factory=dict)
    """"probe", "solver" and "waited"."""
    kernels: Numbers = field(default_factory=dict)
    """Numbers of the backend on the first rank since the last refresh (`Backend.counters`)."""

    def applied(self, step: int, plan: PrecisionPlan, changes: Changes, result: SolverResult | None) -> Refresh:
        """Returns the complete refresh, whose plan is now in force.

        Args:
            step: the optimizer step after which the plan was applied.
            plan: the new plan.
            changes: its `PrecisionPlan.changes` from the plan before.
            result: the result of the solver; None if nothing was solved.
        """
        found = ("objective", "bound", "gap", "solver", "solver_version")
        return Refresh(
            **_values(self),
            applied_step=step,
            decided_step=step,
            reason=None,
            **known_shares(plan),
            changes=changes,
            layers_changed=len({cell.rpartition(":")[0] for cell in changes}),
            **({} if result is None else {name: getattr(result, name) for name in found}),
        )

    def kept(self, step: int, plan: PrecisionPlan, reason: str) -> Refresh:
        """Returns the complete refresh, which keeps the plan in force.

        Args:
            step: the optimizer step at which this was decided.
            plan: the plan in force.
            reason: why it is kept.
        """
        return Refresh(**_values(self), applied_step=None, decided_step=step, reason=reason, **known_shares(plan))


@dataclass(frozen=True, kw_only=True, slots=True)
class Refresh(RefreshBegun):
    """A refresh has ended: its plan was applied, or the plan in force was kept."""

    applied_step: int | None
    """None if the plan in force was kept, for `reason`."""
    decided_step: int
    reason: str | None
    fp4_fraction: float | None
    """FP4 share of the plan now in force; the next shares are of this plan too."""
    stage_fp4_fractions: tuple[float | None, ...] = ()
    forward_fp4_fraction: float | None = None
    """Share of the forward GEMMs, if plans only decide on these."""
    stage_forward_fp4_fractions: tuple[float | None, ...] = ()
    fp4_time_fraction: float | None = None
    """None if no times were measured."""
    stage_fp4_time_fractions: tuple[float | None, ...] = ()
    linear_speedup: float | None = None
    """None without rates or times."""
    stage_linear_speedups: tuple[float | None, ...] = ()
    changes: Changes = field(default_factory=dict)
    layers_changed: int = 0
    objective: float | None = None
    """None, like the next fields, if the plan was kept or nothing was solved."""
    bound: float | None = None
    gap: float | None = None
    solver: str | None = None
    solver_version: str | None = None

    @property
    def status(self) -> str:
        """ "applied" or "kept"."""
        return "kept" if self.applied_step is None else "applied"

    def to_record(self) -> dict[str, Any]:
        return RefreshBegun.to_record(self) | {"status": self.status}


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted(_Line):
    """The FLOPs of a micro-batch were counted, for the coverage of the plan and the tokens of each layer."""

    event: ClassVar[str] = "coverage"

    step: int
    """Optimizer step of the micro-batch."""
    coverage: Coverage
    """Coverage of the micro-batches of all ranks."""
    tokens: Tokens | None
    """`PrecisionPlan.tokens` of the plan from here on, which its shares use."""
    changes: Changes = field(default_factory=dict)
    """Changes by a policy without a probe in response."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alarm(_Line):
    """The guard has seen a spike or a number that is not finite (`SnipConfig.guard`)."""

    event: ClassVar[str] = "guard"

    step: int
    """Optimizer step of the value; raised formats take effect from the next step on."""
    figure: str
    """"loss" or "gradient norm"."""
    value: float | None
    """None if it was not finite."""
    limit: float | None
    """Upper limit of the value; None if it only had to be finite."""
    action: str
    """"raised", or "noted" if nothing was left to raise."""
    reason: str
    failures: int
    """Number of consecutive alarms, including this one."""
    left_out: bool = False
    """True if the optimizer step was skipped."""
    changes: Changes = field(default_factory=dict)
    fp4_fraction: float | None = None
    """FP4 share of the plan now in force."""
    forward_fp4_fraction: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Retarget(_Line):
    """A run was resumed with another target."""

    event: ClassVar[str] = "target"

    step: int
    """The first optimizer step with the new target."""
    fields: Mapping[str, tuple[Any, Any]]
    """Field of the config -> (value in the checkpoint, new value), as JSON data."""


LaterEvent = Refresh | Counted | Alarm | Retarget
Event = Start | LaterEvent
_KINDS: dict[str, type[Event]] = {kind.event: kind for kind in (Start, Refresh, Counted, Alarm, Retarget)}


def read_event(record: Any) -> Event:
    """Parses a line of a history, given as JSON data.

    Raises:
        ValueError: it is not an event; names the field.
    """
    name = record.get("event") if isinstance(record, Mapping) else None
    if not isinstance(name, str) or name not in _KINDS:
        raise ValueError(f"event is {short(name)}, expected one of {', '.join(_KINDS)}.")
    return _KINDS[name].from_record(record)


def read_history(path: Path, notes: list[str] | None = None) -> Iterator[Event]:
    """Yields the events of a history.jsonl, the start first.

    Args:
        path: the file.
        notes: gets a sentence if the last line is incomplete, as after a killed process; None raises an error instead.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is not an event, the first line is not a start, or the file is too large; names the line and
            the field.
    """
    with open(path, "rb") as file:
        lines = file.read(MAX_JSON_BYTES + 1).split(b"\n")
        if sum(map(len, lines)) > MAX_JSON_BYTES:
            raise ValueError(f"{path} is larger than {MAX_JSON_BYTES} bytes.")
    if not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, 1):
        try:
            event = read_event(parse_json(line))
            if isinstance(event, Start) != (number == 1):
                raise ValueError("expected one start, in the first line.")
            changes = {} if isinstance(event, Start | Retarget) else event.changes
            for cell, (_, new) in changes.items():
                check_format(new, f"changes[{cell!r}]")
        except UnknownName as error:  # the line is intact, so it is not left out
            raise UnknownName(f"Line {number} of {path} cannot be read: {error}") from error
        except ValueError as error:
            if 1 < number == len(lines) and notes is not None:
                notes.append(f"The last line of {path.name} is not complete and is left out.")
                return
            raise ValueError(f"Line {number} of {path} is not a line of a snip-hf history: {error}") from error
        yield event
    if not lines:
        raise ValueError(f"{path} is empty; expected a line with the start of the run.")


def installed_versions() -> dict[str, str]:
    """Returns the versions of Python, of snip-hf and of the installed libraries that affect the numbers."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _entries(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of a line without its kind, and without the status, which others imply."""
    return {name: value for name, value in record.items() if name not in ("event", "status")}


def _values(event: Any) -> dict[str, Any]:
    return {one.name: getattr(event, one.name) for one in fields(event)}


def known_shares(plan: PrecisionPlan) -> dict[str, Any]:
    """Returns the fields of events that say how much of a plan is in FP4; without those that are not known."""
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
