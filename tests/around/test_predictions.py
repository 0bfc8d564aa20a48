"""Is what theory says of formats what the rounding does, and what the papers print?"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import kendalltau, spearmanr
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from eval.bakeoff import predictions
from eval.bakeoff.float_scaling import added_loss, added_loss_of, critical_tokens, loss_in_high_precision
from eval.bakeoff.format_noise import decibels, gaussian_noise, is_predicted, magnitudes, mean_crest, published_qsnr
from eval.bakeoff.prediction_ranks import agreement, kendall, paired_differences, spearman
from eval.bakeoff.recorded_noise import crest_factor, figures, record, relative_noise, rounds_all
from snip_hf.numerics.formats import E2M1, E4M3, FORMATS, integers
from snip_hf.numerics.gemms import OPERANDS

ROOT = Path(__file__).resolve().parents[2]
PREDICTED = [name for name, format in FORMATS.items() if is_predicted(format)]
MXINT8 = replace(FORMATS["mxfp8"], grid=integers(127))
MXINT6 = replace(FORMATS["mxfp6-e2m3"], grid=integers(31))
NVINT4 = replace(FORMATS["nvfp4-1x16"], grid=integers(7))

# -------------------------------------------------------------------------------------------------------------- noise


@pytest.mark.parametrize("name", PREDICTED)
def test_the_integral_is_the_noise_of_rounding_normal_random_numbers(name: str) -> None:
    format, x = FORMATS[name], torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    for operand in OPERANDS:
        measured = decibels(relative_noise(x, format, operand, 1))
        assert decibels(gaussian_noise(format, operand, x.numel())) == pytest.approx(measured, abs=0.06)


def test_theory_speaks_of_formats_that_round_everything_without_a_choice() -> None:
    assert set(FORMATS) - set(PREDICTED) == {"bf16", "fp4-pqt", "nvfp4-46", "fp4-46"}
    assert {name for name, format in FORMATS.items() if not rounds_all(format)} == {"bf16", "fp4-pqt"}


def test_magnitudes_are_the_values_of_the_grid() -> None:
    assert magnitudes(E2M1).tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert magnitudes(integers(7)).tolist() == list(range(8))
    bytes_of_e4m3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert magnitudes(E4M3).tolist() == bytes_of_e4m3.double().tolist()


def test_the_mean_of_the_largest_of_many_normal_numbers() -> None:
    assert mean_crest(1) == pytest.approx(math.sqrt(2 / math.pi), abs=1e-3)
    sample = np.abs(np.random.default_rng(0).standard_normal((100_000, 32))).max(axis=1)
    assert mean_crest(32) == pytest.approx(float(sample.mean()), abs=5e-3)


@pytest.mark.parametrize(
    ("integer", "floating", "crest", "ratio"),
    [
        (MXINT8, FORMATS["mxfp8"], 7.55, 31.86),
        (MXINT6, FORMATS["mxfp6-e2m3"], 1.96, 31.54),
        (FORMATS["ufp4"], FORMATS["mxfp4"], 2.04, 19.14),
        (NVINT4, FORMATS["nvfp4-1x16"], 2.39, 21.14),
    ],
    ids=["8 bits", "6 bits", "4 bits", "4 bits, E4M3 scales"],
)
def test_integers_and_floats_cross_where_the_paper_says(
    integer: Any, floating: Any, crest: float, ratio: float
) -> None:
    def lead(at: float) -> float:
        return published_qsnr(integer, "activation", at) - published_qsnr(floating, "activation", at)

    found = brentq(lead, 1.5, 10)
    assert found == pytest.approx(crest, abs=0.01)
    assert published_qsnr(floating, "activation", found) == pytest.approx(ratio, abs=0.01)


def test_the_published_formulas_do_not_speak_of_other_scales() -> None:
    assert published_qsnr(replace(FORMATS["nvfp4"], scale="e5m2", tensor_scale=None), "activation", 2.0) is None


# ---------------------------------------------------------------------------------------------------------------- law


@pytest.mark.parametrize(
    ("exponent_bits", "mantissa_bits", "trillions"), [(8, 7, 1730), (4, 3, 27), (2, 1, 0.4)], ids=["BF16", "FP8", "FP4"]
)
def test_the_law_has_the_critical_data_sizes_that_the_paper_prints(
    exponent_bits: int, mantissa_bits: int, trillions: float
) -> None:
    found = critical_tokens(1e9, exponent_bits, mantissa_bits, 128) / 1e12
    assert found == pytest.approx(trillions, rel=0.03)


def test_the_law_adds_nothing_for_a_scale_per_element() -> None:
    assert added_loss(1e9, 1e9, 2, 1, 1) == 0
    # A 41M model on 10B tokens ends between 3.4 and 3.6 in the paper's figure 3.
    assert 3.4 < loss_in_high_precision(40894464, 10485760000) < 3.6


def test_the_law_reads_a_format_by_its_activations() -> None:
    assert added_loss_of(FORMATS["fp4"], 1e9, 1e9) == added_loss(1e9, 1e9, 2, 1, 128)
    assert added_loss_of(FORMATS["ufp4"], 1e9, 1e9) == added_loss(1e9, 1e9, 0, 3, 32)
    silent = ("bf16", "fp8-tensor", "nvfp4-46", "nvfp4-rht")
    assert [added_loss_of(FORMATS[name], 1e9, 1e9) for name in silent] == [None] * 4


# ----------------------------------------------------------------------------------------------------------- recording


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 64, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, num_key_value_heads=4, **sizes))


def test_recorded_operands_are_those_of_the_gemms(model: LlamaForCausalLM) -> None:
    sequence = np.random.default_rng(0).integers(64, size=128)
    recorded = record(model, sequence)
    linears = {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear)}
    assert recorded.keys() == linears.keys() - {"lm_head"}
    assert not any(parameter.grad is not None for parameter in model.parameters())
    ids = torch.from_numpy(sequence)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    for name, one in recorded.items():
        torch.testing.assert_close(one.gradient.T @ one.activation, linears[name].weight.grad)
        assert torch.equal(one.weight, linears[name].weight)
    model.zero_grad()
    found = figures(recorded, FORMATS["fp4"])
    assert found["noise"].keys() == found["crest"].keys() == set(predictions._USES)
    assert all(0.005 < noise < 0.1 for noise in found["noise"].values())


def test_a_crest_factor_is_the_mean_over_the_blocks_that_are_not_zero() -> None:
    x = torch.zeros(32, 64)
    x[0, :32] = 1  # crest factor 1
    x[0, 32] = 5  # alone among 32: the root of 32
    assert crest_factor(x, FORMATS["mxfp4"], "activation", 1) == pytest.approx((1 + math.sqrt(32)) / 2)
    # In columns each block has one element that is not 0.
    assert crest_factor(x, FORMATS["mxfp4"], "activation", 0) == pytest.approx(math.sqrt(32))
    assert crest_factor(x, FORMATS["mxfp4-32x32"], "weight", 1) == pytest.approx((math.sqrt(32) + 32) / 2)


# --------------------------------------------------------------------------------------------------------------- ranks


def line(name: str, base_seed: int, loss: float, **changes: Any) -> dict[str, Any]:
    spec = {"format": name, "gemms": "all"}
    return {
        "contender": name,
        "spec": spec,
        "fork": {"base_seed": base_seed, "point": 1, "data_seed": 0},
        "state": str(base_seed),
        "loss": {"held_out_plan": loss},
        "diverged": False,
    } | changes


def test_differences_are_paired_with_bf16_and_leave_out_what_is_not_one_format() -> None:
    lines = [line("bf16", 0, 4.0), line("fp4", 0, 5.0), line("fp4", 1, 9.0), line("fp8", 0, 9.0, diverged=True)]
    lines.append(line("mxfp4", 0, 9.0, spec={"format": "mxfp4", "gemms": "forward"}))
    lines.append(line("snip", 0, 9.0, spec={"policy": "snip"}))
    assert paired_differences(lines, "held_out_plan") == {"fp4": {(0, 1, 0, "0"): 25.0}}
    with pytest.raises(ValueError, match="No line is of the contender 'bf16'"):
        paired_differences(lines[1:], "held_out_plan")


def test_agreement_knows_the_noise_of_forks_and_the_luck_of_few_formats() -> None:
    certain = {name: {("a",): float(rank), ("b",): rank + 0.1} for rank, name in enumerate("wxyz")}
    found = agreement({"w": 1, "x": 2, "y": 30, "z": 31}, certain)
    assert (found.formats, found.spearman, found.kendall) == (4, (1, 1, 1), (1, 1, 1))
    assert found.p == pytest.approx(1 / 24)
    assert agreement({"w": 4, "x": 3, "y": 2, "z": 1}, certain).p == 1
    noisy = {name: {("a",): float(rank), ("b",): 3.5 - rank} for rank, name in enumerate("wxyz")}
    spread = agreement({"w": 1, "x": 2, "y": 3, "z": 4}, noisy).spearman
    assert spread is not None and spread[1:] == (-1, 1)
    assert agreement({"w": 1, "x": 2, "y": 3}, certain).spearman is None


def test_the_rank_correlations_are_scipys() -> None:
    x, y = np.array([3.0, 1, 1, 5, 2]), np.array([[2.0, 2, 7, 9, 1], [1, 2, 3, 4, 5]])
    assert spearman(x, y) == pytest.approx([spearmanr(x, row).statistic for row in y])
    assert kendall(x, y) == pytest.approx([kendalltau(x, row).statistic for row in y])
    assert math.isnan(spearman(np.ones(4), np.arange(4.0)))


# ---------------------------------------------------------------------------------------------------------------- page


def test_the_committed_page_has_the_rows_that_its_command_writes() -> None:
    committed = (ROOT / "eval/results/format-predictions.md").read_text(encoding="utf-8")
    recorded = predictions.read_recorded(ROOT / "eval/results/format-noise.jsonl")
    assert recorded.keys() == {name for name, format in FORMATS.items() if rounds_all(format)}
    for name in ("fp4", "nvfp4-46", "int8"):
        row = predictions.noise_table([predictions.predict(FORMATS[name], recorded[name])]).splitlines()[-1]
        assert row in committed


def test_losses_in_proportion_to_noise_are_fitted_through_the_origin() -> None:
    assert predictions.proportion({"a": 1.0, "b": 2.0, "c": None}, {"a": 2.0, "b": 4.0, "c": 9.0}) == 2
    assert predictions.proportion({"a": None}, {"a": 2.0}) is None


def test_a_page_has_what_forks_measured_and_predictions_for_the_formats_that_did_not_run() -> None:
    losses = {"bf16": 4.0, "fp8": 4.01, "mxfp4": 4.02, "fp4": 4.03, "int4": 4.04}
    lines = [line(name, 0, loss, setting="s", steps=100, commit="c") for name, loss in losses.items()]
    found = predictions.fork_tables({name: predictions.predict(FORMATS[name]) for name in PREDICTED}, lines)
    assert found.startswith("## Forks of 100 steps, commit c\n")
    assert "| fp8 | 1 | +0.250 | - | 31.71 | - | - | 0.0001 |" in found
    assert "| ufp4 | 0 | - | - | 15.60 | - | - | 0.0910 |" in found
    assert "| integral, normal numbers | 4 | +0.80 (+0.80 to +0.80) | +0.67 (+0.67 to +0.67) | 0.167 |" in found


def test_a_missing_or_old_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert predictions.main(["--recorded", str(tmp_path / "none")]) == 1
    old = tmp_path / "old.jsonl"
    old.write_text('{"schema_version": 0, "format": "fp4"}\n', encoding="utf-8")
    assert predictions.main(["--recorded", str(old)]) == 1
    errors = capsys.readouterr().err
    assert "none does not exist; expected the lines of" in errors
    assert "the line of 'fp4' has schema_version 0, expected 1. Record it anew." in errors
