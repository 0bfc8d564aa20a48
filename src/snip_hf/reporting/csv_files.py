"""Writes a run as CSV files: formats by GEMM and period, divergences, refreshes and losses."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..estimation.table import Divergence
from ..json_io import write_atomic
from ..numerics.gemms import GEMMS
from ..records.load import Run
from ..text import printable

# Maximum length of a text.
_CELL = 2000
_REFRESH = (
    "step",
    "applied_step",
    "status",
    "reason",
    "target_fp4_fraction",
    "fp4_fraction",
    "forward_fp4_fraction",
    "fp4_time_fraction",
    "linear_speedup",
    "layers_changed",
    "objective",
    "bound",
    "gap",
    "solver",
    "solver_version",
    "loss",
)
_PARTS = {"seconds": ("probe", "solver", "waited"), "memory_mib": ("measured",)}


def write_csv(run: Run, folder: Path) -> list[Path]:
    """Writes plan.csv and, if there is data, refreshes.csv, divergence.csv and losses.csv to a folder.

    Returns: the files written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tables: dict[str, tuple[Sequence[str], Iterable[Sequence[Any]]]] = {
        "plan.csv": (("layer", "gemm", "from_step", "to_step", "format"), _plan_rows(run))
    }
    if run.refreshes:
        names = [f"{name}_{part}" for name, parts in _PARTS.items() for part in parts]
        tables["refreshes.csv"] = ((*_REFRESH, *names), _refresh_rows(run))
    if run.divergences:
        rows = ([step, *vars(row).values()] for step, table in run.divergences.items() for row in table.rows)
        tables["divergence.csv"] = (("step", *(field.name for field in fields(Divergence))), rows)
    if run.losses:
        losses = ([step, row.get("loss"), row.get("eval_loss")] for step, row in run.losses.items())
        tables["losses.csv"] = (("step", "loss", "eval_loss"), losses)
    for name, (headings, rows_of) in tables.items():
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(headings)
        writer.writerows([printable(one, _CELL) if isinstance(one, str) else one for one in row] for row in rows_of)
        write_atomic(folder / name, text.getvalue().encode())
    return [folder / name for name in tables]


def _plan_rows(run: Run) -> Iterator[Sequence[Any]]:
    """Yields one row for each period in which a GEMM kept its format; the last period has no end."""
    for layer, row in run.plans[0][1].assignment.items():
        for gemm in (gemm for gemm in GEMMS if gemm in row):
            begin, format = run.plans[0][0], row[gemm]
            for step, plan in run.plans[1:]:
                if plan.assignment[layer][gemm] != format:
                    yield layer, gemm, begin, step, format
                    begin, format = step, plan.assignment[layer][gemm]
            yield layer, gemm, begin, None, format


def _refresh_rows(run: Run) -> Iterator[Sequence[Any]]:
    for refresh in run.refreshes:
        parts = [getattr(refresh, name).get(part) for name, parts in _PARTS.items() for part in parts]
        yield [*(getattr(refresh, name) for name in _REFRESH), *parts]
