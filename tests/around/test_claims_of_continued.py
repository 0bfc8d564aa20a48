"""Figures that the page on going on from a checkpoint of 124M quotes are those of the committed lines."""

from __future__ import annotations

import shutil
from functools import cache, partial
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from committed import detectable_of, prose_of
from scipy.stats import norm
from scipy.stats import t as t_distribution

from eval.bakeoff import fork_tables
from eval.bakeoff.fork_lines import fork_key, read_forks
from eval.bakeoff.fork_recipe import load_recipe
from eval.bakeoff.fork_report import Asked, write_report
from eval.bakeoff.fork_score_table import Compared, compare_scores, right_answers
from eval.bakeoff.fork_statistics import holm

ROOT = Path(__file__).resolve().parents[2]
LINES = ROOT / "eval" / "results" / "forks-continue-124m.jsonl"
RECIPE = ROOT / "recipes" / "forks-continue-124m.yaml"
PAGE = ROOT / "docs" / "results-continued.md"
text = partial(prose_of, "docs/results-continued.md")
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


@cache
def continued() -> list[dict[str, Any]]:
    """The lines."""
    return read_forks([LINES])


def line_of(contender: str, steps: int, seed: int = 0) -> dict[str, Any] | None:
    """The line of a contender; None if there is none."""
    named = (line for line in continued() if (line["contender"], line["steps"]) == (contender, steps))
    return next((line for line in named if line["fork"]["base_seed"] == seed), None)


def gap(contender: str, steps: int, loss: str = "held_out_plan", seed: int = 0) -> str:
    """The difference to BF16 in percent; "-" without a line."""
    own, other = line_of(contender, steps, seed), line_of("bf16", steps, seed)
    if own is None or other is None:
        return "-"
    return f"{100 * (own['loss'][loss] / other['loss'][loss] - 1):+.3f}"


def both(contender: str) -> str:
    """The differences to BF16 of seeds 0 and 1 after 1,600 steps, in percent."""
    return " and ".join(gap(contender, 1600, seed=seed) for seed in (0, 1))


def points(one: str, other: str, seed: int) -> float:
    """The difference of two contenders after 1,600 steps, in percent of BF16's loss."""
    losses = [line["loss"]["held_out_plan"] for name in (one, other, "bf16") if (line := line_of(name, 1600, seed))]
    return float(100 * (losses[0] - losses[1]) / losses[2])


def rows_of_losses() -> list[str]:
    """The rows of the table of losses."""
    kinds = [
        (1000, "held_out_plan", 0),
        *((1600, loss, seed) for loss in ("held_out_plan", "train") for seed in (0, 1)),
    ]
    return [
        f"| {name} | " + " | ".join(gap(contender, *kind) for kind in kinds) + " |"
        for contender, name in NAMES.items()
        if contender != "bf16"
    ]


# Steps and seed.
SCORED = [(1000, 0), (1600, 0), (1600, 1), (1600, 2)]


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
        rows.append(f"| {name} | {'-' if chance is None else f'{chance:.0f}'} | {' | '.join(cells)} |")
    return rows


def above_chance(steps: int, seed: int) -> set[str]:
    """Tasks where BF16 is significantly above chance: one-sided, after Holm's correction over the tasks."""
    scores = {task: own for task, own in scores_of_bf16(steps, seed).items() if own[2] is not None}
    ps = holm([float(norm.sf((share - (chance or 0)) / error)) for share, error, chance in scores.values()])
    return {task for task, p in zip(scores, ps, strict=True) if p is not None and p < 0.05}


@cache
def compared(steps: int) -> list[tuple[Compared, float]]:
    """The comparisons of the report's table with their corrected p-values."""
    families = load_recipe(RECIPE).comparisons_after(steps)
    pairs = dict.fromkeys(pair for family in families.values() for pair in family)
    found = compare_scores([line for line in continued() if line["steps"] == steps], list(pairs))
    ps = holm([one.difference.p for one in found])
    return [(one, 1.0 if p is None else p) for one, p in zip(found, ps, strict=True)]


def rows_of_differences() -> list[str]:
    """The rows of the table of what could be excluded: differences to BF16 after 1,600 steps."""
    rows = []
    for task, name in (TASKS | {"all questions": "all questions"}).items():
        own = [one for one, _ in compared(1600) if one.task == task and one.pair.endswith("against bf16")]
        assert len(own) == 10
        means = [one.difference.mean for one in own]
        widths = [one.difference.half_width for one in own]
        detectable = [one.difference.detectable(0.05 / len(compared(1600))) or 0.0 for one in own]
        cells = [f"{own[0].difference.forks:,}", f"{min(means):+.2f} to {max(means):+.2f}"]
        cells += [f"{min(widths):.2f} to {max(widths):.2f}", f"{min(detectable):.2f} to {max(detectable):.2f}"]
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return rows


def excluded_on(task: str) -> int:
    """Of how many contenders the interval to BF16 after 1,600 steps excludes half a point, in either direction."""
    own = [one.difference for one, _ in compared(1600) if one.task == task and one.pair.endswith("against bf16")]
    return sum(abs(difference.mean) + difference.half_width < 0.5 for difference in own)


def significant(steps: int) -> dict[tuple[str, str], Compared]:
    """(Pair, task) -> the comparisons that are significant."""
    return {(one.pair, one.task): one for one, p in compared(steps) if p < 0.05}


def to_bf16_in_boolq(contender: str) -> tuple[float, float]:
    """The differences of right answers to BF16 with seeds 0 and 1 after 1,600 steps, in points."""
    first, second = (boolq(contender, seed)[0] - boolq("bf16", seed)[0] for seed in (0, 1))
    return first, second


def rows_of_boolq() -> list[str]:
    """The rows of BoolQ after 1,600 steps: scores, differences to BF16, shares of "yes", right of both kinds."""
    rows = []
    for contender, name in NAMES.items():
        seeds = zip(boolq(contender, 0), boolq(contender, 1), strict=True)
        right, yes, of_yes, of_no = (f"{first:.1f}, {second:.1f}" for first, second in seeds)
        pair = (f"{contender} against bf16", "boolq")
        one = next((one for one, _ in compared(1600) if (one.pair, one.task) == pair), None)
        mean = "-" if one is None else f"{one.difference.mean:+.2f} ± {one.difference.half_width:.2f}"
        mean = f"**{mean}**" if pair in significant(1600) else mean
        each = "-" if one is None else "{:+.2f}, {:+.2f}".format(*to_bf16_in_boolq(contender))
        rows.append(f"| {name} | {right} | {each} | {mean} | {yes} | {of_yes} | {of_no} |")
    return rows


def is_no() -> np.ndarray:
    """Whether a question has the answer "no": BF16 of seed 2 answered "no" throughout after 1,000 steps."""
    found: np.ndarray = right_answers(line_of("bf16", 1000, seed=2) or {})["boolq"] == 1
    return found


def boolq(contender: str, seed: int) -> tuple[float, float, float, float]:
    """Right answers, answers "yes", right ones where "yes" is right, and where "no" is, all in percent."""
    right, no = right_answers(line_of(contender, 1600, seed) or {})["boolq"], is_no()
    shares = right.mean(), np.where(no, 1 - right, right).mean(), right[~no].mean(), right[no].mean()
    return tuple(100 * float(share) for share in shares)  # type: ignore[return-value]


def test_which_lines_there_are() -> None:
    assert [line_of(name, 1600, seed) for name in NAMES for seed in (0, 1)].count(None) == 0
    assert [NAMES[name] for name in NAMES if line_of(name, 1000) is None] == ["`snip-paper` by layer, 50%"]
    keys = {(line["contender"], line["fork"]["base_seed"], line["steps"]) for line in continued()}
    of_seed_1 = {(name, 1, 1600) for name in NAMES}
    of_length_1000 = {("bf16", 1, 1000), ("bf16", 2, 1000), ("fp8", 2, 1000), (RULE, 2, 1000)}
    assert {key for key in keys if key[1]} == of_seed_1 | of_length_1000 | {("bf16", 2, 1600)}
    assert len(continued()) == len(keys) == 37 and "37 of the 66 forks ran" in text()
    assert sum(len(run.ids) for run in load_recipe(RECIPE).runs("text")) == 66
    assert 33 - sum(key[2] == 1000 for key in keys) == 19 and "19 of the 33 forks over 1,000 steps" in text()
    later = [line for line in continued() if line["fork"]["base_seed"] and line["steps"] == 1600]
    assert {line["commit"] for line in later} == {"b76cbd1"} and len(later) == 12
    assert {line["commit"] for line in continued() if line not in later} == {"6237e0a"}
    assert "twelve forks of seeds 1 and 2 over 1,600 steps are of commit `b76cbd1`, the other 25 of `6237e0a`" in text()
    assert {line["machine"] for line in continued()} == {"NVIDIA H200"}
    assert len({fork_key(line) for line in continued() if line["fork"]["base_seed"] == 0}) == 1


def test_the_longer_forks_repeat_the_losses_of_the_shorter_ones() -> None:
    repeated = []
    for name in NAMES:
        for seed in range(3):
            early, late = line_of(name, 1000, seed), line_of(name, 1600, seed)
            if early is not None and late is not None:
                curve = early["training_curve"]
                assert len(curve) == 40 and late["training_curve"][:40] == curve
                if early["plans"]:
                    assert late["plans"][: len(early["plans"])] == early["plans"]
                repeated.append((name, seed))
    assert [seed for _, seed in repeated].count(0) == 10
    assert {key for key in repeated if key[1]} == {("bf16", 1), ("bf16", 2)}
    assert "for all ten contenders of seed 0 and for BF16 of seeds 1 and 2" in text()


def test_losses_against_bf16() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert all(row in page for row in rows_of_losses())
    by_gemm, by_layer = SNIP.format(75, "gemm"), SNIP.format(75, "layer")
    assert f"SNIP by GEMM at 75% ends at {both(by_gemm)}% (seeds 0 and 1), all FP4 at {both('fp4')}%" in text()
    assert f"FP8 at {both('fp8')}%" in text()
    assert f"{both(by_layer)}% at 75%, against {both(by_gemm)}%" in text()
    half, most = (both(PAPER.format(share)) for share in (50, 75))
    assert f"{half}% with 50% in FP4 and at {most}% with 75%" in text()
    assert f"SNIP by layer ends at {both(SNIP.format(50, 'layer'))}% and at {both(by_layer)}%" in text()
    assert all(points(PAPER.format(of), SNIP.format(of, "layer"), seed) > 0 for of in (50, 75) for seed in (0, 1))
    assert points(PAPER.format(75), "fp4", 0) > 0
    assert f"with seed 0, and {-points(PAPER.format(75), 'fp4', 1):.3f} points with seed 1" in text()
    assert f"{gap('fp8', 1000)}% with seed 0 and {gap('fp8', 1000, seed=2)}% with seed 2" in text()
    assert f"{gap(RULE, 1000)} and {gap(RULE, 1000, seed=2)}%" in text()
    apart = abs(float(gap("fp8", 1000)) - float(gap("fp8", 1000, seed=2)))
    assert f"{apart:.2f} points apart" in text()
    longer = " ".join((ROOT / "docs" / "results-longer.md").read_text(encoding="utf-8").split())
    assert "0.15 to 0.31%" in longer and "0.15 to 0.31%" in text()
    assert "power 0.8: 37 per contender" in longer and "56 for SNIP by GEMM" in longer
    assert "37 to 56 forks per contender" in text()


def test_what_both_seeds_have_and_what_they_have_not() -> None:
    names = [name for name in NAMES if name != "bf16"]
    orders = [sorted(names, key=lambda name: points(name, "bf16", seed)) for seed in (0, 1)]
    pairs = list(combinations(names, 2))
    turned = [pair for pair in pairs if points(*pair, 0) * points(*pair, 1) < 0]
    assert f"{len(pairs) - len(turned)} of the {len(pairs)} pairs of these ten contenders" in text()
    assert {order[0] for order in orders} == {"fp8"} and all(abs(points("fp8", "bf16", seed)) < 0.04 for seed in (0, 1))
    assert all(set(order[1:3]) == {SNIP.format(share, "gemm") for share in (50, 75)} for order in orders)
    assert all(set(order[-3:]) == {"fp4", PAPER.format(50), PAPER.format(75)} for order in orders)
    below = [-points(SNIP.format(75, "gemm"), GEMM_RULE, seed) for seed in (0, 1)]
    assert "is below `backward-first` by {:.3f} and {:.3f} points".format(*below) in text()
    told = {
        (SNIP.format(50, "gemm"), SNIP.format(75, "gemm")): "at 50% against 75% ({:+.3f} and {:+.3f} points)",
        (SNIP.format(50, "layer"), GEMM_RULE): "at 50% against `backward-first` ({:+.3f} and {:+.3f})",
        (SNIP.format(75, "layer"), RULE): "at 75% against `layer-position` ({:+.3f} and {:+.3f})",
        (PAPER.format(75), "fp4"): "`snip-paper` at 75% against all FP4 ({:+.3f} and {:+.3f})",
    }
    assert {frozenset(pair) for pair in turned} == set(map(frozenset, told))
    for pair, words in told.items():
        assert words.format(*(points(*pair, seed) for seed in (0, 1))) in text()
    apart = sorted(abs(points(name, "bf16", 1) - points(name, "bf16", 0)) for name in names)
    assert f"the two seeds are {apart[-1]:.3f} points apart" in text()
    assert abs(points("fp4", "bf16", 1) - points("fp4", "bf16", 0)) == apart[-1]
    assert f"{apart[0]:.3f} to {apart[-2]:.3f} points apart" in text()


def test_an_interval_over_two_seeds_says_next_to_nothing() -> None:
    assert f"half of it is {t_distribution.ppf(0.975, 1):.1f} standard errors" in text()
    families = load_recipe(RECIPE).comparisons_after(1600)
    own = [line for line in continued() if line["steps"] == 1600]
    tests = {test.one: test for test in fork_tables.tests_of(own, families["to-bf16"])}
    readings = {name for name, test in tests.items() if test.reading != fork_tables.NOT_SIGNIFICANT}
    one = SNIP.format(50, "layer")
    assert len(tests) == 10 and readings == {one} and {test.main.forks for test in tests.values()} == {2}
    assert gap(one, 1600) == gap(one, 1600, seed=1)
    assert f"at {gap(one, 1600)}% with both seeds. So its interval is ± {tests[one].main.half_width:.3f}" in text()
    found = [detectable_of(test) for name, test in tests.items() if name != one]
    assert f"The other nine tests would find differences of {min(found):.1f} to {max(found):.1f}%" in text()
    rules = fork_tables.tests_of(own, families["to-rules"])
    assert {test.reading for test in rules} == {fork_tables.NOT_SIGNIFICANT}


def test_the_readme_says_what_low_precision_costs_at_124m() -> None:
    costs = [both(name).replace("+", "") for name in (SNIP.format(75, "gemm"), "fp4")]
    assert f"SNIP by GEMM at 75% ends {costs[0]}% above BF16 and all FP4 {costs[1]}%" in prose_of("README.md")


def test_bf16_is_above_chance_on_arc_easy_alone_but_for_a_biased_boolq() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert all(row in page for row in rows_of_scores())
    with_boolq = {(1600, 0), (1600, 1)}
    for of in [*SCORED, (1000, 1), (1000, 2)]:
        assert above_chance(*of) == ({"arc_easy", "boolq"} if of in with_boolq else {"arc_easy"})
        scores = scores_of_bf16(*of)
        below = {task for task, (share, error, chance) in scores.items() if chance and share + 3 * error < chance}
        assert below - {"boolq"} == {"arc_challenge", "openbookqa", "mmlu"}
        assert ("boolq" in below) == (of[1] == 2)
    assert {row["num_fewshot"] for line in continued() for row in line["scores"] if row["group"] is None} == {0}
    of_lambada = [scores_of_bf16(*of)["lambada_openai"][0] for of in SCORED]
    assert f"LAMBADA has {min(of_lambada):.2f} to {max(of_lambada):.2f}% right answers" in text()


def test_significant_differences_are_of_boolq_and_of_all_questions_alone() -> None:
    for steps, tests in ((1000, 110), (1600, 120)):
        assert {task for _, task in significant(steps)} == {"boolq", "all questions"}
        assert len(compared(steps)) == tests
    assert "of the 110 tests after 1,000 steps" in text() and "of the 120 after 1,600" in text()

    def directions(steps: int, task: str) -> dict[str, bool]:
        """Contender -> whether it is higher than BF16, of those that are significant."""
        own = {pair: one.difference.mean > 0 for (pair, of), one in significant(steps).items() if of == task}
        return {NAMES[p.removesuffix(" against bf16")]: up for p, up in own.items() if p.endswith("against bf16")}

    lower = ("SNIP by GEMM, 50%", "SNIP by GEMM, 75%", "`snip-paper` by layer, 75%", "all FP4")
    assert directions(1000, "boolq") == dict.fromkeys(lower, False) | {"SNIP by layer, 75%": True}
    late = {"`layer-position` by layer, 75%": True, "`snip-paper` by layer, 75%": False}
    assert directions(1600, "boolq") == late | {"all FP4": False}
    assert (
        "SNIP by GEMM at 50 and 75% and all FP4 (lower), SNIP by layer at 75% (higher), `snip-paper` at 75% (lower); "
        "of the 120 after 1,600: `layer-position` (higher), `snip-paper` at 75% and all FP4 (lower)"
    ) in text()
    assert directions(1000, "all questions") == {"all FP4": False} and directions(1600, "all questions") == late
    told = {
        (1000, "fp4"): "all FP4 after 1,000 steps ({})",
        (1600, RULE): "`layer-position` ({})",
        (1600, PAPER.format(75)): "`snip-paper` at 75% ({}) after 1,600",
    }
    for (steps, name), words in told.items():
        one = significant(steps)[f"{name} against bf16", "all questions"]
        assert words.format(f"{one.difference.mean:+.2f} ± {one.difference.half_width:.2f}") in text()


def test_the_signs_in_boolq_do_not_last() -> None:
    name = SNIP.format(50, "gemm")
    early = next(one for one, _ in compared(1000) if (one.pair, one.task) == (f"{name} against bf16", "boolq"))
    assert f"at {early.difference.mean:+.2f} points on BoolQ after 1,000 steps with seed 0" in text()
    assert "at {:+.2f} and {:+.2f} with seeds 0 and 1".format(*to_bf16_in_boolq(name)) in text()
    assert "higher in the mean, is at {:+.2f} and {:+.2f}".format(*to_bf16_in_boolq(RULE)) in text()
    found = {name: to_bf16_in_boolq(name) for name in NAMES if name != "bf16"}
    same = {name for name, (first, second) in found.items() if first * second > 0}
    assert same == {SNIP.format(50, "layer"), PAPER.format(75), "fp4"}
    assert "Three of ten contenders have the same sign with both seeds" in text()


def test_what_the_benchmarks_could_exclude() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert all(row in page for row in rows_of_differences())
    own = [one for one, _ in compared(1600) if one.pair.endswith("against bf16") and one.task in TASKS]
    widths = {
        (one.pair, one.task): one.difference.half_width for one in own if one.task not in ("lambada_openai", "boolq")
    }
    least, most = (min(widths, key=lambda key: widths[key]), max(widths, key=lambda key: widths[key]))
    assert (least[1], most[1]) == ("hellaswag", "winogrande")
    assert f"± {widths[least]:.2f} points (HellaSwag)" in text() and f"± {widths[most]:.2f} (WinoGrande)" in text()
    assert excluded_on("winogrande") == 0
    assert excluded_on("hellaswag") == 10 and "interval of all ten contenders on HellaSwag" in text()
    rest = [one.difference.mean for one in own if one.task != "boolq"]
    assert f"{min(rest):+.2f} to {max(rest):+.2f} points" in text()


def test_boolq_shows_how_often_a_model_says_yes() -> None:
    page, no = PAGE.read_text(encoding="utf-8"), is_no()
    assert all(row in page for row in rows_of_boolq())
    assert (no.sum(), len(no)) == (1237, 3270)
    scores = [100 * right_answers(line)["boolq"].mean() for seed in range(3) if (line := line_of("bf16", 1000, seed))]
    assert f"{scores[0]:.1f}, {scores[1]:.1f} and {scores[2]:.1f}%" in text()
    assert "62.2% have" in text() and round(100 * (1 - 1237 / 3270), 1) == 62.2
    others = [100 * right_answers(line)["boolq"].mean() for name in ("fp8", RULE) if (line := line_of(name, 1000, 2))]
    assert "({:.1f} and {:.1f}%)".format(*others) in text()
    assert f'BF16 of seed 2 says "yes" to {boolq("bf16", 2)[1]:.1f}% of the questions' in text()
    balanced = []
    for contender, seed in product(NAMES, (0, 1)):
        of_yes, of_no = (share / 100 for share in boolq(contender, seed)[2:])
        balanced.append(50 * (of_yes + of_no))
        error = 50 * np.sqrt(of_yes * (1 - of_yes) / (~no).sum() + of_no * (1 - of_no) / no.sum())
        assert norm.sf((balanced[-1] - 50) / error) > 0.05
    assert f"{min(balanced):.1f} to {max(balanced):.1f}%" in text()


@pytest.mark.slow
def test_the_tables_of_continued_forks_are_those_of_the_lines(tmp_path: Path) -> None:
    copy = Path(shutil.copy(PAGE, tmp_path))
    report = write_report([LINES], None, Asked.by(load_recipe(RECIPE), RECIPE), [copy])
    assert copy.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")
    assert report == (ROOT / "eval" / "results" / "forks-continue-124m.md").read_text(encoding="utf-8")
