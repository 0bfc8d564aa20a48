"""The event of a count: what a plan covers of a micro-batch. As files hold it, every value is checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..costs.flops import FORWARD, GRAD_INPUT, Tokens, as_json
from ..estimation.coverage import Coverage, Uncovered
from ..text import printable
from .values import changes_of, check_event, entry_of, list_of, mapping_of, number_of, short, step_of, text_of

_MOST_GROUPS = 10_000


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
    changes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """What a policy without a probe changed by it, as in `Refresh`."""

    def to_record(self) -> dict[str, Any]:
        return {
            "event": self.event,
            "step": self.step,
            **self.coverage.to_dict(),
            "tokens": None if self.tokens is None else as_json(self.tokens),
            "changes": {cell: list(pair) for cell, pair in self.changes.items()},
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any], cells: Mapping[str, str] | None = None) -> Counted:
        """Reads a line; `cells` as in `Refresh.from_record`.

        Raises:
            ValueError: it is none of a count; names the field.
        """
        check_event(record, cls.event)
        tokens = entry_of(record, "tokens")
        found = None if tokens is None else mapping_of(tokens, "tokens")
        return cls(
            step=step_of(entry_of(record, "step"), "step"),
            coverage=read_coverage(record),
            tokens=None if found is None else {name: _tokens(found, name) for name in found},
            changes=changes_of(entry_of(record, "changes"), cells or {}),
        )


def read_coverage(value: object) -> Coverage:
    """Reads `Coverage.to_dict`.

    Raises:
        ValueError: it is not that; names the field.
    """
    document = mapping_of(value, "coverage")
    rest = list_of(entry_of(document, "uncovered"), "uncovered")
    if len(rest) > _MOST_GROUPS:
        raise ValueError(f"uncovered has {len(rest):,} entries, expected at most {_MOST_GROUPS:,}.")
    uncovered = [_read_uncovered(mapping_of(one, f"uncovered[{index}]"), index) for index, one in enumerate(rest)]
    aside = mapping_of(document.get("aside", {}), "aside")
    found = Coverage(
        _amount(document, "flops"),
        _amount(document, "covered"),
        uncovered,
        {name: _amount(aside, name) for name in aside},
    )
    if found.covered > found.flops:
        raise ValueError(f"covered is {found.covered:g}, expected at most flops, {found.flops:g}.")
    return found


def _read_uncovered(record: Mapping[str, object], index: int) -> Uncovered:
    where = f"uncovered[{index}]"
    names = [text_of(entry_of(record, part), f"{where}.{part}") or "" for part in ("name", "kind", "reason")]
    share = _amount(record, "share")
    if share > 1:
        raise ValueError(f"{where}.share is {short(share)}, expected at most 1.")
    return Uncovered(names[0], names[1], share, names[2])


def _amount(record: Mapping[str, object], name: str) -> float:
    number = number_of(entry_of(record, name), name)
    if number is None or number < 0:
        raise ValueError(f"{short(name)} is {short(number)}, expected a number of at least 0.")
    return number


def _tokens(found: Mapping[str, Any], layer: str) -> float | dict[str, float]:
    own, where = found[layer], f"tokens[{printable(layer)!r}]"
    if isinstance(own, Mapping):
        return {gemm: _count(entry_of(own, gemm), f"{where}[{gemm!r}]") for gemm in (FORWARD, GRAD_INPUT)}
    return _count(own, where)


def _count(value: object, where: str) -> float:
    number = number_of(value, where)
    if number is None or number < 0:
        raise ValueError(f"{where} is {short(number)}, expected a number of at least 0.")
    return number
