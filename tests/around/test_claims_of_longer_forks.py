"""Figures that pages quote of the forks through the whole corpus are those of the committed lines."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from committed import ROOT, check_report, text_of

from eval.bakeoff import fork_tables
from eval.bakeoff.fork_lengths import courses_of
from eval.bakeoff.fork_lines import read_forks
from eval.bakeoff.fork_recipe import load_recipe

LONGER = ROOT / "eval" / "results" / "forks-longer.jsonl"
BY_GEMM, BY_LAYER = (f"snip {{fp4, fp8}}, 75% by {where}, refresh_every 250" for where in ("gemm", "layer"))
RULE = "backward-first {fp4, fp8}, 75% by gemm"
FALLING = "snip {fp4, fp8}, 90% from step 1, 60% from step 1451 by gemm, refresh_every 250"


@cache
def longer() -> list[dict[str, Any]]:
    """The lines of the forks through the whole corpus."""
    return read_forks([LONGER])


def longer_test(one: str, other: str, family: str, steps: int) -> fork_tables.Tested:
    """The comparison of a family after so many steps."""
    pairs = load_recipe(ROOT / "recipes" / "forks-longer.yaml").comparisons_after(steps)[family]
    found = fork_tables.tests_of([line for line in longer() if line["steps"] == steps], pairs)
    return next(test for test in found if (test.one, test.other) == (one, other))


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/results-longer.md", "docs/choosing.md"])
def test_what_75_percent_cost_over_a_whole_training_and_that_the_target_was_missed(page: str) -> None:
    text, gap = text_of(page), longer_test(BY_GEMM, "bf16", "to-bf16", 2700)
    assert gap.reading == "higher" and gap.main.mean > 0.3 and gap.main.mean + gap.main.half_width < 0.6
    assert str(gap.main).removeprefix("+") in text
    assert str(longer_test(BY_LAYER, "bf16", "to-bf16", 2100).main).removeprefix("+") in text
    if page != "docs/choosing.md":
        fp8, above = longer_test("fp8", "bf16", "to-bf16", 2700), longer_test(BY_GEMM, "fp8", "to-fp8", 2700)
        assert fp8.reading == fork_tables.NOT_SIGNIFICANT and str(fp8.main).removeprefix("+") in text
        assert f"(detectable {fp8.main.detectable(fp8.level):.3f})" in text
        assert above.reading == "higher" and str(above.main).removeprefix("+") in text
        assert "arget" in text and "was missed" in text


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/results-longer.md", "docs/choosing.md", "docs/faq.md"])
def test_a_rule_without_a_probe_is_not_significantly_different_from_snip_by_gemm_in_any_length(page: str) -> None:
    for steps in (700, 1400, 2100, 2700):
        found = longer_test(RULE, BY_GEMM, "to-snip-by-gemm", steps)
        assert found.reading == fork_tables.NOT_SIGNIFICANT
        if page == "docs/results-longer.md" or steps == 2700:
            assert str(found.main) in text_of(page)
            assert f"{found.main.detectable(found.level):.3f}" in text_of(page)


@pytest.mark.slow
def test_by_layer_ends_above_by_gemm_after_1400_2100_and_2700_steps() -> None:
    readings = {700: fork_tables.NOT_SIGNIFICANT, 1400: "higher", 2100: "higher", 2700: "higher"}
    for steps, reading in readings.items():
        found = longer_test(BY_LAYER, BY_GEMM, "to-snip-by-gemm", steps)
        assert found.reading == reading and found.main.forks == (6 if steps == 2700 else 8)
        assert str(found.main) in text_of("docs/log.md")
        pages = ["docs/results-longer.md"] + ["README.md"] * (steps > 1400)
        assert all(str(found.main).removeprefix("+") in text_of(page) for page in pages)
    last = longer_test(BY_LAYER, "bf16", "to-bf16", 2700)
    assert last.reading == "higher"
    pages = ["README.md", "docs/results-longer.md", "docs/choosing.md", "docs/log.md"]
    assert all(str(last.main).removeprefix("+") in text_of(page) for page in pages)


@pytest.mark.slow
def test_75_percent_ends_below_all_fp4_after_every_length_and_further_the_longer_it_trains() -> None:
    for steps in (700, 1400, 2100, 2700):
        gap, apart = longer_test("fp4", "bf16", "to-bf16", steps), longer_test(BY_GEMM, "fp4", "to-fp4", steps)
        others = [longer_test(one, "fp4", "to-fp4", steps) for one in (BY_LAYER, RULE)]
        assert gap.reading == "higher" and {test.reading for test in (apart, *others)} == {"lower"}
        assert str(gap.main) in text_of("docs/log.md")
        assert all(str(apart.main) in text_of(page) for page in ("docs/results-longer.md", "docs/log.md"))
    assert 1.3 < gap.main.mean < 1.9  # predicted +1.6 ± 0.3
    for page in ("README.md", "docs/results-longer.md", "docs/choosing.md", "CHANGELOG.md"):
        assert str(gap.main).removeprefix("+") in text_of(page)
    for page in ("README.md", "docs/results-longer.md", "docs/results.md"):
        assert str(apart.main).removeprefix("-") in text_of(page)
    assert f"{-apart.main.mean:.2f} ± {apart.main.half_width:.2f}%" in text_of("docs/config.md")
    assert all(str(test.main) in text_of("docs/results-longer.md") for test in others)
    pairs = load_recipe(ROOT / "recipes" / "forks-longer.yaml").comparisons["to-fp4"]
    courses = {course.one: course for course in courses_of(longer(), pairs, "held_out_plan")}
    assert {course.reading for course in courses.values()} == {"falls"}
    growth = str(courses[BY_GEMM].change["held_out_plan"]).removeprefix("-")
    assert all(f"by {growth}" in text_of(page) for page in ("docs/results-longer.md", "docs/log.md"))


@pytest.mark.slow
def test_a_falling_share_is_not_significantly_different_from_a_constant_one_in_any_length() -> None:
    for steps in (700, 1400, 2100, 2700):
        found = longer_test(FALLING, BY_GEMM, "shares", steps)
        assert found.reading == fork_tables.NOT_SIGNIFICANT and found.main.forks == 8
        assert str(found.main) in text_of("docs/log.md")
    for page in ("docs/results-longer.md", "docs/choosing.md"):
        assert str(found.main).removeprefix("+") in text_of(page)
        assert f"detectable {found.main.detectable(found.level):.3f})" in text_of(page)
    last = [line for line in longer() if line["contender"] == FALLING and line["steps"] == 2700]
    plans = [own for line in last for own in line["plans"]]
    early, late = ([own["plan"] for own in plans if (own["step"] > 1350) == is_late] for is_late in (False, True))
    assert all(set(plan[kind::3]) == {"1"} for plan in early for kind in (1, 2))
    forward = [plan[::3].count("1") / len(plan[::3]) for plan in early]
    quoted = f"{100 * min(forward):.0f} to {100 * max(forward):.0f}% of the forward GEMMs"
    assert quoted in text_of("docs/results-longer.md")
    assert all("1" not in plan[::3] for plan in late)


def test_four_of_five_forks_by_layer_that_ran_again_repeat_their_losses() -> None:
    by_layer = [line for line in longer() if line["contender"] == BY_LAYER]
    before = {line["fork"]["base_seed"]: line for line in by_layer if line["steps"] == 2100}
    again = {line["fork"]["base_seed"]: line for line in by_layer if line["commit"] == "c78620b"}
    assert again.keys() == {1, 2, 3, 4, 5} and {line["commit"] for line in before.values()} == {"959000d"}
    for seed, line in again.items():
        old = before[seed]
        repeats = line["training_curve"][: len(old["training_curve"])] == old["training_curve"]
        assert repeats == (seed != 2)
        assert _other_plans(old, line)[:1] == ([(1251, 12)] if seed == 2 else [])


def _other_plans(one: dict[str, Any], other: dict[str, Any]) -> list[tuple[int, int]]:
    """Steps after which two trainings of a fork have other plans, with the number of GEMMs that differ."""
    pairs = zip(one["plans"], other["plans"], strict=False)
    found = [(a["step"], sum(x != y for x, y in zip(a["plan"], b["plan"], strict=True))) for a, b in pairs]
    return [(step, count) for step, count in found if count]


@pytest.mark.slow
def test_the_gap_grows_significantly_by_layer_and_in_all_fp4_alone() -> None:
    pairs = load_recipe(ROOT / "recipes" / "forks-longer.yaml").comparisons["to-bf16"]
    courses = {course.one: course for course in courses_of(longer(), pairs, "held_out_plan")}
    assert {name for name, course in courses.items() if course.reading == "rises"} == {BY_LAYER, "fp4"}
    assert {course.last for course in courses.values()} == {2700}
    assert {course.reading for course in courses.values()} == {"rises", fork_tables.NOT_SIGNIFICANT}
    page = text_of("docs/results-longer.md")
    assert all(str(course.change["held_out_plan"]) in page for course in courses.values())
    by_gemm = courses[BY_GEMM].change["held_out_plan"]
    quoted = f"{by_gemm} from 700 to 2,700 steps (detectable {by_gemm.detectable(courses[BY_GEMM].level):.3f})"
    assert quoted in page


def test_snip_by_gemm_at_75_is_backward_first_but_for_a_quarter_of_the_forward_flops() -> None:
    last = [line for line in longer() if line["steps"] == 2700]
    plans = [own["plan"] for line in last if line["contender"] == BY_GEMM for own in line["plans"]]
    (rule,) = {line["plan"] for line in last if line["contender"] == RULE}
    # FLOPs of q, k, v, o, gate, up and down of a block, in those of q; 1 is FP4.
    flops = np.array([1.0, 1.0, 1.0, 1.0, 2.75, 2.75, 2.75] * 8)
    forward = np.array([[place == "1" for place in plan[::3]] for plan in plans])
    assert all(set(plan[kind::3]) == {"1"} for plan in (rule, *plans) for kind in (1, 2))
    of_rule = np.array([place == "1" for place in rule[::3]])
    common = (forward * of_rule) @ flops / (forward @ flops)
    equal = np.mean([sum(a == b for a, b in zip(plan, rule, strict=True)) for plan in plans])
    gate_and_up = forward.reshape(-1, 8, 7)[:, :, 4:6].sum((1, 2)).mean()
    page = text_of("docs/results-longer.md")
    assert f"{100 * common.mean():.0f}% of the forward FLOPs that SNIP puts into FP4" in page
    assert f"({100 * common.min():.0f} to {100 * common.max():.0f}%)" in page
    assert f"({gate_and_up:.1f} of its {forward.sum(1).mean():.1f} forward GEMMs, on average)" in page
    assert f"{equal:.0f} of {len(rule)} GEMMs have the same format" in page


@pytest.mark.slow
def test_the_tables_of_longer_forks_are_those_of_the_lines(tmp_path: Path) -> None:
    check_report(tmp_path, "longer", page="docs/results-longer.md", figures="runs/forks-longer")
