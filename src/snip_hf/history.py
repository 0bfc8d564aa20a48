"""What a run writes into its folder OUTPUT/snip: the plan in force, refreshes and checks, tables of divergences.

A disk that cannot be written costs the record, not the run: each method warns instead of raising OSError.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .divergence import DivergenceTable
from .jsonfiles import parse_json, write_json_atomic
from .plan import PrecisionPlan

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1


class RunFolder:
    """The folder OUTPUT/snip of one run; with `output_dir` None nothing is written at all."""

    def __init__(self, output_dir: str | os.PathLike[str] | None) -> None:
        self._folder = None if output_dir is None else Path(output_dir) / "snip"

    def clear(self) -> None:
        """Removes the history and the divergences of an earlier run."""

        def remove(folder: Path) -> None:
            for path in (folder / "history.jsonl", *folder.glob("divergence-*.json")):
                path.unlink(missing_ok=True)

        self._write(remove)

    def save_plan(self, plan: PrecisionPlan) -> None:
        """Writes plan.json, the plan in force."""
        self._write(lambda folder: plan.save(folder / "plan.json"))

    def write_divergences(self, step: int, table: DivergenceTable) -> None:
        """Writes divergence-<step>.json, the table that the refresh of `step` decided from."""
        document = {"schema_version": SCHEMA_VERSION, "step": step, "loss": table.loss, "records": table.to_records()}
        self._write(lambda folder: write_json_atomic(folder / f"divergence-{step}.json", document))

    def append(self, line: Mapping[str, Any]) -> None:
        """Adds a line to history.jsonl."""

        def add(folder: Path) -> None:
            with open(folder / "history.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

        self._write(add)

    def cut(self, step: int, pending: int | None, start_line: Mapping[str, Any]) -> None:
        """Leaves of the history what was decided or checked up to `step`: what came after is about to happen again.

        Args:
            step: the optimizer step to resume from.
            pending: step of the refresh that is under way; it is not decided, even if an ended run wrote so.
            start_line: the first line for a folder that has no history.
        """

        def rewrite(folder: Path) -> None:
            path = folder / "history.jsonl"
            lines = path.read_bytes().splitlines() if path.exists() else []
            events = [event for event in map(_parse, lines) if event is not None]
            kept = [event for event in events if event.get("decided_step", event.get("step", 0)) <= step]
            kept = [event for event in kept if event.get("event") != "refresh" or event.get("step") != pending]
            if not kept or kept[0].get("event") != "start":
                kept = [dict(start_line)]
            temporary = path.with_name(".history.jsonl.tmp")
            temporary.write_text("".join(json.dumps(event) + "\n" for event in kept), encoding="utf-8")
            os.replace(temporary, path)
            for table in folder.glob("divergence-*.json"):
                number = table.stem.removeprefix("divergence-")
                if number.isdigit() and int(number) > step:
                    table.unlink()

        self._write(rewrite)

    def _write(self, write: Callable[[Path], None]) -> None:
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write(self._folder)
        except OSError as error:
            logger.warning("snip-hf: could not write to %s, training goes on: %s", self._folder, error)


def _parse(line: bytes) -> dict[str, Any] | None:
    """Returns the event of a history line, None for one that a crash left broken."""
    try:
        event = parse_json(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None
