"""The events of a run, one class each: a line of history.jsonl is what `to_record` gives and `read_event` reads.

`EventWriter` writes them into the run's folder and passes them to the user's trackers; `read_history` reads them back.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

from ..costs.flops import Tokens, as_json
from ..estimation.coverage import Coverage
from ..json_io import MAX_JSON_BYTES, from_json, parse_json, short
from ..numerics.formats import check_format
from ..planning.plan import PlanProvenance, PrecisionPlan, forward_shares
from ..planning.solver.process import SolverResult
from ..registry import UnknownName

LOSS, GRADIENT_NORM = "loss", "gradient norm"
NOTED, RAISED = "noted", "raised"
# Fields of a config that a resumed run may have otherwise, with an event.
TARGETS = ("target_fp4_fraction", "target_linear_speedup", "rates")
_PACKAGES = ("snip-hf", "torch", "torchao", "transformers", "accelerate", "trl", "peft", "mip", "scipy")

Changes = Mapping[str, tuple[str, str]]
"""`layer:gemm` -> (old format, new format)."""
Numbers = Mapping[str, float | None]


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
    """Package -> version (`installed_versions`)."""

    def to_record(self) -> dict[str, Any]:
        plan = self.plan.to_dict()
        return {
            "event": self.event,
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
        """Reads a line; raises ValueError, which names the field, if it is not a start."""
        line = from_json(_StartLine, _of_event(record, cls.event))
        policy = line.config.get("policy")
        if not isinstance(policy, str):
            raise ValueError(f"config.policy is {short(policy)}, expected text.")
        provenance = PlanProvenance(step=line.step, policy=policy, config=line.config, model_name=line.model_name)
        plan = PrecisionPlan(line.plan, line.flops, line.stages, provenance, tokens=line.tokens)
        return cls(step=line.step, config=line.config, plan=plan, model_name=line.model_name, versions=line.versions)


@dataclass(frozen=True)
class _StartLine:
    """The layout of the line of a `Start`."""

    step: int
    config: Mapping[str, Any]
    plan: Mapping[str, Mapping[str, str]]
    flops: Mapping[str, Mapping[str, float]]
    stages: tuple[tuple[str, ...], ...]
    model_name: str | None
    tokens: Tokens | None = None
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class RefreshBegun:
    """A refresh so far: as a checkpoint holds it while the solver works, and the first part of its line."""

    event: ClassVar[str] = "refresh"

    step: int
    """Optimizer step that was probed; of a policy without a probe, the one at which its target changed."""
    target_fp4_fraction: float | None = None
    """The refresh's target, if the run has several; None: that of the config, or the refresh failed before."""
    loss: float | None = None
    """Of the probed micro-batch; None, and all that follows empty: the refresh failed before."""
    divergence: Mapping[str, Numbers] = field(default_factory=dict)
    """Format -> {"loss", "weight"}: the totals over all layers."""
    memory_mib: Numbers = field(default_factory=dict)
    """"measured"."""
    seconds: Numbers = field(default_factory=dict)
    """"probe", "solver" and "waited"."""
    kernels: Numbers = field(default_factory=dict)
    """What the backend counted on the first rank since the last refresh (`Backend.figures`)."""

    def to_record(self) -> dict[str, Any]:
        """Returns JSON data without what is empty."""
        values = {one.name: getattr(self, one.name) for one in fields(RefreshBegun)}
        kept = {name: value for name, value in values.items() if value is not None and value != {}}
        return {"event": self.event, **kept}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> RefreshBegun:
        """Reads the part of a line; raises ValueError, which names the field, if it is not one."""
        begun: RefreshBegun = from_json(cls, _of_event(record, cls.event))
        return begun

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
            changes: from the plan before, as `PrecisionPlan.changes` returns them.
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
    """Of the forward GEMMs, if plans decide on these only."""
    stage_forward_fp4_fractions: tuple[float | None, ...] = ()
    fp4_time_fraction: float | None = None
    """None: nothing was measured."""
    stage_fp4_time_fractions: tuple[float | None, ...] = ()
    linear_speedup: float | None = None
    """None: there are neither rates nor times."""
    stage_linear_speedups: tuple[float | None, ...] = ()
    changes: Changes = field(default_factory=dict)
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
        for name, stages in _OPTIONAL_SHARES.items():
            if getattr(self, name) is not None:
                record |= {name: getattr(self, name), stages: list(getattr(self, stages))}
        record["changes"] = {cell: list(pair) for cell, pair in self.changes.items()}
        record["layers_changed"] = self.layers_changed
        if self.applied_step is not None:
            names = ("objective", "bound", "gap", "solver", "solver_version")
            record |= {name: getattr(self, name) for name in names}
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Refresh:
        """Reads a line; raises ValueError, which names the field, if it is not a refresh."""
        values = _of_event(record, cls.event)
        values.pop("status", None)
        refresh: Refresh = from_json(cls, values)
        return refresh


_OPTIONAL_SHARES = {
    "forward_fp4_fraction": "stage_forward_fp4_fractions",
    "fp4_time_fraction": "stage_fp4_time_fractions",
    "linear_speedup": "stage_linear_speedups",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """The FLOPs of a micro-batch were counted: what the plan covers, and which tokens each layer saw."""

    event: ClassVar[str] = "coverage"

    step: int
    """Optimizer step of the micro-batch."""
    coverage: Coverage
    """Of the micro-batches of all ranks."""
    tokens: Tokens | None
    """As `PrecisionPlan.tokens`, by which shares count from here on."""
    changes: Changes = field(default_factory=dict)
    """What a policy without a probe changed because of it."""

    def to_record(self) -> dict[str, Any]:
        return {
            "event": self.event,
            "step": self.step,
            **self.coverage.to_dict(),
            "tokens": None if self.tokens is None else as_json(self.tokens),
            "changes": {cell: list(pair) for cell, pair in self.changes.items()},
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Counted:
        """Reads a line; raises ValueError, which names the field, if it is not a count."""
        values = _of_event(record, cls.event)
        own = {name: values.pop(name) for name in ("step", "tokens", "changes") if name in values}
        counted: Counted = from_json(cls, own | {"coverage": values})
        return counted


@dataclass(frozen=True, kw_only=True, slots=True)
class Alarm:
    """The guard has seen a spike or a number that is not finite (`SnipConfig.guard`)."""

    event: ClassVar[str] = "guard"

    step: int
    """Optimizer step of the figure; formats that were raised act from the next one on."""
    figure: str
    """"loss" or "gradient norm"."""
    value: float | None
    """None: it was not finite."""
    limit: float | None
    """What the value had to stay below; None: to be finite."""
    action: str
    """"raised", or "noted" if nothing was left to raise."""
    reason: str
    failures: int
    """Alarms in a row, this one included."""
    left_out: bool = False
    """Whether the optimizer step was left out."""
    changes: Changes = field(default_factory=dict)
    fp4_fraction: float | None = None
    """Of the plan that is in force now."""
    forward_fp4_fraction: float | None = None

    def to_record(self) -> dict[str, Any]:
        return {"event": self.event, **_values(self), "changes": {cell: list(x) for cell, x in self.changes.items()}}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Alarm:
        """Reads a line; raises ValueError, which names the field, if it is not an alarm."""
        alarm: Alarm = from_json(cls, _of_event(record, cls.event))
        return alarm


@dataclass(frozen=True, kw_only=True, slots=True)
class Retarget:
    """A resumed run has another target than its checkpoint."""

    event: ClassVar[str] = "target"

    step: int
    """The first optimizer step under it."""
    fields: Mapping[str, tuple[Any, Any]]
    """Field of the config -> (in the checkpoint, now), as JSON data."""

    def to_record(self) -> dict[str, Any]:
        pairs = {name: list(pair) for name, pair in self.fields.items()}
        return {"event": self.event, "step": self.step, "fields": pairs}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Retarget:
        """Reads a line; raises ValueError, which names the field, if it is not a new target."""
        retarget: Retarget = from_json(cls, _of_event(record, cls.event))
        return retarget


LaterEvent = Refresh | Counted | Alarm | Retarget
Event = Start | LaterEvent
_KINDS: dict[str, type[Event]] = {kind.event: kind for kind in (Start, Refresh, Counted, Alarm, Retarget)}


def read_event(record: Any) -> Event:
    """Reads a line of a history, as JSON data.

    Raises:
        ValueError: it is not an event; names the field.
    """
    kind = record.get("event") if isinstance(record, Mapping) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"event is {short(kind)}, expected one of {', '.join(_KINDS)}.")
    return _KINDS[kind].from_record(record)


def read_history(path: Path, notes: list[str] | None = None) -> Iterator[Event]:
    """Yields the events of a history.jsonl; the first is the start.

    Args:
        path: the file.
        notes: gets a sentence if the last line is incomplete, as a killed process leaves it. None: it raises.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is not an event, the first is not a start, or the file is too large; names line and field.
    """
    with open(path, "rb") as file:
        lines = file.read(MAX_JSON_BYTES + 1).split(b"\n")
        if sum(map(len, lines)) > MAX_JSON_BYTES:
            raise ValueError(f"{path} is larger than {MAX_JSON_BYTES} bytes.")
    if not lines[-1]:
        lines.pop()
    cells: set[str] = set()
    for number, line in enumerate(lines, 1):
        try:
            event = read_event(parse_json(line))
            if isinstance(event, Start) != (number == 1):
                raise ValueError("expected one start, in the first line.")
            changes = {} if isinstance(event, Start | Retarget) else event.changes
            for cell, (_, new) in changes.items():
                check_format(new, f"changes[{cell!r}]")
        except UnknownName as error:  # not damaged, so not left out
            raise UnknownName(f"Line {number} of {path} cannot be read: {error}") from error
        except ValueError as error:
            if 1 < number == len(lines) and notes is not None:
                notes.append(f"The last line of {path.name} is not complete and is left out.")
                return
            raise ValueError(f"Line {number} of {path} is not a line of a snip-hf history: {error}") from error
        if isinstance(event, Start):
            cells = {f"{layer}:{gemm}" for layer, row in event.plan.assignment.items() for gemm in row}
        for cell in changes:
            if cell not in cells:
                raise ValueError(f"Line {number} of {path} changes {cell!r}, which the start of the run lacks.")
        yield event
    if not lines:
        raise ValueError(f"{path} is empty; expected a line with the start of the run.")


def installed_versions() -> dict[str, str]:
    """Returns the versions of Python, snip-hf and the libraries that compute, if they are installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _of_event(record: Mapping[str, Any], expected: str) -> dict[str, Any]:
    if record.get("event") != expected:
        raise ValueError(f"event is {short(record.get('event'))}, expected {expected!r}.")
    return {name: value for name, value in record.items() if name != "event"}


def _values(event: Any) -> dict[str, Any]:
    return {one.name: getattr(event, one.name) for one in fields(event)}


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
