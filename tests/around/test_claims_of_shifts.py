"""Figures that the page on phase shifts quotes are those of the committed lines."""

from __future__ import annotations

import json
import shutil
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from committed import prose_of
from scipy.stats import fisher_exact

from eval.bakeoff import fork_tables
from eval.bakeoff.fork_lines import by_contender, difference_of, pairs, read_forks
from eval.bakeoff.fork_recipe import load_recipe
from eval.bakeoff.fork_report import Asked, write_report
from eval.bakeoff.fork_statistics import Difference

ROOT = Path(__file__).resolve().parents[2]
SHIFTS = ROOT / "eval" / "results" / "forks-shifts.jsonl"
RECIPE = ROOT / "recipes" / "forks-shifts.yaml"
PAGE = ROOT / "docs" / "results-shifts.md"
text = partial(prose_of, "docs/results-shifts.md")
OUTCOME = "held_out_averaged"
HELD = "snip {fp4, fp8}, 90% by gemm"
REFRESHED, SELDOM = (f"{HELD}, refresh_every {steps}" for steps in (25, 100))
DRIFT = f"{HELD}, refresh_on_drift 0.8, drift_every 25"
LATE = f"{REFRESHED}, apply_delay 10"
# Under these BF16's loss comes back, or never rises by half a nat.
MILD = {
    "code": "code",
    "spike": "spike",
    "batch-x4": "batch x4",
    "batch-div-4": "batch / 4",
    "learning-rate-x2": "learning rate x2",
}
HARSH = {f"learning-rate-x{factor}": f"learning rate x{factor}" for factor in (4, 8, 16)}
NAMES = {
    "bf16": "BF16",
    "fp8": "FP8",
    "fp4": "all FP4",
    HELD: "SNIP at 90%, held",
    REFRESHED: "refreshed every 25 steps",
    SELDOM: "refreshed every 100 steps",
    DRIFT: "refreshed on drift",
    LATE: "every 25 steps, ten steps late",
}
LENGTHS = (50, 75, 125, 225)


@cache
def shifted() -> list[dict[str, Any]]:
    """The lines."""
    return read_forks([SHIFTS])


def lines_of(shift: str, steps: int) -> list[dict[str, Any]]:
    """The lines of one shift and length."""
    return [line for line in shifted() if (line["fork"]["shift"]["name"], line["steps"]) == (shift, steps)]


@cache
def found_at(shift: str, steps: int) -> dict[str, fork_tables.Tested]:
    """First contender -> its comparison to the plan that is refreshed every 25 steps."""
    family = load_recipe(RECIPE).comparisons["stale"]
    found = fork_tables.tests_of(lines_of(shift, steps), family, OUTCOME)
    return {test.one: test for test in found if test.other == REFRESHED and test.main.forks}


def cell(shift: str, steps: int, one: str) -> str:
    """A difference with the detectable one, bold if it is significant; "-" without lines."""
    if (test := found_at(shift, steps).get(one)) is None:
        return "-"
    difference = f"**{test.main}**" if test.reading != fork_tables.NOT_SIGNIFICANT else str(test.main)
    return f"{difference} ({test.main.detectable(test.level):.3f})"


def rows_of_held() -> list[str]:
    """The rows of the table of what a held plan costs."""
    shifts = MILD | HARSH
    return [
        f"| {name} | " + " | ".join(cell(shift, steps, HELD) for steps in LENGTHS) + " |"
        for shift, name in shifts.items()
    ]


def rows_of_refreshes() -> list[str]:
    """The rows of the table of other refreshes, 200 steps after the shift."""
    shifts = MILD | HARSH
    return [
        f"| {name} | " + " | ".join(cell(shift, 225, one) for one in (SELDOM, DRIFT, LATE)) + " |"
        for shift, name in shifts.items()
    ]


def counted(contender: str, shift: str) -> str:
    """How many forks blew up, 200 steps after the shift; "-" without lines."""
    own = by_contender(lines_of(shift, 225)).get(contender, [])
    return f"{sum(line['blew_up'] for line in own)} of {len(own)}" if own else "-"


def rows_of_stability() -> list[str]:
    """The rows of the sweep of stability."""
    rows = []
    for contender, name in NAMES.items():
        others = [line for shift in list(MILD)[:4] for line in by_contender(lines_of(shift, 225))[contender]]
        cells = [f"{sum(line['blew_up'] for line in others)} of {len(others)}"]
        cells += [counted(contender, f"learning-rate-x{factor}") for factor in (2, 4, 8, 16)]
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return rows


def steps_of_drift(shift: str) -> list[list[int]]:
    """After how many steps of each fork, by seed, drift made a plan."""
    own = sorted(by_contender(lines_of(shift, 225))[DRIFT], key=lambda line: line["fork"]["base_seed"])
    return [[plan["step"] for plan in line["plans"]] for line in own]


def rows_of_drift() -> list[str]:
    """The rows of the refreshes that drift asked for."""
    rows = []
    for shift, name in (MILD | HARSH).items():
        steps = steps_of_drift(shift)
        first = min((step - 25 for own in steps for step in own), default=None)
        cells = [", ".join(str(len(own)) for own in steps), "-" if first is None else str(first)]
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return rows


def over_mild(one: str, steps: int) -> Difference:
    """The difference to the refreshed plan, mean over the mild shifts, base by base."""
    values: dict[int, list[float]] = {}
    for shift in MILD:
        of = by_contender(lines_of(shift, steps))
        for line, value in pairs(of[one], of[REFRESHED], OUTCOME):
            values.setdefault(line["fork"]["base_seed"], []).append(value)
    assert {len(own) for own in values.values()} == {len(MILD)}
    return Difference.of([float(np.mean(own)) for own in values.values()])


def test_which_lines_there_are() -> None:
    of = by_contender(shifted())
    assert list(of.keys()) and of.keys() == NAMES.keys()
    assert {name: len(own) for name, own in of.items() if len(own) != 128} == {LATE: 110}
    assert "1,006 of 1,408 lines" in text() and len(shifted()) == 1006
    assert 8 * 4 * 4 * len(load_recipe(RECIPE).cells) == 1408
    late = [line for line in of[LATE] if line["fork"]["shift"]["name"] in ("learning-rate-x8", "learning-rate-x16")]
    assert sorted({line["steps"] for line in late}) == [50, 75, 125] and len(late) == 14
    assert {line["commit"] for line in shifted()} == {"6237e0a"} and "commit `6237e0a`" in text()
    assert {line["machine"] for line in shifted()} == {"NVIDIA H200"}
    assert {line["fork"]["base_seed"] for line in shifted()} == {0, 1, 2, 3}
    assert {line["spec"].get("granularity", "gemm") for line in shifted()} == {"gemm"}


def test_no_held_plan_is_significantly_above_a_refreshed_one() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert all(row in page for row in rows_of_held())
    found = [found_at(shift, steps)[HELD] for shift in MILD | HARSH for steps in LENGTHS]
    assert len(found) == 32 and {test.reading for test in found} == {fork_tables.NOT_SIGNIFICANT}
    least, most = _ends([found_at(shift, 225)[HELD] for shift in MILD])
    assert f"from {least:.3f} to {most:.3f}% under the five milder shifts" in text()
    least, most = _ends([found_at(shift, 225)[HELD] for shift in HARSH])
    assert f"from {least:.3f} to {most:.3f}% under the other three" in text()


def _ends(found: list[fork_tables.Tested]) -> tuple[float, float]:
    """The smallest and the largest detectable difference."""
    values = [test.main.detectable(test.level) or 0.0 for test in found]
    return min(values), max(values)


def test_where_a_cost_above_a_tenth_of_a_percent_is_excluded() -> None:
    excluded = {
        steps: [
            shift for shift in MILD | HARSH if (main := found_at(shift, steps)[HELD].main).mean + main.half_width < 0.1
        ]
        for steps in LENGTHS
    }
    assert excluded == {50: list(MILD), 75: ["spike"], 125: [], 225: ["batch-x4"]}
    means = [over_mild(HELD, steps) for steps in LENGTHS]
    assert f"{means[0]}, {means[1]}, {means[2]} and {means[3]}" in text()
    found = [f"{mean.detectable():.3f}" for mean in means]
    assert f"(detectable {', '.join(found[:3])} and {found[3]}, uncorrected)" in text()
    above = [mean.mean + mean.half_width for mean in means]
    assert [value < 0.1 for value in above] == [True, True, False, False]
    assert f"below {above[2]:.2f}% and {above[3]:.2f}% after 100 and 200" in text()
    assert f"(p = {means[0].p:.3f} after 25 steps" in text() and (means[0].p or 0) * 4 > 0.05


def test_what_other_refreshes_save() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert all(row in page for row in rows_of_refreshes())
    every = [test for shift in MILD | HARSH for steps in LENGTHS for test in found_at(shift, steps).values()]
    significant = [test for test in every if test.reading != fork_tables.NOT_SIGNIFICANT]
    assert [(test.one, test.reading) for test in significant] == [(SELDOM, "lower")]
    only = found_at("batch-x4", 225)[SELDOM]
    assert significant == [only]
    assert f"Of the {len(every)} tests in 32 tables one is significant" in text()
    assert f"{only.main} (corrected p = {only.p_holm:.3f})" in text()


def test_late_plans_are_not_significantly_worse_and_no_fork_of_theirs_alone_blew_up() -> None:
    late = {shift: found_at(shift, 225)[LATE] for shift in MILD}
    assert {test.reading for test in late.values()} == {fork_tables.NOT_SIGNIFICANT}
    means = [test.main.mean for test in late.values()]
    assert f"means from {min(means):+.3f} to {max(means):+.3f}" in text()
    least, most = _ends(list(late.values()))
    assert f"detectable from {least:.3f} to {most:.3f}" in text()

    def blown(shift: str, steps: int, name: str) -> set[int]:
        own = by_contender(lines_of(shift, steps))[name]
        return {line["fork"]["base_seed"] for line in own if line["blew_up"]}

    for shift in [*MILD, "learning-rate-x4"]:
        assert blown(shift, 225, LATE) == blown(shift, 225, REFRESHED) == blown(shift, 225, "bf16")
    assert blown("learning-rate-x4", 225, LATE) == {1, 3} and "(seeds 1 and 3)" in text()
    apart = {
        steps: blown("learning-rate-x4", steps, LATE) ^ blown("learning-rate-x4", steps, "bf16") for steps in (75, 125)
    }
    assert apart == {75: {3}, 125: {0, 3}} and 3 in blown("learning-rate-x4", 125, LATE)
    earlier = [
        sum(line["blew_up"] for line in by_contender(lines_of("learning-rate-x4", steps))[name])
        for name in (LATE, REFRESHED)
        for steps in (75, 125)
    ]
    assert "after 50 and 100 steps {} and {} of 4 had, and {} and {} with plans".format(*earlier) in text()
    at_x8 = [line for steps in (50, 75, 125) for line in by_contender(lines_of("learning-rate-x8", steps))[LATE]]
    assert len(at_x8) == 12 and all(line["blew_up"] for line in at_x8)


def test_low_precision_does_not_lower_the_learning_rate_at_which_forks_blow_up() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert all(row in page for row in rows_of_stability())
    assert not any(line["diverged"] for line in shifted())
    for name in NAMES.keys() - {LATE}:
        assert [counted(name, f"learning-rate-x{factor}") for factor in (2, 8, 16)] == ["0 of 4", "4 of 4", "4 of 4"]
        assert counted(name, "learning-rate-x4") in ("2 of 4", "3 of 4")
    ends = [line["training_curve"] for line in lines_of("learning-rate-x4", 225)]
    above = [curve[-1] - min(curve) for curve in ends]
    assert f"ends {min(above):.2f} to {max(above):.2f} nats above" in text()
    assert f"p = {fisher_exact([[0, 4], [4, 0]]).pvalue:.3f}" in text()
    assert fisher_exact([[1, 3], [4, 0]]).pvalue > 0.05 and fisher_exact([[0, 4], [3, 1]]).pvalue > 0.05
    for name in ("fp8", "fp4"):
        for factor in (8, 16):
            of = by_contender(lines_of(f"learning-rate-x{factor}", 225))
            assert str(difference_of(of[name], of["bf16"], OUTCOME)) in text()


def test_how_often_drift_asked_for_a_plan() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert all(row in page for row in rows_of_drift())
    counts = {shift: sum(map(len, steps_of_drift(shift))) for shift in MILD | HARSH}
    assert f"{sum(counts[shift] for shift in MILD)} plans in 20 forks" in text()
    assert f"{sum(counts[shift] for shift in HARSH)} in 12 forks" in text()
    assert {len(line["plans"]) for shift in MILD | HARSH for line in by_contender(lines_of(shift, 225))[REFRESHED]} == {
        8
    }


def test_all_plans_under_milder_shifts_have_every_backward_gemm_in_fp4() -> None:
    snip = [line for shift in MILD for line in lines_of(shift, 225) if line["contender"].startswith("snip")]
    plans = [own["plan"] for line in snip for own in (line, *line["plans"])]
    assert all(set(plan[kind::3]) == {"1"} for plan in plans for kind in (1, 2))
    mean = np.mean([_others(shift) for shift in MILD])
    assert f"differ in {mean:.1f} of 168 GEMMs" in text()


def _others(shift: str) -> float:
    """How many GEMMs have another format in the held plan than in the refreshed one, mean over refreshes and forks."""
    of = by_contender(lines_of(shift, 225))
    held = {line["fork"]["base_seed"]: line["plan"] for line in of[HELD]}
    counts = [
        sum(a != b for a, b in zip(own["plan"], held[line["fork"]["base_seed"]], strict=True))
        for line in of[REFRESHED]
        for own in line["plans"]
    ]
    return float(np.mean(counts))


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
    assert report == (ROOT / "eval" / "results" / "forks-shifts.md").read_text(encoding="utf-8")
