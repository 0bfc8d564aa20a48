"""Reads a run from its folder or from a checkpoint: plans, refreshes, divergences and losses.

The sources are OUTPUT/snip/history.jsonl, plan.json and divergence-<step>.json, and the Trainer's trainer_state.json.
Missing or broken files are left out, with a note for each.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from ..config import SnipConfig
from ..estimation.coverage import Coverage
from ..estimation.table import Divergence, DivergenceTable
from ..estimation.ties import Ties
from ..json_io import MAX_JSON_BYTES, check_schema, from_json, read_json, short
from ..numerics.formats import check_format
from ..planning.plan import PrecisionPlan, forward_shares
from ..registry import UnknownName
from .events import Alarm, Counted, Event, Refresh, Retarget, Start, known_shares, read_history
from .run_folder import FOLDER, tables

T = TypeVar("T")

# In the folder of a checkpoint.
STATE_NAME = "snip_state.json"
# Tables of divergences that are read. The table of the last applied refresh is always read.
_MOST_TABLES = 128
# Numbers in the Trainer's state that describe how the model was trained.
_FACTS = ("max_steps", "num_train_epochs", "train_batch_size")


@dataclass(frozen=True)
class Run:
    """The content of a run folder."""

    folder: Path
    plans: list[tuple[int, PrecisionPlan]]
    """(step after which it was in force, plan), beginning with the plan at the start. The last one has the times in
    plan.json, which the history lacks."""
    refreshes: list[Refresh]
    counted: list[Counted]
    """Coverage of each counted micro-batch."""
    divergences: dict[int, DivergenceTable]
    """Probe step -> table."""
    losses: dict[int, dict[str, float]]
    """Step -> {"loss": training loss, "eval_loss": validation loss}, either of which may be absent; in order of the
    steps."""
    facts: Mapping[str, str]
    """Name -> value of how the model was trained, such as versions and the Trainer's number of steps."""
    notes: list[str]
    """One sentence for each file that is missing or cannot be read."""
    alarms: list[Alarm] = dataclasses.field(default_factory=list)
    """Alarms of the guard."""
    retargets: list[Retarget] = dataclasses.field(default_factory=list)
    """Changes of the target when the run was resumed."""
    pending: tuple[int, int] | None = None
    """Steps of the last probe and of its plan, if the run is a checkpoint and the plan is not in force yet."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The run's configuration."""
        return self.plans[0][1].provenance.config or {}

    @property
    def last_config(self) -> Mapping[str, Any]:
        """`config` with the target of the last resume."""
        return self.config_at(math.inf)

    def config_at(self, step: float) -> Mapping[str, Any]:
        """Returns `config` with the target of an optimizer step, which a resume may have changed."""
        events = [event for event in self.retargets if event.step <= step]
        return {**self.config, **{name: now for event in events for name, (_, now) in event.fields.items()}}

    @cached_property
    def formats(self) -> tuple[str, ...]:
        """Formats that the plans choose from, least precise first."""
        return tuple(self.config.get("formats") or SnipConfig().formats)

    @property
    def last_step(self) -> int:
        steps = [*self.losses, *(refresh.applied_step or refresh.step for refresh in self.refreshes)]
        return max(steps, default=0)

    @property
    def fp4_fractions(self) -> list[tuple[int, float | None]]:
        """(step after which it was in force, FP4 share) of each plan, relative to the GEMMs that plans decide on. None:
        the share is not known."""
        begin, plan = self.plans[0]
        share = "fp4_fraction" if forward_shares(plan) is None else "forward_fp4_fraction"
        events = _in_order(self.refreshes, self.alarms)
        return [(begin, known_shares(plan).get(share)), *((_begins(event), getattr(event, share)) for event in events)]

    @property
    def mean_fp4_fraction(self) -> float | None:
        """Mean of `fp4_fractions` over the steps up to the last known one; None if a share or all steps are unknown."""
        steps, shares = zip(*self.fp4_fractions, strict=True)
        # The plan of an alarm may begin after the last known step.
        known = list(itertools.accumulate([*steps, self.last_step], max))
        spans = [end - start for start, end in itertools.pairwise(known)]
        whole = sum(spans)
        if None in shares or not whole > 0:
            return None
        return sum(share * span for share, span in zip(shares, spans, strict=True)) / whole


def load_run(run_dir: str | os.PathLike[str], checkpoint: Run | None = None) -> Run:
    """Reads a run folder (the Trainer's output_dir).

    Args:
        run_dir: the folder.
        checkpoint: the result of `read_checkpoint` for a checkpoint of the run, to leave out everything after it.

    Raises:
        FileNotFoundError: it has no snip/history.jsonl.
        OSError: the history cannot be read.
        ValueError: the history is invalid or too large; names the line and the fault.
    """
    folder = Path(run_dir)
    notes: list[str] = []
    until, saved = (math.inf, folder / FOLDER / "plan.json") if checkpoint is None else checkpoint.plans[0]
    start, events = _read_events(folder / FOLDER / "history.jsonl", notes, until)
    refreshes, alarms, counted = _of(Refresh, events), _of(Alarm, events), _of(Counted, events)
    plans = _plans(start.plan, _in_order(refreshes, alarms), counted)
    begin, last = plans[-1]
    plans[-1] = begin, _timed(last, saved, notes)
    applied = [refresh.step for refresh in refreshes if refresh.applied_step is not None]
    divergences = _read_divergences(folder / FOLDER, applied[-1:], notes, until)
    source_folder = folder if checkpoint is None else checkpoint.folder
    losses, facts = read_log(source_folder, notes, refreshes)
    contents = plans, refreshes, counted, divergences, losses, {**start.versions, **facts}
    pending = None if checkpoint is None else checkpoint.pending
    return Run(source_folder, *contents, notes, alarms, _of(Retarget, events), pending)


def load_recorded(path: str | os.PathLike[str]) -> Run:
    """Reads a run folder, or a checkpoint folder with the history of the run around it, up to the checkpoint's step.

    Raises:
        OSError, ValueError: as `load_run`, or the state of the checkpoint is invalid.
    """
    folder = Path(path)
    history = folder / FOLDER / "history.jsonl"
    if history.exists() or not (folder / STATE_NAME).exists():
        return load_run(folder)
    checkpoint = read_checkpoint(folder)
    around = folder.absolute().parent
    if (around / FOLDER / "history.jsonl").exists():
        return load_run(around, checkpoint)
    notes = ["There is no history beside the checkpoint, so only its plan is known."]
    losses, facts = read_log(folder, notes)
    return dataclasses.replace(checkpoint, losses=losses, facts=facts, notes=notes)


def thinned(items: Sequence[T], count: int) -> list[T]:
    """Returns at most `count` of the items, evenly spaced, including the first and the last."""
    if len(items) <= count:
        return list(items)
    last = len(items) - 1
    return [items[round(index * last / (count - 1))] for index in range(count)]


def _of(kind: type[T], events: Sequence[Event]) -> list[T]:
    return [event for event in events if isinstance(event, kind)]


def _in_order(refreshes: Sequence[Refresh], alarms: Sequence[Alarm]) -> list[Refresh | Alarm]:
    """Returns the events that changed the plan in force, in order."""
    changing = [refresh for refresh in refreshes if refresh.applied_step is not None]
    raising = [alarm for alarm in alarms if alarm.changes]
    return sorted([*changing, *raising], key=_begins)


def _begins(event: Refresh | Alarm) -> int:
    """Returns the step after which a change is in force."""
    return event.step if isinstance(event, Alarm) else event.applied_step or event.step


def _read_events(path: Path, notes: list[str], until: float) -> tuple[Start, list[Event]]:
    """Returns the start, and the events up to a step."""
    if not path.exists():
        run = path.parent.parent
        missing = path if run.exists() else run
        raise FileNotFoundError(f"{missing} does not exist; expected the output folder of a run with SnipCallback.")
    start, *later = list(read_history(path, notes))
    assert isinstance(start, Start)
    # The same events that a resumed run keeps.
    events = [event for event in later if (event.decided_step if isinstance(event, Refresh) else event.step) <= until]
    return start, events


def _plans(
    start: PrecisionPlan, applied: Sequence[Refresh | Alarm], counted: Sequence[Counted]
) -> list[tuple[int, PrecisionPlan]]:
    """Returns the plan at the start and the plans that followed.

    Each plan gets the step it was made at and the tokens counted by then. The plan at the start gets the tokens of the
    first count, and the changes that this count caused.
    """
    assignment = {layer: dict(formats) for layer, formats in start.assignment.items()}
    for count in counted:
        for cell, (_, new) in count.changes.items():
            layer, _, gemm = cell.rpartition(":")
            assignment[layer][gemm] = new
    tokens = counted[0].tokens if counted else start.tokens
    start = dataclasses.replace(start, assignment=assignment, tokens=tokens)
    plans = [(start.provenance.step, start)]
    for event in applied:
        for cell, (_, new) in event.changes.items():
            layer, _, gemm = cell.rpartition(":")
            assignment[layer][gemm] = new
        tokens = next((count.tokens for count in reversed(counted) if count.step <= event.step), start.tokens)
        provenance = dataclasses.replace(start.provenance, step=event.step)
        plan = dataclasses.replace(start, assignment=assignment, provenance=provenance, tokens=tokens)
        plans.append((_begins(event), plan))
    return plans


def _timed(plan: PrecisionPlan, source: Path | PrecisionPlan, notes: list[str]) -> PrecisionPlan:
    """Returns a plan with the times in plan.json or a checkpoint; adds a note if the plan there is another one."""
    name = "plan.json" if isinstance(source, Path) else "The plan in the checkpoint"
    try:
        saved = PrecisionPlan.load(source) if isinstance(source, Path) else source
        differences = plan.changes(saved)
        timed = dataclasses.replace(plan, measured=saved.measured)  # refuses times of other GEMMs
    except (OSError, ValueError) as error:
        notes.append(f"{name} cannot be used: {error}")
        return plan
    if differences:
        key, (ours, theirs) = next(iter(differences.items()))
        notes.append(
            f"{name} differs from the history in {len(differences)} GEMMs ({key} is {theirs}, but {ours} in the "
            "history); the tables and figures follow the history."
        )
    return timed


def _read_divergences(
    folder: Path, wanted: Sequence[int], notes: list[str], until: float
) -> dict[int, DivergenceTable]:
    """Returns the tables of divergences of the wanted steps, and at most `_MOST_TABLES` more, evenly spaced."""
    paths = {step: path for step, path in tables(folder).items() if step <= until}
    divergences: dict[int, DivergenceTable] = {}
    tried = sorted({*paths.keys() & set(wanted), *thinned(list(paths), _MOST_TABLES)})
    for step in tried:
        try:
            _, divergences[step] = read_divergence(paths[step])
        except (OSError, ValueError) as error:
            notes.append(f"{paths[step].name} cannot be used and is left out: {error}")
    if len(paths) > len(tried):
        notes.append(f"The figure of the divergences shows {len(divergences)} of {len(paths):,} probes.")
    if not divergences:
        none = f"None of the {len(paths):,} divergence files can be used" if paths else "There are no divergence files"
        notes.append(f"{none}, so there is no figure of the divergences.")
    return divergences


def read_checkpoint(folder: Path) -> Run:
    """Reads the state in the folder of a checkpoint: the plan in force, its coverage and the pending refresh.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a state; names the file, the field and the fault.
    """
    path = folder / STATE_NAME
    try:
        state: Mapping[str, Any] = from_json(Mapping[str, Any], read_json(path), "the state")
        check_schema(state.get("schema_version"))
        for name in ("step", "plan", "config", "coverage"):
            if name not in state:
                raise ValueError(f"it has no entry {name!r}.")
        step: int = from_json(int, state["step"], "step")
        plan = PrecisionPlan.from_dict(state["plan"])
        config: Mapping[str, Any] = from_json(Mapping[str, Any], state["config"], "config")
        coverage: Coverage | None = from_json(Coverage | None, state["coverage"], "coverage")
        waits = from_json(Mapping[str, Any], state.get("pending") or {}, "pending")
        pending = (from_json(int, waits["step"], "step"), from_json(int, waits["due"], "due")) if waits else None
    except UnknownName as error:
        raise UnknownName(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not a usable state of a checkpoint: {error}") from error
    counted = [] if coverage is None else [Counted(step=step, coverage=coverage, tokens=plan.tokens)]
    provenance = dataclasses.replace(plan.provenance, config=config)
    plans = [(step, dataclasses.replace(plan, provenance=provenance))]
    return Run(folder, plans, [], counted, {}, {}, {}, [], pending=pending)


@dataclass(frozen=True)
class _DivergenceFile:
    """The layout of divergence-<step>.json."""

    schema_version: int
    step: int
    loss: float
    columns: tuple[str, ...]
    rows: tuple[Any, ...]
    ties: Ties = ()


def read_divergence(path: str | os.PathLike[str]) -> tuple[int, DivergenceTable]:
    """Returns the probe step and the table of a divergence-<step>.json.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a table; `UnknownName` if a format is not registered.
    """
    found: _DivergenceFile = from_json(_DivergenceFile, read_json(path))
    check_schema(found.schema_version)
    rows = []
    for index, values in enumerate(found.rows):
        if not isinstance(values, list) or len(values) != len(found.columns):
            raise ValueError(f"rows[{index}] is {short(values)}, expected {len(found.columns)} values.")
        row: Divergence = from_json(Divergence, dict(zip(found.columns, values, strict=True)), f"rows[{index}]")
        check_format(row.format, f"rows[{index}].format")
        rows.append(row)
    return found.step, DivergenceTable(found.loss, tuple(rows), found.ties)


def read_log(
    folder: Path, notes: list[str], refreshes: Sequence[Refresh] | None = None
) -> tuple[dict[int, dict[str, float]], dict[str, str]]:
    """Returns `Run.losses`, and name -> value of some settings, from the trainer_state.json with the most steps.

    Adds notes on files that cannot be used.

    Args:
        folder: of the run.
        notes: gets the notes.
        refreshes: of the history. A file with others is left out if there is one without: it is of a branch that the
            run left when it was resumed at an earlier checkpoint.
    """
    losses: dict[int, dict[str, float]] = {}
    state = _latest(folder, notes, refreshes)
    for entry in state.get("log_history", ()):
        for key in ("loss", "eval_loss"):
            if isinstance(entry.get("step"), int) and isinstance(entry.get(key), int | float):
                losses.setdefault(entry["step"], {})[key] = float(entry[key])
    if not losses:
        notes.append("There is no trainer_state.json with losses (saved with a checkpoint or by trainer.save_state()).")
    facts = {name: short(state[name]) for name in _FACTS if isinstance(state.get(name), int | float)}
    return dict(sorted(losses.items())), facts


def _latest(folder: Path, notes: list[str], refreshes: Sequence[Refresh] | None) -> dict[str, Any]:
    """Returns the Trainer's state with the most steps, the folder's own or a checkpoint's; {} without one."""
    states: list[dict[str, Any]] = []
    # `hub_strategy="checkpoint"` pushes the second one.
    own = [folder / "trainer_state.json", folder / "last-checkpoint" / "trainer_state.json"]
    for path in (*own, *folder.glob("checkpoint-*/trainer_state.json")):
        if not path.exists():
            continue
        try:
            data = path.read_bytes()[: MAX_JSON_BYTES + 1]
            state = json.loads(data)  # not parse_json: the Trainer writes a NaN loss as NaN
            states.append(state | {"global_step": int(state["global_step"]), "log_history": list(state["log_history"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            notes.append(f"{path.relative_to(folder)} cannot be used and is left out: {error!r}")
    if not states:
        return {}
    own_probes = None if refreshes is None else {(refresh.step, refresh.objective) for refresh in refreshes}
    states.sort(key=lambda state: state["global_step"])
    matching = [state for state in states if own_probes is None or _probes(state["log_history"]) <= own_probes]
    latest = (matching or states)[-1]
    step, last = latest["global_step"], states[-1]["global_step"]
    if step < last:
        notes.append(
            f"The losses end at step {step}. A Trainer's log up to step {last} is left out: it has refreshes that the "
            "history lacks, so the run was resumed at an earlier step since."
        )
    return latest


def _probes(log: Sequence[Mapping[str, Any]]) -> set[tuple[int, float | None]]:
    """Returns probed step and objective of the refreshes in the log of a Trainer (`trackers.quantities_of`)."""
    return {(row["snip/probed_step"], row.get("snip/objective")) for row in log if "snip/probed_step" in row}
