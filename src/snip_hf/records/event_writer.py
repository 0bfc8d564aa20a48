"""The events of a run as they happen: each goes into history.jsonl, and then to the trackers that the user added."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..text import printable
from .events import Event
from .run_folder import RunFolder

# As much of an error as a line of the log shows.
_MESSAGE = 1000

Tracker = Callable[[Event], object]
"""Called with each event: a function, or an object with `__call__`."""


def check_tracker(tracker: object) -> None:
    """Raises TypeError for what cannot be called."""
    if not callable(tracker):
        raise TypeError(
            f"Got a {type(tracker).__name__} for a tracker; expected a function of one event, or an object with "
            "__call__(event)."
        )


class EventWriter:
    """Tells the run's folder and the trackers of each event, on the first rank.

    Args:
        folder: the run's; on the other ranks it writes nothing.
        is_first: whether this is the first rank.
        log: gets the warnings.
    """

    def __init__(self, folder: RunFolder, is_first: bool, log: logging.Logger) -> None:
        self.folder = folder
        """Gets the history, and from others the plan and the divergences."""
        self._is_first = is_first
        self._log = log
        self._trackers: list[Tracker] = []

    def add_tracker(self, tracker: Tracker) -> None:
        """Has a tracker told of all events from now on, after those that were added before it.

        Raises:
            TypeError: as `check_tracker`.
        """
        check_tracker(tracker)
        if self._is_first:
            self._trackers.append(tracker)

    def add(self, event: Event) -> None:
        """Writes an event and tells the trackers; one that fails costs a warning, and is told of the next event."""
        self.folder.append(event)
        for tracker in self._trackers:
            try:
                tracker(event)
            except Exception as error:  # a tracker may fail; training may not
                # As text: a handler that keeps its records would keep the error, and with it the frames.
                self._log.warning(
                    "snip-hf: a tracker failed at the %s event of step %d, training goes on: %s",
                    event.event,
                    event.step,
                    printable(repr(error), _MESSAGE),
                )
