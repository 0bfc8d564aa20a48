"""The records that a run's files hold (lines of a history, divergences, the Trainer's log), read and checked.

A file may come from elsewhere and hold anything. Sizes and counts are bounded before a file is read, and every value is
checked before anybody works with it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..estimation.layer_sums import LAYER
from ..json_io import MAX_DIGITS, MAX_JSON_BYTES, open_regular, read_json
from ..numerics.formats import FORMATS, check_format
from ..numerics.gemms import GEMMS
from ..planning.plan import MAX_TEXT, PlanProvenance, PrecisionPlan
from ..text import printable

# A history of 100,000 refreshes of a 70B model takes about 50 MB; one line of a model of 45,032 linears up to 15 MB.
MAX_HISTORY_BYTES = 192 * 2**20
_MOST_LINES = 250_000
_MOST_LAYERS = 100_000
# Lists and objects in a Trainer's state, which has one for each time that it logged.
_MOST_ENTRIES = 2_000_000
# Of a table of divergences; today's have ten.
_MOST_COLUMNS = 100
# Above it, not every whole number is a float any more.
_LARGEST_STEP = 2**53
# Sums of squares of such numbers are finite.
_LARGEST_NUMBER = 1e100


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
    changes: Mapping[str, str]
    """"layer:gemm" -> the new format."""


@dataclass(frozen=True)
class Check:
    """One line of the history: a check whether the ranking of the layers has moved (`refresh_on_drift`)."""

    step: int
    correlation: float | None
    """None: the check failed, for `reason`."""
    refresh: bool
    """Whether a refresh followed at once."""
    reason: str | None


def history_lines(path: Path) -> Iterator[tuple[int, bytes, bool]]:
    """Yields (number, line, whether it is the last one) of a history.jsonl.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
        ValueError: it is too large.
    """
    with open_regular(path) as file:
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


def start_plan(record: Mapping[str, Any]) -> PrecisionPlan:
    _check_event(record, "start")
    config = mapping_of(entry_of(record, "config"), "config")
    assignment = mapping_of(entry_of(record, "plan"), "plan")
    if len(assignment) > _MOST_LAYERS:
        raise ValueError(f"plan names {len(assignment):,} layers, expected at most {_MOST_LAYERS:,}.")
    provenance = PlanProvenance(
        step=step_of(entry_of(record, "step"), "step"),
        policy=entry_of(config, "policy"),
        config=config,
        model_name=entry_of(record, "model_name") or None,
    )
    return PrecisionPlan(assignment, entry_of(record, "flops"), entry_of(record, "stages"), provenance)


def refresh_of(record: Mapping[str, Any], cells: Mapping[str, str]) -> Refresh:
    _check_event(record, "refresh")
    applied, changed = entry_of(record, "applied_step"), entry_of(record, "layers_changed")
    # A refresh that failed early has no objective, gap or seconds yet.
    seconds = mapping_of(record.get("seconds", {}), "seconds")
    return Refresh(
        step=step_of(entry_of(record, "step"), "step"),
        applied_step=None if applied is None else step_of(applied, "applied_step"),
        reason=_reason(record),
        fp4_fraction=number_of(entry_of(record, "fp4_fraction"), "fp4_fraction"),
        layers_changed=step_of(changed, "layers_changed"),
        objective=number_of(record.get("objective"), "objective"),
        gap=number_of(record.get("gap"), "gap"),
        seconds={part: number_of(seconds.get(part), f"seconds.{part}") for part in ("probe", "solver", "waited")},
        changes=_changes(entry_of(record, "changes"), cells),
    )


def _changes(value: object, cells: Mapping[str, str]) -> dict[str, str]:
    changes: dict[str, str] = {}
    for cell, pair in mapping_of(value, "changes").items():
        where = f"changes[{printable(cell)!r}]"
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(f"{where} is {short(pair)}, expected the old and the new format.")
        for name in pair:
            check_format(name, where)
        if cell.rpartition(":")[2] not in GEMMS:
            raise ValueError(f"{where} names no GEMM; expected one of {', '.join(GEMMS)} after the layer.")
        # The same texts as everywhere else: a history names each layer very often.
        changes[cells.get(cell, cell)] = next(name for name in FORMATS if name == pair[1])
    return changes


def check_of(record: Mapping[str, Any]) -> Check:
    correlation = number_of(entry_of(record, "correlation"), "correlation")
    return Check(
        step_of(entry_of(record, "step"), "step"), correlation, bool(entry_of(record, "refresh")), _reason(record)
    )


def _reason(record: Mapping[str, Any]) -> str | None:
    reason = entry_of(record, "reason")
    if reason is not None and not isinstance(reason, str):
        raise ValueError(f"reason is {short(reason)}, expected text or null.")
    return reason


def _check_event(record: Mapping[str, Any], expected: str) -> None:
    if entry_of(record, "event") != expected:
        raise ValueError(f"event is {short(record['event'])}, expected {expected!r}.")


def read_divergence(path: str | os.PathLike[str]) -> tuple[int, list[dict[str, Any]]]:
    """Returns probe step and records of a divergence-<step>.json; the keys of a record are the fields of `Divergence`.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is none.
    """
    document = mapping_of(read_json(path), "the document")
    rows = _rows_of(document)
    records = [_record(row, f"records[{index}]") for index, row in enumerate(rows)]
    if len({(record["layer"], record["gemm"], record["format"]) for record in records}) < len(records):
        raise ValueError("records has a layer, GEMM and format twice.")
    return step_of(entry_of(document, "step"), "step"), records


def _rows_of(document: Mapping[str, Any]) -> list[Any]:
    """Returns the records as objects; files of schema version 2 have "columns", and "rows" of values."""
    if "rows" not in document:
        return _list(entry_of(document, "records"), "records")
    columns = _list(entry_of(document, "columns"), "columns")
    if len(columns) > _MOST_COLUMNS or not all(isinstance(name, str) for name in columns):
        raise ValueError(f"columns is {short(columns)}, expected at most {_MOST_COLUMNS} names.")
    rows = [_list(row, f"rows[{index}]") for index, row in enumerate(_list(document["rows"], "rows"))]
    for index, row in enumerate(rows):
        if len(row) != len(columns):
            raise ValueError(f"rows[{index}] has {len(row)} values, expected {len(columns)}, one for each column.")
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{where} is {short(value)}, expected a list.")
    return value


def _record(value: object, where: str) -> dict[str, Any]:
    row = mapping_of(value, where)
    layer = entry_of(row, "layer", where)
    if not isinstance(layer, str) or not 0 < len(layer) <= MAX_TEXT:
        raise ValueError(f"{where}.layer is {short(layer)}, expected a name.")
    for key, known in (("gemm", (*GEMMS, LAYER)), ("format", tuple(FORMATS))):
        if entry_of(row, key, where) not in known:
            raise ValueError(f"{where}.{key} is {short(row[key])}, expected one of {', '.join(known)}.")
    record: dict[str, Any] = {"layer": layer, "gemm": row["gemm"], "format": row["format"]}
    for key in ("loss_divergence", "weight_divergence"):
        record[key] = number_of(entry_of(row, key, where), f"{where}.{key}")
        if record[key] is None:
            raise ValueError(f"{where}.{key} is None, expected a number.")
    for key in ("flops", "weight_bias", "absolute_error", "relative_error"):
        record[key] = number_of(row.get(key), f"{where}.{key}") or 0.0
    return record | {"criterion": number_of(row.get("criterion"), f"{where}.criterion")}


def trainer_log(path: Path) -> tuple[int, list[Any]]:
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > MAX_JSON_BYTES:
            raise ValueError(f"the file is larger than {MAX_JSON_BYTES} bytes.")
        data = file.read(MAX_JSON_BYTES)
    if data.count(b"{") + data.count(b"[") > _MOST_ENTRIES:
        raise ValueError(f"it has more than {_MOST_ENTRIES:,} entries.")
    try:
        # Not parse_json: the Trainer writes a NaN loss as NaN.
        state = mapping_of(json.loads(data, parse_int=_parse_int), "the state")
    except RecursionError as error:
        raise ValueError("its JSON is nested too deeply.") from error
    log = entry_of(state, "log_history")
    if not isinstance(log, list):
        raise ValueError(f"log_history is {short(log)}, expected a list.")
    return step_of(entry_of(state, "global_step"), "global_step"), log


def _parse_int(text: str) -> float:
    """Of too many digits as a float, in time that does not grow with their square."""
    return int(text) if len(text) <= MAX_DIGITS else float(text)


def entry_of(mapping: Mapping[str, Any], key: str, where: str = "it") -> Any:
    if key not in mapping:
        raise ValueError(f"{where} has no entry {key!r}.")
    return mapping[key]


def mapping_of(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {short(value)}, expected a JSON object.")
    return value


def is_step(value: object) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST_STEP


def step_of(value: object, where: str) -> int:
    if not isinstance(value, int) or not is_step(value):
        raise ValueError(f"{where} is {short(value)}, expected an integer from 0 to {_LARGEST_STEP}.")
    return value


def number_of(value: object, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST_NUMBER:
        return float(value)
    raise ValueError(f"{where} is {short(value)}, expected a number up to {_LARGEST_NUMBER:g} in size.")


def short(value: object) -> str:
    """`repr`, cut to a length that fits in a message; of a container only what it is."""
    if isinstance(value, dict | list):
        return f"a {'JSON object' if isinstance(value, dict) else 'list'} of {len(value)}"
    return printable(repr(value), 60)
