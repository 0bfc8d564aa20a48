"""Speed at equal loss: the arithmetic, and its table in the documentation (eval/equal_loss.py)."""

from __future__ import annotations

import itertools
import math
import re
from functools import cache

import numpy as np
import pytest
from committed import prose_of
from scipy.stats import t as student_t

from eval import equal_loss
from eval.bakeoff.fork_statistics import Difference

PAGE = "docs/results-formats.md"
ALL_FP4, DEFAULT, ON_HOPPER, BY_GEMM, RULE, BY_LAYER = equal_loss.WHOLE
LARGE, SMALL = equal_loss.SHAPES


@cache
def whole_trainings() -> dict[str, equal_loss.Gaps]:
    """Contender -> its gaps over a whole training."""
    return {one.contender: one for one in equal_loss.whole_trainings(equal_loss.measured_speeds())}


def more(contender: str, digits: int) -> str:
    """How many more steps a contender needs, in percent: value and interval, as prose has them."""
    one = whole_trainings()[contender]
    return "{}% ({} to {})".format(
        *(f"{100 * (factor - 1):.{digits}f}" for factor in equal_loss.more_steps(one.gaps, one.slopes))
    )


def left(contender: str, shape: str, law: str | None = None) -> str:
    """The speed at equal loss of a contender."""
    one = whole_trainings()[contender]
    slopes = [equal_loss.law_slope(law)] * len(one.gaps) if law else one.slopes
    return equal_loss._at_equal_loss(one.speeds[shape], equal_loss.more_steps(one.gaps, slopes))


def test_the_table_in_the_documentation_is_what_the_module_gives() -> None:
    text = (equal_loss.ROOT / PAGE).read_text(encoding="utf-8")
    marker = equal_loss.MARKER
    [found] = re.findall(rf"<!-- {marker} -->\n(.*)\n<!-- /{marker} -->", text, re.DOTALL)
    assert found == equal_loss.section()


def test_the_page_says_how_much_of_the_speed_is_left_after_a_whole_training() -> None:
    text = prose_of(PAGE)
    speeds = {name: whole_trainings()[name].speeds for name in (ALL_FP4, BY_GEMM, RULE)}
    assert f"all FP4 needs {more(ALL_FP4, 1).replace('(', 'more steps (95% interval ')}, the default" in text
    assert f"by GEMM at 75% needs {more(BY_GEMM, 1)}, `backward-first` {more(RULE, 1)}" in text
    assert f"SNIP by layer {more(BY_LAYER, 1)}." in text
    assert {len(one.gaps) for one in whole_trainings().values()} == {8}
    assert f"each needs leave all FP4 {left(ALL_FP4, LARGE)} of its {speeds[ALL_FP4][LARGE]:.2f}" in text
    assert f"SNIP by GEMM {left(BY_GEMM, LARGE)} of its {speeds[BY_GEMM][LARGE]:.2f}" in text
    assert f"all FP4 {left(ALL_FP4, SMALL)}, so nothing of its {speeds[ALL_FP4][SMALL]:.2f}" in text
    assert f"SNIP by GEMM {left(BY_GEMM, SMALL)} of its {speeds[BY_GEMM][SMALL]:.2f}" in text
    for shape in equal_loss.SHAPES:
        assert f"`backward-first`{', which has no refresh,' * (shape == LARGE)} {left(RULE, shape)} of its" in text
        assert f"of its {speeds[RULE][shape]:.2f}" in text
    for name, shape in ((ALL_FP4, LARGE), (BY_GEMM, LARGE), (BY_GEMM, SMALL)):
        assert " and ".join(left(name, shape, law) for law in equal_loss.LAWS) in text


def test_the_page_says_how_much_of_the_default_s_speed_is_left_in_both_pairs_of_formats() -> None:
    text = prose_of(PAGE)
    assert f"the default at 75% {more(DEFAULT, 1)}, and in {{mxfp4, fp8-tensor}} {more(ON_HOPPER, 1)}." in text

    def of(name: str, shape: str) -> str:
        return f"{left(name, shape)} of its {whole_trainings()[name].speeds[shape]:.2f}"

    assert f"leaves the default {of(DEFAULT, LARGE)} with a refresh every 500 steps" in text
    assert f"in {{mxfp4, fp8-tensor}} {of(ON_HOPPER, LARGE)}; at 1.1B {of(DEFAULT, SMALL)}" in text
    assert f"of its {whole_trainings()[DEFAULT].speeds[SMALL]:.2f}, and {of(ON_HOPPER, SMALL)}." in text
    by_laws = {shape: " and ".join(left(DEFAULT, shape, law) for law in equal_loss.LAWS) for shape in equal_loss.SHAPES}
    assert f"the default would keep {by_laws[LARGE]} at the 8B shape, and {by_laws[SMALL]} at 1.1B" in text


def test_the_page_says_how_much_the_last_100_steps_cost_and_which_slopes_come_before_the_end() -> None:
    text = prose_of(PAGE)
    found = [equal_loss.more_steps(one.gaps, one.slopes) for one in equal_loss.last_steps(equal_loss.measured_speeds())]
    values, _, highs = (sorted(100 * (factor - 1) for factor in column) for column in zip(*found, strict=True))
    assert f"{values[0]:.1f} to {values[-1]:.1f}% more steps" in text
    assert f"end at or below {highs[-1]:.1f})" in text
    lines, lengths = equal_loss.read("eval/results/forks-longer.jsonl"), equal_loss.LENGTHS
    for before, after in itertools.pairwise(lengths):
        slope = Difference.of(list(equal_loss.slopes_between(lines, before, after).values()))
        assert f"{slope}".removeprefix("+") + f" between {'steps ' * (after == 2700)}{before + 100:,} and" in text


def test_the_readme_quotes_the_whole_trainings() -> None:
    text, speeds = prose_of("README.md"), whole_trainings()[DEFAULT].speeds
    assert f"500 steps, {speeds[LARGE]:.2f} times (the default at 75%)" in text
    assert more(ALL_FP4, 0).replace("(", "more steps (95% interval ") in text
    assert f"the default {more(DEFAULT, 0)}." in text
    assert f"leaves {left(ALL_FP4, LARGE)} and {left(DEFAULT, LARGE)}" in text
    assert f"{left(ALL_FP4, SMALL)} and {left(DEFAULT, SMALL)}" in text
    fastest = whole_trainings()[ON_HOPPER].speeds
    kept = [f"{left(ON_HOPPER, shape)} of {fastest[shape]:.2f}" for shape in (LARGE, SMALL)]
    assert f"the default keeps {kept[0]}, and at 1.1B {kept[1]}." in text
    by_laws = [
        " and ".join(left(name, LARGE, law).split()[0] for law in equal_loss.LAWS) for name in (ALL_FP4, DEFAULT)
    ]
    assert f"{by_laws[0]} for all FP4 and {by_laws[1]} for the default at 8B" in text
    small = " and ".join(left(DEFAULT, SMALL, law) for law in equal_loss.LAWS)
    assert f"{small} for the default at 1.1B" in text


def test_a_refresh_adds_its_steps_to_those_between_two() -> None:
    # 100 steps at twice BF16's speed take 50 of its steps, and the refresh 10.
    assert equal_loss.Measured(2.0, 10.0).with_refreshes(100) == pytest.approx(100 / 60)
    assert equal_loss.Measured(2.0, 10.0).with_refreshes(math.inf) == 2.0


def test_a_gap_is_made_good_by_the_steps_in_which_the_loss_falls_by_it() -> None:
    # A loss proportional to steps^-0.1 is 1% lower after 1 / 0.99^10 times the steps.
    factor, low, high = equal_loss.more_steps([math.log(1 / 0.99)] * 3, [0.1] * 3)
    assert factor == pytest.approx(1 / 0.99**10) == pytest.approx(low) == pytest.approx(high)


def test_with_one_slope_for_all_forks_the_interval_is_that_of_the_gap() -> None:
    gaps = [0.008, 0.011, 0.009, 0.013]
    gap = Difference.of(gaps)
    found = [math.log(factor) for factor in equal_loss.more_steps(gaps, [0.1] * 4)]
    assert found == pytest.approx([10 * (gap.mean + side * gap.half_width) for side in (0, -1, 1)])


def test_at_both_ends_of_the_interval_the_paired_differences_are_just_significant() -> None:
    gaps, slopes = np.array([0.008, 0.011, 0.009, 0.013]), np.array([0.09, 0.12, 0.1, 0.11])
    _, *ends = equal_loss.more_steps(list(gaps), list(slopes))
    for end in ends:
        left_over = gaps - math.log(end) * slopes
        t = abs(left_over.mean()) / (left_over.std(ddof=1) / 2)
        assert t == pytest.approx(student_t.ppf(0.975, 3))


def test_forks_whose_losses_fall_alike_by_what_they_are_above_have_no_error() -> None:
    slopes = [0.08, 0.1, 0.12]
    factor, low, high = equal_loss.more_steps([slope / 10 for slope in slopes], slopes)
    assert math.log(factor) == pytest.approx(0.1) == pytest.approx(math.log(low)) == pytest.approx(math.log(high))


def test_a_slope_that_may_be_0_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mean of 0\.03, which is not significantly different from 0"):
        equal_loss.more_steps([0.01, 0.01, 0.02], [0.1, -0.05, 0.04])


@pytest.mark.parametrize("law", equal_loss.LAWS)
def test_the_slope_of_a_law_is_that_of_its_curve(law: str) -> None:
    least, a, b, alpha, beta = equal_loss.LAWS[law]

    def logarithm(tokens: float) -> float:
        return math.log(least + a / equal_loss.PARAMETERS**alpha + b / tokens**beta)

    step = 1e-4
    tokens = equal_loss.TOKENS
    difference = (logarithm(tokens * math.exp(-step)) - logarithm(tokens * math.exp(step))) / (2 * step)
    assert equal_loss.law_slope(law) == pytest.approx(difference, rel=1e-6)


def test_the_slope_of_a_fork_is_that_of_its_curve() -> None:
    assert equal_loss.curve_slope([5 * step**-0.07 for step in equal_loss.FORK_STEPS]) == pytest.approx(0.07)


def test_the_slope_between_two_lengths_counts_the_steps_before_the_fork() -> None:
    lines = [
        {
            "contender": contender,
            "steps": steps,
            "fork": {"base_seed": 0, "point": 100},
            "state": "a",
            "machine": "b",
            "loss": {"held_out_plan": 5 * (100 + steps) ** -slope},
        }
        for contender, slope in (("bf16", 0.07), ("fp4", 0.05))
        for steps in (700, 2700, 2100)
    ]
    assert list(equal_loss.slopes_between(lines, 2100, 2700).values()) == pytest.approx([0.07])
