"""Figures of speed and memory that README.md, CHANGELOG.md and docs/ quote are those of the committed lines."""

from __future__ import annotations

from statistics import fmean, median
from typing import Any

import loss_curves
import moe_losses
import pytest
from committed import lines_of, text_of
from mxfp4_range import BINADES, OPERANDS

from eval.bakeoff.fork_statistics import Difference
from snip_hf.kernels.tensor_scaled.backend import TensorScaled


def test_torchao_s_fp8_is_faster_at_8b_and_slower_at_1_1b() -> None:
    ahead: dict[str, list[float]] = {}
    for file in ("speed", "speed_trainer", "speed_all", "speed_whole"):
        fp4: dict[str, float] = {}
        for line in lines_of(f"benchmarks/results/{file}.jsonl"):
            recipe, model = line.get("recipe"), line.get("model")
            if line.get("accumulation", 1) != 1 or "step_ms" not in line:
                continue
            if recipe == "snip-hf FP4, ties" or (recipe == "snip-hf 100%" and line["formats"][0] == "fp4"):
                fp4[model] = line["step_ms"]
            if recipe == "torchao tensorwise" and model in fp4:
                ahead.setdefault(model, []).append(100 * (fp4.pop(model) / line["step_ms"] - 1))
    (large, small), text = (ahead[model] for model in MODELS), text_of("README.md")
    assert len(large) == len(small) == 5
    assert f"{min(large):.1f} to {max(large):.1f}% faster than FP4 at the 8B shape" in text
    assert f"{-max(small):.1f} to {-min(small):.1f}% slower at 1.1B (five runs each)" in text


MODELS, RECIPES = ("8B, 8 layers", "TinyLlama-1.1B"), ("snip-hf 75%", "snip-hf 100%", "torchao tensorwise")


def of_trainer() -> dict[tuple[str, str], dict[str, Any]]:
    """Returns model and recipe -> line of the newest run through the Trainer; of BF16, the last one."""
    rows = [line for line in lines_of("benchmarks/results/speed_trainer.jsonl") if line["commit"] == "c78620b"]
    assert {row["steps"] for row in rows} == {60}
    return {(row["model"], row["recipe"]): row for row in rows}


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
    mixed, of_all = rows

    def row(name: str, target: str, figure: str, form: str, pair: list[dict[str, Any]]) -> str:
        return f"| {name} | {target} | {' | '.join(form.format(line[figure]) for line in pair)} |"

    assert row("75% in MXFP4, times BF16", "1.45, 1.25", "speedup", "{:.3f}", mixed) in page
    assert row("all in MXFP4", "1.50, 1.30", "speedup", "{:.3f}", of_all) in page
    assert row("75% against torchao tensorwise", "above 1.05", "against_torchao", "{:.3f}", mixed) in page
    assert row("peak memory with a refresh, of BF16's", "at most 0.85", "refresh_peak_ratio", "{:.3f}", mixed) in page
    assert row("a refresh, BF16 steps", "at most 4", "refresh_steps", "{:.2f}", mixed) in page
    times = " | ".join(f"{100 * line['refresh_ms'] / (500 * line['step_ms']):.1f}%" for line in mixed)
    assert f"| of the time, at a refresh every 500 steps | below 1% | {times} |" in page
    assert not any(line["recompilations"] for pair in rows for line in pair)
    ahead = " and ".join(f"{line['against_torchao']:.3f}" for line in mixed)
    assert f"75% in MXFP4 was {ahead} times as fast as torchao's tensorwise FP8" in text_of("README.md")


def test_memory_and_sums_with_saliency_are_those_of_the_lines() -> None:
    lines, page = lines_of("benchmarks/results/speed_saliency.jsonl"), text_of("docs/hopper.md")
    found = {(line["model"], line["recipe"]): line for line in lines if line["part"] == "trainer"}
    large, small = (found[model, "snip-hf 75%"] for model in MODELS)
    of_all = found[MODELS[0], "snip-hf 100%"]
    before = [of_trainer()[model, "snip-hf 75%"]["refresh_peak_ratio"] for model in MODELS]
    memory = [line["refresh_peak_ratio"] for line in (large, small)]
    assert memory == pytest.approx(before, abs=1e-3)
    assert f"refresh is the same, {memory[0]:.3f} and {memory[1]:.3f} of BF16's" in page
    assert f"{large['speedup']:.3f} (75%) and {of_all['speedup']:.3f} times BF16 (all)" in page
    assert f"took {large['refresh_steps']:.2f} and {of_all['refresh_steps']:.2f} BF16 steps" in page
    assert f"{small['speedup']:.3f} times BF16, and {small['refresh_steps']:.2f} steps for a refresh" in page
    forms = {line["loss_estimator"]: line for line in lines if line["part"] == "refresh"}
    assert set(forms) == {"saliency", "token-fisher"}
    for line in forms.values():
        assert len(line["each"]["sums"]) == 4
        assert f"sums took {median(line['each']['sums']):.3f} s with both" in page
        assert f"memory peaked at {line['refresh_peak_mib']:,.0f} MiB with both" in page
        each = line["each"]["refresh"]
        whole = f"{median(each):.3f} s ({min(each):.3f} to {max(each):.3f})"
        assert f'{whole} with "{line["loss_estimator"]}"' in page
    passes = [median(forms[form]["each"]["passes"]) for form in ("saliency", "token-fisher")]
    assert f"in the passes ({passes[0]:.3f} and {passes[1]:.3f} s)" in page


def test_the_first_steps_are_those_of_the_lines() -> None:
    lines = lines_of("benchmarks/results/speed_first.jsonl")
    found, page = {(line["model"], line["recipe"]): line for line in lines}, text_of("docs/hopper.md")
    bf16, mixed = ([found[model, recipe] for model in MODELS] for recipe in ("BF16", "snip-hf 75%"))
    ratios = " | ".join(f"{line['first_two_ratio']:.2f}" for line in mixed)
    assert f"| first step and first probe, of BF16's first step (`40b69cd`) | at most 1.3 | {ratios} |" in page
    whole = [one["start_s"] + one["first_s"] + one["first_refresh_ms"] / 1e3 for one in mixed]
    starts = [row["start_s"] + row["first_s"] for row in bf16]
    text = " and ".join(f"{ours / theirs:.2f}" for ours, theirs in zip(whole, starts, strict=True))
    assert f"With it the start takes {text} times BF16's." in page
    for name, figure, scale, rows in (
        ("before the first step, BF16, s", "start_s", 1, bf16),
        ("before the first step, 75% in MXFP4, s", "start_s", 1, mixed),
        ("first step, BF16, s", "first_s", 1, bf16),
        ("first step, 75% in MXFP4, s", "first_s", 1, mixed),
        ("the first refresh beyond ordinary steps, s", "first_refresh_ms", 1e-3, mixed),
        ("the slowest step after it, s", "slowest_ms", 1e-3, mixed),
    ):
        assert f"| {name} | {' | '.join(f'{scale * row[figure]:.1f}' for row in rows)} |" in page


def test_the_tables_of_whole_steps_and_of_products_are_those_of_the_lines() -> None:
    lines, page = lines_of("benchmarks/results/speed_all.jsonl"), text_of("docs/hopper.md").replace("**", "")
    steps = [line for line in lines if line["part"] == "models"]
    assert len(steps) == 26
    for line in steps:
        memory = f"{line['peak_gib']:.1f} | {line['peak_ratio']:.3f} |"
        assert f"| {line['step_ms']:.1f} | {line['tokens_per_s']:,.0f} | {line['speedup']:.3f} | {memory}" in page
    products: dict[str, list[str]] = {}
    for line in lines:
        if line["part"] == "gemms" and line["gemm"] in ("forward", "grad_input", "grad_weight, into FP32"):
            size = f"{line['out_features']} x {line['in_features']}"
            products.setdefault(size, []).append(f"{line['tflops']:.0f} / {line['bf16_tflops']:.0f}")
    assert len(products) == 8
    assert all(f"| {size} | {' | '.join(rates)} |" in page for size, rates in products.items())


def test_the_whole_benchmark_ran_twice_with_the_speeds_that_the_page_has() -> None:
    page = text_of("docs/hopper.md")
    recipes = ("snip-hf FP4, ties", "snip-hf MXFP4, ties", "snip-hf MXFP4 75%, ties")
    recipes += ("torchao tensorwise", "torchao rowwise")
    apart = []
    for model, name in zip(MODELS, ("8B shape", "TinyLlama-1.1B"), strict=True):
        rows = []
        for file, when in (("speed_all", "tables below"), ("speed_whole", "once more")):
            lines = [line for line in lines_of(f"benchmarks/results/{file}.jsonl") if line["part"] == "models"]
            found = {line["recipe"]: line for line in lines if line["model"] == model and line["accumulation"] == 1}
            rows.append([found[recipe]["speedup"] for recipe in recipes])
            assert f"| {name}, {when} | {' | '.join(f'{speed:.3f}' for speed in rows[-1])} |" in page
        apart += [abs(once - again) for once, again in zip(*rows, strict=True)]
    assert f"by up to {max(apart):.3f}" in page
    bf16 = [line["step_ms"] for line in lines_of("benchmarks/results/speed_whole.jsonl") if is_bf16(line)]
    assert f"BF16 alone went from {bf16[0]:.1f} to {bf16[1]:.1f} ms" in page
    alone = {
        (line["recipe"], line["in_features"]): f"{line['speedup']:.2f}"
        for line in lines_of("benchmarks/results/speed_whole.jsonl")
        if line["part"] == "linears"
    }
    ours, theirs = ([alone[recipe, size] for size in (4096, 2048)] for recipe in ("snip-hf FP4", "torchao tensorwise"))
    assert f"at {ours[0]} times BF16 (14,336 x 4,096) and at {ours[1]} (5,632 x 2,048)" in page
    assert f"torchao's tensorwise FP8 at {theirs[0]} and {theirs[1]}." in page
    once, again = (of_gradients(file) for file in ("speed_all", "speed_whole"))
    slower = max(again[case] / once[case] for case in once if case[1] <= 5632)
    assert f"took up to {slower:.1f} times as long" in page


def of_gradients(file: str) -> dict[tuple[str, int, str], float]:
    """Format, channels and layout -> microseconds of a gradient's quantization."""
    return {
        (line["format"], line["columns"], layout): line[layout]
        for line in lines_of(f"benchmarks/results/{file}.jsonl")
        if line["part"] == "kernels" and line["operand"] == "gradient"
        for layout in ("both_us", "rows_us", "columns_us")
    }


def is_bf16(line: dict[str, Any]) -> bool:
    return (line.get("model"), line.get("recipe"), line.get("accumulation")) == ("TinyLlama-1.1B", "BF16", 1)


def test_the_table_of_where_it_begins_to_pay_is_that_of_the_lines() -> None:
    page, speeds = text_of("docs/hopper.md"), dict[tuple[int, int], float]()
    for line in lines_of("benchmarks/results/speed_crossing.jsonl"):
        if line["recipe"] != "BF16":
            speeds[line["hidden"], line["tokens"]] = line["speedup"]
    for hidden in (512, 1024, 2048, 4096, 8192):
        cells = [f"{speeds[hidden, tokens]:.2f}" if (hidden, tokens) in speeds else "" for tokens in TOKENS]
        assert " ".join(f"| {hidden:,} | {' | '.join(cells)} |".split()) in page


TOKENS = (2048, 8192, 32768)


def test_the_speeds_on_two_gpus_are_those_of_the_lines() -> None:
    page, found = text_of("docs/distributed.md").replace("**", ""), dict[tuple[str, str], list[list[float]]]()
    lines = [line for line in lines_of("benchmarks/results/multi_gpu_profile.jsonl") if line["commit"] != "9c8e0a5"]
    model, alone = MODELS[1], dict[str, float]()
    for bf16, mixed in zip(lines[::2], lines[1::2], strict=True):
        if bf16["commit"] != "c78620b":
            model = MODELS[1]
        elif bf16["case"] == "1:none":
            model = MODELS[0] if alone else model
        if bf16["case"] == "1:none":
            alone[model] = bf16["step_ms"] / mixed["step_ms"]
        speed = bf16["step_ms"] / mixed["step_ms"]
        figures = [bf16["step_ms"], mixed["step_ms"], speed, speed / alone[model], mixed["idle_ms"]]
        found.setdefault((model, bf16["commit"] + bf16["case"]), []).append(figures)
    assert len(found) == 10
    forms = ("{:.1f}", "{:.1f}", "{:.3f}", "{:.3f}", "{:.0f}")
    for rows in found.values():
        cells = [", ".join(form.format(row[index]) for row in rows) for index, form in enumerate(forms)]
        cells[3] = cells[3].replace("1.000", "1") if len(rows) == 1 and rows[0][3] == 1 else cells[3]
        assert f"| {' | '.join(cells)} |" in page


def test_what_exact_sums_gain_over_fast_ones_is_that_of_the_lines() -> None:
    lines = [line for line in lines_of("benchmarks/results/loss_curves.jsonl") if line["commit"] == "c70b200"]
    (found,) = loss_curves.differences(lines, 300)
    mean, _, half = found.removeprefix("exact sums less fast sums: ").partition(" ± ")
    mean, half = f"{-float(mean):.3f}", f"{float(half.split()[0]):.3f}"
    text = f"exact sums end at a training loss {mean} ± {half} lower (four seeds"
    assert text in " ".join(text_of("docs/tensor_scaled.md").split())


def test_the_losses_of_mxfp4_beside_bf16_are_those_of_the_lines() -> None:
    page, ends = text_of("docs/tensor_scaled.md"), (60, 110, 160, 210, 246, 300)
    lines = [line for line in lines_of("benchmarks/results/loss_curves.jsonl") if line["commit"] == "c78620b"]
    losses = {line["arm"]: line["losses"] for line in lines}
    names = {"BF16": "BF16"} | {arm: f"MXFP4, {arm}" for arm in ("emulated", "exact sums", "fast sums")}
    for arm, name in names.items():
        means = [fmean(losses[arm][end - 20 : end]) for end in ends if end <= len(losses[arm])]
        cells = [f"{mean:.3f}" for mean in means] + [""] * (len(ends) - len(means))
        assert " ".join(f"| {name} | {' | '.join(cells)} |".split()) in page
    behind = [100 * (fmean(losses[arm][-20:]) / fmean(losses["BF16"][-20:]) - 1) for arm in ("exact sums", "fast sums")]
    assert f"by {min(behind):.0f} to {max(behind):.0f}% in these 300 steps" in page


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
    large, small = (of_trainer()[model, "snip-hf 75%"]["refresh_steps"] for model in MODELS)
    assert f"the time of {large:.2f} BF16 steps at the 8B shape and {small:.2f} at 1.1B" in text_of("README.md")
    assert f"the time of {large:.2f} to {small:.2f} BF16 steps" in text_of("docs/choosing.md")


def test_the_tables_of_folding_and_of_its_products_are_those_of_the_lines() -> None:
    lines = [line for line in lines_of("benchmarks/results/speed_folding.jsonl") if line["commit"] == "32aa231"]
    page, channels = text_of("docs/tensor_scaled.md"), (2048, 4096, 5632, 14336)
    both = {
        (line["operand"], line["format"], line["columns"]): f"{line['both_ratio']:.2f}"
        for line in lines
        if "both_ratio" in line and "tile" not in line
    }
    for row, operand, fmt in (
        ("activations in MXFP4", "activation", "mxfp4"),
        ("gradients in MXFP4, stochastic", "gradient", "mxfp4"),
        ("activations in `fp8-tensor`, which are read twice", "activation", "fp8-tensor"),
        ("gradients in `fp8-tensor`", "gradient", "fp8-tensor"),
        ("weights in MXFP4, FP32 masters, as many rows as channels", "weight", "mxfp4"),
    ):
        assert f"| {row} | {' | '.join(both[operand, fmt, width] for width in channels)} |" in page
    tiles: dict[str, dict[str, float]] = {}
    for line in lines:
        if "tile" in line:
            tiles.setdefault(line["operand"], {})[line["tile"]] = line["both_ratio"]
    # Of the tiles in use.
    activation, gradient = tiles["activation"]["8x64x1"], tiles["gradient"]["8x32x1"]
    assert f"activations take {activation:.2f} at 14,336 channels, gradients {gradient:.2f}" in page
    slower = max(activation / min(tiles["activation"].values()), gradient / min(tiles["gradient"].values())) - 1
    assert f"within {100 * slower:.1f}% of the fastest of twelve" in page and len(tiles["gradient"]) == 12
    products = [[line for line in lines if "gemm" in line and line["fast"] is fast] for fast in (False, True)]
    cells: dict[str, list[str]] = {"tflops": [], "speedup": []}
    for rows in products:
        for name, digits in (("tflops", ",.0f"), ("speedup", ".2f")):
            figures = [row[name] for row in rows if row["format"] == "mxfp4"]
            cells[name].append(f"{min(figures):{digits}} to {max(figures):{digits}}")
    assert f"| products of MXFP4 operands, TFLOP/s | {' | '.join(cells['tflops'])} |" in page
    assert f"| the same, times BF16's | {' | '.join(cells['speedup'])} |" in page
    for row, fmt in (("MXFP4 at most", "mxfp4"), ("`fp8-tensor` at most", "fp8-tensor")):
        largest = [max(line["error_norm"] for line in rows if line["format"] == fmt) for rows in products]
        assert f"{row} | {' | '.join(f'{error:.1e}'.replace('e-0', 'e-') for error in largest)} |" in page


def test_what_experts_cost_in_loss_is_that_of_the_lines() -> None:
    rows, page = lines_of("benchmarks/results/moe_losses.jsonl"), text_of("docs/tensor_scaled.md")
    figures, detectable = [], []
    for arm, reference, sign in (
        ("MXFP4", "BF16", 1),
        ("MXFP4, emulated", "BF16", 1),
        ("MXFP4", "MXFP4, emulated", -1),
    ):
        gaps = [sign * gap for gap in moe_losses.paired(rows, arm, reference, "held_out")]
        found = Difference.of(gaps)
        assert found.forks == 3 and 0 < found.mean < found.half_width
        figures.append(f"{found.mean:.2f} ± {found.half_width:.2f}")
        detectable.append(f"{found.detectable(0.05):.1f}")
    assert "ended {}% above BF16, emulated {}%, and {}% below emulated".format(*figures) in page
    assert f"They would have found {detectable[0]} and {detectable[1]}%" in page
    assert not any("held_out" in row for row in rows if "75%" in row["arm"])
