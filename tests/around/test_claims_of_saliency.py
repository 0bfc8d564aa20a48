"""What pages say of `loss_estimator="saliency"` as the default is what the committed lines and the rule give."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean

import pytest
from committed import RESULTS, averaged, check_report, detectable_of, recipe_of, row_of, shown, text_of

from eval.bakeoff import fork_tables
from eval.bakeoff.fork_lines import Row, by_contender, difference_of, fork_key, read_forks
from eval.bakeoff.fork_recipe import load_recipe
from eval.bakeoff.fork_statistics import Difference, holm
from snip_hf.config import SnipConfig

PAGE = "docs/results-loss-forms.md"
OWN, AT_124M, BEFORE = ("saliency",), ("saliency-124m", "criteria-124m"), ("loss-forms",)
# In the order of the page's columns.
SETTINGS = ("75% by gemm", "90% by gemm", "95% by gemm", "75% by layer")
POINTS = (300, 900, 1500)
FAMILIES = {
    ("saliency", "snip"): "settings",
    ("greedy", "snip"): "greedy",
    ("greedy", "saliency"): "greedy-to-saliency",
}
LABELS = {"saliency": '"saliency"', "snip": '"token-fisher"', "greedy": "`greedy`"}
PLAN, BF16, AVERAGED, TRAINING = "held_out_plan", "held_out_high_precision", "held_out_averaged", "train"


@cache
def contenders(*names: str) -> dict[str, list[Row]]:
    """The lines of these recipes after 100 steps; after 1,000 those of forks-contrasts.yaml."""
    steps = 1000 if names == ("contrasts",) else 100
    found = read_forks([RESULTS / f"forks-{name}.jsonl" for name in names])
    return by_contender(line for line in found if line["steps"] == steps)


def own_lines(policy: str, setting: str, *names: str) -> list[Row]:
    """The lines of "saliency", "snip" ("token-fisher"), another policy, or "form": "saliency" under both its names."""
    of = contenders(*names)
    if policy == "form":
        return own_lines("snip-weight-magnitudes", setting, *names) + own_lines("saliency", setting, *names)
    name = f"{'snip' if policy == 'saliency' else policy} {{fp4, fp8}}, {setting}"
    return of.get(f"{name}, loss_estimator saliency" if policy == "saliency" else name, [])


def settings_of(one: str, other: str, *names: str) -> list[fork_tables.Tested]:
    """The differences in the four settings, as a family of its own."""
    found = [difference_of(own_lines(one, s, *names), own_lines(other, s, *names), PLAN) for s in SETTINGS]
    ps = holm([difference.p for difference in found])
    level = 0.05 / (len(ps) - ps.count(None))
    return [
        fork_tables.Tested(one, other, {PLAN: difference}, PLAN, p, level)
        for difference, p in zip(found, ps, strict=True)
    ]


def over_settings(
    one: str,
    other: str,
    names: Sequence[str] = OWN,
    *,
    loss: str = PLAN,
    points: Iterable[int] = POINTS,
    less: int = -1,
) -> Difference:
    """As `averaged`; of forks from these points, and of all bases but `less`."""

    def chosen(policy: str, setting: str) -> list[Row]:
        forks = own_lines(policy, setting, *names)
        return [line for line in forks if line["fork"]["point"] in points and line["fork"]["base_seed"] != less]

    return averaged(((chosen(one, setting), chosen(other, setting)) for setting in SETTINGS), loss)


def p_of(difference: Difference) -> float:
    assert difference.p is not None
    return difference.p


def test_the_default_follows_from_the_rule_and_the_lines() -> None:
    mean = over_settings("saliency", "snip")
    above = [test for test in settings_of("saliency", "snip", *OWN) if test.reading == "higher"]
    follows = "saliency" if mean.mean < 0 and p_of(mean) < 0.05 and not above else "token-fisher"
    assert SnipConfig().loss_estimator == follows == "saliency"
    rule = "if this mean is significantly below 0 (5%) and no setting by itself is significantly above 0 (Holm over the"
    assert rule in text_of("docs/log.md")
    told = f"The mean is significantly below 0 (p = {p_of(mean):.3f}), and no setting is above: **by the rule"
    assert f'{told} "saliency" is the default**' in text_of(PAGE)


def test_all_forks_of_the_rule_ran_on_bases_of_their_own() -> None:
    lines = [line for own in contenders(*OWN).values() for line in own]
    asked = [one for run in load_recipe(recipe_of("saliency")).runs("text") for one in run.ids]
    assert len(lines) == len(asked) == 468 and {len(own) for own in contenders(*OWN).values()} == {36}
    assert {line["fork"]["base_seed"] for line in lines} == set(range(18, 30))
    before = [line for own in contenders("criteria", *BEFORE).values() for line in own]
    assert {line["fork"]["base_seed"] for line in before} == set(range(18))
    assert {(line["commit"], line["machine"], line["cuda_graph"]) for line in lines} == {
        ("b76cbd1", "NVIDIA H200", True)
    }
    assert f"All {len(lines)} forks ran, 36 per contender, on two H200 (commit `b76cbd1`" in text_of(PAGE)
    assert f"`forks-saliency.jsonl` | all {len(lines)} forks" in text_of("eval/README.md")


def test_readme_and_the_page_on_choosing_have_the_figures_of_the_rule() -> None:
    mean, (at_75, *_, layer) = over_settings("saliency", "snip"), settings_of("saliency", "snip", *OWN)
    below = [str(one).removeprefix("-") for one in (mean, layer.main)]
    readme, choosing, changes = map(text_of, ("README.md", "docs/choosing.md", "CHANGELOG.md"))
    assert (
        f'{below[0]} points below those by "token-fisher", on average over four settings (p = {p_of(mean):.3f}'
        in readme
    )
    assert f"no difference between the two was seen ({at_75.main} points after 100 steps" in readme
    assert f"its plans end {below[0]} points below those of" in choosing
    assert f"by layer at 75% it is {below[1]} below (corrected p = {layer.p_holm:.3f}, not planned)" in choosing
    assert f"75% by GEMM, no difference was seen ({at_75.main})" in choosing
    assert f"the average is {over_settings('saliency', 'snip', loss=BF16)}." in choosing
    early, late = (over_settings("saliency", "snip", points=[point]) for point in (POINTS[0], POINTS[-1]))
    assert f"late in the schedule the average is {late}, where they start early {early}" in choosing
    assert f"At 124M it is {over_settings('saliency', 'snip', AT_124M)}, not significant" in choosing
    assert f"{below[0]} points lower on average over four settings" in changes and f"75% {below[1]}; at 75%" in changes
    assert not any(test.reading == "lower" for test in settings_of("greedy", "saliency", *OWN))


@pytest.mark.parametrize(("one", "other"), FAMILIES)
def test_the_table_of_settings_has_the_differences_of_the_lines(one: str, other: str) -> None:
    found, mean = settings_of(one, other, *OWN), over_settings(one, other)
    own = [line for lines in contenders(*OWN).values() for line in lines]
    asked = load_recipe(recipe_of("saliency")).comparisons_after(100)[FAMILIES[one, other]]
    tests = {test.main: test.p_holm for test in fork_tables.tests_of(own, asked)}
    assert tests == {test.main: test.p_holm for test in found}
    assert [test.main.forks for test in found] == [36] * 4 and mean.forks == 36
    figure = f"**{mean}**" if p_of(mean) < 0.05 else str(mean)
    label = f"{LABELS[one]} less {LABELS[other]}"
    assert row_of(label, *map(shown, found), f"{figure} ({mean.detectable():.3f})") in text_of(PAGE)
    assert [test.reading for test in found[:3]] == [fork_tables.NOT_SIGNIFICANT] * 3
    assert (found[3].reading == "lower") == (other == "snip")


def test_predictions_are_those_of_the_log() -> None:
    log, page = text_of("docs/log.md"), text_of(PAGE)
    assert 'SNIP with "saliency" | -0.004 | -0.017 | -0.017 | -0.014 | -0.013, significant |' in log
    assert "| predicted | -0.004 | -0.017 | -0.017 | -0.014 | -0.013, significant |" in page
    assert "`greedy` | -0.003 | -0.022, significant | -0.02 | -0.018 | -0.016 |" in log
    assert "| predicted | -0.003 | -0.022, significant | -0.02 | -0.018 | -0.016 |" in page
    assert all(abs(test.main.mean) < 0.01 for test in settings_of("greedy", "saliency", *OWN))
    assert "**Missed** is `greedy` at 90%, which was expected to be significant" in page
    assert "at -0.04, -0.02, -0.005 and -0.03 in the order 95, 90, 75% and by layer; none significant" in log
    assert "Predicted were -0.005, -0.02, -0.04 and -0.03, not significant." in page
    assert "within 0.03 in each setting, none significant" in log and "within 0.03 in each setting, none" in page


def test_rank_correlations_are_those_of_the_page_on_fidelity() -> None:
    assert "0.90 (0.78 to 0.96) against 0.96 (0.91 to 0.98)" in text_of("docs/fidelity.md")
    assert "it has a rank correlation of 0.96, and `greedy`'s figure one of 0.90 (p = 0.004, 0.052 after" in text_of(
        PAGE
    )
    assert "p is 0.004, and 0.052 after Holm's correction over all 18" in text_of("docs/fidelity.md")


def test_what_it_means_has_the_figures_of_the_twelve_bases() -> None:
    text, found, mean = text_of(PAGE), settings_of("saliency", "snip", *OWN), over_settings("saliency", "snip")
    below = f"it ends {str(mean).removeprefix('-')} points below"
    assert f'{below} "token-fisher" (p = {p_of(mean):.3f}), averaged over four settings' in text
    at_75, at_90, at_95, layer = (test.main for test in found)
    assert f"nothing that was found**: {at_75} points on the twelve bases" in text
    assert f"where the test would have found {detectable_of(found[0]):.3f}" in text
    assert f"significantly lower**, by {str(layer).removeprefix('-')} points on the twelve bases" in text
    assert f"By GEMM at 90% ({at_90}) and 95% ({at_95}) it is not" in text
    assert f"is higher ({over_settings('saliency', 'snip', points=[300])}, p = 0.066 after Holm's" in text
    greedy = settings_of("greedy", "snip", *OWN)[3]
    assert f"By layer the corrected p is {found[3].p_holm:.3f}, for `greedy` {greedy.p_holm:.3f}" in text


def test_the_result_is_at_the_edge() -> None:
    text = text_of(PAGE)
    without = {base: p_of(over_settings("saliency", "snip", less=base)) for base in range(18, 30)}
    above = {base: p for base, p in without.items() if p > 0.05}
    first, last = sorted(above)[:-1], max(above)
    assert f"Without one of the bases {', '.join(map(str, first))} and {last} the p of the mean is above 0.05" in text
    assert f"({min(above.values()):.3f} to {max(above.values()):.3f})" in text
    before, mean = over_settings("snip-weight-magnitudes", "snip", BEFORE), over_settings("saliency", "snip")
    assert 0.45 < mean.mean / before.mean < 0.55
    assert f"half of that of the nine bases before, {before}, which was looked at afterwards" in text


def test_the_mean_depends_on_where_a_fork_starts() -> None:
    text = text_of(PAGE)
    own, greedy = ([over_settings(one, "snip", points=[point]) for point in POINTS] for one in ("saliency", "greedy"))
    assert [one.forks for one in (*own, *greedy)] == [12] * 6
    assert "the mean of the four settings is {}, {} and {} (twelve forks each".format(*own) in text
    assert "For `greedy` they are {}, {} and {}.".format(*greedy) in text
    ps = [p for p in holm([one.p for one in own]) if p is not None]
    assert f"(p = {ps[0]:.3f}, {ps[1]:.3f} and < 0.001)" in text and ps[2] < 0.001
    assert [p < 0.05 for p in ps] == [False, False, True]


def test_other_losses_are_not_all_lower() -> None:
    text = text_of(PAGE)
    bf16, mean, training = (over_settings("saliency", "snip", loss=loss) for loss in (BF16, AVERAGED, TRAINING))
    assert p_of(bf16) > 0.05 and p_of(training) < 0.001
    told = f"the mean of the four is {bf16}, with averaged weights under the plan {mean} (p = {p_of(mean):.3f})"
    assert f"{told}, in the training loss {training} (p < 0.001" in text
    for one in ("saliency", "greedy"):
        for setting in SETTINGS:
            found = difference_of(own_lines(one, setting, *OWN), own_lines("snip", setting, *OWN), BF16)
            assert not (found.mean < 0 and p_of(found) < 0.05)


def test_costs_against_bf16_are_those_of_the_page() -> None:
    for one, told in (("snip", '"token-fisher" is at'), ("saliency", '"saliency" at')):
        found = [difference_of(own_lines(one, s, *OWN), contenders(*OWN)["bf16"], PLAN) for s in SETTINGS]
        assert f"{told} {found[0]}, {found[1]}, {found[2]} and {found[3]}%" in text_of(PAGE)


def test_plans_differ_in_as_many_gemms_as_the_page_says() -> None:
    apart = []
    for setting in SETTINGS:
        one, other = (
            {fork_key(line): [list(line["shares"])[int(digit)] for digit in line["plan"]] for line in own}
            for own in (own_lines("saliency", setting, *OWN), own_lines("snip", setting, *OWN))
        )
        apart.append([sum(a != b for a, b in zip(plan, other[fork], strict=True)) for fork, plan in one.items()])
        assert {len(plan) for plan in one.values()} == {168}
    at_75, at_90, at_95, layer = map(fmean, apart)
    text = text_of(PAGE)
    assert f"in {at_75:.1f} of 168 GEMMs on average, and {apart[0].count(0)} of {len(apart[0])} are the same" in text
    assert f"By GEMM at 90 and 95% it is {at_90:.1f} and {at_95:.1f}, by layer {layer:.1f}." in text


@pytest.mark.parametrize(
    ("label", "one", "names", "forks"),
    [
        ("`greedy`, 30 bases", "greedy", ("criteria", *BEFORE, *OWN), 90),
        ("the form, 21 bases", "form", (*BEFORE, *OWN), 63),
    ],
)
def test_over_all_bases_differences_are_those_of_the_page(
    label: str, one: str, names: tuple[str, ...], forks: int
) -> None:
    found = settings_of(one, "snip", *names)
    assert [test.main.forks for test in found] == [forks] * 4
    assert row_of(label, forks, *map(shown, found)) in text_of(PAGE)


def test_the_form_over_its_21_bases_is_where_the_page_says() -> None:
    text, names = text_of(PAGE), (*BEFORE, *OWN)
    mean, starts = (
        over_settings("form", "snip", names),
        [over_settings("form", "snip", names, points=[p]) for p in POINTS],
    )
    assert p_of(mean) < 0.001 and (mean.forks, *(one.forks for one in starts)) == (63, 21, 21, 21)
    told = f"the form is at {mean} (63 forks, p < 0.001), from steps 300, 900 and 1,500 at "
    assert told + "{}, {} and {} (21 forks each)".format(*starts) in text


def test_at_124m_nothing_is_significant() -> None:
    text, found = text_of(PAGE), settings_of("saliency", "snip", *AT_124M)
    assert [test.main.forks for test in found] == [9] * 4
    assert {test.reading for test in (*found, *settings_of("greedy", "snip", *AT_124M))} == {
        fork_tables.NOT_SIGNIFICANT
    }
    assert all(abs(test.main.mean) < 0.03 for test in found)
    sizes = sorted(map(detectable_of, found))
    told = "nothing is significant: {}, {}, {} and {} in the order".format(*(test.main for test in found))
    assert f"{told} of the table (detectable {sizes[0]:.3f} to {sizes[-1]:.3f})" in text
    means = [over_settings(one, "snip", AT_124M) for one in ("saliency", "greedy")]
    assert "The mean of the four is {}, for `greedy` {}.".format(*means) in text
    assert {line["machine"] for own in contenders(*AT_124M).values() for line in own} == {"NVIDIA H200"}
    assert sum(map(len, contenders("saliency-124m").values())) == 36
    assert "`forks-saliency-124m.jsonl` | the 36 forks of" in text_of("eval/README.md")


def test_after_1000_steps_nothing_is_significant() -> None:
    text, found = text_of(PAGE), settings_of("saliency", "snip", "contrasts")
    assert [test.main.forks for test in found] == [10, 10, 8, 8]
    assert {test.reading for test in found} == {fork_tables.NOT_SIGNIFICANT}
    at_75, at_90, at_95, layer = (f"{test.main}" for test in found)
    of_75, of_90, of_95, of_layer = (f"{detectable_of(test):.3f}" for test in found)
    told = f"it is {at_75} at 75% by GEMM (detectable {of_75}) and {at_90} at 90% ({of_90}) in ten forks of five bases"
    assert f"{told}, {at_95} at 95% ({of_95}) and {layer} by layer ({of_layer}) in eight forks of four." in text
    for setting in SETTINGS[2:]:
        own, former = (own_lines(one, setting, "contrasts") for one in ("saliency", "snip"))
        assert len(own) == len(former) == 10
        assert {line["fork"]["base_seed"] for line in former if line["machine"] != "NVIDIA H200"} == {5}
    mean = over_settings("saliency", "snip", ("contrasts",))
    assert mean.forks == 8 and f"The mean of the four is {mean} (eight forks, not planned)" in text
    planned = over_settings("saliency", "snip").mean
    assert abs(mean.mean - planned) < mean.half_width and abs(mean.mean) < mean.half_width
    greedy = settings_of("greedy", "saliency", "contrasts")
    assert {test.reading for test in greedy} == {fork_tables.NOT_SIGNIFICANT} and greedy[2].main.mean > 0


def test_forks_that_a_difference_of_a_size_takes_are_those_of_the_page() -> None:
    text, mean = text_of(PAGE), over_settings("saliency", "snip")
    forks = [test.main.forks_for(0.02, test.level) for test in settings_of("saliency", "snip", *OWN)]
    assert 'tests of "saliency" take {}, {}, {} and {} forks in the order'.format(*forks) in text
    size = abs(mean.mean)
    assert f"a power of {mean.power(size):.2f}; {mean.forks_for(size)} forks would have 0.8" in text


@pytest.mark.slow
@pytest.mark.parametrize(("names", "page"), [(OWN, PAGE), (AT_124M, None)])
def test_the_tables_are_those_of_the_lines(tmp_path: Path, names: tuple[str, ...], page: str | None) -> None:
    check_report(tmp_path, *names, page=page)
