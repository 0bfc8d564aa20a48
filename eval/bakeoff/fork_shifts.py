"""Shifts: what changes for every contender in the middle of a fork, so that a plan that is held goes stale."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

Rows = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Shift:
    """A change that stays, but for the scrambled steps."""

    name: str
    after: int
    """Steps of the fork before it."""
    learning_rate: float = 1.0
    """Factor of the learning rate."""
    batch: float = 1.0
    """Factor of the sequences of a step."""
    other_text: bool = False
    """Whether the recipe's other text is trained and evaluated on."""
    scrambled: int = 0
    """Steps whose tokens are in a random order, which makes the loss leap."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "batch"):
            if not getattr(self, name) > 0:
                raise ValueError(f"forks.shifts: {self.name}: {name}={getattr(self, name)}; expected a factor above 0.")
        if self.after < 1 or self.scrambled < 0:
            raise ValueError(
                f"forks.shifts: {self.name}: after={self.after}, scrambled={self.scrambled}; expected at least one "
                "step before the shift, since plans are made at the first one, and no negative number of steps."
            )

    def to_dict(self) -> dict[str, Any]:
        """Returns what tells shifts apart, for JSON."""
        return asdict(self)


def batches(shift: Shift | None, drawn: Rows, other: Rows, sequences: int, steps: int) -> Iterator[Rows]:
    """Yields the sequences of each step, (B, L).

    Args:
        shift: what changes; None: nothing.
        drawn: sequences of the text in the fork's order.
        other: sequences of the other text in the fork's order, begun again when they end; may be empty without a shift
            to it.
        sequences: of a step, before the shift.
        steps: of the fork.
    """
    place = other_place = 0
    for step in range(1, steps + 1):
        is_shifted = shift is not None and step > shift.after
        count = max(1, round(sequences * shift.batch)) if is_shifted else sequences
        if is_shifted and shift.other_text:
            rows = other.take(range(other_place, other_place + count), axis=0, mode="wrap")
            other_place += count
        else:
            rows = drawn[place : place + count]
            place += count
        yield scrambled(rows, step) if is_shifted and step <= shift.after + shift.scrambled else rows


def scrambled(rows: Rows, seed: int) -> Rows:
    """Returns sequences with their tokens in a random order."""
    mixed: Rows = np.random.default_rng(seed).permuted(rows, axis=1)
    return mixed


def sequences_needed(shift: Shift | None, sequences: int, steps: int) -> int:
    """Returns how many sequences of the text a fork asks for."""
    if shift is None or steps <= shift.after:
        return steps * sequences
    later = 0 if shift.other_text else (steps - shift.after) * max(1, round(sequences * shift.batch))
    return shift.after * sequences + later
