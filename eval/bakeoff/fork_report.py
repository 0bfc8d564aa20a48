"""The table of a file of forks: every contender's mean difference to another one on the same forks, with its interval.

A difference is 100 * (loss / loss of the other - 1), in percent. The unit is the fork.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student_t

from benchmarks.shared.json_lines import read_lines

from .fork_workers import SCHEMA_VERSION

Row = dict[str, Any]

LOSSES = {"held_out_plan": "held out, plan", "held_out_high_precision": "held out, BF16", "train": "training"}
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """Mean of paired differences."""

    mean: float
    deviation: float
    """Standard deviation of the paired differences (n - 1); NaN for fewer than two."""
    forks: int

    @classmethod
    def of(cls, differences: Sequence[float]) -> Difference:
        values, count = np.array(differences), len(differences)
        mean = float(values.mean()) if count else math.nan
        return cls(mean, float(values.std(ddof=1)) if count > 1 else math.nan, count)

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return self.deviation / math.sqrt(self.forks) if self.forks else math.nan

    @property
    def half_width(self) -> float:
        """Of the 95% interval of the mean, by Student's t."""
        if self.forks < 2:
            return math.nan
        return float(student_t.ppf((1 + _CONFIDENCE) / 2, self.forks - 1)) * self.error

    def __str__(self) -> str:
        if not self.forks:
            return "-"
        return f"{self.mean:+.3f}" + (f" ± {self.half_width:.3f}" if self.forks > 1 else "")


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


def differences(lines: Iterable[Row], others: Iterable[Row], loss: str) -> list[float]:
    """Returns the paired differences of two contenders, in percent, over the forks that ended well for both."""
    theirs = {_fork_key(line): line["loss"][loss] for line in others if not line["diverged"]}
    pairs = ((line["loss"][loss], theirs.get(_fork_key(line))) for line in lines if not line["diverged"])
    return [100 * (own / other - 1) for own, other in pairs if other is not None]


def write_report(paths: Sequence[Path], output: Path, against: str = "bf16") -> str:
    """Writes one table per setting (text, model, base, length of forks) into a Markdown file and returns the text.

    Args:
        paths: files of lines.
        output: the Markdown file.
        against: name of the contender that differences are taken to.

    Raises:
        FileNotFoundError, ValueError: as `read_forks`, or no line is of `against`.
    """
    settings: dict[str, list[Row]] = {}
    for line in read_forks(paths):
        settings.setdefault(line["setting"], []).append(line)
    text = "\n\n".join(table(lines, against) for lines in settings.values()) + "\n"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    return text


def table(lines: Sequence[Row], against: str) -> str:
    """Returns the table of one setting's lines, contenders in the order in which they come first."""
    contenders: dict[str, list[Row]] = {}
    for line in lines:
        contenders.setdefault(line["contender"], []).append(line)
    if against not in contenders:
        raise ValueError(f"No line is of the contender {against!r}; there are {', '.join(contenders)}.")
    losses = [f"{label} (%)" for label in LOSSES.values()]
    heads = ["contender", "share in 4 bits", "forks", *losses, "paired sd", "standard error", "ms per step"]
    rows = [heads, ["---", *["---:"] * (len(heads) - 1)]]
    rows += [_cells(name, own, contenders[against]) for name, own in contenders.items()]
    first = lines[0]
    return "\n".join(
        [
            f"Difference to `{against}` on the same fork: loss after {first['steps']} steps, mean ± half of the 95% "
            "interval (Student's t, uncorrected).",
            "Paired standard deviation and standard error are those of the held-out loss under the plan, in percentage "
            "points.",
            _origin(lines),
            "",
            *(f"| {' | '.join(row)} |" for row in rows),
        ]
    )


def _cells(name: str, lines: Sequence[Row], others: Sequence[Row]) -> list[str]:
    found = {loss: Difference.of(differences(lines, others, loss)) for loss in LOSSES}
    main = found["held_out_plan"]
    diverged = sum(line["diverged"] for line in lines)
    unpaired = 0 if lines is others else len(lines) - diverged - main.forks
    notes = [f"{count} {what}" for count, what in ((diverged, "diverged"), (unpaired, "unpaired")) if count]
    share = float(np.mean([line["fp4_fraction"] for line in lines]))
    step_ms = float(np.median([1e3 * line["seconds"]["training"] / line["steps"] for line in lines]))
    is_self = lines is others
    return [
        name,
        f"{share:.1%}",
        str(len(lines) if is_self else main.forks) + (f" ({', '.join(notes)})" if notes else ""),
        *("0" if is_self else str(difference) for difference in found.values()),
        *("-" if is_self or math.isnan(figure) else f"{figure:.3f}" for figure in (main.deviation, main.error)),
        f"{step_ms:.0f}",
    ]


def _origin(lines: Sequence[Row]) -> str:
    """Says how many forks there are, and where they ran."""
    forks = {_fork_key(line) for line in lines}
    bases = {line["fork"]["base_seed"] for line in lines}
    machines, commits = (sorted({str(line[key]) for line in lines}) for key in ("machine", "commit"))
    return f"{len(forks)} forks of {len(bases)} bases; {', '.join(machines)}; commit {', '.join(commits)}."


def _fork_key(line: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns what two lines have in common if they are of one fork, the very weights of its start among it."""
    fork = line["fork"]
    return fork["base_seed"], fork["point"], fork["data_seed"], line["state"]
