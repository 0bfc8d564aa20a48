r"""What the lines of `format_fidelity.py` say: tables in Markdown, and what misses its target.

python benchmarks/format_fidelity_report.py runs/format_fidelity.jsonl --output runs/format_fidelity.md
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from estimate_fidelity_report import table
from shared.agreement import Array, Record, rank_figures, ratio_figures, reliability, variation
from shared.json_lines import read_lines

MEDIAN_ERROR = 0.05
# Spearman may be below that of the truth's own halves by this much.
BELOW_HALVES = 0.05
# So many kinds of linear are named, those furthest from the truth.
WORST_KINDS = 3


@dataclass(frozen=True)
class Cell:
    """One row of one format in one case: estimate against truth."""

    case: str
    format: str
    row: str
    median_error: float
    error_90: float
    spearman: float
    one_batch: float
    """Spearman of the estimate from one micro-batch."""
    halves: float | None
    """Spearman of one half of the truth's micro-batches with the other, the mean over ways of halving them."""
    corrected: float | None
    """The same for the full length (Spearman-Brown)."""
    variation: float
    ratios: dict[str, float]
    """Layer -> estimate / truth."""

    @classmethod
    def of(cls, record: Record, row: str, layers: Sequence[str]) -> Cell | None:
        """Returns the figures of a line; None if no layer has a truth above 0."""
        truth, estimates = (np.array(record[row][name]) for name in ("truth", "estimate"))
        mean: Array = np.sqrt((truth**2).mean(0))
        counted = np.flatnonzero(mean > 0)
        if not counted.size:
            return None
        mean, (one, estimate) = mean[counted], estimates[:, counted]
        figures: dict[str, Any] = ratio_figures(estimate, mean)
        found = reliability(truth[:, counted] ** 2, root=True)
        corrected = None if found is None else found["spearman"]
        return cls(
            record["case"],
            record["format"],
            row,
            figures["median_error"],
            figures["error_90"],
            rho(estimate, mean),
            rho(one, mean),
            None if corrected is None else corrected / (2 - corrected),
            corrected,
            variation(mean),
            {layers[index]: float(value) for index, value in zip(counted, estimate / mean, strict=True)},
        )

    @property
    def one_batch_ranks(self) -> bool:
        """Whether the estimate from one micro-batch, as a refresh makes it, meets the target of ranks."""
        return self.halves is None or self.one_batch >= self.halves - BELOW_HALVES

    @property
    def misses(self) -> list[str]:
        found = []
        if self.median_error > MEDIAN_ERROR:
            found.append(f"median error {self.median_error:.3f}")
        if self.halves is not None and self.spearman < self.halves - BELOW_HALVES:
            found.append(f"Spearman {self.spearman:.3f}, halves {self.halves:.3f}")
        return found


def rho(one: Array, other: Array) -> float:
    value = rank_figures(one, other)["spearman"]
    assert isinstance(value, float)
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, help="default: print")
    options = parser.parse_args()
    text = report(*load(options.files))
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    else:
        print(text)


def load(files: Iterable[Path]) -> tuple[list[Cell], list[Record]]:
    """Returns the figures of all complete cases, and the lines that say where they come from."""
    cells: list[Cell] = []
    cases: list[Record] = []
    for file in files:
        records = read_lines(file)
        complete = {record["case"]: record for record in records if record["kind"] == "case"}
        cases += (record for record in records if record["kind"] == "case")
        for record in (r for r in records if r["kind"] == "format" and r["case"] in complete):
            rows = [row for row in record if isinstance(record[row], dict)]
            found = (Cell.of(record, row, complete[record["case"]]["layers"]) for row in rows)
            cells += [cell for cell in found if cell is not None]
    return cells, cases


def report(cells: Sequence[Cell], cases: Sequence[Record]) -> str:
    """Returns the whole text."""
    layers = [cell for cell in cells if cell.row == "layer"]
    tokens, on_bytes = ([c for c in layers if c.case.endswith(":bytes") is is_bytes] for is_bytes in (False, True))
    gemms = [cell for cell in cells if cell.row != "layer"]
    sections = {
        "Formats: whole layers, median (worst) over cases": groups(tokens, "format"),
        "Cases: whole layers, median (worst) over formats": groups(tokens, "case"),
        "Median error of every case and format": matrix(tokens, "median_error", 3),
        "Spearman less that of the truth's halves": matrix(tokens, "margin", 2),
        "Estimate / truth by kind of linear, furthest from 1: median (range) over formats and blocks": kinds(tokens),
        "On bytes: median (worst) over formats": groups(on_bytes, "case"),
        "On bytes: estimate / truth by kind of linear in the first block": kinds(on_bytes, first_block=True),
        "Single GEMMs, median (worst) over cases": groups(gemms, "format", "row"),
        "Targets": targets(layers),
        "Origin": origin(cases),
    }
    return "\n".join(f"## {title}\n\n{body}\n" for title, body in sections.items() if body)


def groups(cells: Sequence[Cell], *fields: str) -> str:
    """Returns a row per value of the fields, with the figures of all its cells."""
    if not cells:
        return ""
    found: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells:
        found.setdefault(tuple(getattr(cell, field) for field in fields), []).append(cell)
    rows = []
    for key, group in found.items():
        halves, corrected = ([getattr(c, name) for c in group] for name in ("halves", "corrected"))
        rows.append(
            (
                *key,
                str(len(group)),
                spread([c.median_error for c in group], max, 3),
                spread([c.error_90 for c in group], max, 3),
                spread([c.spearman for c in group], min),
                spread([c.one_batch for c in group], min),
                spread(halves, min),
                spread(corrected, min),
                spread([c.variation for c in group], min),
                str(sum(bool(c.misses) for c in group)),
            )
        )
    head = ("cells", "median error", "90%", "Spearman", "from one batch", "halves", "corrected", "CV", "misses")
    return table((*fields, *head), rows)


def spread(values: Sequence[float | None], worst: Any, digits: int = 2) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.{digits}f} ({worst(known):.{digits}f})" if known else ""


def matrix(cells: Sequence[Cell], figure: str, digits: int) -> str:
    """Returns a row per format and a column per case."""
    if not cells:
        return ""
    cases = list(dict.fromkeys(cell.case for cell in cells))
    values: dict[tuple[str, str], float | None] = {}
    for cell in cells:
        margin = None if cell.halves is None else cell.spearman - cell.halves
        values[cell.format, cell.case] = margin if figure == "margin" else getattr(cell, figure)
    rows = []
    for fmt in dict.fromkeys(cell.format for cell in cells):
        found = [values.get((fmt, case)) for case in cases]
        rows.append((fmt, *("" if value is None else f"{value:.{digits}f}" for value in found)))
    return table(("format", *cases), rows)


def kinds(cells: Sequence[Cell], first_block: bool = False) -> str:
    """Returns per case the kinds of linear whose median ratio is furthest from 1, with the range of all their ratios.

    Args:
        first_block: whether to take the linears of the first block alone.
    """
    if not cells:
        return ""
    found: dict[str, dict[str, list[float]]] = {}
    for cell in cells:
        for layer, ratio in cell.ratios.items():
            if not first_block or ".layers.0." in layer:
                found.setdefault(cell.case, {}).setdefault(layer.rsplit(".", 1)[-1], []).append(ratio)
    rows = []
    for case, ratios in found.items():
        worst = sorted(ratios, key=lambda kind: -abs(statistics.median(ratios[kind]) - 1))[:WORST_KINDS]
        cells_of_row = (
            f"{kind} {statistics.median(ratios[kind]):.2f} ({min(ratios[kind]):.2f} to {max(ratios[kind]):.2f})"
            for kind in worst
        )
        rows.append((case, *cells_of_row, *[""] * (WORST_KINDS - len(worst))))
    return table(("case", "furthest", "next", "third"), rows)


def targets(layers: Sequence[Cell]) -> str:
    """Returns a list of what misses a target, whole layers only."""
    missed = [cell for cell in layers if cell.misses]
    lines = [f"- {cell.case}, {cell.format}: {'; '.join(cell.misses)}" for cell in missed]
    errors, ranks = (sum(any(word in m for m in c.misses) for c in missed) for word in ("median", "Spearman"))
    total = f"{len(layers)} cells: {errors} miss the median error of {MEDIAN_ERROR}, {ranks} the ranks of the halves."
    return "\n".join([total, *_from_one_batch(layers), "", *lines])


def _from_one_batch(layers: Sequence[Cell]) -> list[str]:
    """Returns a line per optimizer on the ranks that estimates from one micro-batch give."""
    by_optimizer: dict[str, list[Cell]] = {}
    for cell in layers:
        by_optimizer.setdefault(cell.case.split(":")[1], []).append(cell)
    lines = []
    for optimizer, cells in by_optimizer.items():
        missed = sum(not cell.one_batch_ranks for cell in cells)
        lines.append(f"From one micro-batch under {optimizer}, {missed} of {len(cells)} miss the ranks of the halves.")
    return lines


def origin(cases: Sequence[Record]) -> str:
    names = ("loss", "tokens", "batches", "blocks", "probe_tokens", "seed", "commit", "machine", "torch")
    rows = [
        (case["case"], *(str(case[name]) for name in names), str(round(sum(case["seconds"].values()))))
        for case in cases
    ]
    commands = dict.fromkeys(case["command"] for case in cases)
    return "\n".join([*(f"    {command}" for command in commands), "", table(("case", *names, "seconds"), rows)])


if __name__ == "__main__":
    main()
