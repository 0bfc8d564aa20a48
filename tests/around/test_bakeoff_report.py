"""Does the report of a bake-off say what its lines say: gaps, tests, what is missing, and how plans move?"""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.container import ErrorbarContainer
from matplotlib.image import imread
from matplotlib.lines import Line2D
from scipy.stats import t as student_t
from scipy.stats import ttest_rel

from eval.bakeoff import figures, report, tables
from eval.bakeoff.contenders import Contender, contenders
from eval.bakeoff.gaps import ARITHMETICS, diverged, with_gaps
from eval.bakeoff.linear_model import GapModel
from eval.bakeoff.lines import latest
from eval.bakeoff.plans import changed_per_refresh, decided_plans, fp4_over_run, hamming, letters_of, total_drift
from eval.bakeoff.ranking import beating_snip, pooled_comparisons, static_beating_refreshed
from eval.bakeoff.significance import PairedComparison, compare
from snip_hf.numerics.formats import FORMATS

Row = dict[str, Any]
BF16_LOSSES = {0: 4.0, 1: 4.1, 2: 4.2, 3: 4.3}
LAYERS = [f"model.layers.{block}.{kind}" for block in range(2) for kind in ("self_attn.q_proj", "mlp.up_proj")]


def a_line(label: str = "snip, gemm", gap: float | None = 0.5, seed: int = 0, **changes: Any) -> Row:
    """A line whose loss is `gap` percent above BF16_LOSSES; `changes` go to the spec or, if it lacks them, the line."""
    policy = label.split(",")[0]
    with_share = policy not in ("bf16", "uniform-fp8", "uniform-fp4")
    spec: Row = {
        "model": "30M", "policy": policy, "granularity": "gemm" if with_share else None,
        "share": 0.75 if with_share else None, "seed": seed, "refresh_every": 100 if policy == "snip" else None,
        "objective": "additive", "loss_divergence_factor": 1.0, "weight_divergence_factor": 1.0, "switching_cost": 0.0,
        "learning_rate": 0.002, "start_step": 0, "steps": 400,
    }  # fmt: skip
    spec |= {name: value for name, value in changes.items() if name in spec}
    factor = None if gap is None else 1 + gap / 100
    loss = dict.fromkeys(ARITHMETICS, None if factor is None else BF16_LOSSES[seed] * factor)
    letter = {"bf16": "b", "uniform-fp8": "8", "uniform-fp4": "4"}
    plans = [{"step": 0, "formats": letter.get(policy, "8") * 3 * len(LAYERS)}]
    if with_share:
        plans.append({"step": 50, "formats": "444" * 3 + "888"})
    line = {
        "schema_version": 1, "id": json.dumps([label, spec], sort_keys=True), "spec": spec, "label": label,
        "parameters": 1000, "tokens": 1, "loss": loss, "training_curve": [[10, 8.0]],
        "validation_curve": [[step, loss["plan"] or 9.0] for step in (0, 100, 200, 400)],
        "diverged": gap is None, "spikes": 0, "fp4_fraction": {"uniform-fp4": 1.0}.get(policy, spec["share"] or 0.0),
        "layers": LAYERS, "plans": plans, "step_ms": 20.0, "tokens_per_second": 1000.0,
        "refresh_seconds": [0.5] if policy == "snip" else [], "seconds": 10.0, "peak_mib": 100.0, "backend": "hopper",
        "device": "GPU", "processes_per_device": 1, "torch": "2.11.0", "commit": "0123456789-dirty",
        "command": "python eval/bakeoff.py run", "date": "2026-01-01",
    }  # fmt: skip
    return line | {name: value for name, value in changes.items() if name not in spec}


def bf16_lines(**changes: Any) -> list[Row]:
    return [a_line("bf16", 0.0, seed, **changes) for seed in range(3)]


def of_seeds(label: str, gaps: list[float | None], **changes: Any) -> list[Row]:
    return [a_line(label, gap, seed, **changes) for seed, gap in enumerate(gaps)]


def paired(lines: list[Row]) -> list[Row]:
    return list(with_gaps(lines).values())


def rows_of(text: str) -> list[list[str]]:
    """The cells of all Markdown table rows."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows]


def row_of(text: str, name: str, column: int = 1) -> dict[str, str]:
    """The first row with `name` in that column, by heading."""
    rows = rows_of(text)
    return dict(zip(rows[0], next(row for row in rows if row[column] == name), strict=True))


def comparison(first: list[float | None], second: list[float | None]) -> PairedComparison:
    lines = paired([*bf16_lines(), *of_seeds("snip, gemm", first), *of_seeds("random, gemm", second)])
    group = {one.name: one for one in contenders(lines)}
    return compare(group["snip, gemm"].gaps(), group["random, gemm"].gaps())


def test_gap_is_the_percentage_above_the_bf16_run_of_the_same_seed() -> None:
    text = tables.gap_table(paired([*bf16_lines(), *of_seeds("snip, gemm", [0.1, 0.2, 0.6])]))
    row = row_of(text, "snip, gemm")
    assert row["gap, plan"] == f"+0.30% ± {np.std([0.1, 0.2, 0.6], ddof=1):.2f}%"
    assert row["each seed, plan"] == "0: +0.10%, 1: +0.20%, 2: +0.60%"
    assert (row["seeds"], row["FP4 share"]) == ("3", "75.00%")
    assert row["loss"].startswith(f"{np.mean([4.0 * 1.001, 4.1 * 1.002, 4.2 * 1.006]):.4f} ± ")


@pytest.mark.parametrize(("field", "value"), [("model", "110M"), ("learning_rate", 0.004), ("steps", 800)])
def test_a_run_is_not_paired_with_a_bf16_run_of_another(field: str, value: Any) -> None:
    [*_, line] = paired([*bf16_lines(**{field: value}), a_line()])
    assert line["bf16"] is None and line["gap"] == {"plan": None, "high_precision": None}
    assert "0: no BF16" in tables.gap_table([line])
    assert row_of(tables.gap_table([line]), "snip, gemm")["seeds"] == "0 + 1 without BF16"


def test_a_run_that_starts_late_is_paired_with_the_bf16_run_that_knows_no_start() -> None:
    [*_, line] = paired([*bf16_lines(), a_line(start_step=200, gap=0.25)])
    assert line["gap"]["plan"] == pytest.approx(0.25)
    assert "**model 30M, target FP4 share 75%, start_step 200**" in tables.continued_table([line])


def test_arithmetics_are_paired_each_with_its_own() -> None:
    bf16, run = a_line("bf16", 0.0), a_line()
    bf16["loss"], run["loss"] = {"plan": 4.0, "high_precision": 5.0}, {"plan": 4.04, "high_precision": 5.1}
    assert paired([bf16, run])[1]["gap"] == pytest.approx({"plan": 1.0, "high_precision": 2.0})


def test_p_value_is_scipys() -> None:
    first, second = [0.10, 0.22, 0.35], [0.31, 0.40, 0.58]
    found = comparison(first, second)
    assert found.p == pytest.approx(ttest_rel(first, second).pvalue)
    assert found.difference == pytest.approx(np.mean(first) - np.mean(second))
    assert found.beyond_noise and found.verdict() == f"better (p = {found.p:.3f})"


def test_p_value_is_that_of_seeds_both_have() -> None:
    found = comparison([0.1, None, 0.3], [0.2, 0.3, 0.6])
    assert (found.pairs, found.p, found.verdict()) == (2, None, "-")


def test_equal_and_constantly_different_gaps_have_a_p_value() -> None:
    assert comparison([0.1, 0.2, 0.3], [0.1, 0.2, 0.3]).p == 1.0
    bf16 = [a_line("bf16", 0.0, seed, loss={"plan": 4.0, "high_precision": 4.0}) for seed in range(3)]
    runs = [a_line("snip, gemm", 0.0, seed, loss={"plan": 5.0, "high_precision": 5.0}) for seed in range(3)]
    one, other = contenders(paired([*bf16, *runs]))
    assert compare(other.gaps(), one.gaps()).p == 0.0


def layout_of(gaps: dict[tuple[str, float], dict[int, float]]) -> tuple[GapModel, dict[Any, Contender]]:
    """The model of (label, share) -> seed -> gap, and its contenders by label and share."""
    runs = [a_line(label, gap, seed, share=share) for (label, share), own in gaps.items() for seed, gap in own.items()]
    lines = paired([*bf16_lines(), *runs])
    points = [point for point in contenders(lines) if point.spec["policy"] != "bf16"]
    return GapModel(lines), {(point.name, point.spec["share"]): point for point in points}


UNBALANCED: dict[tuple[str, float], dict[int, float]] = {
    ("snip, gemm", 0.75): {0: 0.1, 1: 0.7, 2: 0.3},
    ("snip, gemm", 0.8): {0: 0.2, 1: 0.4, 2: 0.9},
    ("random, gemm", 0.75): {1: 0.5, 2: 1.4},
    ("fisher, gemm", 0.75): {0: 0.0},
    ("kl, gemm", 0.9): {2: 1.3, 0: 0.6},
}


def test_unbalanced_model_is_least_squares_on_treatment_coded_dummies() -> None:
    model, points = layout_of(UNBALANCED)
    names = list(UNBALANCED)
    runs = [(name, seed, gap) for name, own in UNBALANCED.items() for seed, gap in own.items()]
    # Intercept, all contenders but the first, all seeds but the first: full rank, so the inverse exists.
    design = np.zeros((len(runs), 1 + (len(names) - 1) + 2))
    for row, (name, seed, _) in enumerate(runs):
        design[row, 0] = 1
        if name != names[0]:
            design[row, names.index(name)] = 1
        if seed:
            design[row, len(names) - 1 + seed] = 1
    observed = np.array([gap for _, _, gap in runs])
    coefficients, squares, rank, _ = np.linalg.lstsq(design, observed, rcond=None)
    freedom = len(runs) - rank
    covariance = np.linalg.inv(design.T @ design) * squares[0] / freedom
    [layout] = model.layouts.values()
    assert (layout.freedom, layout.connected, len(runs), freedom) == (4, True, 11, 4)
    assert layout.deviation == pytest.approx(math.sqrt(squares[0] / freedom))
    for place, name in enumerate(names):
        weights = np.array([1, *(float(other == place) for other in range(1, len(names))), 1 / 3, 1 / 3])
        adjusted = model.adjusted(points[name])
        assert adjusted == pytest.approx((weights @ coefficients, math.sqrt(weights @ covariance @ weights)))
        contrast = np.zeros(len(coefficients))
        contrast[1] -= 1  # against the second contender
        if place:
            contrast[place] += 1
        found = model.compare(points[name], points[names[1]])
        assert found is not None and found.difference == pytest.approx(contrast @ coefficients)
        if place != 1:
            statistic = abs(contrast @ coefficients) / math.sqrt(contrast @ covariance @ contrast)
            assert found.p == pytest.approx(2 * (1 - student_t.cdf(statistic, freedom)))


def test_balanced_model_is_the_two_way_analysis_of_variance() -> None:
    table = np.array([[0.1, 0.7, 0.3], [0.2, 0.4, 0.9], [0.6, 0.5, 1.4]])
    labels = ["snip, gemm", "random, gemm", "fisher, gemm"]
    model, points = layout_of(
        {(label, 0.75): dict(enumerate(own)) for label, own in zip(labels, table.tolist(), strict=True)}
    )
    residuals = table - table.mean(axis=0) - table.mean(axis=1, keepdims=True) + table.mean()
    deviation = math.sqrt((residuals**2).sum() / 4)
    found = model.compare(points["fisher, gemm", 0.75], points["snip, gemm", 0.75])
    difference = table[2].mean() - table[0].mean()
    assert found is not None and found.difference == pytest.approx(difference)
    assert found.p == pytest.approx(2 * student_t.sf(difference / (deviation * math.sqrt(2 / 3)), 4))
    for label, own in zip(labels, table, strict=True):
        assert model.adjusted(points[label, 0.75]) == pytest.approx((own.mean(), deviation / math.sqrt(3)))


def test_contrast_of_two_contenders_alone_is_the_paired_t_test() -> None:
    first, second = [0.10, 0.22, 0.35], [0.31, 0.40, 0.58]
    model, points = layout_of(
        {("snip, gemm", 0.75): dict(enumerate(first)), ("kl, gemm", 0.75): dict(enumerate(second))}
    )
    found = model.compare(points["snip, gemm", 0.75], points["kl, gemm", 0.75])
    assert found is not None and found.p == pytest.approx(ttest_rel(first, second).pvalue)
    assert found.beyond_noise and found.verdict() == f"better (p = {found.p:.3f})"


def test_ranks_are_by_the_gap_without_the_luck_of_the_seeds() -> None:
    lines = [*bf16_lines(), *of_seeds("snip, gemm", [0.1, 0.5, 0.92]), *of_seeds("random, gemm", [0.2, 0.62, 1.0])]
    lines += of_seeds("lucky, gemm", [0.3])  # the lowest mean, at the seed that is easy for all
    text = tables.gap_table(paired(lines))
    assert [row[1] for row in rows_of(text)[2:]] == ["snip, gemm", "random, gemm", "lucky, gemm"]
    row = row_of(text, "lucky, gemm")
    assert row["gap, plan"] == "+0.30%" and row["adjusted gap"].startswith("+0.71% ± ")
    assert row["against the best"].startswith(("worse (p ", "within noise (p "))


def test_verdict_against_the_best_is_that_of_the_contrast() -> None:
    gaps = {"snip, gemm": [0.1, 0.5, 0.3], "random, gemm": [0.4, 0.2, 0.6], "worst, gemm": [1.1, 1.5, 1.31]}
    lines = paired([*bf16_lines(), *(line for label, own in gaps.items() for line in of_seeds(label, list(own)))])
    table = np.array(list(gaps.values()))
    residuals = table - table.mean(axis=0) - table.mean(axis=1, keepdims=True) + table.mean()
    error = math.sqrt((residuals**2).sum() / 4 * 2 / 3)
    text = tables.gap_table(lines)
    assert row_of(text, "snip, gemm")["against the best"] == "best"
    for label, word in (("random, gemm", "within noise"), ("worst, gemm", "worse")):
        p = 2 * student_t.sf((np.mean(gaps[label]) - 0.3) / error, 4)
        assert row_of(text, label)["against the best"] == f"{word} (p = {p:.3f})"
    assert "two-sided t-test with the residual degrees of freedom" in tables.READING and "p >= 0.05" in tables.READING


def test_a_contender_with_one_lucky_seed_is_not_the_one_to_compare_with() -> None:
    lines = [*bf16_lines(), *of_seeds("snip, gemm", [0.1, 0.2, 0.3]), *of_seeds("kl, gemm", [0.2, 0.31, 0.4])]
    text = tables.gap_table(paired([*lines, *of_seeds("lucky, gemm", [-0.5])]))
    assert [row[1] for row in rows_of(text)[2:]] == ["lucky, gemm", "snip, gemm", "kl, gemm"]
    assert row_of(text, "snip, gemm")["against the best"] == "best"
    assert row_of(text, "lucky, gemm")["against the best"].startswith("better (p ")


def test_without_degrees_of_freedom_nothing_is_tested() -> None:
    model, points = layout_of({("snip, gemm", 0.75): {0: 0.1}, ("random, gemm", 0.75): {0: 0.3}})
    found = model.compare(points["random, gemm", 0.75], points["snip, gemm", 0.75])
    assert found is not None and (found.p, found.verdict()) == (None, "-")
    assert found.difference == pytest.approx(0.2)
    text = tables.gap_table(paired([*bf16_lines(), a_line(gap=0.1), a_line("random, gemm", 0.3)]))
    assert row_of(text, "random, gemm")["against the best"] == "-"
    assert row_of(text, "random, gemm")["adjusted gap"] == "+0.30%"
    assert "Noise of one run: unknown" in text


def test_contenders_without_a_chain_of_common_seeds_are_not_compared() -> None:
    model, points = layout_of({("snip, gemm", 0.75): {0: 0.1, 1: 0.2}, ("random, gemm", 0.75): {2: 0.3}})
    one, other = points.values()
    assert model.compare(one, other) is None and model.adjusted(one) is None
    assert model.gap(one) == pytest.approx(0.15)


def test_equal_runs_have_a_p_value() -> None:
    same = {0: 0.1, 1: 0.2}
    model, points = layout_of(
        {("snip, gemm", 0.75): same, ("kl, gemm", 0.75): same, ("random, gemm", 0.75): {0: 0.2, 1: 0.3}}
    )
    snip, kl, random = points.values()
    assert [getattr(model.compare(point, snip), "p", None) for point in (kl, random)] == [1.0, 0.0]


def test_learning_rates_are_models_of_their_own() -> None:
    lines = paired([*of_seeds("snip, gemm", [0.1, 0.2]), *of_seeds("snip, gemm", [0.1, 0.2], learning_rate=0.004)])
    lines = [line | {"gap": {"plan": 0.1, "high_precision": 0.1}} for line in lines]
    one, other = contenders(lines)
    assert len(GapModel(lines).layouts) == 2 and GapModel(lines).compare(one, other) is None


def test_diverged_runs_are_counted_but_in_no_mean_and_rank_last() -> None:
    lines = [*bf16_lines(), *of_seeds("snip, gemm", [0.1, None, 0.3]), *of_seeds("random, gemm", [0.9, 0.8, 0.7])]
    finite = a_line("wild, gemm", 0.2, diverged=True)
    text = tables.gap_table(paired([*lines, finite]))
    row = row_of(text, "snip, gemm")
    assert row["rank"] == "2" and row["gap, plan"].startswith("+0.20% ± ") and row["seeds"] == "2 + 1 diverged"
    assert row["each seed, plan"] == "0: +0.10%, 1: diverged, 2: +0.30%"
    assert row_of(text, "wild, gemm")["gap, plan"] == "diverged"


def test_bf16_spread_is_the_standard_deviation_over_the_mean() -> None:
    lines = paired([*bf16_lines(), *of_seeds("snip, gemm", [0.1, 0.2, 0.3])])
    text = tables.noise_text(lines, GapModel(lines))
    assert "- 30M, learning rate 0.002, 400 steps." in text
    assert f"{100 * np.std([4.0, 4.1, 4.2], ddof=1) / 4.1:.2f}% of 4.1000 over 3 seeds" in text


def test_noise_is_that_of_the_contenders_with_a_target_share() -> None:
    lines = bf16_lines() + of_seeds("uniform-fp4", [9.0, 1.0, 5.0])
    lines += of_seeds("snip, gemm", [0.1, 0.7, 0.3]) + of_seeds("kl, gemm", [0.6, 0.5, 1.4])
    deviation = np.std(np.subtract([0.1, 0.7, 0.3], [0.6, 0.5, 1.4]), ddof=1) / math.sqrt(2)
    assert (
        f"Noise of one run: residual standard deviation {deviation:.2f}% with 2 degrees of freedom (6 runs of 2 "
        "contenders over 3 seeds), so the difference of two means over 3 seeds each has a standard error of "
        f"{deviation * math.sqrt(2 / 3):.2f}%"
    ) in tables.gap_table(paired(lines))
    assert row_of(tables.gap_table(paired(lines)), "uniform-fp4")["adjusted gap"] == "-"


def test_fp4_share_over_the_run_is_the_mean_over_steps_since_the_start() -> None:
    plans = [(0, 0.0), (50, 0.8), (150, 0.6)]  # of 400 steps: 50 at 0, 100 at 0.8, 250 at 0.6
    known = [{"step": step, "fp4_fraction": share, "formats": "888"} for step, share in plans]
    steps = [0.0] * 50 + [0.8] * 100 + [0.6] * 250
    assert fp4_over_run(a_line(plans=known)) == pytest.approx(np.mean(steps))
    late = [{"step": 200, "fp4_fraction": 0.0}, {"step": 250, "fp4_fraction": 0.8}]
    assert fp4_over_run(a_line(start_step=200, plans=late)) == pytest.approx(0.6)
    assert fp4_over_run(a_line("bf16", plans=[])) is None
    text = tables.gap_table(paired([*bf16_lines(), a_line(plans=known), a_line("random, gemm")]))
    assert row_of(text, "snip, gemm")["FP4 share over the run"] == f"{100 * np.mean(steps):.2f}%"
    assert row_of(text, "random, gemm")["FP4 share over the run"] == "-"  # Its plans' shares are not known.
    assert (
        row_of(report.cost_table(paired([a_line(plans=known)])), "snip, gemm")["FP4 share over the run"]
        == f"{100 * np.mean(steps):.2f}%"
    )


def test_pooled_comparison_is_scipys_paired_test_over_all_shares_and_models() -> None:
    snip = {(0.5, "30M"): [0.1, 0.2], (0.75, "30M"): [0.3, 0.5, 0.4], (0.75, "110M"): [0.2]}
    other = {(0.5, "30M"): [0.4, 0.4], (0.75, "30M"): [0.5, 0.9], (0.75, "110M"): [0.7], (0.8, "30M"): [9.0]}
    lines = bf16_lines() + bf16_lines(model="110M")
    for label, gaps in (("snip, gemm", snip), ("random, gemm", other)):
        for (share, model), own in gaps.items():
            lines += of_seeds(label, own, share=share, model=model)
    lines += [*of_seeds("fisher, gemm", [0.0, 0.1]), *of_seeds("uniform-fp4", [1.0, 1.0, 1.0])]
    first, second = [0.4, 0.4, 0.5, 0.9, 0.7], [0.1, 0.2, 0.3, 0.5, 0.2]
    [(_, _, found), (_, _, few)] = pooled_comparisons(paired(lines))
    assert found.p == pytest.approx(ttest_rel(first, second).pvalue)
    assert (found.pairs, found.difference) == (5, pytest.approx(np.mean(first) - np.mean(second)))
    assert found.deviation == pytest.approx(np.std(np.subtract(first, second), ddof=1))
    assert (few.pairs, few.p) == (2, None)
    text = report.pooled_table(paired(lines))
    row = row_of(text, "random, gemm")
    assert row["difference"] == f"{found.difference:+.2f} ± {found.deviation:.2f}" and row["pairs"] == "5"
    assert row["verdict"] == f"SNIP lower (p = {found.p:.3f})"
    assert "fewer than 3 pairs, difference (pairs) from snip, gemm: fisher, gemm -0.35 (2)." in text
    assert "fisher" not in str(rows_of(text)) and "uniform" not in text


def test_pooled_verdict_says_when_snip_is_higher_or_no_different() -> None:
    lines = [*bf16_lines(), *of_seeds("snip, layer", [0.5, 0.6, 0.7])]
    lines += of_seeds("fisher, layer", [0.1, 0.21, 0.32]) + of_seeds("greedy, layer", [0.7, 0.6, 0.5])
    text = report.pooled_table(paired(lines))
    assert row_of(text, "fisher, layer")["verdict"].startswith("SNIP higher (p ")
    assert row_of(text, "greedy, layer")["verdict"] == "within noise (p = 1.000)"


def test_settings_that_a_table_does_not_show_become_part_of_the_name() -> None:
    lines = paired([*bf16_lines(), a_line(), a_line(gap=0.4, switching_cost=0.1)])
    assert {"snip, gemm, switching_cost 0.0", "snip, gemm, switching_cost 0.1"} <= {
        row[1] for row in rows_of(tables.gap_table(lines))
    }
    assert {row[1] for row in rows_of(tables.frequency_table(lines))[2:]} == {"snip, gemm"}


def test_runs_of_one_spec_and_seed_are_refused() -> None:
    with pytest.raises(ValueError, match="Runs 'one' and 'two' of 'snip, gemm' have the same spec"):
        contenders([a_line(id="one"), a_line(id="two")])


def test_drift_of_plans_matches_a_count_by_hand() -> None:
    plans = ["888888", "448888", "484888", "484488"]  # warm-up; then 2 of 6 pairs change, then 1; first to last: 3
    line = a_line(
        plans=[{"step": step, "formats": formats} for step, formats in enumerate(plans)], refresh_seconds=[0.5] * 4
    )
    assert decided_plans(line) == plans[1:]
    assert hamming("448888", "484888") == pytest.approx(2 / 6)
    # Four refreshes, three after the first, one of which kept the plan.
    assert changed_per_refresh(line) == pytest.approx((2 / 6 + 1 / 6) / 3)
    assert total_drift(line) == pytest.approx(3 / 6)
    row = row_of(tables.frequency_table(paired([*bf16_lines(), line])), "snip, gemm")
    assert (row["refreshes"], row["changed per refresh"], row["first to last plan"]) == ("4.0", "16.7%", "50.0%")


def test_a_plan_made_once_has_no_change_per_refresh() -> None:
    assert changed_per_refresh(a_line()) is None and total_drift(a_line()) == 0.0
    assert total_drift(a_line("uniform-fp8")) is None


def test_plans_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError):
        hamming("444", "4444")


@pytest.mark.parametrize(
    ("label", "fraction", "times"),
    [
        ("bf16", 0.0, (2, 1)),
        ("uniform-fp8", 0.0, (1, 0.5)),
        ("uniform-fp4", 1.0, (0.5, 0.25)),
        ("snip, gemm", 0.75, (0.625, 0.3125)),
    ],
)
def test_modelled_times_are_those_of_the_peak_rates(label: str, fraction: float, times: tuple[float, float]) -> None:
    line = a_line(label)
    assert line["fp4_fraction"] == fraction
    assert report.modelled_times(line) == pytest.approx(times)
    # The same from rates: BF16 1, FP8 2, FP4 4.
    if label != "bf16":
        assert times[1] == pytest.approx((1 - fraction) / 2 + fraction / 4) and times[0] == 2 * times[1]


def test_cost_of_a_refresh_is_given_in_steps_and_as_share_of_the_run() -> None:
    line = a_line(refresh_seconds=[0.4, 0.6])
    row = row_of(report.cost_table(paired([line])), "snip, gemm")
    assert (row["s per refresh"], row["refresh in steps"]) == ("0.50", "25.0")
    assert row["refreshes' share of run"] == "10.0%"
    bare = row_of(report.cost_table(paired([a_line("bf16", plans=[], step_ms=None, backend=None)])), "bf16")
    assert (bare["step ms"], bare["of BF16's time"], bare["measured on"]) == ("-", "1.000", "GPU, torch, 1 per device")


def test_times_beside_other_processes_are_left_out_of_the_costs() -> None:
    shared = a_line(refresh_seconds=[0.4, 0.6], processes_per_device=4)
    text = report.cost_table(paired([shared, a_line("random, gemm")]))
    row = row_of(text, "snip, gemm")
    for name in ("step ms", "tokens/s", "refresh in steps", "refreshes' share of run"):
        assert row[name] == "-"
    assert (row["s per refresh"], row["peak MiB"], row["refreshes"]) == ("0.50", "100", "2.0")
    assert row["measured on"] == "GPU, hopper, 4 per device" and "beside the other processes" in text
    assert row_of(text, "random, gemm")["step ms"] == "20.0"


def test_stability_counts_diverged_runs_per_learning_rate() -> None:
    lines = of_seeds("random, gemm", [0.1, 0.2], learning_rate=0.002)
    lines += of_seeds("random, gemm", [0.5, None], learning_rate=0.008, spikes=3)
    rows = rows_of(tables.stability_table(paired(lines)))
    assert rows[2][:2] == ["0.002", "1"] and rows[2][4:7] == ["2", "0", "0, 0"]
    assert rows[3][:2] == ["0.008", "4"] and rows[3][4:8] == ["2", "1", "3, 3", "4.0200"]


def test_downstream_ranks_by_loss_and_tells_above_below_and_near_chance_apart() -> None:
    def scores(**values: float) -> list[Row]:
        return [
            {"task": task, "group": None, "chance": 0.25, "num_samples": 9, "metrics": {"acc": _metric(value)}}
            for task, value in values.items()
        ] + [{"task": "sub", "group": "arc", "chance": 0.25, "num_samples": 9, "metrics": {"acc": _metric(0.5)}}]

    scored = a_line("random, gemm", 0.9, benchmarks=scores(arc_easy=0.4, piqa=0.2, mmlu=0.3))
    bf16 = a_line("bf16", 0.0, benchmarks=scores(arc_easy=0.3, piqa=0.26, mmlu=0.22))
    text = tables.downstream_table(paired([scored, bf16, a_line("snip, gemm", 0.1)]))
    assert "above chance by more than 2 standard errors on: arc_easy." in text
    assert "Within 2 standard errors of chance on: piqa." in text
    assert "Below chance by more than 2 standard errors on: mmlu;" in text
    assert [row[1] for row in rows_of(text)[2:]] == ["chance", "bf16", "snip, gemm", "random, gemm"]
    assert row_of(text, "random, gemm")["arc_easy (acc)"] == "0.4000 ± 0.0100"
    assert row_of(text, "snip, gemm")["runs scored"] == "0 of 1" and "sub" not in text


def _metric(value: float) -> Row:
    return {"value": value, "stderr": 0.01, "higher_is_better": True}


def beaten_lines() -> list[Row]:
    """SNIP is beaten beyond noise at a higher share, by less at its own, and by what has a lower share."""
    lines = [*bf16_lines(), *of_seeds("snip, gemm", [0.50, 0.55, 0.61])]
    lines += of_seeds("higher, gemm", [0.20, 0.26, 0.30], share=0.8)
    lines += of_seeds("lower, gemm", [0.20, 0.26, 0.30], share=0.5)
    lines += of_seeds("slightly, gemm", [0.48, 0.57, 0.58]) + of_seeds("worse, gemm", [0.7, 0.77, 0.8])
    return lines


def test_what_beats_snip_needs_the_same_or_a_higher_share_and_a_significant_difference() -> None:
    lines = paired([*beaten_lines(), *of_seeds("uniform-fp4", [0.1, 0.1, 0.1])])
    found = beating_snip(lines)
    assert [(point.name, contrast.beyond_noise) for point, _, contrast in found] == [
        ("higher, gemm", True),
        ("slightly, gemm", False),
    ]
    text = report.beaten_text(lines)
    sure, unsure = (contrast for _, _, contrast in found)
    line = f"- 30M: higher, gemm at 80% against snip, gemm at 75%: -0.30 points, {sure.verdict()}"
    assert line in text.splitlines() and sure.verdict().startswith("better (p ")
    assert (
        "Lower, within noise: 1 pairs of points; 30M: slightly, gemm at 75% against snip, gemm at 75%: -0.01 points, "
        f"{unsure.verdict()}."
    ) in text
    assert "lower, gemm" not in text and "worse, gemm" not in text and "uniform" not in text


def test_static_snip_may_be_beaten_and_is_itself_held_against_refreshed_snip() -> None:
    static = of_seeds("static snip, gemm", [0.36, 0.42, 0.46], policy="snip", refresh_every=None)
    lines = paired([*beaten_lines(), *static])
    beaten = {(point.name, other.name) for point, other, _ in beating_snip(lines)}
    assert ("higher, gemm", "static snip, gemm") in beaten and "static snip, gemm" not in {one for one, _ in beaten}
    [(point, other, contrast)] = static_beating_refreshed(lines)
    assert (point.name, other.name, contrast.beyond_noise) == ("static snip, gemm", "snip, gemm", True)
    assert contrast == GapModel(lines).compare(point, other)  # the noise is that of all contenders
    assert "Points of static SNIP that beat refreshed SNIP beyond noise" in report.beaten_text(lines)


def test_only_the_largest_differences_within_noise_are_named() -> None:
    lines = [*bf16_lines(), *of_seeds("snip, gemm", [0.9, 0.1, 0.8])]
    for number in range(10):
        gaps = [0.05 * number, 0.5, 0.2] if number % 2 else [0.5, 0.05 * number, 0.2]
        lines += of_seeds(f"policy-{number}, gemm", list(gaps))
    found = beating_snip(paired(lines))
    differences = [contrast.difference for _, _, contrast in found]
    unsure = [contrast.difference for _, _, contrast in found if not contrast.beyond_noise]
    assert differences == sorted(differences) and len(unsure) > 8
    text = report.beaten_text(paired(lines))
    [named] = [line for line in text.splitlines() if line.startswith("Lower, within noise")]
    assert f"{len(unsure)} pairs of points; the largest differences: " in named and named.count(" at 75% against ") == 8


def test_readme_table_has_a_row_per_contender_with_enough_seeds() -> None:
    lines = bf16_lines() + bf16_lines(model="110M", parameters=4000) + of_seeds("uniform-fp4", [1.0, 2.0, 3.0])
    lines += of_seeds("snip, gemm", [0.1, 0.2, 0.3]) + of_seeds("snip, gemm", [0.4], model="110M", parameters=4000)
    lines += of_seeds("snip, gemm", [0.7, 0.8, 0.9], share=0.5) + of_seeds("few, gemm", [0.1, 0.1])
    lines += of_seeds("random, gemm", [0.1, 0.1, 0.1], share=0.8) + of_seeds("uniform-fp8", [5.0])
    text = report.readme_table(paired(lines))
    rows = rows_of(text)
    # Nobody was run at 80% of the larger model.
    assert rows[0] == ["contender", "30M, 75%", "30M, 80%", "110M, 75%", "commit", "command"]
    run = ["`0123456-dirty`", "`python eval/bakeoff.py run`"]
    assert rows[2] == ["snip, gemm", "+0.20% ± 0.10 (3)", "-", "+0.40% (1)", *run]
    assert rows[3] == ["random, gemm", "-", "+0.10% ± 0.00 (3)", "-", *run]  # no run in the first column
    assert rows[4] == ["uniform-fp8 (0% FP4)", "+5.00% (1)", "+5.00% (1)", "-", *run]
    assert rows[5] == ["uniform-fp4 (100% FP4)", "+2.00% ± 1.00 (3)", "+2.00% ± 1.00 (3)", "-", *run]
    assert len(rows) == 6 and "uniform ones have no target" in text


def test_readme_rows_are_in_the_order_of_the_gap_without_the_seeds_luck() -> None:
    lines = [*bf16_lines(), *of_seeds("snip, gemm", [0.1, 0.5, 0.9]), *of_seeds("random, gemm", [None, 0.45, 0.86])]
    lines += of_seeds("kl, gemm", [0.3, 0.71, 1.1])
    more = [a_line("bf16", 0.0, 3), a_line("random, gemm", 1.2, 3), a_line("kl, gemm", 1.46, 3)]
    rows = rows_of(report.readme_table(paired([*lines, *more])))
    means = [float(row[1].split("%")[0]) for row in rows[2:]]
    # Random was run at the dearer seeds only: its mean is higher than SNIP's, its contrast lower.
    assert [row[0] for row in rows[2:]] == ["random, gemm", "snip, gemm", "kl, gemm"] and means[0] > means[1]


def test_readme_table_says_how_many_runs_diverged() -> None:
    lines = [*bf16_lines(), *of_seeds("snip, gemm", [0.1, 0.2, 0.3])]
    lines += of_seeds("snip, gemm", [0.1, None, 0.3], share=0.8)
    lines += of_seeds("uniform-fp4", [None, None, None])
    text = report.readme_table(paired(lines))
    assert row_of(text, "snip, gemm", column=0)["30M, 80%"] == "+0.20% ± 0.14 (2 + 1 diverged)"
    assert row_of(text, "uniform-fp4 (100% FP4)", column=0)["30M, 75%"] == "3 diverged"


def test_cost_table_is_of_one_target_share_and_of_what_has_none() -> None:
    lines = [*bf16_lines(), a_line(), a_line("random, gemm", share=0.8), a_line("uniform-fp8")]
    rows = rows_of(report.cost_table(paired(lines)))
    assert [row[1] for row in rows[2:]] == ["snip, gemm", "bf16", "uniform-fp8"]


def test_bars_in_cells_do_not_end_them() -> None:
    assert tables.markdown(["a"], [["x | y"]]).splitlines()[-1] == "| x \\| y |"


def test_the_last_line_of_an_id_wins_and_other_schemas_are_refused() -> None:
    found = latest([a_line(id="x", spikes=1), a_line(id="x", spikes=2)])
    assert [line["spikes"] for line in found.values()] == [2]
    with pytest.raises(ValueError, match="run 'x' has schema_version 2, expected 1"):
        latest([a_line(id="x", schema_version=2)])


def grid() -> tuple[list[Row], dict[str, list[str]]]:
    """Lines of a small bake-off, and its experiments: one run of `shares` is missing, one line is of no experiment."""
    lines: dict[str, list[Row]] = {
        "shares": bf16_lines() + of_seeds("uniform-fp4", [6.0, 6.1, 6.2]),
        "sizes": bf16_lines(model="110M", parameters=4000),
        "frequency": bf16_lines(),
        "stability": of_seeds("random, gemm", [0.4, None], learning_rate=0.004),
    }
    for label, gap in (("snip, gemm", 0.2), ("snip, layer", 0.3), ("random, gemm", 0.6)):
        for share in (0.5, 0.75):
            lines["shares"] += of_seeds(label, [gap, gap + 0.05, gap + 0.02], share=share)
        lines["sizes"] += of_seeds(label, [gap, gap + 0.05, gap + 0.02], model="110M", parameters=4000)
        lines["stability"] += of_seeds(label, [gap, gap + 0.1])
    for every in (50, 100, None):
        lines["frequency"] += of_seeds("snip, gemm", [0.2, 0.21, 0.25], refresh_every=every)
    experiments = {name: [line["id"] for line in members] for name, members in lines.items()}
    experiments["shares"].append("not-run-yet")
    stranger = a_line("bf16", 50.0, id="stranger")
    return [stranger, *(line for members in lines.values() for line in members)], experiments


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The files of a report on that bake-off: tables, figures and a page with a marker."""
    folder = tmp_path_factory.mktemp("report")
    lines, experiments = grid()
    experiments["sizes"] += [f"later-{number}" for number in range(9)]
    experiments["shares"] += experiments["shares"][:2]  # the same run named twice counts once
    page = folder / "README.md"
    page.write_text("<!-- bakeoff:readme -->\n<!-- /bakeoff:readme -->\n", encoding="utf-8")
    return report.write_report(lines, experiments, folder / "out", docs=[page])


def test_report_names_missing_runs_and_leaves_lines_of_other_grids_out(reported: list[Path]) -> None:
    text = reported[0].read_text(encoding="utf-8")
    row = row_of(text, "shares", column=0)
    assert (row["runs in the grid"], row["with a line"], row["missing"]) == ("25", "24", "1")
    late = row_of(text, "sizes", column=0)
    assert (late["missing"], late["ids missing"]) == ("9", "`later-0`, `later-1`, `later-2`, ...")
    assert row["ids missing"] == "`not-run-yet`" and row_of(text, "stability", column=0)["diverged"] == "1"
    assert "Lines of no experiment, left out below: 1." in text
    stability = row_of(text.split("## Stability\n")[1], "0.004", column=0)
    assert (stability["diverged"], stability["gap"]) == ("1", "-")  # no BF16 run at this learning rate
    section = text.split("## Gap to BF16\n")[1]
    assert row_of(section, "snip, gemm")["each seed, plan"] == "0: +0.20%, 1: +0.25%, 2: +0.22%"


def test_report_writes_figures_that_show_something(reported: list[Path]) -> None:
    names = ["tables.md", "pareto.png", "loss_curves.png", "plan.png", "stability.png", "frequency.png"]
    assert [path.name for path in reported[:-1]] == names
    for path in reported[1:-1]:
        image = imread(path)[:, :, :3]
        assert min(image.shape[:2]) > 300
        # One number for each colour: sorting rows of three takes seconds.
        colours = (255 * image).round().astype(np.int64) @ (65536, 256, 1)
        assert len(np.unique(colours)) > 20
        assert (image.min(axis=2) < 0.9).mean() > 0.01


def test_report_of_experiments_without_lines_says_so_and_draws_nothing(tmp_path: Path) -> None:
    written = report.write_report([], {"shares": ["a", "b"], "own": []}, tmp_path)
    assert [path.name for path in written] == ["tables.md"]
    text = written[0].read_text(encoding="utf-8")
    assert row_of(text, "shares", column=0)["ids missing"] == "`a`, `b`"
    assert text.count("No run of this experiment has a line.") == 2 and "## Own" in text


def test_loss_curves_are_differences_over_common_steps() -> None:
    bf16 = [a_line("bf16", 0.0, seed, validation_curve=[[0, 9], [200, 5], [300, 4.5], [400, 4]]) for seed in (0, 1)]
    runs = [
        a_line("snip, gemm", 0.1, seed, validation_curve=[[0, 9], [200, 5 + 0.2 * (seed + 1)], [400, 4.1]])
        for seed in (0, 1)
    ]
    lines = paired([*bf16, *runs, a_line("snip, gemm", None, 2)])
    figure = figures.loss_figure(lines, ["snip, gemm"])
    assert figure is not None
    [curve] = [line for line in figure.axes[0].get_lines() if line.get_label() == "snip, gemm"]
    assert np.asarray(curve.get_xdata()).tolist() == [200, 400]
    assert np.asarray(curve.get_ydata()) == pytest.approx([0.3, 0.1])


def test_pareto_points_are_gaps_and_what_is_far_off_is_named() -> None:
    lines = [*bf16_lines(), *of_seeds("uniform-fp4", [9.0, 9.0, 9.0])]
    for share, gap in ((0.5, 0.2), (0.75, 0.4), (0.8, 0.5)):
        lines += of_seeds("snip, gemm", [gap - 0.1, gap, gap + 0.1], share=share)
    figure = figures.pareto_figure(paired(lines), ["snip, gemm", "uniform-fp4"])
    assert figure is not None
    [panel] = figure.axes
    bars = next(bar for bar in panel.containers if bar.get_label() == "snip, gemm")
    assert np.asarray(bars[0].get_ydata()) == pytest.approx([0.2, 0.4, 0.5])
    assert [label.get_text() for label in panel.get_xticklabels()] == ["50", "75", "80", "100"]
    assert np.abs(np.asarray(bars[0].get_xdata()) - [0, 1, 2]).max() < 0.5
    assert panel.get_ylim()[1] < 1
    assert [text.get_text() for text in panel.texts] == ["off the scale:\nuniform-fp4, 100%: +9.00%"]


def many_contenders() -> list[Row]:
    """Twenty-eight contenders with three seeds, one with three shares, one with one run, and the uniform ones."""
    lines = bf16_lines()
    for number in range(28):
        gap = 0.05 * number
        lines += of_seeds(f"policy-{number}, gemm", [gap, gap + 0.1, gap - 0.1])
    lines += of_seeds("policy-0, gemm", [0.1], share=0.8) + of_seeds("once, gemm", [0.1])
    for share in (0.25, 0.5, 0.75):
        lines += of_seeds("snip, gemm", [0.5, 0.6], share=share)
    lines += of_seeds("uniform-fp8", [0.0]) + of_seeds("uniform-fp4", [1.0, 1.1])
    return paired(lines)


def test_figures_show_the_uniform_formats_and_the_contenders_with_most_runs() -> None:
    lines = many_contenders()
    order = figures.main_contenders(lines)
    assert len(order) == 12 and order[0] == "snip, gemm" and order[-2:] == ["uniform-fp4", "uniform-fp8"]
    assert "policy-0, gemm" in order and "once, gemm" not in order
    for figure in (figures.pareto_figure(lines, order), figures.loss_figure(lines, order)):
        assert figure is not None
        handles, labels = figure.axes[0].get_legend_handles_labels()
        shown = [handle[0] if isinstance(handle, ErrorbarContainer) else handle for handle in handles]
        curves = [line for line in shown if isinstance(line, Line2D)]
        assert set(labels) - {"beats a SNIP point\n(p < 0.05)"} == set(order)
        assert len({to_hex(curve.get_color()) for curve in curves}) == 12
        assert len({str(curve.get_marker()) for curve in curves}) == 12


@pytest.mark.slow
def test_legends_lie_inside_their_figures() -> None:
    lines = many_contenders()
    labels = sorted({line["label"] for line in lines})
    drawn = [
        figures.pareto_figure(lines, labels),
        figures.loss_figure(lines, labels),
        figures.stability_figure([*lines, *paired(of_seeds("snip, gemm", [0.5], learning_rate=0.004))], []),
    ]
    for figure in drawn:
        assert figure is not None
        FigureCanvasAgg(figure).draw()
        [legend] = figure.legends
        box = legend.get_window_extent()
        assert box.x0 >= 0 and box.y0 >= 0
        assert box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1


def test_a_ring_marks_the_points_that_beat_snip() -> None:
    lines = paired(beaten_lines())
    figure = figures.pareto_figure(lines, ["snip, gemm", "higher, gemm", "slightly, gemm"])
    assert figure is not None
    rings = [ring for ring in figure.axes[0].collections if str(ring.get_label()).startswith("beats")]
    heights = [height for ring in rings for _, height in np.asarray(ring.get_offsets())]
    assert heights == pytest.approx([np.mean([0.20, 0.26, 0.30])])


def test_pareto_shows_adjusted_gaps_with_their_standard_errors() -> None:
    gaps = {key: own for key, own in UNBALANCED.items() if key[1] == 0.75}
    model, points = layout_of(gaps)
    lines = [run for point in points.values() for run in point.runs]
    figure = figures.pareto_figure(lines, [label for label, _ in gaps])
    assert figure is not None and "bars: standard error" in str(figure.get_suptitle())
    bars = {bar.get_label(): bar for bar in figure.axes[0].containers}
    for (label, _), point in points.items():
        adjusted = model.adjusted(point)
        assert adjusted is not None and adjusted[1] is not None
        [segment] = bars[label][2][0].get_segments()
        assert segment[:, 1] == pytest.approx([adjusted[0] - adjusted[1], adjusted[0] + adjusted[1]])


def test_frequency_axis_ends_with_the_plan_that_is_made_once() -> None:
    lines = [*bf16_lines()]
    for every, gap in ((None, 0.4), (500, 0.3), (50, 0.2)):
        lines += of_seeds("snip, gemm", [gap, gap, gap], refresh_every=every)
    figure = figures.frequency_figure(paired(lines), [])
    assert figure is not None
    [panel] = figure.axes
    assert [label.get_text() for label in panel.get_xticklabels()] == ["50", "500", "once"]
    assert np.asarray(panel.containers[0][0].get_ydata()) == pytest.approx([0.2, 0.3, 0.4])


def test_plan_figure_shows_each_gemm_of_each_layer() -> None:
    first, second = "488" + "848" + "884" + "444", "888" * 3 + "444"
    line = a_line(plans=[{"step": 0, "formats": first}, {"step": 100, "formats": second}])
    figure = figures.plan_figure([a_line("random, gemm"), line])
    assert figure is not None
    fp8, fp4 = 1, 2
    for column, panel in enumerate(figure.axes):
        shown = np.asarray(panel.collections[0].get_array()).reshape(len(LAYERS), 2)
        for row in range(len(LAYERS)):
            letters = [plan[3 * row + column] for plan in (first, second)]
            assert shown[row].tolist() == [fp4 if letter == "4" else fp8 for letter in letters]


def test_plan_figure_has_as_many_colours_as_the_run_has_formats() -> None:
    letters = {"bf16": "b", "fp8": "8", "fp4": "4", "mxfp8": "a", "nvfp4": "c"}
    first, second = "b8a" + "a4c" + "ccc" + "444", "888" * 3 + "cab"
    plans = [{"step": 0, "formats": first, "fp4_fraction": 0.4}, {"step": 9, "formats": second, "fp4_fraction": 0.1}]
    figure = figures.plan_figure([a_line(plans=plans) | {"letters": letters}])
    assert figure is not None
    [legend] = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["bf16", "fp8", "mxfp8", "fp4", "nvfp4"]
    colours = [to_hex(patch.get_facecolor()) for patch in legend.get_patches()]
    assert colours == [FORMATS[name].colour for name in names]
    for column, panel in enumerate(figure.axes):
        shown = np.asarray(panel.collections[0].get_array()).reshape(len(LAYERS), 2)
        wanted = [[plan[3 * row + column] for plan in (first, second)] for row in range(len(LAYERS))]
        assert [[letters[names[int(code)]] for code in row] for row in shown] == wanted


def test_a_plan_is_decided_once_it_has_a_format_of_4_bits_whatever_its_letter() -> None:
    plans = [
        {"step": step, "formats": formats, "fp4_fraction": share}
        for step, formats, share in ((0, "aaa", 0.0), (5, "aac", 0.3), (9, "acc", 0.6))
    ]
    line = a_line(plans=plans) | {"letters": {"mxfp8": "a", "nvfp4": "c"}}
    assert decided_plans(line) == ["aac", "acc"]


def test_letters_of_a_run_are_the_first_ones_for_the_first_formats_and_differ() -> None:
    assert letters_of(["bf16", "fp4", "fp8"]) == {"bf16": "b", "fp8": "8", "fp4": "4"}
    assert letters_of(["nvfp4", "mxfp8"]) == letters_of(["mxfp8", "nvfp4", "nvfp4"]) == {"mxfp8": "a", "nvfp4": "c"}
    every = letters_of(FORMATS)
    assert every.keys() == FORMATS.keys()
    assert len(set(every.values())) == len(FORMATS)


@pytest.mark.parametrize(
    ("shares", "time"),
    [({"nvfp4": 0.5, "mxfp8": 0.5}, 0.375), ({"nvfp4": 0.5, "mxfp8": 0.25, "bf16": 0.25}, 0.5), ({"bf16": 1.0}, 1.0)],
)
def test_modelled_times_of_any_formats_come_from_their_speeds(shares: dict[str, float], time: float) -> None:
    assert report.modelled_times(a_line() | {"shares": shares}) == pytest.approx((2 * time, time))


def test_contenders_of_other_formats_are_others_also_beside_lines_that_name_none() -> None:
    old, new = a_line(), a_line("snip, gemm, {nvfp4, mxfp8}")
    new["spec"]["formats"] = ["nvfp4", "mxfp8"]
    assert [len(one.runs) for one in contenders(paired([*bf16_lines(), old, new]))] == [3, 1, 1]
    alike = copy.deepcopy(new) | {"label": "snip, gemm", "id": "alike"}
    names = {one.name for one in contenders(paired([*bf16_lines(), old, alike]))}
    assert names == {"bf16", "snip, gemm, formats None", "snip, gemm, formats ['nvfp4', 'mxfp8']"}


def test_snip_is_compared_with_policies_of_the_same_formats() -> None:
    lines = [*bf16_lines(), *of_seeds("snip, gemm", [0.1, 0.2, 0.3]), *of_seeds("random, gemm", [0.2, 0.3, 0.4])]
    for label in ("snip, gemm, {nvfp4, mxfp8}", "random, gemm, {nvfp4, mxfp8}"):
        lines += of_seeds(label, [0.3, 0.5, 0.7])
        for line in lines[-3:]:
            line["spec"]["formats"] = ["nvfp4", "mxfp8"]
    found = [(snip, other) for snip, other, _ in pooled_comparisons(paired(lines))]
    assert found == [("snip, gemm", "random, gemm"), ("snip, gemm, {nvfp4, mxfp8}", "random, gemm, {nvfp4, mxfp8}")]


def test_text_between_markers_is_replaced_and_the_rest_stays(tmp_path: Path) -> None:
    path = tmp_path / "results.md"
    path.write_text("a\n<!-- bakeoff:x -->\nold\n<!-- /bakeoff:x -->\nb\n", encoding="utf-8")
    for text in ("new", "newer"):
        report.replace_between(path, "bakeoff:x", text)
        expected = f"a\n<!-- bakeoff:x -->\n{text}\n<!-- /bakeoff:x -->\nb\n"
        assert path.read_text(encoding="utf-8") == expected


@pytest.mark.parametrize(
    "content",
    [
        "nothing",
        "<!-- bakeoff:x -->",
        "<!-- /bakeoff:x -->\n<!-- bakeoff:x -->",
        "<!-- bakeoff:x --><!-- bakeoff:x --><!-- /bakeoff:x -->",
        "<!-- bakeoff:xy --><!-- /bakeoff:xy -->",
    ],
)
def test_missing_or_misplaced_markers_are_refused_by_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "results.md"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"results\.md has .* '<!-- bakeoff:x -->'"):
        report.replace_between(path, "bakeoff:x", "new")
    assert path.read_text(encoding="utf-8") == content


def test_lines_of_reports_are_broken_at_120_characters_and_tables_are_not() -> None:
    row = "| " + "x" * 150 + " |"
    item = "- " + "word " * 30 + "end"
    text = report.wrapped(f"{row}\n\n{item}\n" + "a " * 59 + "b - c >= d")
    assert text.split("\n") == [
        row, "", "- " + "word " * 22 + "word", "  " + "word " * 7 + "end", "a " * 58 + "a", "b - c >= d",
    ]  # fmt: skip


def test_report_fills_the_markers_of_documents(reported: list[Path]) -> None:
    page = reported[-1]
    assert page.name == "README.md"
    assert row_of(page.read_text(encoding="utf-8"), "snip, gemm", column=0)["110M, 75%"] == "+0.22% ± 0.03 (3)"


def test_grids_fill_their_own_markers_of_one_document(tmp_path: Path) -> None:
    lines, experiments = grid()
    experiments = {"frequency": experiments["frequency"]}  # few figures
    page = tmp_path / "README.md"
    other = "<!-- bakeoff:readme -->\nold\n<!-- /bakeoff:readme -->\n"
    page.write_text(other + "<!-- small:runs -->\n<!-- /small:runs -->\n", encoding="utf-8")
    report.write_report(lines, experiments, tmp_path / "out", docs=[page], prefix="small")
    text = page.read_text(encoding="utf-8")
    assert text.startswith(other + "<!-- small:runs -->\nA run can be in several experiments.")
    with pytest.raises(ValueError, match="has no marker '<!-- large:NAME -->'"):
        report.write_report(lines, experiments, tmp_path / "out", docs=[page], prefix="large")


def test_origin_gives_the_command_as_it_was() -> None:
    lines = [a_line(command="python a --b 'c|d'"), a_line(seed=1, command="python a --b 'c|d'")]
    assert "| 2 | 0123456789-dirty | GPU | hopper | 2.11.0 | `python a --b 'c\\|d'` |" in report.origin_table(lines)


@pytest.mark.parametrize(
    ("content", "message"),
    [("no marker", "has no marker"), ("<!-- bakeoff:shars -->", r"unknown tables \['shars'\]; expected some of")],
)
def test_documents_are_checked_before_anything_is_written(tmp_path: Path, content: str, message: str) -> None:
    lines, experiments = grid()
    page = tmp_path / "README.md"
    page.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        report.write_report(lines, experiments, tmp_path / "out", docs=[page])
    assert not (tmp_path / "out").exists()


def test_a_loss_that_is_no_number_counts_as_diverged() -> None:
    assert diverged(a_line(loss=None)) and diverged(a_line(loss={"plan": math.nan}))
