"""Are intervals, tests, corrections and powers those of the textbooks?"""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import nct, ttest_1samp, ttest_rel
from scipy.stats import t as student_t

from eval.bakeoff.fork_statistics import DETECTION, Difference, holm


def test_an_interval_is_that_of_students_t() -> None:
    found = Difference.of([1.0, 2.0, 3.0])
    assert (found.mean, found.deviation, found.forks) == (2.0, 1.0, 3)
    assert found.error == pytest.approx(3**-0.5)
    assert found.half_width == pytest.approx(4.302653 * 3**-0.5)  # the t of 2 degrees of freedom
    assert str(Difference.of([1.0])) == "+1.000"
    assert str(Difference.of([])) == "-"


def test_p_and_interval_are_scipy_s() -> None:
    ours, theirs = np.random.default_rng(0).normal(size=(2, 8))
    found = Difference.of(list(ours - theirs))
    assert found.p == pytest.approx(ttest_rel(ours, theirs).pvalue, rel=1e-12)
    interval = ttest_1samp(ours - theirs, 0).confidence_interval(0.95)
    assert [found.mean - found.half_width, found.mean + found.half_width] == pytest.approx(list(interval), rel=1e-12)


@pytest.mark.parametrize(("differences", "p"), [([], None), ([0.1], None), ([0.0, 0.0], 1.0), ([0.1, 0.1], 0.0)])
def test_what_has_no_t_statistic_has_the_p_of_its_limit(differences: list[float], p: float | None) -> None:
    assert Difference.of(differences).p == p


def test_holm_s_correction_of_a_worked_example() -> None:
    # 0.005 * 4, 0.01 * 3, 0.03 * 2, and 0.04, which is at least the one before it.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.5]) == [1.0, 1.0]
    assert holm([None, 0.02, None, 0.01]) == [None, pytest.approx(0.02), None, pytest.approx(0.02)]
    assert holm([]) == []


def standardised(forks: int) -> Difference:
    return Difference.independent(0.0, 1.0, forks)


@pytest.mark.parametrize(
    ("effect", "forks", "power"),
    [(0.5, 34, 0.8077775), (0.8, 15, 0.8213), (0.0, 8, 0.05)],  # G*Power 3.1's manual; Cohen's tables; the level
)
def test_power_is_that_of_the_tables(effect: float, forks: int, power: float) -> None:
    assert standardised(forks).power(effect) == pytest.approx(power, abs=1e-4)


def test_power_is_the_share_of_simulated_experiments_that_find_the_effect() -> None:
    samples = np.random.default_rng(0).normal(0.1, 0.06, size=(20000, 4))
    found = ttest_1samp(samples, 0, axis=1).pvalue < 0.01
    assert Difference.independent(0.0, 0.06, 4).power(0.1, 0.01) == pytest.approx(found.mean(), abs=0.01)


@pytest.mark.parametrize(("deviation", "forks", "level"), [(0.03, 4, 0.05 / 14), (0.2, 8, 0.05), (0.09, 3, 0.01)])
def test_power_is_the_tail_of_the_noncentral_t(deviation: float, forks: int, level: float) -> None:
    bound, shift = student_t.isf(level / 2, forks - 1), 0.1 / (deviation / forks**0.5)
    assert Difference.independent(0.0, deviation, forks).power(0.1, level) == pytest.approx(
        nct.sf(bound, forks - 1, shift) + nct.sf(bound, forks - 1, -shift), abs=1e-4
    )


@pytest.mark.parametrize("deviation", [0.028, 0.017, 0.014, 0.001, 1e-6])
def test_power_is_a_probability_however_small_the_noise(deviation: float) -> None:
    powers = [Difference.independent(0.0, deviation, 4).power(effect, 0.05 / 6) for effect in (0.0, 0.05, 0.1, 1.0)]
    assert powers == sorted(powers)
    assert powers[0] == pytest.approx(0.05 / 6, rel=1e-3)
    assert powers[-1] == pytest.approx(1.0)


def test_power_without_deviation_or_without_pairs() -> None:
    assert Difference.independent(0.0, 0.0, 4).power(0.1) == 1.0
    assert Difference.of([0.1]).power(0.1) is None


@pytest.mark.parametrize(("deviation", "forks", "level"), [(0.019, 11, 0.05 / 14), (0.2, 2, 0.05), (1e-6, 4, 0.01)])
def test_what_is_detectable_is_found_with_that_power(deviation: float, forks: int, level: float) -> None:
    difference = Difference.independent(0.0, deviation, forks)
    detectable = difference.detectable(level)
    assert detectable is not None
    assert difference.power(detectable, level) == pytest.approx(DETECTION, abs=1e-4)


def test_with_34_forks_half_a_deviation_is_just_detectable() -> None:
    assert 0.49 < (standardised(34).detectable() or 0.0) < 0.5  # G*Power: 0.5 has the power 0.808


def test_detectable_without_deviation_or_without_pairs() -> None:
    assert Difference.independent(0.0, 0.0, 4).detectable() == 0.0
    assert Difference.of([0.1]).detectable() is None


def test_forks_of_one_base_count_for_less_than_independent_ones() -> None:
    differences, bases = [0.1, 0.11, 0.2, 0.21, 0.3, 0.31], [0, 0, 1, 1, 2, 2]
    shared, alone = Difference.of(differences, bases), Difference.of(differences)
    assert (shared.mean, shared.forks) == (pytest.approx(alone.mean), 6)
    assert shared.half_width > 2 * alone.half_width
    assert shared.between == pytest.approx(0.1, abs=0.001)
    assert (shared.p or 0.0) > (alone.p or 1.0)


@pytest.mark.parametrize(("deviation", "forks"), [(0.05, 8), (0.10, 19), (0.15, 37)])
def test_a_contrast_asks_for_as_many_forks_as_its_noise(deviation: float, forks: int) -> None:
    # Of 15 tests after Holm's correction, 0.1%.
    assert Difference.independent(0.0, deviation, 6).forks_for(0.1, 0.05 / 15) == forks


def test_a_contrast_without_noise_or_without_hope_says_so() -> None:
    assert Difference.independent(0.0, 0.0, 4).forks_for(0.1) == 2
    assert Difference.independent(0.0, 100.0, 4).forks_for(0.1) is None
    assert Difference.of([0.1]).forks_for(0.1) is None


def test_simulated_experiments_with_that_many_forks_find_the_effect() -> None:
    needed = Difference.independent(0.0, 0.1, 6).forks_for(0.1, 0.05 / 15)
    samples = np.random.default_rng(0).normal(0.1, 0.1, size=(4000, needed or 0))
    assert (ttest_1samp(samples, 0, axis=1).pvalue < 0.05 / 15).mean() == pytest.approx(DETECTION, abs=0.04)


def test_a_family_without_effects_errs_as_seldom_as_one_test() -> None:
    # Contenders of one family have the fork of their common opponent, and so its noise, in common.
    rng = np.random.default_rng(0)
    samples = rng.normal(size=(600, 10, 8)) + rng.normal(size=(600, 1, 8))
    families = ttest_1samp(samples, 0, axis=2).pvalue
    erring = np.mean([min(p for p in holm(list(ps)) if p is not None) < 0.05 for ps in families])
    assert erring < 0.075
    assert np.mean(families.min(1) < 0.05) > 0.15  # without the correction
