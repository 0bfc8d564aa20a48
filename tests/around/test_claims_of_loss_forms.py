"""Figures that pages quote of forks with other forms of SNIP's loss divergence are those of the committed lines."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

import pytest
from committed import RESULTS, averaged, check_report, difference_among, recipe_of, text_of

from eval.bakeoff import fork_tables
from eval.bakeoff.fork_cells import Fork
from eval.bakeoff.fork_lines import by_contender, fork_key, read_forks
from eval.bakeoff.fork_recipe import load_recipe
from eval.bakeoff.fork_statistics import Difference, holm
from eval.bakeoff.trial_policies import TRIALS
from snip_hf.config import LossEstimator, SnipConfig
from snip_hf.numerics.gemms import GEMMS

FORMS, CONTRASTS, CRITERIA = "loss-forms", "contrasts", "criteria"
PAGE, CRITERIA_PAGE = "docs/results-loss-forms.md", "docs/results-criteria.md"
# Family -> where its plans spend 4 bits, in the order of the page's columns.
SETTINGS = {"at-75": "75% by gemm", "at-90": "90% by gemm", "at-95": "95% by gemm", "layer-75": "75% by layer"}
ALL_TOKENS = ", probe_tokens None, probe_batch_tokens None"
WEIGHTS, BOTH, ERRORS = "snip-weight-magnitudes", "snip-magnitudes", "snip-weight-errors"
LABELS = {name: f"`{name}`" for name in ("greedy", WEIGHTS, BOTH, ERRORS)} | {
    "snip": "`probe_tokens=None`, `probe_batch_tokens=None`"
}


@cache
def lines(*names: str) -> list[dict[str, Any]]:
    return read_forks([RESULTS / f"forks-{name}.jsonl" for name in names])


def compared(name: str, family: str, steps: int = 100) -> dict[str, fork_tables.Tested]:
    pairs_of = load_recipe(recipe_of(name)).comparisons_after(steps)[family]
    own = [line for line in lines(name) if line["steps"] == steps]
    return {test.one: test for test in fork_tables.tests_of(own, pairs_of)}


def contender(policy: str, setting: str) -> str:
    return f"{policy} {{fp4, fp8}}, {setting}"


def between(one: str, other: str, setting: str, *names: str, point: int | None = None) -> Difference:
    """The difference of two policies after 100 steps in one setting, of the lines of these recipes."""
    own = (line for line in lines(*(names or (FORMS,))) if line["steps"] == 100)
    names_of = [policy if policy == "bf16" else contender(policy, setting) for policy in (one, other)]
    return difference_among(own, *names_of, point=point)


def over_settings(one: str, other: str) -> Difference:
    of = by_contender(lines(FORMS))
    return averaged((of[contender(one, setting)], of[contender(other, setting)]) for setting in SETTINGS.values())


def test_in_bf16_the_same_weights_are_not_lower() -> None:
    text, order = text_of(PAGE), ("at-90", "at-95", "at-75", "layer-75")
    for policy in ("greedy", WEIGHTS):
        tests = [compared(FORMS, family)[contender(policy, SETTINGS[family])] for family in order]
        own = [test.found["held_out_high_precision"] for test in tests]
        assert not any(one.p is not None and one.p < 0.05 and one.mean < 0 for one in own)
        told = (
            "{}, {} and {} by GEMM at 90, 95 and 75% and at {} by layer" if policy == "greedy" else "{}, {}, {} and {}"
        )
        assert f"`{policy}` at {told.format(*own)}" in text.replace("`greedy` is at", "`greedy` at")


@pytest.mark.parametrize("policy", [*LABELS])
def test_the_table_of_forms_has_the_differences_of_the_lines(policy: str) -> None:
    cells, forks = [], []
    for family, setting in SETTINGS.items():
        found = compared(FORMS, family).get(contender(policy, setting) + (ALL_TOKENS if policy == "snip" else ""))
        if found is None:
            assert (policy, family) == ("snip", "layer-75")
            cells.append("not run")
            continue
        figure = str(found.main) if found.reading == fork_tables.NOT_SIGNIFICANT else f"**{found.main}**"
        cells.append(f"{figure} ({found.main.detectable(found.level):.3f})")
        forks.append(found.main.forks)
    assert f"| {LABELS[policy]} | {' | '.join(cells)} |" in text_of(PAGE)
    assert forks == {BOTH: [24, 27, 26, 27], "snip": [27, 27, 22]}.get(policy, [27] * 4)
    assert "24 and 26 for `snip-magnitudes` at 75 and 95% and 22 for all tokens at 95%" in text_of(PAGE)


def test_greedy_at_90_is_the_only_significant_difference() -> None:
    found = {(family, one): test for family in SETTINGS for one, test in compared(FORMS, family).items()}
    readings = {key: test.reading for key, test in found.items() if test.reading != fork_tables.NOT_SIGNIFICANT}
    assert readings == {("at-90", contender("greedy", "90% by gemm")): "lower"}
    greedy = {family: found[family, contender("greedy", setting)] for family, setting in SETTINGS.items()}
    at_90, at_95, layer = greedy["at-90"], greedy["at-95"], greedy["layer-75"]
    text = text_of(PAGE)
    assert f"repeats: {at_90.main}, with a corrected p of {at_90.p_holm:.3f}" in text
    assert f"At 95% (p = {at_95.main.p:.3f}, {at_95.p_holm:.3f} after Holm's correction)" in text
    assert f"by layer at 75% (p = {layer.main.p:.3f}, {layer.p_holm:.3f} after it)" in text
    assert f"of the first nine bases, {between('greedy', 'snip', '90% by gemm', CRITERIA)}, repeats" in text
    assert (
        f"(-0.028 ± 0.019), [again](results-loss-forms.md) on nine bases that no choice was made on ({at_90.main})"
        in (text_of(CRITERIA_PAGE))
    )
    assert f"the nine other bases `greedy` is at {greedy['at-75'].main}" in text_of(CRITERIA_PAGE)
    smallest = [found["at-75", one].main.detectable(found["at-75", one].level) for one in compared(FORMS, "at-75")]
    assert f"would have found {min(smallest):.3f} to {max(smallest):.3f} points" in text
    whole = [found[f"at-{share}", contender("snip", f"{share}% by gemm") + ALL_TOKENS].main for share in (75, 90, 95)]
    assert "the differences are {}, {} and {} at 75, 90 and 95%, none significant".format(*whole) in text


def test_readme_and_the_page_on_choosing_have_these_figures() -> None:
    told = f"on nine other bases {compared(FORMS, 'at-90')[contender('greedy', '90% by gemm')].main}".replace("-", "")
    assert f"{told} (both significant)" in text_of("README.md")
    assert f"{told} below (both significant)" in text_of("docs/choosing.md")


def test_over_both_sets_of_bases_greedy_is_as_far_below_snip_as_the_page_says() -> None:
    assert {line["fork"]["base_seed"] for line in lines(FORMS)} == set(range(9, 18))
    found = [
        between("greedy", "snip", SETTINGS[family], CRITERIA, FORMS)
        for family in ("at-90", "at-95", "at-75", "layer-75")
    ]
    assert [one.forks for one in found] == [54] * 4
    text = text_of(PAGE)
    assert "at {}, {} and {} by GEMM at 90, 95 and 75%, and at {} by layer at 75%".format(*found) in text
    ps = holm([one.p for one in found])
    shown = ["< 0.001" if p is not None and p < 0.001 else f"{p:.3f}" for p in ps]
    assert "(p {}, {}, {} and {})".format(*shown) in text and shown[0] == "< 0.001"
    assert [p is not None and p < 0.05 for p in ps] == [True, True, False, True]
    assert "These tests were not planned" in text


def test_greedy_is_furthest_below_snip_where_a_fork_starts_late() -> None:
    text = text_of(PAGE)
    for family in ("at-90", "at-95", "at-75"):
        found = [
            between("greedy", "snip", SETTINGS[family], CRITERIA, FORMS, point=point) for point in (300, 900, 1500)
        ]
        assert [one.forks for one in found] == [18] * 3
        shown = "{}, {} and {}" if family != "at-75" else "({}, {}, {})"
        assert shown.format(*found) in text
    for own in ((CRITERIA,), (FORMS,)):
        for setting in ("90% by gemm", "95% by gemm"):
            of = {point: between("greedy", "snip", setting, *own, point=point).mean for point in (300, 900, 1500)}
            assert min(of, key=lambda point: of[point]) == 1500


def test_snip_with_the_figure_of_greedy_is_level_with_greedy() -> None:
    text = text_of(PAGE)
    at_90, at_95, at_75, layer = (
        between("greedy", WEIGHTS, SETTINGS[family]) for family in ("at-90", "at-95", "at-75", "layer-75")
    )
    assert f"`greedy` less it is {at_90}, {at_95} and {at_75} by GEMM at 90, 95 and 75% and {layer} by layer" in text
    own, greedy = over_settings(WEIGHTS, "snip"), over_settings("greedy", "snip")
    assert own.forks == greedy.forks == 27 and own.p is not None and own.p < 0.001
    below = [str(one).removeprefix("-") for one in (own, greedy)]
    assert f"it is {below[0]} below SNIP (27 forks, p < 0.001), and `greedy` {below[1]} (p = {greedy.p:.3f})" in text
    assert "**This average was not planned**" in text
    both, errors = over_settings(BOTH, "snip"), over_settings(ERRORS, "snip")
    assert both.forks == 24 and f"{both} for `{BOTH}` (24 forks, p = {both.p:.3f})" in text
    assert f"{errors} for `{ERRORS}` (p = {errors.p:.3f})" in text
    apart = [over_settings(WEIGHTS, other) for other in (BOTH, ERRORS)]
    first, second = (f"{str(one).removeprefix('-')} below the {{}} (p = {one.p:.3f})" for one in apart)
    assert f"{first.format('former')} and {second.format('latter')}" in text
    assert "both uncorrected and not planned" in text


def test_snip_and_greedy_cost_against_bf16_what_the_page_says() -> None:
    text = text_of(PAGE)
    for policy, shown in (("snip", "{}, {} and {}%, and by layer at 75% at {}%"), ("greedy", "{}, {}, {} and {}%")):
        found = [between(policy, "bf16", setting) for setting in SETTINGS.values()]
        assert [one.forks for one in found] == [23] * 4
        assert shown.format(*found) in text


def test_the_page_says_how_many_forks_of_which_bases_ran() -> None:
    asked = [one for run in load_recipe(recipe_of(FORMS)).runs("text") for one in run.ids]
    counts = {name: len(own) for name, own in by_contender(lines(FORMS)).items()}
    missing = {name: 27 - count for name, count in counts.items() if count < 27}
    assert missing == {
        "bf16": 4,
        contender("snip", "95% by gemm") + ALL_TOKENS: 5,
        contender(BOTH, "75% by gemm"): 3,
        contender(BOTH, "95% by gemm"): 1,
    }
    assert f"{len(lines(FORMS))} of the {len(asked)} forks ran" in text_of(PAGE) and len(counts) * 27 == len(asked)
    assert f"Of the {len(asked) - len(lines(FORMS))} that are missing five are of all tokens" in text_of(PAGE)
    assert {(line["commit"], line["cuda_graph"]) for line in lines(FORMS)} == {("7fd4429", True)}
    assert f"`forks-loss-forms.jsonl` | {len(lines(FORMS))} of {len(asked)} forks" in text_of("eval/README.md")


def plans(name: str) -> dict[tuple[Any, ...], list[str]]:
    return {
        fork_key(line): [list(line["shares"])[int(digit)] for digit in line["plan"]]
        for line in lines(FORMS)
        if line["contender"] == name
    }


def others(one: str, other: str, setting: str) -> list[int]:
    """In how many GEMMs the plans of two policies differ, fork by fork."""
    theirs = plans(contender(other, setting))
    own = plans(contender(one, setting))
    return [sum(a != b for a, b in zip(plan, theirs[fork], strict=True)) for fork, plan in own.items()]


def test_plans_differ_in_as_many_gemms_as_the_page_says() -> None:
    text = text_of(PAGE)
    policies = ("greedy", WEIGHTS, BOTH, ERRORS)
    at_90 = [fmean(others(one, "snip", "90% by gemm")) for one in policies]
    near = fmean(others(WEIGHTS, "greedy", "90% by gemm"))
    assert f"differ from SNIP's in {at_90[0]:.1f} of 168 GEMMs on average" in text
    assert f"in {at_90[1]:.1f} (and in {near:.1f} from `greedy`'s), of `{BOTH}` in {at_90[2]:.1f} and of" in text
    assert f"`{ERRORS}` in {at_90[3]:.1f}." in text
    at_75 = [others(one, "snip", "75% by gemm") for one in policies]
    assert "it is {:.1f}, {:.1f}, {:.1f} and {:.1f}, and seven plans".format(*map(fmean, at_75)) in text
    assert [own.count(0) for own in at_75] == [7] * 4


@pytest.mark.parametrize("policy", ["snip", "greedy", WEIGHTS, BOTH, ERRORS])
def test_forms_keep_fp8_where_the_page_says(policy: str) -> None:
    own = plans(contender(policy, "90% by gemm"))
    assert len(own) == 27
    for setting in ("75% by gemm", "90% by gemm", "95% by gemm"):
        for plan in plans(contender(policy, setting)).values():
            assert all(GEMMS[place % 3] == "forward" for place, name in enumerate(plan) if name == "fp8")
    # Seven linears of each block, three GEMMs each.
    cells = [
        fmean(sum(plan[block * 21 + linear * 3] == "fp8" for block in range(8)) for plan in own.values())
        for linear in range(7)
    ]
    label = "SNIP" if policy == "snip" else f"`{policy}`"
    assert f"| {label} | {' | '.join(f'{cell:.1f}' for cell in cells)} |" in text_of(PAGE)


def test_the_options_that_the_page_names_are_there() -> None:
    assert set(TRIALS) == {WEIGHTS, BOTH, ERRORS} and {"saliency", "token-fisher"} <= set(get_args(LossEstimator))
    default = SnipConfig()
    assert (default.probe_tokens, default.probe_batch_tokens) == (1024, 4096)
    assert "instead of 1,024 of 4,096" in text_of(PAGE)
    recipe = load_recipe(recipe_of(FORMS))
    assert recipe.base.sequences * recipe.data.sequence_length == 8192


def test_snip_on_the_page_is_the_former_default() -> None:
    contenders = {cell.contender.name: cell.contender for cell in load_recipe(recipe_of(FORMS)).cells}
    fork = Fork(base_seed=9, point=300, data_seed=0)
    config = contenders[contender("snip", "90% by gemm")].config(fork, "emulated")
    assert config.loss_estimator == "token-fisher" != SnipConfig().loss_estimator
    told = '**"SNIP" on this page and in its lines is SNIP with the former default, `loss_estimator="token-fisher"`.**'
    assert told in text_of(PAGE)


@pytest.mark.slow
def test_the_tables_are_those_of_the_lines(tmp_path: Path) -> None:
    check_report(tmp_path, FORMS, page=PAGE)
