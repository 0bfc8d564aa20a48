"""What a run left behind: its plans, refreshes, divergences and losses, read back from its folder.

Read are OUTPUT/snip/history.jsonl, plan.json and divergence-<step>.json, and the Trainer's trainer_state.json. What is
missing is said in a sentence and left out.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import SnipConfig
from ..json_io import open_regular, parse_json, read_json
from ..planning.plan import PlanProvenance, PrecisionPlan
from .run_folder import FOLDER


@dataclass(frozen=True)
class Refresh:
    """One line of the history: a probe, and what came of it."""

    step: int
    applied_step: int | None
    """None: the plan in force was kept, for `reason`."""
    reason: str | None
    fp4_fraction: float | None
    layers_changed: int
    objective: float | None
    gap: float | None
    seconds: Mapping[str, float | None]
    changes: Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Check:
    """One line of the history: a check whether the ranking of the layers has moved (`refresh_on_drift`)."""

    step: int
    correlation: float | None
    """None: the check failed, for `reason`."""
    refresh: bool
    """Whether a refresh followed at once."""
    reason: str | None


@dataclass(frozen=True)
class Run:
    """What a run folder holds."""

    folder: Path
    plans: list[tuple[int, PrecisionPlan]]
    """(step after which it was in force, plan), the start's plan first."""
    refreshes: list[Refresh]
    checks: list[Check]
    divergences: dict[int, list[dict[str, Any]]]
    """Probe step -> records, whose keys are the fields of `Divergence`."""
    losses: dict[int, dict[str, float]]
    """Step -> {"loss": training loss, "eval_loss": validation loss}, either may be absent; in order of the steps."""
    notes: list[str]
    """What is missing or cannot be read, one sentence each."""

    @property
    def config(self) -> Mapping[str, Any]:
        return self.plans[0][1].provenance.config or {}

    @property
    def formats(self) -> tuple[str, ...]:
        """What the plans chose from, the least precise first."""
        return tuple(self.config.get("formats") or SnipConfig().formats)

    @property
    def last_step(self) -> int:
        steps = [*self.losses, *(refresh.applied_step or refresh.step for refresh in self.refreshes)]
        return max(steps, default=0)


def load_run(run_dir: str | os.PathLike[str]) -> Run:
    """Reads a run folder (the Trainer's output_dir).

    Raises:
        FileNotFoundError: there is no snip/history.jsonl in it.
        ValueError: the history is no history; names the line and what is wrong.
    """
    folder = Path(run_dir)
    notes: list[str] = []
    start, refreshes, checks = _read_history(folder / FOLDER / "history.jsonl", notes)
    plans = [(start.provenance.step, start)]
    for refresh in refreshes:
        if refresh.applied_step is not None:
            plans.append((refresh.applied_step, _changed(plans[-1][1], refresh)))
    _compare_with_file(folder / FOLDER / "plan.json", plans[-1][1], notes)
    divergences = _read_divergences(folder / FOLDER, notes)
    return Run(folder, plans, refreshes, checks, divergences, _read_losses(folder, notes), notes)


def _read_history(path: Path, notes: list[str]) -> tuple[PrecisionPlan, list[Refresh], list[Check]]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; expected the output folder of a run with SnipCallback.")
    with open_regular(path) as file:
        lines = file.read().splitlines()
    if not lines:
        raise ValueError(f"{path} is empty; expected a line with the start of the run.")
    refreshes: list[Refresh] = []
    checks: list[Check] = []
    for number, line in enumerate(lines, 1):
        try:
            record = parse_json(line)
            if number == 1:
                start = _start_plan(record)
            elif record["event"] == "drift":
                checks.append(_check(record))
            else:
                refreshes.append(_refresh(record))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number == len(lines) > 1:  # A killed run may leave half a line.
                notes.append(f"The last line of {path.name} is not complete and is left out.")
                continue
            problem = f"it has no entry {error}." if isinstance(error, KeyError) else error
            raise ValueError(f"Line {number} of {path} is not a line of a snip-hf history: {problem}") from error
    return start, refreshes, checks


def _start_plan(record: Mapping[str, Any]) -> PrecisionPlan:
    _check_event(record, "start")
    config = record["config"]
    provenance = PlanProvenance(
        step=record["step"], policy=config["policy"], config=config, model_name=record["model_name"] or None
    )
    return PrecisionPlan(record["plan"], record["flops"], record["stages"], provenance)


def _refresh(record: Mapping[str, Any]) -> Refresh:
    _check_event(record, "refresh")
    # A refresh that failed early has no objective, gap or seconds yet.
    given = {"objective": None, "gap": None, "seconds": {}} | dict(record)
    return Refresh(**{field.name: given[field.name] for field in dataclasses.fields(Refresh)})


def _check(record: Mapping[str, Any]) -> Check:
    return Check(int(record["step"]), record["correlation"], bool(record["refresh"]), record["reason"])


def _check_event(record: Mapping[str, Any], expected: str) -> None:
    if record["event"] != expected:
        raise ValueError(f"event is {record['event']!r}, expected {expected!r}.")


def _changed(plan: PrecisionPlan, refresh: Refresh) -> PrecisionPlan:
    assignment = {layer: dict(formats) for layer, formats in plan.assignment.items()}
    for key, (_, new) in refresh.changes.items():
        layer, _, gemm = key.rpartition(":")
        if layer not in assignment:
            raise ValueError(
                f"The refresh of step {refresh.step} changes layer {layer!r}, which the start does not have."
            )
        assignment[layer][gemm] = new
    return dataclasses.replace(plan, assignment=assignment)


def _compare_with_file(path: Path, plan: PrecisionPlan, notes: list[str]) -> None:
    try:
        differences = plan.changes(PrecisionPlan.load(path))
    except (OSError, ValueError) as error:
        notes.append(f"plan.json cannot be used: {error}")
    else:
        if differences:
            key, (ours, theirs) = next(iter(differences.items()))
            notes.append(
                f"plan.json differs from the history in {len(differences)} GEMMs ({key} is {theirs}, by the history "
                f"{ours}); the tables and figures follow the history."
            )


def _read_divergences(folder: Path, notes: list[str]) -> dict[int, list[dict[str, Any]]]:
    divergences = {}
    for path in folder.glob("divergence-*.json"):
        try:
            step, records = read_divergence(path)
            divergences[step] = records
        except (OSError, ValueError, KeyError, TypeError) as error:
            notes.append(f"{path.name} cannot be used and is left out: {error}")
    if not divergences:
        notes.append("There are no divergence files, so there is no figure of the divergences.")
    return dict(sorted(divergences.items()))


def read_divergence(path: str | os.PathLike[str]) -> tuple[int, list[dict[str, Any]]]:
    """Returns probe step and records of a divergence-<step>.json; the keys of a record are the fields of `Divergence`.

    Raises:
        OSError: the file cannot be read.
        ValueError, KeyError, TypeError: it is none.
    """
    document = read_json(path)
    records = [
        {"layer": r["layer"], "gemm": r["gemm"], "format": r["format"]}
        | {key: float(r[key]) for key in ("loss_divergence", "weight_divergence")}
        | {key: float(r.get(key) or 0.0) for key in ("flops", "weight_bias", "absolute_error", "relative_error")}
        | {"criterion": None if r.get("criterion") is None else float(r["criterion"])}
        for r in document["records"]
    ]
    return int(document["step"]), records


def _read_losses(folder: Path, notes: list[str]) -> dict[int, dict[str, float]]:
    """The training and validation losses of the trainer_state.json that got furthest."""
    states = []
    for path in [folder / "trainer_state.json", *folder.glob("checkpoint-*/trainer_state.json")]:
        if not path.is_file():
            continue
        try:
            state = json.loads(path.read_bytes())  # Not read_json: the Trainer writes a NaN loss as NaN.
            states.append((int(state["global_step"]), list(state["log_history"])))
        except (ValueError, KeyError, TypeError) as error:
            notes.append(f"{path.relative_to(folder)} cannot be used and is left out: {error}")
    losses: dict[int, dict[str, float]] = {}
    for entry in max(states, key=lambda state: state[0])[1] if states else []:
        for key in ("loss", "eval_loss"):
            if isinstance(entry.get(key), int | float):
                losses.setdefault(int(entry["step"]), {})[key] = float(entry[key])
    if not losses:
        notes.append("There is no trainer_state.json with losses (saved with a checkpoint or by trainer.save_state()).")
    return dict(sorted(losses.items()))
