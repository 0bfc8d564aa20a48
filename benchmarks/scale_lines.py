"""The tables of docs/scale.md that come from committed lines as they are: times of solvers, parameters of prices."""

from __future__ import annotations

import statistics
from pathlib import Path

from shared.json_lines import read_lines

RESULTS = Path(__file__).parent / "results"
PROGRAM_COLUMNS = ("formats", "stages", "solver", "problems", "seconds, median (most)", "largest gap", "objective")
PRICE_COLUMNS = ("GEMM", "linears with a price", "log of FP4's price", "log of (FP8's price / FP4's)")


def program_rows() -> list[list[str]]:
    """Rows of what the solvers took."""
    lines, rows = read_lines(RESULTS / "scale_program.jsonl"), []
    for key in dict.fromkeys((line["formats"], line["stages"], line["asked"]) for line in lines):
        of_key = [line for line in lines if (line["formats"], line["stages"], line["asked"]) == key]
        seconds = [line["seconds"] for line in of_key]
        objective = statistics.fmean(line["objective"] for line in of_key)
        answered = sum(line["solver"] == key[2] for line in of_key)
        rows.append(
            [
                *map(str, key),
                f"{len(of_key)}" + ("" if answered == len(of_key) else f" ({len(of_key) - answered} by greedy)"),
                f"{statistics.median(seconds):.2f} ({max(seconds):.2f})",
                f"{max(line['gap'] for line in of_key):.1e}",
                f"{objective:.4f}",
            ]
        )
    return rows


def price_rows() -> list[list[str]]:
    """Rows of the parameters that prices are drawn with."""
    return [
        [
            line["gemm"],
            f"{line['above_0']} of {line['linears']}",
            f"{line['mean']:.2f} ± {line['deviation']:.2f}",
            f"{line['mean_of_fp8']:.2f} ± {line['deviation_of_fp8']:.2f}",
        ]
        for line in read_lines(RESULTS / "scale_prices.jsonl")
    ]
