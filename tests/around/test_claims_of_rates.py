"""Figures that the page on phase shifts quotes of learning rates from the warm-up on are those of the lines."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from committed import ROOT, detectable_of, prose_of, row_of, share_of, shown

from eval.bakeoff import fork_tables
from eval.bakeoff.fork_lines import by_contender, read_forks
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
            own = of_rate(factor).get(contender, [])
            lost = sum(line["blew_up"] or line["diverged"] for line in own)
            cells.append(f"{lost} of {len(own)} ({share_of(lost, len(own))})" if own else "-")
        rows.append(row_of(name, *cells))
    return rows


def rows_of_losses() -> list[str]:
    """The rows of training losses by rate; contenders with two forks at least."""
    rows = []
    for contender, name in FORMATS.items():
        cells = []
        for factor in RATES:
            losses = [line["loss"]["train"] for line in of_rate(factor).get(contender, [])]
            found = Difference.of(losses) if len(losses) > 1 else None
            cells.append("-" if found is None else f"{found.mean:.3f} ± {found.half_width:.3f}")
        if set(cells) != {"-"}:
            rows.append(row_of(name, *cells))
    return rows


def compared_at(factor: int) -> dict[str, fork_tables.Tested]:
    """Contender -> its comparison to BF16 at one rate, of at least two forks."""
    lines = [line for own in of_rate(factor).values() for line in own]
    found = fork_tables.tests_of(lines, load_recipe(RECIPE).comparisons["to-bf16"], OUTCOME)
    return {test.one: test for test in found if test.p_holm is not None}


def rows_of_rates_to_bf16() -> list[str]:
    """The rows of held-out losses against BF16's."""
    found = {factor: compared_at(factor) for factor in RATES}
    return [
        row_of(name, *(shown(found[factor][one]) if one in found[factor] else "-" for factor in RATES))
        for one, name in FORMATS.items()
        if any(one in own for own in found.values())
    ]


def test_which_lines_of_rates_there_are() -> None:
    recipe = load_recipe(RECIPE)
    assert len(recipe.cells) == len(FORMATS) == 8 and "135 of 480 lines" in text() and len(rated()) == 135
    assert {line["commit"] for line in rated()} == {"42eb520"}
    counts = {contender: [len(of_rate(factor).get(contender, [])) for factor in RATES] for contender in FORMATS}
    assert counts.pop("bf16") == counts.pop("fp8") == [4] * 5
    assert {name: own for name, own in counts.items() if any(own)} == {
        "fp4": [0, 0, 2, 0, 0],
        "nvfp4": [2, 0, 0, 0, 0],
        "mxfp8": [0, 0, 0, 1, 0],
    }
    # A fork that has one length has all.
    assert all(
        [len(own) for own in of_rate(factor).values()] == [len(own) for own in of_rate(factor, steps).values()]
        for factor in RATES
        for steps in (100, 200)
    )
    others = [line for line in rated() if line["contender"] not in ("bf16", "fp8")]
    assert len(others) == 3 * 5 and "five of their 120 forks have run" in text()
    assert sum(map(len, of_rate(4).values())) == 10 and "for the ten forks of x4" in text()
    assert "115 of the 160 forks" in text()
    assert "45 of 160 forks" in text() and len({(line["contender"], str(line["fork"])) for line in rated()}) == 45


def test_no_fork_of_learning_rates_from_the_warm_up_on_is_lost() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert all(row in page for row in (*rows_of_rates(), *rows_of_losses(), *rows_of_rates_to_bf16()))
    limits = prose_of("docs/limitations.md")
    assert "0 of 4 forks of BF16 or FP8 per rate (0 to 60%)" in limits and share_of(0, 4) == "0 to 60%"
    assert not any(line["blew_up"] or line["diverged"] for line in rated())
    assert "Only FP8 tests that at every rate, with 0 of 4 each" in text()
    highest = max(line["training_curve"][-1] - min(line["training_curve"]) for line in rated())
    assert f"The largest rise above the lowest mean is {highest:.2f} nats" in text()
    found = [test for factor in RATES for test in compared_at(factor).values()]
    assert {test.reading for test in found} == {fork_tables.NOT_SIGNIFICANT}
    assert f"None of the {len(found)} tests against BF16 is significant" in text()
    first = [line["training_curve"][0] == max(line["training_curve"]) for line in rated()]
    assert all(first) and "the highest in all 45 forks" in text()
    of_fp8 = [detectable_of(compared_at(factor)["fp8"]) for factor in RATES]
    assert f"those of FP8 would have found {min(of_fp8):.3f} to {max(of_fp8):.3f}%" in text()
    rises = [high - low for high, low in zip(_by_seed(16), _by_seed(1), strict=True)]
    assert f"{min(rises):.2f} to {max(rises):.2f} nats above those of x1" in text()
    assert f"by {_loss(16) - _loss(1):.1f} nats" in text()


def _by_seed(factor: int) -> list[float]:
    """The mean loss of BF16's first 25 steps, by seed."""
    own = sorted(of_rate(factor)["bf16"], key=lambda line: line["fork"]["base_seed"])
    return [line["training_curve"][0] for line in own]


def _loss(factor: int) -> float:
    """BF16's training loss at the end, mean over forks."""
    return float(np.mean([line["loss"]["train"] for line in of_rate(factor)["bf16"]]))


@pytest.mark.slow
def test_the_whole_report_of_learning_rates_is_that_of_the_lines() -> None:
    report = write_report([LINES], None, Asked.by(load_recipe(RECIPE), RECIPE), [])
    assert report == LINES.with_suffix(".md").read_text(encoding="utf-8")
