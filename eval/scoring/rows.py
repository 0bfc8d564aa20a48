"""The output of an evaluation: one JSON line per task and group, and a table to read."""

from __future__ import annotations

import importlib.metadata
import math
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lm_eval.api.task import Task

Row = dict[str, Any]

_PACKAGES = ("torch", "transformers", "datasets", "lm_eval", "snip_hf")
_PROJECT = Path(__file__).resolve().parents[2]


def rows_of(results: Mapping[str, Any], loaded: Mapping[str, Any], names: Sequence[str], origin: Row) -> list[Row]:
    """Returns one row per task and group, in the order of `names`, each group before its members.

    Args:
        results: from `simple_evaluate`.
        loaded: from `TaskManager.load(names)`, after the evaluation.
        origin: fields of every row (model, data, seed, ...).
    """
    rows = []
    for name, group in _with_members(names, results["group_subtasks"], None):
        tasks = loaded["groups"][name].get_all_tasks() if name in loaded["groups"] else [loaded["tasks"][name]]
        counts = [results["n-samples"][task.task_name] for task in tasks]
        shots = {results["n-shot"][task.task_name] for task in tasks}
        row = {
            "task": name,
            "group": group,
            "metrics": _metrics(results["results"][name], tasks[0].higher_is_better()),
            "chance": _chance(tasks),
            "task_version": str(results["versions"][name]),
            "num_fewshot": shots.pop() if len(shots) == 1 else None,
            "num_samples": sum(count["effective"] for count in counts),
            "num_documents": sum(count["original"] for count in counts),
        }
        rows.append(row | origin)
    return rows


def _with_members(
    names: Sequence[str], members: Mapping[str, Sequence[str]], group: str | None
) -> Iterator[tuple[str, str | None]]:
    for name in names:
        yield name, group
        yield from _with_members(members.get(name, ()), members, name)


def _metrics(scores: Mapping[str, Any], higher_is_better: Mapping[str, bool]) -> dict[str, Row]:
    """Turns lm-eval's {"acc,none": 0.25, "acc_stderr,none": 0.1} into {"acc": {"value": 0.25, "stderr": 0.1}}."""
    names = [key.removesuffix(",none") for key in scores if key.endswith(",none") and "_stderr," not in key]
    return {
        name: {
            "value": _number(scores[f"{name},none"]),
            "stderr": _number(scores.get(f"{name}_stderr,none")),
            "higher_is_better": higher_is_better[name],
        }
        for name in names
    }


def _number(value: Any) -> float | None:
    """Returns None for lm-eval's "N/A" (no standard error) and for infinite perplexities, which JSON cannot hold."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _chance(tasks: Sequence[Task]) -> float | None:
    """Returns the expected accuracy of a uniform guess: the mean of 1 / choices over the evaluated documents."""
    if any(task.OUTPUT_TYPE != "multiple_choice" for task in tasks):
        return None
    choices = [count for task in tasks for count in Counter(x.doc_id for x in task.instances).values()]
    return sum(1 / count for count in choices) / len(choices)


def versions() -> dict[str, str | None]:
    """Returns the versions of the packages that affect a score; None for a package that is not installed."""
    found: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def git_commit() -> str | None:
    """Returns the commit of this checkout, with "-dirty" if tracked files differ, or of an archive of it; else None."""
    archived = (_PROJECT / "eval" / "commit.txt").read_text(encoding="utf-8").strip()
    if not archived.startswith("$"):  # `git archive` wrote it.
        return archived
    if not (_PROJECT / ".git").exists():
        return None
    command = ["git", "-C", str(_PROJECT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def table(rows: Sequence[Row]) -> str:
    """Returns the rows as text, one line per metric. Single subjects of a group are only in the JSON lines."""
    groups = {row["task"] for row in rows if any(other["group"] == row["task"] for other in rows)}
    lines = [("task", "metric", "value", "stderr", "chance", "samples", "shots", "version")]
    for row in rows:
        if row["group"] is None or row["task"] in groups:
            for name, metric in row["metrics"].items():
                lines.append(
                    (
                        ("- " if row["group"] else "") + row["task"],
                        name,
                        _cell(metric["value"]),
                        _cell(metric["stderr"]),
                        _cell(row["chance"] if name.startswith("acc") else None),
                        f"{row['num_samples']}/{row['num_documents']}",
                        str(row["num_fewshot"]),
                        str(row["task_version"]),
                    )
                )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    padded = (map(str.ljust, line, widths) for line in lines)
    return "\n".join("  ".join(cells).rstrip() for cells in padded)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
