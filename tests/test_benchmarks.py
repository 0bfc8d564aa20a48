"""Are the benchmarks' own statistics, texts and objectives right? (benchmarks/)"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import sys
from pathlib import Path
from typing import Any

import agreement
import cases
import horizon
import horizon_report
import numpy as np
import phase_shift
import probe_cost
import pytest
import torch
from scipy.stats import kendalltau, spearmanr

from snip_hf.divergence import CHOICES
from snip_hf.formats import GEMMS
from snip_hf.terms import LAYER

# --- agreement


def two_figures(levels: int | None, layers: int = 20) -> tuple[Any, Any]:
    """Two figures per layer that go together; with few levels, many layers share one."""
    generator = np.random.default_rng(3)
    one = generator.normal(size=layers)
    other = one + generator.normal(size=layers)
    return (one, other) if levels is None else (np.round(one * levels / 4), np.round(other * levels / 4))


@pytest.mark.parametrize("levels", [None, 8, 4])
def test_rank_figures_and_their_bootstrap_are_those_of_scipy(levels: int | None) -> None:
    one, other = two_figures(levels)
    figures = agreement.rank_figures(one, other, seed=5)
    draws = np.random.default_rng(5).multinomial(20, [1 / 20] * 20, agreement.RESAMPLES)
    for name, scipy_s in (("spearman", spearmanr), ("kendall", kendalltau)):
        assert figures[name] == pytest.approx(scipy_s(one, other).statistic)
        resampled = [scipy_s(np.repeat(one, often), np.repeat(other, often)).statistic for often in draws]
        assert figures[f"{name}_90"] == pytest.approx(np.quantile(resampled, [0.05, 0.95]).tolist())


def test_the_bootstrap_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    one, other = two_figures(None)
    first, second, third = (agreement.rank_figures(one, other, seed) for seed in (0, 0, 1))
    assert first == second
    assert first["spearman"] == third["spearman"] and first["spearman_90"] != third["spearman_90"]


def measured(parts: int, noise: float, layers: int = 1500) -> Any:
    """Independent measurements of a figure that varies by 1 over layers, with normal noise: (parts, layers)."""
    generator = np.random.default_rng(parts)
    return 20 + generator.normal(size=layers) + noise * generator.normal(size=(parts, layers))


@pytest.mark.parametrize(("parts", "noise"), [(2, 1.0), (4, 1.0), (8, 0.5), (2, 0.1)])
def test_the_reliability_is_the_share_of_the_variance_that_is_no_noise(parts: int, noise: float) -> None:
    known = 1 / (1 + noise**2 / parts)
    found = agreement.reliability(measured(parts, noise), root=False)
    assert found is not None
    assert found["pearson"] == pytest.approx(known, abs=0.03)
    # Ranks of normal figures correlate to 6 / pi asin(r / 2) where the figures do to r (Pearson 1907).
    halves = known / (2 - known)
    ranks = 6 / math.pi * math.asin(halves / 2)
    assert found["spearman"] == pytest.approx(2 * ranks / (1 + ranks), abs=0.03)


def test_a_reliability_of_roots_takes_the_root_of_each_half_and_needs_two_parts() -> None:
    parts = measured(2, 1.0, layers=50)
    assert agreement.reliability(parts**2, root=True) == pytest.approx(agreement.reliability(parts, root=False))
    assert agreement.reliability(parts[:1], root=False) is None


def test_ratios_are_those_of_estimate_over_truth() -> None:
    truth = np.array([1.0, 2.0, 4.0, 8.0, 10.0])
    figures = agreement.ratio_figures(truth * [0.5, 0.9, 1.0, 1.1, 3.0], truth)
    assert figures["median_error"] == pytest.approx(0.1)
    assert figures["error_90"] == pytest.approx(0.6 * 2.0 + 0.4 * 0.5)  # 3.6 of 4 steps up the sorted errors
    assert figures["ratio_quartiles"] == pytest.approx([0.9, 1.0, 1.1])
    assert agreement.variation(truth) == pytest.approx(12**0.5 / 5)


def test_an_estimate_that_is_the_truth_of_its_micro_batch_is_exact_in_the_scopes_own_and_all() -> None:
    generator = np.random.default_rng(0)
    truth = {(f"{i}.up_proj", LAYER, "fp4"): generator.uniform(1, 9, size=(3, 2)) for i in range(8)}
    estimates = [{cell: float(np.sqrt(squares[batch].mean())) for cell, squares in truth.items()} for batch in range(3)]
    truth["8.up_proj", LAYER, "fp4"] = np.zeros((3, 2))  # a layer without any divergence is not compared
    head, *records = agreement.weight_records(truth, {"adjoint": estimates})
    assert (head["kind"], head["layers"], head["layers_without"]) == ("weight-truth", 8, 1)
    errors = {record["scope"]: record["error_90"] for record in records}
    assert errors["own"] == pytest.approx(0, abs=1e-12) and errors["all"] == pytest.approx(0, abs=1e-12)
    assert errors["one"] > 0.01
    assert [record["spearman"] for record in records if record["scope"] != "one"] == pytest.approx([1, 1])


# --- cases


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 100 sequences of Python's own source."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(inspect.getsource(inspect), encoding="utf-8")
    return path


def sequences(part: torch.Tensor) -> list[tuple[int, ...]]:
    return [tuple(row) for row in part.tolist()]


def test_train_and_held_out_share_no_sequence_and_are_the_whole_text(text_file: Path) -> None:
    text = cases.load_text(text_file, "cpu", held_out=0.25)
    train, held_out = sequences(text.train), sequences(text.held_out)
    assert len(held_out) == pytest.approx(len(train) / 3, abs=2)
    assert len(held_out) > 10 and not set(train) & set(held_out)
    ids = cases.token_ids(text_file).astype(int).tolist()
    whole = [tuple(ids[start : start + 256]) for start in range(0, len(ids) - 255, 256)]
    assert sorted(train + held_out) == sorted(whole)
    # Shuffled: held out is not the text's end.
    assert set(held_out) != set(whole[-len(held_out) :])


def test_a_text_is_the_same_each_time_and_from_its_token_ids(text_file: Path, tmp_path: Path) -> None:
    text = cases.load_text(text_file, "cpu")
    np.save(tmp_path / "ids.npy", cases.token_ids(text_file))
    for path in (text_file, tmp_path / "ids.npy"):
        again = cases.load_text(path, "cpu")
        assert torch.equal(again.train, text.train) and torch.equal(again.held_out, text.held_out)


def test_batches_go_through_the_sequences_in_order_and_start_again(text_file: Path) -> None:
    text = cases.load_text(text_file, "cpu")
    for held_out, part in ((False, text.train), (True, text.held_out)):
        taken = torch.cat([text.batch(index, 4, held_out)["input_ids"] for index in range(len(part))])
        assert torch.equal(taken, part.repeat(4, 1))
    batch = text.batch(1, 4)
    assert torch.equal(batch["labels"], batch["input_ids"])


# --- horizon


def table(layers: int = 5) -> list[dict[str, Any]]:
    """Rows as of an estimate; losses of single layers may be negative."""
    generator = np.random.default_rng(1)
    rows = []
    for layer in range(layers):
        for gemm in (*GEMMS, LAYER):
            for fmt in CHOICES:
                weight = generator.uniform(0.1, 1)
                row = {"layer": str(layer), "gemm": gemm, "format": fmt, "flops": 1.0, "weight_divergence": weight}
                row |= {"weight_bias": weight * generator.uniform(), "loss_divergence": generator.uniform(-0.5, 1)}
                errors = {name: generator.uniform() for name in ("absolute_error", "relative_error", "loss_taylor")}
                rows.append(row | errors)
    return rows


@pytest.mark.parametrize("objective", horizon.OBJECTIVES)
def test_an_objective_costs_the_sum_of_its_weights_with_everything_in_fp4(objective: str) -> None:
    rows = table()
    for row in rows:
        row |= {"loss_divergence": abs(row["loss_divergence"])}
    costs = horizon.costs(rows, objective)
    assert len(costs) == len(rows)
    all_in_fp4 = sum(cost for (_, gemm, fmt), cost in costs.items() if (gemm, fmt) == (LAYER, "fp4"))
    assert all_in_fp4 == pytest.approx(sum(horizon.OBJECTIVES[objective].values()))


def test_costs_are_in_units_of_the_sizes_of_the_layers_in_fp4() -> None:
    rows = table()
    whole = [row for row in rows if (row["gemm"], row["format"]) == (LAYER, "fp4")]
    assert min(row["loss_divergence"] for row in whole) < 0
    loss = sum(abs(row["loss_divergence"]) for row in whole)
    weight = sum(row["weight_divergence"] ** 2 for row in whole)
    costs = horizon.costs(rows, "loss+weight^2")
    for row in rows:
        wanted = row["loss_divergence"] / loss + row["weight_divergence"] ** 2 / weight
        assert costs[row["layer"], row["gemm"], row["format"]] == pytest.approx(wanted)


def test_a_part_that_repeats_grows_with_the_steps_and_a_random_one_with_their_root() -> None:
    drawn_anew, repeated = ({"weight_divergence": 2.0, "weight_bias": bias} for bias in (0.0, 2.0))
    for steps in (10, 100, 1000):
        figure = horizon.TERMS[f"horizon-{steps}"]
        assert figure(drawn_anew) == pytest.approx(2 * steps**0.5)
        assert figure(repeated) == pytest.approx(2 * steps)
        assert horizon.TERMS[f"horizon-{steps}^2"](repeated) == pytest.approx((2 * steps) ** 2)


def test_objectives_whose_columns_are_missing_are_not_available() -> None:
    rows = table()
    assert set(horizon.available(rows)) == set(horizon.OBJECTIVES)
    measured = [{**row, "weight_bias": None} for row in rows]
    for row in measured:
        del row["loss_taylor"]
    left = horizon.available(measured)
    assert {"paper", "loss", "weight", "weight^2", "absolute-error", "loss+weight^2"} <= set(left)
    assert not [name for name in left if "bias" in name or "horizon" in name or "taylor" in name]


# --- horizon report

FP4, FP8, HIGH = (dict.fromkeys(GEMMS, fmt) for fmt in ("fp4", "fp8", "bf16"))


def run_of(arms: dict[str, dict[str, Any]], losses: dict[tuple[str, int, int], float]) -> horizon_report.Case:
    """A run of (arm, repeat, K) -> held-out loss under the plan; what an arm does not name is its default."""
    default = {"kind": "layer", "assignment": {}, "granularity": "layer", "same_as": None}
    lines: dict[tuple[str, int, int], dict[str, Any]] = {key: {"loss_plan": loss} for key, loss in losses.items()}
    return horizon_report.Case("run", [], {name: {**default, **arm, "name": name} for name, arm in arms.items()}, lines)


def test_the_sum_of_singles_takes_the_arms_that_quantize_each_group_alone() -> None:
    flops = {layer: dict.fromkeys(GEMMS, 1.0) for layer in ("a", "b", "c")}
    kinds = argparse.Namespace(kinds=("layer", "gemm", "layer-fp8", "gemm-fp8"), plans=0, objectives=())
    # Damages by name, as the arms of a run are named, so that every sum tells what it is made of.
    value = {arm.name: 2.0**index for index, arm in enumerate(horizon.make_arms(flops, [], kinds))}
    mixed = {"forward": "fp4", "grad_input": "fp8", "grad_weight": "bf16"}
    case = run_of(
        {"layers": {"assignment": {"a": FP4, "b": FP8, "c": HIGH}}, "gemms": {"assignment": {"a": mixed, "b": HIGH}}},
        {},
    )

    def summed(arm: str, granularity: str, fp4_alone: bool) -> float | None:
        return horizon_report._sum_of_singles(case, arm, granularity, value.get, fp4_alone)

    assert summed("layers", "layer", False) == value["layer:a"] + value["layer-fp8:b"]
    assert summed("layers", "layer", True) == value["layer:a"]
    assert summed("gemms", "gemm", False) == value["gemm:a:forward"] + value["gemm-fp8:a:grad_input"]
    assert summed("gemms", "gemm", True) == value["gemm:a:forward"]
    del value["layer:a"]
    assert summed("layers", "layer", True) is None


def test_sums_and_joint_damages_agree_by_their_correlation_and_their_ratio() -> None:
    sums = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    assert horizon_report._agreement(np.stack([sums, 3 * sums], 1)) == "1.00; 3.00"
    # Deviations (-2 .. 2) and (-1, -3, 1, 1, 2) from the mean: r^2 = (2 + 3 + 0 + 1 + 4)^2 / (10 * 16).
    assert horizon_report._agreement(np.stack([sums, [2, 0, 4, 4, 5]], 1)) == "0.62; 1.00"
    assert horizon_report._agreement(np.stack([sums, 3 * sums], 1)[:3]) == "-; 3.00"
    assert horizon_report._agreement(np.stack([0 * sums + 2, sums], 1)) == "-; 1.50"
    assert horizon_report._agreement(np.empty((0, 2))) == "-"


def test_the_additivity_of_one_step_figures_is_that_of_the_singles() -> None:
    single = {"layer:a": 3.0, "layer:b": 4.0, "layer-fp8:b": 1.0}
    arms = {name: {"kind": name.partition(":")[0]} for name in single}
    arms["share-100-layer-0"] = {"kind": "share-100", "assignment": {"a": FP4, "b": FP4}}
    arms["share-50-layer-0"] = {"kind": "share-50", "assignment": {"a": FP4, "b": FP8}}
    case = run_of(arms, {})
    for name, value in {**single, "share-100-layer-0": 5.0, "share-50-layer-0": 8.0}.items():
        case.lines[name, 0, 0] = {"one_step_weight": value, "one_step_loss": None}
    rows = (horizon_report.additivity(case) or "").splitlines()
    assert rows[2:] == [
        "| layer: weight | - | -; 2.00 | - | -; 0.71 |",
        "| layer: weight^2 | - | -; 6.40 | - | -; 1.00 |",  # 64 / (9 + 1), 25 / (9 + 16)
    ]


def test_a_plans_regret_is_to_the_best_random_plan_of_the_same_repeats() -> None:
    arms = {f"random-layer-{index}": {"kind": "random-layer"} for index in range(3)}
    arms |= {
        "mine": {"kind": "program"},
        "early": {"kind": "program"},
        "gemms": {"kind": "program", "granularity": "gemm"},
        "bf16": {},
    }
    damages = {"mine": (0.2, 0.4), "random-layer-0": (0.1, 0.3), "random-layer-1": (0.6, 0.2), "bf16": (0.0, 0.0)}
    losses = {(arm, repeat, 10): 3.0 + repeat + found[repeat] for arm, found in damages.items() for repeat in (0, 1)}
    losses |= {("random-layer-2", 0, 10): 2.9, ("early", 0, 10): 3.5}  # measured in one repeat of two
    case = run_of(arms, losses)
    assert (horizon_report.regrets(case, "layer", "loss_plan") or "").splitlines()[2:] == [
        "| mine | 2 of 3; 300.0 (+100.0) |",
        "| early | 3 of 4; 500.0 (+600.0) |",
        "| best, median random plan | -100.0, 200.0 |",
    ]
    assert horizon_report.regrets(case, "gemm", "loss_plan") is None  # there is no random plan to compare with
    # Whole tables keep the arms that were measured in all repeats of the most.
    kept, table = case.table([*damages, "random-layer-2"], 10, "loss_plan")
    assert kept == list(damages) and table == pytest.approx(np.array(list(damages.values())))


def test_the_reliability_of_repeats_and_rank_correlations_are_those_of_scipy() -> None:
    one, other = two_figures(8)
    rho = spearmanr(one, other).statistic
    assert horizon_report.spearman(one, other) == pytest.approx(rho)
    assert horizon_report.reliability(np.stack([one, other], 1)) == f"{2 * rho / (1 + rho):.2f}"
    holed = np.append(one, np.nan)
    assert horizon_report.correlation(holed, np.append(other, 7.0)).startswith(f"{rho:.2f} (")


# --- scripts


def test_a_phase_shift_is_measured_on_a_cpu_without_the_fused_kernel(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # for this process it would stay
    monkeypatch.setitem(sys.modules, "fused", None)  # importing it would fail, as where there is no Triton
    options = {"text": text_file, "other_text": None, "device": "cpu", "rows": 1, "blocks": 1, "fused": False}
    output = tmp_path / "phase.jsonl"
    phase_shift.run(argparse.Namespace(**options, early=2, late=2, ages=[0, 1], output=output), "early", 0)
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(line["step"], line["age"]) for line in lines] == [(2, 0), (2, 1)]
    assert lines[0]["old_with_new_weight"] == lines[0]["cheap_check"] == pytest.approx(1)
    assert lines[1]["loss"] != lines[0]["loss"]
    assert "| early | 2 | 0 | " in phase_shift.report(lines)


def test_the_cost_of_a_probe_is_measured_in_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probe_cost, "SIZES", {"tiny": (128, 384, 1, 2048, 0.5, 8, 256)})
    output = tmp_path / "cost.jsonl"
    options = ["--sizes", "tiny", "--device", "cpu", "--rows", "5", "--steps", "1", "--refreshes", "1", "--delay", "1"]
    options += ["--probe-batch-tokens", "1024", "--probe-tokens", "0", "--output"]
    monkeypatch.setattr(sys, "argv", ["probe_cost.py", *options, str(output)])
    probe_cost.main()
    [figures] = (json.loads(line) for line in output.read_text().splitlines())
    assert figures["parameters"] == 12 * 128**2 + 2 * 2048 * 128 + 3 * 128 and figures["linears"] == 7
    assert figures["refresh_steps"] == pytest.approx(figures["refresh"] / figures["step"])
    parts = ("passes", "sums", "program", "rest", "waited", "apply")
    assert min(figures[name] for name in ("step", "check", "solver", *parts)) > 0
    assert figures["refresh"] == pytest.approx(sum(figures[name] for name in parts))
    assert (figures["probe_batch_tokens"], figures["probe_tokens"], figures["apply_delay"]) == (1024, None, 1)
    # X and G of 1,024 tokens on both sides of the seven linears, and of the parameters: gradients, or a moved copy.
    features = 4 * 128 + 2 * 64 + 2 * 128 + 3 * (128 + 384)
    others = 2048 * 128 + 3 * 128  # without the head, which gets no gradient
    held = 4 * (12 * 128**2 + others + 2 * 1024 * features)
    assert figures["predicted_mib"] == pytest.approx(held / 2**20, rel=1e-3) and figures["refresh_peak_mib"] is None
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith("| tiny | 721,280 | 7 | ") and row.endswith(" | - | - |")
