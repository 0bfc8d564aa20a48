"""Do contenders of a fork differ in nothing but their precision?"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_forks import BF16, CPU, SNIP, TINY, forked, random_text, write_recipe

from benchmarks.shared.json_lines import read_lines
from eval.bakeoff import fork_base, fork_shared, fork_workers, forks
from eval.bakeoff.fork_base import Trainee, sequences_of, state_path, train_base
from eval.bakeoff.fork_cells import Contender, Fork
from eval.bakeoff.fork_recipe import ForkRecipe, ForkRun, load_recipe
from eval.bakeoff.fork_text import ForkText, read_text, write_text
from snip_hf import SnipController
from snip_hf.costs.rates import RATES
from snip_hf.estimation import divergence
from snip_hf.layers.state import snip_linears

ROOT = Path(__file__).resolve().parents[2]
PAIRS = {"cells": [{"format": ["bf16", "fp4"]}]}


@pytest.fixture(scope="module")
def based(tmp_path_factory: pytest.TempPathFactory) -> tuple[ForkRecipe, ForkText, Path]:
    """A recipe, its text and the folder of its bases' states."""
    folder = tmp_path_factory.mktemp("forks")
    recipe = load_recipe(write_recipe(folder, [{"format": ["bf16", "fp8"]}]))
    text = write_text(recipe, folder / "text.npz")
    train_base(recipe, text, 0, CPU, folder)
    return recipe, text, folder


def runs_of(recipe: ForkRecipe) -> list[tuple[Contender, Fork]]:
    return [(run.contender, run.fork) for run in recipe.runs("text")]


def ids(runs: list[ForkRun]) -> set[str]:
    return {name for run in runs for name in run.ids.values()}


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
    found = [(contender.name, fork.name) for contender, fork in runs_of(recipe)]
    assert found == [(name, fork) for name in ("bf16", "fp4") for fork in ("s0-p3-d0", "s0-p6-d0")]
    assert not ids(recipe.runs("text")) & ids(recipe.runs("other text"))


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
    found = [(contender.name, fork.base_seed) for contender, fork in runs_of(recipe)]
    assert found == [("bf16", 0), ("bf16", 1), ("fp4", 0), ("fp4", 1), ("bf16", 2), ("fp4", 2)]


@pytest.mark.parametrize("count", ["0", "-1", "all"])
def test_a_number_of_contenders_below_1_is_refused(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        forks.main(["run", "recipe.yaml", "--text", "t.npz", "--output", "o.jsonl", "--cells", count])
    assert f"argument --cells: '{count}' is no whole number of at least 1" in capsys.readouterr().err


def test_a_run_of_some_contenders_takes_the_first_cells_and_knows_all_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write_recipe(tmp_path, [{"format": ["bf16", "fp4", "int4"]}])
    text, output = tmp_path / "text.npz", tmp_path / "lines.jsonl"
    assert forks.main(["text", str(recipe), "--text", str(text)]) == 0
    command = ["run", str(recipe), "--text", str(text), "--output", str(output), "--device", "cpu", "--cells", "2"]
    assert forks.main([*command, "--list"]) == 0
    listed = capsys.readouterr().out
    assert "4 lines, 0 of them done, 4 to do" in listed and "fp4: 2 of" in listed and "int4" not in listed
    # A line of the third contender says with which weights its base began.
    (later,) = (run for run in load_recipe(recipe).runs(read_text(text).digest)[-1:])
    line: dict[str, Any] = {"id": next(iter(later.ids.values())), "fork": {"base_seed": 0, "point": 6}, "state": "w"}
    line |= {"contender": "int4", "steps": 4, "processes_per_device": 1}
    line |= {"seconds": {"plan": 1.0, "training": 1.0, "evaluation": 1.0}}
    output.write_text(json.dumps(line) + "\n", encoding="utf-8")
    given: list[Any] = []
    monkeypatch.setattr(fork_workers.mp, "start_processes", lambda work, given_to, **_: given.append(given_to[0]))
    forks.main(command)
    (job,) = given
    assert [run.contender.name for run in job.todo] == ["bf16", "bf16", "fp4", "fp4"]
    assert job.states == {(0, 6): {"w"}}


def test_the_ids_of_runs_depend_on_no_block(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, [{"format": ["bf16", "fp4"]}])
    blocks = (ids(load_recipe(path, [f"forks.base_seeds={seeds}"]).runs("text")) for seeds in ("[0, 1]", "[[0], [1]]"))
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
    assert {run.fork.point + run.lengths[-1] for run in committed.runs("text")} == {committed.base.steps}
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
    runs = recipe.runs("1896f9ab35b3")
    assert {line["id"]: line["contender"] for line in lines}.items() <= {
        name: run.contender.name for run in runs for name in run.ids.values()
    }.items()


@pytest.mark.slow
def test_every_cell_of_the_committed_recipe_trains_a_small_model(tmp_path: Path) -> None:
    recipe = load_recipe(ROOT / "recipes" / "forks-formats.yaml", TINY)
    text = random_text()
    train_base(recipe, text, 0, CPU, tmp_path)
    found = {
        run.name.split(", s0-")[0]: forked(recipe, text, run.contender, run.fork, tmp_path)[0]
        for run in recipe.runs(text.digest)
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
    found = forked(recipe, text, BF16, fork, folder)[0]
    plain = Trainee(recipe, text, CPU, 0)
    plain.load(state_path(recipe, text, fork, folder))
    ids = plain.put(sequences_of(recipe, text, fork, 4))
    losses = [float(plain.step(4 + i, rows, None)) for i, rows in enumerate(ids)]
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
    drawn = [position[row.tobytes()] for row in np.concatenate(sequences_of(recipe, text, late, 4))]
    assert len(set(drawn)) == 4 * 4
    assert not set(drawn) & set(seen.tolist())


@pytest.mark.parametrize("contender", [Contender("nvfp4", "all", {}), Contender(None, "all", SNIP)])
def test_the_same_fork_of_the_same_contender_gives_the_same_numbers(
    based: tuple[ForkRecipe, ForkText, Path], contender: Contender
) -> None:
    recipe, text, folder = based
    first, second = (forked(recipe, text, contender, recipe.forks[0], folder)[0] for _ in range(2))
    assert without_times(first) == without_times(second)
    assert first["loss"]["held_out_plan"] != first["loss"]["held_out_high_precision"]


def test_the_gemms_of_a_cell_run_in_its_format_and_the_others_in_bf16(
    based: tuple[ForkRecipe, ForkText, Path],
) -> None:
    recipe, text, folder = based
    fork = recipe.forks[0]
    found = {
        gemms: forked(recipe, text, Contender("fp4", gemms, {}), fork, folder)[0]
        for gemms in ("all", "forward", "backward")
    }
    assert found["all"]["shares"] == {"fp4": 1.0}
    assert found["forward"]["shares"] == {"bf16": 0.666667, "fp4": 0.333333}
    assert set(found["forward"]["plan"][0::3]) == {"1"}
    assert set(found["forward"]["plan"][1::3] + found["forward"]["plan"][2::3]) == {"0"}
    assert found["backward"]["shares"] == {"bf16": 0.333333, "fp4": 0.666667}
    losses = [found[gemms]["loss"]["train"] for gemms in found]
    losses.append(forked(recipe, text, BF16, fork, folder)[0]["loss"]["train"])
    assert len(set(losses)) == 4
    # Nothing of the held-out passes is quantized where only backward GEMMs are.
    assert found["backward"]["loss"]["held_out_plan"] == found["backward"]["loss"]["held_out_high_precision"]


def test_a_policy_has_its_plan_before_the_first_step(based: tuple[ForkRecipe, ForkText, Path]) -> None:
    recipe, text, folder = based
    found = forked(recipe, text, Contender(None, "all", SNIP), recipe.forks[0], folder)[0]
    assert set(found["shares"]) == {"nvfp4", "mxfp8"}
    assert 0.75 <= found["fp4_fraction"] < 0.8
    # All 4-bit would differ from the first step on, all 8-bit too.
    uniform = [
        forked(recipe, text, Contender(name, "all", {}), recipe.forks[0], folder)[0]["loss"]["train"]
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
    keep = fork_base.keep_state_on_host

    def noted(model: torch.nn.Module) -> None:
        keep(model)
        devices.extend(layer.snip_state.device.type for layer in snip_linears(model).values())

    monkeypatch.setattr(fork_base, "keep_state_on_host", noted)
    on_host = forked(recipe, text, contender, recipe.forks[0], tmp_path, device=device)[0]
    monkeypatch.setattr(fork_base, "keep_state_on_host", lambda model: None)
    on_gpu = forked(recipe, text, contender, recipe.forks[0], tmp_path, device=device)[0]
    assert set(devices) == {"cpu"}
    assert on_host["shares"] == on_gpu["shares"]
    assert on_host["loss"] == pytest.approx(on_gpu["loss"], rel=1e-5)  # backward passes on GPUs are not reproducible


def test_a_probe_that_came_to_nothing_fails_the_fork(
    based: tuple[ForkRecipe, ForkText, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, text, folder = based
    monkeypatch.setattr(SnipController, "before_optimizer_step", lambda self, step: None)
    with pytest.raises(RuntimeError, match=r"The refresh of step 4 came to nothing.*: it did not end"):
        forked(recipe, text, Contender(None, "all", SNIP), recipe.forks[0], folder)[0]


@pytest.mark.parametrize("error", [ValueError, torch.OutOfMemoryError])
def test_a_probe_without_memory_is_told_from_one_that_failed_otherwise(
    based: tuple[ForkRecipe, ForkText, Path], monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise error("no such probe")

    recipe, text, folder = based
    monkeypatch.setattr(divergence, "run_probe", fail)
    with pytest.raises(RuntimeError, match=f"came to nothing.*{error.__name__}: no such probe") as found:
        forked(recipe, text, Contender(None, "all", SNIP), recipe.forks[0], folder)
    assert fork_workers._lacks_memory(found.value) == (error is torch.OutOfMemoryError)


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
    assert "4 lines, 3 of them done, 1 to do" in capsys.readouterr().out
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    again = read_lines(output)
    assert again[:3] == lines[:3]
    assert without_times(again[3]) | {"date": ""} == without_times(lines[3]) | {"date": ""}
    assert forks.main(["report", str(output), "--output", str(tmp_path / "table.md")]) == 0
    assert "2 forks of 1 base;" in (tmp_path / "table.md").read_text(encoding="utf-8")


def test_nothing_starts_that_would_end_too_late(based: tuple[ForkRecipe, ForkText, Path], tmp_path: Path) -> None:
    recipe, _, folder = based
    options = forks._parser().parse_args(
        ["run", "recipe.yaml", "--text", str(folder / "text.npz"), "--output", str(tmp_path / "lines"), "--device"]
        + ["cpu", "--cache", str(folder)]
    )
    todo = recipe.runs(read_text(options.text).digest)
    job = fork_workers.Job(recipe, todo, {}, options, 0.0, os.getppid())
    fork_workers.work(0, job, fork_shared.Shared(job.todo))
    assert not (tmp_path / "lines").exists()


# The only worker goes on, whatever fails. One of two ends for want of memory and leaves all to the other.
@pytest.mark.parametrize(
    ("error", "workers", "failures", "done"),
    [
        (RuntimeError, 2, 2, ["fp8", "fp8"]),
        (torch.OutOfMemoryError, 1, 2, ["fp8", "fp8"]),
        (torch.OutOfMemoryError, 2, 0, []),
    ],
)
def test_a_fork_that_fails_leaves_no_line_and_stops_no_other(
    based: tuple[ForkRecipe, ForkText, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: type[Exception],
    workers: int,
    failures: int,
    done: list[str],
) -> None:
    recipe, text, folder = based

    def run(recipe: ForkRecipe, text: ForkText, run: ForkRun, *rest: Any) -> list[tuple[int, dict[str, Any]]]:
        if run.contender.name == "bf16":
            raise error("no memory")
        return [(4, {"loss": {}})]

    monkeypatch.setattr(fork_workers, "run_fork", run)
    arguments = ["run", "recipe.yaml", "--text", str(folder / "text.npz"), "--output", str(tmp_path / "lines")]
    options = forks._parser().parse_args([*arguments, "--device", "cpu", "--cache", str(folder)])
    job = fork_workers.Job(recipe, recipe.runs(text.digest), {}, options, math.inf, os.getppid())
    shared = fork_shared.Shared(job.todo, workers)
    fork_workers.work(0, job, shared)
    assert shared.failed.value == failures
    assert [line["contender"] for line in read_lines(tmp_path / "lines")] == done
    fork_workers.work(1, job, shared)
    assert [line["contender"] for line in read_lines(tmp_path / "lines")] == ["fp8", "fp8"]
    assert shared.failed.value == 2


def test_a_worker_without_memory_for_a_base_leaves_it_to_another(
    based: tuple[ForkRecipe, ForkText, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, _, folder = based
    tried: list[int] = []

    def train(recipe: ForkRecipe, text: ForkText, seed: int, *rest: Any) -> None:
        tried.append(seed)
        if len(tried) == 1:
            raise torch.OutOfMemoryError("no memory")
        for fork in OF_BASES:
            if fork.base_seed == seed:
                state_path(recipe, text, fork, tmp_path).touch()

    monkeypatch.setattr(fork_workers, "train_base", train)
    monkeypatch.setattr(fork_workers, "run_fork", lambda *arguments: [(4, {"loss": {}})])
    shared = fork_shared.Shared(OF_TWO_BASES, 2)
    work_on_two_bases(folder, tmp_path, shared, recipe)
    assert (tried, shared.failed.value) == ([3], 0)
    work_on_two_bases(folder, tmp_path, shared, recipe)
    assert (tried, shared.failed.value) == ([3, 3, 5], 0)
    assert [line["fork"]["base_seed"] for line in read_lines(tmp_path / "lines")] == [3, 5]


def test_a_worker_without_memory_goes_on_where_no_other_is_left(
    based: tuple[ForkRecipe, ForkText, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the other one ended because nothing was left to take."""
    recipe, _, folder = based
    shared = fork_shared.Shared(OF_TWO_BASES, 2)

    def run(*arguments: Any) -> None:
        if not tried:
            shared.end(1)
        tried.append(arguments)
        raise RuntimeError("no plan") from torch.OutOfMemoryError("no memory")

    tried: list[Any] = []
    monkeypatch.setattr(fork_workers, "run_fork", run)
    monkeypatch.setattr(fork_workers, "_can_fork", lambda *arguments: True)
    work_on_two_bases(folder, tmp_path, shared, recipe)
    assert (list(shared.is_taken), shared.failed.value, len(tried)) == ([True, True], 2, 2)


def test_the_last_worker_of_each_device_stays() -> None:
    shared = fork_shared.Shared(OF_TWO_BASES, 3, 2)  # workers 0 and 2 share a device
    shared.is_taken[0] = shared.is_taken[1] = True
    shared.bases[5].value = fork_shared.TAKEN
    assert not shared.leave(1, fork=1) and list(shared.is_taken) == [True, True]
    assert shared.leave(2, fork=1, base=5) and list(shared.is_taken) == [True, False]
    assert shared.bases[5].value == fork_shared.FREE
    assert not shared.leave(0, fork=0) and list(shared.is_taken) == [True, False]


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (torch.OutOfMemoryError("no"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("no plan"), False),
    ],
)
def test_errors_for_want_of_memory_are_told_from_others(error: Exception, lacks: bool) -> None:
    assert fork_workers._lacks_memory(error) == lacks
    wrapped = RuntimeError("compilation failed")
    wrapped.__cause__ = error
    assert fork_workers._lacks_memory(wrapped) == lacks


def test_an_error_after_some_lengths_is_a_failure_although_it_is_of_memory(
    based: tuple[ForkRecipe, ForkText, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, _, folder = based

    def run(*arguments: Any) -> Iterator[tuple[int, dict[str, Any]]]:
        yield 4, {"loss": {}}
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(fork_workers, "run_fork", run)
    monkeypatch.setattr(fork_workers, "_can_fork", lambda *arguments: True)
    shared = fork_shared.Shared(OF_TWO_BASES, 2)
    work_on_two_bases(folder, tmp_path, shared, recipe)
    assert shared.failed.value == 2
    assert len(read_lines(tmp_path / "lines")) == 2


# Of the base of seed 3, and of seed 5.
OF_BASES = [Fork(base_seed=seed, point=6, data_seed=0) for seed in (3, 5)]
OF_TWO_BASES = [ForkRun(BF16, fork, {4: fork.name}) for fork in OF_BASES]


def work_on_two_bases(
    folder: Path, cache: Path, shared: fork_shared.Shared, recipe: ForkRecipe, states: Any = None
) -> None:
    """One worker; no base has a state."""
    arguments = ["run", "recipe.yaml", "--text", str(folder / "text.npz"), "--output", str(cache / "lines")]
    options = forks._parser().parse_args([*arguments, "--device", "cpu", "--cache", str(cache)])
    fork_workers.work(0, fork_workers.Job(recipe, OF_TWO_BASES, states or {}, options, math.inf, os.getppid()), shared)


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
            state_path(recipe, text, OF_BASES[1], tmp_path).touch()

    monkeypatch.setattr(fork_workers, "train_base", train)
    monkeypatch.setattr(fork_workers, "run_fork", lambda *arguments: [(4, {"loss": {}})])
    monkeypatch.setattr(fork_workers.time, "sleep", pass_by)
    shared = fork_shared.Shared(OF_TWO_BASES)
    shared.bases[5].value = fork_shared.TAKEN
    work_on_two_bases(folder, tmp_path, shared, recipe)
    assert [line["fork"]["base_seed"] for line in read_lines(tmp_path / "lines")] == [5]
    assert (len(waited), shared.failed.value) == (3, 1)


def test_forks_whose_base_has_come_to_their_point_run_before_earlier_ones(
    based: tuple[ForkRecipe, ForkText, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker trains the base of seed 3, which comes to its point when nothing else is left."""
    recipe, text, folder = based

    def pass_by(seconds: float) -> None:
        state_path(recipe, text, OF_BASES[0], tmp_path).touch()

    monkeypatch.setattr(fork_workers, "run_fork", lambda *arguments: [(4, {"loss": {}})])
    monkeypatch.setattr(fork_workers.time, "sleep", pass_by)
    state_path(recipe, text, OF_BASES[1], tmp_path).touch()
    shared = fork_shared.Shared(OF_TWO_BASES)
    shared.bases[3].value = fork_shared.TAKEN
    work_on_two_bases(folder, tmp_path, shared, recipe)
    assert [line["fork"]["base_seed"] for line in read_lines(tmp_path / "lines")] == [5, 3]


def test_nothing_forks_from_other_weights_than_the_lines_that_are_there_began_with(
    based: tuple[ForkRecipe, ForkText, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe, text, folder = based
    for fork, digest in zip(OF_BASES, ("old", "new"), strict=True):
        torch.save({"digest": digest}, state_path(recipe, text, fork, tmp_path))
    states = {(fork.base_seed, fork.point): {"old"} for fork in OF_BASES}
    monkeypatch.setattr(fork_workers, "run_fork", lambda *arguments: [(4, {"loss": {}})])
    shared = fork_shared.Shared(OF_TWO_BASES)
    work_on_two_bases(folder, tmp_path, shared, recipe, states)
    assert [line["fork"]["base_seed"] for line in read_lines(tmp_path / "lines")] == [OF_BASES[0].base_seed]
    assert shared.failed.value == 1
    assert "has the weights new; the lines of the output began with old." in capsys.readouterr().err


def test_the_weights_that_lines_began_with_are_those_of_the_recipe_s_own_lines() -> None:
    runs = [ForkRun(Contender("bf16", "all", {}), fork, {4: f"id{fork.base_seed}"}) for fork in OF_BASES]
    lines = [
        {"id": id, "state": state, "fork": OF_BASES[0].to_dict()}
        for id, state in ((f"id{OF_BASES[0].base_seed}", "a"), ("of another text", "b"))
    ]
    assert fork_workers._states_of(runs, lines) == {(OF_BASES[0].base_seed, OF_BASES[0].point): {"a"}}


def test_a_worker_whose_gpu_is_lost_takes_no_further_base(
    based: tuple[ForkRecipe, ForkText, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, _, folder = based

    def train(*arguments: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(fork_workers, "train_base", train)
    monkeypatch.setattr(fork_workers, "_is_usable", lambda device: False)
    shared = fork_shared.Shared(OF_TWO_BASES)
    work_on_two_bases(folder, tmp_path, shared, recipe)
    assert [state.value for state in shared.bases.values()] == [fork_shared.FAILED, fork_shared.FREE]
    assert shared.failed.value == 1


@pytest.mark.slow
def test_a_format_of_one_s_own_is_a_cell_once_its_module_is_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert forks.main(command[3:]) == 1
    assert "Unknown format 'my-int3' for cells: format" in capsys.readouterr().err
    subprocess.run([*command, "--import", "my_formats"], cwd=ROOT, env=environment, capture_output=True, check=True)
    lines = read_lines(tmp_path / "lines")
    assert {line["contender"] for line in lines} == {"bf16", "my-int3"}
    assert {line["command"].split(" --import ")[1] for line in lines} == {"my_formats"}


@pytest.mark.slow
def test_forks_run_where_datasets_lm_eval_and_mip_are_not_installed() -> None:
    code = "import sys; sys.modules.update(dict.fromkeys(('datasets', 'lm_eval', 'mip'))); import eval.bakeoff.forks"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


def test_a_contender_is_named_by_its_share_or_by_its_speed() -> None:
    policy = {"policy": "snip", "formats": ["nvfp4", "mxfp8"], "granularity": "gemm"}
    share = Contender(None, "all", policy | {"target_fp4_fraction": 0.75})
    speed = Contender(None, "all", policy | {"target_linear_speedup": 2.5, "rates": "b200"})
    assert share.name == "snip {nvfp4, mxfp8}, 75% by gemm"
    assert speed.name == "snip {nvfp4, mxfp8}, 2.5 times BF16 (b200) by gemm"
