"""Is a fork that is measured on its way, cut off or continued the same as one that is not?"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_cases import slow
from small_forks import BF16, CPU, SNIP, forked, random_text, write_recipe

from benchmarks.shared.json_lines import read_lines
from eval.bakeoff import fork_shared, fork_workers, forks
from eval.bakeoff.fork_base import Trainee, sequences_of, state_path, train_base
from eval.bakeoff.fork_cells import Contender
from eval.bakeoff.fork_pace import Pace, overview
from eval.bakeoff.fork_recipe import ForkRecipe, ForkRun, load_recipe
from eval.bakeoff.fork_text import ForkText, write_text
from eval.bakeoff.weight_means import WeightMeans

FORKS = {"base_seeds": [0], "points": [3, 6], "data_seeds": [0], "steps": [2, 5]}
STATIC = Contender(None, "all", SNIP)
REFRESHED = Contender(None, "all", SNIP | {"refresh_every": 2})


@pytest.fixture(scope="module")
def based(tmp_path_factory: pytest.TempPathFactory) -> tuple[ForkRecipe, ForkText, Path]:
    """A recipe, its text and the folder of its base's states."""
    folder = tmp_path_factory.mktemp("forks")
    recipe = load_recipe(write_recipe(folder, [{"format": ["bf16", "fp8"]}], forks=FORKS))
    text = write_text(recipe, folder / "text.npz")
    train_base(recipe, text, 0, CPU, folder)
    return recipe, text, folder


def without_times(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name != "seconds"}


@pytest.mark.parametrize("contender", [BF16, Contender("nvfp4", "all", {}), slow(STATIC), slow(REFRESHED)])
def test_what_is_measured_on_the_way_is_what_a_shorter_fork_ends_with(
    based: tuple[ForkRecipe, ForkText, Path], contender: Contender
) -> None:
    recipe, text, folder = based
    fork = recipe.forks[0]
    on_the_way = [without_times(found) for found in forked(recipe, text, contender, fork, folder, 2, 5)]
    alone = [without_times(forked(recipe, text, contender, fork, folder, steps)[0]) for steps in (2, 5)]
    assert on_the_way == alone
    assert on_the_way[0]["loss"] != on_the_way[1]["loss"]


@pytest.mark.slow
def test_a_contender_that_refreshes_goes_on_from_the_plan_of_its_start(
    based: tuple[ForkRecipe, ForkText, Path],
) -> None:
    recipe, text, folder = based
    static, refreshed = (forked(recipe, text, one, recipe.forks[0], folder, 2, 5) for one in (STATIC, REFRESHED))
    # The plan of step 1 is made in the rehearsal; those of steps 3 and 5 are applied at the end of these steps.
    assert [plan["step"] for plan in refreshed[1]["plans"]] == [3, 5]
    assert (static[1]["plans"], refreshed[0]["plans"]) == ([], [])
    assert without_times(refreshed[0]) == without_times(static[0])
    assert refreshed[1]["plans"][-1]["plan"] == refreshed[1]["plan"]
    assert all(0.75 <= plan["fp4_fraction"] < 0.8 for plan in refreshed[1]["plans"])


def test_a_fork_that_cools_down_lowers_the_learning_rate_to_zero_over_its_own_steps(
    based: tuple[ForkRecipe, ForkText, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, text, folder = based
    rates: list[float] = []
    step = Trainee.step

    def noted(self: Trainee, *rest: Any) -> torch.Tensor:
        rates.append(self.optimizer.param_groups[0]["lr"])
        return step(self, *rest)

    monkeypatch.setattr(Trainee, "step", noted)
    fork = recipe.forks[0]
    forked(recipe, text, BF16, fork, folder, 5)
    planned, rates[:] = list(rates), []
    forked(replace(recipe, cools_down=True), text, BF16, fork, folder, 5)
    assert rates == pytest.approx([rate * share for rate, share in zip(planned, (1, 0.8, 0.6, 0.4, 0.2), strict=True)])


def test_lengths_of_forks_that_cool_down_are_trainings_of_their_own(tmp_path: Path) -> None:
    cells = [{"format": "bf16"}]
    together = load_recipe(write_recipe(tmp_path, cells, forks=FORKS)).runs("text")
    alone = load_recipe(write_recipe(tmp_path, cells, forks=FORKS | {"cooldown": True})).runs("text")
    assert [run.lengths for run in together] == [(2, 5)] * 2
    assert [run.lengths for run in alone] == [(2,), (5,)] * 2
    assert not {name for run in together for name in run.ids.values()} & {
        name for run in alone for name in run.ids.values()
    }
    with pytest.raises(ValueError, match=r"forks\.cooldown='yes'; expected true or false"):
        load_recipe(write_recipe(tmp_path, cells, forks=FORKS | {"cooldown": "yes"}))


def test_a_rule_does_not_refresh(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'random' needs no probe, so its plan is never made again"):
        load_recipe(write_recipe(tmp_path, [SNIP | {"policy": "random", "refresh_every": 2}]))


def test_the_averaged_loss_is_that_of_the_mean_weights(based: tuple[ForkRecipe, ForkText, Path]) -> None:
    recipe, text, folder = based
    fork = recipe.forks[0]
    found = forked(recipe, text, BF16, fork, folder, 5)[0]
    plain = Trainee(recipe, text, CPU, 0)
    plain.load(state_path(recipe, text, fork, folder))
    weights = []
    for step, rows in enumerate(plain.put(sequences_of(recipe, text, fork, 5)), 1):
        plain.step(3 + step, rows, None)
        weights.append([weight.detach().clone() for weight in plain.model.parameters()])
    with torch.no_grad():
        for weight, *values in zip(plain.model.parameters(), *weights, strict=True):
            weight.copy_(torch.stack(values).mean(0))
    assert found["loss"]["held_out_averaged"] == pytest.approx(plain.evaluate(), abs=2e-6)


def test_mean_weights_leave_no_trace() -> None:
    layer = torch.nn.Linear(3, 2)
    before = layer.weight.detach().clone()
    means = WeightMeans(layer)
    means.add()
    with torch.no_grad():
        layer.weight.add_(2.0)
    means.add()
    with means.in_place():
        assert torch.allclose(layer.weight, before + 1.0)
    assert torch.equal(layer.weight, before + 2.0)
    with pytest.raises(ValueError, match="no weights were added"), WeightMeans(layer).in_place():
        pass


def test_a_fork_whose_loss_is_not_finite_ends_there(
    based: tuple[ForkRecipe, ForkText, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, text, folder = based
    monkeypatch.setattr(Trainee, "step", lambda self, *arguments: torch.tensor(math.nan))
    found = forked(recipe, text, BF16, recipe.forks[0], folder, 2, 5)
    assert [one["diverged"] for one in found] == [True, True]
    assert found[1]["loss"]["held_out_averaged"] is None
    assert found[1]["training_curve"] == [None]


@pytest.mark.parametrize("format", ["bf16", "fp8"])
def test_a_base_that_was_cut_off_goes_on_from_its_last_point(tmp_path: Path, format: str) -> None:
    recipe = load_recipe(write_recipe(tmp_path, [{"format": "bf16"}]), [f"training.format={format}"])
    text = random_text(60)
    whole, continued = tmp_path / "whole", tmp_path / "continued"
    for folder in (whole, continued):
        folder.mkdir()
    train_base(recipe, text, 0, CPU, whole)
    first, last = (state_path(recipe, text, fork, whole) for fork in recipe.forks)
    (continued / first.name).write_bytes(first.read_bytes())
    train_base(recipe, text, 0, CPU, continued)
    states = [torch.load(folder / last.name, weights_only=True) for folder in (whole, continued)]
    assert states[0]["digest"] == states[1]["digest"]


# --------------------------------------------------------------------------------------------------------- the recipe


def test_a_cell_may_have_lengths_of_its_own(tmp_path: Path) -> None:
    cells = [{"format": "bf16", "steps": [2, 5]}, {"format": ["fp8", "bf16"], "steps": 2}, {"format": "fp4"}]
    recipe = load_recipe(write_recipe(tmp_path, cells, forks=FORKS | {"points": [3], "steps": 4}))
    found = [(run.contender.name, run.lengths) for run in recipe.runs("text")]
    assert found == [("bf16", (2, 5)), ("fp8", (2,)), ("fp4", (4,))]  # bf16 of 2 steps is there


def test_the_id_of_a_line_depends_on_no_other_length(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, [{"format": "bf16"}], forks=FORKS | {"points": [3]})
    both, alone = (load_recipe(path, [f"forks.steps={steps}"]).runs("text")[0] for steps in ("[2, 5]", "5"))
    assert both.ids[5] == alone.ids[5] != both.ids[2]


def test_a_length_beyond_the_schedule_is_left_out_at_late_points(tmp_path: Path) -> None:
    forks_ = FORKS | {"points": [3, 16], "steps": [2, 5]}
    recipe = load_recipe(write_recipe(tmp_path, [{"format": "bf16"}], forks=forks_))
    runs = recipe.runs("text")
    assert [(run.fork.point, run.lengths) for run in runs] == [(3, (2, 5)), (16, (2,))]
    assert "left out: forks of 5 steps after point 16, beyond the schedule's 20" in overview(
        recipe, runs, runs, None, in_full=True
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cells": [{"format": "bf16", "steps": [2, 2]}]}, "cells: steps=.*expected a number of steps from 1"),
        ({"cells": [{"format": "bf16", "steps": 0}]}, "cells: steps=0; expected a number of steps from 1"),
        ({"cells": [{"format": "bf16", "steps": 18}]}, "the first one at most 2, so that forks end within"),
        ({"impossible": [{"format": "fp4"}]}, "impossible: format fp4 is possible; make it one of the cells"),
        ({"readme": ["fp5"]}, "readme: 'fp5' is no contender of the cells"),
    ],
)
def test_a_recipe_that_cannot_work_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe(write_recipe(tmp_path, **({"cells": [{"format": "bf16"}]} | changes)))


def test_what_is_impossible_is_named_with_its_reason(tmp_path: Path) -> None:
    by_layer = SNIP | {"policy": "backward-first", "granularity": "layer"}
    recipe = load_recipe(write_recipe(tmp_path, [{"format": "bf16"}], impossible=[by_layer]))
    ((what, why),) = recipe.impossible.items()
    assert what.startswith("policy backward-first, ")
    assert "it decides the GEMMs of a linear apart" in why


# ----------------------------------------------------------------------------------------------------------- the lines


def job_of(recipe: ForkRecipe, text: ForkText, folder: Path, lines: Path) -> fork_workers.Job:
    arguments = ["run", "recipe.yaml", "--text", str(folder / "text.npz"), "--output", str(lines), "--device", "cpu"]
    options = forks._parser().parse_args([*arguments, "--cache", str(folder)])
    return fork_workers.Job(recipe, recipe.runs(text.digest)[:1], {}, options, math.inf, os.getppid())


def test_a_fork_that_is_cut_off_keeps_the_lengths_that_it_reached(
    based: tuple[ForkRecipe, ForkText, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, text, folder = based
    run_fork = fork_workers.run_fork

    def cut_off(*arguments: Any) -> Iterator[tuple[int, dict[str, Any]]]:
        yield next(iter(run_fork(*arguments)))
        raise RuntimeError("the time is over")

    monkeypatch.setattr(fork_workers, "run_fork", cut_off)
    job = job_of(recipe, text, folder, tmp_path / "lines")
    fork_workers.work(0, job, fork_shared.Shared(job.todo))
    (line,) = read_lines(tmp_path / "lines")
    (run,) = job.todo
    assert (line["steps"], line["id"]) == (2, run.ids[2])
    left = run.without({line["id"]})
    assert left.lengths == (5,)
    monkeypatch.setattr(fork_workers, "run_fork", run_fork)
    fork_workers.work(0, replace(job, todo=[left]), fork_shared.Shared([left]))
    assert [line["steps"] for line in read_lines(tmp_path / "lines")] == [2, 5]


LINE = {"contender": "bf16", "steps": 100, "processes_per_device": 2}


def test_the_pace_of_earlier_lines_says_how_long_the_rest_takes(based: tuple[ForkRecipe, ForkText, Path]) -> None:
    recipe, _, _ = based
    lines = [
        LINE | {"seconds": {"plan": 1.0, "training": 200.0, "evaluation": 3.0}},
        LINE | {"contender": "fp8", "seconds": {"plan": 3.0, "training": 400.0, "evaluation": 3.0}},
    ]
    pace = Pace.of(lines)
    assert pace is not None
    runs = recipe.runs("text")
    assert pace.fork(runs[0]) == 2.0 + 5 * 1.0
    assert pace.fork(runs[2]) == 3.0 + 5 * 2.0
    assert pace.fork(ForkRun(Contender("fp4", "all", {}), recipe.forks[0], {4: ""})) == 2.5 + 4 * 1.5
    assert pace.base(recipe, 0) == 6.0
    text = overview(recipe, runs, runs[1:], pace, in_full=True)
    assert text.splitlines() == [
        "8 lines, 2 of them done, 6 to do",
        "  4 of forks of 2 steps",
        "  4 of forks of 5 steps",
        "bf16: 1 of 2 steps, 1 of 5 steps",
        "fp8: 2 of 2 steps, 2 of 5 steps",
        "about 0.6 minutes of one GPU for 3 forks, and 0.1 for 1 bases, by the pace of earlier lines",
    ]
    assert Pace.of([]) is None


def test_a_path_with_a_variable_that_is_not_set_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SNIP_HF_DATA", raising=False)
    recipe = Path(__file__).resolve().parents[2] / "recipes" / "forks-criteria.yaml"
    assert forks.main(["text", str(recipe), "--text", str(tmp_path / "text.npz")]) == 1
    assert "SNIP_HF_DATA is not set; set it to the folder of the text" in capsys.readouterr().err


def test_a_listing_counts_forks_and_estimates_their_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path, [{"format": "bf16"}], forks=FORKS)
    text, pace = tmp_path / "text.npz", tmp_path / "pace.jsonl"
    write_text(load_recipe(recipe), text)
    pace.write_text(json.dumps(LINE | {"seconds": {"plan": 0, "training": 12000, "evaluation": 0}}) + "\n")
    command = ["run", str(recipe), "--text", str(text), "--output", str(tmp_path / "lines"), "--list"]
    assert forks.main(command) == 0
    with_text = capsys.readouterr().out
    assert with_text.endswith("no lines to go by for the time that it takes; --pace FILE\n")
    text.rename(tmp_path / "elsewhere.npz")
    assert forks.main(command) == 0
    note = f"{text} does not exist, and says which lines are done: all are taken as left.\n"
    assert capsys.readouterr().out == with_text + note
    (tmp_path / "elsewhere.npz").rename(text)
    assert forks.main([*command, "--pace", str(pace)]) == 0
    assert "about 10.0 minutes of one GPU for 2 forks, and 6.0 for 1 bases" in capsys.readouterr().out
    assert not (tmp_path / "lines").exists()
