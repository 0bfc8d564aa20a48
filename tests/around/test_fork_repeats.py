"""Does the test of repeated passes find a pass that differs, and name what differs?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_forks import CPU, random_text, write_recipe
from torch import Tensor

from benchmarks.shared.json_lines import read_lines
from eval.bakeoff import fork_repeats
from eval.bakeoff.fork_base import Trainee
from eval.bakeoff.fork_cells import contender_of
from eval.bakeoff.fork_recipe import load_recipe
from eval.bakeoff.fork_run import in_force, make_plan
from snip_hf.layers import state


@pytest.mark.slow
def test_each_process_says_for_each_contender_how_many_passes_differed(tmp_path: Path) -> None:
    path, output = write_recipe(tmp_path, [{"format": "bf16"}]), tmp_path / "repeats.jsonl"
    common = ["--processes", "2", "--passes", "3", "--output", str(output), "--device", "cpu"]
    fork_repeats.main([str(path), *common, "--contenders", "bf16", "nvfp4"])
    lines = read_lines(output)
    assert sorted((line["contender"], line["process"]) for line in lines) == [
        ("bf16", 0),
        ("bf16", 1),
        ("nvfp4", 0),
        ("nvfp4", 1),
    ]
    assert {(line["passes"], line["differing"], *line["first"], *line["where"]) for line in lines} == {(3, 0)}
    assert len({(line["contender"], line["most"]) for line in lines}) == 2


def test_no_passes_and_a_missing_recipe_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["recipe.yaml", "--passes", "0"], "'0' is no whole number of at least 1"),
        ([str(tmp_path / "missing.yaml")], "missing.yaml"),
        ([str(write_recipe(tmp_path, [])), "--override", "forks.cuda_graph=true"], "expected 'cuda'"),
    ):
        with pytest.raises(SystemExit):
            fork_repeats.main([*arguments, "--output", str(tmp_path / "lines.jsonl"), "--device", "cpu"])
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("which", [0, 2, 3])
def test_a_pass_that_differs_is_found_and_what_differs_is_named(tmp_path: Path, which: int) -> None:
    recipe = load_recipe(write_recipe(tmp_path, [{"format": "bf16"}]))
    text = random_text(8)
    trainee = Trainee(recipe, text, CPU, 0)
    (ids,) = trainee.put([text.train[:2]])
    own, done = trainee.passes, 0

    def passes(ids: Tensor, plan: None, is_watched: bool = False) -> Tensor:
        nonlocal done
        loss, done = own(ids, plan, is_watched), done + 1
        if done == fork_repeats._WARM + which + 1:
            gradient = trainee.model.model.norm.weight.grad
            gradient[3] = torch.nextafter(gradient[3], torch.tensor(torch.inf))
        return loss

    trainee.passes = passes  # type: ignore[method-assign]
    line = fork_repeats._compared(trainee, ids, None, 6)
    assert (line["differing"], line["first"]) == (1, [{"pass": which, "in": ["model.norm.weight"]}])
    # Which pass was the odd one does not matter to where it differs.
    (where,) = line["where"]
    assert where["step"] == which % 2 and list(where["in"]) == ["model.norm.weight"]
    found = where["in"]["model.norm.weight"]
    assert (found["elements"], found["from"], found["to"]) == (1, [3], [3])
    assert 0 < found["in_norm"] < 1e-6


def test_a_pass_with_the_keys_of_another_step_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(write_recipe(tmp_path, [{"format": "bf16"}]))
    text = random_text(8)
    trainee = Trainee(recipe, text, CPU, 0)
    (ids,) = trainee.put([text.train[:2]])
    contender = contender_of({"format": "fp4"}, {"backend": recipe.backend, "solver": "greedy"})
    planned = make_plan(trainee, contender, fork_repeats._FORK, recipe.backend, ids)
    calls = 0

    def set_step(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls != fork_repeats._WARM + 4:  # the fourth pass has what the third one had
            state.set_step(*arguments)

    monkeypatch.setattr(fork_repeats, "set_step", set_step)
    config = contender.config(fork_repeats._FORK, recipe.backend)
    with in_force(trainee, planned, config, fork_repeats._FORK):
        line = fork_repeats._compared(trainee, ids, planned.plan, 8)
    assert line["differing"] == 1
    (found,) = line["first"]
    assert found["pass"] == 3 and any(name.endswith("down_proj.weight") for name in found["in"])
    (where,) = line["where"]
    assert where["step"] == 1 and set(where["in"]) == {name for name in found["in"] if name != "loss"}
