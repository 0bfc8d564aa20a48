"""The tables of divergences, divergence-<step>.json: written as columns and rows, read and checked as records."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..estimation.table import LAYER, DivergenceTable
from ..json_io import read_json
from ..layers.state import plain_name
from ..numerics.formats import check_format
from ..numerics.gemms import GEMMS
from ..planning.checked_values import MAX_TEXT
from .values import entry_of, list_of, mapping_of, number_of, short, step_of

SCHEMA_VERSION = 2
# Of a table; today's have ten.
_MOST_COLUMNS = 100


def divergence_document(step: int, table: DivergenceTable) -> dict[str, Any]:
    """Returns the content of the file: each column is named once, which halves its size."""
    records = table.to_records()
    columns = list(records[0]) if records else []
    rows = [[record[column] for column in columns] for record in records]
    return {"schema_version": SCHEMA_VERSION, "step": step, "loss": table.loss, "columns": columns, "rows": rows}


def read_divergence(path: str | os.PathLike[str]) -> tuple[int, list[dict[str, Any]]]:
    """Returns probe step and records of a divergence-<step>.json; the keys of a record are the fields of `Divergence`.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is none; an `UnknownName` where it has a format that is not registered.
    """
    document = mapping_of(read_json(path), "the document")
    rows = _rows(document)
    records = [_row(row, f"records[{index}]") for index, row in enumerate(rows)]
    if len({(record["layer"], record["gemm"], record["format"]) for record in records}) < len(records):
        raise ValueError("records has a layer, GEMM and format twice.")
    return step_of(entry_of(document, "step"), "step"), records


def _rows(document: Mapping[str, Any]) -> list[Any]:
    """Returns the records as objects; files of schema version 2 have "columns", and "rows" of values."""
    if "rows" not in document:
        return list_of(entry_of(document, "records"), "records")
    columns = list_of(entry_of(document, "columns"), "columns")
    if len(columns) > _MOST_COLUMNS or not all(isinstance(name, str) for name in columns):
        raise ValueError(f"columns is {short(columns)}, expected at most {_MOST_COLUMNS} names.")
    rows = [list_of(row, f"rows[{index}]") for index, row in enumerate(list_of(document["rows"], "rows"))]
    for index, row in enumerate(rows):
        if len(row) != len(columns):
            raise ValueError(f"rows[{index}] has {len(row)} values, expected {len(columns)}, one for each column.")
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _row(value: object, where: str) -> dict[str, Any]:
    row = mapping_of(value, where)
    layer = entry_of(row, "layer", where)
    if not isinstance(layer, str) or not 0 < len(layer) <= MAX_TEXT:
        raise ValueError(f"{where}.layer is {short(layer)}, expected a name.")
    if entry_of(row, "gemm", where) not in (*GEMMS, LAYER):
        raise ValueError(f"{where}.gemm is {short(row['gemm'])}, expected one of {', '.join((*GEMMS, LAYER))}.")
    name = entry_of(row, "format", where)
    if not isinstance(name, str) or not 0 < len(name) <= MAX_TEXT:
        raise ValueError(f"{where}.format is {short(name)}, expected the name of a format.")
    check_format(name, f"{where}.format")
    record: dict[str, Any] = {"layer": plain_name(layer), "gemm": row["gemm"], "format": row["format"]}
    for key in ("loss_divergence", "weight_divergence"):
        record[key] = number_of(entry_of(row, key, where), f"{where}.{key}")
        if record[key] is None:
            raise ValueError(f"{where}.{key} is None, expected a number.")
    for key in ("flops", "absolute_error", "relative_error"):
        record[key] = number_of(row.get(key), f"{where}.{key}") or 0.0
    record["weight_bias"] = number_of(row.get("weight_bias"), f"{where}.weight_bias")
    record["criterion"] = number_of(row.get("criterion"), f"{where}.criterion")
    return record
