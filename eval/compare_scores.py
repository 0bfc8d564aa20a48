"""Compares models question by question, from the lines that `eval/run.py --answers --output` wrote.

    python -m eval.compare_scores bf16.jsonl snip.jsonl fp8.jsonl

Each file has the scores of one model; the first model is the reference. Prints per task and model: the accuracy, its
difference to the reference in points with a 95% interval (normal, paired by question), the questions that only one of
the two answers rightly, and McNemar's exact p, also with Holm's correction over all tasks and models. The subjects of
MMLU are one task. The mean over tasks, each with the same weight, has a normal p, uncorrected.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binomtest, norm

from .paired import holm
from .scoring.questions import unpacked

Answers = dict[str, np.ndarray[Any, Any]]
METRICS = ("acc_norm", "acc")
"""Metric of a task: the first one that its lines have."""


def read_answers(path: Path) -> Answers:
    """Returns task -> 1 for each right answer, 0 for each wrong one. The last line of a task counts.

    The subjects of a group are pooled under its name.

    Raises:
        ValueError: no line has answers.
    """
    found: Answers = {}
    groups: dict[str, str | None] = {}
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        groups[line["task"]] = line.get("group")
        answers = line.get("answers") or {}
        metric = next((name for name in METRICS if name in answers), None)
        if metric is not None:
            found[line["task"]] = unpacked(answers[metric]).astype(int)
    if not found:
        raise ValueError(f"{path} has no answers. Score the model again: eval/run.py MODEL --answers --output FILE.")
    pooled: dict[str, list[np.ndarray[Any, Any]]] = {}
    for task, answers in found.items():
        while (group := groups.get(task)) is not None:
            task = group
        pooled.setdefault(task, []).append(answers)
    return {task: np.concatenate(parts) for task, parts in pooled.items()}


def compare(name: str, task: str, reference: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Returns the row of one model and task.

    Raises:
        ValueError: the two models answered different numbers of questions.
    """
    if len(reference) != len(other):
        raise ValueError(
            f"{task}: {name} answered {len(other)} questions, the reference {len(reference)}. Score both with the same "
            "--limit and data."
        )
    difference = other - reference
    gained, lost = int((difference > 0).sum()), int((difference < 0).sum())
    error = float(difference.std(ddof=1)) / math.sqrt(len(difference)) if len(difference) > 1 else math.nan
    p = float(binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0
    return {
        "task": task,
        "model": name,
        "accuracy": 100 * float(other.mean()),
        "difference": 100 * float(difference.mean()),
        "half": 196 * error,
        "gained": gained,
        "lost": lost,
        "p": p,
    }


def mean_over_tasks(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the cells of a model's last row."""
    accuracy, difference = (float(np.mean([row[name] for row in rows])) for name in ("accuracy", "difference"))
    half = math.hypot(*(row["half"] for row in rows)) / len(rows)
    p = float(2 * norm.sf(196 / 100 * abs(difference) / half)) if half else 1.0
    cells = [f"mean of {len(rows)} tasks", rows[0]["model"], f"{accuracy:.2f}", f"{difference:+.2f} ± {half:.2f}"]
    return [*cells, "-", f"{p:.3f}", "-"]


def report(files: Sequence[Path]) -> str:
    """Returns the table. Tasks that one of the two lacks are left out."""
    reference, rows, means = read_answers(files[0]), [], []
    for path in files[1:]:
        answers = read_answers(path)
        own = [compare(path.stem, task, reference[task], answers[task]) for task in reference if task in answers]
        rows += own
        means += [mean_over_tasks(own)] if len(own) > 1 else []
    rows.sort(key=lambda row: list(reference).index(row["task"]))
    heads = ["task", "model", "accuracy, %", f"minus {files[0].stem}, points", "gained, lost", "p", "p, Holm"]
    lines = [heads, ["---"] * len(heads)]
    for row, corrected in zip(rows, holm([row["p"] for row in rows]), strict=True):
        difference = f"{row['difference']:+.2f} ± {row['half']:.2f}"
        cells = [row["task"], row["model"], f"{row['accuracy']:.2f}", difference, f"{row['gained']}, {row['lost']}"]
        lines.append([*cells, f"{row['p']:.3f}", f"{corrected:.3f}"])
    lines += means
    scores = "; ".join(f"{task} {100 * right.mean():.2f} ({len(right)})" for task, right in reference.items())
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"{files[0].stem}, accuracy in percent (questions): {scores}\n\n{table}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reference", type=Path, help="JSONL file of the reference")
    parser.add_argument("others", type=Path, nargs="+", help="JSONL files of the models to compare")
    options = parser.parse_args(arguments)
    try:
        print(report([options.reference, *options.others]))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
