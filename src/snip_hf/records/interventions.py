"""The events of a run that no refresh makes: an alarm of the guard, and another target after a resume.

As in files, every value is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..text import printable
from .values import changes_of, check_event, entry_of, list_of, mapping_of, number_of, short, step_of, text_of

LOSS, GRADIENT_NORM = "loss", "gradient norm"
_FIGURES = (LOSS, GRADIENT_NORM)
NOTED, RAISED = "noted", "raised"
_ACTIONS = (NOTED, RAISED)
# Fields of a config that a resumed run may have otherwise, with an event.
TARGETS = ("target_fp4_fraction", "target_linear_speedup", "rates")


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
    """"raised", or "noted" where nothing was left to raise."""
    reason: str
    failures: int
    """Alarms in a row, this one included."""
    left_out: bool = False
    """Whether the optimizer step was left out."""
    changes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """As in `Refresh`."""
    fp4_fraction: float | None = None
    """Of the plan that is in force now."""
    forward_fp4_fraction: float | None = None

    def to_record(self) -> dict[str, Any]:
        numbers = ("value", "limit", "fp4_fraction", "forward_fp4_fraction")
        return {
            "event": self.event,
            "step": self.step,
            "figure": self.figure,
            "action": self.action,
            "reason": self.reason,
            "failures": self.failures,
            "left_out": self.left_out,
            **{name: getattr(self, name) for name in numbers},
            "changes": {cell: list(pair) for cell, pair in self.changes.items()},
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any], cells: Mapping[str, str] | None = None) -> Alarm:
        """Reads a line; `cells` as in `Refresh.from_record`.

        Raises:
            ValueError: it is none of an alarm; names the field.
        """
        check_event(record, cls.event)
        numbers = ("value", "limit", "fp4_fraction", "forward_fp4_fraction")
        found: dict[str, Any] = {name: number_of(record.get(name), name) for name in numbers}
        return cls(
            step=step_of(entry_of(record, "step"), "step"),
            figure=_one_of(record, "figure", _FIGURES),
            action=_one_of(record, "action", _ACTIONS),
            reason=text_of(entry_of(record, "reason"), "reason") or "",
            failures=step_of(entry_of(record, "failures"), "failures"),
            left_out=bool(entry_of(record, "left_out")),
            changes=changes_of(entry_of(record, "changes"), cells or {}),
            **found,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Retarget:
    """A resumed run has another target than its checkpoint."""

    event: ClassVar[str] = "target"

    step: int
    """The first optimizer step under it."""
    fields: Mapping[str, tuple[Any, Any]]
    """Field of the config -> (in the checkpoint, now), as JSON data."""

    def to_record(self) -> dict[str, Any]:
        return {
            "event": self.event,
            "step": self.step,
            "fields": {name: list(pair) for name, pair in self.fields.items()},
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Retarget:
        """Reads a line.

        Raises:
            ValueError: it is none of a new target; names the field.
        """
        check_event(record, cls.event)
        found = mapping_of(entry_of(record, "fields"), "fields")
        for name, pair in found.items():
            if name not in TARGETS:
                raise ValueError(f"fields names {printable(repr(name), 60)}, expected one of {', '.join(TARGETS)}.")
            if len(list_of(pair, f"fields[{name!r}]")) != 2:
                raise ValueError(f"fields[{name!r}] is {short(pair)}, expected the old and the new value.")
        return cls(
            step=step_of(entry_of(record, "step"), "step"),
            fields={name: (old, new) for name, (old, new) in found.items()},
        )


def _one_of(record: Mapping[str, Any], name: str, known: tuple[str, ...]) -> str:
    value = entry_of(record, name)
    if value not in known:
        raise ValueError(f"{name} is {short(value)}, expected one of {', '.join(known)}.")
    return str(value)
