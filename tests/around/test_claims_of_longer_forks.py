"""Figures that pages quote of the forks through the whole corpus are those of the committed lines."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from committed import DEFAULT, ROOT, check_report, detectable_of, text_of

from eval.bakeoff import fork_tables
from eval.bakeoff.fork_lengths import Course, courses_of
from eval.bakeoff.fork_lines import read_forks
from eval.bakeoff.fork_recipe import load_recipe

LONGER = ROOT / "eval" / "results" / "forks-longer.jsonl"
BY_GEMM, BY_LAYER = (f"snip {{fp4, fp8}}, 75% by {where}, refresh_every 250" for where in ("gemm", "layer"))
RULE = "backward-first {fp4, fp8}, 75% by gemm"
OFTEN, LAYERS = (f"{one}, loss_estimator saliency" for one in (BY_GEMM, BY_LAYER))
MXFP4, NVFP4 = (DEFAULT.replace("{fp4, fp8}", pair) for pair in ("{mxfp4, fp8-tensor}", "{nvfp4, mxfp8}"))
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
def test_what_75_percent_cost_with_token_fisher_and_that_the_target_was_missed(page: str) -> None:
    text, gap = text_of(page), longer_test(BY_GEMM, "bf16", "to-bf16", 2700)
    assert gap.reading == "higher" and gap.main.mean > 0.3 and gap.main.mean + gap.main.half_width < 0.6
    assert str(gap.main).removeprefix("+") in text
    if page != "docs/choosing.md":
        fp8, above = longer_test("fp8", "bf16", "to-bf16", 2700), longer_test(BY_GEMM, "fp8", "to-fp8", 2700)
        assert fp8.reading == fork_tables.NOT_SIGNIFICANT and str(fp8.main).removeprefix("+") in text
        assert f"(detectable {fp8.main.detectable(fp8.level):.3f})" in text
        assert above.reading == "higher" and str(above.main).removeprefix("+") in text
        assert 'With "token-fisher" the target was missed' in text


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
        assert found.reading == reading and found.main.forks == 8
        assert str(found.main) in text_of("docs/log.md")
        pages = ["docs/results-longer.md"] + ["README.md"] * (steps == 2700)
        assert all(str(found.main).removeprefix("+") in text_of(page) for page in pages)
    last = longer_test(BY_LAYER, "bf16", "to-bf16", 2700)
    assert last.reading == "higher"
    pages = ["README.md", "docs/results-longer.md", "docs/choosing.md"]
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
    for page in ("README.md", "docs/results-longer.md", "docs/choosing.md", "docs/snip.md", "CHANGELOG.md"):
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


def test_four_of_seven_forks_by_layer_that_ran_again_repeat_their_losses() -> None:
    by_layer = [line for line in longer() if line["contender"] == BY_LAYER]
    before = {line["fork"]["base_seed"]: line for line in by_layer if line["steps"] == 2100}
    again = {line["fork"]["base_seed"]: line for line in by_layer if line["commit"] != "959000d"}
    calls = {seed: line["commit"] for seed, line in again.items()}
    assert calls == dict.fromkeys((1, 2, 3, 4, 5), "c78620b") | dict.fromkeys((6, 7), "b171d5d")
    assert {line["commit"] for line in before.values()} == {"959000d"}
    first = {}
    for seed, line in again.items():
        old = before[seed]
        repeats = line["training_curve"][: len(old["training_curve"])] == old["training_curve"]
        first |= {seed: _other_plans(old, line)[0]} if _other_plans(old, line) else {}
        assert repeats == (seed not in first)
    # A plan is noted with the step after its refresh.
    assert first == {2: (1251, 12), 6: (501, 12), 7: (251, 12)}
    page = text_of("docs/results-longer.md")
    assert "The other three (seeds 2, 6 and 7) got another plan at a refresh, the first of them after 250 steps" in page


def _other_plans(one: dict[str, Any], other: dict[str, Any]) -> list[tuple[int, int]]:
    """Steps after which two trainings of a fork have other plans, with the number of GEMMs that differ."""
    pairs = zip(one["plans"], other["plans"], strict=False)
    found = [(a["step"], sum(x != y for x, y in zip(a["plan"], b["plan"], strict=True))) for a, b in pairs]
    return [(step, count) for step, count in found if count]


def growths(family: str) -> dict[str, Course]:
    """The changes of a family's differences over the lengths, by contender."""
    pairs = load_recipe(ROOT / "recipes" / "forks-longer.yaml").comparisons[family]
    found = {course.one: course for course in courses_of(longer(), pairs, "held_out_plan")}
    assert {course.last for course in found.values()} == {2700}
    return found


@pytest.mark.slow
def test_the_gap_grows_significantly_by_layer_and_in_all_fp4_but_not_by_gemm_with_token_fisher() -> None:
    courses = growths("to-bf16")
    assert {name for name, course in courses.items() if course.reading == "rises"} == {BY_LAYER, "fp4"}
    assert {course.reading for course in courses.values()} == {"rises", fork_tables.NOT_SIGNIFICANT}
    page = text_of("docs/results-longer.md")
    assert all(str(course.change["held_out_plan"]) in page for course in courses.values())
    by_gemm = courses[BY_GEMM].change["held_out_plan"]
    quoted = f"{by_gemm} from 700 to 2,700 steps (detectable {by_gemm.detectable(courses[BY_GEMM].level):.3f})"
    assert quoted in page
    apart = growths("to-snip-by-gemm")[BY_LAYER]
    assert apart.reading == "rises" and f"by {apart.change['held_out_plan']}, with three forks whose last" in page
    of_training = [growths("default-to-bf16")[DEFAULT], courses[BY_GEMM], courses[RULE]]
    changes = [course.change["train"] for course in of_training]
    assert all(change.mean > change.half_width for change in changes)
    assert "for the default ({}), for SNIP by GEMM ({}) and for `backward-first` ({})".format(*changes) in page


@pytest.mark.slow
def test_the_gaps_of_saliency_grow_significantly_but_for_the_default() -> None:
    courses, page = growths("default-to-bf16"), text_of("docs/results-longer.md")
    assert len(courses) == 5
    assert {name for name, course in courses.items() if course.reading != "rises"} == {DEFAULT}
    default = courses[DEFAULT].change["held_out_plan"]
    assert f"the default's gap changes by {default} points, which is not significant" in page
    assert f"(detectable {default.detectable(courses[DEFAULT].level):.3f}). Those of the other four" in page
    of = {name: course.change["held_out_plan"] for name, course in courses.items()}
    quoted = (
        f"{of[OFTEN]} with a refresh every 250 steps, {of[LAYERS]} by layer, {of[MXFP4]} with {{mxfp4, fp8-tensor}}"
    )
    assert f"{quoted} and {of[NVFP4]} with {{nvfp4, mxfp8}}." in page
    every = [course for family in ("to-bf16", "default-to-bf16") for course in growths(family).values()]
    assert all(course.change["held_out_plan"].mean > 0 for course in every)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    ["README.md", "CHANGELOG.md"]
    + [f"docs/{name}.md" for name in ("results-longer", "choosing", "snip", "results", "results-loss-forms")],
)
def test_the_default_meets_the_target_over_a_whole_training(page: str) -> None:
    text, gap = text_of(page), longer_test(DEFAULT, "bf16", "default-to-bf16", 2700)
    low, high = gap.main.mean - gap.main.half_width, gap.main.mean + gap.main.half_width
    assert gap.reading == "higher" and gap.main.forks == 8
    assert gap.main.mean <= 0.3 < high < 0.6  # met, but a true gap above 0.3% is not excluded
    assert str(gap.main).removeprefix("+") in text
    assert longer_test(BY_LAYER, "bf16", "to-bf16", 2700).main.forks == 8
    if page in ("README.md", "docs/results-longer.md"):
        assert "does not exclude a true gap above 0.3%" in text
        assert "is met." in text or "The target is met" in text
    if page == "docs/results-longer.md":
        assert f"(significant, p = {gap.p_holm:.3f} after the correction)" in text
        assert f"The interval, {low:.3f} to {high:.3f}%, excludes 0.6%" in text
        fp4, often = (longer_test(DEFAULT, other, "afterwards", 2700) for other in ("fp4", OFTEN))
        assert fp4.p_holm is not None and fp4.p_holm < 0.001
        assert f"the default {fp4.main}".replace("-", "") in text
        assert f"the default is {often.main}".replace("+", "") in text
        assert f"above it (p = {often.p_holm:.2f}, not planned)" in text


def test_forks_with_saliency_ran_in_two_calls() -> None:
    ours = {}
    for line in longer():
        if "saliency" in line["contender"]:
            assert line["commit"] == "b171d5d" and line["machine"] == "NVIDIA H200"
            ours[line["contender"], line["fork"]["base_seed"]] = line["processes_per_device"]
    beside = list(ours.values())
    assert set(beside) == {14, 3}
    assert {count for (contender, _), count in ours.items() if contender == DEFAULT} == {14}
    text = text_of("docs/results-longer.md")
    assert f"{beside.count(14)} forks, with all of the default, in 14 processes on each of three GPUs" in text
    assert f"and {beside.count(3)} for which memory had not sufficed in 3 on each of four" in text


@pytest.mark.slow
def test_that_saliency_is_better_over_whole_trainings_is_not_shown() -> None:
    text = text_of("docs/results-longer.md")
    found = {steps: longer_test(OFTEN, BY_GEMM, "saliency", steps) for steps in (700, 1400, 2100, 2700)}
    assert {steps: test.reading for steps, test in found.items()} == dict.fromkeys(
        (1400, 2100, 2700), fork_tables.NOT_SIGNIFICANT
    ) | {700: "lower"}
    last, by_layer = found[2700], longer_test(LAYERS, BY_LAYER, "saliency", 2700)
    assert by_layer.reading == fork_tables.NOT_SIGNIFICANT and last.p_holm is not None
    assert f"it ends {last.main} points lower".replace("-", "") in text
    assert f"(detectable {last.main.detectable(last.level):.3f}; p = {last.main.p:.3f}, {last.p_holm:.3f} after" in text
    assert f"({found[700].main}); after 1,400 and 2,100 it is {found[1400].main} and {found[2100].main}." in text
    assert f"By layer it is {by_layer.main} (detectable {by_layer.main.detectable(by_layer.level):.3f})" in text
    for page in ("README.md", "docs/choosing.md", "docs/results-loss-forms.md"):
        assert f"{last.main} points (p = {last.p_holm:.3f} after" in text_of(page) and "not shown" in text_of(page)
        assert page == "README.md" or f"by layer {by_layer.main}" in text_of(page)


@pytest.mark.slow
def test_nothing_is_significantly_different_from_the_default_but_by_layer() -> None:
    tests = {one: longer_test(one, DEFAULT, "default", 2700) for one in ("fp8", RULE, MXFP4, NVFP4)}
    assert {test.reading for test in tests.values()} == {fork_tables.NOT_SIGNIFICANT}
    page = text_of("docs/results-longer.md")
    fp8, rule, mxfp4, nvfp4 = ((test.main, f"{test.main.detectable(test.level):.3f}") for test in tests.values())
    assert "{} points (detectable {})".format(*fp8) in page and "above it**: {} (detectable {})".format(*rule) in page
    assert f"{mxfp4[0]} and {nvfp4[0]} points (detectable {mxfp4[1]} and {nvfp4[1]})" in page
    assert "({}, detectable {};".format(*fp8) in text_of("README.md")
    assert "({}, detectable {}).".format(*mxfp4) in text_of("README.md")
    assert "against the default by {} ({})".format(*rule) in text_of("README.md")
    assert "| the same against the default | `backward-first` | {}% | {} |".format(*rule) in text_of("docs/choosing.md")
    assert f"of up to {rule[0].mean + rule[0].half_width:.3f}% for the default" in text_of("docs/choosing.md")
    assert "Against the default it was {} there (detectable {};".format(*rule) in text_of("docs/faq.md")
    gaps = {one: longer_test(one, "bf16", "default-to-bf16", 2700) for one in (OFTEN, LAYERS, MXFP4, NVFP4)}
    assert {gap.reading for gap in gaps.values()} == {"higher"}
    often, layers, mx, nv = (str(gap.main) for gap in gaps.values())
    assert f'"saliency" is at {often}% (significant)' in page and f"{layers}% (significant)" in page
    assert f"end {mx}% above BF16".replace("+", "") in page and f"emulates, {nv}%".replace("+", "") in page
    for name in ("README.md", "docs/choosing.md", "docs/hopper.md"):
        assert mx.removeprefix("+") in text_of(name)
        assert name == "docs/hopper.md" or layers.removeprefix("+") in text_of(name)
    pairs = (LAYERS, OFTEN), (DEFAULT, "fp4")
    above, below = (longer_test(*pair, "afterwards", 2700) for pair in pairs)
    assert above.p_holm is not None and above.p_holm < 0.001
    assert f"(significant), {above.main} points above".replace("+", "") in page
    assert f"the default {-below.main.mean:.2f} ± {below.main.half_width:.2f}%." in text_of("docs/config.md")


def test_the_page_says_how_much_differences_scatter_and_how_many_forks_find_a_tenth() -> None:
    families = load_recipe(ROOT / "recipes" / "forks-longer.yaml").comparisons_after(2700).values()
    lines = [line for line in longer() if line["steps"] == 2700]
    tests = [test for pairs in families for test in fork_tables.tests_of(lines, pairs)]
    scatter = sorted(test.main.deviation for test in tests)
    found = sorted(detectable_of(test) for test in tests)
    text = text_of("docs/results-longer.md")
    assert f"by {scatter[0]:.2f} to {scatter[-1]:.2f}% (standard deviation)" in text
    assert f"differences of {found[0]:.1f} to {found[-1]:.1f}%" in text


def forward_of(contender: str) -> tuple[np.ndarray, list[int]]:
    """Which forward GEMMs of the refreshed plans are in FP4, plan by plan, and the steps of the plans."""
    last = [line for line in longer() if line["steps"] == 2700 and line["contender"] == contender]
    plans = [own for line in last for own in line["plans"]]
    forward = np.array([[place == "1" for place in own["plan"][::3]] for own in plans])
    return forward, [own["step"] for own in plans]


def test_snip_by_gemm_at_75_is_backward_first_but_for_a_quarter_of_the_forward_flops() -> None:
    last = [line for line in longer() if line["steps"] == 2700]
    (rule,) = {line["plan"] for line in last if line["contender"] == RULE}
    # FLOPs of q, k, v, o, gate, up and down of a block, in those of q; 1 is FP4.
    flops = np.array([1.0, 1.0, 1.0, 1.0, 2.75, 2.75, 2.75] * 8)
    of_rule = np.array([place == "1" for place in rule[::3]])
    page = text_of("docs/results-longer.md")
    in_common, of_default = {}, forward_of(DEFAULT)
    for contender in (BY_GEMM, DEFAULT):
        plans = [own["plan"] for line in last if line["contender"] == contender for own in line["plans"]]
        forward, steps = forward_of(contender)
        assert all(set(plan[kind::3]) == {"1"} for plan in (rule, *plans) for kind in (1, 2))
        common = (forward * of_rule) @ flops / (forward @ flops)
        in_common[contender] = f"{100 * common.mean():.0f}%", f"({100 * common.min():.0f} to {100 * common.max():.0f}%)"
        equal = np.mean([sum(a == b for a, b in zip(plan, rule, strict=True)) for plan in plans])
        assert f"{equal:.0f} of {len(rule)} GEMMs have the same format" in page
        gate_and_up = forward.reshape(-1, 8, 7)[:, :, 4:6].sum((1, 2)).mean()
        assert f"({gate_and_up:.1f} of its {forward.sum(1).mean():.1f} forward GEMMs, on average)" in page
        late = forward[np.array(steps) == 2501].reshape(-1, 8, 7)[:, :, :4].sum((1, 2)).mean()
        assert (
            f"{late:.1f} on average in those" if contender == DEFAULT else f"and {late:.1f} of the attention"
        ) in page
    early = of_default[0][np.array(of_default[1]) == 501]
    assert not early.reshape(-1, 8, 7)[:, :, :4].any()
    assert f"{in_common[DEFAULT][0]} of the forward FLOPs that the default puts into FP4 are in FP4 under" in page
    assert f"too {in_common[DEFAULT][1]}, {in_common[BY_GEMM][0]} of the forward FLOPs that SNIP puts into FP4" in page
    assert f'with "token-fisher" {in_common[BY_GEMM][1]}.' in page


def moved(contender: str) -> tuple[list[int], list[int]]:
    """How many GEMMs each refresh changes, and how many differ between a fork's last and first refreshed plan."""
    found: tuple[list[int], list[int]] = ([], [])
    for plans in plans_of(contender).values():
        found[0].extend(_differ(a, b) for a, b in itertools.pairwise(plans.values()))
        found[1].append(_differ(*(list(plans.values())[end] for end in (0, -1))))
    return found


def plans_of(contender: str) -> dict[int, dict[int, str]]:
    """Seed -> step -> refreshed plan."""
    last = [line for line in longer() if line["steps"] == 2700 and line["contender"] == contender]
    return {line["fork"]["base_seed"]: {own["step"]: own["plan"] for own in line["plans"]} for line in last}


def _differ(one: str, other: str) -> int:
    """How many places two plans have different."""
    return sum(a != b for a, b in zip(one, other, strict=True))


def between(one: str, other: str) -> list[int]:
    """How many places plans of two contenders have different, on the same forks after the same steps."""
    ours, theirs = plans_of(one), plans_of(other)
    return [_differ(ours[seed][step], theirs[seed][step]) for seed in ours for step in ours[seed]]


def among(contender: str) -> list[int]:
    """How many places plans of two forks have different after the same step."""
    pairs = itertools.combinations(plans_of(contender).values(), 2)
    return [_differ(a[step], b[step]) for a, b in pairs for step in a]


def test_how_far_plans_of_saliency_move_and_differ_from_others() -> None:
    page = text_of("docs/results-longer.md")
    forms, layers, mxfp4, nvfp4 = (
        between(*pair) for pair in ((OFTEN, BY_GEMM), (LAYERS, BY_LAYER), (MXFP4, DEFAULT), (NVFP4, DEFAULT))
    )
    assert f"differ in {fmean(forms):.1f} of 168 GEMMs ({min(forms)} to {max(forms)}), and by layer in " in page
    assert f"in {fmean(layers):.1f} ({min(layers)} to {max(layers)})." in page
    assert f"differ from the default's in {fmean(mxfp4):.1f} GEMMs" in page
    assert f"in {fmean(nvfp4):.1f} ({min(nvfp4)} to {max(nvfp4)} both)" in page
    assert (min(mxfp4), max(mxfp4)) == (min(nvfp4), max(nvfp4))
    (changed, moves), (before, moved_before) = moved(OFTEN), moved(BY_GEMM)
    assert f"changes {fmean(changed):.1f} GEMMs ({min(changed)} to {max(changed)}), and the last" in page
    assert f"the first refreshed one in {fmean(moves):.1f}; with" in page
    assert f"it is {fmean(before):.1f} ({min(before)} to {max(before)}) and {fmean(moved_before):.1f}." in page
    assert f"A refresh of the default, every 500 steps, changes {fmean(moved(DEFAULT)[0]):.1f}." in page
    by_layer = [fmean(moved(contender)[0]) for contender in (LAYERS, BY_LAYER)]
    assert 'changes {:.1f} GEMMs with "saliency" and {:.1f} with "token-fisher"'.format(*by_layer) in page
    seeds = among(DEFAULT)
    assert f"differ in {fmean(seeds):.1f} under the default ({min(seeds)} to {max(seeds)}), and by layer in" in page
    assert f"by layer in {fmean(among(LAYERS)):.1f} and {fmean(among(BY_LAYER)):.1f}." in page
    backward = [
        plan[kind::3].count("0") for seed in plans_of(NVFP4).values() for plan in seed.values() for kind in (1, 2)
    ]
    assert (
        sum(backward) == 1 and len(backward) == 2 * 40 and "one plan of 40 leaves one backward GEMM in 8 bits" in page
    )


@pytest.mark.slow
def test_the_tables_of_longer_forks_are_those_of_the_lines(tmp_path: Path) -> None:
    check_report(tmp_path, "longer", page="docs/results-longer.md", figures="runs/forks-longer")
