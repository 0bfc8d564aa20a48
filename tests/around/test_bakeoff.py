"""Does a bake-off run what its grid says, each run once, and do runs of one seed differ in nothing but their policy?"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import yaml

from benchmarks.shared.json_lines import read_lines
from eval.bakeoff import one_run, runner
from eval.bakeoff.__main__ import _parser, main
from eval.bakeoff.grid import Grid, Spec, load_grid
from eval.bakeoff.lines import read_runs
from eval.bakeoff.text import Text, load_text, prepare_text
from eval.bakeoff.training import Run, count_spikes, ends_above_its_lowest
from snip_hf import SnipConfig

ROOT = Path(__file__).resolve().parents[2]

STEPS = 12
SNIP: dict[str, Any] = {
    **{"first_refresh": 3, "refresh_every": 4, "apply_delay": 1, "solver": "greedy"},
    "loss_estimator": "token-fisher",  # as in the recipes
}
# How many lines of each grid are of runs that it asks for: as many as before "saliency" was the default (7b56925).
KNOWN = {"bakeoff": 165, "bakeoff-small": 37}


def write_grid(folder: Path, experiments: dict[str, Any], **training: Any) -> Path:
    """A grid of one tiny model on a text of 4,000 random words, in a file."""
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
    rng = random.Random(0)
    for name in ("train", "held-out"):
        (folder / f"{name}.txt").write_text(" ".join(rng.choice(words) for _ in range(4000)), encoding="utf-8")
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    grid = {
        "data": {
            "source": "files",
            "files": [str(folder / "train.txt")],
            "validation_files": [str(folder / "held-out.txt")],
            "sequence_length": 32,
            "validation_sequences": 8,
        },
        "tokenizer": {"vocab_size": 300},
        "models": {"tiny": {"learning_rate": 3e-3, "model": {"model_type": "llama", "config": shape}}},
        "training": {"steps": STEPS, "sequences": 4, "warmup_steps": 2, "log_every": 5, "evaluate_every": 5} | training,
        "snip": SNIP,
        "experiments": experiments,
    }
    path = folder / "grid.yaml"
    path.write_text(yaml.safe_dump(grid, sort_keys=False), encoding="utf-8")
    return path


def specs(folder: Path, *entries: dict[str, Any]) -> list[Spec]:
    return load_grid(write_grid(folder, {"shares": list(entries)})).experiments["shares"]


# ----------------------------------------------------------------------------------------------------------- the grid


def test_every_list_of_an_entry_is_a_dimension(tmp_path: Path) -> None:
    entry = {"model": "tiny", "policy": ["snip", "random"], "share": [0.5, 0.75, 0.8], "seed": [0, 1]}
    found = [(s.snip.policy, s.snip.target_fp4_fraction, s.seed) for s in specs(tmp_path, entry)]
    assert found == [(p, share, seed) for p in ("snip", "random") for share in (0.5, 0.75, 0.8) for seed in (0, 1)]


def test_a_list_of_formats_is_one_value_and_a_list_of_lists_a_dimension(tmp_path: Path) -> None:
    entry = {"model": "tiny", "policy": ["snip", "random"]}
    one = specs(tmp_path, entry | {"formats": ["nvfp4", "mxfp8"]})
    assert [spec.snip.formats for spec in one] == [("nvfp4", "mxfp8")] * 2
    several = specs(tmp_path, entry | {"formats": [["nvfp4", "mxfp8"], ["fp4", "fp8"], ["mxfp4", "mxfp8", "bf16"]]})
    assert [len(spec.snip.formats) for spec in several] == [2, 2, 3] * 2
    stages = [["model.layers.0.mlp.up_proj"], ["model.layers.1.mlp.up_proj"]]
    [staged] = specs(tmp_path, {"model": "tiny", "stages": stages})
    assert staged.snip.stages == tuple(map(tuple, stages))
    assert [spec.snip.stages for spec in specs(tmp_path, {"model": "tiny", "stages": [None, 2]})] == [None, 2]
    assert [spec.snip.ties for spec in specs(tmp_path, {"model": "tiny", "ties": []})] == [()]


def test_runs_over_other_formats_are_named_so(tmp_path: Path) -> None:
    entry = {"model": "tiny", "policy": "snip", "share": 0.75, "granularity": "gemm"}
    plain, named, other = specs(
        tmp_path, entry, entry | {"formats": ["fp4", "fp8"]}, entry | {"formats": ["nvfp4", "mxfp8"]}
    )
    grid = load_grid(write_grid(tmp_path, {}))
    assert plain.to_dict() == named.to_dict() and grid.id_of(plain) == grid.id_of(named) != grid.id_of(other)
    assert "formats" not in plain.to_dict()
    assert other.to_dict() == plain.to_dict() | {"formats": ["nvfp4", "mxfp8"]}
    assert (plain.label, other.label) == ("snip, gemm", "snip, gemm, {nvfp4, mxfp8}")


def test_runs_at_another_speed_are_named_so(tmp_path: Path) -> None:
    entry = {"model": "tiny", "policy": "snip", "share": None, "formats": ["nvfp4", "mxfp8"], "rates": "b200"}
    slow, fast = specs(tmp_path, entry | {"target_linear_speedup": [2.5, 3.0]})
    assert (slow.label, fast.label) == tuple(
        f"snip, gemm, {{nvfp4, mxfp8}}, {t} times BF16 (b200)" for t in ("2.5", "3")
    )
    assert slow.to_dict() | {"target_linear_speedup": 3.0} == fast.to_dict()


def test_shares_that_change_are_one_value_and_their_runs_have_the_mean_share(tmp_path: Path) -> None:
    """So that tables put them beside constant shares of the same mean."""
    half = STEPS // 2 + 1
    shares = [[1, 0.5], [half, 1.0]]
    mean = (0.5 * (half - 1) + 1.0 * (STEPS - half + 1)) / STEPS
    plain, changing = specs(tmp_path, {"model": "tiny", "policy": "snip", "share": [mean, shares]})
    assert changing.snip.target_fp4_fraction == ((1, 0.5), (half, 1.0))
    assert changing.to_dict() == plain.to_dict() | {"target_fp4_fraction": shares}
    assert changing.label == f"snip, gemm, 50% from step 1, 100% from step {half}"
    assert specs(tmp_path, {"model": "tiny", "policy": "snip", "share": shares}) == [changing]


def test_runs_that_decide_on_forward_gemms_alone_are_named_so(tmp_path: Path) -> None:
    entry = {"model": "tiny", "policy": ["snip", "random", "uniform-fp4"], "granularity": "gemm", "decides": "forward"}
    snip, random, uniform = specs(tmp_path, entry)
    assert (snip.label, random.label) == ("snip, gemm, forward GEMMs alone", "random, gemm, forward GEMMs alone")
    assert snip.to_dict()["decides"] == random.to_dict()["decides"] == "forward"
    assert "decides" not in uniform.to_dict()


def test_runs_with_another_form_of_the_loss_divergence_are_named_so(tmp_path: Path) -> None:
    entry = {"model": "tiny", "policy": "snip", "granularity": "gemm"}
    plain, named, other = specs(
        tmp_path, entry, entry | {"loss_estimator": "token-fisher"}, entry | {"loss_estimator": "saliency"}
    )
    grid = load_grid(write_grid(tmp_path, {}))
    assert plain.to_dict() == named.to_dict() and grid.id_of(plain) == grid.id_of(named) != grid.id_of(other)
    assert "loss_estimator" not in plain.to_dict()
    assert other.to_dict() == plain.to_dict() | {"loss_estimator": "saliency"}
    assert (plain.label, other.label) == ("snip, gemm", "snip, gemm, loss_estimator saliency")


def test_a_grid_that_names_no_form_of_the_loss_divergence_takes_the_default_and_says_so(tmp_path: Path) -> None:
    path, name = write_grid(tmp_path, {"a": [{"model": "tiny", "policy": ["snip", "greedy"]}]}), "loss_estimator"
    pinned = load_grid(path).experiments["a"]
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    del values["snip"][name]
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    grid = load_grid(path)
    snip, greedy = grid.experiments["a"]
    assert snip.snip.loss_estimator == SnipConfig().loss_estimator != pinned[0].snip.loss_estimator
    assert snip.to_dict() == pinned[0].to_dict() | {name: snip.snip.loss_estimator}
    assert grid.id_of(snip) != grid.id_of(pinned[0])
    assert (greedy.label, greedy.to_dict()) == (pinned[1].label, pinned[1].to_dict())


def test_the_form_of_the_loss_divergence_makes_no_other_run_of_a_rule(tmp_path: Path) -> None:
    entry = {"model": "tiny", "policy": ["bf16", "uniform-fp4", "random", "layer-position"]}
    plain, other = (specs(tmp_path, entry | {"loss_estimator": form}) for form in ("token-fisher", "saliency"))
    assert plain == other


def test_formats_have_no_bearing_on_a_uniform_policy(tmp_path: Path) -> None:
    entry = {"model": "tiny", "policy": "uniform-nvfp4"}
    plain, other = specs(tmp_path, entry, entry | {"formats": ["nvfp4", "mxfp8"]})
    assert plain == other


def test_a_speed_has_no_bearing_on_a_policy_without_a_target(tmp_path: Path) -> None:
    entry = {"model": "tiny", "policy": ["bf16", "snip"], "rates": "ideal", "target_linear_speedup": 2.5}
    (plain,) = specs(tmp_path, {"model": "tiny", "policy": "bf16"})
    assert specs(tmp_path, entry)[0] == plain


def test_the_seed_is_that_of_the_run_and_of_its_rounding(tmp_path: Path) -> None:
    assert [s.snip.seed for s in specs(tmp_path, {"model": "tiny", "policy": "snip", "seed": [3, 5]})] == [3, 5]


def test_settings_without_a_bearing_on_a_policy_make_no_other_run(tmp_path: Path) -> None:
    entries: list[dict[str, Any]] = [
        {"model": "tiny", "policy": "uniform-fp4", "share": [0.5, 0.75], "granularity": ["layer", "gemm"]},
        {"model": "tiny", "policy": "layer-position", "refresh_every": [4, None]},
        {"model": "tiny", "policy": "bf16", "start_step": [0, 5]},
    ]
    grid = load_grid(write_grid(tmp_path, {str(i): [entry] for i, entry in enumerate(entries)}))
    assert [len(set(ids)) for ids in grid.ids().values()] == [1, 1, 1]
    assert len(grid.runs()) == 3


def test_other_settings_and_other_training_make_other_runs(tmp_path: Path) -> None:
    entry = {"model": "tiny", "policy": "snip", "share": [0.5, 0.75], "refresh_every": [4, None], "seed": [0, 1]}
    first = load_grid(write_grid(tmp_path, {"shares": [entry]}))
    second = load_grid(write_grid(tmp_path, {"shares": [entry]}, warmup_steps=3))
    assert len(first.runs()) == len(second.runs()) == 8
    assert not first.runs().keys() & second.runs().keys()


def test_a_setting_written_out_at_its_default_names_the_same_run(tmp_path: Path) -> None:
    entry = {"model": "tiny", "policy": "snip"}
    implicit, explicit = specs(tmp_path, entry, entry | {"probe_tokens": SnipConfig().probe_tokens})
    grid = load_grid(write_grid(tmp_path, {}))
    assert grid.id_of(implicit) == grid.id_of(explicit)


@pytest.mark.parametrize("name", ["bakeoff", "bakeoff-small"])
def test_the_committed_lines_are_of_runs_of_their_grid(name: str) -> None:
    lines = read_runs(ROOT / "eval" / "results" / f"{name}.jsonl")
    runs = load_grid(ROOT / "recipes" / f"{name}.yaml").runs()
    assert len(lines) > 30
    assert {line["id"] for line in lines} <= runs.keys()
    settings = ("policy", "objective", "loss_divergence_factor", "weight_divergence_factor", "refresh_every")
    for line in lines:
        spec = runs[line["id"]].to_dict()
        assert [line["spec"][key] for key in settings] == [spec[key] for key in settings]


def test_a_run_in_two_experiments_is_one_run(tmp_path: Path) -> None:
    entry = {"model": "tiny", "policy": "bf16", "seed": [0, 1]}
    grid = load_grid(write_grid(tmp_path, {"a": [entry], "b": [entry | {"seed": [1, 2]}]}))
    assert len(grid.runs()) == 3
    assert grid.ids()["a"][1] == grid.ids()["b"][0]
    assert list(load_grid(tmp_path / "grid.yaml", only=["b"]).runs()) == grid.ids()["b"]


def test_rules_count_cost_as_snip_does(tmp_path: Path) -> None:
    measured = {
        "model": "tiny",
        "budget": "measured",
        "timing_tokens": 128,
        "policy": ["snip", "layer-position", "bf16"],
    }
    found = [(spec.snip.budget, spec.snip.timing_tokens) for spec in specs(tmp_path, measured)]
    assert found == [("measured", 128), ("measured", 128), ("flops", None)]


def test_a_run_that_starts_late_probes_at_once(tmp_path: Path) -> None:
    [late] = specs(tmp_path, {"model": "tiny", "policy": "snip", "start_step": 7})
    assert late.snip.first_refresh == 8


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"model": "huge"}, "experiments.shares: model='huge' is not in the grid; its models are tiny."),
        ({"model": "tiny", "start_step": STEPS}, "experiments.shares: start_step=12 is outside 0..11"),
        ({"model": "tiny", "polcy": "bf16"}, "Unknown SnipConfig field 'polcy'"),
    ],
)
def test_what_is_wrong_in_an_entry_is_named(tmp_path: Path, entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        specs(tmp_path, entry)
    assert str(caught.value).startswith(message)


def test_an_unknown_section_or_experiment_is_named(tmp_path: Path) -> None:
    path = write_grid(tmp_path, {"shares": []})
    with pytest.raises(ValueError, match="unknown key 'eval'"):
        load_grid(path, ["eval=1"])
    with pytest.raises(KeyError, match="No experiment 'sahres' in the grid; it has shares"):
        load_grid(path, only=["sahres"])


@pytest.mark.parametrize(
    ("override", "message"),
    [("data.streaming=true", "data.streaming=true has no use"), ("tokenizer.vocab_size=null", "tokenizer: give name")],
)
def test_text_that_no_run_could_read_is_refused(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_grid(write_grid(tmp_path, {"shares": []}), [override])


def test_experiments_that_are_not_asked_for_or_null_are_not_looked_at(tmp_path: Path) -> None:
    path = write_grid(tmp_path, {"wrong": [{"model": "tiny", "start_step": 99}], "right": [{"model": "tiny"}]})
    assert len(load_grid(path, only=["right"]).runs()) == len(load_grid(path, ["experiments.wrong=null"]).runs()) == 1


@pytest.mark.parametrize("name", ["bakeoff", "bakeoff-small"])
def test_committed_lines_are_those_of_runs_of_the_committed_grids(name: str) -> None:
    ids = {line["id"] for line in read_lines(ROOT / "eval" / "results" / f"{name}.jsonl")}
    assert ids and ids <= load_grid(ROOT / "recipes" / f"{name}.yaml").runs().keys()


@pytest.mark.parametrize("name", KNOWN)
def test_a_new_default_of_the_form_of_the_loss_divergence_renamed_no_run(name: str) -> None:
    """Lines with "token-fisher" are not taken for runs with "saliency", and no run that has a line is run again."""
    lines = {line["id"] for line in read_lines(ROOT / "eval" / "results" / f"{name}.jsonl")}
    runs = load_grid(ROOT / "recipes" / f"{name}.yaml").runs()
    assert len(lines & runs.keys()) == KNOWN[name]
    forms = {spec.snip.loss_estimator for spec in runs.values() if spec.snip.policy == "snip"}
    assert forms == {"token-fisher"} != {SnipConfig().loss_estimator}


@pytest.mark.parametrize("name", ["bakeoff.yaml", "bakeoff-small.yaml"])
def test_the_recipes_are_grids(name: str) -> None:
    grid = load_grid(ROOT / "recipes" / name)
    assert len(grid.runs()) >= 24
    assert all("bf16" in {spec.snip.policy for spec in found} for found in grid.experiments.values())


# --------------------------------------------------------------------------------------------------------- one run


def text_of(grid: Grid, folder: Path) -> Text:
    prepare_text(grid, folder)
    return load_text(grid, folder)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Grid, Path]:
    """A grid and a folder with its text."""
    folder = tmp_path_factory.mktemp("tiny")
    return load_grid(write_grid(folder, {"shares": [{"model": "tiny", "policy": "bf16"}]})), folder


def run_of(tiny: tuple[Grid, Path], policy: str, **changes: Any) -> Run:
    grid, folder = tiny
    config = SnipConfig(policy=policy, target_fp4_fraction=0.75, granularity="gemm", **SNIP)
    [spec] = grid.experiments["shares"]
    spec = replace(spec, snip=config, **changes)
    section = grid.models["tiny"].model
    return Run(spec, section, grid.training, text_of(grid, folder), torch.device("cpu"), folder / "state.pt")


def test_runs_of_a_seed_start_from_the_same_weights_and_see_the_same_sequences(tiny: tuple[Grid, Path]) -> None:
    first, second, other = run_of(tiny, "bf16"), run_of(tiny, "snip"), run_of(tiny, "bf16", seed=1)
    for ours, theirs in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert np.array_equal(first._order, second._order)
    assert first._order.shape == (STEPS, 4)
    assert not np.array_equal(first._order, other._order)


def test_the_same_run_twice_gives_the_same_line(tiny: tuple[Grid, Path]) -> None:
    first, second = (run_of(tiny, "snip").train() for _ in range(2))
    for name in ("loss", "training_curve", "validation_curve", "plans", "fp4_fraction"):
        assert first[name] == second[name]


@pytest.mark.parametrize("start", [3, 5, 7])  # before, at and after a point of the curve
def test_what_is_trained_before_the_start_is_the_unquantized_run(
    tiny: tuple[Grid, Path], tmp_path: Path, start: int
) -> None:
    whole, run = run_of(tiny, "bf16").train(), run_of(tiny, "bf16", start_step=start)
    run._state = tmp_path / "state.pt"
    late = run.train()
    assert late["loss"] == whole["loss"]
    assert late["tokens"] == whole["tokens"] == STEPS * 4 * 32


def test_states_of_other_training_text_or_steps_have_other_names(tmp_path: Path) -> None:
    entry = {"model": "tiny", "policy": ["snip", "uniform-fp4"], "start_step": [3, 5], "seed": [0, 1]}
    grids = [load_grid(write_grid(tmp_path, {"shares": [entry]}, **other)) for other in ({}, {"weight_decay": 0.9})]
    grids.append(load_grid(tmp_path / "grid.yaml", ["data.sequence_length=16"]))
    names = [{grid.state_of(spec) for spec in grid.experiments["shares"]} for grid in grids]
    assert [len(found) for found in names] == [4, 4, 4]  # whatever the policy
    assert len(set.union(*names)) == 12


def test_nothing_starts_from_a_state_that_diverged(tiny: tuple[Grid, Path], tmp_path: Path) -> None:
    run = run_of(tiny, "snip", start_step=7, seed=9)
    run._state = tmp_path / "state.pt"
    run.model.get_input_embeddings().weight.data[:] = math.inf
    with pytest.raises(ValueError, match="The unquantized training diverged before step 7"):
        run.train()
    assert not run._state.exists()


def test_a_late_start_quantizes_from_there_on(tiny: tuple[Grid, Path]) -> None:
    run = run_of(tiny, "snip", start_step=7)
    line = run.train()
    assert len(run.losses) == STEPS - 7
    assert [plan["step"] for plan in line["plans"]][:1] == [7]
    assert line["fp4_fraction"] >= 0.75
    assert [step for step, _ in line["training_curve"]] == [12]


def test_a_line_holds_losses_plans_and_costs(tiny: tuple[Grid, Path]) -> None:
    run = run_of(tiny, "snip")
    line = run.train()
    assert line["loss"]["plan"] != line["loss"]["high_precision"]
    assert [step for step, _ in line["training_curve"]] == [5, 10, 12]
    assert line["training_curve"][0][1] == pytest.approx(statistics.fmean(run.losses[:5]), abs=1e-6)
    assert [step for step, _ in line["validation_curve"]] == [5, 10]
    # Probed at 3, 7 and 11 and applied one step later; each plan in its three letters per layer.
    assert [plan["step"] for plan in line["plans"]] == [0, 4, 8, 12]
    assert len(line["refresh_seconds"]) == 3 and min(line["refresh_seconds"]) > 0
    assert {len(plan["formats"]) for plan in line["plans"]} == {3 * len(line["layers"])} == {3 * 7}
    assert set(line["plans"][0]["formats"]) == {"8"} and set(line["plans"][-1]["formats"]) == {"4", "8"}
    assert not line["diverged"] and line["kept"] == []


def test_a_line_of_five_formats_names_them_and_their_shares(tiny: tuple[Grid, Path]) -> None:
    formats = ("nvfp4", "mxfp4", "mxfp6", "mxfp8", "bf16")
    run = run_of(tiny, "snip")
    budget = {"target_fp4_fraction": None, "target_linear_speedup": 2.0, "rates": "b200"}
    run.spec = replace(run.spec, snip=SnipConfig(formats=formats, granularity="gemm", **budget, **SNIP))
    line = run.train()
    assert set(line["letters"]) >= set(line["shares"]) and set(line["letters"]) <= set(formats)
    assert sum(line["shares"].values()) == pytest.approx(1, abs=1e-5)
    by_letter = {letter: name for name, letter in line["letters"].items()}
    last = [by_letter[letter] for letter in line["plans"][-1]["formats"]]
    assert set(last) == set(line["shares"])
    assert line["fp4_fraction"] == pytest.approx(sum(line["shares"].get(n, 0.0) for n in ("nvfp4", "mxfp4")), abs=1e-5)


def test_the_validation_loss_is_the_mean_over_all_held_out_sequences(tiny: tuple[Grid, Path]) -> None:
    run = run_of(tiny, "bf16")
    ids = torch.from_numpy(run.text.validation.astype(np.int64))
    logits = run.model(input_ids=ids).logits[:, :-1].double()
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    assert run.evaluate() == pytest.approx(wanted.item(), rel=1e-6)
    assert run.model.training


def test_a_run_whose_loss_is_no_longer_finite_ends_there_as_diverged(tiny: tuple[Grid, Path]) -> None:
    run = run_of(tiny, "bf16")
    run.model.get_input_embeddings().weight.data[:] = math.inf
    line = run.train()
    assert line["diverged"] and line["loss"] == {"plan": None, "high_precision": None}
    assert len(run.losses) == 5 and line["training_curve"] == []
    json.dumps(line, allow_nan=False)


def test_a_loss_that_ends_far_above_its_lowest_has_diverged() -> None:
    assert not ends_above_its_lowest([(1, 9.0), (2, 5.0), (3, 5.4)])
    assert ends_above_its_lowest([(1, 9.0), (2, 5.0), (3, 5.6)])
    assert ends_above_its_lowest([(1, 9.0), (2, 5.0), (3, math.nan)])
    assert not ends_above_its_lowest([])


def test_spikes_are_jumps_far_above_the_steps_before() -> None:
    noise = [3.0 + 0.01 * (-1) ** step for step in range(120)]
    assert count_spikes(noise) == 0
    # Deviation 0.01, so a spike is above 3.06; two steps in a row are one.
    assert count_spikes(noise[:60] + [3.05] + noise[60:]) == 0
    assert count_spikes(noise[:60] + [3.07] + noise[60:]) == 1
    assert count_spikes(noise[:60] + [4.0, 4.5] + noise[60:]) == 1
    assert count_spikes([*noise[:60], math.nan]) == 1
    assert count_spikes([9.0, *noise[:40]]) == 0  # fewer steps before it than are asked for


# ----------------------------------------------------------------------------------------------------- the command


def command(folder: Path, path: Path, *more: str) -> int:
    return main(["run", str(path), "--output", str(folder / "runs.jsonl"), "--cache", str(folder / "cache"), *more])


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Workers are calls instead of processes, which take seconds for their imports."""
    monkeypatch.setattr(runner.os, "getppid", os.getpid)
    monkeypatch.setattr(runner.mp, "start_processes", lambda work, arguments, **_: work(0, *arguments))
    # A worker sets it for good.
    with torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit):
        yield


@pytest.mark.slow
def test_an_interrupted_bake_off_goes_on_with_what_is_missing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    grid = write_grid(tmp_path, {"shares": [{"model": "tiny", "policy": ["bf16", "uniform-fp4"], "seed": [0, 1]}]})
    assert command(tmp_path, grid, "--commit", "abc", "--workers", "2") == 0
    output = tmp_path / "runs.jsonl"
    lines = read_lines(output)
    assert sorted(line["label"] for line in lines) == ["bf16", "bf16", "uniform-fp4", "uniform-fp4"]
    assert {line["commit"] for line in lines} == {"abc"} and lines[0]["device"]
    assert {line["command"] for line in lines} == {f"python -m eval.bakeoff run {grid} --output runs/grid.jsonl"}
    assert sorted(line["id"] for line in lines) == sorted(load_grid(grid).runs())
    kept = output.read_text(encoding="utf-8").splitlines(keepends=True)
    output.write_text("".join(kept[:3]) + kept[3][:50], encoding="utf-8")
    capfd.readouterr()
    request.getfixturevalue("in_this_process")
    assert command(tmp_path, grid) == 0
    assert "4 runs, 3 of them done, 1 to do" in (out := capfd.readouterr().out)
    assert "0 runs failed, 0 have no line yet" in out
    again = read_lines(output)
    assert [line["id"] for line in again] == [line["id"] for line in lines]
    assert again[3]["loss"] == lines[3]["loss"]
    assert command(tmp_path, grid) == 0
    assert read_lines(output) == again


def test_a_run_that_fails_is_reported_and_the_others_are_trained(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], in_this_process: None
) -> None:
    grid = write_grid(
        tmp_path,
        {"shares": [{"model": "tiny", "policy": ["uniform-fp8", "bf16"], "skip_modules": [["*"]]}]},
    )
    assert command(tmp_path, grid) == 1
    found = capfd.readouterr()
    assert "uniform-fp8" in found.err and "Traceback" in found.err
    assert "1 runs failed, 1 have no line yet" in found.out
    assert [line["label"] for line in read_lines(tmp_path / "runs.jsonl")] == ["bf16"]


def test_no_run_is_started_after_the_time_given(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], in_this_process: None
) -> None:
    grid = write_grid(tmp_path, {"shares": [{"model": "tiny", "policy": "bf16", "seed": [0, 1]}]})
    assert command(tmp_path, grid, "--minutes", "0") == 0
    assert "0 runs failed, 2 have no line yet" in capfd.readouterr().out


def test_a_report_on_lines_that_are_not_there_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = write_grid(tmp_path, {"shares": [{"model": "tiny", "policy": "bf16"}]})
    assert main(["report", str(grid), str(tmp_path / "typo.jsonl"), "--output", str(tmp_path / "out")]) == 1
    assert "typo.jsonl does not exist" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_report_on_lines_of_other_runs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = write_grid(tmp_path, {"shares": [{"model": "tiny", "policy": "bf16"}]})
    (tmp_path / "other.jsonl").write_text('{"id": "x", "spec": {}}\n', encoding="utf-8")
    assert main(["report", str(grid), str(tmp_path / "other.jsonl"), "--output", str(tmp_path / "out")]) == 1
    assert "None of the 1 lines is of a run of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tasks", "folder", "message"),
    [
        ([], None, "benchmarks: got no task; expected some of arc_easy"),
        (["arc_eesy"], None, "benchmarks: got ['arc_eesy']; expected some of arc_easy"),
        (["arc_easy"], "missing", "missing is not a folder"),
    ],
)
def test_benchmarks_that_cannot_run_are_refused_before_anything_is_trained(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], tasks: list[str], folder: str | None, message: str
) -> None:
    grid = write_grid(tmp_path, {"shares": [{"model": "tiny", "policy": "bf16", "benchmarks": True}]})
    data = [] if folder is None else ["--data-dir", str(tmp_path / folder)]
    assert command(tmp_path, grid, *data, "--override", f"benchmarks={tasks}") == 1
    assert message in capfd.readouterr().err
    assert not (tmp_path / "runs.jsonl").exists()


@pytest.mark.slow
def test_workers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    grid = write_grid(tmp_path, {"shares": [{"model": "tiny", "policy": "bf16", "seed": list(range(50))}]})
    output = tmp_path / "runs.jsonl"
    arguments = ["run", str(grid), "--output", str(output), "--cache", str(tmp_path / "cache")]
    process = subprocess.Popen(
        [sys.executable, "-m", "eval.bakeoff", *arguments],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while len(read_lines(output)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert workers and not alive
    assert 2 <= len(read_lines(output)) < 50


def test_a_wrong_grid_ends_with_its_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = write_grid(tmp_path, {"shares": [{"model": "huge"}]})
    assert command(tmp_path, grid) == 1
    assert capsys.readouterr().err.startswith("error: experiments.shares: model='huge'")


def test_scores_leave_out_the_members_of_groups_and_their_failure_costs_no_run(
    tiny: tuple[Grid, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    score = dict.fromkeys(one_run._SCORE_FIELDS, 1) | {"group": None, "task": "mmlu", "versions": {}}
    run, options = run_of(tiny, "bf16"), _parser().parse_args(["run", "g", "--output", "o"])
    monkeypatch.setattr(one_run, "evaluate", lambda *_, **__: [score, score | {"group": "mmlu", "task": "mmlu_law"}])
    assert one_run._benchmarks(run, tiny[0], options) == [
        {name: value for name, value in score.items() if name != "versions"}
    ]
    monkeypatch.setattr(one_run, "evaluate", lambda *_, **__: 1 / 0)
    assert one_run._benchmarks(run, tiny[0], options) is None
    assert "benchmarks of bf16: failed" in capsys.readouterr().err
    assert not runner._is_done({"benchmarks": None}, benchmarked=True)
