"""Figures that the page on phase shifts quotes of learning rates from the warm-up on are those of the lines."""

from __future__ import annotations

from collections import Counter
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from committed import ROOT, detectable_of, prose_of, row_of, share_of, shown

from eval.bakeoff import fork_tables
from eval.bakeoff.fork_cells import held
from eval.bakeoff.fork_lines import by_contender, pairs, read_forks
from eval.bakeoff.fork_recipe import load_recipe
from eval.bakeoff.fork_report import Asked, write_report
from eval.bakeoff.fork_statistics import Difference

LINES = ROOT / "eval" / "results" / "forks-stability.jsonl"
RECIPE = ROOT / "recipes" / "forks-stability.yaml"
PAGE = ROOT / "docs" / "results-shifts.md"
text = partial(prose_of, "docs/results-shifts.md")
OUTCOME = "held_out_averaged"
RATES = (1, 2, 4, 8, 16)
# Contenders of the recipe of rates, as tables name them.
FORMATS = {
    "bf16": "BF16",
    "fp8": "FP8",
    "fp4": "all FP4",
    "mxfp4": "all MXFP4",
    "nvfp4": "all NVFP4",
    "mxfp8": "all MXFP8",
    "snip {fp4, fp8}, 75% by gemm": "SNIP {FP4, FP8}, 75% by GEMM",
    "snip {mxfp4, fp8-tensor}, 75% by gemm": "SNIP {MXFP4, FP8 per tensor}, 75% by GEMM",
}


@cache
def rated() -> list[dict[str, Any]]:
    """The lines of learning rates from the warm-up on."""
    return read_forks([LINES])


def of_rate(factor: int, steps: int = 300) -> dict[str, list[dict[str, Any]]]:
    """Contender -> its lines at one rate from the warm-up on."""
    name = f"learning-rate-x{factor}"
    return by_contender(line for line in rated() if (line["fork"]["shift"]["name"], line["steps"]) == (name, steps))


def rows_of_rates() -> list[str]:
    """The rows of forks that were lost, by format and rate, with Clopper-Pearson intervals."""
    rows = []
    for contender, name in FORMATS.items():
        cells = []
        for factor in RATES:
            own = of_rate(factor)[contender]
            lost = sum(line["blew_up"] or line["diverged"] for line in own)
            cells.append(f"{lost} of {len(own)} ({share_of(lost, len(own))})")
        rows.append(row_of(name, *cells))
    return rows


def losses_of(contender: str, factor: int) -> list[float]:
    """The training losses at the end, by fork."""
    return [line["loss"]["train"] for line in of_rate(factor)[contender]]


def rows_of_losses() -> list[str]:
    """The rows of training losses by rate."""
    rows = []
    for contender, name in FORMATS.items():
        found = [Difference.of(losses_of(contender, factor)) for factor in RATES]
        rows.append(row_of(name, *(f"{own.mean:.3f} ± {own.half_width:.3f}" for own in found)))
    return rows


@cache
def compared_at(factor: int, steps: int = 300) -> dict[str, fork_tables.Tested]:
    """Contender -> its comparison to BF16 at one rate; seven are a family."""
    lines = [line for own in of_rate(factor, steps).values() for line in own]
    found = fork_tables.tests_of(lines, load_recipe(RECIPE).comparisons["to-bf16"], OUTCOME)
    assert {test.main.forks for test in found} == {4}
    return {test.one: test for test in found}


def rows_of_rates_to_bf16() -> list[str]:
    """The rows of held-out losses against BF16's."""
    found = [compared_at(factor) for factor in RATES]
    return [row_of(name, *(shown(own[one]) for own in found)) for one, name in FORMATS.items() if one != "bf16"]


def test_which_lines_of_rates_there_are() -> None:
    recipe = load_recipe(RECIPE)
    assert len(recipe.cells) == len(FORMATS) == 8
    keys = Counter(
        (line["contender"], line["fork"]["shift"]["name"], line["fork"]["base_seed"], line["steps"]) for line in rated()
    )
    wanted = product(FORMATS, (f"learning-rate-x{factor}" for factor in RATES), range(4), (100, 200, 300))
    assert keys == Counter(wanted) and len(rated()) == 480
    assert "All 480 lines are there: eight contenders, five rates, four bases, three lengths" in text()
    commits = Counter(line["commit"] for line in rated())
    assert commits == {"42eb520": 135, "b171d5d": 345}
    assert "Of commit `42eb520` are 135 lines, all of BF16 and FP8 among them, and 345 of `b171d5d`" in text()
    assert {line["commit"] for line in rated() if line["contender"] in ("bf16", "fp8")} == {"42eb520"}
    states = {(line["fork"]["base_seed"], line["state"]) for line in rated()}
    of_commits = {
        commit: {(line["fork"]["base_seed"], line["state"]) for line in rated() if line["commit"] == commit}
        for commit in commits
    }
    assert len(states) == 4 and of_commits["42eb520"] == of_commits["b171d5d"] == states
    assert {line["machine"] for line in rated()} == {"NVIDIA H200"}


def test_snip_at_higher_rates_has_the_loss_divergence_that_the_page_says() -> None:
    of_snip = [line for line in rated() if line["contender"].startswith("snip")]
    assert len(of_snip) == 2 * len(RATES) * 4 * 3 and not any(line["plans"] for line in of_snip)
    (loss_estimator,) = {held(line["spec"]).loss_estimator for line in of_snip}
    assert f'at the first step of a fork, with `loss_estimator="{loss_estimator}"`' in text()


def test_no_fork_of_learning_rates_from_the_warm_up_on_is_lost() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert all(row in page for row in (*rows_of_rates(), *rows_of_losses(), *rows_of_rates_to_bf16()))
    limits = prose_of("docs/limitations.md")
    assert "0 of 4 forks of each of eight contenders per rate (0 to 60%)" in limits and share_of(0, 4) == "0 to 60%"
    assert not any(line["blew_up"] or line["diverged"] for line in rated())
    assert "That holds at every rate, with 0 of 4 each" in text()
    assert "With 0 of 4 per rate up to 60% may be lost all the same" in text()
    longest = max(line["steps"] for line in rated())
    assert f"no fork was lost**, up to {max(RATES)} times the rate over {longest} steps" in text()
    assert f"None of their losses after {longest} steps is significantly different from BF16's" in limits
    assert sum(map(len, of_rate(4).values())) == 32 and "for the 32 forks of x4" in text()
    highest = max(line["training_curve"][-1] - min(line["training_curve"]) for line in rated())
    assert f"The largest rise above the lowest mean is {highest:.2f} nats" in text()
    first = [line["training_curve"][0] == max(line["training_curve"]) for line in rated() if line["steps"] == 300]
    assert all(first) and f"the highest in all {len(first)} forks" in text()
    rises = [high - low for high, low in zip(_by_seed(16), _by_seed(1), strict=True)]
    assert f"{min(rises):.2f} to {max(rises):.2f} nats above those of x1" in text()


def test_what_higher_rates_cost_each_contender() -> None:
    found = [test for factor in RATES for test in compared_at(factor).values()]
    assert {test.reading for test in found} == {fork_tables.NOT_SIGNIFICANT}
    assert f"None of the {len(found)} tests against BF16 after 300 steps is significant" in text()
    low = [detectable_of(test) for test in compared_at(1).values()]
    high = [detectable_of(test) for factor in RATES[1:] for test in compared_at(factor).values()]
    assert f"{min(low):.3f} to {max(low):.3f}% at x1, and {min(high):.3f} to {max(high):.3f}% at higher rates" in text()
    rises = {name: np.mean(losses_of(name, 16)) - np.mean(losses_of(name, 1)) for name in FORMATS}
    of_bf16 = rises.pop("bf16")
    others = f"{min(rises.values()):.2f} to {max(rises.values()):.2f}"
    assert f"x16 ends above x1 by {of_bf16:.2f} nats in BF16, by {others} in the others" in text()


def test_on_the_way_two_tests_of_rates_are_significant() -> None:
    families = [compared_at(factor, steps) for factor in RATES for steps in (100, 200, 300)]
    every = [test for own in families for test in own.values()]
    significant = [test for test in every if test.reading != fork_tables.NOT_SIGNIFICANT]
    fp4, nvfp4 = compared_at(1, 200)["fp4"], compared_at(16, 100)["nvfp4"]
    assert significant == [fp4, nvfp4] and {test.reading for test in significant} == {"higher"}
    assert f"two of {len(every)} tests are significant" in text()
    assert f"none over the {len(families)} families" in text()
    assert f"all FP4 at x1 after 200 steps, {fp4.main} (corrected p = {fp4.p_holm:.3f})" in text()
    assert f"all NVFP4 at x16 after 100 steps, {nvfp4.main} (corrected p = {nvfp4.p_holm:.3f})" in text()
    ends = compared_at(1)["fp4"], compared_at(16)["nvfp4"]
    assert {test.reading for test in ends} == {fork_tables.NOT_SIGNIFICANT}
    assert "Neither is significant after 300" in text()


def test_what_a_format_costs_does_not_rise_significantly_with_the_rate() -> None:
    found = []
    for contender in FORMATS:
        if contender != "bf16":
            low, high = (_to_bf16(contender, factor) for factor in (1, 16))
            found.append(Difference.of([high[seed] - low[seed] for seed in range(4)]))
    assert len(found) == 7 and all(own.p > 0.05 for own in found)
    means, detectable = [own.mean for own in found], [own.detectable(0.05) or np.nan for own in found]
    assert f"fork by fork, is {min(means):+.3f} to {max(means):+.3f} points" in text()
    assert f"(none significant, uncorrected, detectable {min(detectable):.3f} to {max(detectable):.3f})" in text()


def _to_bf16(contender: str, factor: int) -> dict[int, float]:
    """The difference to BF16 at one rate, by seed."""
    of = of_rate(factor)
    return {line["fork"]["base_seed"]: value for line, value in pairs(of[contender], of["bf16"], OUTCOME)}


def _by_seed(factor: int) -> list[float]:
    """The mean loss of BF16's first 25 steps, by seed."""
    own = sorted(of_rate(factor)["bf16"], key=lambda line: line["fork"]["base_seed"])
    return [line["training_curve"][0] for line in own]


@pytest.mark.slow
def test_the_whole_report_of_learning_rates_is_that_of_the_lines() -> None:
    report = write_report([LINES], None, Asked.by(load_recipe(RECIPE), RECIPE), [])
    assert report == LINES.with_suffix(".md").read_text(encoding="utf-8")
