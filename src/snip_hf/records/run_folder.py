"""The folder OUTPUT/snip that a run writes: the plan in force, refreshes and checks, tables of divergences.

A disk that cannot be written costs the record, not the run: each method but `hold` warns instead of raising an error.
One run at a time writes there, and what an earlier one wrote is moved aside. Other files in the folder stay.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..estimation.table import DivergenceTable
from ..json_io import (
    MAX_JSON_BYTES,
    append_json_line,
    parse_json,
    remove_temporaries,
    write_atomic,
    write_json_atomic,
)
from ..planning.plan import PrecisionPlan
from ..text import printable
from .divergences import divergence_document
from .events import Event, Refresh, Start
from .lock import FileLock, HeldError, take

logger = logging.getLogger(__name__)

# In the folder of the run (the Trainer's output_dir).
FOLDER = "snip"
# As much of a path as a line of the log shows.
_PATH = 1000


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

        A run before it in this process that still has the folder, such as one that failed, records nothing any more.

        Raises:
            ValueError: a run in another process has it; names the folder and the process.
        """
        if self._folder is None:
            return
        output = self._folder.parent
        try:
            output.mkdir(parents=True, exist_ok=True)
            # The Trainer does not upload what begins with an underscore.
            self._lock = take(output / "_snip.lock")
        except HeldError as error:
            raise ValueError(
                f"Another run is writing into {printable(self._folder, _PATH)} ({error}). Wait until it has ended, or "
                "give this run an output_dir of its own."
            ) from error
        except OSError as error:
            logger.warning(
                "snip-hf: could not lock %s, training goes on; do not start a second run there: %s",
                printable(output, _PATH),
                printable(error, _PATH),
            )

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
        document = divergence_document(step, table)
        self._write(lambda folder: write_json_atomic(folder / f"divergence-{step}.json", document))

    def append(self, event: Event) -> None:
        """Adds an event to history.jsonl."""
        self._write(lambda folder: append_json_line(folder / "history.jsonl", event.to_record()))

    def cut(self, step: int, pending: int | None, start: Start) -> None:
        """Leaves of the history what was decided or checked up to `step`: what came after is about to happen again.

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
            kept = [line for line in kept if line.get("event") != Refresh.event or line.get("step") != pending]
            if not kept or kept[0].get("event") != Start.event:
                kept = [start.to_record()]
            write_atomic(path, "".join(json.dumps(line) + "\n" for line in kept).encode())
            for number, table in _tables(folder).items():
                if number > step:
                    table.unlink()

        self._write(rewrite)

    def _set_aside(self, folder: Path) -> None:
        _remove_temporaries(folder)
        history = folder / "history.jsonl"
        # The history last: without it, a move that was cut short goes on.
        own = [path for path in (*_tables(folder).values(), history) if _is_file(path)]
        if not own:
            return
        for number in itertools.count(1):
            target = folder.parent / f"_snip-earlier-{number}" / FOLDER
            if not any(os.path.lexists(target / path.name) for path in (*own, history)):
                break
        target.mkdir(parents=True, exist_ok=True)
        try:
            if _is_file(folder / "plan.json"):
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
            printable(folder, _PATH),
            printable(target, _PATH),
        )

    def _write(self, write: Callable[[Path], None]) -> None:
        if self._folder is None or self._lost:
            return
        if self._lock is not None and not self._lock.held:
            self._lost = True
            logger.warning(
                "snip-hf: %s belongs to a later run of this process, or this run was closed: from here on it records "
                "nothing there.",
                printable(self._folder, _PATH),
            )
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write(self._folder)
        except (OSError, ValueError) as error:  # ValueError: a number that is not finite, or more than a reader takes
            # As text: a handler that keeps its records would keep the error, and with it the frames and their model.
            logger.warning(
                "snip-hf: could not write to %s, training goes on: %s",
                printable(self._folder, _PATH),
                printable(error, _PATH),
            )


def _is_file(path: Path) -> bool:
    """Returns True for a regular file, not for a link to one."""
    return path.is_file() and not path.is_symlink()


def _tables(folder: Path) -> dict[int, Path]:
    """Returns step -> file of divergences; of exactly the names that a run gives them, since others are the user's."""
    found = {path: re.fullmatch(r"divergence-([0-9]{1,18})\.json", path.name) for path in folder.iterdir()}
    return {int(match[1]): path for path, match in found.items() if match and _is_file(path)}


def _remove_temporaries(folder: Path) -> None:
    remove_temporaries(folder, "plan.json", "history.jsonl", "divergence-*.json")


def _read(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a history as they are, without what is none: a crash leaves broken ones, an editor whatever.

    Not as events: a line that a later version wrote stays whole.
    """
    lines = []
    with open(path, "rb") as file:
        for line in iter(lambda: file.readline(MAX_JSON_BYTES), b""):
            try:
                record = parse_json(line)
            except ValueError:
                continue
            if isinstance(record, dict) and {type(record.get(key, 0)) for key in ("step", "decided_step")} == {int}:
                lines.append({"step": 0} | record)
    return lines
