"""Benchmarks that the page on going on from a checkpoint of 124M quotes are those of the committed lines."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from continued import (
    NAMES,
    PAGE,
    PAPER,
    RULE,
    SCORED,
    SEEDS,
    SNIP,
    TASKS,
    boolq,
    by_seed,
    compared,
    continued,
    family,
    is_no,
    line_of,
    rows_of_boolq,
    rows_of_differences,
    rows_of_scores,
    scores_of_bf16,
    significant,
    text,
    to_bf16,
)
from scipy.stats import norm

from eval.bakeoff.fork_score_table import right_answers
from eval.bakeoff.fork_statistics import holm


def above_chance(steps: int, seed: int) -> set[str]:
    """Tasks where BF16 is significantly above chance: one-sided, after Holm's correction over the tasks."""
    scores = {task: own for task, own in scores_of_bf16(steps, seed).items() if own[2] is not None}
    ps = holm([float(norm.sf((share - (chance or 0)) / error)) for share, error, chance in scores.values()])
    return {task for task, p in zip(scores, ps, strict=True) if p is not None and p < 0.05}


def directions(steps: int, task: str) -> dict[str, bool]:
    """Contender -> whether it is higher than BF16, of those that are significant."""
    own = {pair: one.difference.mean > 0 for (pair, of), one in significant(steps).items() if of == task}
    return {NAMES[p.removesuffix(" against bf16")]: up for p, up in own.items() if p.endswith("against bf16")}


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
    late, none = scores_of_bf16(1600, 2)["boolq"][0], 100 * is_no().mean()
    told = f'With seed 2 it is at {late:.1f}%, next to the {none:.1f}% that always answering "no" gives.'
    assert told in text()


def test_significant_differences_are_of_boolq_but_for_one() -> None:
    assert {task for _, task in significant(1000)} == {"boolq", "all questions"}
    assert {task for _, task in significant(1600)} == {"boolq", "all questions", "mmlu"}
    assert "of the 110 tests after 1,000 steps" in text() and "of the 120 after 1,600" in text()
    assert [len(compared(steps)) for steps in (1000, 1600)] == [110, 120]
    lower = ("SNIP by GEMM, 50%", "SNIP by GEMM, 75%", "`snip-paper` by layer, 75%", "all FP4")
    assert directions(1000, "boolq") == dict.fromkeys(lower, False) | {"SNIP by layer, 75%": True}
    higher = ["FP8", *(f"SNIP by {of}, {share}%" for of in ("GEMM", "layer") for share in (50, 75)), NAMES[RULE]]
    assert directions(1600, "boolq") == dict.fromkeys(higher, True) | {"`snip-paper` by layer, 75%": False}
    assert (
        "SNIP by GEMM at 50 and 75% and all FP4 (lower), SNIP by layer at 75% (higher), `snip-paper` at 75% (lower); "
        "of the 120 after 1,600: FP8, SNIP by GEMM and by layer at 50 and 75% and `layer-position` (higher), "
        "`snip-paper` at 75% (lower)"
    ) in text()
    assert directions(1000, "all questions") == {"all FP4": False}
    assert directions(1600, "all questions") == {"SNIP by GEMM, 50%": True, NAMES[RULE]: True}
    told = {
        (1000, "fp4"): "all FP4 after 1,000 steps ({})",
        (1600, SNIP.format(50, "gemm")): "SNIP by GEMM at 50% ({})",
        (1600, RULE): "`layer-position` ({}) after 1,600",
    }
    for (steps, name), words in told.items():
        one = significant(steps)[f"{name} against bf16", "all questions"]
        assert words.format(f"{one.difference.mean:+.2f} ± {one.difference.half_width:.2f}") in text()


def test_the_one_significant_difference_outside_boolq_is_below_chance() -> None:
    name = PAPER.format(50)
    assert directions(1600, "mmlu") == {NAMES[name]: True}
    tasks = [task for task in TASKS if task != "boolq"]
    assert f"of {len(to_bf16(1000, *tasks)) + len(to_bf16(1600, *tasks))} in single tasks after both lengths" in text()
    one, p = next((one, p) for one, p in compared(1600) if (one.pair, one.task) == (f"{name} against bf16", "mmlu"))
    told = f"{one.difference.mean:+.2f} ± {one.difference.half_width:.2f} points (corrected p = {p:.3f})"
    assert f"on MMLU after 1,600 steps, {told}" in text()
    assert "With seeds 0, 1 and 2 it is at {:+.2f}, {:+.2f} and {:+.2f}.".format(*by_seed(name, "mmlu")) in text()
    assert f"below chance there, at {one.one:.1f} and {one.other:.1f}%" in text() and max(one.one, one.other) < 25
    tests = family("to-bf16")
    assert sum(test.main.mean > tests[name].main.mean for test in tests.values()) == 2


def test_the_signs_in_boolq_do_not_last() -> None:
    name = SNIP.format(50, "gemm")
    early = next(one for one, _ in compared(1000) if (one.pair, one.task) == (f"{name} against bf16", "boolq"))
    assert f"at {early.difference.mean:+.2f} points on BoolQ after 1,000 steps with seed 0" in text()
    told = "at {:+.2f}, {:+.2f} and {:+.2f} with seeds 0, 1 and 2".format(*by_seed(name, "boolq"))
    assert told in text()
    of = {other: np.sign(by_seed(other, "boolq")) for other in NAMES if other != "bf16"}
    assert not any(len(set(signs)) == 1 for signs in of.values())
    assert "None of the ten contenders has the same sign with all three seeds" in text()


@pytest.mark.slow
def test_what_the_benchmarks_could_exclude() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert all(row in page for row in rows_of_differences())
    tasks = [task for task in TASKS if task not in ("lambada_openai", "boolq")]
    widths = {(one.pair, one.task): one.difference.half_width for one in to_bf16(1600, *tasks)}
    least, most = (min(widths, key=lambda key: widths[key]), max(widths, key=lambda key: widths[key]))
    assert (least[1], most[1]) == ("hellaswag", "winogrande")
    assert f"± {widths[least]:.2f} points (HellaSwag)" in text() and f"± {widths[most]:.2f} (WinoGrande)" in text()

    def excluded(task: str) -> int:
        """Of how many contenders the interval excludes half a point, in either direction."""
        own = [one.difference for one in to_bf16(1600, task)]
        return sum(abs(difference.mean) + difference.half_width < 0.5 for difference in own)

    assert [excluded(task) for task in ("hellaswag", "mmlu", "winogrande")] == [10, 4, 0]
    assert "of all ten contenders on HellaSwag, of four on MMLU, and of none on WinoGrande" in text()
    rest = [one.difference.mean for one in to_bf16(1600, *(task for task in TASKS if task != "boolq"))]
    assert f"{min(rest):+.2f} to {max(rest):+.2f} points after 1,600 steps" in text()


def test_boolq_shows_how_often_a_model_says_yes() -> None:
    page, no = PAGE.read_text(encoding="utf-8"), is_no()
    assert all(row in page for row in rows_of_boolq())
    assert f"The last is {no.sum():,} of {len(no):,}, as many as have" in text()
    scores = [100 * right_answers(line)["boolq"].mean() for seed in SEEDS if (line := line_of("bf16", 1000, seed))]
    assert f"{scores[0]:.1f}, {scores[1]:.1f} and {scores[2]:.1f}%" in text()
    assert "62.2% have" in text() and round(100 * (1 - 1237 / 3270), 1) == 62.2
    others = [100 * right_answers(line)["boolq"].mean() for name in ("fp8", RULE) if (line := line_of(name, 1000, 2))]
    assert "({:.1f} and {:.1f}%)".format(*others) in text()
    of_bf16 = boolq("bf16", 2)
    assert f'BF16 of seed 2 still says "yes" to {of_bf16[1]:.1f}% of the questions' in text()
    # "Most others": all but `snip-paper` at 50%, which says "yes" to less than a point more.
    more = {name for name in NAMES if boolq(name, 2)[1] > of_bf16[1] + 1}
    assert set(NAMES) - more == {"bf16", PAPER.format(50)}
    assert all(boolq(name, 2)[0] > of_bf16[0] for name in more)


def test_no_contender_is_above_guessing_in_boolq() -> None:
    no, balanced, ps = is_no(), {}, {}
    for contender, seed in product(NAMES, SEEDS):
        of_yes, of_no = (share / 100 for share in boolq(contender, seed)[2:])
        balanced[contender, seed] = 50 * (of_yes + of_no)
        error = 50 * np.sqrt(of_yes * (1 - of_yes) / (~no).sum() + of_no * (1 - of_no) / no.sum())
        ps[contender, seed] = float(norm.sf((balanced[contender, seed] - 50) / error))
    assert f"{min(balanced.values()):.1f} to {max(balanced.values()):.1f}%" in text()
    assert min(holm(list(ps.values()))) > 0.05 and f"Holm's correction over the {len(ps)}" in text()
    least = SNIP.format(75, "layer"), 2
    assert [key for key, p in ps.items() if p < 0.05] == [least]
    assert f"SNIP by layer at 75% with seed 2 (one-sided, p = {ps[least]:.3f})" in text()
