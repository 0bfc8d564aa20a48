"""Do contenders of a fork differ in nothing but their precision, and does the table say what the lines hold?"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from benchmarks.shared.json_lines import read_lines
from eval.bakeoff import fork_run, fork_workers, forks
from eval.bakeoff.fork_base import Trainee, sequences_of, state_path, train_base
from eval.bakeoff.fork_recipe import Contender, Fork, ForkRecipe, load_recipe
from eval.bakeoff.fork_report import differences, family_table, table, write_report
from eval.bakeoff.fork_run import run_fork
from eval.bakeoff.fork_statistics import Difference
from eval.bakeoff.fork_text import ForkText, read_text, write_text
from snip_hf import SnipController
from snip_hf.costs.rates import RATES
from snip_hf.layers.state import snip_linears

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
PAIRS = {"cells": [{"format": ["bf16", "fp4"]}]}
SNIP = {"policy": "snip", "formats": ["nvfp4", "mxfp8"], "granularity": "gemm", "target_fp4_fraction": 0.75}
BF16 = Contender("bf16", "all", {})


def write_recipe(folder: Path, cells: list[dict[str, Any]], **changes: Any) -> Path:
    """A recipe of one tiny model on 4,000 random words, in a file."""
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
    rng = random.Random(0)
    for name in ("train", "held-out"):
        (folder / f"{name}.txt").write_text(" ".join(rng.choice(words) for _ in range(4000)), encoding="utf-8")
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    recipe = {
        "data": {
            "source": "files",
            "files": [str(folder / "train.txt")],
            "validation_files": [str(folder / "held-out.txt")],
            "sequence_length": 32,
            "validation_sequences": 4,
        },
        "train_sequences": 60,
        "tokenizer": {"vocab_size": 300},
        "model": {"model_type": "llama", "config": shape},
        "training": {"learning_rate": 3e-3, "steps": 20, "sequences": 4, "warmup_steps": 2},
        "forks": {"base_seeds": [0], "points": [3, 6], "data_seeds": [0], "steps": 4},
        "snip": {"backend": "emulated", "solver": "greedy"},
        "cells": cells,
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe | changes, sort_keys=False), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def based(tmp_path_factory: pytest.TempPathFactory) -> tuple[ForkRecipe, ForkText, Path]:
    """A recipe, its text and the folder of its bases' states."""
    folder = tmp_path_factory.mktemp("forks")
    recipe = load_recipe(write_recipe(folder, [{"format": ["bf16", "fp8"]}]))
    text = write_text(recipe, folder / "text.npz")
    train_base(recipe, text, 0, CPU, folder)
    return recipe, text, folder


def without_times(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name != "seconds"}


# --------------------------------------------------------------------------------------------------------- the recipe


def test_every_list_of_a_cell_is_a_dimension_and_formats_is_not(tmp_path: Path) -> None:
    cells = [
        {"format": ["fp4", "nvfp4"], "gemms": ["forward", "backward"]},
        SNIP | {"policy": ["snip", "random"], "target_fp4_fraction": [0.5, 0.75]},
        {"format": "fp4", "gemms": "forward"},
        SNIP | {"target_fp4_fraction": 0.5, "decides": "forward"},
    ]
    found = [contender.name for contender in load_recipe(write_recipe(tmp_path, cells)).contenders]
    assert found == [
        "fp4, forward GEMMs",
        "fp4, backward GEMMs",
        "nvfp4, forward GEMMs",
        "nvfp4, backward GEMMs",
        "snip {nvfp4, mxfp8}, 50% by gemm",
        "snip {nvfp4, mxfp8}, 75% by gemm",
        "random {nvfp4, mxfp8}, 50% by gemm",
        "random {nvfp4, mxfp8}, 75% by gemm",
        "snip {nvfp4, mxfp8}, 50% by gemm, decides forward",
    ]


def test_runs_go_through_all_forks_of_a_contender_before_the_next(tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe(tmp_path, [{"format": ["bf16", "fp4"]}]))
    found = [(contender.name, fork.name) for contender, fork in recipe.runs("text").values()]
    assert found == [(name, fork) for name in ("bf16", "fp4") for fork in ("s0-p3-d0", "s0-p6-d0")]
    assert not recipe.runs("text").keys() & recipe.runs("other text").keys()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cells": [{"format": "fp5"}]}, "Unknown format 'fp5' for cells: format"),
        ({"cells": [{"format": "fp4", "gemms": "sideways"}]}, "expected gemms as one of all, forward, backward"),
        ({"cells": [SNIP | {"seed": 1}]}, "seed is given, but the fork decides it"),
        ({"cells": [{"granularity": "gemm"}]}, "expected format, or policy"),
        ({"cells": [SNIP | {"target_fp4_fraction": 2}]}, "target_fp4_fraction=2 is outside 0..1"),
        ({"forks": {"base_seeds": [0], "points": [18], "data_seeds": [0], "steps": 4}}, "expected points from 1 to 16"),
        ({"forks": {"base_seeds": [0], "points": [3], "steps": 4}}, "forks: missing key 'data_seeds'"),
        ({"extra": 1}, "unknown key 'extra'"),
        ({"forks": {"base_seeds": [0, [1]], "points": [3], "data_seeds": [0], "steps": 4}}, "or blocks of them"),
        (
            {"forks": {"base_seeds": [[0], [0]], "points": [3], "data_seeds": [0], "steps": 4}},
            "expected different seeds",
        ),
        ({"comparisons": {"all": [["fp4", "fp8"]]}}, "comparisons: all: 'fp8' is no contender of the cells; these are"),
        ({"comparisons": {"all": ["fp4"]}}, "comparisons: all: got 'fp4'; expected a pair"),
        ({"cells": [{"format": "my-e3m1"}]}, "registered first: by `snip_hf.register_format`, or by `--import MODULE`"),
        (PAIRS | {"comparisons": {"f": [[["fp4", "fp4"], "bf16"]]}}, "f: 'fp4' against 'bf16' is there twice"),
        (PAIRS | {"comparisons": {"f": [["fp4", "bf16"], ["bf16", "fp4"]]}}, "'bf16' against 'fp4' is there twice"),
        (PAIRS | {"comparisons": {"f": [["fp4", "fp4"]]}}, "comparisons: f: 'fp4' is compared with itself"),
    ],
)
def test_a_recipe_that_cannot_work_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe(write_recipe(tmp_path, **({"cells": [{"format": "fp4"}]} | changes)))


def test_base_seeds_in_lists_are_blocks_that_run_one_after_the_other(tmp_path: Path) -> None:
    forks = {"base_seeds": [[0, 1], [2]], "points": [3], "data_seeds": [0], "steps": 4}
    recipe = load_recipe(write_recipe(tmp_path, [{"format": ["bf16", "fp4"]}], forks=forks))
    found = [(contender.name, fork.base_seed) for contender, fork in recipe.runs("text").values()]
    assert found == [("bf16", 0), ("bf16", 1), ("fp4", 0), ("fp4", 1), ("bf16", 2), ("fp4", 2)]


def test_the_ids_of_runs_depend_on_no_block(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, [{"format": ["bf16", "fp4"]}])
    blocks = (
        load_recipe(path, [f"forks.base_seeds={seeds}"]).runs("text").keys() for seeds in ("[0, 1]", "[[0], [1]]")
    )
    assert next(blocks) == next(blocks)


def test_a_list_of_lists_of_formats_is_a_dimension(tmp_path: Path) -> None:
    cell = SNIP | {"formats": [["nvfp4", "mxfp8"], ["fp4", "fp8", "bf16"]]}
    found = [contender.name for contender in load_recipe(write_recipe(tmp_path, [cell])).contenders]
    assert found == ["snip {nvfp4, mxfp8}, 75% by gemm", "snip {fp4, fp8, bf16}, 75% by gemm"]


def test_many_against_one_are_so_many_pairs(tmp_path: Path) -> None:
    comparisons = {"formats": [[["fp4", "fp8"], "bf16"], ["fp4", "fp8"]]}
    recipe = load_recipe(write_recipe(tmp_path, [{"format": ["bf16", "fp4", "fp8"]}], comparisons=comparisons))
    assert recipe.comparisons == {"formats": (("fp4", "bf16"), ("fp8", "bf16"), ("fp4", "fp8"))}


@pytest.fixture(scope="module")
def committed() -> ForkRecipe:
    return load_recipe(ROOT / "recipes" / "forks-formats.yaml")


def test_the_committed_recipe_forks_each_base_once_in_blocks_of_four(committed: ForkRecipe) -> None:
    assert [len(block) for block in committed.blocks] == [4, 4, 4]
    assert len({fork.base_seed for fork in committed.forks}) == 12
    assert {fork.point + committed.steps for fork in committed.forks} == {committed.base.steps}
    assert committed.contenders[0].name == "bf16"
    assert len(committed.runs("text")) == 12 * len(committed.contenders) == 12 * 32


def test_the_committed_recipe_s_equal_targets_are_equal_speeds(committed: ForkRecipe) -> None:
    formats = {name for one in committed.contenders for name in one.settings.get("formats", ())}
    rates = {name: (RATES["ideal"].rate(name), RATES["b200"].rate(name)) for name in formats}
    assert rates == {
        "nvfp4": (4, 4),
        "mxfp4": (4, 4),
        "fp4": (4, None),
        "mxfp8": (2, 2),
        "fp8": (2, 2),
        "bf16": (1, 1),
    }


def test_lines_of_an_earlier_run_are_forks_of_the_committed_recipe() -> None:
    lines = read_lines(ROOT / "eval" / "results" / "forks-decay.jsonl")
    recipe = load_recipe(ROOT / "recipes" / "forks-formats.yaml", ["forks.base_seeds=[0, 1, 2, 3]"])
    ids = recipe.runs("1896f9ab35b3")
    assert {line["id"]: line["contender"] for line in lines}.items() <= {
        name: contender.name for name, (contender, _) in ids.items()
    }.items()


TINY = [
    "model.config.hidden_size=32",
    "model.config.intermediate_size=48",
    "model.config.num_hidden_layers=2",
    "model.config.num_attention_heads=2",
    "model.config.num_key_value_heads=2",
    "training.steps=5",
    "training.sequences=2",
    "training.warmup_steps=1",
    "forks.base_seeds=[0]",
    "forks.points=[2]",
    "forks.steps=3",
]


def random_text() -> ForkText:
    rng = np.random.default_rng(0)
    return ForkText(*(rng.integers(0, 300, (count, 64)).astype(np.uint16) for count in (12, 4)), 300, 0)


@pytest.mark.slow
def test_every_cell_of_the_committed_recipe_trains_a_small_model(tmp_path: Path) -> None:
    recipe = load_recipe(ROOT / "recipes" / "forks-formats.yaml", TINY)
    text = random_text()
    train_base(recipe, text, 0, CPU, tmp_path)
    found = {
        one.name: run_fork(recipe, text, one, fork, CPU, tmp_path) for one, fork in recipe.runs(text.digest).values()
    }
    assert not [name for name, result in found.items() if result["diverged"]]
    for contender in recipe.contenders:
        shares = found[contender.name]["shares"]
        names = contender.settings.get("formats") or [contender.format]
        assert shares.keys() <= {*names, "bf16"}
        if not contender.settings:
            part = {"all": 1, "forward": 1 / 3, "backward": 2 / 3}[contender.gemms]
            assert shares[contender.format] == pytest.approx(part, abs=1e-6)
            continue
        speed = 1 / sum(share / RATES["ideal"].rate(name) for name, share in shares.items())
        assert contender.settings["target_linear_speedup"] - 1e-4 <= speed < 3.9


# ----------------------------------------------------------------------------------------------------- what a fork does


def test_a_text_is_read_as_it_was_written(based: tuple[ForkRecipe, ForkText, Path]) -> None:
    _, text, folder = based
    again = read_text(folder / "text.npz")
    assert again.digest == text.digest
    assert (again.train.shape, again.held_out.shape, again.train.dtype) == ((60, 32), (4, 32), "uint16")
    assert (again.vocab_size, again.eos_token_id) == (text.vocab_size, text.eos_token_id)


def test_the_bf16_contender_trains_as_the_base_would_without_the_library(
    based: tuple[ForkRecipe, ForkText, Path],
) -> None:
    recipe, text, folder = based
    fork = recipe.forks[0]
    found = run_fork(recipe, text, BF16, fork, CPU, folder)
    plain = Trainee(recipe, text, CPU, 0)
    plain.load(state_path(recipe, text, fork, folder))
    losses = [float(plain.step(4 + i, rows, None)) for i, rows in enumerate(sequences_of(recipe, text, fork))]
    assert found["loss"]["train"] == round(sum(losses) / 4, 6)
    assert found["loss"]["held_out_plan"] == round(plain.evaluate(), 6)
    assert found["loss"]["held_out_plan"] == found["loss"]["held_out_high_precision"]
    assert (found["fp4_fraction"], found["shares"], found["plan"]) == (0.0, {"bf16": 1.0}, None)


def test_a_base_goes_through_its_points(based: tuple[ForkRecipe, ForkText, Path]) -> None:
    recipe, text, folder = based
    first, second = (Trainee(recipe, text, CPU, 0) for _ in range(2))
    first.load(state_path(recipe, text, recipe.forks[0], folder))
    second.load(state_path(recipe, text, recipe.forks[1], folder))
    assert first.schedule.last_epoch == 3
    assert second.schedule.last_epoch == 6
    assert not torch.equal(first.model.lm_head.weight, second.model.lm_head.weight)


def test_a_fork_sees_what_its_base_has_not_seen(based: tuple[ForkRecipe, ForkText, Path]) -> None:
    recipe, text, _ = based
    late = recipe.forks[1]
    seen = np.random.default_rng(0).permutation(60)[: late.point * 4]
    position = {row.tobytes(): index for index, row in enumerate(text.train)}
    drawn = [position[row.tobytes()] for row in sequences_of(recipe, text, late).reshape(-1, 32)]
    assert len(set(drawn)) == 4 * 4
    assert not set(drawn) & set(seen.tolist())


@pytest.mark.parametrize("contender", [Contender("nvfp4", "all", {}), Contender(None, "all", SNIP)])
def test_the_same_fork_of_the_same_contender_gives_the_same_numbers(
    based: tuple[ForkRecipe, ForkText, Path], contender: Contender
) -> None:
    recipe, text, folder = based
    first, second = (run_fork(recipe, text, contender, recipe.forks[0], CPU, folder) for _ in range(2))
    assert without_times(first) == without_times(second)
    assert first["loss"]["held_out_plan"] != first["loss"]["held_out_high_precision"]


def test_the_gemms_of_a_cell_run_in_its_format_and_the_others_in_bf16(
    based: tuple[ForkRecipe, ForkText, Path],
) -> None:
    recipe, text, folder = based
    fork = recipe.forks[0]
    found = {
        gemms: run_fork(recipe, text, Contender("fp4", gemms, {}), fork, CPU, folder)
        for gemms in ("all", "forward", "backward")
    }
    assert found["all"]["shares"] == {"fp4": 1.0}
    assert found["forward"]["shares"] == {"bf16": 0.666667, "fp4": 0.333333}
    assert set(found["forward"]["plan"][0::3]) == {"1"}
    assert set(found["forward"]["plan"][1::3] + found["forward"]["plan"][2::3]) == {"0"}
    assert found["backward"]["shares"] == {"bf16": 0.333333, "fp4": 0.666667}
    losses = [found[gemms]["loss"]["train"] for gemms in found]
    losses.append(run_fork(recipe, text, BF16, fork, CPU, folder)["loss"]["train"])
    assert len(set(losses)) == 4
    # Nothing of the held-out passes is quantized where only backward GEMMs are.
    assert found["backward"]["loss"]["held_out_plan"] == found["backward"]["loss"]["held_out_high_precision"]


def test_a_policy_has_its_plan_before_the_first_step(based: tuple[ForkRecipe, ForkText, Path]) -> None:
    recipe, text, folder = based
    found = run_fork(recipe, text, Contender(None, "all", SNIP), recipe.forks[0], CPU, folder)
    assert set(found["shares"]) == {"nvfp4", "mxfp8"}
    assert 0.75 <= found["fp4_fraction"] < 0.8
    # All 4-bit would differ from the first step on, all 8-bit too.
    uniform = [
        run_fork(recipe, text, Contender(name, "all", {}), recipe.forks[0], CPU, folder)["loss"]["train"]
        for name in ("nvfp4", "mxfp8")
    ]
    assert found["loss"]["train"] not in uniform


@pytest.mark.gpu
@pytest.mark.parametrize(
    "contender", [Contender("nvfp4", "all", {}), Contender("fp8", "all", {}), Contender(None, "all", SNIP)]
)
def test_on_a_gpu_a_fork_gives_the_same_numbers_wherever_formats_and_keys_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, contender: Contender
) -> None:
    recipe, device = load_recipe(ROOT / "recipes" / "forks-formats.yaml", TINY), torch.device("cuda")
    text = random_text()
    train_base(recipe, text, 0, device, tmp_path)
    devices: list[str] = []
    keep = fork_run.keep_state_on_host

    def noted(model: torch.nn.Module) -> None:
        keep(model)
        devices.extend(layer.snip_state.device.type for layer in snip_linears(model).values())

    monkeypatch.setattr(fork_run, "keep_state_on_host", noted)
    on_host = run_fork(recipe, text, contender, recipe.forks[0], device, tmp_path)
    monkeypatch.setattr(fork_run, "keep_state_on_host", lambda model: None)
    on_gpu = run_fork(recipe, text, contender, recipe.forks[0], device, tmp_path)
    assert set(devices) == {"cpu"}
    assert on_host["shares"] == on_gpu["shares"]
    assert on_host["loss"] == pytest.approx(on_gpu["loss"], rel=1e-5)  # backward passes on GPUs are not reproducible


def test_a_probe_that_came_to_nothing_fails_the_fork(
    based: tuple[ForkRecipe, ForkText, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, text, folder = based
    monkeypatch.setattr(SnipController, "before_optimizer_step", lambda self, step: None)
    with pytest.raises(RuntimeError, match="The refresh of step 4 came to nothing"):
        run_fork(recipe, text, Contender(None, "all", SNIP), recipe.forks[0], CPU, folder)


# ------------------------------------------------------------------------------------------------------------- the runs


@pytest.mark.slow
def test_a_run_is_continued_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path, [{"format": ["bf16", "int4"]}])
    text, output = tmp_path / "text.npz", tmp_path / "lines.jsonl"
    assert forks.main(["text", str(recipe), "--text", str(text)]) == 0
    command = [sys.executable, "-m", "eval.bakeoff.forks", "run", str(recipe), "--text", str(text)]
    command += ["--output", str(output), "--cache", str(tmp_path / "cache"), "--workers", "2", "--device", "cpu"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    lines = read_lines(output)
    assert sorted((line["contender"], line["fork"]["point"]) for line in lines) == [
        ("bf16", 3),
        ("bf16", 6),
        ("int4", 3),
        ("int4", 6),
    ]
    assert len({line["setting"] for line in lines}) == 1
    assert {line["command"] for line in lines} == {f"python -m eval.bakeoff.forks run {recipe}"}
    output.write_text("".join(json.dumps(line) + "\n" for line in lines[:3]) + '{"id": ', encoding="utf-8")
    assert forks.main([*command[3:], "--list"]) == 0
    assert "4 forks, 3 of them done, 1 to do" in capsys.readouterr().out
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    again = read_lines(output)
    assert again[:3] == lines[:3]
    assert without_times(again[3]) | {"date": ""} == without_times(lines[3]) | {"date": ""}
    assert forks.main(["report", str(output), "--output", str(tmp_path / "table.md")]) == 0
    assert "2 forks of 1 bases" in (tmp_path / "table.md").read_text(encoding="utf-8")


def test_a_report_without_output_is_printed_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = tmp_path / "lines.jsonl"
    signed = [one | {"schema_version": 1, "id": str(i), "setting": "s"} for i, one in enumerate(LINES)]
    lines.write_text("".join(json.dumps(one) + "\n" for one in signed), encoding="utf-8")
    assert forks.main(["report", str(lines)]) == 0
    assert capsys.readouterr().out == write_report([lines], None) + "\n"
    assert list(tmp_path.iterdir()) == [lines]


def test_nothing_starts_that_would_end_too_late(based: tuple[ForkRecipe, ForkText, Path], tmp_path: Path) -> None:
    recipe, _, folder = based
    options = forks._parser().parse_args(
        ["run", "recipe.yaml", "--text", str(folder / "text.npz"), "--output", str(tmp_path / "lines"), "--device"]
        + ["cpu", "--cache", str(folder)]
    )
    todo = recipe.runs(read_text(options.text).digest)
    job = fork_workers.Job(recipe, todo, options, 0.0, os.getppid())
    fork_workers.work(0, job, fork_workers.Shared([0]))
    assert not (tmp_path / "lines").exists()


def test_a_fork_that_fails_leaves_no_line_and_stops_no_other(
    based: tuple[ForkRecipe, ForkText, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, text, folder = based

    def run(recipe: ForkRecipe, text: ForkText, contender: Contender, *rest: Any) -> dict[str, Any]:
        if contender.name == "bf16":
            raise RuntimeError("no memory")
        return {"loss": {}}

    monkeypatch.setattr(fork_workers, "run_fork", run)
    arguments = ["run", "recipe.yaml", "--text", str(folder / "text.npz"), "--output", str(tmp_path / "lines")]
    options = forks._parser().parse_args([*arguments, "--device", "cpu", "--cache", str(folder)])
    job = fork_workers.Job(recipe, recipe.runs(text.digest), options, math.inf, os.getppid())
    shared = fork_workers.Shared([0])
    fork_workers.work(0, job, shared)
    assert shared.failed.value == 2
    assert [line["contender"] for line in read_lines(tmp_path / "lines")] == ["fp8", "fp8"]


def work_on_two_bases(folder: Path, cache: Path, shared: fork_workers.Shared, recipe: ForkRecipe) -> None:
    """One worker, a fork of the base of seed 3, then one of seed 5; no base has a state."""
    arguments = ["run", "recipe.yaml", "--text", str(folder / "text.npz"), "--output", str(cache / "lines")]
    options = forks._parser().parse_args([*arguments, "--device", "cpu", "--cache", str(cache)])
    todo = {str(seed): (BF16, Fork(base_seed=seed, point=6, data_seed=0)) for seed in (3, 5)}
    fork_workers.work(0, fork_workers.Job(recipe, todo, options, math.inf, os.getppid()), shared)


def test_a_base_that_fails_ends_the_waiting_of_its_own_forks_alone(
    based: tuple[ForkRecipe, ForkText, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, text, folder = based
    waited: list[float] = []

    def train(recipe: ForkRecipe, text: ForkText, seed: int, *rest: Any) -> None:
        raise RuntimeError(f"no base of seed {seed}")

    def pass_by(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:  # another worker has trained it
            state_path(recipe, text, Fork(base_seed=5, point=6, data_seed=0), tmp_path).touch()

    monkeypatch.setattr(fork_workers, "train_base", train)
    monkeypatch.setattr(fork_workers, "run_fork", lambda *arguments: {"loss": {}})
    monkeypatch.setattr(fork_workers.time, "sleep", pass_by)
    shared = fork_workers.Shared([3, 5])
    shared.bases[5].value = fork_workers._TAKEN
    work_on_two_bases(folder, tmp_path, shared, recipe)
    assert [line["fork"]["base_seed"] for line in read_lines(tmp_path / "lines")] == [5]
    assert (len(waited), shared.failed.value) == (3, 1)


def test_a_worker_whose_gpu_is_lost_takes_no_further_base(
    based: tuple[ForkRecipe, ForkText, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, _, folder = based

    def train(*arguments: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(fork_workers, "train_base", train)
    monkeypatch.setattr(fork_workers, "_is_usable", lambda device: False)
    shared = fork_workers.Shared([3, 5])
    work_on_two_bases(folder, tmp_path, shared, recipe)
    assert [state.value for state in shared.bases.values()] == [fork_workers._FAILED, fork_workers._FREE]
    assert shared.failed.value == 1


@pytest.mark.slow
def test_a_format_of_one_s_own_is_a_cell_once_its_module_is_imported(tmp_path: Path) -> None:
    (tmp_path / "my_formats.py").write_text(
        "from snip_hf.numerics.formats import NumberFormat, integers, register_format\n"
        "fields = {'bits': 3, 'speed': 2.0, 'label': 'INT3', 'colour': '#000000'}\n"
        "register_format(NumberFormat(name='my-int3', grid=integers(3), **fields))\n",
        encoding="utf-8",
    )
    recipe = write_recipe(tmp_path, [{"format": ["bf16", "my-int3"]}])
    recipe.write_text(recipe.read_text(encoding="utf-8").replace("points: [3, 6]", "points: [3]"), encoding="utf-8")
    text = ForkText(*(np.arange(count * 32, dtype=np.uint16).reshape(count, 32) % 300 for count in (60, 4)), 300, 0)
    np.savez(tmp_path / "text.npz", train=text.train, held_out=text.held_out, vocabulary=[300, 0])
    command = [sys.executable, "-m", "eval.bakeoff.forks", "run", str(recipe), "--text", str(tmp_path / "text.npz")]
    command += ["--output", str(tmp_path / "lines"), "--cache", str(tmp_path), "--device", "cpu"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    run = partial(subprocess.run, cwd=ROOT, env=environment, capture_output=True, text=True)
    refused = run(command)
    assert (refused.returncode, "Unknown format 'my-int3' for cells: format" in refused.stderr) == (1, True)
    run([*command, "--import", "my_formats"], check=True)
    lines = read_lines(tmp_path / "lines")
    assert {line["contender"] for line in lines} == {"bf16", "my-int3"}
    assert {line["command"].split(" --import ")[1] for line in lines} == {"my_formats"}


@pytest.mark.slow
def test_forks_run_where_datasets_lm_eval_and_mip_are_not_installed() -> None:
    code = "import sys; sys.modules.update(dict.fromkeys(('datasets', 'lm_eval', 'mip'))); import eval.bakeoff.forks"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


# ------------------------------------------------------------------------------------------------------------ the table


def line(contender: str, data_seed: int, loss: float, diverged: bool = False) -> dict[str, Any]:
    return {
        "contender": contender,
        "fork": asdict(Fork(base_seed=0, point=3, data_seed=data_seed)),
        "state": "of the base",
        "loss": dict.fromkeys(("train", "held_out_plan", "held_out_high_precision"), None if diverged else loss),
        "diverged": diverged,
        "fp4_fraction": 0.0 if contender == "bf16" else 1.0,
        "shares": {contender: 1.0},
        "seconds": {"training": 0.5},
        "steps": 100,
        "machine": "a machine",
        "commit": "abc",
    }


LINES = [line("bf16", seed, loss) for seed, loss in enumerate((4.0, 5.0, 8.0))] + [
    line("fp4", 2, 8.24),  # +3%
    line("fp4", 0, 4.04),  # +1%
    line("fp4", 1, 5.10),  # +2%
]


def test_differences_are_paired_by_fork() -> None:
    found = differences(LINES[3:], LINES[:3], "train")
    assert found == pytest.approx([3.0, 1.0, 2.0])
    assert differences([line("fp4", 7, 5.0), line("fp4", 1, 5.0, diverged=True)], LINES[:3], "train") == []


def test_the_table_holds_what_was_computed_by_hand() -> None:
    text = table(LINES, "bf16")
    assert "| bf16 | 0.0% | - | 3 | 0 | 0 | 0 | - | - | 5 |" in text
    cell = "+2.000 ± 2.484"
    assert f"| fp4 | 100.0% | - | 3 | {cell} | {cell} | {cell} | 1.000 | 0.577 | 5 |" in text
    assert "3 forks of 1 bases; a machine; commit abc." in text


def test_a_fork_that_diverged_is_counted_and_left_out() -> None:
    text = table([*LINES[:5], line("fp4", 1, 0.0, diverged=True)], "bf16")
    assert "| fp4 | 100.0% | - | 2 (1 diverged) | +2.000 ± 12.706 |" in text


def test_forks_from_other_weights_are_no_pair() -> None:
    text = table([*LINES[:5], LINES[5] | {"state": "of a base that was trained again"}], "bf16")
    assert "| fp4 | 100.0% | - | 2 (1 unpaired) | +2.000 ± 12.706 |" in text


def test_shares_of_several_formats_are_means_over_forks() -> None:
    plans = ({"nvfp4": 0.8, "mxfp8": 0.2}, {"nvfp4": 0.7, "mxfp8": 0.2, "bf16": 0.1})
    lines = [line("snip", seed, 5.0) | {"shares": shares} for seed, shares in enumerate(plans)]
    assert "| snip | 100.0% | nvfp4 75.0%, mxfp8 20.0%, bf16 5.0% | 2 |" in table([*LINES[:2], *lines], "bf16")


def test_forks_of_other_code_are_no_pair() -> None:
    text = table([*LINES[:5], LINES[5] | {"commit": "def"}], "bf16")
    assert "| fp4 | 100.0% | - | 2 (1 unpaired) | +2.000 ± 12.706 |" in text


FP8 = [line("fp8", seed, loss) for seed, loss in enumerate((4.012, 4.995, 8.008))]  # +0.3%, -0.1%, +0.1%


def test_a_family_is_corrected_together_and_says_what_it_could_have_found() -> None:
    text = family_table([*LINES, *FP8], "two-formats", [("fp4", "bf16"), ("fp8", "bf16")])
    # Of 2 degrees of freedom: p = 1 - t / sqrt(2 + t^2). t = 2 / (1 / sqrt(3)), and 0.1 / (0.2 / sqrt(3)).
    far, wide = (Difference(0.0, deviation, 3).detectable(0.05 / 2) for deviation in (1.0, 0.2))
    first, second = (1 - t / (2 + t * t) ** 0.5 for t in (2 * 3**0.5, 0.5 * 3**0.5))
    cell = "+2.000 ± 2.484"
    row = f"| fp4 against bf16 | 3 | {cell} | {cell} | {cell} | 1.000 | 0.577 |"
    assert f"{row} {far:.3f} | {first:.3f} | {2 * first:.3f} |" in text
    row = "| fp8 against bf16 | 3 | +0.100 ± 0.497 | +0.100 ± 0.497 | +0.100 ± 0.497 | 0.200 | 0.115 |"
    assert f"{row} {wide:.3f} | {second:.3f} | {second:.3f} | not told apart (power for 0.1%: 0.0" in text
    assert text.startswith("**Two formats.** ")
    assert "p < 0.05 / 2" in text


def test_a_pair_without_lines_is_named_and_not_counted() -> None:
    text = family_table(LINES, "formats", [("fp4", "bf16"), ("fp8", "bf16")])
    assert "over the 1 tests" in text
    assert text.endswith("Without lines: fp8 against bf16.")


def test_a_family_without_any_lines_has_no_table() -> None:
    assert family_table(LINES, "formats", [("fp8", "bf16"), ("fp8", "fp4")]) == "No lines yet."


def test_committed_lines_give_the_corrected_figures_of_the_log() -> None:
    lines = read_lines(ROOT / "eval" / "results" / "forks-decay.jsonl")
    pairs = [(name, "bf16") for name in ("fp8", "mxfp8", "nvfp4", "fp4", "mxfp4", "int4")]
    rows = [row.split(" | ") for row in family_table(lines, "formats", pairs).splitlines() if " against " in row]
    found = {row[0].split()[1]: (row[2], row[9]) for row in rows}
    assert found["int4"] == ("+0.104 ± 0.046", "0.032")
    assert found["mxfp4"] == ("+0.074 ± 0.042", "0.058")
    assert found["fp4"] == ("+0.069 ± 0.045", "0.064")


def test_one_fork_is_not_tested() -> None:
    text = family_table([LINES[0], LINES[4]], "formats", [("fp4", "bf16")])
    assert "| fp4 against bf16 | 1 | +1.000 | +1.000 | +1.000 | - | - | - | - | - | not tested |" in text


def test_a_report_renews_the_tables_of_a_document_and_nothing_else(tmp_path: Path) -> None:
    lines, page = tmp_path / "lines.jsonl", tmp_path / "page.md"
    signed = [one | {"schema_version": 1, "id": str(i), "setting": "s"} for i, one in enumerate([*LINES, *FP8])]
    lines.write_text("".join(json.dumps(one) + "\n" for one in signed), encoding="utf-8")
    page.write_text("By hand.\n<!-- forks:pairs -->\nold\n<!-- /forks:pairs -->\nBy hand too.\n", encoding="utf-8")
    families = {"pairs": [("fp4", "fp8")]}
    text = write_report([lines], tmp_path / "tables.md", families=families, docs=[page])
    renewed = page.read_text(encoding="utf-8")
    assert renewed.startswith("By hand.\n<!-- forks:pairs -->\n**Pairs.** ")
    assert renewed.endswith("|\n<!-- /forks:pairs -->\nBy hand too.\n")
    assert "\nold\n" not in renewed
    assert "fp4 against fp8 | 3 |" in renewed and "fp4 against fp8 | 3 |" in text
    page.write_text("<!-- forks:other -->\n<!-- /forks:other -->\n", encoding="utf-8")
    with pytest.raises(
        ValueError, match="markers for unknown tables \\['other'\\]; expected some of \\['all', 'pairs'\\]"
    ):
        write_report([lines], tmp_path / "tables.md", families=families, docs=[page])


def test_a_table_against_a_contender_without_lines_is_refused() -> None:
    with pytest.raises(ValueError, match="No line is of the contender 'fp8'; there are bf16, fp4"):
        table(LINES, "fp8")


def test_a_contender_is_named_by_its_share_or_by_its_speed() -> None:
    policy = {"policy": "snip", "formats": ["nvfp4", "mxfp8"], "granularity": "gemm"}
    share = Contender(None, "all", policy | {"target_fp4_fraction": 0.75})
    speed = Contender(None, "all", policy | {"target_linear_speedup": 2.5, "rates": "b200"})
    assert share.name == "snip {nvfp4, mxfp8}, 75% by gemm"
    assert speed.name == "snip {nvfp4, mxfp8}, 2.5 times BF16 (b200) by gemm"
