"""Figures that README.md and docs/ quote in their text are those of the committed lines."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import refresh_steps
import truth_at_size
import weight_gradients
from committed import ROOT, lines_of, text_of

from eval.bakeoff import fork_tables
from eval.bakeoff.fork_lines import by_contender, difference_of, fork_key, read_forks
from eval.bakeoff.fork_recipe import load_recipe
from eval.bakeoff.fork_report import Asked, write_report
from eval.bakeoff.fork_statistics import Difference

# (model, share, seed) -> gap to BF16 of the same seed, in percent
Gaps = dict[tuple[str, float | None, int], float]
# What a run of SNIP has in the main comparison; other runs vary one of these.
USUAL = {"start_step": 0, "objective": "additive", "loss_weight": 1.0, "weight_weight": 1.0, "switching_cost": 0.0}
REFRESHED = 250
CRITERIA = ROOT / "eval" / "results" / "forks-criteria.jsonl"
CRITERIA_PAGE = "docs/results-criteria.md"
GEMM_75, GEMM_90, LAYER_75 = "{fp4, fp8}, 75% by gemm", "{fp4, fp8}, 90% by gemm", "{fp4, fp8}, 75% by layer"
GEMM_95, LAYER_50, LAYER_90 = "{fp4, fp8}, 95% by gemm", "{fp4, fp8}, 50% by layer", "{fp4, fp8}, 90% by layer"


@cache
def runs() -> list[dict[str, Any]]:
    return lines_of("eval/results/bakeoff.jsonl")


def gaps(policy: str, granularity: str | None = None, refresh_every: int | None = REFRESHED) -> Gaps:
    """The gaps of a policy, with a probe under the usual settings."""
    where = ("model", "seed", "learning_rate", "steps")
    bf16 = {tuple(run["spec"][name] for name in where): run for run in runs() if run["spec"]["policy"] == "bf16"}
    found: Gaps = {}
    for run in runs():
        spec = run["spec"]
        usual = {name: value for name, value in USUAL.items() if spec[name] is not None}
        usual |= {"refresh_every": refresh_every} if policy == "snip" else {}
        if spec["policy"] != policy or spec["granularity"] != granularity or any(spec[k] != usual[k] for k in usual):
            continue
        reference = bf16.get(tuple(spec[name] for name in where))
        if reference:
            place = spec["model"], spec["share"], spec["seed"]
            assert place not in found, f"two runs of {policy} at {place}"
            found[place] = 100 * (run["loss"]["plan"] / reference["loss"]["plan"] - 1)
    return found


def per_seed(values: Iterable[tuple[tuple[str, float | None, int], float]]) -> Difference:
    """The mean over seeds of a model of the means over shares."""
    seeds: dict[tuple[str, int], list[float]] = {}
    for (model, _, seed), value in values:
        seeds.setdefault((model, seed), []).append(value)
    return Difference.of([statistics.fmean(of_seed) for of_seed in seeds.values()])


def paired(other: Gaps, base: Gaps) -> Difference:
    return Difference.of([gap - base[place] for place, gap in other.items() if place in base])


@cache
def criteria(steps: int) -> dict[str, list[dict[str, Any]]]:
    """Contender -> lines of the forks of criteria of that length."""
    return by_contender(line for line in read_forks([CRITERIA]) if line["steps"] == steps)


def difference(one: str, other: str, steps: int = 100, loss: str = "held_out_plan") -> Difference:
    """The difference of a loss of two contenders of the forks of criteria."""
    return difference_of(criteria(steps)[one], criteria(steps)[other], loss)


def apart(one: str, other: str, steps: int = 100) -> str:
    """Mean and interval of the held-out loss of one contender less that of another, as the report writes them."""
    return str(difference(one, other, steps))


def from_run_3(steps: int = 100) -> list[dict[str, Any]]:
    """Lines of the third run of the forks of criteria: its bases are the only ones above 2."""
    return [line for own in criteria(steps).values() for line in own if line["fork"]["base_seed"] > 2]


def interval(difference: Difference) -> str:
    return f"{difference.mean - difference.half_width:.2f} to {difference.mean + difference.half_width:.2f}"


def at_75_and_80(found: Gaps) -> Gaps:
    return {place: gap for place, gap in found.items() if place[1] in (0.75, 0.8)}


@pytest.mark.parametrize("page", ["docs/results.md", "docs/config.md"])
def test_how_far_snip_by_gemm_is_below_all_fp4(page: str) -> None:
    snip, fp4 = at_75_and_80(gaps("snip", "gemm")), gaps("uniform-fp4")
    below = per_seed(
        ((model, share, seed), fp4[model, None, seed] - gap)
        for (model, share, seed), gap in snip.items()
        if (model, None, seed) in fp4
    )
    assert below.forks == 6
    quoted = text_of(page).replace("95% interval ", "").replace("the mean of the six seeds is", "")
    assert f"{below.mean:.2f}" in quoted
    assert f"({interval(below)}" in quoted


def test_how_far_snip_by_gemm_is_above_bf16() -> None:
    above = per_seed(at_75_and_80(gaps("snip", "gemm")).items())
    assert above.forks == 7
    assert f"{above.mean:.2f}" in text_of("docs/results.md")
    assert f"({interval(above)}" in text_of("docs/results.md")


def test_by_layer_and_by_gemm_are_not_significantly_different() -> None:
    difference = paired(gaps("snip", "layer"), gaps("snip", "gemm"))
    assert difference.forks == 13
    assert f"{difference.mean:.2f} points (95% interval {interval(difference)}" in text_of("docs/config.md")
    assert difference.p is not None and difference.p > 0.05


def test_what_the_paired_tests_of_snip_by_gemm_would_have_found() -> None:
    base = gaps("snip", "gemm")
    found = [
        paired(other, base).detectable()
        for other in (
            gaps("snip", "layer"),
            gaps("backward-first", "gemm"),
            gaps("fisher", "gemm"),
            gaps("hessian-trace", "gemm"),
            gaps("snip", "gemm", refresh_every=None),
        )
    ]
    layer, backward, least, most, static = (f"{value:.2f}" for value in found if value is not None)
    page = text_of("docs/results.md")
    assert f"{layer} points to SNIP by layer (13 pairs), {backward} to `backward-first` (18)" in page
    assert f"{least} to {most} to `fisher`, `greedy` and `hessian-trace` (6) and {static}" in page


def test_estimates_from_one_micro_batch_are_further_off() -> None:
    errors: dict[str, list[float]] = {"one": [], "all": []}
    for line in lines_of("benchmarks/results/format_fidelity.jsonl"):
        if line["kind"] == "format" and ":adamw:" in line["case"]:
            truth = np.sqrt(np.square(line["layer"]["truth"]).mean(0))
            for scope, estimate in zip(errors, line["layer"]["estimate"], strict=True):
                errors[scope].append(100 * float(np.median(np.abs(np.array(estimate) / truth - 1))))
    *most, last = sorted(errors["all"])
    assert f"({len(errors['all'])} cells" in text_of("README.md")
    assert f"median error {most[0]:.1f} to {most[-1]:.1f}% (one cell {last:.1f}%)" in text_of("README.md")
    assert f"{min(errors['one']):.1f} to {max(errors['one']):.0f}%" in text_of("README.md")


def test_the_table_of_workflow_steps_is_that_of_its_lines() -> None:
    lines = lines_of("benchmarks/results/refresh_steps.jsonl")
    assert refresh_steps.report(lines) in (ROOT / "docs" / "fidelity.md").read_text(encoding="utf-8")
    text, (small, large) = text_of("docs/fidelity.md"), (line for line in lines if line["step_peak_mib"])
    steps = [one["refresh"] / one["step"] for one in (small, large)]
    assert f"waits for {steps[0]:.1f} of its own steps at 124M and for {steps[1]:.1f} at 1.1B" in text
    assert f"take {small['passes'] + small['sums']:.2f} and {large['passes'] + large['sums']:.2f} s" in text
    peaks = [one["refresh_peak_mib"] / one["step_peak_mib"] for one in (small, large)]
    assert f"at {peaks[0]:.2f} and {peaks[1]:.2f} of it" in text
    assert (
        f"peak of {large['refresh_peak_mib'] / 1024:.1f} GiB was below a step's {large['step_peak_mib'] / 1024:.1f}"
        in text
    )


def test_the_table_of_weight_gradients_is_that_of_its_lines() -> None:
    lines = lines_of("benchmarks/results/weight_gradients_small.jsonl")
    assert weight_gradients.report(lines) in (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_table_of_single_layers_is_that_of_its_lines() -> None:
    _, table = truth_at_size.report(lines_of("benchmarks/results/truth_at_size_tiny.jsonl")).split("\n\n")
    assert table in (ROOT / "docs" / "fidelity.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["docs/results-criteria.md", "docs/choosing.md"])
@pytest.mark.parametrize("steps", [100, 1000])
def test_backward_first_is_as_far_from_snip_by_gemm_as_the_forks_say(page: str, steps: int) -> None:
    assert apart(f"backward-first {GEMM_90}", f"snip {GEMM_90}", steps) in text_of(page)


def test_how_far_plans_are_from_snip_and_from_all_fp4_in_the_forks() -> None:
    text = text_of(CRITERIA_PAGE)
    for one in ("random", "snip-paper", "layer-type", "kl", "min-rel-err"):
        assert apart(f"{one} {LAYER_75}", f"snip {LAYER_75}") in text
    for where in (GEMM_75, GEMM_90, GEMM_95):
        assert apart(f"random {where}", f"snip {where}").removeprefix("+") in text
        assert apart(f"snip {where}", "fp4") in text
    for where in (GEMM_90, GEMM_95, LAYER_75):
        assert apart(f"snip {where}", "fp4").removeprefix("-") in text
    assert f"by {apart(f'snip {GEMM_90}', 'fp4', 1000).removeprefix('-')} after 1,000 steps" in text
    for one in (f"random {GEMM_90}", f"snip-paper {LAYER_75}"):
        assert f"{apart(one, 'fp4')}, detectable" in text


@pytest.mark.parametrize("page", ["docs/fidelity.md", "docs/limitations.md"])
@pytest.mark.parametrize("where", [LAYER_50, LAYER_75])
def test_the_paper_s_estimator_is_as_far_above_snip_in_the_forks_as_the_pages_say(page: str, where: str) -> None:
    assert apart(f"snip-paper {where}", f"snip {where}").removeprefix("+") in text_of(page)


@pytest.mark.parametrize("page", ["docs/results-criteria.md", "docs/choosing.md"])
def test_what_low_precision_costs_in_the_forks_of_criteria(page: str) -> None:
    for steps in (100, 1000):
        for one in ("fp4", f"snip {GEMM_90}"):
            assert apart(one, "bf16", steps).removeprefix("+") in text_of(page)


@pytest.mark.parametrize("page", ["docs/results-criteria.md", "docs/choosing.md", "docs/faq.md"])
def test_backward_first_is_as_far_from_snip_by_gemm_at_75_as_the_forks_say(page: str) -> None:
    assert apart(f"backward-first {GEMM_75}", f"snip {GEMM_75}") in text_of(page)


def test_how_far_plans_by_layer_are_from_all_mxfp4() -> None:
    for one in (f"snip {LAYER_50}", f"snip {LAYER_90}", f"random {LAYER_50}", f"random {LAYER_90}"):
        assert apart(one, "mxfp4").removeprefix("-") in text_of(CRITERIA_PAGE)


def test_what_snip_and_fp8_cost_against_bf16_in_the_forks() -> None:
    text = text_of(CRITERIA_PAGE)
    for steps in (100, 1000):
        assert f"{apart('fp8', 'bf16', steps)}%" in text
    assert f"{apart(f'snip {GEMM_75}', 'bf16')}% in {difference(f'snip {GEMM_75}', 'bf16').forks} forks" in text
    for where in (GEMM_95, LAYER_75):
        assert f"{apart(f'snip {where}', 'bf16').removeprefix('+')}%" in text
    for steps in (100, 1000):
        of = criteria(steps)
        starts = [
            str(
                difference_of(
                    [line for line in of["fp4"] if line["fork"]["point"] == point], of["bf16"], "held_out_plan"
                )
            )
            for point in (300, 900, 1500)
        ]
        first, middle, last = (start.removeprefix("+") for start in starts)
        assert f"{first}, {middle} and {last}" in text or f"{first}, {middle}, {last}" in text


def test_how_far_shares_of_snip_are_apart() -> None:
    text = text_of(CRITERIA_PAGE)
    assert f"by {apart(f'snip {GEMM_90}', f'snip {GEMM_95}').removeprefix('-')}" in text
    assert apart(f"snip {GEMM_90}", f"snip {LAYER_75}") in text
    gemm, layer = (apart(f"snip {GEMM_75}", f"snip {where}").removeprefix("-") for where in (GEMM_90, LAYER_75))
    assert f"{gemm} below 90% by GEMM and {layer} below 75% by layer, in 18 forks" in text
    assert difference(f"snip {GEMM_75}", f"snip {GEMM_90}").forks == 18


def test_the_third_run_has_its_bases_once_and_ran_in_two_calls() -> None:
    lines = from_run_3()
    assert len(lines) == 990 and {line["commit"] for line in lines} == {"6237e0a"}
    assert len({line["contender"] for line in lines}) == 55
    states: dict[tuple[int, int], set[str]] = {}
    for line in lines:
        states.setdefault((line["fork"]["base_seed"], line["fork"]["point"]), set()).add(line["state"])
    assert {seed for seed, _ in states} == set(range(3, 9)) and all(len(found) == 1 for found in states.values())
    # The first call had four processes per GPU, the second three: both have lines of bases 3 to 5.
    assert {line["processes_per_device"] for line in lines if line["fork"]["base_seed"] < 6} == {3, 4}


def test_the_page_says_how_many_lines_each_run_has() -> None:
    text = text_of(CRITERIA_PAGE)
    commits = [line["commit"] for line in read_forks([CRITERIA])]
    for run, commit, bases in (
        (1, "49363c4", "0 to 2"),
        (2, "9c8e0a5", "0 to 2, trained again"),
        (3, "6237e0a", "3 to 8"),
    ):
        assert f"| {run} | {commits.count(commit)} | {bases}" in text
    assert len(set(commits)) == 3


@pytest.mark.parametrize("where", [GEMM_75, GEMM_90])
def test_the_readme_says_how_far_random_plans_by_gemm_are_from_snip_s(where: str) -> None:
    assert apart(f"random {where}", f"snip {where}").removeprefix("+") in text_of("README.md")


@pytest.mark.parametrize("share", [50, 75, 90])
def test_layer_position_and_random_are_as_far_from_snip_by_layer_as_the_pages_say(share: int) -> None:
    where = f"{{fp4, fp8}}, {share}% by layer"
    assert apart(f"random {where}", f"snip {where}") in text_of("docs/results-criteria.md")
    for page in ("docs/results-criteria.md", "docs/choosing.md"):
        assert apart(f"layer-position {where}", f"snip {where}") in text_of(page)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["hessian-trace", "greedy", "fisher", "min-abs-err", "backward-first"])
def test_criteria_are_as_far_from_snip_by_gemm_as_the_page_says(policy: str) -> None:
    label = f"`{policy}`" + (", 8 probes" if policy == "hessian-trace" else "")
    cells = [cell(against_snip(family)[policy]) for family in ("gemm-75", "gemm-90", "gemm-95")]
    assert f"| {label} | {' | '.join(cells)} |" in text_of(CRITERIA_PAGE)


@cache
def of_family(family: str, steps: int = 100, outcome: str = "held_out_plan") -> list[fork_tables.Tested]:
    """The tests of a family of comparisons."""
    pairs = load_recipe(ROOT / "recipes" / "forks-criteria.yaml").comparisons[family]
    lines = [line for own in criteria(steps).values() for line in own]
    return [test for test in fork_tables.tests_of(lines, pairs, outcome) if test.p_holm is not None]


def against_snip(family: str) -> dict[str, fork_tables.Tested]:
    """Policy -> its test against SNIP after 100 steps."""
    return {test.one.split()[0]: test for test in of_family(family)}


def significant(family: str, outcome: str = "held_out_plan") -> set[str]:
    """The policies of a family of comparisons after 100 steps that differ significantly after Holm's correction."""
    found = of_family(family, outcome=outcome)
    return {f"{test.one.split()[0]} {test.reading}" for test in found if test.reading in ("higher", "lower")}


def higher(*policies: str) -> set[str]:
    return {f"{policy} higher" for policy in policies}


def cell(test: fork_tables.Tested) -> str:
    """The difference, bold if it is significant, and else with the detectable one."""
    if test.reading != fork_tables.NOT_SIGNIFICANT:
        return f"**{test.main}**"
    return f"{test.main} ({test.main.detectable(test.level):.3f})"


MAIN = ("gemm-75", "gemm-90", "gemm-95", "layer-75")
RULES = ("layer-type", "layer-position", "first2-last8", "last-15-percent")
BY_GEMM = higher("kl", "min-rel-err", "random", *RULES)
BY_LAYER = higher("snip-paper", "kl", "min-rel-err", "layer-type")


@pytest.mark.slow
def test_the_pages_name_the_contenders_that_differ_significantly_from_snip() -> None:
    assert significant("gemm-75") == BY_GEMM | higher("min-abs-err")
    assert significant("gemm-90") == BY_GEMM | {"greedy lower"}
    assert significant("gemm-95") == BY_GEMM
    assert significant("layer-75") == BY_LAYER
    assert significant("layer-50") == higher("snip-paper")
    assert not significant("layer-90")
    assert significant("forward-50") == {"greedy lower"}
    assert significant("forward-80") == higher("random")
    assert not significant("forms-gemm-90") | significant("forms-layer-75") | significant("other-formats")


@pytest.mark.slow
def test_other_losses_find_the_differences_that_the_page_names() -> None:
    averaged, training, bf16 = "held_out_averaged", "train", "held_out_high_precision"
    lower = {"greedy lower", "backward-first lower"}
    assert significant("gemm-75", averaged) == BY_GEMM | higher("min-abs-err")
    assert significant("gemm-75", training) == BY_GEMM | higher("min-abs-err", "hessian-trace")
    assert significant("gemm-90", averaged) == BY_GEMM | lower
    assert significant("gemm-90", training) == BY_GEMM | higher("min-abs-err") | lower
    assert significant("gemm-95", averaged) == BY_GEMM
    assert significant("gemm-95", training) == BY_GEMM | {"greedy lower"}
    assert significant("layer-75", training) == BY_LAYER | higher("random") | {"greedy lower", "layer-position lower"}
    for family in ("gemm-75", "gemm-90", "gemm-95", "layer-75"):
        assert not [reading for reading in significant(family, bf16) if reading.endswith("lower")]
    for policy in ("greedy", "backward-first"):
        found = [str(difference(f"{policy} {GEMM_90}", f"snip {GEMM_90}", loss=loss)) for loss in (averaged, training)]
        assert f"`{policy}` ({', '.join(found)})" in text_of(CRITERIA_PAGE)


@pytest.mark.slow
def test_so_many_tests_of_the_forks_find_a_significant_difference_to_snip() -> None:
    families = (*MAIN, "layer-50", "layer-90", "forward-50", "forward-80", "other-formats")
    found = [test for family in families for test in of_family(family)]
    found += [test for family in ("gemm-90", "layer-75") for test in of_family(family, 1000)]
    readings = [test.reading for test in found]
    plans = {
        tuple(sorted((str(line["fork"]), line["state"], line["plan"]) for line in criteria(100)[test.one]))
        for test in found
        if test.reading == "higher"
    }
    text = text_of(CRITERIA_PAGE)
    # last-15-percent by GEMM at 95% has a fork less than the plan's other names.
    last = {
        test.one for test in found if test.reading == "higher" and "last-15-percent" in test.one and "95%" in test.one
    }
    assert len(last) == 1
    assert f"Of {len(readings)} tests of other policies against SNIP" in text
    assert (
        f"SNIP is significantly lower in {readings.count('higher')} and significantly higher in two (`greedy`)" in text
    )
    assert [test.one.split()[0] for test in found if test.reading == "lower"] == ["greedy", "greedy"]
    assert f"Each plan counted once, {len(plans) - len(last)} are left." in text


@pytest.mark.slow
def test_so_many_tests_of_the_forks_would_find_differences_of_a_tenth_and_of_half_of_it() -> None:
    def finds(found: list[fork_tables.Tested], effect: float = 0.1) -> tuple[int, int]:
        return sum((test.main.detectable(test.level) or 0) < effect for test in found), len(found)

    main = [test for family in MAIN for test in of_family(family)]
    detectable = [test.main.detectable(test.level) or 0 for test in main]
    text = text_of(CRITERIA_PAGE)
    assert finds(main) == (len(main), len(main))
    assert f"all {len(main)} tests against SNIP would find a true difference of 0.1% with power 0.8" in text
    assert f"(detectable {min(detectable):.3f} to {max(detectable):.3f}), and {finds(main, 0.05)[0]} would" in text
    layer_50, layer_90, forward_50, forward_80, other = (
        finds(of_family(family)) for family in ("layer-50", "layer-90", "forward-50", "forward-80", "other-formats")
    )
    long = [test for family in ("gemm-90", "layer-75") for test in of_family(family, 1000)]
    assert f"{layer_50[0]} of {layer_50[1]} tests by layer at 50% and {layer_90[0]} of {layer_90[1]} at 90%" in text
    assert f"{forward_50[0]} of {forward_50[1]} and {forward_80[0]} of {forward_80[1]} over the forward GEMMs" in text
    assert (
        f"{other[0]} of {other[1]} with other formats, {finds(long)[0]} of {finds(long)[1]} after 1,000 steps" in text
    )
    rules = [against_snip(family)["backward-first"] for family in ("gemm-75", "gemm-90", "gemm-95")]
    counts = [rule.main.forks_for(0.02, rule.level) for rule in rules]
    assert f"takes {counts[0]}, {counts[1]} and {counts[2]} forks at 75, 90 and 95%" in text


@pytest.mark.slow
def test_the_intervals_of_backward_first_end_where_the_page_says() -> None:
    found = [difference(f"backward-first {where}", f"snip {where}") for where in (GEMM_75, GEMM_90, GEMM_95)]
    ends = [f"{one.mean + one.half_width:+.3f}" for one in found]
    assert f"The intervals end at {ends[0]}, {ends[1]} and {ends[2]} after 100 steps" in text_of(CRITERIA_PAGE)


def test_pages_have_the_figures_of_greedy_of_rules_and_of_the_default_s_share() -> None:
    greedy = against_snip("gemm-90")["greedy"]
    assert greedy.reading == "lower"
    for page in ("README.md", "docs/choosing.md"):
        assert f"had ended {greedy.main}".replace("-", "") in text_of(page)
    rule = against_snip("gemm-75")["backward-first"]
    quoted = f"{rule.main} points after 100 steps (detectable {rule.main.detectable(rule.level):.3f})"
    assert quoted in text_of("README.md")
    kind = against_snip("layer-75")["layer-type"]
    assert kind.reading == "higher" and f"by {kind.main}".replace("+", "") in text_of("docs/faq.md")
    position = against_snip("gemm-75")["layer-position"]
    assert f"{position.main} above SNIP's by GEMM".removeprefix("+") in text_of(CRITERIA_PAGE)
    by_gemm, by_layer = (criteria(100)[f"layer-position {where}"] for where in (GEMM_75, LAYER_75))
    own = [{fork_key(line): line["loss"] for line in lines if line in from_run_3()} for lines in (by_gemm, by_layer)]
    assert own[0] == own[1] and len(own[0]) == 18


def test_forks_of_one_plan_under_several_names_have_the_same_losses() -> None:
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in from_run_3():
        if line["plan"] is not None:
            groups.setdefault((*fork_key(line), line["plan"], tuple(line["shares"])), []).append(line)
    several = [lines for lines in groups.values() if len(lines) > 1]
    assert f"{len(several)} groups of forks have one plan under several names" in text_of("docs/log.md")
    assert all(line["loss"] == lines[0]["loss"] for lines in several for line in lines)


@pytest.mark.slow
def test_greedy_at_90_is_not_significant_in_the_third_run_alone() -> None:
    pairs = load_recipe(ROOT / "recipes" / "forks-criteria.yaml").comparisons["gemm-90"]
    alone = {test.one.split()[0]: test for test in fork_tables.tests_of(from_run_3(), pairs)}["greedy"]
    p_90, p_95 = (against_snip(family)["greedy"].p_holm for family in ("gemm-90", "gemm-95"))
    text = text_of(CRITERIA_PAGE)
    assert alone.reading == fork_tables.NOT_SIGNIFICANT and alone.main.forks == 18
    assert f"({alone.main}, corrected p = {alone.p_holm:.3f})" in text
    assert f"`greedy` at 90% has a corrected p of {p_90:.3f}, at 95% of {p_95:.3f}" in text


@pytest.mark.parametrize("share", [90, 95])
def test_greedy_s_difference_grows_with_the_step_at_which_the_fork_starts(share: int) -> None:
    of, text = criteria(100), text_of("docs/results-criteria.md")
    greedy, snip = (of[f"{policy} {{fp4, fp8}}, {share}% by gemm"] for policy in ("greedy", "snip"))
    found = [
        difference_of([line for line in greedy if line["fork"]["point"] == point], snip, "held_out_plan")
        for point in (300, 900, 1500)
    ]
    assert [one.forks for one in found] == [9, 9, 9]
    assert found[0].mean > found[1].mean > found[2].mean
    assert f"at {share}% {found[0]}, {found[1]} and {found[2]}" in text


@pytest.mark.slow
def test_rules_are_as_far_from_random_plans_as_the_page_says() -> None:
    found = of_family("rules-and-random")
    lower = {test.one for test in found if test.reading == "lower"}
    assert lower == {f"backward-first {where}" for where in (GEMM_75, GEMM_90, GEMM_95)} | {
        f"layer-position {LAYER_75}"
    }
    text = text_of(CRITERIA_PAGE)
    for test in found:
        if test.one in lower or test.one in (f"layer-position {LAYER_50}", f"layer-position {LAYER_90}"):
            assert str(test.main) in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("label", "where", "family", "rule", "run"),
    [
        ("by layer, 50%", LAYER_50, "layer-50", "first2-last8", "2"),
        ("by layer, 75%", LAYER_75, "layer-75", "layer-position", "1, 3"),
        ("by layer, 90%", LAYER_90, "layer-90", "layer-position", "2"),
        ("by GEMM, 75%", GEMM_75, "gemm-75", "backward-first", "2, 3"),
        ("by GEMM, 90%", GEMM_90, "gemm-90", "backward-first", "1, 3"),
        ("by GEMM, 95%", GEMM_95, "gemm-95", "backward-first", "1, 3"),
        ("forward GEMMs, 50%", "{fp4, fp8}, 50% by gemm, decides forward", "forward-50", "layer-position", "1"),
        ("forward GEMMs, 80%", "{fp4, fp8}, 80% by gemm, decides forward", "forward-80", "layer-position", "1"),
    ],
)
def test_the_table_of_shares_is_that_of_the_forks(label: str, where: str, family: str, rule: str, run: str) -> None:
    of = against_snip(family)
    cost, four_bits = ("not run", apart(f"snip {where}", "mxfp4"))
    if run != "2":
        cost, four_bits = apart(f"snip {where}", "bf16"), apart(f"snip {where}", "fp4")
    forks = of["random"].main.forks
    assert forks == of[rule].main.forks
    row = f"| {label} | {run} | {forks} | {cost} | {four_bits} | {cell(of['random'])} | `{rule}` {cell(of[rule])} |"
    assert row in text_of(CRITERIA_PAGE)
    rules = {"backward-first", *RULES} & of.keys()
    assert rule == min(rules, key=lambda policy: of[policy].main.mean)


@pytest.mark.slow
def test_the_tables_of_criteria_are_those_of_the_lines(tmp_path: Path) -> None:
    recipe, page = ROOT / "recipes" / "forks-criteria.yaml", "docs/results-criteria.md"
    copy = Path(shutil.copy(ROOT / page, tmp_path))
    command = (
        "python -m eval.bakeoff.forks report eval/results/forks-criteria.jsonl --recipe recipes/forks-criteria.yaml "
        "--output eval/results/forks-criteria.md --docs docs/results-criteria.md"
    )
    asked = Asked.by(load_recipe(recipe), recipe, command=command)
    text = write_report([CRITERIA], None, asked, [copy])
    assert copy.read_text(encoding="utf-8") == (ROOT / page).read_text(encoding="utf-8")
    assert text == (ROOT / "eval" / "results" / "forks-criteria.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["docs/config.md", "docs/choosing.md", "CHANGELOG.md"])
def test_by_layer_is_as_far_above_by_gemm_in_long_forks_as_the_pages_say(page: str) -> None:
    lines = read_forks([ROOT / "eval" / "results" / "forks-longer.jsonl"])
    text = text_of(page)
    for steps in (700, 1400, 2100, 2700):
        found = by_contender(line for line in lines if line["steps"] == steps)
        for form in ("", ", loss_estimator saliency"):
            unit = "snip {{fp4, fp8}}, 75% by {}, refresh_every 250{}"
            layer, gemm = (found[unit.format(where, form)] for where in ("layer", "gemm"))
            difference = difference_of(layer, gemm, "held_out_plan")
            assert difference.forks == 8
            is_significant = difference.mean > difference.half_width
            assert is_significant == (steps > 700 or bool(form))
            is_quoted = (page == "docs/choosing.md" and steps == 2700) if form else is_significant
            if is_quoted or page == "docs/config.md":
                assert f"{difference.mean:.2f} ± {difference.half_width:.2f}%" in text
