"""Forks of 124M from the middle of a schedule: their committed lines, and the rows of the page's tables."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import numpy as np
from committed import ROOT, difference_among, prose_of, recipe_of, row_of, shown

from eval.bakeoff import fork_tables
from eval.bakeoff.fork_lines import read_forks
from eval.bakeoff.fork_recipe import load_recipe
from eval.bakeoff.fork_score_table import Compared, compare_scores, right_answers
from eval.bakeoff.fork_statistics import Difference, holm

PAGE = ROOT / "docs" / "results-continued.md"
LINES = ROOT / "eval" / "results" / "forks-continue-124m.jsonl"
RECIPE = recipe_of("continue-124m")
text = partial(prose_of, "docs/results-continued.md")
SEEDS = (0, 1, 2)
PLAN = "held_out_plan"
SNIP = "snip {{fp4, fp8}}, {}% by {}, refresh_every 250"
PAPER = "snip-paper {{fp4, fp8}}, {}% by layer, refresh_every 250"
RULE = "layer-position {fp4, fp8}, 75% by layer"
GEMM_RULE = "backward-first {fp4, fp8}, 75% by gemm"
NAMES = {
    "bf16": "BF16",
    "fp8": "FP8",
    SNIP.format(50, "gemm"): "SNIP by GEMM, 50%",
    SNIP.format(75, "gemm"): "SNIP by GEMM, 75%",
    GEMM_RULE: "`backward-first` by GEMM, 75%",
    SNIP.format(50, "layer"): "SNIP by layer, 50%",
    SNIP.format(75, "layer"): "SNIP by layer, 75%",
    RULE: "`layer-position` by layer, 75%",
    PAPER.format(50): "`snip-paper` by layer, 50%",
    PAPER.format(75): "`snip-paper` by layer, 75%",
    "fp4": "all FP4",
}
TASKS = {
    **{"arc_easy": "ARC-Easy", "arc_challenge": "ARC-Challenge", "hellaswag": "HellaSwag", "lambada_openai": "LAMBADA"},
    **{"piqa": "PIQA", "winogrande": "WinoGrande", "boolq": "BoolQ", "openbookqa": "OpenBookQA", "mmlu": "MMLU"},
}
# Steps and seed.
SCORED = [(1000, 0), *((1600, seed) for seed in SEEDS)]


@cache
def continued() -> list[dict[str, Any]]:
    """The lines."""
    return read_forks([LINES])


def line_of(contender: str, steps: int, seed: int = 0) -> dict[str, Any] | None:
    """The line of a contender; None if there is none."""
    named = (line for line in continued() if (line["contender"], line["steps"]) == (contender, steps))
    return next((line for line in named if line["fork"]["base_seed"] == seed), None)


def gap(contender: str, steps: int, loss: str = PLAN, seed: int = 0) -> str:
    """The difference to BF16 in percent; "-" without a line."""
    if line_of(contender, steps, seed) is None or line_of("bf16", steps, seed) is None:
        return "-"
    return f"{points(contender, 'bf16', seed, steps, loss):+.3f}"


def points(one: str, other: str, seed: int, steps: int = 1600, loss: str = PLAN) -> float:
    """The difference of two contenders in percent of BF16's loss."""
    losses = [line["loss"][loss] for name in (one, other, "bf16") if (line := line_of(name, steps, seed))]
    return float(100 * (losses[0] - losses[1]) / losses[2])


def less(one: str, other: str) -> Difference:
    """The difference of two contenders over the seeds after 1,600 steps."""
    return difference_among((line for line in continued() if line["steps"] == 1600), one, other)


def family(name: str, outcome: str = PLAN, seeds: Sequence[int] = SEEDS) -> dict[str, fork_tables.Tested]:
    """The comparisons of a family after 1,600 steps, by contender."""
    own = [line for line in continued() if line["steps"] == 1600 and line["fork"]["base_seed"] in seeds]
    asked = load_recipe(RECIPE).comparisons_after(1600)[name]
    return {test.one: test for test in fork_tables.tests_of(own, asked, outcome)}


def rows_of_losses() -> list[str]:
    """The rows of the table of losses."""
    plan, train = family("to-bf16"), family("to-bf16", "train")
    kinds = [(1000, 0), *((1600, seed) for seed in SEEDS)]
    rows = []
    for contender, name in NAMES.items():
        if contender != "bf16":
            gaps = [gap(contender, steps, seed=seed) for steps, seed in kinds]
            rows.append(row_of(name, *gaps, shown(plan[contender]), shown(train[contender])))
    return rows


def scores_of_bf16(steps: int, seed: int) -> dict[str, tuple[float, float, float | None]]:
    """Task -> share of right answers, standard error and chance, in percent."""
    rows = {row["task"]: row for row in (line_of("bf16", steps, seed) or {})["scores"] if row["group"] is None}
    found = {}
    for task in TASKS:
        accuracy, chance = rows[task]["metrics"]["acc"], rows[task]["chance"]
        found[task] = (100 * accuracy["value"], 100 * accuracy["stderr"], None if chance is None else 100 * chance)
    return found


def rows_of_scores() -> list[str]:
    """The rows of the table of BF16's scores."""
    scores = [scores_of_bf16(*one) for one in SCORED]
    rows = []
    for task, name in TASKS.items():
        chance = scores[0][task][2]
        cells = [f"{own[task][0]:.1f} ± {own[task][1]:.1f}" for own in scores]
        rows.append(row_of(name, "-" if chance is None else f"{chance:.0f}", *cells))
    return rows


@cache
def compared(steps: int) -> list[tuple[Compared, float]]:
    """The comparisons of the report's table with their corrected p-values."""
    families = load_recipe(RECIPE).comparisons_after(steps)
    pairs = dict.fromkeys(pair for own in families.values() for pair in own)
    found = compare_scores([line for line in continued() if line["steps"] == steps], list(pairs))
    ps = holm([one.difference.p for one in found])
    return [(one, 1.0 if p is None else p) for one, p in zip(found, ps, strict=True)]


def to_bf16(steps: int, *tasks: str) -> list[Compared]:
    """The comparisons to BF16 in these tasks."""
    return [one for one, _ in compared(steps) if one.task in tasks and one.pair.endswith("against bf16")]


def significant(steps: int) -> dict[tuple[str, str], Compared]:
    """(Pair, task) -> the comparisons that are significant."""
    return {(one.pair, one.task): one for one, p in compared(steps) if p < 0.05}


def rows_of_differences() -> list[str]:
    """The rows of the table of what could be excluded: differences to BF16 after 1,600 steps."""
    rows = []
    for task, name in (TASKS | {"all questions": "all questions"}).items():
        own = [one.difference for one in to_bf16(1600, task)]
        assert len(own) == 10
        means, widths = [one.mean for one in own], [one.half_width for one in own]
        detectable = [one.detectable(0.05 / len(compared(1600))) or 0.0 for one in own]
        cells = [f"{own[0].forks:,}", f"{min(means):+.2f} to {max(means):+.2f}"]
        cells += [f"{min(of):.2f} to {max(of):.2f}" for of in (widths, detectable)]
        rows.append(row_of(name, *cells))
    return rows


def is_no() -> np.ndarray:
    """Whether a question has the answer "no": BF16 of seed 2 answered "no" throughout after 1,000 steps."""
    found: np.ndarray = right_answers(line_of("bf16", 1000, seed=2) or {})["boolq"] == 1
    return found


def boolq(contender: str, seed: int) -> tuple[float, float, float, float]:
    """Right answers, answers "yes", right ones where "yes" is right, and where "no" is, all in percent."""
    right, no = right_answers(line_of(contender, 1600, seed) or {})["boolq"], is_no()
    of_all, yes, of_yes, of_no = (
        100 * float(one.mean()) for one in (right, np.where(no, 1 - right, right), right[~no], right[no])
    )
    return of_all, yes, of_yes, of_no


def by_seed(contender: str, task: str) -> list[float]:
    """The differences of right answers to BF16 with each seed after 1,600 steps, in points."""
    found = []
    for seed in SEEDS:
        own, other = (right_answers(line_of(name, 1600, seed) or {})[task] for name in (contender, "bf16"))
        found.append(100 * float(own.mean() - other.mean()))
    return found


def rows_of_boolq() -> list[str]:
    """The rows of BoolQ after 1,600 steps: scores, differences to BF16, shares of "yes", right of both kinds."""
    rows = []
    for contender, name in NAMES.items():
        seeds = zip(*(boolq(contender, seed) for seed in SEEDS), strict=True)
        right, yes, of_yes, of_no = (", ".join(f"{share:.1f}" for share in shares) for shares in seeds)
        pair = f"{contender} against bf16"
        one = next((one for one in to_bf16(1600, "boolq") if one.pair == pair), None)
        mean = "-" if one is None else f"{one.difference.mean:+.2f} ± {one.difference.half_width:.2f}"
        mean = f"**{mean}**" if (pair, "boolq") in significant(1600) else mean
        each = "-" if one is None else ", ".join(f"{gap:+.2f}" for gap in by_seed(contender, "boolq"))
        rows.append(row_of(name, right, each, mean, yes, of_yes, of_no))
    return rows
