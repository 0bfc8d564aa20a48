"""Are the benchmarks' own statistics, texts and objectives right? (benchmarks/)"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import kendalltau, spearmanr

from snip_hf.divergence import CHOICES
from snip_hf.formats import GEMMS
from snip_hf.terms import LAYER

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import agreement  # noqa: E402
import cases  # noqa: E402
import horizon  # noqa: E402
import phase_shift  # noqa: E402
import probe_cost  # noqa: E402

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
    monkeypatch.setattr(probe_cost, "SIZES", {"tiny": (128, 1)})
    output = tmp_path / "cost.jsonl"
    options = ["--sizes", "tiny", "--device", "cpu", "--rows", "5", "--steps", "1", "--refreshes", "1", "--output"]
    monkeypatch.setattr(sys, "argv", ["probe_cost.py", *options, str(output)])
    probe_cost.main()
    [figures] = (json.loads(line) for line in output.read_text().splitlines())
    assert figures["parameters"] == 12 * 128**2 + 2 * 2048 * 128 + 3 * 128 and figures["linears"] == 7
    assert figures["probe_steps"] == pytest.approx(figures["probe"] / figures["step"])
    assert min(figures[name] for name in ("step", "probe", "check", "solver")) > 0
    # X and G of 1,024 tokens on both sides of the seven linears, and of the parameters: gradients, or a moved copy.
    features = 4 * 128 + 2 * 64 + 2 * 128 + 3 * (128 + 384)
    others = 2048 * 128 + 3 * 128  # without the head, which gets no gradient
    held = 4 * (12 * 128**2 + others + 2 * 1024 * features)
    assert figures["predicted_mib"] == pytest.approx(held / 2**20, rel=1e-3) and figures["measured_mib"] is None
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith("| tiny | 721,280 | 7 | ") and row.endswith(" | - |")
