"""Speed at equal loss: the arithmetic, and its table in the documentation (eval/equal_loss.py)."""

from __future__ import annotations

import math
import re

import pytest

from eval import equal_loss
from eval.bakeoff.fork_statistics import Difference


def test_the_table_in_the_documentation_is_what_the_module_gives() -> None:
    text = (equal_loss.ROOT / "docs" / "results-formats.md").read_text(encoding="utf-8")
    marker = equal_loss.MARKER
    [found] = re.findall(rf"<!-- {marker} -->\n(.*)\n<!-- /{marker} -->", text, re.DOTALL)
    assert found == equal_loss.section()


def test_the_readme_quotes_the_runs_at_124m() -> None:
    readme = " ".join((equal_loss.ROOT / "README.md").read_text(encoding="utf-8").split())
    speeds = equal_loss.measured_speeds()
    for gap in equal_loss.full_runs(speeds):
        if gap.source.startswith("124M"):
            factors = equal_loss.more_steps(gap.gap, gap.slope)
            more, low, high = (f"{100 * (factor - 1):.0f}" for factor in factors)
            assert (
                f"{more}% more steps (95% interval {low} to {high})" in readme or f"{more}% ({low} to {high})" in readme
            )
            value, slow, fast = (gap.speeds["8B, 8 layers"] / factors[place] for place in (0, 2, 1))
            assert f"{value:.2f} ({slow:.2f} to {fast:.2f})" in readme


def test_a_gap_is_made_good_by_the_steps_in_which_the_loss_falls_by_it() -> None:
    # A loss proportional to steps^-0.1 is 1% lower after 1 / 0.99^10 times the steps.
    exact = Difference.independent(math.log(1 / 0.99), 0.0, 2)
    factor, low, high = equal_loss.more_steps(exact, Difference.independent(0.1, 0.0, 2))
    assert factor == pytest.approx(1 / 0.99**10) == pytest.approx(low) == pytest.approx(high)


def test_the_interval_has_the_errors_of_gap_and_slope() -> None:
    gap, slope = Difference.independent(0.01, 0.002, 9), Difference.independent(0.1, 0.01, 5)
    factor, low, high = map(math.log, equal_loss.more_steps(gap, slope))
    half = math.hypot(gap.half_width / 0.1, 0.1 * slope.half_width / 0.1)
    assert (factor, low, high) == pytest.approx((0.1, 0.1 - half, 0.1 + half))


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
    assert equal_loss._fork_slope([5 * step**-0.07 for step in equal_loss.FORK_STEPS]) == pytest.approx(0.07)
