"""history.jsonl read back as events: bounded in size, checked line by line, with the line in every error."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from ..json_io import parse_json
from ..layers.state import GRAD_WEIGHT
from ..registry import UnknownName
from .coverage import Counted
from .events import Event, Refresh, Start, later_event
from .interventions import Alarm
from .values import mapping_of

# A history of 100,000 refreshes of a 70B model takes about 50 MB; one line of a model of 45,032 linears up to 15 MB.
MAX_HISTORY_BYTES = 192 * 2**20
_MOST_LINES = 250_000

Changing = Refresh | Counted | Alarm
"""Events that may change formats."""


def read_history(path: Path, notes: list[str] | None = None) -> Iterator[Event]:
    """Yields the events, the start first.

    Args:
        path: the file.
        notes: gets a sentence if the last line is not complete, as a killed run may leave it; None: that is an error.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
        ValueError: it is no history, or too large; names the line, the field and what is wrong.
    """
    cells: dict[str, str] | None = None
    idle: set[str] = set()
    for number, line, is_last in _lines(path):
        try:
            record = mapping_of(parse_json(line), "the line")
            event: Event = Start.from_record(record) if cells is None else later_event(record, cells)
        except UnknownName as error:  # No damage, so that the last line is not left out either.
            raise UnknownName(f"Line {number} of {path} cannot be read: {error}") from error
        except ValueError as error:
            if cells is not None and is_last and notes is not None:
                notes.append(f"The last line of {path.name} is not complete and is left out.")
                return
            raise ValueError(f"Line {number} of {path} is not a line of a snip-hf history: {error}") from error
        if isinstance(event, Start):
            names = [f"{layer}:{gemm}" for layer, row in event.plan.assignment.items() for gemm in row]
            cells = dict(zip(names, names, strict=True))
            idle = {f"{layer}:{GRAD_WEIGHT}" for layer in event.plan.assignment} - cells.keys()
        elif isinstance(event, Changing):
            event = _without_idle(event, idle)
            _check_layers(event, cells or {})
        yield event
    if cells is None:
        raise ValueError(f"{path} is empty; expected a line with the start of the run.")


def _lines(path: Path) -> Iterator[tuple[int, bytes, bool]]:
    """Yields (number, line, whether it is the last one)."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size > MAX_HISTORY_BYTES:
            raise ValueError(f"{path} is larger than {MAX_HISTORY_BYTES} bytes, which no history of a run is.")
        size, number, line = 0, 0, file.readline(MAX_HISTORY_BYTES)
        while line:
            size, number = size + len(line), number + 1
            following = file.readline(MAX_HISTORY_BYTES)
            if number > _MOST_LINES or size > MAX_HISTORY_BYTES:
                raise ValueError(f"{path} has more than {_MOST_LINES:,} lines, which no history of a run has.")
            yield number, line, not following
            line = following


def _without_idle(event: Changing, idle: Collection[str]) -> Changing:
    """Returns an event without changes of the grad_weight of frozen layers, which earlier versions had in plans."""
    if not any(cell in event.changes for cell in idle):
        return event
    return replace(event, changes={cell: pair for cell, pair in event.changes.items() if cell not in idle})


def _check_layers(event: Changing, cells: Mapping[str, str]) -> None:
    for cell in event.changes:
        if cell not in cells:
            raise ValueError(
                f"The {event.event} of step {event.step} changes layer {cell.rpartition(':')[0]!r}, which the start "
                "does not have."
            )
