"""Do the committed recipes of forks ask for what they say, and do they run?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from small_forks import CPU, TINY, forked, random_text

from benchmarks.shared.json_lines import read_lines
from eval.bakeoff import forks
from eval.bakeoff.fork_base import check_length, train_base
from eval.bakeoff.fork_recipe import ForkRecipe, load_recipe
from eval.bakeoff.fork_text import ForkText
from snip_hf.config import POLICIES, SnipConfig
from snip_hf.policies.registry import aims_at_share

ROOT = Path(__file__).resolve().parents[2]
CRITERIA = ROOT / "recipes" / "forks-criteria.yaml"


@pytest.fixture(scope="module")
def criteria() -> ForkRecipe:
    return load_recipe(CRITERIA)


def test_every_policy_that_aims_at_a_share_is_a_contender(criteria: ForkRecipe) -> None:
    aiming = set()
    for name in POLICIES:
        granularity = "layer" if name == "snip-paper" else "gemm"
        if aims_at_share(SnipConfig(policy=name, granularity=granularity, formats=("fp4", "bf16"))):
            aiming.add(name)
    assert {one.settings["policy"] for one in criteria.contenders if one.settings} == aiming


@pytest.mark.parametrize(("granularity", "shares"), [("gemm", (0.75, 0.9, 0.95)), ("layer", (0.5, 0.75, 0.9))])
def test_every_policy_has_every_share_of_its_granularity(
    criteria: ForkRecipe, granularity: str, shares: tuple[float, ...]
) -> None:
    found = {
        (one.settings["policy"], one.settings["target_fp4_fraction"])
        for one in criteria.contenders
        if one.settings.get("granularity") == granularity and one.settings["formats"] == ["fp4", "fp8"]
    }
    policies = {one.settings["policy"] for one in criteria.contenders if one.settings}
    impossible = {"backward-first"} if granularity == "layer" else {"snip-paper"}
    assert {(policy, share) for policy in policies - impossible for share in shares} <= found
    assert list(criteria.impossible) == [
        "policy backward-first, granularity layer",
        "policy backward-first, granularity gemm, decides forward",
        "policy snip-paper, granularity gemm",
    ]


def test_forward_gemms_alone_have_both_shares(criteria: ForkRecipe) -> None:
    forward = [one.settings for one in criteria.contenders if one.settings.get("decides") == "forward"]
    found = {(settings["policy"], settings["target_fp4_fraction"]) for settings in forward}
    policies = {policy for policy, _ in found}
    assert len(policies) == 12
    assert found == {(policy, share) for policy in policies for share in (0.5, 0.8)}


def test_a_share_that_falls_has_the_mean_of_the_constant_one() -> None:
    recipe = load_recipe(ROOT / "recipes" / "forks-longer.yaml")
    (falling,) = [one for one in recipe.contenders if isinstance(one.settings.get("target_fp4_fraction"), list)]
    config = falling.config(recipe.forks[0], recipe.backend)
    first, last = recipe.forks[0].point + 1, recipe.base.steps
    shares = [config.target_at(step) or 0.0 for step in range(first, last + 1)]
    assert sum(shares) / len(shares) == pytest.approx(0.75)
    assert falling.refreshes


def test_comparisons_that_cannot_differ_after_so_many_steps_are_left_out() -> None:
    recipe = load_recipe(ROOT / "recipes" / "forks-small.yaml")
    held = "snip {fp4, fp8}, 90% by gemm"
    first, refreshed = ("backward-first {fp4, fp8}, 90% by gemm", held), (f"{held}, refresh_every 20", held)
    # Plans of the second one are the same until the refresh before step 21; the family "layer" ends after 20 steps.
    assert recipe.comparisons["gemm"] == (first, refreshed)
    assert recipe.comparisons_after(20) == {"gemm": (first,), "layer": recipe.comparisons["layer"]}
    assert recipe.comparisons_after(50) == {"gemm": (first, refreshed)}


def test_a_block_has_enough_forks_of_both_lengths(criteria: ForkRecipe) -> None:
    runs = [run for run in criteria.runs("text") if run.fork in criteria.blocks[0]]
    lengths = [steps for run in runs for steps in run.lengths]
    assert lengths.count(100) >= 400
    assert lengths.count(1000) >= 100
    # A run that is cut off has first the budgets where criteria can differ, then the main contrasts over 1,000 steps.
    # The 55 contenders of the former are what `--cells 55` takes.
    assert [run.lengths for run in runs[:612]] == [(100,)] * 55 * 9 + [(1000,)] * 117


@pytest.mark.parametrize(
    "name", ["criteria", "criteria-124m", "continue-124m", "longer", "objectives", "refreshes", "shifts", "small"]
)
def test_every_recipe_asks_for_no_more_text_than_it_keeps(name: str) -> None:
    recipe = load_recipe(ROOT / "recipes" / f"forks-{name}.yaml")
    rows, other = (np.zeros((count, 1), np.uint16) for count in (recipe.train_sequences, recipe.other_sequences))
    check_length(recipe, ForkText(rows, rows[:1], 8192, 0, other, other[:1]))


def test_longer_runs_go_through_the_schedule_with_eight_seeds() -> None:
    recipe = load_recipe(ROOT / "recipes" / "forks-longer.yaml")
    assert len({fork.base_seed for fork in recipe.forks}) == 8
    assert {run.fork.point + run.lengths[-1] for run in recipe.runs("text")} == {recipe.base.steps}


@pytest.mark.slow
def test_every_kind_of_contender_of_the_criteria_trains_a_small_model(tmp_path: Path) -> None:
    tiny = [change for change in TINY if not change.startswith(("training.steps", "forks.steps"))]
    recipe = load_recipe(CRITERIA, tiny)
    text = random_text(40)
    train_base(recipe, text, 0, CPU, tmp_path)
    kinds = {}
    for one in recipe.contenders:
        settings = {key: value for key, value in one.settings.items() if key not in ("target_fp4_fraction", "formats")}
        kinds.setdefault(str(sorted(settings.items())) if settings else one.name, one)
    for one in kinds.values():
        found = forked(recipe, text, one, recipe.forks[0], tmp_path, 3)[0]
        assert not found["diverged"], one.name
        target = one.settings.get("target_fp4_fraction")
        assert target is None or found["fp4_fraction"] >= target - 1e-6, one.name


@pytest.mark.slow
def test_the_small_recipe_goes_the_whole_way_of_a_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, text, output = ROOT / "recipes" / "forks-small.yaml", tmp_path / "text.npz", tmp_path / "lines.jsonl"
    assert forks.main(["text", str(recipe), "--text", str(text)]) == 0
    less = ["--override", "forks.base_seeds=[0]", "forks.points=[20]", "training.steps=70", *TINY[:6]]
    command = [sys.executable, "-m", "eval.bakeoff.forks", "run", str(recipe), "--text", str(text), "--device", "cpu"]
    command += ["--output", str(output), "--cache", str(tmp_path / "cache"), "--workers", "2", *less]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    lines = read_lines(output)
    assert len(lines) == 5 * 2 + 2
    page, figures = tmp_path / "page.md", tmp_path / "figures"
    report = ["report", str(output), "--recipe", str(recipe), "--output", str(page), "--figures", str(figures)]
    assert forks.main(report) == 0
    assert len(list(figures.iterdir())) == 3  # after 50 steps no pair of the family "layer"
    text_of_page = page.read_text(encoding="utf-8")
    assert "| snip {fp4, fp8}, 90% by gemm | 9" in text_of_page
    assert "loss after 50 steps" in text_of_page
    capsys.readouterr()
    assert forks.main([*command[3:], "--list"]) == 0
    assert "12 lines, 12 of them done, 0 to do" in capsys.readouterr().out
