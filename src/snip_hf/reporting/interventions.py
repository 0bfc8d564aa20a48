"""What a report says of the guard's alarms and of other targets, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from ..config import read_shares, shares_text
from ..records.interventions import RAISED, Alarm, Retarget
from ..records.values import short


def alarms_told(alarms: Sequence[Alarm]) -> list[str]:
    """Returns a sentence per alarm."""
    return [f"Step {alarm.step}: guard. {alarm.reason}{_followed(alarm)}." for alarm in alarms]


def retargets_told(retargets: Sequence[Retarget]) -> list[str]:
    """Returns a sentence per resume with another target."""
    return [
        f"Step {event.step}: resumed with another target. "
        f"{'; '.join(f'{name} was {_value(old)} and is {_value(new)}' for name, (old, new) in event.fields.items())}."
        for event in retargets
    ]


def _followed(alarm: Alarm) -> str:
    left_out = ", and left the step out" if alarm.left_out else ""
    if alarm.action == RAISED:
        return f"; raised the formats of {len(alarm.changes)} GEMMs{left_out}"
    return left_out


def _value(value: object) -> str:
    shares = read_shares(value)
    return short(value) if shares is None else shares_text(shares)
