"""The record of a run in the folder OUTPUT/snip: the plan in force, the history, and tables of divergences.

Training must not fail because of a failed write, so all methods except `hold` warn instead of raising an error. Only
one run at a time writes to the folder. The folder of an earlier run is moved aside.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..estimation.table import DivergenceTable
from ..json_io import SCHEMA_VERSION, append_json_line, parse_json, write_atomic, write_json_atomic
from ..planning.plan import PrecisionPlan
from ..text import printable
from .events import Event, Refresh, Start

# In the folder of the run (the Trainer's output_dir).
FOLDER = "snip"

Tracker = Callable[[Event], object]
"""A function, or an object with `__call__`, that is called with each event."""


class RunRecord:
    """The record of a run: its folder and its trackers, both on the first rank only, and its log.

    Args:
        output_dir: holds the folder; None: nothing is written. A relative path is resolved when the object is built.
        is_first: whether this is the first rank.
        log: that of this rank.
    """

    def __init__(self, output_dir: str | os.PathLike[str] | None, is_first: bool, log: logging.Logger) -> None:
        self._folder = None if output_dir is None or not is_first else Path(output_dir).absolute() / FOLDER
        self._lock: FileLock | None = None
        self._lost = False
        self.log = log
        self._is_first = is_first
        self._trackers: list[Tracker] = []

    def hold(self) -> None:
        """Locks the folder for this run, until `release` or the end of the process.

        Takes the lock over from an earlier run of this process, such as a failed one, which then records nothing more.

        Raises:
            ValueError: a run in another process holds the lock; names the folder.
        """
        if self._folder is None:
            return
        output = self._folder.parent
        earlier = _HOLDERS.get(str(output.resolve()))
        if earlier is not None:
            earlier.release()
        try:
            output.mkdir(parents=True, exist_ok=True)
            # The Trainer does not upload files that begin with an underscore.
            lock = FileLock(output / "_snip.lock", thread_local=False)
            lock.acquire(timeout=0)
        except Timeout as error:
            raise ValueError(
                f"Another run is writing to {printable(self._folder)}. Wait until it has ended, or give this "
                "run its own output_dir."
            ) from error
        except (OSError, NotImplementedError) as error:
            self._warn("could not lock %s, training continues; do not start a second run there: %s", output, error)
        else:
            self._lock = lock
            _HOLDERS[str(output.resolve())] = self

    def release(self) -> None:
        """Unlocks the folder for the next run; this run writes nothing more to it."""
        if self._lock is not None:
            self._lock.release()

    def clear(self) -> None:
        """Moves the folder of an earlier run to OUTPUT/_snip-earlier-1/snip, or to the next free number."""
        self._write(self._move_earlier)

    def save_plan(self, plan: PrecisionPlan) -> None:
        """Writes plan.json, the plan in force."""
        self._write(lambda folder: plan.save(folder / "plan.json"))

    def write_divergences(self, step: int, table: DivergenceTable) -> None:
        """Writes divergence-<step>.json, the table behind the decision of the refresh at `step`."""
        records = [dict(vars(row)) for row in table.rows]
        # Naming each column once halves the size.
        columns = list(records[0]) if records else []
        rows = [list(record.values()) for record in records]
        origin = {"schema_version": SCHEMA_VERSION, "step": step, "loss": table.loss}
        document = {**origin, "ties": table.ties, "columns": columns, "rows": rows}
        self._write(lambda folder: write_json_atomic(folder / f"divergence-{step}.json", document))

    def add_tracker(self, tracker: Tracker) -> None:
        """Calls a tracker with all events from now on, after the trackers added before it."""
        if self._is_first:
            self._trackers.append(tracker)

    def add(self, event: Event) -> None:
        """Appends an event to history.jsonl and calls the trackers. An error in a tracker becomes a warning."""
        self._write(lambda folder: append_json_line(folder / "history.jsonl", event.to_record()))
        for tracker in self._trackers:
            try:
                tracker(event)
            except Exception as error:  # a failing tracker must not end training
                self.log.warning(
                    "snip-hf: a tracker failed at the %s event of step %d, training continues: %s",
                    event.event,
                    event.step,
                    printable(repr(error)),
                )

    def cut(self, step: int, pending: int | None, start: Start) -> None:
        """Removes everything decided after `step`, because the resumed run decides it again.

        Args:
            step: the optimizer step to resume from.
            pending: probe step of the refresh that is pending in the checkpoint; its event is removed too.
            start: the first event, for a folder without a history.
        """

        def rewrite(folder: Path) -> None:
            path = folder / "history.jsonl"
            lines = _read(path) if path.exists() else []
            kept = [line for line in lines if line.get("decided_step", line["step"]) <= step]
            kept = [line for line in kept if line.get("event") != Refresh.event or line["step"] != pending]
            if not kept or kept[0].get("event") != Start.event:
                kept = [start.to_record()]
            write_atomic(path, "".join(json.dumps(line) + "\n" for line in kept).encode())
            for probe_step, table in tables(folder).items():
                if probe_step > step:
                    table.unlink()

        self._write(rewrite)

    def _move_earlier(self, folder: Path) -> None:
        if not tables(folder) and not (folder / "history.jsonl").exists():
            return
        targets = (folder.parent / f"_snip-earlier-{number}" / FOLDER for number in itertools.count(1))
        target = next(target for target in targets if not target.exists())
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(folder, target)
        except OSError as error:
            # Two runs must not mix in one history, and the earlier history must not be overwritten.
            self._lost = True
            message = f"the records of an earlier run cannot be moved aside, so this run records nothing ({error})."
            raise OSError(message) from error
        self.log.info(
            "snip-hf: moved the records of an earlier run from %s to %s.", printable(folder), printable(target)
        )

    def _write(self, write: Callable[[Path], None]) -> None:
        if self._folder is None or self._lost:
            return
        if self._lock is not None and not self._lock.is_locked:
            self._lost = True
            self.log.warning(
                "snip-hf: a later run of this process writes to %s, or this run was closed; nothing more is recorded "
                "there.",
                printable(self._folder),
            )
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write(self._folder)
        except (OSError, ValueError) as error:  # ValueError: a non-finite number, or a file too large to be read
            self._warn("could not write to %s, training continues: %s", self._folder, error)

    def _warn(self, message: str, path: Path, error: Exception) -> None:
        # Log the text: a handler that keeps log records would also keep the error, its frames and their model.
        self.log.warning(f"snip-hf: {message}", printable(path), printable(error))


# Folder -> the run of this process that locked it last.
_HOLDERS: weakref.WeakValueDictionary[str, RunRecord] = weakref.WeakValueDictionary()


def tables(folder: Path) -> dict[int, Path]:
    """Returns step -> file of divergences. Ignores names that no run writes, which are the user's."""
    found = {path: re.fullmatch(r"divergence-([0-9]{1,18})\.json", path.name) for path in folder.glob("divergence-*")}
    return dict(sorted((int(match[1]), path) for path, match in found.items() if match and path.is_file()))


def _read(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a history, without lines that a crash left broken."""
    lines = []
    for line in path.read_bytes().splitlines():
        try:
            record = parse_json(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            lines.append(record)
    return lines
