"""The time of a refresh by workflow step, as a table: from lines of `probe_cost.py`.

    python benchmarks/probe_cost.py --sizes 1M 124M --rows 2 --length 256 --resume --output runs/refresh-steps.jsonl
    python benchmarks/refresh_steps.py runs/refresh-steps.jsonl

A cell has the median over refreshes, with the least and the most. The solver works beside training: what training
waits for it is a step of its own, and the solver's seconds are in no sum.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared.json_lines import read_lines

# Part of a refresh, as lines have it -> workflow step.
WORKFLOW = {
    "passes": "1. two passes at moved weights",
    "sums": "2. sums: divergences of layers, GEMMs, formats",
    "program": "3. program",
    "rest": "checks, records, start of the solver",
    "solver": "4. solver, beside training",
    "waited": "   of it, training waits",
    "apply": "5. plan applied",
    "refresh": "**all that training waits for**",
}
NOT_WAITED_FOR = ("solver",)


def report(lines: Sequence[dict[str, Any]]) -> str:
    """Returns the table: a row per workflow step, three columns per line."""
    heads, rows = ["step"], {name: [title] for name, title in WORKFLOW.items()}
    for line in lines:
        where = f"{line['size']}, {line['rows']} x {line['length']} tokens, {line['machine']}"
        if "loss_estimator" in line:  # not in earlier lines, which are of "token-fisher"
            where += f", {line['loss_estimator']}"
        heads += [f"{where}: s", "in training steps", "of the refresh"]
        whole = statistics.median(line["each"]["refresh"])
        for name, cells in rows.items():
            values = line["each"][name]
            median = statistics.median(values)
            cells += [f"{median:.3g} ({min(values):.3g} to {max(values):.3g})", f"{median / line['step']:.3g}"]
            cells.append("" if name in NOT_WAITED_FOR else f"{median / whole:.1%}")
    table = [heads, ["---"] * len(heads), *rows.values()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lines", type=Path)
    print(report(read_lines(parser.parse_args().lines)))


if __name__ == "__main__":
    main()
