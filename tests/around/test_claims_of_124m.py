"""Figures that the page on criteria quotes of forks of a 124M model are those of the committed lines."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from committed import RESULTS, ROOT, check_report, detectable_of, row_of, shown, text_of

from eval.bakeoff import fork_tables
from eval.bakeoff.fork_lines import LOSSES, by_contender, difference_of, read_forks
from eval.bakeoff.fork_recipe import load_recipe
from eval.bakeoff.fork_statistics import Difference

RECIPE = ROOT / "recipes" / "forks-criteria-124m.yaml"
PAGE = "docs/results-criteria.md"
# Family -> where its plans spend 4 bits, in the order of the page's columns.
SETTINGS = {"gemm-75": "75% by gemm", "gemm-90": "90% by gemm", "gemm-95": "95% by gemm", "layer-75": "75% by layer"}
RULES = ("layer-position", "first2-last8", "last-15-percent", "layer-type")
POLICIES = ("fisher", "greedy", "hessian-trace", "min-abs-err", "backward-first", *RULES, "kl", "min-rel-err")
IMPOSSIBLE = {("backward-first", "layer-75")} | {("snip-paper", f"gemm-{share}") for share in (75, 90, 95)}
# Contenders that are significantly higher than SNIP.
HIGHER = {
    "gemm-75": {"last-15-percent", "layer-type", "kl", "min-rel-err", "random"},
    "gemm-90": {"layer-type", "kl", "min-rel-err", "random"},
    "gemm-95": set(),
    "layer-75": {"layer-type"},
}


@cache
def lines(name: str = "criteria-124m") -> dict[str, list[dict[str, Any]]]:
    """The forks of 100 steps of each contender."""
    return by_contender(line for line in read_forks([RESULTS / f"forks-{name}.jsonl"]) if line["steps"] == 100)


@cache
def compared(family: str, outcome: str = "held_out_plan") -> dict[str, fork_tables.Tested]:
    """The comparisons of a family, by contender; by policy where all are against SNIP."""
    own = [line for of in lines().values() for line in of]
    tests = fork_tables.tests_of(own, load_recipe(RECIPE).comparisons_after(100)[family], outcome)
    return {test.one.split()[0] if family in SETTINGS else test.one: test for test in tests}


def snip(setting: str) -> str:
    return f"snip {{fp4, fp8}}, {setting}"


def between(one: str, other: str, name: str = "criteria-124m") -> Difference:
    return difference_of(lines(name)[one], lines(name)[other], "held_out_plan")


def section() -> str:
    return text_of(PAGE).partition("## At 124M")[2].partition("## What is missing")[0]


def told(test: fork_tables.Tested, reading: str = fork_tables.NOT_SIGNIFICANT) -> str:
    assert (test.main.forks, test.reading) == (9, reading)
    return str(test.main)


def below(found: object) -> str:
    return str(found).lstrip("+-")


def test_the_section_says_which_forks_are_there() -> None:
    own = [line for of in lines().values() for line in of]
    assert {len(of) for of in lines().values()} == {9} and len(lines()) == 55 and len(own) == 495
    assert {(line["machine"], line["cuda_graph"], line["steps"]) for line in own} == {("NVIDIA H200", True, 100)}
    assert Counter(line["commit"] for line in own) == {"42eb520": 194, "b76cbd1": 301}
    forks = {tuple(line["fork"].values()) for line in own}
    assert forks == {(0, point, data) for point in (300, 900, 1500) for data in range(3)}
    assert all(
        len({line["state"] for line in own if line["fork"]["point"] == point}) == 1 for point in (300, 900, 1500)
    )
    text = section()
    assert "All 495 forks of one base of 124M parameters ran, nine for each of 55 contenders" in text
    assert "194 at commit `42eb520` and 301 at `b76cbd1`" in text
    assert "`forks-criteria-124m.jsonl` | all 495 forks of 100 steps of one base" in text_of("eval/README.md")


@pytest.mark.parametrize("policy", [*POLICIES, "snip-paper", "random"])
def test_the_table_of_124m_has_the_differences_of_the_lines(policy: str) -> None:
    cells = []
    for family in SETTINGS:
        test = compared(family).get(policy)
        assert (test is None) == ((policy, family) in IMPOSSIBLE)
        cells.append("not possible" if test is None else shown(test))
    label = f"`{policy}`, 8 probes" if policy == "hessian-trace" else f"`{policy}`"
    assert row_of(label, *cells) in section()


def test_rows_are_of_one_plan_where_the_section_says_so() -> None:
    def same(one: str, other: str) -> set[str]:
        def plans(policy: str, where: str) -> list[str]:
            own = lines()[f"{policy} {{fp4, fp8}}, {where}"]
            return ["".join(list(line["shares"])[int(digit)] for digit in line["plan"]) for line in own]

        return {family for family, where in SETTINGS.items() if plans(one, where) == plans(other, where)}

    assert same("layer-position", "first2-last8") == {"gemm-75", "gemm-95", "layer-75"}
    assert same("first2-last8", "last-15-percent") == {"gemm-90", "gemm-95"}
    told_so = (
        "`layer-position` and `first2-last8` at 75% and at 95%, `first2-last8` and `last-15-percent` at 90 and 95%"
    )
    assert told_so in section()


def test_what_is_significantly_higher_than_snip_is_what_the_section_names() -> None:
    found = {
        family: {policy for policy, test in compared(family).items() if test.reading == "higher"} for family in SETTINGS
    }
    assert found == HIGHER and {len(compared(family)) for family in SETTINGS} == {12}
    text = section()
    assert "five of twelve contenders by GEMM at 75%, four at 90%, none at 95%, and one by layer" in text
    families = load_recipe(ROOT / "recipes" / "forks-criteria.yaml").comparisons_after(100)
    own = [line for of in lines("criteria").values() for line in of]
    for family, names in HIGHER.items():
        tests = {test.one.split()[0]: test.reading for test in fork_tables.tests_of(own, families[family])}
        assert {tests[name] for name in names} <= {"higher"}
    paper, in_training = (compared("layer-75", outcome)["snip-paper"] for outcome in ("held_out_plan", "train"))
    assert f"`snip-paper` by layer is not (p = {paper.main.p:.3f}, {paper.p_holm:.3f} after Holm's correction)" in text
    assert in_training.reading == "higher" and f"in the training loss it is ({in_training.main})" in text


@pytest.mark.slow
def test_nothing_is_significantly_lower_than_snip_in_any_loss() -> None:
    found = [test for outcome in LOSSES for family in SETTINGS for test in compared(family, outcome).values()]
    assert len(found) == 4 * 48 and "lower" not in {test.reading for test in found}
    assert "in none of the four losses" in section()
    largest = max(abs(compared(family)["greedy"].main.mean) for family in SETTINGS)
    assert f"`greedy` is within {largest:.3f} of SNIP in all four columns" in section()


def test_random_plans_are_where_the_pages_say() -> None:
    at_75, at_90, at_95, layer = (compared(family)["random"] for family in SETTINGS)
    assert (at_75.reading, at_90.reading) == ("higher", "higher")
    assert (at_95.reading, layer.reading) == (fork_tables.NOT_SIGNIFICANT,) * 2
    text = text_of(PAGE)
    assert f"[at 124M](#at-124m) by {below(at_75.main)} and {below(at_90.main)} at 75 and 90% (both" in text
    assert f"not significant ({below(at_95.main)}, detectable {detectable_of(at_95):.3f})" in text
    assert f"with one base at 124M by {below(at_75.main)} and {below(at_90.main)} (both" in text_of("README.md")
    in_training = {family: compared(family, "train")["random"] for family in SETTINGS}
    assert {family for family, test in in_training.items() if test.reading == "higher"} == {*SETTINGS} - {"layer-75"}
    assert f"In the training loss it is at 95% too (by {below(in_training['gemm-95'].main)})" in section()


def test_the_costs_against_bf16_are_those_of_the_section() -> None:
    found, text = compared("cost"), section()
    for start, one in (("SNIP by GEMM at 75% ", snip("75% by gemm")), ("FP8 ", "fp8")):
        detectable = f"{detectable_of(found[one]):.3f}"
        figure = f"{start}({told(found[one])}%, "
        assert f"{figure}detectable {detectable})" in text or f"{figure}{detectable})" in text
    costs = [*(snip(where) for where in ("90% by gemm", "95% by gemm", "75% by layer")), "fp4"]
    shown_costs = [below(told(found[one], "higher")) for one in costs]
    assert (
        "SNIP by GEMM at 90% costs {}%, at 95% {}%, by layer at 75% {}%, and all FP4 {}%, all four".format(*shown_costs)
    ) in text
    ratios = [found[one].main.mean / between(one, "bf16", "criteria").mean for one in costs]
    assert f"These four means are {min(ratios):.2f} to {max(ratios):.2f} of those at 30M" in text


def test_rules_are_where_the_pages_say() -> None:
    for family in ("gemm-75", "gemm-90", "gemm-95"):
        assert compared(family)["backward-first"].reading == fork_tables.NOT_SIGNIFICANT
    found, text = compared("rules-and-random"), section()
    own = [told(found[f"backward-first {{fp4, fp8}}, {share}% by gemm"], "lower") for share in (75, 90, 95)]
    assert "`random` at all three: {}, {} and {} at 75, 90 and 95%".format(*own) in text
    layer = told(found["layer-position {fp4, fp8}, 75% by layer"], "lower")
    assert f"`layer-position` is significantly lower than `random` by layer ({layer})" in text
    to_snip = compared("layer-75")["layer-position"]
    assert f"At 124M the same holds ({told(to_snip)}, detectable {detectable_of(to_snip):.3f}, and {layer})" in (
        text_of(PAGE)
    )


def test_snip_is_as_far_below_all_fp4_as_the_section_says() -> None:
    found, text = compared("against-fp4"), section()
    assert f"SNIP by layer at 75% is significantly lower ({told(found[snip('75% by layer')], 'lower')})" in text
    at_90, at_95 = (found[snip(f"{share}% by gemm")] for share in (90, 95))
    assert f"By GEMM at 90% ({told(at_90)}, detectable {detectable_of(at_90):.3f}) and 95% ({told(at_95)}, " in text
    assert f"{detectable_of(at_95):.3f}) it is not" in text
    at_75 = between(snip("75% by gemm"), "fp4")
    assert f"At 75% it ends {below(at_75)} below all FP4" in text and at_75.mean < 0
    assert snip("75% by gemm") not in found


def test_snip_at_different_shares_is_where_the_section_says() -> None:
    own = [line for of in lines().values() for line in of]
    tests = fork_tables.tests_of(own, load_recipe(RECIPE).comparisons_after(100)["shares"])
    at_95, layer = tests
    assert {at_95.one, layer.one} == {snip("90% by gemm")}
    assert (at_95.other, layer.other) == (snip("95% by gemm"), snip("75% by layer"))
    text = section()
    assert f"not significantly different from 95% ({told(at_95)}, detectable {detectable_of(at_95):.3f})" in text
    assert f"or from 75% by layer ({told(layer)}, {detectable_of(layer):.3f})" in text
    others = [between(snip("75% by gemm"), snip(where)) for where in ("90% by gemm", "75% by layer")]
    assert all(one.mean < 0 for one in others)
    assert "it ends {} below 90% and {} below 75% by layer".format(*map(below, others)) in text


@pytest.mark.slow
def test_the_tests_find_what_the_section_says() -> None:
    found = [detectable_of(test) for family in SETTINGS for test in compared(family).values()]
    counts = [sum(one <= effect for one in found) for effect in (0.1, 0.05)]
    assert (len(found), counts) == (48, [46, 2])
    told_so = (
        f"46 of the 48 against SNIP would find a true difference of 0.1% with power 0.8 (detectable {min(found):.3f}"
    )
    assert f"{told_so} to {max(found):.3f}), and two of them 0.05%" in section()


def test_what_was_predicted_is_found_or_missed_as_the_section_says() -> None:
    def holds(test: fork_tables.Tested, predicted: float) -> bool:
        return abs(test.main.mean - predicted) < test.main.half_width

    cost, text = compared("cost"), section()
    for where, predicted in (
        ("75% by gemm", 0.015),
        ("90% by gemm", 0.05),
        ("95% by gemm", 0.07),
        ("75% by layer", 0.1),
    ):
        assert holds(cost[snip(where)], predicted)
    assert "at +0.015, +0.05 and +0.07, by layer at +0.10, within the intervals" in text
    assert not holds(cost[snip("90% by gemm")], 0.09) and not holds(cost[snip("95% by gemm")], 0.12)
    assert cost["fp4"].main.mean + cost["fp4"].main.half_width < 0.18
    random = {family: compared(family)["random"] for family in SETTINGS}
    assert holds(random["gemm-75"], 0.1) and holds(random["gemm-90"], 0.06) and not holds(random["gemm-95"], 0.05)
    paper = compared("layer-75")["snip-paper"]
    assert not holds(paper, 0.08) and paper.reading == fork_tables.NOT_SIGNIFICANT
    near = [compared(f"gemm-{share}")[one] for share in (75, 90, 95) for one in ("backward-first", "greedy")]
    for test in (*near, compared("layer-75")["layer-position"]):
        assert abs(test.main.mean) < 0.03 and test.reading == fork_tables.NOT_SIGNIFICANT


@pytest.mark.slow
def test_the_tables_of_124m_are_those_of_the_lines(tmp_path: Path) -> None:
    check_report(tmp_path, "criteria-124m")
