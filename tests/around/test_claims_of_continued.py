"""Losses that the page on going on from a checkpoint of 124M quotes are those of the committed lines."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from pathlib import Path
from statistics import stdev

import pytest
from committed import RESULTS, check_report, detectable_of, prose_of, text_of
from continued import (
    GEMM_RULE,
    NAMES,
    PAGE,
    PAPER,
    RECIPE,
    RULE,
    SEEDS,
    SNIP,
    continued,
    family,
    gap,
    less,
    line_of,
    points,
    rows_of_losses,
    text,
)
from scipy.stats import t as t_distribution

from eval.bakeoff import fork_tables
from eval.bakeoff.fork_lines import by_contender, difference_of, fork_key, read_forks
from eval.bakeoff.fork_recipe import load_recipe

BY_GEMM, BY_LAYER = SNIP.format(75, "gemm"), SNIP.format(75, "layer")
OTHERS = [name for name in NAMES if name != "bf16"]


def test_which_lines_there_are() -> None:
    keys = {(line["contender"], line["fork"]["base_seed"], line["steps"]) for line in continued()}
    whole = {(name, seed, 1600) for name in NAMES for seed in SEEDS}
    of_seed_0 = {(name, 0, 1000) for name in NAMES if name != PAPER.format(50)}
    later = {("bf16", 1, 1000), ("bf16", 2, 1000), ("fp8", 2, 1000), (RULE, 2, 1000)}
    assert keys == whole | of_seed_0 | later and len(continued()) == len(keys) == 47
    assert sum(len(run.ids) for run in load_recipe(RECIPE).runs("text")) == 66
    assert (
        f"47 of the 66 forks ran: all {len(whole)} over 1,600 steps and {len(of_seed_0 | later)} over 1,000" in text()
    )
    assert f"{33 - len(of_seed_0 | later)} of the 33 forks over 1,000 steps" in text()
    assert "47 of 66 forks of `forks-continue-124m.yaml`: 21 of seed 0, 12 of seed 1 and 14 of seed 2" in text_of(
        "eval/README.md"
    )
    assert Counter(key[1] for key in keys) == {0: 21, 1: 12, 2: 14}
    assert {line["machine"] for line in continued()} == {"NVIDIA H200"}
    starts = [{fork_key(line) for line in continued() if line["fork"]["base_seed"] == seed} for seed in SEEDS]
    assert list(map(len, starts)) == [1, 1, 1]


def test_the_page_says_of_which_commits_the_lines_are() -> None:
    commits: dict[tuple[int, int], set[str]] = {}
    for line in continued():
        if (line["contender"], line["fork"]["base_seed"], line["steps"]) != ("bf16", 2, 1600):
            commits.setdefault((line["fork"]["base_seed"], line["steps"]), set()).add(line["commit"])
    assert commits == {
        **{(seed, 1000): {"6237e0a"} for seed in SEEDS},
        **{(0, 1600): {"6237e0a"}, (1, 1600): {"b76cbd1"}, (2, 1600): {"b171d5d"}},
    }
    of_bf16 = line_of("bf16", 1600, seed=2)
    assert of_bf16 and of_bf16["commit"] == "b76cbd1"
    told = (
        "seed 0 are of commit `6237e0a`, those of seed 1 and BF16 of seed 2 of `b76cbd1`, and the other ten of seed 2"
    )
    assert f"{told} of `b171d5d`. Those over 1,000 steps are of `6237e0a`." in text()


def test_the_longer_forks_repeat_the_losses_of_the_shorter_ones() -> None:
    repeated = {}
    for name in NAMES:
        for seed in SEEDS:
            early, late = line_of(name, 1000, seed), line_of(name, 1600, seed)
            if early is not None and late is not None:
                curve = early["training_curve"]
                assert len(curve) == 40 and late["training_curve"][:40] == curve
                assert late["plans"][: len(early["plans"])] == early["plans"]
                repeated[name, seed] = early["commit"] == late["commit"]
    assert len(repeated) == 14 and "and so are the plans, in all 14 cases" in text()
    of_two = {key for key, same in repeated.items() if not same}
    assert of_two == {("bf16", 1), ("bf16", 2), ("fp8", 2), (RULE, 2)}
    assert "four of the 14 cases are of two commits: BF16 of seeds 1 and 2, and FP8 and `layer-position` of" in text()


def test_losses_against_bf16() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert all(row in page for row in rows_of_losses())
    tests = family("to-bf16")
    assert len(tests) == 10 and {test.main.forks for test in tests.values()} == {3}
    higher = {name for name, test in tests.items() if test.reading != fork_tables.NOT_SIGNIFICANT}
    assert higher == {BY_LAYER} and tests[BY_LAYER].reading == "higher"
    costs = [tests[name].main for name in (BY_GEMM, "fp4", "fp8")]
    assert "SNIP by GEMM at 75% ends at {}%, all FP4 at {}%, FP8 at {}%.".format(*costs) in text()
    one = tests[BY_LAYER]
    assert f"Only SNIP by layer at 75% is: {one.main}% (corrected p = {one.p_holm:.3f})" in text()
    train = family("to-bf16", "train")
    above = {name for name, test in train.items() if test.reading == "higher"}
    assert above == {"fp4", PAPER.format(50), PAPER.format(75), SNIP.format(50, "layer"), BY_LAYER}
    assert not any(test.reading == "lower" for test in train.values())
    assert f"are significantly above BF16. All FP4 is at {train['fp4'].main}%." in text()
    for loss in ("held_out_high_precision", "held_out_averaged"):
        assert {test.reading for test in family("to-bf16", loss).values()} == {fork_tables.NOT_SIGNIFICANT}
    early = gap("fp8", 1000), gap("fp8", 1000, seed=2), gap(RULE, 1000), gap(RULE, 1000, seed=2)
    told = "FP8 is at {}% with seed 0 and {}% with seed 2, `layer-position` at {} and {}%"
    assert told.format(*early) in text()


def test_differences_between_contenders_are_those_of_the_lines() -> None:
    rules = list(family("to-rules").values())
    assert {test.reading for test in rules} == {fork_tables.NOT_SIGNIFICANT} and len(rules) == 2
    gemm, layer = rules
    assert f"less `backward-first` is at {gemm.main} points (detectable {detectable_of(gemm):.3f})" in text()
    assert f"less `layer-position` at {layer.main} ({detectable_of(layer):.3f})" in text()
    saved, by_layer = less(BY_GEMM, "fp4"), less(BY_LAYER, BY_GEMM)
    assert all(points(BY_GEMM, "fp4", seed) < 0 < points(BY_LAYER, BY_GEMM, seed) for seed in SEEDS)
    assert f"by {str(saved).removeprefix('-')} points (p = {saved.p:.3f}, uncorrected, not planned)" in text()
    assert f"the interval includes 0: {by_layer} points" in text() and by_layer.mean < by_layer.half_width
    told = f"the difference was {by_layer.mean:.2f} ± {by_layer.half_width:.2f}% in three pairs"
    assert told in text_of("docs/config.md")
    half, most = (less(PAPER.format(share), SNIP.format(share, "layer")) for share in (50, 75))
    assert all(points(PAPER.format(of), SNIP.format(of, "layer"), seed) > 0 for of in (50, 75) for seed in SEEDS)
    told = f"is at {half} points with 50% in FP4 (p = {half.p:.3f}) and at {most} with 75% (p = {most.p:.3f}; both"
    assert told in text()
    assert f"against all FP4: {less(PAPER.format(75), 'fp4')}." in text()


def test_what_all_seeds_have_and_what_they_have_not() -> None:
    orders = [sorted(OTHERS, key=lambda name: points(name, "bf16", seed)) for seed in SEEDS]
    pairs = list(combinations(OTHERS, 2))
    turned = [pair for pair in pairs if len({points(*pair, seed) > 0 for seed in SEEDS}) == 2]
    assert f"{len(pairs) - len(turned)} of the {len(pairs)} pairs of these ten contenders" in text()
    assert {order[0] for order in orders} == {"fp8"}
    second = {SNIP.format(50, "gemm"), BY_GEMM, GEMM_RULE, SNIP.format(50, "layer")}
    assert all(set(order[1:5]) == second for order in orders)
    assert all(set(order[-3:]) == {"fp4", PAPER.format(50), PAPER.format(75)} for order in orders)
    told = {
        (SNIP.format(50, "gemm"), BY_GEMM): "by GEMM at 50% against 75% ({:+.3f}, {:+.3f} and {:+.3f} points)",
        (BY_GEMM, GEMM_RULE): "by GEMM at 75% against `backward-first` ({:+.3f}, {:+.3f} and {:+.3f})",
        (SNIP.format(50, "layer"), GEMM_RULE): "at 50% against `backward-first` ({:+.3f}, {:+.3f} and {:+.3f})",
        (BY_LAYER, RULE): "at 75% against `layer-position` ({:+.3f}, {:+.3f} and {:+.3f})",
        (PAPER.format(75), "fp4"): "`snip-paper` at 75% against all FP4 ({:+.3f}, {:+.3f} and {:+.3f})",
    }
    assert set(map(frozenset, turned)) == set(map(frozenset, told))
    for pair, words in told.items():
        assert words.format(*(points(*pair, seed) for seed in SEEDS)) in text()


def test_with_seed_2_all_cost_most_in_the_held_out_loss_and_least_in_training() -> None:
    def gaps(name: str, loss: str = "held_out_plan") -> list[float]:
        return [points(name, "bf16", seed, loss=loss) for seed in SEEDS]

    assert all(max(gaps(name)) == gaps(name)[2] for name in OTHERS) and "With seed 2 all ten cost most" in text()
    assert f"FP8 too ({gap('fp8', 1600, seed=2)}%)" in text()
    least = [name for name in OTHERS if min(gaps(name, "train")) == gaps(name, "train")[2]]
    assert set(OTHERS) - set(least) == {"fp4"} and "with seed 2 nine of ten cost least there" in text()


def scatter_at_30m() -> list[float]:
    """Standard deviations of differences to BF16 over the seeds of the whole trainings at 30M."""
    lines = read_forks([RESULTS / "forks-longer.jsonl"])
    found = by_contender(line for line in lines if line["steps"] == 2700)
    bf16 = found.pop("bf16")
    return [difference_of(own, bf16, "held_out_plan").deviation for own in found.values()]


def test_what_an_interval_over_so_few_seeds_says() -> None:
    assert f"half of it is {t_distribution.ppf(0.975, 2):.1f} standard errors" in text()
    tests = family("to-bf16")
    found = sorted(detectable_of(test) for test in tests.values())
    assert f"find true differences of {found[0]:.1f} to {found[-1]:.1f}% with power 0.8" in text()
    forks = [test.main.forks_for(0.1, test.level) or 0 for test in tests.values()]
    assert f"it takes {min(forks)} to {max(forks)} forks per contender to find 0.1% against BF16" in text()
    scatter = [stdev(points(name, "bf16", seed) for seed in SEEDS) for name in OTHERS]
    longer = text_of("docs/results-longer.md")
    of_30m = scatter_at_30m()
    told = f"scatter by {min(scatter):.2f} to {max(scatter):.2f}% over these seeds, at 30M by "
    assert told + f"{min(of_30m):.2f} to {max(of_30m):.2f}%" in text()
    assert "power 0.8: 34 per contender" in longer and "49 for `backward-first` against the default" in longer
    assert "34 to 49 forks per contender" in text()
    half = SNIP.format(50, "layer")
    two = family("to-bf16", seeds=(0, 1))
    assert {name for name, test in two.items() if test.reading != fork_tables.NOT_SIGNIFICANT} == {half}
    assert gap(half, 1600) == gap(half, 1600, seed=1)
    assert f"at {gap(half, 1600)}% with seeds 0 and 1. So its interval over these two was ± " in text()
    assert f"was ± {two[half].main.half_width:.3f}, and it would have been the one significant difference" in text()
    told = f"With seed 2 it is at {gap(half, 1600, seed=2)}%, and the mean at {tests[half].main}%."
    assert told in text()
    ends = sorted(gap(BY_LAYER, 1600, seed=seed) for seed in SEEDS)
    assert f"SNIP by layer at 75% ({ends[0]} to {ends[-1]}%) may be chance too" in text()


def test_predictions_are_within_the_intervals() -> None:
    log = text_of("docs/log.md")
    told = "SNIP by GEMM at 75% +0.12, by layer +0.35; `snip-paper` +0.55; `backward-first` +0.13; all FP4 +0.48; FP8"
    assert f"{told} 0.00. No accuracy differs significantly but BoolQ's." in log
    predicted = {BY_GEMM: 0.12, BY_LAYER: 0.35, GEMM_RULE: 0.13, "fp4": 0.48, "fp8": 0.0}
    predicted |= {PAPER.format(share): 0.55 for share in (50, 75)}
    tests = family("to-bf16")
    assert all(abs(tests[name].main.mean - of) < tests[name].main.half_width for name, of in predicted.items())
    told = "all within the intervals: SNIP by GEMM at 75% +0.12, by layer at 75% +0.35, `snip-paper` +0.55, at either"
    assert f"{told} share, `backward-first` +0.13, all FP4 +0.48, FP8 0.00." in text()
    below = {name for name, of in predicted.items() if tests[name].main.mean < of}
    assert below == {BY_LAYER, PAPER.format(50)}
    assert "above the predictions but for SNIP by layer and `snip-paper` at 50%" in text()


def test_the_readme_says_what_low_precision_costs_at_124m() -> None:
    costs = [str(family("to-bf16")[name].main).removeprefix("+") for name in (BY_GEMM, "fp4")]
    told = "SNIP by GEMM at 75% ends {}% above BF16 and all FP4 {}%".format(*costs)
    assert told in prose_of("README.md")


@pytest.mark.slow
def test_the_tables_of_continued_forks_are_those_of_the_lines(tmp_path: Path) -> None:
    check_report(tmp_path, "continue-124m", page="docs/results-continued.md")
