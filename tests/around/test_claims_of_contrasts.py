"""Figures that the page on criteria quotes of the main contrasts over 1,000 steps are those of the committed lines."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from committed import RESULTS, ROOT, check_report, detectable_of, difference_among, lines_of, row_of, shown, text_of

from eval.bakeoff import fork_tables
from eval.bakeoff.fork_lines import LOSSES, by_contender, difference_of, fork_key, read_forks
from eval.bakeoff.fork_recipe import load_recipe
from eval.bakeoff.fork_statistics import Difference

RECIPE = ROOT / "recipes" / "forks-contrasts.yaml"
PAGE, README = "docs/results-criteria.md", "eval/README.md"
# Family -> where its plans spend 4 bits, in the order of the page's columns.
SETTINGS = {"gemm-75": "75% by gemm", "gemm-90": "90% by gemm", "gemm-95": "95% by gemm", "layer-75": "75% by layer"}
H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
SALIENCY = ", loss_estimator saliency"


@cache
def lines(*names: str) -> list[dict[str, Any]]:
    """The forks of 1,000 steps of recipes, the first of what ran more than once from the same weights."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name in names or ("contrasts",):
        for line in read_forks([RESULTS / f"forks-{name}.jsonl"]):
            if line["steps"] == 1000:
                found.setdefault((line["contender"], *fork_key(line)), line)
    return list(found.values())


@cache
def compared(family: str, outcome: str = "held_out_plan") -> dict[str, fork_tables.Tested]:
    pairs_of = load_recipe(RECIPE).comparisons_after(1000)[family]
    return {test.one: test for test in fork_tables.tests_of(lines(), pairs_of, outcome)}


def contender(policy: str, setting: str) -> str:
    return f"{policy} {{fp4, fp8}}, {setting}"


def against_snip(policy: str, family: str, outcome: str = "held_out_plan") -> fork_tables.Tested:
    return compared(family, outcome)[contender(policy, SETTINGS[family])]


def between(one: str, other: str, *names: str, point: int | None = None) -> Difference:
    return difference_among(lines(*names), one, other, point)


def section() -> str:
    return text_of(PAGE).partition("## Over 1,000 steps")[2].partition("## At 124M")[0]


def below(found: Difference) -> str:
    return str(found).removeprefix("-")


@pytest.mark.parametrize(
    ("policy", "cells"),
    [
        ("greedy", [""] * 4),
        ("fisher", ["not asked", "", "", "not asked"]),
        ("backward-first", ["", "not asked", "", "not possible"]),
        ("random", ["", "not asked", "", ""]),
    ],
)
def test_the_table_of_1000_steps_has_the_differences_of_the_lines(policy: str, cells: list[str]) -> None:
    asked = [family for family, cell in zip(SETTINGS, cells, strict=True) if not cell]
    assert asked == [family for family, where in SETTINGS.items() if contender(policy, where) in compared(family)]
    own = [cell or shown(against_snip(policy, family)) for family, cell in zip(SETTINGS, cells, strict=True)]
    assert row_of(f"`{policy}`", *own) in section()
    forks = [against_snip(policy, family).main.forks for family in asked]
    assert forks == [10] * len(asked)
    assert "ten forks per cell, eight for SNIP with `saliency` at 95% and by layer" in section()


def test_the_row_of_saliency_has_the_differences_of_the_lines() -> None:
    tests = compared("saliency")
    own = [tests[contender("snip", where) + SALIENCY] for where in SETTINGS.values()]
    assert {test.reading for test in own} == {fork_tables.NOT_SIGNIFICANT} and len(tests) == 4
    assert [test.main.forks for test in own] == [10, 10, 8, 8]
    assert row_of("SNIP with `saliency`", *map(shown, own)) in section()
    # As predicted, these are within the intervals.
    for test, predicted in zip(own, (-0.005, -0.02, -0.04, -0.03), strict=True):
        assert abs(test.main.mean - predicted) < test.main.half_width
    assert "`saliency` -0.04, -0.02 and -0.005 at 95, 90 and 75% and -0.03 by layer, none significant" in section()
    assert '"saliency" at -0.04, -0.02, -0.005 and -0.03 in the order 95, 90, 75% and by layer' in text_of(
        "docs/log.md"
    )
    greedy, widest = against_snip("greedy", "gemm-95").main, own[2].main
    assert abs(widest.mean - greedy.mean) < 0.01 and widest.half_width > 2 * greedy.half_width


def less_saliency(family: str) -> dict[str, fork_tables.Tested]:
    """By policy, the differences to SNIP with "saliency"."""
    return {name.split(" {")[0]: test for name, test in compared(f"{family}-saliency").items()}


@pytest.mark.parametrize("policy", ["greedy", "fisher", "backward-first", "random"])
def test_the_table_against_saliency_has_the_differences_of_the_lines(policy: str) -> None:
    cells = []
    for family, forks in zip(SETTINGS, (10, 10, 8, 8), strict=True):
        test = less_saliency(family).get(policy)
        assert test is None or test.main.forks == forks
        missing = "not possible" if (policy, family) == ("backward-first", "layer-75") else "not asked"
        cells.append(missing if test is None else shown(test))
    assert row_of(f"`{policy}`", *cells) in section()


def test_against_saliency_random_plans_at_75_are_all_that_is_significant() -> None:
    tests = {(family, policy): test for family in SETTINGS for policy, test in less_saliency(family).items()}
    found = {key: test.reading for key, test in tests.items() if test.reading != fork_tables.NOT_SIGNIFICANT}
    assert found == {("gemm-75", "random"): "higher"}
    text, at_95, rule = section(), tests["gemm-95", "random"], tests["gemm-75", "backward-first"]
    told = f"At 95% `random` has p = {at_95.main.p:.3f}, {at_95.p_holm:.3f} after the correction, by layer p = "
    assert f"{told}{tests['layer-75', 'random'].main.p:.3f}." in text
    assert f"not significantly different: at 75% p = {rule.main.p:.3f}, {rule.p_holm:.3f} after the correction" in text
    greedy = [abs(tests[family, "greedy"].main.mean) for family in SETTINGS]
    assert f"`greedy` is within {max(greedy):.3f} of it" in text
    at_95 = tests["gemm-95", "greedy"]
    told = f"`greedy` is at {at_95.main} at 95% after 1,000 steps (eight forks, not planned)"
    assert told in text_of(PAGE).partition("## What follows")[0]
    choosing = f"at 75% `backward-first` ends {str(rule.main).removeprefix('+')} points above the default"
    assert f"{choosing} (p = {rule.main.p:.3f}, {rule.p_holm:.3f} after Holm's" in text_of("docs/choosing.md")
    random = str(tests["gemm-75", "random"].main).removeprefix("+")
    assert f"random plans end {random} points above the default" in text_of("docs/choosing.md")


def test_greedy_at_95_and_random_are_all_that_is_significant() -> None:
    found = {
        (outcome, family, test.one.split()[0]): test.reading
        for outcome in LOSSES
        for family in (*SETTINGS, "saliency")
        for test in compared(family, outcome).values()
        if test.reading in ("higher", "lower")
    }
    random = {(outcome, family, "random"): "higher" for outcome in LOSSES for family in ("gemm-75", "gemm-95")}
    lower = {(outcome, "gemm-95", "greedy"): "lower" for outcome in ("held_out_plan", "held_out_averaged")}
    assert found == random | lower | {("train", "layer-75", "random"): "higher"}
    layer = against_snip("random", "layer-75")
    told = f"`random` has p = {layer.main.p:.3f}, {layer.p_holm:.3f} after Holm's correction; in the training loss it"
    assert f"{told} is significantly higher ({against_snip('random', 'layer-75', 'train').main})" in section()
    text, greedy = text_of(PAGE), against_snip("greedy", "gemm-95")
    assert f"at 95% {str(greedy.main).removeprefix('-')} below (significant)" in text_of("docs/choosing.md")
    assert "It is so in all four losses." in section() and f"(corrected p = {greedy.p_holm:.3f})" in section()
    assert "In the loss of the same weights in BF16 and in the training loss it is not significant" in section()
    assert f"[after 1,000 steps](#over-1000-steps) ({greedy.main})" in text
    own = [str(against_snip("random", family).main).removeprefix("+") for family in ("gemm-75", "gemm-95")]
    assert "[after 1,000 steps](#over-1000-steps) by {} and {} at 75 and 95%".format(*own) in text
    rule = [against_snip("backward-first", family) for family in ("gemm-75", "gemm-95")]
    told = [f"({test.main}, {detectable_of(test):.3f})" for test in rule]
    assert "of 1,000 steps at 75% {} and 95% {}".format(*told) in text
    by_layer = against_snip("greedy", "layer-75").main
    assert abs(by_layer.mean - greedy.main.mean) < 0.01 and by_layer.half_width > 2 * greedy.main.half_width


def test_greedy_is_where_the_page_says_by_the_step_at_which_a_fork_starts() -> None:
    found = {
        family: [between(contender("greedy", where), contender("snip", where), point=point) for point in (300, 1500)]
        for family, where in SETTINGS.items()
    }
    assert {one.forks for own in found.values() for one in own} == {5}
    text = section()
    assert "From step 300 its difference is {}, from step 1,500 {}".format(*found["gemm-95"]) in text
    assert "At 90% `greedy` is at {} from step 300 and at {} from step 1,500".format(*found["gemm-90"]) in text
    assert "at 75% at {} and {}.".format(*found["gemm-75"]) in text


def test_random_plans_are_as_many_times_as_far_from_snip_as_after_100_steps() -> None:
    of = by_contender(line for line in read_forks([RESULTS / "forks-criteria.jsonl"]) if line["steps"] == 100)
    ratios = []
    for family in ("gemm-75", "gemm-95"):
        one, other = (contender(policy, SETTINGS[family]) for policy in ("random", "snip"))
        ratios.append(
            against_snip("random", family).main.mean / difference_of(of[one], of[other], "held_out_plan").mean
        )
    assert "at 75 and 95%, by {:.1f} and {:.1f} times what it is after 100 steps".format(*ratios) in section()


def test_the_pages_say_which_forks_of_1000_steps_are_there() -> None:
    asked = [one for run in load_recipe(RECIPE).runs("text") for one in run.ids]
    own = lines()
    assert len(own) == len(asked) == 190 and {line["cuda_graph"] for line in own} == {True}
    assert {(line["fork"]["base_seed"], line["fork"]["point"]) for line in own} == {
        (seed, point) for seed in range(3, 8) for point in (300, 1500)
    }
    on = Counter((line["machine"], line["commit"]) for line in own)
    assert on == {(H100, "7fd4429"): 16, (H200, "b76cbd1"): 114, (H200, "b171d5d"): 60}
    told = "All 190 forks ran: 174 on H200s (114 of commit `b76cbd1`, 60 of `b171d5d`) and 16 on H100s"
    assert f"{told} (commit `7fd4429`)" in section()
    assert "`forks-contrasts.jsonl` | all 190 forks of `forks-contrasts.yaml`" in text_of(README)
    old = [line for line in own if line["machine"] == H100]
    assert {line["fork"]["base_seed"] for line in old} == {5}
    settings = ("95% by gemm", "75% by layer")
    asked_there = {line["contender"] for line in own if line["contender"].endswith(settings)}
    assert Counter(line["contender"] for line in old) == dict.fromkeys(asked_there, 2)
    # Nothing else was asked by GEMM at 95% and by layer.
    both = {line["contender"] for line in own if "95% by gemm" in line["contender"] or "layer" in line["contender"]}
    assert both - asked_there == {contender("snip", where) + SALIENCY for where in settings}
    assert "has eight partners here, and none of base 5" in section()


def test_forks_that_ran_again_on_h200s_had_run_on_h100s_from_the_same_weights() -> None:
    def key(line: dict[str, Any]) -> tuple[Any, ...]:
        return line["contender"], *line["fork"].values(), line["state"]

    before = {
        key(line): line["loss"]["held_out_plan"]
        for line in lines_of("eval/results/two-cards.jsonl")
        if line["steps"] == 1000
    }
    again = [line for line in lines() if line["commit"] == "b171d5d"]
    same = [line for line in again if before[key(line)] == line["loss"]["held_out_plan"]]
    assert f"The {len(again)} forks of `b171d5d` had run on H100s before" in section()
    assert f"from the same weights, and {len(same)} of them have the losses that they had there" in section()


def test_most_forks_of_snip_and_greedy_had_run_before() -> None:
    before: dict[tuple[Any, ...], list[float]] = {}
    for name in ("objectives", "refreshes"):
        for line in read_forks([RESULTS / f"forks-{name}.jsonl"]):
            if line["steps"] == 1000:
                before.setdefault((line["contender"], *fork_key(line)), []).append(line["loss"]["held_out_plan"])
    settings = ("75% by gemm", "90% by gemm")
    whole = [contender(policy, where) for policy in ("snip", "greedy") for where in settings]
    keys = {(line["contender"], *fork_key(line)): line["loss"]["held_out_plan"] for line in lines()}
    again = {key: loss for key, loss in keys.items() if key in before}
    layer = contender("snip", "75% by layer")
    assert {key[0] for key in again} == {*whole, layer} and sum(key[0] in whole for key in keys) == 40
    assert Counter(line["machine"] for line in lines() if line["contender"] == layer) == {H200: 8, H100: 2}
    by_gemm = sum(key[0] != layer for key in again)
    told = (
        f"{by_gemm} of the 40 forks of SNIP and `greedy` by GEMM at 75 and 90%, and seven of the eight of SNIP by layer"
    )
    assert f"{told}, had run on H200s before" in section() and len(again) == by_gemm + 7
    same = [key for key, loss in again.items() if set(before[key]) == {loss}]
    assert f"{len(same)} of these {len(again)} have the losses that they had there" in section()


def test_beside_other_lines_the_differences_are_those_of_the_page() -> None:
    both = ("contrasts", "refreshes")

    def less(one: str, other: str, forks: int = 9) -> str:
        found = between(one, other, *both)
        assert found.forks == forks
        return str(found)

    def gemm(share: int, policy: str = "snip", more: str = "") -> str:
        return f"{less(contender(policy, f'{share}% by gemm') + more, 'bf16')}%"

    text, layer = section(), contender("snip", "75% by layer")
    costs = gemm(75), gemm(75, more=SALIENCY), gemm(75, "backward-first"), gemm(75, "random")
    assert (
        "at 75%: SNIP {}, with `saliency` {}, `backward-first` {}, `random` {}.".format(*costs)
        + f" All FP4 is at {less('fp4', 'bf16')}% there"
    ) in text
    told = gemm(90, more=SALIENCY), gemm(95, more=SALIENCY), f"{less(layer + SALIENCY, 'bf16')}%"
    assert "at 90 and 95%: {} and {}, by layer at 75% {}.".format(*told) in text
    assert f"less SNIP: SNIP with `saliency` {less(layer + SALIENCY, layer, 10)} (all ten forks)" in text
    assert between(layer + SALIENCY, layer).forks == 8 and "and base 5 has a SNIP by layer there" in text
    shares = between(contender("snip", "75% by gemm"), contender("snip", "90% by gemm"))
    assert shares.forks == 10 and f"ends {below(shares)} below SNIP at 90% (ten forks)" in text
    assert "were not planned, are uncorrected and in no table of tests" in text


def test_what_was_predicted_is_found_where_the_page_says_so() -> None:
    text = section()
    for policy, family, predicted in (
        ("greedy", "gemm-95", -0.03),
        ("random", "gemm-95", 0.12),
        ("random", "gemm-75", 0.3),
        ("random", "layer-75", 0.05),
    ):
        found = against_snip(policy, family).main
        assert abs(found.mean - predicted) < found.half_width and f"{predicted:+.2f}".rstrip("0") in text
    for policy, family in (("backward-first", "gemm-95"), ("fisher", "gemm-95"), ("backward-first", "gemm-75")):
        assert abs(against_snip(policy, family).main.mean) < 0.05
    assert 0.05 < abs(against_snip("greedy", "layer-75").main.mean) < 0.06 and "**missed**, by a little" in text


@pytest.mark.slow
def test_the_page_says_how_many_forks_would_find_a_tenth_of_a_percent() -> None:
    def needed(family: str, one: str) -> int | None:
        test = compared(family)[one]
        return test.main.forks_for(0.1, test.level)

    of = {
        (family, policy): needed(family, contender(policy, where))
        for family, where in SETTINGS.items()
        for policy in ("greedy", "fisher", "backward-first", "random")
        if contender(policy, where) in compared(family)
    }
    for family, where in SETTINGS.items():
        of[family, "saliency"] = needed("saliency", contender("snip", where) + SALIENCY)
    for family, policies, there in (
        ("layer-75", ("greedy", "random", "saliency"), "ten, ten and eight"),
        ("gemm-95", ("fisher", "backward-first", "saliency"), "ten, ten and eight are there"),
        ("gemm-75", ("greedy", "backward-first", "saliency"), "ten are there"),
    ):
        told = ", ".join(f"{of[family, policy]} for `{policy}`" for policy in policies)
        assert f"{told} ([{there}](#over-1000-steps))" in text_of(PAGE)


@pytest.mark.slow
def test_the_tables_of_contrasts_are_those_of_the_lines(tmp_path: Path) -> None:
    check_report(tmp_path, "contrasts", against="snip {fp4, fp8}, 95% by gemm")
