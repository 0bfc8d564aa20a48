"""The benchmarks' own arithmetic and texts, and each script at a size for a CPU (benchmarks/)."""

from __future__ import annotations

import argparse
import gzip
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import estimate_fidelity
import moe_speed
import multi_gpu_speed
import numpy as np
import probe_cost
import pytest
import speed
import step_profile
import torch
import transformers
from scipy.stats import spearmanr
from shared import lines, llamas, texts, timing

# torch warns about the internals of its own compiler.
compiles = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture
def tiny_llamas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models for a CPU, whose steps are not compiled to machine code."""
    monkeypatch.setattr(llamas, "SHAPES", {"tiny": (128, 384, 1, 2, 1)})
    monkeypatch.setattr(llamas, "VOCABULARY", 64)
    monkeypatch.setattr(llamas, "COMPILER", "eager")


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(inspect.getsource(argparse) * 3, encoding="utf-8")
    return path


def run(monkeypatch: pytest.MonkeyPatch, module: Any, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *map(str, arguments)])
    module.main()


# --- lines and timing


def test_an_unfinished_line_is_dropped_and_another_that_is_not_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    assert lines.read_lines(path) == []
    lines.append_line(None, {"a": 0})
    lines.append_line(path, {"a": 1})
    path.write_text(path.read_text() + '{"a": 2', encoding="utf-8")
    assert lines.read_lines(path) == [{"a": 1}]
    lines.drop_unfinished_line(path)
    lines.append_line(path, {"a": 3})
    assert lines.read_lines(path) == [{"a": 1}, {"a": 3}]
    packed = tmp_path / "lines.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert lines.read_lines(packed) == [{"a": 1}, {"a": 3}]
    path.write_text('{"a": 1}\nno\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"lines\.jsonl: line 2 is not JSON .*: 'no'\. Delete this line"):
        lines.read_lines(path)


def test_a_table_has_the_figures_and_below_them_the_failures() -> None:
    columns = {"recipe": ("recipe", "{}"), "ms": ("ms", "{:.1f}")}
    rows = [{"recipe": "a", "ms": 1.23, "other": 4}, {"recipe": "b", "error": "RuntimeError: no"}, {"recipe": "c"}]
    assert lines.table(columns, rows).splitlines() == [
        "| recipe | ms |",
        "|---|---|",
        "| a | 1.2 |",
        "| c | - |",
        "",
        "Failed: b: RuntimeError: no",
    ]


def test_speeds_and_memory_are_relative_to_the_median_of_bf16() -> None:
    figures = [("BF16", 10.0, 4.0), ("FP4", 8.0, 3.0), ("BF16", 14.0, 4.0)]
    rows: list[Any] = [dict(zip(("recipe", "step_ms", "peak_gib"), row, strict=True)) for row in figures]
    compared = timing.compared([*rows, {"recipe": "other", "error": "no"}])
    assert [row.get("speedup") for row in compared] == pytest.approx([1.2, 1.5, 12 / 14, None])
    assert [row.get("peak_ratio") for row in compared] == [1, 0.75, 1, None]
    assert "speedup" not in timing.compared(rows[1:2])[0]


def test_peaks_count_tensors_or_the_memory_reserved_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for prefix, number in (("", 0), ("max_", 10)):
        monkeypatch.setattr(torch.cuda, f"{prefix}memory_allocated", lambda device, number=number: number)
        monkeypatch.setattr(torch.cuda, f"{prefix}memory_reserved", lambda device, number=number: number + 1)
    device = torch.device("cuda")
    assert [timing.allocated(device), timing.allocated(device, reserved=True)] == [0, 1]
    assert [timing.peak(device), timing.peak(device, reserved=True)] == [10, 11]


def test_an_error_ends_its_own_measurement_and_nothing_begins_after_the_deadline() -> None:
    def measure() -> Any:
        yield {"ms": 1.0}
        raise RuntimeError("no kernel")

    assert timing.guarded({"recipe": "a"}, measure, float("inf")) == [
        {"recipe": "a", "ms": 1.0},
        {"recipe": "a", "error": "RuntimeError: no kernel"},
    ]
    assert timing.guarded({}, measure, 0.0) == [{"error": "TimeoutError: not begun: --minutes are over"}]


# --- texts


def test_train_and_held_out_sequences_are_disjoint_and_batches_start_again_at_the_end(text_file: Path) -> None:
    text, again = (texts.load_text(text_file, "cpu", held_out=0.25) for _ in range(2))
    assert torch.equal(text.train, again.train) and torch.equal(text.held_out, again.held_out)
    train, held_out = ({tuple(row.tolist()) for row in part} for part in (text.train, text.held_out))
    assert not train & held_out and len(text.train) // 3 == pytest.approx(len(text.held_out), abs=1)
    count = len(text.train)
    batch = text.batch(1, count - 1)
    assert torch.equal(batch["input_ids"][:2], text.train[[count - 1, 0]])
    assert torch.equal(batch["input_ids"], batch["labels"])
    assert torch.equal(text.batch(0, 2, held_out=True)["input_ids"], text.held_out[:2])


# --- speed


def speed_options(*arguments: str) -> argparse.Namespace:
    return speed.parse(["--device", "cpu", "--rows", "2", "--length", "64", *arguments])


def test_a_run_refreshes_twice_and_times_the_other_steps_under_the_first_plan() -> None:
    schedule = speed.Schedule(24)
    assert (schedule.first, schedule.every, schedule.delay) == (5, 12, 4)
    assert schedule.refreshes == (5, 17) and schedule.applications == (9, 21)
    assert schedule.ordinary == [10, 11, 12, 13, 14, 15, 16, 18, 19, 20, 22, 23]
    with pytest.raises(ValueError, match=r"^17 steps are too few for two refreshes; expected at least 18\.$"):
        speed.Schedule(17)


def test_lengths_are_drawn_from_the_shortest_on(capsys: pytest.CaptureFixture[str]) -> None:
    options = speed_options("--rows", "1", "--shortest", "16", "--steps", "200")
    assert speed.describe(options) == "1 x 16 to 64 tokens"
    lengths = {len(text["labels"]) for text in speed.random_texts(options)}
    assert (min(lengths), max(lengths)) == (16, 64) and len(lengths) > 40
    with pytest.raises(SystemExit):
        speed_options("--shortest", "16")
    assert "--shortest needs --rows 1" in capsys.readouterr().err


def test_ranks_are_named_and_have_their_own_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "RANKS", 2)
    options = speed_options("--steps", "18", "--liger")
    assert speed.describe(options) == "2 x 64 tokens, Liger, 2 ranks by DDP"
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert speed.describe(options) == "2 x 64 tokens, Liger, 2 ranks by FSDP2"
    assert len(speed.random_texts(options)) == 2 * 2 * 18


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_prints_and_writes_for_all(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(speed, "measure", lambda model, options: [{"model": model, "step_ms": 1.0}])
    output = tmp_path / "speed.jsonl"
    run(monkeypatch, speed, "--device", "cpu", "--output", output)
    printed = capsys.readouterr().out
    assert (f"CPU cores, torch {torch.__version__}" in printed, output.exists()) == (rank == 0, rank == 0)
    assert bool(printed) == (f", transformers {transformers.__version__}, commit " in printed)


def test_lines_of_a_model_are_written_before_the_next_one_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(model: str, options: argparse.Namespace) -> list[dict[str, Any]]:
        if model == speed.SMALL:
            raise KeyboardInterrupt
        return [{"model": model, "step_ms": 1.0}]

    monkeypatch.setattr(speed, "measure", measure)
    output = tmp_path / "speed.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, speed, "--device", "cpu", "--output", output)
    assert [row["model"] for row in lines.read_lines(output)] == [speed.LARGE]


def test_a_machine_without_a_gpu_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="torch finds no GPU"):
        run(monkeypatch, speed)


def test_each_recipe_runs_with_its_share_and_again_with_a_wait(
    tiny_llamas: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = speed_options("--share", "0.675", "0.07", "--wait", "--mode", "max-autotune")
    asked = []

    def train(model: str, recipe: str, options: argparse.Namespace, waits: bool) -> list[dict[str, Any]]:
        asked.append((recipe, waits))
        return [{"step_ms": 1.0}]

    monkeypatch.setattr(speed, "train", train)
    rows = speed.measure("tiny", options)
    recipes = ["BF16", "snip-hf 67.5%", "snip-hf 7%", "torchao tensorwise", "BF16"]
    assert asked == [(recipe, waits) for waits in (False, True) for recipe in recipes]
    assert [row["recipe"] for row in rows] == [*recipes, *(f"{recipe}, wait" for recipe in recipes)]
    assert [row.get("waits", False) for row in rows] == [waits for _, waits in asked]
    assert {row["case"] for row in rows} == {"2 x 64 tokens, compiled in the mode max-autotune"}
    shares = [speed.snip_config(name, speed.Schedule(24), options).target_fp4_fraction for name in recipes[1:3]]
    assert shares == [0.675, 0.07]


def test_refreshes_are_in_steps_of_bf16_and_speeds_relative_to_torchao_too() -> None:
    rows = [
        {"recipe": "BF16", "step_ms": 10.0},
        {"recipe": "snip-hf 75%", "step_ms": 8.0, "first_refresh_ms": 120.0, "refresh_ms": 44.0},
        {"recipe": "torchao tensorwise", "step_ms": 9.0},
        {"recipe": "BF16", "step_ms": 12.0},
        {"recipe": "snip-hf 100%", "error": "no"},
    ]
    _, ours, torchao, _, failed = speed.in_other_units(rows)
    assert (ours["first_refresh_steps"], ours["refresh_steps"]) == pytest.approx((120 / 11, 4))
    assert ours["against_torchao"] == pytest.approx(1.125) and torchao["against_torchao"] == 1
    assert failed == rows[-1]


@compiles
@pytest.mark.slow
def test_trainer_runs_are_measured_with_their_refreshes(
    tiny_llamas: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "runs" / "speed.jsonl"
    options = ["--models", "tiny", "--device", "cpu", "--rows", 2, "--length", 64, "--steps", 18, "--wait"]
    run(monkeypatch, speed, *options, "--share", 1, "--output", output)
    rows = lines.read_lines(output)
    plain = ["BF16", "snip-hf 100%", "torchao tensorwise", "BF16"]
    assert [row["recipe"] for row in rows] == [*plain, *(f"{recipe}, wait" for recipe in plain)]
    first, ours, _, last = rows[:4]
    assert first["loss"] == last["loss"] == rows[4]["loss"] and "share" not in first
    assert ours["share"] == 1.0 and ours["backend"] == "emulated" and ours["formats"] == ["mxfp4", "fp8-delayed"]
    assert ours["speedup"] > 0 and ours["tokens_per_s"] == pytest.approx(128e3 / ours["step_ms"])
    assert ours["graphs"] > 0 and ours["recompilations"] == 0 and ours["memory"] == "allocated"
    assert len(ours["seconds"]) == 2 and {"commit", "machine", "torch", "command"} <= ours.keys()
    times = f"{ours['step_ms']:.1f} | {ours['mean_step_ms']:.1f}"
    assert f"| tiny | 2 x 64 tokens | snip-hf 100% | emulated | {times} | " in capsys.readouterr().out


def test_a_case_is_a_row_with_the_figures_of_each_recipe_and_its_failures_follow() -> None:
    case = {"model": "8B", "case": "1 x 64 tokens"}
    rows = [
        {**case, "recipe": "BF16", "step_ms": 10.0, "peak_gib": 4.0},
        {**case, "recipe": "snip-hf 75%", "step_ms": 8.0, "peak_gib": 3.0, "first_refresh_ms": 90, "refresh_ms": 40.0}
        | {"backend": "emulated"},
        {**case, "recipe": "torchao tensorwise", "error": "RuntimeError: no"},
        {**case, "model": "1.1B", "recipe": "BF16", "step_ms": 5.0, "peak_gib": 2.0},
    ]
    assert lines.table(speed.CASE_COLUMNS, speed.by_case(rows)).splitlines()[2:] == [
        "| 8B | 1 x 64 tokens | 10.0 | - | 1.250 | 4.00 | - | 0.750 | 4.0 | - | emulated |",
        "| 1.1B | 1 x 64 tokens | 5.0 | - | - | 2.00 | - | - | - | - | - |",
        "",
        "Failed: 8B, 1 x 64 tokens, torchao tensorwise: RuntimeError: no",
    ]


@pytest.mark.parametrize("option", ["--wait", "--models tiny", "--share 0.5"])
def test_options_that_cases_set_themselves_are_refused(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(llamas, "SHAPES", {"tiny": (32, 64, 1, 2, 1)})
    with pytest.raises(SystemExit):
        speed_options("--combinations", *option.split())
    assert f"{option.split()[0]} has no effect with --combinations" in capsys.readouterr().err


def test_complete_cases_of_this_machine_are_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "train", lambda *_: [{"step_ms": 1.0}])
    monkeypatch.setattr(speed, "CASES", (("tiny", {}), ("tied", {"rows": 1})))
    output = tmp_path / "combinations.jsonl"
    options = speed_options("--combinations", "--output", str(output))
    source = {"machine": "one", "commit": "0a", "torch": "2.11", "formats": ["mxfp4", "fp8-delayed"]}
    rows = speed.combine(options, source)
    assert speed.combine(options, source) == lines.read_lines(output) and len(rows) == 6
    output.write_text("".join(output.read_text().splitlines(keepends=True)[:-1]) + '{"half', encoding="utf-8")
    speed.combine(options, source)
    assert [line["model"] for line in lines.read_lines(output)] == ["tiny"] * 3 + ["tied"] * 5
    options.deadline = 0.0
    for other in ({"machine": "other"}, {"commit": "0b"}, {"torch": "2.12"}, {"formats": ["mxfp4", "fp8-tensor"]}):
        assert speed.combine(options, source | other) == []


@compiles
@pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning")  # PEFT's use of transformers
@pytest.mark.slow
def test_models_and_options_are_combined(
    tiny_llamas: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"model_type": "qwen3", "vocab_size": 96, "head_dim": 64, "tie_word_embeddings": True}
    monkeypatch.setitem(llamas.SHAPES, "tied", (128, 384, 1, 2, 1, changes))
    together = {"rows": 1, "accumulate": 2, "checkpointing": True, "lora": True}
    monkeypatch.setattr(speed, "CASES", (("tied", together),))
    output = tmp_path / "combinations.jsonl"
    options = ["--combinations", "--device", "cpu", "--rows", 2, "--length", 64, "--steps", 18, "--output", output]
    run(monkeypatch, speed, *options)
    rows = lines.read_lines(output)
    case = "1 x 64 tokens, 2 micro-batches, checkpointing, LoRA"
    recipes = ["BF16", "snip-hf 75%", "torchao tensorwise"]
    assert [(row["case"], row.get("recipe")) for row in rows] == [(case, name) for name in recipes]
    assert [row for row in rows if "error" in row or row["recompilations"]] == []
    assert rows[1]["share"] >= 0.75
    assert f"| tied | {case} | {rows[0]['step_ms']:.1f} | " in capsys.readouterr().out


@compiles
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.slow
def test_a_mixture_of_experts_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(llamas, "COMPILER", "eager")
    output = tmp_path / "moe.jsonl"
    run(monkeypatch, moe_speed, "--tiny", "--device", "cpu", "--steps", 1, "--output", output)
    rows = lines.read_lines(output)
    assert [row["recipe"] for row in rows] == ["BF16", "snip-hf MXFP4", "snip-hf 75%", "BF16"]
    assert min(row["speedup"] for row in rows) > 0 and rows[1]["emulated_layers"] == 12
    assert "Failed" not in capsys.readouterr().out


@pytest.mark.slow
def test_processes_are_started_and_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # AdamW's step on the usual 32,000 tokens takes most of a run.
    script, output = tmp_path / "script.py", tmp_path / "gpus.jsonl"
    script.write_text("import multi_gpu_speed as made\nmade.llamas.VOCABULARY = 64\nmade.main()\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(Path(multi_gpu_speed.__file__).parent), prepend=os.pathsep)
    monkeypatch.setattr(multi_gpu_speed, "__file__", str(script))
    options = ["--model", "small", "--rows", 1, "--length", 64, "--steps", 1, "--eager", "--output", output]
    run(monkeypatch, multi_gpu_speed, "--cases", "2:ddp", *options)
    bf16, ours = lines.read_lines(output)
    in_steps = f"| {ours['refresh_s']:.3f} | {1e3 * ours['refresh_s'] / bf16['step_ms']:.2f} |"
    assert in_steps in capsys.readouterr().out
    assert [(row["case"], row["recipe"]) for row in (bf16, ours)] == [("2:ddp", "BF16"), ("2:ddp", "SNIP 75%")]
    assert ours["fp4_fraction"] >= 0.75 and ours["refresh_s"] > 0 and bf16["refresh_s"] is None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_trainers_of_trl_are_timed_under_the_same_steps(
    tiny_llamas: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("trl")
    import trl_speed

    monkeypatch.setattr(llamas, "SHAPES", dict.fromkeys((trl_speed.LARGE, trl_speed.SMALL), (128, 384, 2, 2, 1)))
    monkeypatch.setattr(llamas, "VOCABULARY", 256)
    first, _, *others = trl_speed.CELLS  # the second is the first's task again
    cells = [first, *((task, model, (trl_speed.OURS,)) for task, model, _ in others)]
    monkeypatch.setattr(trl_speed, "CELLS", cells)
    output = tmp_path / "trl.jsonl"
    options = ["--device", "cpu", "--rows", 2, "--length", 256, "--steps", 2, "--minutes", 60, "--output", output]
    # Tracing takes most of a run's time.
    for compiler, is_traced in (("eager", True), (None, False)):
        monkeypatch.setattr(llamas, "COMPILER", compiler)
        tasks = [task for task, *_ in cells if (task == "DPO") == is_traced]
        run(monkeypatch, trl_speed, *options, "--tasks", *tasks)
    rows = lines.read_lines(output)
    expected = [(task, recipe) for task, _, recipes in cells for recipe in recipes]
    assert sorted((row["task"], row["recipe"]) for row in rows) == sorted(expected)
    assert [row for row in rows if "error" in row] == []
    ours = [row for row in rows if row["recipe"] == trl_speed.OURS]
    assert min(row["share"] for row in ours) >= 0.75
    first_of = {row["task"]: row["step_ms"] for row in reversed(rows)}
    for row in ours:
        # A difference of times, which may be negative beside other work.
        assert row["refresh_steps"] == pytest.approx(row["refresh_ms"] / first_of[row["task"]])
    assert "| GRPO | 100M | snip-hf | " in capsys.readouterr().out


# --- profile


def test_a_profile_has_all_options_that_its_trainer_reads(
    tiny_llamas: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = step_profile.parse(["--model", "tiny", "--trainer", "--rows", "2", "--length", "16"])
    options.device = torch.device("cpu")
    trainers: list[Any] = []
    monkeypatch.setattr(speed, "train_by", lambda make: trainers.append(make(str(tmp_path))))
    step_profile.in_trainer("BF16", step_profile.Window(options), options)
    assert trainers[0].args.max_steps == 15 and len(trainers[0].train_dataset) == 30


def test_kernels_are_added_up_by_kind_and_waits_lie_between_them() -> None:
    spans = [(0.0, 10.0, "scales_kernel"), (10.0, 30.0, "encode_kernel"), (34.0, 84.0, "nvjet_sm90_qqtst_256x128")]
    found = step_profile.by_kind(spans, steps=2)
    assert found["ms"] == {"find its scales": 0.005, "fold an operand": 0.01, "FP8 product": 0.025}
    assert found["launches"] == dict.fromkeys(found["ms"], 0.5)
    assert (found["step_ms"], found["idle_ms"]) == (0.042, 0.002)
    assert found["waits"] == [[0.004, 0.0, "encode_kernel", "nvjet_sm90_qqtst_256x128"]]
    assert found["idle_ms_up_to"] == {2: 0.0, 5: 0.002, 20: 0.002, 100: 0.002, 1000: 0.002}


def test_communication_that_no_other_kernel_covers_is_counted_once() -> None:
    spans = [(0, 10, "nccl"), (2, 4, "gemm"), (3, 6, "gemm"), (8, 20, "gemm"), (12, 15, "nccl"), (20, 30, "nccl")]
    spans += [(22, 23, "encode_kernel"), (25, 40, "nccl")]
    assert step_profile.milliseconds_alone(spans, "communication") == pytest.approx(0.004 + 0.009 + 0.010)


def test_a_refresh_costs_its_two_steps_beyond_ordinary_ones() -> None:
    times = [2.0] * 11 + [50.0] + [3.0] * 2 + [2.0] * 7 + [5.0, 1.0]  # of steps 5 to 27: step 16 probes, 26 applies
    assert step_profile.of_steps(times) == {"alone_ms": 2.0}
    found = step_profile.of_steps(times, refreshes=True)
    assert found == {"alone_ms": 2.0, "refresh_ms": 50.0, "apply_ms": 5.0, "extra_ms": 51.0}


# --- cost of a probe


@pytest.mark.slow
def test_the_cost_of_a_refresh_is_measured_in_steps_once_per_combination(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probe_cost, "SIZES", {"tiny": (128, 384, 1, 2048, 0.5, 8, 256)})
    output = tmp_path / "cost.jsonl"
    options = ["--sizes", "tiny", "--rows", 5, "--steps", 1, "--refreshes", 1, "--delay", 1, "--resume"]
    options += ["--probe-batch-tokens", 1024, "--probe-tokens", 0, "--formats", "fp4,fp8", "mxfp4,fp8"]
    options += ["--output", output]
    run(monkeypatch, probe_cost, *options)
    first, second = lines.read_lines(output)
    assert (first["formats"], second["formats"]) == ("fp4,fp8", "mxfp4,fp8") and first["of_first"] == 1
    for figures in first, second:
        assert figures["parameters"] == 12 * 128**2 + 2 * 2048 * 128 + 3 * 128 and figures["linears"] == 7
        assert figures["refresh_steps"] == pytest.approx(figures["refresh"] / figures["step"])
        parts = ("passes", "sums", "program", "rest", "waited", "apply")
        assert min(figures[name] for name in ("step", "solver", *parts)) > 0
        assert figures["refresh"] == pytest.approx(sum(figures[name] for name in parts))
        assert (figures["probe_batch_tokens"], figures["probe_tokens"], figures["apply_delay"]) == (1024, None, 1)
        assert {name: [pytest.approx(figures[name], abs=1e-5)] for name in probe_cost.PARTS} == figures["each"]
    assert first["refresh_peak_mib"] is None
    printed = capsys.readouterr().out
    assert "| tiny | fp4,fp8 | saliency | 721,280 | 7 | " in printed and "| **everything that training" in printed
    run(monkeypatch, probe_cost, *options)
    assert len(lines.read_lines(output)) == 2 and "|" not in capsys.readouterr().out


def test_a_refresh_is_shown_part_by_part() -> None:
    each = {name: [0.5, 1.5, 1.0] for name in probe_cost.PARTS} | {"refresh": [4.0, 5.0, 3.0]}
    line = {"size": "1M", "rows": 2, "length": 256, "machine": "a CPU", "step": 2.0, "each": each}
    heads, _, *rows = probe_cost.by_part([{**line, "loss_estimator": "saliency"}]).splitlines()
    assert heads == "| step | 1M, 2 x 256 tokens, a CPU, saliency: s | in training steps | of the refresh |"
    assert len(rows) == len(probe_cost.PARTS)
    assert rows[0].endswith("| 1 (0.5 to 1.5) | 0.5 | 25.0% |") and rows[4].endswith("| 1 (0.5 to 1.5) | 0.5 |  |")
    assert rows[-1].endswith("| 4 (3 to 5) | 2 | 100.0% |")


def test_an_unknown_loss_divergence_is_refused_before_anything_is_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, probe_cost, "--loss-estimators", "salience")
    assert "invalid choice: 'salience'" in capsys.readouterr().err


# --- fidelity


def test_estimates_are_compared_with_the_pooled_truth_of_all_micro_batches() -> None:
    truth = np.arange(1.0, 9.0)
    truths = np.stack([truth * 0.6, truth * np.sqrt(2 - 0.36)])  # root mean square: the truth
    unscaled = {"snip": np.stack([truth, truth]) * 1.1, "absolute-error": np.stack([-truth, -truth])}
    one, other = estimate_fidelity.compare("weight", "fp4", truths, unscaled)
    assert (one["spearman"], one["halves"]) == pytest.approx((1, 1))
    assert (one["median_error"], one["error_90"], one["ratio"]) == (
        pytest.approx(0.1),
        pytest.approx(0.1),
        "1.10, 1.10, 1.10",
    )
    assert "median_error" not in other and other["spearman"] == pytest.approx(1)
    [signed] = estimate_fidelity.compare("loss", "fp4", np.stack([3 * truth, -truth]), {"a": truths}, signed=True)
    assert signed["truth"] == truth.tolist()


def test_ranks_are_those_of_scipy_with_a_bootstrap_interval_around_them() -> None:
    generator = np.random.default_rng(3)
    one = generator.normal(size=20)
    other = one + generator.normal(size=20)
    found = estimate_fidelity.rank_figures(other, one)
    low, high = map(float, found["interval"].split(" to "))
    assert found["spearman"] == pytest.approx(spearmanr(other, one).statistic) and low < found["spearman"] < high


@pytest.mark.slow
def test_the_weight_divergence_of_a_tiny_model_is_estimated_within_a_factor(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "fidelity.jsonl"
    options = ["--text", text_file, "--blocks", 1, "--rows", 2, "--held-out", 2, "--steps", 20, "--layers", 4]
    run(monkeypatch, estimate_fidelity, *options, "--device", "cpu", "--formats", "fp4", "--output", output)
    rows = lines.read_lines(output)
    assert [(row["divergence"], row["estimate"]) for row in rows] == [
        *(("weight", name) for name in estimate_fidelity.WEIGHT_ESTIMATES),
        *(("loss", name) for name in estimate_fidelity.LOSS_ESTIMATES),
    ]
    assert rows[0]["median_error"] < 0.5 and len(rows[0]["truth"]) == 4 and min(rows[0]["truth"]) > 0


def test_figures_name_their_commit_and_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["speed.py", "--a", "b c"])
    source = lines.origin_of("cpu")
    describe = ["git", "describe", "--always"]
    commit = subprocess.run(describe, capture_output=True, text=True, cwd=Path(lines.__file__).parent).stdout.strip()
    assert (source["commit"] or "").removesuffix("-dirty") == commit
    assert source["torch"] == torch.__version__ and source["command"] == "python speed.py --a 'b c'"
    assert json.loads(json.dumps(source)) == source
