"""Are the benchmarks' own statistics, texts and objectives right? (benchmarks/)"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import probe_cost
import pytest
import refresh_steps
import speed
import torch
from scipy.stats import kendalltau, spearmanr
from shared import agreement, texts
from speed_parts import bf16_mix, kernels, measuring, plan_changes, setting, tables, trainer_runs, training_steps

from snip_hf.config import SnipConfig
from snip_hf.estimation.pending import LAYER
from snip_hf.layers.state import snip_linears
from snip_hf.numerics.gemms import GEMMS

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
    text = texts.load_text(text_file, "cpu", held_out=0.25)
    train, held_out = sequences(text.train), sequences(text.held_out)
    assert len(held_out) == pytest.approx(len(train) / 3, abs=2)
    assert len(held_out) > 10 and not set(train) & set(held_out)
    ids = texts.token_ids(text_file).astype(int).tolist()
    whole = [tuple(ids[start : start + 256]) for start in range(0, len(ids) - 255, 256)]
    assert sorted(train + held_out) == sorted(whole)
    # Shuffled: held out is not the text's end.
    assert set(held_out) != set(whole[-len(held_out) :])


def test_a_text_is_the_same_each_time_and_from_its_token_ids(text_file: Path, tmp_path: Path) -> None:
    text = texts.load_text(text_file, "cpu")
    np.save(tmp_path / "ids.npy", texts.token_ids(text_file))
    for path in (text_file, tmp_path / "ids.npy"):
        again = texts.load_text(path, "cpu")
        assert torch.equal(again.train, text.train) and torch.equal(again.held_out, text.held_out)


def test_batches_go_through_the_sequences_in_order_and_start_again(text_file: Path) -> None:
    text = texts.load_text(text_file, "cpu")
    for held_out, part in ((False, text.train), (True, text.held_out)):
        taken = torch.cat([text.batch(index, 4, held_out)["input_ids"] for index in range(len(part))])
        assert torch.equal(taken, part.repeat(4, 1))
    batch = text.batch(1, 4)
    assert torch.equal(batch["labels"], batch["input_ids"])


# --- scripts


@pytest.mark.slow
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
    assert min(figures[name] for name in ("step", "solver", *parts)) > 0
    assert figures["refresh"] == pytest.approx(sum(figures[name] for name in parts))
    assert (figures["probe_batch_tokens"], figures["probe_tokens"], figures["apply_delay"]) == (1024, None, 1)
    # X and G of 1,024 tokens on both sides of the seven linears, and of the parameters: gradients, or a moved copy.
    features = 4 * 128 + 2 * 64 + 2 * 128 + 3 * (128 + 384)
    others = 2048 * 128 + 3 * 128  # without the head, which gets no gradient
    held = 4 * (12 * 128**2 + others + 2 * 1024 * features)
    assert figures["predicted_mib"] == pytest.approx(held / 2**20, rel=1e-3) and figures["refresh_peak_mib"] is None
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith("| tiny | fp4,fp8 | saliency | 721,280 | 7 | ") and row.endswith(" | - | - |")
    assert {name: [pytest.approx(figures[name], abs=1e-5)] for name in probe_cost.STEPS} == figures["each"]
    monkeypatch.setattr(sys, "argv", ["probe_cost.py", "--resume", *options, str(output)])
    probe_cost.main()
    assert len(output.read_text().splitlines()) == 1


def test_a_refresh_is_shown_by_workflow_step() -> None:
    each = {name: [0.5, 1.5, 1.0] for name in probe_cost.STEPS} | {"refresh": [4.0, 5.0, 3.0]}
    line = {"size": "1M", "rows": 2, "length": 256, "machine": "a CPU", "step": 2.0, "each": each}
    heads, _, *rows = refresh_steps.report([line]).splitlines()
    assert heads == "| step | 1M, 2 x 256 tokens, a CPU: s | in training steps | of the refresh |"
    other = refresh_steps.report([{**line, "loss_estimator": "saliency"}])
    assert other.startswith("| step | 1M, 2 x 256 tokens, a CPU, saliency: s |")
    assert len(rows) == len(probe_cost.STEPS) == len(refresh_steps.WORKFLOW)
    assert rows[0].endswith("| 1 (0.5 to 1.5) | 0.5 | 25.0% |") and rows[4].endswith("| 1 (0.5 to 1.5) | 0.5 |  |")
    assert rows[-1].endswith("| 4 (3 to 5) | 2 | 100.0% |")


def test_an_unknown_loss_divergence_is_refused_before_anything_is_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["probe_cost.py", "--loss-estimators", "salience"])
    with pytest.raises(SystemExit):
        probe_cost.main()
    assert "invalid choice: 'salience'" in capsys.readouterr().err


@pytest.mark.slow
def test_probes_of_several_lists_of_formats_and_of_loss_divergences_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probe_cost, "SIZES", {"tiny": (64, 192, 1, 256, 1, 1, 128)})
    probed: list[tuple[tuple[str, ...], str]] = []
    refresh = probe_cost.refresh

    def noted(model: Any, optimizer: Any, batch: Any, config: SnipConfig) -> dict[str, Any]:
        probed.append((config.formats, config.loss_estimator))
        return {**refresh(model, optimizer, batch, config), "probe": 1.0 + len(config.formats)}

    monkeypatch.setattr(probe_cost, "refresh", noted)
    output = tmp_path / "cost.jsonl"
    options = ["--sizes", "tiny", "--steps", "1", "--refreshes", "1", "--delay", "1", "--output", str(output)]
    options += ["--loss-estimators", "saliency", "token-fisher"]
    monkeypatch.setattr(sys, "argv", ["probe_cost.py", *options, "--formats", "fp4,fp8", "mxfp4,fp4,mxfp8,fp8"])
    probe_cost.main()
    lists, losses = [("fp4", "fp8"), ("mxfp4", "fp4", "mxfp8", "fp8")], ("saliency", "token-fisher")
    assert probed == 2 * [(formats, loss) for formats in lists for loss in losses]
    figures = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(line["formats"], line["loss_estimator"], line["of_first"]) for line in figures] == [
        (",".join(formats), loss, pytest.approx((1 + len(formats)) / 3)) for formats in lists for loss in losses
    ]


# --- speed


def speed_options(*arguments: str) -> argparse.Namespace:
    return speed.parse(["--device", "cpu", "--rows", "2", "--length", "128", "--steps", "2", *arguments])


# What torch's compiler does inside, and torch warns of.
compiles = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture
def tiny_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes for a CPU, whose steps are not compiled to machine code."""
    tiny = (128, 384, 2, 2, 1)
    for name, value in {"MODELS": {"tiny": tiny}, "SMALL": tiny, "SMALL_BATCH": (2, 64), "VOCABULARY": 64}.items():
        monkeypatch.setattr(setting, name, value)
    monkeypatch.setattr(setting, "COMPILER", "eager")
    monkeypatch.setattr(setting, "CHANGES", 3)


def test_speeds_and_memory_are_in_those_of_bf16_first_and_last_with_as_many_micro_batches() -> None:
    figures = [("BF16", 1, 10.0, 4.0), ("BF16", 2, 30.0, 5.0), ("FP4", 1, 8.0, 3.0), ("BF16", 1, 14.0, 4.0)]
    names = ("recipe", "accumulation", "step_ms", "peak_gib")
    rows = [dict(zip(names, row, strict=True)) for row in figures]
    compared = measuring.compared([*rows, {"recipe": "other", "error": "no"}], "step_ms")
    assert [row.get("speedup") for row in compared] == pytest.approx([1.2, 1, 1.5, 12 / 14, None])
    assert [row.get("peak_ratio") for row in compared] == [1, 1, 0.75, 1, None]
    assert "speedup" not in measuring.compared(rows[2:3], "step_ms")[0]


def test_an_error_costs_the_rest_of_its_measurement_alone_and_nothing_begins_after_the_time_is_over() -> None:
    def measure() -> Any:
        yield {"ms": 1.0}
        raise RuntimeError("no kernel")

    options = speed_options()
    assert measuring.guarded({"recipe": "a"}, measure, options) == [
        {"recipe": "a", "ms": 1.0},
        {"recipe": "a", "error": "RuntimeError: no kernel"},
    ]
    options.deadline = 0
    assert measuring.guarded({}, measure, options) == [{"error": "TimeoutError: not begun: --minutes are over"}]


def test_a_table_has_the_figures_and_below_it_what_failed() -> None:
    rows = [
        {"part": "linears", "out_features": 4096, "in_features": 2048, "recipe": "BF16", "ms": 1.23456, "speedup": 1},
        {"part": "linears", "out_features": 4096, "in_features": 2048, "recipe": "b", "error": "RuntimeError: no"},
    ]
    assert speed.report("linears", rows).splitlines()[3:] == [
        "|---|---|---|---|---|---|",
        "| 4096 | 2048 | BF16 | 1.235 | 1.000 | - |",
        "",
        "Failed: 4096, 2048, b: RuntimeError: no",
    ]


def test_quick_measures_less_and_what_is_not_known_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    full, quick = speed_options(), speed_options("--quick", "--linears", "256x384", "--parts", "linears", "kernels")
    assert [*full.parts, *speed.ON_REQUEST] == list(speed.PARTS)
    assert set(tables.TABLES) == set(speed.PARTS)
    assert quick.parts == ["linears", "kernels"]
    assert set(quick.recipes) < set(full.recipes) and quick.linears == [(256, 384)]
    assert len(quick.channels) < len(full.channels) and quick.deadline < full.deadline
    with pytest.raises(SystemExit):
        speed_options("--recipes", "torchao tensorwise", "BF15")
    assert "'BF15' is not known; expected some of snip-hf FP4, ties, " in capsys.readouterr().err


def test_the_memory_bound_and_the_time_give_a_ratio() -> None:
    figures = kernels.timed_against(bound=0.02, taken=0.025, layouts="rows")
    assert figures == pytest.approx({"rows_us": 25, "rows_bound_us": 20, "rows_ratio": 1.25})


@compiles
@pytest.mark.slow
def test_training_steps_are_timed_under_every_recipe_and_micro_batches_add_up(tiny_speed: None) -> None:
    options = speed_options("--recipes", "snip-hf FP4, ties", "snip-hf FP8, ties", "torchao blockwise")
    rows = list(speed.run_part("models", options, []))
    assert [(row["recipe"], row.get("accumulation")) for row in rows] == [
        ("BF16", 1),
        ("BF16", 2),
        ("snip-hf FP4, ties", 1),
        ("snip-hf FP4, ties", 2),
        ("snip-hf FP8, ties", 1),
        ("torchao blockwise", None),  # Not on a CPU.
        ("BF16", 1),
        ("BF16", 2),
    ]
    timed = [row for row in rows if "error" not in row]
    assert len(timed) == 7 and min(row["step_ms"] for row in timed) > 0
    for row in timed:
        assert row["tokens_per_s"] == pytest.approx(1e3 * row["accumulation"] * 256 / row["step_ms"])
        assert row["breaks"] == 0 and row["part"] == "models"
    losses = [row["loss"] for row in timed]
    assert losses[:2] == losses[-2:]  # The same training again.
    assert len({round(loss, 6) for loss in losses}) == 5 and losses == pytest.approx([losses[0]] * 7, rel=0.1)


@compiles
@pytest.mark.slow
def test_plans_change_without_a_recompilation_and_layers_train_as_the_whole_model(tiny_speed: None) -> None:
    rows = list(speed.run_part("compile", speed_options("--quick"), []))
    by_run = {(row["compiled"], row["mode"]): row for row in rows}
    for row in by_run["layers", "default"], by_run["whole", "reduce-overhead"]:
        assert (row["graphs"], row["breaks"], row["changes"], row["recompilations"]) == (1, 0, 3, 0)
        assert len(set(row["losses"])) == 5 and row["difference"] == pytest.approx(0, abs=5e-3)
    folded = next(speed.run_part("compile", speed_options("--quick", "--formats", "mxfp4", "fp8-tensor"), []))
    assert (folded["graphs"], folded["breaks"], folded["recompilations"]) == (1, 0, 0)
    assert folded["losses"][0] != rows[0]["losses"][0]


@compiles
@pytest.mark.slow
def test_steps_are_timed_under_plans_with_more_and_more_gemms_in_bf16(tiny_speed: None) -> None:
    alone, *mixed = speed.run_part("bf16_mix", speed_options(), [])
    assert alone["recipe"] == "BF16" and alone["speedup"] == 1
    assert [round(21 * row["bf16_gemms"]) for row in mixed[:5]] == [0, 2, 5, 10, 0]
    assert mixed[5]["bf16_gemms"] == mixed[3]["bf16_gemms"] / 2  # one of two decoder layers
    assert all(row["speedup"] == pytest.approx(alone["step_ms"] / row["step_ms"]) for row in mixed)


def test_tied_linears_are_in_bf16_together() -> None:
    kinds = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    for seed in range(5):
        chosen = bf16_mix.pattern(kinds, 0.5, seed)
        for tie in setting.TIES:
            assert all(len({chosen[kind, gemm] for kind in tie}) == 1 for gemm in GEMMS)
        assert 8 <= sum(chosen.values()) <= 10
    assert not any(bf16_mix.pattern(kinds, 0.0, 0).values()) and all(bf16_mix.pattern(kinds, 1.0, 0).values())


def test_a_plan_is_drawn_for_each_gemm_and_tied_layers_share_it(tiny_speed: None) -> None:
    recipe, device = "snip-hf FP4, ties", torch.device("cpu")
    training = training_steps.Training(setting.SMALL, (1, 8), recipe, 0, device, backend="eager")
    layers = snip_linears(training.model)
    plan_changes.draw_plan(layers, random.Random(1), ("fp4", "fp8"))
    formats = {name.removeprefix("model.layers."): layer.formats for name, layer in layers.items()}
    for one, other in (("0.self_attn.q_proj", "0.self_attn.v_proj"), ("1.mlp.gate_proj", "1.mlp.up_proj")):
        assert formats[one] == formats[other]
    assert len({tuple(chosen.values()) for chosen in formats.values()}) > 4


def test_a_run_of_the_trainer_has_two_refreshes_and_times_other_steps_under_the_first_plan() -> None:
    plan = trainer_runs.Plan(24)
    assert (plan.first, plan.every, plan.delay) == (5, 12, 4)
    assert plan.refreshes == (5, 17) and plan.applications == (9, 21)
    assert plan.ordinary == [10, 11, 12, 13, 14, 15, 16, 18, 19, 20, 22, 23]
    with pytest.raises(ValueError, match=r"^17 steps are too few for two refreshes; expected at least 18\.$"):
        trainer_runs.Plan(17)


def test_what_refreshes_and_first_steps_take_is_in_units_of_bf16_and_the_speed_in_those_of_torchao_too() -> None:
    names = ("recipe", "step_ms", "first_s", "first_refresh_ms", "refresh_ms", "peak_gib", "refresh_peak_gib")
    figures = [
        ("BF16", 10.0, 20.0, 0.0, 0.0, 4.0, 4.0),
        ("snip-hf 75%", 8.0, 25.0, 120.0, 44.0, 3.0, 5.0),
        ("torchao tensorwise", 9.0, 22.0, 0.0, 0.0, 3.5, 3.5),
        ("BF16", 12.0, 5.0, 0.0, 0.0, 4.0, 4.0),
    ]
    rows = [dict(zip(names, row, strict=True)) for row in figures]
    error = {"recipe": "snip-hf 100%", "error": "no"}
    first, ours, torchao, last, failed = trainer_runs.in_units_of_others([*rows, error])
    assert (ours["first_refresh_steps"], ours["refresh_steps"]) == pytest.approx((120 / 11, 4))
    assert ours["first_ratio"] == 1.25 and ours["refresh_peak_ratio"] == 1.25
    assert ours["against_torchao"] == pytest.approx(1.125) and torchao["against_torchao"] == 1
    assert first["first_ratio"] == 1 and last["first_ratio"] == 0.25 and failed == error


@compiles
@pytest.mark.slow
def test_runs_of_the_trainer_are_measured_with_their_refreshes(tiny_speed: None) -> None:
    options = speed_options("--recipes", "snip-hf 75%", "snip-hf 100%", "--trainer-steps", "18")
    first, part, whole, last = speed.run_part("trainer", options, [])
    assert [row["recipe"] for row in (first, part, whole, last)] == ["BF16", "snip-hf 75%", "snip-hf 100%", "BF16"]
    assert first["loss"] == last["loss"] and first["backend"] is None and first["seconds"] == []
    assert (part["share"] >= 0.75, whole["share"]) == (True, 1.0)
    for row in part, whole:
        assert row["backend"] == "emulated" and row["formats"] == ("mxfp4", "fp8-tensor") and len(row["seconds"]) == 2
        assert row["speedup"] > 0 and row["tokens_per_s"] == pytest.approx(256e3 / row["step_ms"])
    for row in first, part, whole, last:
        assert row["graphs"] > 0 and (row["breaks"], row["recompilations"]) == (0, 0)


@pytest.mark.slow
def test_first_steps_are_timed_in_processes_that_find_nothing_compiled(
    tiny_speed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A cache of the user's, which no run may read or write.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    options = speed_options("--recipes", "snip-hf 75%", "--trainer-steps", "18")
    bf16, ours = speed.run_part("first", options, [])
    assert [row["recipe"] for row in (bf16, ours)] == ["BF16", "snip-hf 75%"]
    assert bf16["first_ratio"] == 1 and ours["first_ratio"] == ours["first_s"] / bf16["first_s"]
    both = ours["first_s"] + ours["first_refresh_ms"] / 1e3
    assert ours["first_two_ratio"] == pytest.approx(both / bf16["first_s"]) and ours["backend"] == "emulated"
    assert list(tmp_path.iterdir()) == []
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "triton")


@compiles
@pytest.mark.slow
def test_a_decoder_layer_is_timed_in_bf16_and_in_the_formats_asked_for(
    tiny_speed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setting, "CROSSING", ((128, 64), (128, 128), (256, 64)))
    rows = list(speed.run_part("crossing", speed_options("--quick", "--formats", "mxfp4", "fp8"), []))
    assert [(row["hidden"], row["tokens"], row["recipe"]) for row in rows] == [
        (hidden, 64, recipe) for hidden in (128, 256) for recipe in ("BF16", "snip-hf mxfp4, ties")
    ]
    assert min(row["speedup"] for row in rows) > 0


@compiles
@pytest.mark.slow
def test_the_whole_benchmark_prints_and_writes_what_runs_on_a_cpu(
    tiny_speed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probe_cost, "SIZES", {"1B": (128, 384, 1, 2048, 0.5, 8, 256)})
    monkeypatch.setattr(setting, "MODELS", {"TinyLlama-1.1B": setting.SMALL})
    output = tmp_path / "speed.jsonl"
    options = ["--parts", "kernels", "gemms", "refresh", "linears", "--linears", "256x128", "--quick"]
    options += ["--recipes", "snip-hf FP4", "--rows", "2", "--length", "128", "--steps", "1", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["speed.py", *options, "--seed", "3", "--output", str(output)])
    speed.main()
    kernels, gemms, refresh, *linears = (json.loads(line) for line in output.read_text().splitlines())
    for row in kernels, gemms:
        assert row["error"].startswith("RuntimeError: the model is on 'cpu', expected a CUDA device")
    assert refresh["refresh_steps"] == pytest.approx(refresh["refresh"] / refresh["step"])
    assert refresh["step"] != refresh["eager_step"]
    assert [row["recipe"] for row in linears] == ["BF16", "snip-hf FP4", "BF16"]
    assert linears[1]["speedup"] == pytest.approx((linears[0]["ms"] + linears[2]["ms"]) / 2 / linears[1]["ms"])
    for row in kernels, refresh, linears[0]:
        assert row["seed"] == 3 and {"commit", "machine", "torch", "triton", "torchao", "command"} <= row.keys()
    printed = capsys.readouterr().out
    assert "\nFailed: gemms: RuntimeError" in printed and "\n| 256 | 128 | snip-hf FP4 | " in printed
