"""Figures that the page on phase shifts quotes are those of the committed lines."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from committed import ROOT, detectable_of, prose_of, row_of, share_of, shown
from scipy.stats import fisher_exact

from eval.bakeoff import fork_tables
from eval.bakeoff.fork_lines import by_contender, difference_of, pairs, read_forks
from eval.bakeoff.fork_recipe import load_recipe
from eval.bakeoff.fork_report import Asked, write_report
from eval.bakeoff.fork_statistics import Difference
from eval.bakeoff.training import ends_above_its_lowest

RESULTS = ROOT / "eval" / "results"
SHIFTS = RESULTS / "forks-shifts.jsonl"
RECIPE = ROOT / "recipes" / "forks-shifts.yaml"
PAGE = ROOT / "docs" / "results-shifts.md"
text = partial(prose_of, "docs/results-shifts.md")
OUTCOME = "held_out_averaged"
HELD = "snip {fp4, fp8}, 90% by gemm"
REFRESHED, SELDOM = (f"{HELD}, refresh_every {steps}" for steps in (25, 100))
DRIFT = f"{HELD}, refresh_on_drift 0.8, drift_every 25"
LATE = f"{REFRESHED}, apply_delay 10"
RULE = "backward-first {fp4, fp8}, 90% by gemm"
BY_LAYER = "snip {fp4, fp8}, 75% by layer"
BY_LAYER_REFRESHED = f"{BY_LAYER}, refresh_every 25"
NOTHING = {"none": "nothing"}
# Under these BF16's loss comes back, or never rises by half a nat.
MILD = {
    "code": "code",
    "spike": "spike",
    "batch-x4": "batch x4",
    "batch-div-4": "batch / 4",
    "learning-rate-x2": "learning rate x2",
}
HARSH = {f"learning-rate-x{factor}": f"learning rate x{factor}" for factor in (4, 8, 16)}
SHIFTED = MILD | HARSH
ALL = SHIFTED | NOTHING
NAMES = {
    "bf16": "BF16",
    "fp8": "FP8",
    "fp4": "all FP4",
    HELD: "SNIP by GEMM at 90%, held",
    REFRESHED: "refreshed every 25 steps",
    SELDOM: "refreshed every 100 steps",
    DRIFT: "refreshed on drift",
    LATE: "every 25 steps, ten steps late",
    RULE: "`backward-first` at 90%",
    BY_LAYER: "SNIP by layer at 75%, held",
    BY_LAYER_REFRESHED: "by layer, refreshed every 25 steps",
}
COMPARED = {
    (HELD, REFRESHED): "held less every 25 steps",
    (SELDOM, REFRESHED): "every 100 steps less every 25",
    (DRIFT, REFRESHED): "on drift less every 25 steps",
    (LATE, REFRESHED): "ten steps late less at once",
    (BY_LAYER, BY_LAYER_REFRESHED): "by layer: held less every 25 steps",
    (HELD, RULE): "SNIP held less `backward-first`",
}
LENGTHS = (50, 75, 125, 225)
SEEDS = (0, 1, 2, 3)


@cache
def shifted() -> list[dict[str, Any]]:
    """The lines."""
    return read_forks([SHIFTS])


def lines_of(shift: str, steps: int) -> list[dict[str, Any]]:
    """The lines of one shift and length."""
    return [line for line in shifted() if (line["fork"]["shift"]["name"], line["steps"]) == (shift, steps)]


@cache
def found_at(shift: str, steps: int) -> dict[tuple[str, str], fork_tables.Tested]:
    """The comparisons after one shift and length."""
    found = fork_tables.tests_of(lines_of(shift, steps), load_recipe(RECIPE).comparisons["stale"], OUTCOME)
    assert all(test.main.forks == 4 for test in found)
    return {(test.one, test.other): test for test in found}


def rows_over_lengths(one: str, other: str) -> list[str]:
    """The rows of a comparison after all shifts and lengths."""
    return [
        row_of(name, *(shown(found_at(shift, steps)[one, other]) for steps in LENGTHS)) for shift, name in ALL.items()
    ]


def rows_of_refreshes() -> list[str]:
    """The rows of other refreshes, 200 steps after the shift."""
    return [
        row_of(name, *(shown(found_at(shift, 225)[one, REFRESHED]) for one in (SELDOM, DRIFT, LATE)))
        for shift, name in ALL.items()
    ]


def rows_of_the_control() -> list[str]:
    """The rows of all comparisons where nothing shifts."""
    return [
        row_of(name, *(shown(found_at("none", steps)[compared]) for steps in LENGTHS))
        for compared, name in COMPARED.items()
    ]


def own_lines(contender: str, shifts: list[str], steps: int = 225) -> list[dict[str, Any]]:
    """The lines of a contender after some shifts, by default 200 steps after them."""
    return [line for shift in shifts for line in by_contender(lines_of(shift, steps))[contender]]


def blown(shift: str, steps: int, contender: str) -> set[int]:
    """Seeds of the forks that blew up."""
    return {line["fork"]["base_seed"] for line in own_lines(contender, [shift], steps) if line["blew_up"]}


def rows_of_stability() -> list[str]:
    """The rows of the sweep of stability."""
    rows = []
    for contender, name in NAMES.items():
        others = own_lines(contender, [*list(MILD)[:4], "none"])
        cells = [f"{sum(line['blew_up'] for line in others)} of {len(others)}"]
        cells += [f"{len(blown(f'learning-rate-x{factor}', 225, contender))} of 4" for factor in (2, 4, 8, 16)]
        rows.append(row_of(name, *cells))
    return rows


def steps_of_drift(shift: str) -> list[list[int]]:
    """After how many steps of each fork, by seed, drift made a plan."""
    own = sorted(own_lines(DRIFT, [shift]), key=lambda line: line["fork"]["base_seed"])
    return [[plan["step"] for plan in line["plans"]] for line in own]


def rows_of_drift() -> list[str]:
    """The rows of the refreshes that drift asked for."""
    rows = []
    for shift, name in ALL.items():
        steps = steps_of_drift(shift)
        first = min((step - 25 for own in steps for step in own), default=None)
        rows.append(row_of(name, ", ".join(str(len(own)) for own in steps), "-" if first is None else first))
    return rows


def by_base(shift: str, steps: int, one: str, other: str) -> np.ndarray:
    """The difference of two contenders on each base, in the order of the seeds."""
    of = by_contender(lines_of(shift, steps))
    found = {line["fork"]["base_seed"]: value for line, value in pairs(of[one], of[other], OUTCOME)}
    return np.array([found[seed] for seed in SEEDS])


def over_mild(one: str, other: str, steps: int, *, less_control: bool = False) -> Difference:
    """A difference, mean over the mild shifts, base by base; less that where nothing shifts, if asked for."""
    means = np.mean([by_base(shift, steps, one, other) for shift in MILD], axis=0)
    return Difference.of(list(means - by_base("none", steps, one, other) if less_control else means))


def listed(values: list[str]) -> str:
    """Values as a sentence lists them."""
    return f"{', '.join(values[:-1])} and {values[-1]}"


def detectable_over(shifts: dict[str, str], one: str, other: str, steps: int = 225) -> str:
    """The smallest and the largest difference that tests would find."""
    values = [detectable_of(found_at(shift, steps)[one, other]) for shift in shifts]
    return f"{min(values):.3f} to {max(values):.3f}"


def test_every_contender_has_four_forks_of_every_shift_and_length() -> None:
    of = by_contender(shifted())
    assert of.keys() == NAMES.keys() and len(NAMES) == len(load_recipe(RECIPE).cells) == 11
    counts = {
        (shift, steps, name): sorted(line["fork"]["base_seed"] for line in own)
        for shift in ALL
        for steps in LENGTHS
        for name, own in by_contender(lines_of(shift, steps)).items()
    }
    assert len(counts) == 9 * 4 * 11 and set(map(tuple, counts.values())) == {SEEDS}
    assert "1,584 lines: 11 contenders, eight shifts and the control, four bases, four lengths" in text()
    assert len(shifted()) == 9 * 4 * 11 * 4 == 1584
    assert {line["machine"] for line in shifted()} == {"NVIDIA H200"}
    assert not any(line["diverged"] for line in shifted())


def test_the_lines_of_two_commits_begin_with_the_same_weights_and_train_the_same_before_the_shift() -> None:
    commits = {commit: [line for line in shifted() if line["commit"] == commit] for commit in ("6237e0a", "42eb520")}
    counts = {commit: len(own) for commit, own in commits.items()}
    assert f"{counts['6237e0a']:,} are of commit `6237e0a`, {counts['42eb520']} of `42eb520`" in text()
    assert sum(counts.values()) == len(shifted())
    later = commits["42eb520"]
    late = [line for line in later if line["contender"] == LATE and line["fork"]["shift"]["name"] != "none"]
    assert f"and {len(late)} of the late plans" in text()
    assert {line["fork"]["shift"]["name"] for line in late} == {"learning-rate-x8", "learning-rate-x16"}
    rest = [line for line in later if line["fork"]["shift"]["name"] != "none" and line not in late]
    assert {line["contender"] for line in rest} == {RULE, BY_LAYER, BY_LAYER_REFRESHED}
    assert not [line for line in commits["6237e0a"] if line["fork"]["shift"]["name"] == "none"]
    states = defaultdict(set)
    for line in shifted():
        states[line["fork"]["base_seed"]].add(line["state"])
    assert {seed: len(own) for seed, own in states.items()} == dict.fromkeys(SEEDS, 1)
    # The mean loss of the 25 steps before the shift.
    before: dict[tuple[str, int], dict[str, set[float]]] = defaultdict(lambda: defaultdict(set))
    for line in shifted():
        before[line["contender"], line["fork"]["base_seed"]][line["commit"]].add(line["training_curve"][0])
    twice = [own for own in before.values() if len(own) == 2]
    assert all(len(set.union(*own.values())) == 1 for own in twice)
    assert f"the same to six decimals in all {len(twice)} pairs" in text()


@pytest.mark.slow
def test_no_held_plan_is_significantly_above_a_refreshed_one() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for compared in ((HELD, REFRESHED), (BY_LAYER, BY_LAYER_REFRESHED), (HELD, RULE)):
        assert all(row in page for row in rows_over_lengths(*compared))
        found = [found_at(shift, steps)[compared] for shift in ALL for steps in LENGTHS]
        assert len(found) == 36 and {test.reading for test in found} == {fork_tables.NOT_SIGNIFICANT}
    by_gemm = detectable_over(MILD, HELD, REFRESHED), detectable_over(HARSH, HELD, REFRESHED)
    assert f"true differences of {by_gemm[0]}% under the five milder shifts" in text()
    assert f", of {by_gemm[1]}% under the other three" in text()
    assert "None of the 36 is significant" in text() and page.count("| 25 steps after | 50 | 100 | 200 |") == 4
    control = detectable_of(found_at("none", 225)[HELD, REFRESHED])
    assert f"and of {control:.3f}% where nothing shifts" in text()


def test_where_a_cost_above_a_tenth_of_a_percent_is_excluded() -> None:
    excluded = {
        steps: [
            shift
            for shift in ALL
            if (main := found_at(shift, steps)[HELD, REFRESHED].main).mean + main.half_width < 0.1
        ]
        for steps in LENGTHS
    }
    assert excluded == {50: [*MILD, "none"], 75: ["spike", "none"], 125: ["none"], 225: ["batch-x4", "none"]}
    sentence = (
        "A cost above 0.1% lies outside the uncorrected interval after 25 steps under the five milder shifts, after 50 "
        "steps with the spike, and after 200 steps with the larger batch"
    )
    assert sentence in text() and "an average cost above 0.1% is excluded after 25 and after 50 steps" in text()
    means = [over_mild(HELD, REFRESHED, steps) for steps in LENGTHS]
    assert f"base by base, is {listed([str(mean) for mean in means])}" in text()
    found = [f"{mean.detectable():.3f}" for mean in means]
    assert f"(detectable {listed(found)}, uncorrected)" in text()
    above = [mean.mean + mean.half_width for mean in means]
    assert [value < 0.1 for value in above] == [True, True, False, False]
    assert f"below {above[2]:.2f}% and {above[3]:.2f}% after 100 and 200" in text()
    assert f"(p = {means[0].p:.3f} after 25 steps" in text() and (means[0].p or 0) * 4 > 0.05


def test_what_a_held_plan_costs_under_shifts_less_what_it_costs_where_nothing_shifts() -> None:
    for compared, after in (((HELD, REFRESHED), LENGTHS), ((BY_LAYER, BY_LAYER_REFRESHED), (225,))):
        less = [over_mild(*compared, steps, less_control=True) for steps in after]
        found = [f"{mean.detectable():.3f}" for mean in less]
        if len(less) > 1:
            assert f"{listed([str(mean) for mean in less])} (detectable {listed(found)}, uncorrected)" in text()
            assert f"after 200 steps one below {found[-1]}% may have been missed" in text()
            assert f"p = {less[0].p:.3f} after 25 steps" in text() and (less[0].p or 0) * 4 > 0.05
            assert all((mean.p or 0) > 0.05 for mean in less[1:])
        else:
            assert f"{less[0]} (detectable {found[0]}, uncorrected)" in text()


def test_what_the_control_shows() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert all(row in page for row in rows_of_the_control())
    found = {(pair, steps): found_at("none", steps)[pair] for pair in COMPARED for steps in LENGTHS}
    assert {test.reading for test in found.values()} == {fork_tables.NOT_SIGNIFICANT}
    assert len(found) == 24 and "None of the 24 is significant. Held less refreshed was predicted within 0.03" in text()
    means = [found[(HELD, REFRESHED), steps].main.mean for steps in LENGTHS]
    assert [abs(mean) <= 0.03 for mean in means] == [True, False, True, True]
    missed = found[(HELD, REFRESHED), 75]
    assert f"only after 50 steps does the mean lie outside, at {missed.main} (p = {missed.main.p:.3f}" in text()
    # Its upper end too: no cost of holding above this.
    least = [test.main.mean + test.main.half_width for (pair, _), test in found.items() if pair == (HELD, REFRESHED)]
    assert f"above {max(least):.3f}% lies outside the uncorrected interval after every length" in text()
    assert steps_of_drift("none") == [[]] * 4
    before = own_lines(DRIFT, ["none"]), own_lines(HELD, ["none"])
    losses = [{line["fork"]["base_seed"]: line["loss"] for line in own} for own in before]
    assert losses[0] == losses[1] and "made no plan there, so its forks are those of the held plan" in text()


def test_what_other_refreshes_save() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert all(row in page for row in rows_of_refreshes())
    every = [test for shift in ALL for steps in LENGTHS for test in found_at(shift, steps).values()]
    significant = [test for test in every if test.reading != fork_tables.NOT_SIGNIFICANT]
    assert [(test.one, test.reading) for test in significant] == [(SELDOM, "lower")]
    only = found_at("batch-x4", 225)[SELDOM, REFRESHED]
    assert significant == [only]
    assert f"Of the {len(every)} tests in 36 tables one is significant" in text()
    assert f"{only.main} (corrected p = {only.p_holm:.3f})" in text()
    # One in twenty of the tables, if no difference is true.
    assert "With 36 tables at 5% each, one or two" in text()


def test_backward_first_and_by_layer_against_what_was_predicted() -> None:
    rule = {shift: found_at(shift, 225)[HELD, RULE] for shift in ALL}
    within = [shift for shift, test in rule.items() if abs(test.main.mean) <= 0.05]
    assert within == ["spike", "batch-x4", "batch-div-4", "none"]
    mild = [rule[shift].main.mean for shift in MILD]
    assert f"`backward-first` from {min(mild):+.3f} to {max(mild):+.3f}" in text()
    assert f"(detectable {detectable_over(MILD, HELD, RULE)})" in text()
    layer = {shift: found_at(shift, 225)[BY_LAYER, BY_LAYER_REFRESHED] for shift in ALL}
    assert [shift for shift, test in layer.items() if abs(test.main.mean) > 0.1] == list(HARSH)
    assert min(abs(rule[shift].main.mean) for shift in HARSH) > 0.05
    assert "Means within 0.05 and 0.1 were predicted" in text()
    assert "Where the rate rises by 4, 8 or 16 both lie outside" in text()
    mild = [layer[shift].main.mean for shift in MILD]
    assert f"held less refreshed from {min(mild):+.3f} to {max(mild):+.3f}" in text()
    assert f"(detectable {detectable_over(MILD, BY_LAYER, BY_LAYER_REFRESHED)})" in text()
    both = [
        found_at(s, n)[pair] for s in ALL for n in LENGTHS for pair in ((HELD, RULE), (BY_LAYER, BY_LAYER_REFRESHED))
    ]
    assert len(both) == 72 and {test.reading for test in both} == {fork_tables.NOT_SIGNIFICANT}
    assert "None of these 72 tests is significant" in text()
    lowest = min((test for test in both), key=lambda test: test.p_holm or 1.0)
    assert lowest is found_at("learning-rate-x8", 50)[BY_LAYER, BY_LAYER_REFRESHED]
    assert f"{lowest.main} at a rate of eight times after 25 steps (corrected p = {lowest.p_holm:.3f})" in text()


def test_late_plans_are_not_significantly_worse_and_blow_up_where_plans_applied_at_once_do() -> None:
    late = {(shift, steps): found_at(shift, steps)[LATE, REFRESHED] for shift in ALL for steps in LENGTHS}
    assert {test.reading for test in late.values()} == {fork_tables.NOT_SIGNIFICANT}
    means = [late[shift, 225].main.mean for shift in MILD]
    assert f"means from {min(means):+.3f} to {max(means):+.3f}" in text()
    assert f"(detectable from {detectable_over(MILD, LATE, REFRESHED)})" in text()
    assert all(blown(shift, 225, LATE) == blown(shift, 225, REFRESHED) == blown(shift, 225, "bf16") for shift in ALL)
    assert "200 steps after the shift, the same 10 of 36 forks" in text()
    assert "After 200 steps the same 10 of 36 forks had blown up with late plans" in text()
    assert sum(len(blown(shift, 225, LATE)) for shift in ALL) == 10
    apart = {
        (shift, steps): blown(shift, steps, LATE) ^ blown(shift, steps, REFRESHED) for shift in ALL for steps in LENGTHS
    }
    assert {key: own for key, own in apart.items() if own} == {
        ("learning-rate-x4", 75): {0, 2, 3},
        ("learning-rate-x4", 125): {0},
    }
    earlier = [len(blown("learning-rate-x4", steps, name)) for name in (LATE, REFRESHED) for steps in (75, 125)]
    assert "after 50 and 100 steps {} and {} of 4 had, and {} and {} with plans".format(*earlier) in text()
    agree = 4 * 36 - sum(map(len, apart.values()))
    assert f"In {agree} of the 144 pairs" in text()


def test_low_precision_does_not_lower_the_learning_rate_at_which_forks_blow_up() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert all(row in page for row in rows_of_stability())
    for name in NAMES:
        counts = [len(blown(f"learning-rate-x{factor}", 225, name)) for factor in (2, 4, 8, 16)]
        assert (counts[0], counts[2], counts[3]) == (0, 4, 4) and counts[1] in (2, 3)
        assert {1, 3} <= blown("learning-rate-x4", 225, name)
        assert not any(line["blew_up"] for line in own_lines(name, [*MILD, "none"]))
    ends = [line["training_curve"] for line in lines_of("learning-rate-x4", 225)]
    above = [curve[-1] - min(curve) for curve in ends]
    assert f"ends {min(above):.2f} to {max(above):.2f} nats above" in text()
    # The first table of counts is after the last length: 25 steps after the scrambled tokens the loss is high in all.
    leapt = [line["blew_up"] for line in lines_of("spike", 50)]
    assert all(leapt) and len(leapt) == 44 and "all 44 forks are above the bound" in text()
    assert not any(line["blew_up"] for line in lines_of("spike", 75))
    assert "all 44 forks are above the bound, and 25 steps later none is" in text()
    assert "Seeds 1 and 3 are above the bound in every contender. 2 and 3 of 4 are no difference" in text()
    fisher = fisher_exact([[0, 4], [4, 0]]).pvalue
    assert f"only 0 against 4 of 4 would be one (Fisher's test, p = {fisher:.3f})" in text()
    assert fisher_exact([[1, 3], [4, 0]]).pvalue > 0.05 and fisher_exact([[0, 4], [3, 1]]).pvalue > 0.05
    for name in ("fp8", "fp4"):
        for factor in (8, 16):
            of = by_contender(lines_of(f"learning-rate-x{factor}", 225))
            assert str(difference_of(of[name], of["bf16"], OUTCOME)) in text()
    for shift, start in (("learning-rate-x8", "at x8"), ("none", "in the control")):
        losses = [line["loss"]["train"] for line in own_lines("bf16", [shift])]
        assert f"{min(losses):.2f} to {max(losses):.2f} nats {start}" in text()


def test_the_shares_that_counts_of_forks_leave_possible() -> None:
    page = text()
    assert f"0 of 4 leaves any share of {share_of(0, 4)}" in page
    assert f"2 of 4 {share_of(2, 4)}, 3 of 4 {share_of(3, 4)}, 4 of 4 {share_of(4, 4)}" in page
    assert f"0 of 20 {share_of(0, 20)}" in page


def test_what_four_forks_would_find() -> None:
    for compared, name in (((BY_LAYER, BY_LAYER_REFRESHED), "held by layer"), ((HELD, RULE), "`backward-first`")):
        control = detectable_of(found_at("none", 225)[compared])
        found = detectable_over(MILD, *compared), f"{control:.3f}", detectable_over(HARSH, *compared)
        assert "{}: {} under the milder shifts, {} in the control, {} under the others".format(name, *found) in text()


def test_a_fork_blew_up_if_its_curve_ends_half_a_nat_above_its_lowest_point() -> None:
    for line in (*shifted(), *read_forks([RESULTS / "forks-stability.jsonl"])):
        curve = line["training_curve"]
        assert line["blew_up"] == ends_above_its_lowest(list(enumerate(curve)))
        assert len(curve) == line["steps"] // 25
    assert ends_above_its_lowest([(0, 1.0), (1, 1.51)]) and not ends_above_its_lowest([(0, 1.0), (1, 1.5)])
    assert "more than 0.5 nats above its lowest" in text()


def test_how_often_drift_asked_for_a_plan() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert all(row in page for row in rows_of_drift())
    counts = {shift: sum(map(len, steps_of_drift(shift))) for shift in ALL}
    assert f"{sum(counts[shift] for shift in MILD)} plans in 20 forks" in text()
    assert f"{sum(counts[shift] for shift in HARSH)} in 12 forks" in text()
    assert counts["none"] == 0 and "none in the four forks where nothing shifts" in text()
    assert {len(line["plans"]) for line in own_lines(REFRESHED, list(ALL))} == {8}


def test_all_plans_by_gemm_under_milder_shifts_and_in_the_control_have_every_backward_gemm_in_fp4() -> None:
    kept = [line for shift in (*MILD, "none") for line in lines_of(shift, 225) if "90% by gemm" in line["contender"]]
    plans = [own["plan"] for line in kept for own in (line, *line["plans"])]
    assert all(set(plan[kind::3]) == {"1"} for plan in plans for kind in (1, 2))
    by_gemm = [float(np.mean([_others(shift, HELD, REFRESHED) for shift in MILD])), _others("none", HELD, REFRESHED)]
    assert "differ in {:.1f} of 168 GEMMs on average, in the control in {:.1f}".format(*by_gemm) in text()
    layer = (BY_LAYER, BY_LAYER_REFRESHED)
    by_layer = [float(np.mean([_others(shift, *layer) for shift in MILD])), _others("none", *layer)]
    assert "Plans by layer differ in {:.1f}, in the control in {:.1f}".format(*by_layer) in text()


def _others(shift: str, one: str, refreshed: str) -> float:
    """How many GEMMs have another format in the held plan than in the refreshed one, mean over refreshes and forks."""
    held = {line["fork"]["base_seed"]: line["plan"] for line in own_lines(one, [shift])}
    counts = [
        sum(a != b for a, b in zip(own["plan"], held[line["fork"]["base_seed"]], strict=True))
        for line in own_lines(refreshed, [shift])
        for own in line["plans"]
    ]
    return float(np.mean(counts))


def test_forks_that_both_commits_trained_have_the_same_losses_and_plans() -> None:
    of: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for steps in LENGTHS:
        for shift in ("learning-rate-x8", "learning-rate-x16"):
            for line in own_lines(LATE, [shift], steps):
                of[shift, line["fork"]["base_seed"]].append(line)
    twice = [own for own in of.values() if len({line["commit"] for line in own}) == 2]
    for *shorter, longest in twice:
        assert longest["steps"] == 225 and longest["commit"] == "42eb520" and shorter[0]["commit"] == "6237e0a"
        for line in shorter:
            assert line["training_curve"] == longest["training_curve"][: len(line["training_curve"])]
            assert line["plans"] == longest["plans"][: len(line["plans"])] and line["plans"]
    assert len(twice) == 6 and "Six forks of late plans at x8 and x16 have lines of both commits" in text()


@pytest.mark.slow
def test_the_tables_of_shifts_are_those_of_the_lines(tmp_path: Path) -> None:
    quoted = tmp_path / "lines.jsonl"
    kept = [line for line in shifted() if line["fork"]["shift"]["name"] in ("code", "batch-x4")]
    quoted.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    copy = Path(shutil.copy(PAGE, tmp_path))
    write_report([quoted], None, Asked.by(load_recipe(RECIPE), RECIPE), [copy])
    assert copy.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_whole_report_of_shifts_is_that_of_the_lines(tmp_path: Path) -> None:
    copy = Path(shutil.copy(PAGE, tmp_path))
    report = write_report([SHIFTS], None, Asked.by(load_recipe(RECIPE), RECIPE), [copy])
    assert copy.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")
    assert report == (RESULTS / "forks-shifts.md").read_text(encoding="utf-8")
