"""Are models of forks compared on the very questions that they were asked?"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import ttest_rel
from small_forks import BF16, CPU, SNIP, forked, write_recipe

from eval.bakeoff.fork_base import train_base
from eval.bakeoff.fork_cells import Contender, Fork
from eval.bakeoff.fork_recipe import ForkRun, load_recipe
from eval.bakeoff.fork_run import run_fork
from eval.bakeoff.fork_score_table import compare_scores, right_answers, score_table
from eval.bakeoff.fork_text import write_text
from eval.scoring.questions import answers_of, packed, unpacked

BENCHMARKED = {"cells": [{"format": "bf16", "benchmarks": True}, {"format": "fp8"}], "benchmarks": ["arc_easy"]}


def test_answers_are_unpacked_as_they_were_packed() -> None:
    for right in ([], [True], [False] * 9 + [True], [True, False, True] * 11):
        assert unpacked(packed(right)).tolist() == right


def test_answers_come_in_the_order_of_the_documents_and_only_where_they_are_right_or_wrong() -> None:
    samples = [
        {"doc_id": 10, "metrics": ["acc", "perplexity"], "acc": True, "perplexity": -3.2},
        {"doc_id": 9, "metrics": ["acc", "perplexity"], "acc": 0.0, "perplexity": -1.0},
    ]
    found = answers_of({"samples": {"lambada": samples, "none": []}})
    assert {task: list(metrics) for task, metrics in found.items()} == {"lambada": ["acc"]}
    assert unpacked(found["lambada"]["acc"]).tolist() == [0, 1]


def row(task: str, group: str | None, *right: int) -> dict[str, Any]:
    answers = {"answers": {"acc": packed([bool(one) for one in right])}} if right else {}
    return {"task": task, "group": group} | answers


def line(contender: str, seed: int, *rows: dict[str, Any]) -> dict[str, Any]:
    fork = asdict(Fork(base_seed=seed, point=3, data_seed=0))
    return {"contender": contender, "fork": fork, "state": "s", "machine": "m", "diverged": False, "scores": rows}


OURS = [
    line("fp4", 0, row("arc", None, 1, 0, 0, 1), row("mmlu", None), row("stem", "mmlu"), row("law", "stem", 1, 1)),
    line("fp4", 1, row("arc", None, 1, 1, 0, 1), row("mmlu", None), row("stem", "mmlu"), row("law", "stem", 1, 0)),
]
THEIRS = [
    line("bf16", 0, row("arc", None, 1, 1, 1, 1), row("mmlu", None), row("stem", "mmlu"), row("law", "stem", 1, 0)),
    line("bf16", 1, row("arc", None, 1, 1, 0, 1), row("mmlu", None), row("stem", "mmlu"), row("law", "stem", 1, 0)),
]


def test_the_members_of_a_group_are_questions_of_the_group() -> None:
    assert {task: found.tolist() for task, found in right_answers(OURS[0]).items()} == {
        "arc": [1, 0, 0, 1],
        "mmlu": [1, 1],
    }


def test_differences_are_of_the_same_questions_over_the_same_forks() -> None:
    found = compare_scores([*OURS, *THEIRS, line("fp4", 7, row("arc", None, 0, 0, 0, 0))], [("fp4", "bf16")])
    assert [(one.task, one.difference.forks) for one in found] == [("arc", 4), ("mmlu", 2), ("all questions", 6)]
    ours, theirs = np.array([1, 0.5, 0, 1, 1, 0.5]), np.array([1, 1, 0.5, 1, 1, 0])
    whole = found[-1]
    assert (whole.one, whole.other) == (pytest.approx(100 * ours.mean()), pytest.approx(100 * theirs.mean()))
    assert whole.difference.mean == pytest.approx(100 * (ours - theirs).mean())
    assert whole.difference.p == pytest.approx(ttest_rel(ours, theirs).pvalue)
    text = score_table([*OURS, *THEIRS], [("fp4", "bf16"), ("fp8", "bf16")])
    assert "| fp4 against bf16 | arc | 4 | 62.5 ± 28.0 | 87.5 ± 19.1 | -25.00 ± " in text
    assert "p < 0.05 / 3" in text
    assert score_table(OURS, [("fp4", "bf16")]) == "No lines with benchmarks yet: fp4 against bf16."


def test_cells_that_are_benchmarked_have_lines_of_their_own(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, **BENCHMARKED)
    runs = load_recipe(path).runs("text")
    plain = load_recipe(path, ["cells=[{format: [bf16, fp8]}]"]).runs("text")
    assert [run.benchmarked for run in runs] == [True, True, False, False]
    assert [run.ids == other.ids for run, other in zip(runs, plain, strict=True)] == [False, False, True, True]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"benchmarks": []}, "the recipe names no task"),
        ({"cells": [{"format": "bf16", "benchmarks": 3}]}, "true or false"),
    ],
)
def test_benchmarks_without_tasks_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe(write_recipe(tmp_path, **(BENCHMARKED | changes)))


@pytest.mark.slow
def test_a_fork_goes_on_after_its_benchmarks_as_if_there_had_been_none(tmp_path: Path) -> None:
    from eval.bakeoff.fork_scores import scores

    recipe = load_recipe(write_recipe(tmp_path, **BENCHMARKED))
    text = write_text(recipe, tmp_path / "text.npz")
    train_base(recipe, text, 0, CPU, tmp_path)
    question = {"id": "a", "question": "one?", "choices": {"text": ["two", "three"], "label": ["1", "2"]}}
    (tmp_path / "arc").mkdir()
    lines = [json.dumps(question | {"answerKey": key}) + "\n" for key in "1212"]
    (tmp_path / "arc" / "ARC-Easy-test.jsonl").write_text("".join(lines), encoding="utf-8")
    fork = recipe.forks[0]
    for contender in (BF16, Contender(None, "all", SNIP)):
        run = ForkRun(contender, fork, {2: "a", 4: "b"})

        def score(trainee: Any) -> dict[str, Any]:
            return scores(trainee, ["arc_easy"], tmp_path / "text.npz", tmp_path)

        found = [found for _, found in run_fork(recipe, text, run, CPU, tmp_path, score)]
        without = forked(recipe, text, contender, fork, tmp_path, 2, 4)
        assert [one["loss"] for one in found] == [one["loss"] for one in without]
        (arc,) = found[1]["scores"]
        right = unpacked(arc["answers"]["acc"])
        assert (len(right), right.mean()) == (4, arc["metrics"]["acc"]["value"])
