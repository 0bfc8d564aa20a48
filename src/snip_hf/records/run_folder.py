"""The folder OUTPUT/snip that a run writes: the plan in force, the history, and tables of divergences.

A failed write costs the record, not the run: each method but `hold` warns instead of raising an error. One run at a
time writes there, and what an earlier one wrote is moved aside. Other files in the folder stay.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..estimation.table import DivergenceTable
from ..json_io import append_json_line, parse_json, remove_temporaries, write_atomic, write_json_atomic
from ..planning.plan import PrecisionPlan
from ..text import printable
from .events import Event, Refresh, Start

logger = logging.getLogger(__name__)

# In the folder of the run (the Trainer's output_dir).
FOLDER = "snip"
DIVERGENCE_VERSION = 2
# Characters of a path or an error that the log shows.
_SHOWN = 1000

Tracker = Callable[[Event], object]
"""Called with each event: a function, or an object with `__call__`."""


class RunFolder:
    """The folder OUTPUT/snip of one run; with `output_dir` None nothing is written at all.

    The folder is the one that `output_dir` names now, wherever the process changes to later.
    """

    def __init__(self, output_dir: str | os.PathLike[str] | None) -> None:
        self._folder = None if output_dir is None else Path(output_dir).absolute() / FOLDER
        self._lock: FileLock | None = None
        self._lost = False

    @property
    def run_dir(self) -> Path | None:
        """The run's own folder, around `snip`; None: nothing is written."""
        return None if self._folder is None else self._folder.parent

    def hold(self) -> None:
        """Takes the folder for this run, until `release` or the end of the process.

        An earlier run of this process that still has the folder, such as one that failed, records nothing from then on.

        Raises:
            ValueError: a run in another process has it; names the folder.
        """
        if self._folder is None:
            return
        output = self._folder.parent
        earlier = _HOLDERS.get(str(output.resolve()))
        if earlier is not None:
            earlier.release()
        try:
            output.mkdir(parents=True, exist_ok=True)
            # The Trainer does not upload names that begin with an underscore.
            lock = FileLock(output / "_snip.lock", thread_local=False)
            lock.acquire(timeout=0)
        except Timeout as error:
            raise ValueError(
                f"Another run is writing into {printable(self._folder, _SHOWN)}. Wait until it has ended, or give this "
                "run an output_dir of its own."
            ) from error
        except (OSError, NotImplementedError) as error:
            self._warn("could not lock %s, training goes on; do not start a second run there: %s", output, error)
        else:
            self._lock = lock
            _HOLDERS[str(output.resolve())] = self

    def release(self) -> None:
        """Lets the next run have the folder; this one writes nothing there any more."""
        if self._lock is not None:
            self._lock.release()

    def clear(self) -> None:
        """Moves the record of an earlier run aside, to OUTPUT/_snip-earlier-1/snip or the next number that is free.

        The plan is copied, so that there is one at any time.
        """
        self._write(self._set_aside)

    def save_plan(self, plan: PrecisionPlan) -> None:
        """Writes plan.json, the plan in force."""
        self._write(lambda folder: plan.save(folder / "plan.json"))

    def write_divergences(self, step: int, table: DivergenceTable) -> None:
        """Writes divergence-<step>.json, the table that the refresh of `step` decided from."""
        records = table.to_records()
        # Naming each column once halves the size.
        columns = list(records[0]) if records else []
        rows = [list(record.values()) for record in records]
        origin = {"schema_version": DIVERGENCE_VERSION, "step": step, "loss": table.loss}
        document = {**origin, "columns": columns, "rows": rows}
        self._write(lambda folder: write_json_atomic(folder / f"divergence-{step}.json", document))

    def append(self, event: Event) -> None:
        """Adds an event to history.jsonl."""
        self._write(lambda folder: append_json_line(folder / "history.jsonl", event.to_record()))

    def cut(self, step: int, pending: int | None, start: Start) -> None:
        """Removes what was decided after `step` from the record: it is about to happen again.

        Args:
            step: the optimizer step to resume from.
            pending: step of the refresh that is under way; it is not decided, even if an ended run wrote so.
            start: the first event for a folder that has no history.
        """

        def rewrite(folder: Path) -> None:
            _remove_temporaries(folder)
            path = folder / "history.jsonl"
            lines = _read(path) if path.exists() else []
            kept = [line for line in lines if line.get("decided_step", line["step"]) <= step]
            kept = [line for line in kept if line.get("event") != Refresh.event or line["step"] != pending]
            if not kept or kept[0].get("event") != Start.event:
                kept = [start.to_record()]
            write_atomic(path, "".join(json.dumps(line) + "\n" for line in kept).encode())
            for number, table in tables(folder).items():
                if number > step:
                    table.unlink()

        self._write(rewrite)

    def _set_aside(self, folder: Path) -> None:
        _remove_temporaries(folder)
        history = folder / "history.jsonl"
        # The history last: without it, a move that was cut short goes on.
        own = [path for path in (*tables(folder).values(), history) if path.is_file()]
        if not own:
            return
        for number in itertools.count(1):
            target = folder.parent / f"_snip-earlier-{number}" / FOLDER
            if not any(os.path.lexists(target / path.name) for path in (*own, history)):
                break
        target.mkdir(parents=True, exist_ok=True)
        try:
            if (folder / "plan.json").is_file():
                shutil.copy2(folder / "plan.json", target)
            for path in own:
                shutil.move(path, target)
        except OSError as error:
            # Two runs must not mix in one history, nor is the earlier one's worth less than this one's.
            self._lost = True
            message = f"what an earlier run recorded cannot be moved aside, so this one records nothing ({error})."
            raise OSError(message) from error
        logger.info(
            "snip-hf: moved what an earlier run recorded in %s to %s.",
            printable(folder, _SHOWN),
            printable(target, _SHOWN),
        )

    def _write(self, write: Callable[[Path], None]) -> None:
        if self._folder is None or self._lost:
            return
        if self._lock is not None and not self._lock.is_locked:
            self._lost = True
            logger.warning(
                "snip-hf: %s belongs to a later run of this process, or this run was closed: from here on it records "
                "nothing there.",
                printable(self._folder, _SHOWN),
            )
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write(self._folder)
        except (OSError, ValueError) as error:  # ValueError: a number that is not finite, or more than a reader takes
            self._warn("could not write to %s, training goes on: %s", self._folder, error)

    @staticmethod
    def _warn(message: str, path: Path, error: Exception) -> None:
        # As text: a handler that keeps its records would keep the error, and with it the frames and their model.
        logger.warning(f"snip-hf: {message}", printable(path, _SHOWN), printable(error, _SHOWN))


# Folder -> the run of this process that took it last.
_HOLDERS: weakref.WeakValueDictionary[str, RunFolder] = weakref.WeakValueDictionary()


def check_tracker(tracker: object) -> None:
    """Raises TypeError if a tracker cannot be called."""
    if not callable(tracker):
        raise TypeError(
            f"Got a {type(tracker).__name__} for a tracker; expected a function of one event, or an object with "
            "__call__(event)."
        )


class EventWriter:
    """Writes each event of a run into its folder and passes it to the trackers, on the first rank.

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
        """Calls a tracker with all events from now on, after those that were added before it.

        Raises:
            TypeError: it cannot be called.
        """
        check_tracker(tracker)
        if self._is_first:
            self._trackers.append(tracker)

    def add(self, event: Event) -> None:
        """Writes an event and calls the trackers; one that fails costs a warning, and gets the next event."""
        self.folder.append(event)
        for tracker in self._trackers:
            try:
                tracker(event)
            except Exception as error:  # a tracker may fail; training may not
                self._log.warning(
                    "snip-hf: a tracker failed at the %s event of step %d, training goes on: %s",
                    event.event,
                    event.step,
                    printable(repr(error), _SHOWN),
                )


def tables(folder: Path) -> dict[int, Path]:
    """Returns step -> file of divergences, of exactly the names that a run writes; others are the user's."""
    found = {path: re.fullmatch(r"divergence-([0-9]{1,18})\.json", path.name) for path in folder.glob("divergence-*")}
    return dict(sorted((int(match[1]), path) for path, match in found.items() if match and path.is_file()))


def _remove_temporaries(folder: Path) -> None:
    remove_temporaries(folder, "plan.json", "history.jsonl", "divergence-*.json")


def _read(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a history, without broken ones, which a crash leaves."""
    lines = []
    for line in path.read_bytes().splitlines():
        try:
            record = parse_json(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            lines.append(record)
    return lines
