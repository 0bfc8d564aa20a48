"""Figures that pages quote of the forks through the whole corpus are those of the committed lines."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval.bakeoff import fork_tables
from eval.bakeoff.fork_lengths import courses_of
from eval.bakeoff.fork_lines import read_forks
from eval.bakeoff.fork_recipe import load_recipe
from eval.bakeoff.fork_report import Asked, write_report

ROOT = Path(__file__).resolve().parents[2]
LONGER = ROOT / "eval" / "results" / "forks-longer.jsonl"
BY_GEMM, BY_LAYER = (f"snip {{fp4, fp8}}, 75% by {where}, refresh_every 250" for where in ("gemm", "layer"))
RULE = "backward-first {fp4, fp8}, 75% by gemm"


def text_of(page: str) -> str:
    """A page, each run of white space as one space."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


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
def test_by_layer_ends_above_by_gemm_after_1400_and_2100_steps() -> None:
    page = text_of("docs/results-longer.md")
    readings = {700: fork_tables.NOT_SIGNIFICANT, 1400: "higher", 2100: "higher"}
    for steps, reading in readings.items():
        found = longer_test(BY_LAYER, BY_GEMM, "to-snip-by-gemm", steps)
        assert found.reading == reading and str(found.main) in page
    assert str(longer_test(BY_LAYER, BY_GEMM, "to-snip-by-gemm", 2100).main).removeprefix("+") in text_of("README.md")


@pytest.mark.slow
def test_the_gap_grows_significantly_by_layer_alone() -> None:
    pairs = load_recipe(ROOT / "recipes" / "forks-longer.yaml").comparisons["to-bf16"]
    courses = {course.one: course for course in courses_of(longer(), pairs, "held_out_plan")}
    assert {name for name, course in courses.items() if course.reading == "rises"} == {BY_LAYER}
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
    recipe, page = ROOT / "recipes" / "forks-longer.yaml", "docs/results-longer.md"
    command = (
        "python -m eval.bakeoff.forks report eval/results/forks-longer.jsonl --recipe recipes/forks-longer.yaml "
        "--output eval/results/forks-longer.md --docs docs/results-longer.md --figures runs/forks-longer"
    )
    copy = Path(shutil.copy(ROOT / page, tmp_path))
    text = write_report([LONGER], None, Asked.by(load_recipe(recipe), recipe, command=command), [copy])
    assert copy.read_text(encoding="utf-8") == (ROOT / page).read_text(encoding="utf-8")
    assert text == (ROOT / "eval" / "results" / "forks-longer.md").read_text(encoding="utf-8")
