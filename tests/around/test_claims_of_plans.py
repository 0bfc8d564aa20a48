"""Figures that README.md and docs/fidelity.md quote of plans over 100 steps are those of the committed lines."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import plan_damage_report as report
import pytest
from committed import ROOT, text_of
from scipy.stats import norm

from eval.bakeoff import fork_tables
from eval.bakeoff.fork_lines import read_forks
from eval.bakeoff.fork_recipe import load_recipe
from eval.bakeoff.fork_statistics import holm

LINES = ROOT / "benchmarks" / "results" / "plan_damage_100.jsonl"
PAGE = "docs/fidelity.md"
K, PLANS, DRAWS = 100, 30, 100_000
POOLS = {"by layer": "random layer plans", "by GEMM": "random GEMM plans", "all": "all plans at 75%"}
OWN, HIGH = "loss_plan", "loss_high"
DEFAULT, ABSOLUTE, GREEDY, RISE = "additive", "absolute-error", "greedy", "measured held-out loss"
# As the first table of the new part calls them.
ROWS = {
    DEFAULT: "**additive: dL + 0.1 dW^2** (default)",
    "loss": "dL (token-fisher) alone",
    "paper": "paper: dL + dW",
    "taylor": "dL with first order (taylor)",
    "weight": "dW alone",
    ABSOLUTE: "absolute error",
    "relative-error": "relative error",
    "snip-paper": "Q of `snip-paper`",
    GREEDY: "`greedy`",
    "fisher": "`fisher`",
    RISE: "measured one-step rise of the held-out loss",
}
# Rows of the older run's table that the new one does not have.
OLD_ROWS = {"weight^2": "dW^2 alone", "bias": "bias of dW alone", "loss+horizon-100": "dL + horizon over 100 steps"}
OTHERS = [name for name in ROWS if name not in (DEFAULT, RISE)]


@cache
def case() -> report.Case:
    return report.Case.load(LINES)


@cache
def damages(pool: str, measure: str) -> tuple[dict[str, report.Array], report.Array]:
    """Returns a pool's figures by objective, and its damages (plans, repeats)."""
    names = case().of_kinds(report.POOLS[POOLS[pool]])
    kept, table = case().table(names, K, measure)
    assert kept == names and table.shape[1] == 2 and (pool == "all" or len(names) == PLANS)
    return case().predictors(kept, POOLS[pool] in report.BY_LAYER), table


def rho(objective: str, pool: str, measure: str = OWN) -> float:
    figures, table = damages(pool, measure)
    return report.spearman(figures[objective], table.mean(1))


def variance(rank_correlation: float) -> float:
    """Of the rank correlation of 30 pairs under Fisher's transformation: Bonett and Wright (2000)."""
    return (1 + rank_correlation**2 / 2) / (PLANS - 3)


def interval(rank_correlation: float) -> tuple[float, float]:
    """95%."""
    half, middle = norm.ppf(0.975) * math.sqrt(variance(rank_correlation)), math.atanh(rank_correlation)
    return math.tanh(middle - half), math.tanh(middle + half)


def with_interval(figure: float, of: Callable[[float], float] = lambda value: value) -> str:
    low, high = map(of, interval(figure))
    return f"{of(figure):.2f} ({low:.2f} to {high:.2f})"


def reliability(pool: str, measure: str) -> str:
    """With the interval of the two repeats' rank correlation, both by Spearman-Brown's formula."""
    table = damages(pool, measure)[1]
    text = with_interval(report.spearman(*table.T), lambda r: 2 * r / (1 + r) if r > 0 else r)
    assert text.startswith(f"{report.reliability(table)} (")
    return text


def row_of(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


@cache
def rows_of_page() -> list[str]:
    return (ROOT / PAGE).read_text(encoding="utf-8").splitlines()


# ------------------------------------------------------------------------------------------------- rank correlations


def test_readme_has_the_rank_correlations_of_the_lines() -> None:
    low, high = interval(rho(DEFAULT, "by layer"))
    text = text_of("README.md")
    assert f"{rho(DEFAULT, 'by layer'):.2f} (95% interval {low:.2f} to {high:.2f}) by layer" in text
    assert f"and {with_interval(rho(DEFAULT, 'by GEMM'))} by GEMM" in text
    absolute = [with_interval(rho(ABSOLUTE, pool)) for pool in ("by layer", "by GEMM")]
    assert "reaches {} and {}".format(*absolute) in text
    old = old_figures()
    assert f"{old[DEFAULT, 'by layer']:.2f} and {old[DEFAULT, 'by GEMM']:.2f}" in text


def columns() -> list[tuple[str, str]]:
    return [("by layer", OWN), ("by GEMM", OWN), ("all", OWN), ("by layer", HIGH), ("by GEMM", HIGH)]


def test_the_table_of_rank_correlations_is_that_of_the_lines() -> None:
    def cell(objective: str, pool: str, measure: str) -> str:
        found = rho(objective, pool, measure)
        return f"{found:.2f}" if pool == "all" else with_interval(found)

    first = [
        report.reliability(damages(pool, measure)[1]) if pool == "all" else reliability(pool, measure)
        for pool, measure in columns()
    ]
    assert row_of(["reliability of the truth", *first]) in rows_of_page()
    for name, label in ROWS.items():
        assert row_of([label, *(cell(name, *column) for column in columns())]) in rows_of_page()


@cache
def old_figures() -> dict[tuple[str, str], float]:
    """What the page's table of the older run has at 100 steps."""
    found = {}
    for name, label in (ROWS | OLD_ROWS).items():
        own = [row.strip("| ").split(" | ") for row in rows_of_page() if row.startswith(f"| {label} | 0")]
        cells = next((cells for cells in own if "(" not in cells[1]), None)
        if cells:
            found[name, "by layer"], found[name, "by GEMM"] = float(cells[1]), float(cells[3])
    assert len(found) == 22
    return found


def test_the_page_says_which_older_figures_the_new_intervals_leave_out() -> None:
    out = {"by layer": "", "by GEMM": ""}
    ps = []
    for (name, pool), old in old_figures().items():
        new = rho(name, pool)
        low, high = interval(new)
        if not low <= old <= high:
            out[pool] += f"{name} {'up' if new > old else 'down'}; "
        away = abs(math.atanh(new) - math.atanh(old)) / math.sqrt(variance(new) + variance(old))
        ps.append(2 * norm.sf(away))
    assert out == {
        "by layer": f"{DEFAULT} up; loss up; {RISE} down; ",
        "by GEMM": f"{DEFAULT} up; loss up; paper up; taylor up; {RISE} up; weight^2 up; ",
    }
    corrected = [p for p in holm(ps) if p is not None]
    assert f"the smallest p is {min(ps):.2f}, {min(corrected):.1f} after Holm's correction" in text_of(PAGE)


# ---------------------------------------------------------------------------------------- differences on the same plans


@cache
def drawn_rhos(objective: str, pool: str) -> report.Array:
    """Rank correlations with the damage over bootstrap samples of the plans, the same samples for each objective."""
    drawn = np.random.default_rng(0).integers(0, PLANS, (DRAWS, PLANS))
    figures, table = damages(pool, OWN)
    return report._rho(figures[objective][drawn], table.mean(1)[drawn])


def compared(one: str, other: str, pool: str) -> tuple[str, float]:
    """Returns one's rank correlation less the other's with the 95% interval, as text, and p."""
    drawn = drawn_rhos(one, pool) - drawn_rhos(other, pool)
    low, high = np.quantile(drawn, (0.025, 0.975))
    p = min(1.0, 2 * (min((drawn <= 0).sum(), (drawn >= 0).sum()) + 1) / (DRAWS + 1))
    return f"{rho(one, pool) - rho(other, pool):+.2f} ({low:+.2f} to {high:+.2f})", p


@pytest.fixture(scope="module")
def differences() -> dict[tuple[str, str], tuple[str, float, float]]:
    """(objective, pool) -> difference from the default, p, and p after Holm's correction over all of them."""
    pairs = [(name, pool) for name in OTHERS for pool in ("by layer", "by GEMM")]
    tests = [compared(name, DEFAULT, pool) for name, pool in pairs]
    corrected = holm([p for _, p in tests])
    return {pair: (*test, q) for pair, test, q in zip(pairs, tests, corrected, strict=True) if q is not None}


def of_p(p: float) -> str:
    return "below 0.001" if p < 0.001 else f"{p:.3f}"


@pytest.mark.slow
def test_the_table_of_differences_is_that_of_the_lines(
    differences: dict[tuple[str, str], tuple[str, float, float]],
) -> None:
    assert len(differences) == 18
    for name in OTHERS:
        cells = []
        for pool in ("by layer", "by GEMM"):
            text, p, corrected = differences[name, pool]
            cells += [text, of_p(p), of_p(corrected) if corrected < 0.1 else f"{corrected:.2f}"]
        assert row_of([ROWS[name], *cells]) in rows_of_page()


@pytest.mark.slow
def test_the_page_says_which_differences_are_significant(
    differences: dict[tuple[str, str], tuple[str, float, float]],
) -> None:
    lower = {pair for pair, (_, _, corrected) in differences.items() if corrected < 0.05}
    not_quite = {pair for pair, (_, _, corrected) in differences.items() if 0.05 <= corrected < 0.06}
    both = [(name, pool) for name in ("relative-error", "snip-paper") for pool in ("by layer", "by GEMM")]
    assert lower == {*both, (ABSOLUTE, "by GEMM"), ("weight", "by GEMM")}
    assert not_quite == {(GREEDY, "by GEMM"), (ABSOLUTE, "by layer"), ("weight", "by layer")}
    text = text_of(PAGE)
    new_columns = [(name, pool) for name in (GREEDY, "fisher") for pool in ("by layer", "by GEMM")]
    of_four = holm([differences[pair][1] for pair in new_columns])[1]
    _, p, corrected = differences[GREEDY, "by GEMM"]
    assert of_four is not None
    for page in (PAGE, "docs/log.md"):
        assert f"{corrected:.3f}" in text_of(page) and f"{of_four:.3f}" in text_of(page)
    assert f"By GEMM p is {p:.3f}, and {corrected:.3f} after Holm's correction over all 18: not significant" in text
    assert f"Over the four tests of the two new columns alone it would be {of_four:.3f}" in text
    assert f"(p = {differences[ABSOLUTE, 'by layer'][2]:.3f} after Holm's correction)" in text
    less, ps = zip(*(compared("taylor", "loss", pool) for pool in ("by layer", "by GEMM")), strict=True)
    assert "{} by layer and {} by GEMM, p {:.2f} and {:.2f}".format(*less, *ps) in text
    assert min(p for p in holm(ps) if p is not None) > 0.05


def test_the_page_has_the_forks_in_which_greedy_is_lower() -> None:
    recipe = load_recipe(ROOT / "recipes" / "forks-loss-forms.yaml")
    lines = read_forks([ROOT / "eval" / "results" / "forks-loss-forms.jsonl"])
    one, other = (f"{name} {{fp4, fp8}}, 90% by gemm" for name in (GREEDY, "snip"))
    tests = fork_tables.tests_of(lines, recipe.comparisons_after(100)["at-90"])
    found = next(test for test in tests if (test.one, test.other) == (one, other))
    assert found.reading == "lower" and f"{found.main}%, significant" in text_of(PAGE)


# ------------------------------------------------------------------------------------------------ the program's plans


def damage(arm: str, measure: str) -> float:
    """In thousandths."""
    found = case().damage(case().arms[arm]["same_as"] or arm, K, measure)
    assert found is not None
    return 1000 * found


def rank(arm: str, granularity: str, measure: str) -> int:
    """Among the random plans of its granularity."""
    others = case().of_kinds((f"random-{granularity}",))
    return 1 + sum(damage(other, measure) < damage(arm, measure) for other in others)


PROGRAM = {
    "default": DEFAULT,
    "dL alone": "loss",
    "`paper`": "paper",
    "dW alone": "weight",
    "`greedy`": GREEDY,
    "`fisher`": "fisher",
    "absolute error": ABSOLUTE,
}


def test_the_table_of_plans_is_that_of_the_lines() -> None:
    def cells(arm: str, granularity: str) -> list[str]:
        return [f"{damage(arm, measure):.1f}; {rank(arm, granularity, measure)}" for measure in (OWN, HIGH)]

    for granularity, word in (("layer", "layer"), ("gemm", "GEMM")):
        pair = []
        for measure in (OWN, HIGH):
            values = [damage(arm, measure) for arm in case().of_kinds((f"random-{granularity}",))]
            pair.append(f"{min(values):.1f}, {np.median(values):.1f}")
        assert row_of([f"random {word} plans: best, median", *pair]) in rows_of_page()
        for label, objective in PROGRAM.items():
            arm = f"program-{granularity}:{objective}"
            assert row_of([f"{word} program, {label}", *cells(arm, granularity)]) in rows_of_page()
            assert rank(arm, granularity, OWN) == 1 and rank(arm, granularity, HIGH) <= 4
    for rule, granularity in (("layer-position", "layer"), ("layer-type", "layer"), ("backward-first", "gemm")):
        assert row_of([f"rule `{rule}`", *cells(rule, granularity)]) in rows_of_page()
    uniform = ["{:.1f}; {:.1f}".format(*(damage(f"uniform-{one}", m) for one in ("fp8", "fp4"))) for m in (OWN, HIGH)]
    assert row_of(["all FP8; all FP4", *uniform]) in rows_of_page()


def test_the_page_says_how_far_plans_and_repeats_are_apart() -> None:
    text = text_of(PAGE)
    reliable = float(reliability("by layer", OWN).partition(" ")[0])
    assert f"the root of the reliability, by layer {reliable**0.5:.2f}" in text
    spread = [damages(pool, OWN)[1].mean(1).std(ddof=1) for pool in ("by layer", "by GEMM")]
    assert "standard deviation {:.1f} by layer and {:.1f} by GEMM".format(*(1000 * one for one in spread)) in text
    gaps = [1000 * np.abs(np.subtract(*damages(pool, OWN)[1].T)) for pool in ("by layer", "by GEMM")]
    assert "by {:.1f} and {:.1f} in the median".format(*map(np.median, gaps)) in text
    assert f"at most {max(map(np.max, gaps)):.1f}" in text
    start = {line["loss_high"] for (_, _, k), line in case().lines.items() if k == 0}
    assert len(start) == 1 and f"loss {start.pop():.2f}, commit" in text


def test_the_program_s_gemm_plans_differ_in_as_few_gemms_as_the_page_says() -> None:
    def others(objective: str) -> int:
        own, default = (case().arms[f"program-gemm:{name}"]["assignment"] for name in (objective, DEFAULT))
        return sum(own[layer][gemm] != fmt for layer, formats in default.items() for gemm, fmt in formats.items())

    assert case().arms["program-layer:loss"]["same_as"] == f"program-layer:{DEFAULT}"
    assert case().arms["program-gemm:fisher"]["same_as"] == f"program-gemm:{GREEDY}"
    assert f"in {others('loss')} of 126 GEMMs from dL's and in {others(GREEDY)} from `greedy`'s" in text_of(PAGE)


def test_the_targets_have_the_new_figures() -> None:
    row = next(row for row in rows_of_page() if row.startswith("| plans: Spearman with K = 100"))
    own, high = ([rho(DEFAULT, pool, measure) for pool in ("by layer", "by GEMM")] for measure in (OWN, HIGH))
    assert "yes: {} by layer, {} by GEMM".format(*map(with_interval, own)) in row
    reliable = [reliability(pool, HIGH).partition(" ")[0] for pool in ("by layer", "by GEMM")]
    assert f"{high[0]:.2f} (reliability {reliable[0]}) and {high[1]:.2f} ({reliable[1]})" in row
    ranks = {rank(f"program-{granularity}:{DEFAULT}", granularity, HIGH) for granularity in ("layer", "gemm")}
    assert ranks == {2} and "both plans 2nd of 31" in row


@pytest.mark.slow
def test_the_report_is_that_of_the_lines() -> None:
    assert report.report(case(), K, details=False) == LINES.with_suffix(".md").read_text(encoding="utf-8")
