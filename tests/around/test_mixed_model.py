"""Does the mean of forks that share bases have the interval that it claims?"""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import t as student_t
from scipy.stats import ttest_1samp

from eval.bakeoff.mixed_model import mixed_mean

# statsmodels 0.15.0: MixedLM(differences, ones, groups=bases).fit(reml=True, method="bfgs", gtol=1e-10)
BALANCED = ([1.59, 1.83, 0.02, -2.79, -3.42, 0.77, 0.64, 0.07, 0.14, -1.24, -1.62, -0.96], (3, 3, 3, 3))
BOUNDARY = ([2.03, 1.03, -0.02, 0.3, 0.3, 1.7, 0.69, 0.71, 1.96, -1.09, -0.27, 0.91, 0.6, 0.12, 0.69], (4, 2, 3, 1, 5))


def bases_of(sizes: tuple[int, ...]) -> list[int]:
    return np.repeat(np.arange(len(sizes)), sizes).tolist()


def test_mean_error_and_variances_are_those_of_statsmodels() -> None:
    differences, sizes = BALANCED
    found = mixed_mean(differences, bases_of(sizes))
    expected = (-0.4141666666666667, 0.6842600423477236, 1.161785025052519, 1.2527203731622052)
    assert (found.mean, found.error, found.between, found.within) == pytest.approx(expected, rel=1e-5)


def test_forks_in_equal_numbers_are_as_many_as_their_bases() -> None:
    differences, sizes = BALANCED
    found = mixed_mean(differences, bases_of(sizes))
    means = np.reshape(differences, (4, 3)).mean(1)
    interval = ttest_1samp(means, 0).confidence_interval(0.95)
    half = student_t.ppf(0.975, found.freedom) * found.error
    assert found.freedom == pytest.approx(3, abs=1e-6)
    assert [found.mean - half, found.mean + half] == pytest.approx(list(interval), rel=1e-6)


def test_bases_that_explain_nothing_leave_the_plain_test() -> None:
    differences, sizes = BOUNDARY
    found = mixed_mean(differences, bases_of(sizes))
    assert (found.between, found.freedom) == (0.0, 14)
    assert found.error == pytest.approx(np.std(differences, ddof=1) / 15**0.5, rel=1e-12)


@pytest.mark.parametrize("bases", [["a", "b", "c"], ["a", "a", "a"]])
def test_one_fork_per_base_or_one_base_is_the_plain_test(bases: list[str]) -> None:
    found = mixed_mean([1.0, 2.0, 3.0], bases)
    assert (found.mean, found.error, found.freedom) == (2.0, pytest.approx(3**-0.5), 2)


def test_forks_that_equal_each_other_within_bases_are_one_each() -> None:
    found = mixed_mean([1.0, 1.0, 2.0, 2.0, 3.0], "aabbc")
    assert (found.mean, found.freedom) == (2.0, 2)
    assert mixed_mean([1.0, 1.0, 1.0], "aab").error == 0.0


@pytest.mark.parametrize("given", [([1.0], "a"), ([1.0, 2.0], "a")])
def test_too_few_forks_are_refused(given: tuple[list[float], str]) -> None:
    with pytest.raises(ValueError, match="expected as many, and at least 2"):
        mixed_mean(*given)


@pytest.mark.parametrize(("sizes", "between"), [((3,) * 4, 1.0), ((3,) * 12, 0.5), ((4, 3, 3, 2, 1, 3), 0.7)])
def test_the_interval_holds_the_truth_as_often_as_it_says(sizes: tuple[int, ...], between: float) -> None:
    rng, bases = np.random.default_rng(0), np.array(bases_of(sizes))
    held, plain = 0, 0
    for _ in range(500):
        differences = 0.1 + between * rng.normal(size=len(sizes))[bases] + rng.normal(size=len(bases))
        found = mixed_mean(differences.tolist(), bases.tolist())
        held += abs(found.mean - 0.1) < student_t.ppf(0.975, found.freedom) * found.error
        low, high = ttest_1samp(differences, 0).confidence_interval(0.95)
        plain += low < 0.1 < high
    assert 0.925 < held / 500 < 0.985
    assert plain / 500 < 0.925  # the test that takes them for independent says too much
