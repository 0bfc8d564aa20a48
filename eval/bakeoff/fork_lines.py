"""What files of forks hold: lines, the pairs among them, and the differences of two contenders.

A difference is 100 * (loss / loss of the other - 1), in percent, on the same fork.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.shared.json_lines import read_lines

from .fork_statistics import Difference

Row = dict[str, Any]

SCHEMA_VERSION = 1
# How a line's plan writes places in its `shares`.
PLACES = string.digits + string.ascii_letters
LOSSES = {
    "held_out_plan": "held out, plan",
    "held_out_high_precision": "held out, BF16",
    "held_out_averaged": "held out, averaged",
    "train": "training",
}


def read_forks(paths: Iterable[Path]) -> list[Row]:
    """Returns the lines of files, the last one of each id.

    Raises:
        FileNotFoundError: a file that is not there.
        ValueError: a line of another schema version.
    """
    found: dict[str, Row] = {}
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist; expected the lines that `run` wrote.")
        for line in read_lines(path):
            if line.get("schema_version") != SCHEMA_VERSION:
                raise ValueError(
                    f"{path}: the line {line.get('id')!r} has schema_version {line.get('schema_version')!r}, expected "
                    f"{SCHEMA_VERSION}. Use the report of the commit that wrote it ({line.get('commit')!r})."
                )
            found[line["id"]] = line
    return list(found.values())


def by_contender(lines: Iterable[Row]) -> dict[str, list[Row]]:
    """Groups lines by contender, in the order in which they come first."""
    contenders: dict[str, list[Row]] = {}
    for line in lines:
        contenders.setdefault(line["contender"], []).append(line)
    return contenders


def losses_of(lines: Iterable[Row]) -> list[str]:
    """Returns the losses that all lines have; earlier lines have no averaged one."""
    given = [line["loss"] for line in lines]
    return [loss for loss in LOSSES if all(loss in losses for losses in given)]


def fork_key(line: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns what two lines have in common if they are of one fork: the very weights of its start, the machine, and
    whether steps came from CUDA graphs."""
    parts = (line["fork"].get(part) for part in ("base_seed", "point", "data_seed", "shift"))
    return *map(str, parts), line["state"], line["machine"], line.get("cuda_graph", False)


def pairs(lines: Iterable[Row], others: Iterable[Row], loss: str) -> list[tuple[Row, float]]:
    """Returns line and difference of two contenders, over the forks that ended well for both."""
    theirs = {fork_key(line): line["loss"][loss] for line in others if not line["diverged"]}
    found = ((line, theirs.get(fork_key(line))) for line in lines if not line["diverged"])
    return [(line, 100 * (line["loss"][loss] / other - 1)) for line, other in found if other is not None]


def differences(lines: Iterable[Row], others: Iterable[Row], loss: str) -> list[float]:
    """Returns the paired differences of two contenders."""
    return [difference for _, difference in pairs(lines, others, loss)]


def difference_of(lines: Iterable[Row], others: Iterable[Row], loss: str) -> Difference:
    """Returns the mean difference of two contenders, of forks that share bases."""
    found = pairs(lines, others, loss)
    return Difference.of([value for _, value in found], [line["fork"]["base_seed"] for line, _ in found])


def origin(lines: Sequence[Row]) -> str:
    """Says how many forks there are, and where they ran."""
    forks = {fork_key(line) for line in lines}
    bases = {line["fork"]["base_seed"] for line in lines}
    machines, commits = (sorted({str(line[key]) for line in lines}) for key in ("machine", "commit"))
    where = ", ".join(machines).replace(", 1 threads", ", 1 thread")  # lines are paired by the name as it is
    counted = f"{_counted(len(forks), 'fork')} of {_counted(len(bases), 'base')}"
    captured = len({fork_key(line) for line in lines if line.get("cuda_graph")})
    graphs = f" Steps of {_counted(captured, 'fork')} from CUDA graphs." if captured else ""
    return f"{counted}; {where}; commit {', '.join(commits)}.{graphs}{_kernels(lines)}"


def _kernels(lines: Iterable[Row]) -> str:
    """Says whose GEMMs ran on another backend than most contenders' did; "" where all ran on one, or lines do not say.

    BF16 has none.
    """
    found: dict[str, list[str]] = {}
    for contender, own in by_contender(lines).items():
        for backend in sorted({line["backend"] for line in own if line.get("backend") is not None}):
            found.setdefault(backend, []).append(contender)
    most, *others = sorted(found, key=lambda backend: -len(found[backend])) or [""]
    rest = "; ".join(f"{backend} for {', '.join(found[backend])}" for backend in others)
    return f" Kernels: {most}; {rest}." if rest else ""


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)
