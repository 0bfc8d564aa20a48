"""What a run writes into its folder OUTPUT/snip: the plan in force, refreshes and checks, tables of divergences.

A disk that cannot be written costs the record, not the run: each method warns instead of raising an error.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..config import SnipConfig
from ..estimation.table import DivergenceTable
from ..json_io import (
    MAX_JSON_BYTES,
    append_json_line,
    open_regular,
    parse_json,
    remove_temporaries,
    write_atomic,
    write_json_atomic,
)
from ..planning.plan import PrecisionPlan

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
# In the folder of the run (the Trainer's output_dir).
FOLDER = "snip"


class RunFolder:
    """The folder OUTPUT/snip of one run; with `output_dir` None nothing is written at all."""

    def __init__(self, output_dir: str | os.PathLike[str] | None) -> None:
        self._folder = None if output_dir is None else Path(output_dir) / FOLDER

    def clear(self) -> None:
        """Removes the history and the divergences of an earlier run."""

        def remove(folder: Path) -> None:
            remove_temporaries(folder)
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
        self._write(lambda folder: append_json_line(folder / "history.jsonl", line))

    def cut(self, step: int, pending: int | None, start_line: Mapping[str, Any]) -> None:
        """Leaves of the history what was decided or checked up to `step`: what came after is about to happen again.

        Args:
            step: the optimizer step to resume from.
            pending: step of the refresh that is under way; it is not decided, even if an ended run wrote so.
            start_line: the first line for a folder that has no history.
        """

        def rewrite(folder: Path) -> None:
            remove_temporaries(folder)
            path = folder / "history.jsonl"
            events = _read(path) if path.exists() else []
            kept = [event for event in events if event.get("decided_step", event["step"]) <= step]
            kept = [event for event in kept if event.get("event") != "refresh" or event.get("step") != pending]
            if not kept or kept[0].get("event") != "start":
                kept = [dict(start_line)]
            write_atomic(path, "".join(json.dumps(event) + "\n" for event in kept).encode())
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
        except (OSError, ValueError) as error:  # ValueError: a number that is not finite, which no JSON file holds
            # As text: a handler that keeps its records would keep the error, and with it the frames and their model.
            logger.warning("snip-hf: could not write to %s, training goes on: %s", self._folder, str(error))


def _read(path: Path) -> list[dict[str, Any]]:
    """Returns the events of a history, without what is none: a crash leaves broken lines, and an editor whatever."""
    events = []
    with open_regular(path) as file:
        for line in iter(lambda: file.readline(MAX_JSON_BYTES), b""):
            try:
                event = parse_json(line)
            except ValueError:
                continue
            if isinstance(event, dict) and {type(event.get(key, 0)) for key in ("step", "decided_step")} == {int}:
                events.append({"step": 0} | event)
    return events


def start_line(plan: PrecisionPlan, step: int, config: SnipConfig, model_name: str) -> dict[str, Any]:
    """Returns the first line of a history."""
    return {
        "event": "start",
        "step": step,
        "config": config.to_dict(),
        "plan": {layer: dict(formats) for layer, formats in plan.assignment.items()},
        "flops": {layer: dict(flops) for layer, flops in plan.flops.items()},
        "stages": [list(stage) for stage in plan.stages],
        "model_name": model_name,
    }


def shares(plan: PrecisionPlan) -> dict[str, Any]:
    """Returns what a line of the history says of a plan's FP4 shares; of time only if that was measured."""
    found: dict[str, Any] = {
        "fp4_fraction": plan.fp4_fraction,
        "stage_fp4_fractions": list(plan.stage_fp4_fractions),
    }
    times = plan.stage_fp4_time_fractions
    if times is not None:
        found |= {"fp4_time_fraction": plan.fp4_time_fraction, "stage_fp4_time_fractions": list(times)}
    return found


def describe_plan(plan: PrecisionPlan) -> str:
    """Returns a plan's FP4 shares as the log shows them."""
    stages = ", ".join(f"{share:.1%}" for share in plan.stage_fp4_fractions)
    text = f"{plan.fp4_fraction:.1%} of the linear FLOPs in FP4 (per stage: {stages})"
    times = plan.stage_fp4_time_fractions
    if times is None:
        return text
    return f"{text}, {plan.fp4_time_fraction:.1%} of their time ({', '.join(f'{share:.1%}' for share in times)})"
