"""Do the tables over lengths, and those of plans, say what the lines of forks hold?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import ttest_rel

from eval.bakeoff.fork_lengths import courses_of, length_table
from eval.bakeoff.fork_plans import plan_table
from eval.bakeoff.fork_report import Asked, write_report

PAIR = ("fp4", "bf16")
# Steps -> percent above BF16 of seeds 0, 1, 2.
GAPS = {50: (0.1, 0.2, 0.0), 100: (0.4, 0.3, 0.35), 200: (1.0,)}


def line(contender: str, seed: int, steps: int, loss: float) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "id": f"{contender} {seed} {steps}",
        "setting": f"of {steps} steps",
        "contender": contender,
        "fork": {"base_seed": seed, "point": 3, "data_seed": 0},
        "state": f"base {seed}",
        "loss": dict.fromkeys(("train", "held_out_plan"), loss),
        "diverged": False,
        "fp4_fraction": 0.0 if contender == "bf16" else 1.0,
        "shares": {contender: 1.0},
        "plan": None,
        "seconds": {"training": 0.5},
        "steps": steps,
        "machine": "a machine",
        "commit": "abc",
    }


LINES = [line("bf16", seed, steps, 4.0 + seed) for steps in GAPS for seed in range(3)] + [
    line("fp4", seed, steps, (4.0 + seed) * (1 + gap / 100))
    for steps, gaps in GAPS.items()
    for seed, gap in enumerate(gaps)
]


def test_the_change_is_that_of_the_same_forks_and_ends_where_two_have_both_lengths() -> None:
    (course,) = courses_of(LINES, [PAIR, ("nvfp4", "bf16")], "held_out_plan")
    change, expected = course.change["held_out_plan"], ttest_rel(GAPS[100], GAPS[50])
    assert (course.first, course.last, change.forks) == (50, 100, 3)
    assert change.mean == pytest.approx(0.25)  # 0.3, 0.1, 0.35
    assert change.p == pytest.approx(expected.pvalue) == course.p_holm
    low, high = expected.confidence_interval()
    assert change.half_width == pytest.approx((high - low) / 2)
    assert {steps: found.forks for steps, found in course.at.items()} == {50: 3, 100: 3, 200: 1}
    assert course.at[100].mean == pytest.approx(0.35)


def test_the_readings_are_corrected_together() -> None:
    others = [line("fp8", *key, 4.0 + key[0] + (key[0] - 1) * key[1] * 1e-4) for key in ((0, 50), (1, 50), (0, 100))]
    others += [line("fp8", 1, 100, 5.01)]
    many = [line("bf16", seed, steps, 4.0) for seed in range(3, 9) for steps in (50, 100)]
    many += [line("fp4", seed, steps, 4.0 + steps * 1e-3 + seed * 1e-5) for seed in range(3, 9) for steps in (50, 100)]
    found = courses_of([*LINES, *others, *many], [PAIR, ("fp8", "bf16")], "held_out_plan")
    ps = [course.change["held_out_plan"].p for course in found]
    assert [course.level for course in found] == [0.025, 0.025]
    assert found[0].p_holm == pytest.approx(2 * ps[0]) and found[1].p_holm == pytest.approx(ps[1])
    assert [course.reading for course in found] == ["rises", "not significant"]
    assert [course.reading for course in courses_of([*LINES, *many], [("bf16", "fp4")], "held_out_plan")] == ["falls"]


def test_the_table_over_lengths_has_the_difference_after_each_and_the_change() -> None:
    text = length_table(LINES, "to-bf16", courses_of(LINES, [PAIR], "held_out_plan"))
    row = "| fp4 against bf16 | +0.100 ± 0.248 | +0.350 ± 0.124 | +1.000 | 50 to 100 | 3 | +0.250 ± 0.329 |"
    assert row in text
    assert text.startswith("**To bf16 over lengths.** ")


def test_one_length_has_no_table_over_lengths() -> None:
    assert courses_of([one for one in LINES if one["steps"] == 50], [PAIR], "held_out_plan") == []
    assert length_table(LINES, "to-bf16", []) == ""


@pytest.mark.slow
@pytest.mark.parametrize("shift", [None, {"name": "code", "after": 25}])
def test_a_report_has_tables_over_lengths_of_one_training_alone(tmp_path: Path, shift: dict[str, Any] | None) -> None:
    path, end = tmp_path / "lines.jsonl", "" if shift is None else "-code"
    shifted = [one if shift is None else one | {"fork": one["fork"] | {"shift": shift}} for one in LINES]
    path.write_text("".join(json.dumps(one) + "\n" for one in shifted))
    asked = {"families": {"to-bf16": [PAIR]}, "prefix": "some"}
    page = tmp_path / "page.md"
    page.write_text(f"<!-- some:to-bf16-lengths{end} -->\n<!-- /some:to-bf16-lengths{end} -->\n")
    with pytest.raises(ValueError, match="unknown tables"):
        write_report([path], None, Asked(**asked), [page])
    text = write_report([path], None, Asked(over_lengths=True, **asked), [page], tmp_path / "figures")
    assert "| 50 to 100 | 3 |" in page.read_text() and "| 50 to 100 | 3 |" in text
    assert (tmp_path / "figures" / f"some-to-bf16-lengths{end}.png").stat().st_size > 0


def planned(contender: str, seed: int, steps: int, plan: str, *refreshed: tuple[int, str]) -> dict[str, Any]:
    shares = {"fp8": 0.5, "fp4": 0.5}
    plans = [{"step": step, "shares": shares, "plan": own} for step, own in refreshed]
    return line(contender, seed, steps, 4.0) | {"shares": shares, "plan": plan, "plans": plans}


# Two linears: forward, grad_input, grad_weight of each; 0 is FP8, 1 FP4.
PLANS = [
    planned("snip", 0, 50, "011011", (20, "011011")),
    planned("snip", 0, 100, "111001", (20, "011011"), (60, "111001")),
    planned("snip", 1, 100, "011111", (20, "011111"), (60, "011111")),
    planned("rule", 0, 100, "011011"),
    planned("rule", 1, 100, "011011"),
    line("fp4", 0, 100, 4.0),
]


def test_the_table_of_plans_counts_what_was_counted_by_hand() -> None:
    text = plan_table(PLANS, [("snip", "rule"), ("fp4", "rule")])
    # Forward in FP4: 0, 1, 1, 1 of 2; grad_input: 2, 1, 2, 2; grad_weight: all. The refreshes after 60 steps change 2
    # and 0 GEMMs; the two forks differ in 1 after 20 steps and in 3 after 60.
    assert (
        "| snip | 2 | 2 | 37.5% (0 to 50) | 87.5% (50 to 100) | 100% | 1.0 (0 to 2) | 1.0 (0 to 2) | 2.0 (1 to 3) |"
        in text
    )
    assert "| rule | 2 | 1 | 0% | 100% | 100% | - | - | 0 |" in text
    assert "| snip against rule | 2 | 1.0 (0 to 2) | 0.8 (0 to 1) | 0.2 (0 to 1) | 0 |" in text
    assert "fp4 against" not in text and "of all 6" in text


def test_a_plan_of_one_format_among_others_counts_as_all_in_it() -> None:
    whole = {"step": 60, "shares": {"fp4": 1.0}, "plan": None}
    first = planned("snip", 0, 100, "011011", (20, "011011"))
    text = plan_table([first | {"plan": None, "shares": {"fp4": 1.0}, "plans": [*first["plans"], whole]}], [])
    assert "| snip | 1 | 2 | 50.0% (0 to 100) | 100% | 100% | 2 | 2 | - |" in text


def test_lines_without_plans_have_no_table_of_plans() -> None:
    assert plan_table(LINES, [PAIR]) == ""
