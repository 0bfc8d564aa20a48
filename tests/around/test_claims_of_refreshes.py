"""Figures that pages quote of forks with refreshed and with held plans are those of the committed lines."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from committed import ROOT, check_report, text_of

from eval.bakeoff import fork_tables
from eval.bakeoff.fork_lines import by_contender, read_forks
from eval.bakeoff.fork_recipe import load_recipe

REFRESHES, RECIPE = ROOT / "eval" / "results" / "forks-refreshes.jsonl", ROOT / "recipes" / "forks-refreshes.yaml"
PAGE = "docs/results-refreshes.md"
NUMBERS = {6: "six", 11: "eleven"}
HELD, BY_LAYER = "snip {fp4, fp8}, 90% by gemm", "snip {fp4, fp8}, 75% by layer"
REFRESHED = f"{HELD}, refresh_every 250"
COST, MEMORY = f"{REFRESHED}, switching_cost 0.03", f"{REFRESHED}, estimate_memory 0.3"
RULE, RANDOM = "backward-first {fp4, fp8}, 90% by gemm", "random {fp4, fp8}, 90% by gemm"
POSITION, PAPER, FISHER = (f"{name} {{fp4, fp8}}, 75% by layer" for name in ("layer-position", "snip-paper", "fisher"))


@cache
def lines() -> list[dict[str, Any]]:
    return read_forks([REFRESHES])


@cache
def comparisons(family: str) -> dict[tuple[str, str], fork_tables.Tested]:
    pairs = load_recipe(RECIPE).comparisons_after(1000)[family]
    return {(test.one, test.other): test for test in fork_tables.tests_of(lines(), pairs)}


@pytest.mark.parametrize("page", [PAGE, "README.md", "docs/choosing.md", "docs/limitations.md"])
def test_a_refreshed_plan_is_not_found_to_be_better_than_a_held_one(page: str) -> None:
    found = comparisons("to-held")[REFRESHED, HELD]
    assert found.reading == fork_tables.NOT_SIGNIFICANT
    assert f"{found.main}" in text_of(page) and f"{found.main.detectable(found.level):.3f}" in text_of(page)


@pytest.mark.parametrize(
    ("family", "one", "other", "reading"),
    [
        ("flips", COST, REFRESHED, fork_tables.NOT_SIGNIFICANT),
        ("flips", MEMORY, REFRESHED, fork_tables.NOT_SIGNIFICANT),
        ("to-held", COST, HELD, fork_tables.NOT_SIGNIFICANT),
        ("to-held", MEMORY, HELD, fork_tables.NOT_SIGNIFICANT),
        ("to-held", RULE, HELD, fork_tables.NOT_SIGNIFICANT),
        ("to-held", RANDOM, HELD, "higher"),
        ("by-layer", POSITION, BY_LAYER, fork_tables.NOT_SIGNIFICANT),
        ("by-layer", FISHER, BY_LAYER, fork_tables.NOT_SIGNIFICANT),
        ("by-layer", PAPER, BY_LAYER, "higher"),
        ("to-bf16", HELD, "bf16", "higher"),
        ("to-bf16", REFRESHED, "bf16", "higher"),
        ("to-bf16", BY_LAYER, "bf16", "higher"),
        ("to-bf16", POSITION, "bf16", "higher"),
        ("to-bf16", "fp4", "bf16", "higher"),
    ],
)
def test_the_page_has_the_differences_of_the_lines(family: str, one: str, other: str, reading: str) -> None:
    found = comparisons(family)[one, other]
    assert found.reading == reading
    assert str(found.main).removeprefix("+") in text_of(PAGE)
    if reading == fork_tables.NOT_SIGNIFICANT:
        assert f"{found.main.detectable(found.level):.3f}" in text_of(PAGE)


def test_a_refresh_changes_as_many_gemms_as_the_page_says() -> None:
    of = by_contender(lines())

    def changed(contender: str) -> str:
        plans = [[plan["plan"] for plan in line["plans"]] for line in of[contender]]
        pairs = [(one, two) for own in plans for one, two in pairwise(own)]
        assert all(len(one) == 168 for one, _ in pairs)
        return f"{fmean(sum(a != b for a, b in zip(*pair, strict=True)) for pair in pairs):.1f}"

    plain, cost, memory = map(changed, (REFRESHED, COST, MEMORY))
    text = f"changes {plain} of 168 GEMMs on average, one with `switching_cost=0.03` {cost}, one with"
    assert f"{text} `estimate_memory=0.3` {memory}." in text_of(PAGE)


def test_the_page_says_which_forks_are_there() -> None:
    asked = sum(len(run.ids) for run in load_recipe(RECIPE).runs("text"))
    text, earlier = text_of(PAGE), [line for line in lines() if line["commit"] == "6237e0a"]
    assert f"{len(lines())} of the {asked} forks ran, {len(earlier)} of them in two calls" in text
    counts = {contender: len(own) for contender, own in by_contender(earlier).items()}
    assert sorted(counts.values()) == [8] * 5 + [9] + [10] * 6 and counts["fp4"] == 9
    later = [line for line in lines() if line["commit"] != "6237e0a"]
    assert {(line["commit"], line["machine"].split()[1]) for line in later} == {("7fd4429", "H100")}
    assert {line["contender"] for line in later} == {name for name, count in counts.items() if count == 8}
    assert {(line["fork"]["base_seed"], line["fork"]["point"]) for line in later} == {(6, 300)}
    same = {line["state"] for line in lines() if line["fork"]["base_seed"] == 6 and line["fork"]["point"] == 300}
    assert len(same) == 1 and f"more than 1,000 steps, {NUMBERS[asked - len(lines())]} forks" in text
    assert f"`forks-refreshes.jsonl` | {len(lines())} of the {asked} forks" in text_of("eval/README.md")


@pytest.mark.slow
def test_the_tables_of_refreshes_are_those_of_the_lines(tmp_path: Path) -> None:
    check_report(tmp_path, "refreshes", page=PAGE)
