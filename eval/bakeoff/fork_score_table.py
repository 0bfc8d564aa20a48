"""Benchmarks of two contenders compared question by question, over the forks that both have."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from eval.scoring.questions import unpacked

from .documents import markdown
from .fork_lines import Row, by_contender, fork_key
from .fork_statistics import Difference, holm
from .significance import SIGNIFICANCE

_METRIC = "acc"
# Of the row over all questions.
_ALL = "all questions"


@dataclass(frozen=True)
class Compared:
    """A task that two contenders were asked."""

    pair: str
    task: str
    one: float
    """Share of right answers, in percent, mean over forks."""
    other: float
    difference: Difference
    """In points; the questions are its units."""


def has_scores(lines: Iterable[Row]) -> bool:
    """Returns True if a line has scores."""
    return any("scores" in line for line in lines)


def right_answers(line: Row) -> dict[str, np.ndarray]:
    """Returns task that was asked for -> 1 for each right answer, the members of a group one after the other."""
    rows = line["scores"]
    groups = {row["task"]: row["group"] for row in rows}
    found: dict[str, list[np.ndarray]] = {}
    for row in rows:
        top = row["task"]
        while groups[top] is not None:
            top = groups[top]
        if _METRIC in row.get("answers", {}):
            found.setdefault(top, []).append(unpacked(row["answers"][_METRIC]).astype(float))
    return {task: np.concatenate(parts) for task, parts in found.items()}


def compare_scores(lines: Sequence[Row], pairs: Iterable[tuple[str, str]]) -> list[Compared]:
    """Returns the comparisons of pairs of contenders in each task, and over all questions."""
    of = by_contender(line for line in lines if "scores" in line and not line["diverged"])
    found = []
    for one, other in pairs:
        theirs = {fork_key(line): right_answers(line) for line in of.get(other, ())}
        both = [(right_answers(line), theirs[fork_key(line)]) for line in of.get(one, ()) if fork_key(line) in theirs]
        if not both:
            continue
        ours, others = ([answers[side] for answers in both] for side in (0, 1))
        tasks = {task: (_mean(ours, task), _mean(others, task)) for task in ours[0]}
        tasks[_ALL] = tuple(np.concatenate([answers[side] for answers in tasks.values()]) for side in (0, 1))
        found += [
            Compared(f"{one} against {other}", task, 100 * own.mean(), 100 * rest.mean(), _difference(own, rest))
            for task, (own, rest) in tasks.items()
        ]
    return found


def _mean(answers: Sequence[Mapping[str, np.ndarray]], task: str) -> np.ndarray:
    """Returns how often each question was answered rightly, mean over forks."""
    mean: np.ndarray = np.mean([one[task] for one in answers], axis=0)
    return mean


def _difference(own: np.ndarray, rest: np.ndarray) -> Difference:
    values = 100 * (own - rest)
    return Difference.independent(float(values.mean()), float(values.std(ddof=1)), len(values))


def score_table(lines: Sequence[Row], pairs: Sequence[tuple[str, str]]) -> str:
    """Returns the table of benchmarks: both scores, and their difference over the questions."""
    compared = compare_scores(lines, pairs)
    if not compared:
        return f"No lines with benchmarks yet: {'; '.join(f'{one} against {other}' for one, other in pairs)}."
    corrected = holm([one.difference.p for one in compared])
    level = SIGNIFICANCE / len(compared)
    rows = [
        [
            one.pair,
            one.task,
            f"{one.difference.forks:,}",
            *(f"{share:.1f} ± {_share_error(share, one.difference.forks):.1f}" for share in (one.one, one.other)),
            f"{one.difference.mean:+.2f} ± {one.difference.half_width:.2f}",
            f"{one.difference.detectable(level) or 0.0:.2f}",
            "-" if p is None else f"{p:.3f}",
        ]
        for one, p in zip(compared, corrected, strict=True)
    ]
    heads = ["comparison", "task", "questions", "first (%)", "second (%)", "difference (points)"]
    heads += ["detectable", "p, Holm"]
    note = (
        f"Share of right answers ({_METRIC}) ± standard error, and the difference of the same questions with half of "
        "its 95% interval, uncorrected. Questions are the units: the interval says how these very models compare on "
        "other questions, not what other seeds would give. Detectable: the true difference that a paired test would "
        f"find with power 0.8 at p < {SIGNIFICANCE} / {len(compared)}, Holm's first step over the table."
    )
    return f"{note}\n\n{markdown(heads, rows)}"


def _share_error(percent: float, questions: int) -> float:
    """Returns the standard error of a share of right answers, in percent."""
    share = percent / 100
    return 100 * math.sqrt(share * (1 - share) / max(questions - 1, 1))
