"""Figures of speed and memory that README.md, CHANGELOG.md and docs/ quote are those of the committed lines."""

from __future__ import annotations

from typing import Any

import pytest
from committed import lines_of, text_of
from mxfp4_range import BINADES, OPERANDS

from snip_hf.kernels.tensor_scaled.backend import TensorScaled


def test_torchao_s_fp8_is_faster_at_8b_and_slower_at_1_1b() -> None:
    lines = lines_of("benchmarks/results/speed.jsonl")
    lines += lines_of("benchmarks/results/speed_trainer.jsonl")
    ahead: dict[str, list[float]] = {}
    fp4: dict[str, float] = {}
    for line in lines:
        recipe, model = line.get("recipe"), line.get("model")
        if recipe in ("snip-hf FP4, ties", "snip-hf 100%"):
            fp4[model] = line["step_ms"]
        if recipe == "torchao tensorwise" and model in fp4:
            ahead.setdefault(model, []).append(100 * (fp4.pop(model) / line["step_ms"] - 1))
    large, small = ahead["8B, 8 layers"], ahead["TinyLlama-1.1B"]
    # The fourth run at 8B, of 0.5%, is that of docs/hopper.md, whose lines are not kept.
    assert len(large) == 3 and all(0.85 < value < 1.3 for value in large)
    assert len(small) == 3 and all(-1.0 < value < -0.3 for value in small)
    assert "0.5 to 1.3% faster than FP4" in text_of("README.md")
    assert "0.3 to 0.9% slower at 1.1B" in text_of("README.md")


def of_trainer() -> dict[tuple[str, str], dict[str, Any]]:
    """Returns model and recipe -> line of the newest run through the Trainer; torchao's is older at TinyLlama-1.1B."""
    newest = [line for line in lines_of("benchmarks/results/speed_trainer.jsonl") if line["commit"] == "b0d2509"]
    assert {line["model"] for line in newest} == {"TinyLlama-1.1B"}
    rows = [line for line in lines_of("benchmarks/results/speed_mxfp4.jsonl") if line["part"] == "trainer"] + newest
    return {(row["model"], row["recipe"]): row for row in rows} | {("TinyLlama-1.1B", "BF16 first"): newest[0]}


MODELS, RECIPES = ("8B, 8 layers", "TinyLlama-1.1B"), ("snip-hf 75%", "snip-hf 100%", "torchao tensorwise")


def test_the_speeds_and_memory_of_mxfp4_are_those_of_the_newest_lines() -> None:
    found, text, page = of_trainer(), text_of("README.md"), text_of("docs/tensor_scaled.md").replace("**", "")
    for recipe in RECIPES:
        rows = [found[model, recipe] for model in MODELS]
        large, small = ((f"{row['speedup']:.3f}", f"{row['refresh_peak_ratio']:.3f}") for row in rows)
        cells = text.replace(" times BF16", "").replace(" of its memory", "")
        assert f"| {large[0]}, {large[1]} | {small[0]}, {small[1]} |" in cells
    for row in (found[model, recipe] for model in MODELS for recipe in RECIPES):
        cells = [f"{row['step_ms']:.1f}", f"{row['speedup']:.3f}"]
        if "against_torchao" in row:
            cells.append("1" if "torchao" in row["recipe"] else f"{row['against_torchao']:.3f}")
        assert " | ".join([*cells, f"{row['refresh_peak_gib']:.1f}", f"{row['refresh_peak_ratio']:.3f}"]) in page
    small, large = (found[model, "snip-hf 75%"] for model in reversed(MODELS))
    speeds = [f"{row['speedup']:.2f}" for row in (small, large)]
    assert f"{' and '.join(speeds)} times as fast" in text
    promised = TensorScaled.measured_speeds
    assert [f"{promised[hidden]:.2f}" for hidden in (2048, 4096)] == speeds
    one_gpu = f"{small['step_ms']:.1f} ms, {small['speedup']:.3f} times BF16"
    assert one_gpu in text_of("docs/distributed.md")
    memory = f"{large['refresh_peak_ratio']:.3f} and {small['refresh_peak_ratio']:.3f} of its memory"
    assert memory in text_of("CHANGELOG.md")
    of_all = found["TinyLlama-1.1B", "snip-hf 100%"]["speedup"]
    assert f"at {small['speedup']:.3f} (75%) and {of_all:.3f} (all) times BF16" in text_of("CHANGELOG.md")


def test_the_table_of_targets_is_that_of_the_lines() -> None:
    found, page = of_trainer(), text_of("docs/hopper.md")
    rows = [[found[model, recipe] for model in MODELS] for recipe in RECIPES[:2]]
    (large, small), (large_all, small_all) = rows
    assert f"| 1.45, 1.25 | {large['speedup']:.3f} | {small['speedup']:.3f} |" in page
    profile = of_profile("8B, 8 layers", True)
    alone = profile["BF16"]["alone_ms"] / profile["snip-hf MXFP4, ties"]["alone_ms"]
    assert f"| {large_all['speedup']:.3f} ({alone:.3f} at `b0bf68a`, without" in page
    assert f"without refreshes) | {small_all['speedup']:.3f} |" in page
    older = {line["model"]: line for line in lines_of("benchmarks/results/speed_mxfp4.jsonl") if of_75(line)}
    ahead = " | ".join(f"{older[model]['against_torchao']:.3f}" for model in MODELS)
    assert f"`d00eed9` | above 1.05 | {ahead} |" in page
    assert f"In torchao's own run 75% in MXFP4 was {ahead.replace(' | ', ' and ')} times" in text_of("README.md")
    memory = " | ".join(f"{row['refresh_peak_ratio']:.3f}" for row in (large, small))
    assert f"| at most 0.85 | {memory} |" in page
    refresh = of_profile("8B, 8 layers", False)["refresh"]["bf16_steps"]
    assert f"| {refresh:.2f} (`b0bf68a`, plain loop; {large['refresh_steps']:.1f} at `d00eed9`)" in page
    assert f"`d00eed9`) | {small['refresh_steps']:.2f} |" in page
    assert f"| {100 * small['refresh_ms'] / (500 * small['step_ms']):.1f}% |" in page
    first = small["first_s"] + small["first_refresh_ms"] / 1000
    assert f"| **{first / found['TinyLlama-1.1B', 'BF16 first']['first_s']:.2f}, missed** |" in page
    assert not any(row["recompilations"] for pair in rows for row in pair)


def of_75(line: dict[str, Any]) -> bool:
    return line["part"] == "trainer" and line["recipe"] == "snip-hf 75%"


def test_the_speeds_of_experts_are_those_of_the_lines() -> None:
    found = {row["recipe"]: row for row in lines_of("benchmarks/results/moe_speed.jsonl")}
    mxfp4, mixed = (f"{found[recipe]['speedup']:.3f}" for recipe in ("snip-hf MXFP4", "snip-hf MXFP4 75%"))
    assert f"A mixture of experts of 1.1B ran at {mixed} and {mxfp4}" in text_of("README.md")
    assert f"at {mxfp4} times BF16 all in MXFP4 and at {mixed} at 75%" in text_of("CHANGELOG.md")
    page = text_of("docs/tensor_scaled.md")
    for recipe, speed in (("all in MXFP4", mxfp4), ("75% in MXFP4", mixed)):
        row = found[f"snip-hf MXFP4{' 75%' if speed == mixed else ''}"]
        assert f"| {recipe} | {row['step_ms']:.1f} | {speed} | {row['peak_gib']:.2f} |" in page


def test_the_speeds_of_adapters_are_those_of_the_lines() -> None:
    first, *low, last = lines_of("benchmarks/results/adapter_speed.jsonl")
    page, mean = text_of("docs/adapters.md"), (first["step_ms"] + last["step_ms"]) / 2
    for name, row in zip(("all in MXFP4", "75% in MXFP4"), low, strict=True):
        figures = f"{row['step_ms']:.1f} | **{mean / row['step_ms']:.3f}** | {row['peak_gib']:.2f}"
        assert f"| {name} | {figures} |" in page
    losses = [f"{row['loss']:.3f}" for row in (first, *low)]
    assert f"the loss is {losses[0]} in BF16, {losses[1]} all in MXFP4 and {losses[2]} at 75%" in page


def test_the_table_of_blocks_that_lose_bits_is_that_of_the_lines() -> None:
    page = text_of("docs/tensor_scaled.md")
    lines = [line for line in lines_of("benchmarks/results/mxfp4_range.jsonl") if "depths" in line]
    for operand, name in (("X", "activations"), ("G", "gradients")):
        least = BINADES - OPERANDS[operand]
        for masked, rest in ((0.0, ""), (0.75, ", three quarters of the labels masked")):
            of_row = [line for line in lines if line["operand"] == operand and line["masked"] == masked]
            cells = [f"{100 * sum(line['depths'][least:]):.2g}" for line in of_row]
            short = name + (rest if operand == "X" else rest.replace(" of the labels", ""))
            assert f"| {short} | {' | '.join(cells)} |" in page
    assert not any(sum(line["depths"][BINADES - OPERANDS["W"] :]) for line in lines if line["operand"] == "W")


def of_profile(model: str, trainer: bool) -> dict[str, Any]:
    """Returns recipe -> line of the last profile."""
    lines = lines_of("benchmarks/results/step_profile.jsonl")
    of_run = [row for row in lines if row.get("commit") == "b0bf68a" and row["trainer"] is trainer]
    return {row["recipe"]: row for row in of_run if row["model"] == model}


def test_the_speeds_of_the_trainer_s_step_are_those_of_the_profile() -> None:
    found, page, speeds = of_profile("TinyLlama-1.1B", True), text_of("docs/tensor_scaled.md"), []
    bf16 = found.pop("BF16")
    for row in found.values():
        speeds.append(f"{bf16['alone_ms'] / row['alone_ms']:.3f}")
        cells = [f"{row['alone_ms']:.1f}", speeds[-1], f"{sum(row['ms'].values()):.1f}"]
        assert " | ".join(cells) in page.replace("**", "")
    mxfp4, mixed = found["snip-hf MXFP4, ties"], found["snip-hf MXFP4 75%, ties"]
    kernels = [f"{sum(bf16['ms'].values()) / sum(row['ms'].values()):.3f}" for row in (mxfp4, mixed)]
    assert f"the ratios are {' and '.join(kernels)}" in page
    large = of_profile("8B, 8 layers", True)
    ratio = large["BF16"]["alone_ms"] / large["snip-hf MXFP4, ties"]["alone_ms"]
    assert f"all in MXFP4 229.2 ({ratio:.3f};" in page


def test_what_a_refresh_takes_is_that_of_the_profile() -> None:
    steps, page = [], text_of("docs/hopper.md")
    for model in ("8B, 8 layers", "TinyLlama-1.1B"):
        row, bf16 = (of_profile(model, False)[recipe] for recipe in ("refresh", "BF16"))
        steps.append(row["extra_ms"] / bf16["alone_ms"])
        assert steps[-1] == pytest.approx(row["bf16_steps"], abs=0.005)
    assert "| in BF16 steps | " + " | ".join(f"**{number:.2f}**" for number in steps) + " |" in page
    small = of_trainer()["TinyLlama-1.1B", "snip-hf 75%"]["refresh_steps"]
    of_both = f"{small:.2f} BF16 steps at 1.1B, and at the 8B shape {steps[0]:.2f}, timed later in a plain loop"
    assert f"the time of {of_both}" in text_of("README.md")
    assert f"the time of {steps[0]:.1f} to {small:.2f} BF16 steps" in text_of("docs/choosing.md")
