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
from eval.bakeoff.fork_lines import by_contender, difference_of, read_forks
from eval.bakeoff.fork_recipe import load_recipe
from eval.bakeoff.fork_report import Asked, write_report
from eval.bakeoff.fork_statistics import Difference

# (model, share, seed) -> gap to BF16 of the same seed, in percent
Gaps = dict[tuple[str, float | None, int], float]
# What a run of SNIP has in the main comparison; other runs vary one of these.
USUAL = {"start_step": 0, "objective": "additive", "loss_weight": 1.0, "weight_weight": 1.0, "switching_cost": 0.0}
REFRESHED = 250
CRITERIA = ROOT / "eval" / "results" / "forks-criteria.jsonl"
GEMM_75, GEMM_90, LAYER_75 = "{fp4, fp8}, 75% by gemm", "{fp4, fp8}, 90% by gemm", "{fp4, fp8}, 75% by layer"


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


def apart(one: str, other: str, steps: int = 100) -> str:
    """Mean and interval of the held-out loss of one contender less that of another, as the report writes them."""
    return str(difference_of(criteria(steps)[one], criteria(steps)[other], "held_out_plan"))


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
    text = text_of("docs/results-criteria.md")
    for one in ("random", "snip-paper"):
        assert apart(f"{one} {LAYER_75}", f"snip {LAYER_75}") in text
    assert apart(f"random {GEMM_90}", f"snip {GEMM_90}").removeprefix("+") in text
    for steps in (100, 1000):
        assert apart(f"snip {GEMM_90}", "fp4", steps).removeprefix("-") in text


@pytest.mark.parametrize("page", ["docs/results-criteria.md", "docs/choosing.md"])
def test_what_low_precision_costs_in_the_forks_of_criteria(page: str) -> None:
    for steps in (100, 1000):
        for one in ("fp4", f"snip {GEMM_90}"):
            assert apart(one, "bf16", steps).removeprefix("+") in text_of(page)


@pytest.mark.parametrize("page", ["docs/results-criteria.md", "docs/choosing.md", "docs/faq.md"])
def test_backward_first_is_as_far_from_snip_by_gemm_at_75_as_the_forks_say(page: str) -> None:
    assert apart(f"backward-first {GEMM_75}", f"snip {GEMM_75}") in text_of(page)


def test_how_far_plans_by_gemm_at_75_are_from_snip_and_from_all_mxfp4() -> None:
    text = text_of("docs/results-criteria.md")
    assert apart(f"random {GEMM_75}", f"snip {GEMM_75}").removeprefix("+") in text
    assert apart(f"snip {GEMM_75}", "mxfp4").removeprefix("-") in text


@pytest.mark.parametrize("where", [GEMM_75, GEMM_90])
def test_the_readme_says_how_far_random_plans_by_gemm_are_from_snip_s(where: str) -> None:
    assert apart(f"random {where}", f"snip {where}").removeprefix("+") in text_of("README.md")


@pytest.mark.parametrize("share", [50, 75, 90])
def test_layer_position_and_random_are_as_far_from_snip_by_layer_as_the_pages_say(share: int) -> None:
    where = f"{{fp4, fp8}}, {share}% by layer"
    assert apart(f"random {where}", f"snip {where}") in text_of("docs/results-criteria.md")
    for page in ("docs/results-criteria.md", "docs/choosing.md"):
        assert apart(f"layer-position {where}", f"snip {where}") in text_of(page)


@pytest.mark.parametrize("policy", ["hessian-trace", "greedy", "fisher", "min-abs-err", "first2-last8", "min-rel-err"])
def test_criteria_are_as_far_from_snip_by_gemm_as_the_page_says(policy: str) -> None:
    name = f"{policy} {GEMM_90}" + (", probes 8" if policy == "hessian-trace" else "")
    assert apart(name, f"snip {GEMM_90}") in text_of("docs/results-criteria.md")


def significant(family: str) -> set[str]:
    """The policies of a family of comparisons after 100 steps that differ significantly after Holm's correction."""
    pairs = load_recipe(ROOT / "recipes" / "forks-criteria.yaml").comparisons[family]
    lines = [line for own in criteria(100).values() for line in own]
    found = fork_tables.tests_of(lines, pairs)
    return {f"{test.one.split()[0]} {test.reading}" for test in found if test.reading in ("higher", "lower")}


@pytest.mark.slow
def test_the_pages_name_the_contenders_that_differ_significantly_from_snip() -> None:
    higher = {"random", "layer-type", "kl", "layer-position", "last-15-percent"}
    assert significant("gemm-90") == {f"{name} higher" for name in higher}
    assert significant("gemm-95") == {"kl higher", "random higher"}
    assert significant("gemm-75") == {f"{name} higher" for name in ("random", "layer-type", "min-rel-err")}
    assert significant("layer-75") == significant("layer-50") == {"snip-paper higher"}
    assert not significant("layer-90")
    assert significant("forward-50") == {"greedy lower"}
    assert significant("forward-80") == {"random higher"}
    assert not significant("forms-gemm-90") | significant("forms-layer-75") | significant("other-formats")


@pytest.mark.slow
def test_so_many_tests_of_the_forks_find_a_significant_difference_to_snip() -> None:
    families = ("gemm-75", "gemm-90", "gemm-95", "layer-50", "layer-75", "layer-90", "forward-50", "forward-80")
    after = {100: (*families, "other-formats"), 1000: ("gemm-90", "layer-75")}
    comparisons = load_recipe(ROOT / "recipes" / "forks-criteria.yaml").comparisons
    readings = []
    for steps, names in after.items():
        lines = [line for own in criteria(steps).values() for line in own]
        for found in (fork_tables.tests_of(lines, comparisons[name]) for name in names):
            readings += [test.reading for test in found if test.p_holm is not None]
    counts = len(readings), readings.count("higher"), readings.count("lower")
    assert counts == (92, 13, 1)
    assert "Of 92 tests of other policies against SNIP" in text_of("docs/results-criteria.md")
    assert "SNIP is significantly lower in 13 and significantly higher in one" in text_of("docs/results-criteria.md")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("label", "where", "family", "rule", "run"),
    [
        ("by layer, 50%", "50% by layer", "layer-50", "first2-last8", 2),
        ("by layer, 75%", "75% by layer", "layer-75", "layer-position", 1),
        ("by layer, 90%", "90% by layer", "layer-90", "layer-position", 2),
        ("by GEMM, 75%", "75% by gemm", "gemm-75", "backward-first", 2),
        ("by GEMM, 90%", "90% by gemm", "gemm-90", "backward-first", 1),
        ("by GEMM, 95%", "95% by gemm", "gemm-95", "backward-first", 1),
        ("forward GEMMs, 50%", "50% by gemm, decides forward", "forward-50", "layer-position", 1),
        ("forward GEMMs, 80%", "80% by gemm, decides forward", "forward-80", "layer-position", 1),
    ],
)
def test_the_table_of_shares_is_that_of_the_forks(label: str, where: str, family: str, rule: str, run: int) -> None:
    pairs = load_recipe(ROOT / "recipes" / "forks-criteria.yaml").comparisons[family]
    found = fork_tables.tests_of([line for own in criteria(100).values() for line in own], pairs)
    of = {test.one.split()[0]: test for test in found if test.main.forks}
    cells = []
    for policy in ("random", rule):
        is_significant = of[policy].reading != fork_tables.NOT_SIGNIFICANT
        detectable = of[policy].main.detectable(of[policy].level)
        cells.append(f"**{of[policy].main}**" if is_significant else f"{of[policy].main} ({detectable:.3f})")
    snip = f"snip {{fp4, fp8}}, {where}"
    cost, four_bits = (apart(snip, "bf16"), apart(snip, "fp4")) if run == 1 else ("not run", apart(snip, "mxfp4"))
    row = f"| {label} | {run} | {cost} | {four_bits} | {cells[0]} | `{rule}` {cells[1]} |"
    assert row in text_of("docs/results-criteria.md")
    rules = {"backward-first", "layer-position", "layer-type", "first2-last8", "last-15-percent"} & of.keys()
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
        layer, gemm = (found[f"snip {{fp4, fp8}}, 75% by {unit}, refresh_every 250"] for unit in ("layer", "gemm"))
        difference = difference_of(layer, gemm, "held_out_plan")
        assert difference.forks == (6 if steps == 2700 else 8)
        is_significant = difference.mean > difference.half_width
        assert is_significant == (steps > 700)
        if is_significant or page == "docs/config.md":
            assert f"{difference.mean:.2f} ± {difference.half_width:.2f}%" in text
