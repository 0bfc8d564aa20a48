"""A pipeline of four stages on two processes finds what one process with the whole model finds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import LOSS, WEIGHT, errors, read_run, share_below
from configs import fp4_config
from own_loop import take_steps
from pipeline_case import CHUNKS, CONFIG, STAGES, STEPS, batch_of
from rank_processes import RECIPES, assert_succeeded, start_ranks
from transformers import LlamaConfig, LlamaForCausalLM

from snip_hf import SnipController

pytestmark = pytest.mark.slow

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def one(pipeline: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of one process that starts from the stages' weights."""
    model = LlamaForCausalLM(LlamaConfig(**pipeline[0]["model_config"]))
    model.load_state_dict({name: tensor for found in pipeline for name, tensor in found["weights"].items()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    folder = tmp_path_factory.mktemp("one")
    controller = SnipController(model, optimizer, fp4_config(**CONFIG), output_dir=folder)
    losses = take_steps(model, optimizer, controller, map(batch_of, range(1, STEPS + 1)))
    controller.close()
    _, probe_losses, tables = read_run(folder / "snip")
    return {"plan": controller.plan, "losses": losses, "probe_loss": probe_losses[1], "table": tables[1]}


def test_the_table_is_that_of_one_process(pipeline: Ranks, one: dict[str, Any]) -> None:
    ours, theirs = pipeline[0], one
    assert list(ours["table"]) == list(theirs["table"])
    assert len(ours["table"]) == 56 * 4 * 2
    assert ours["probe_loss"] == pytest.approx(theirs["probe_loss"], rel=1e-6)
    for column in (LOSS, WEIGHT):
        found = errors(ours["table"], theirs["table"], column)
        assert share_below(1e-5, found) > 0.9
        assert max(found) < 1e-3


def test_the_plan_is_that_of_one_process_and_every_process_has_its_layers_part_in_force(
    pipeline: Ranks, one: dict[str, Any]
) -> None:
    in_force: dict[str, dict[str, str]] = {}
    for found in pipeline:
        assert found["plan"] == {name: dict(row) for name, row in one["plan"].assignment.items()}
        assert not in_force.keys() & found["in_force"].keys()
        in_force |= found["in_force"]
    assert in_force == pipeline[0]["plan"]
    assert {"fp4", "fp8"} == {fmt for row in in_force.values() for fmt in row.values()}


def test_noise_goes_through_all_stages(pipeline: Ranks) -> None:
    table = pipeline[0]["noise table"]
    whole = [row for key, row in table.items() if key.split()[1] == "layer"]
    assert len(whole) == 56 * 2 and all(row[LOSS] > 0 < row[WEIGHT] for row in whole)
    plans = [found["noise plan"] for found in pipeline]
    assert plans[0] == plans[1] and len(plans[0]) == 56
    assert {name for row in plans[0].values() for name in row.values()} == {"fp8", "fp4"}


def test_losses_are_those_of_one_process(pipeline: Ranks, one: dict[str, Any]) -> None:
    assert pipeline[0]["losses"] == [None] * STEPS  # only the last stage knows them
    ours = pipeline[1]["losses"]
    assert ours[:2] == pytest.approx(one["losses"][:2], rel=1e-5)  # up to flips of FP8
    # From then on in FP4, whose random numbers are the chunks' own.
    assert ours[2] == pytest.approx(one["losses"][2], rel=1e-3)


def test_every_stage_attains_the_share_by_itself(pipeline: Ranks) -> None:
    for found in pipeline:
        assert len(found["stages"]) == len(found["shares"]) == STAGES
        assert min(found["shares"]) >= CONFIG["target_fp4_fraction"]
    names = [{layer.split(".")[2] for layer in stage} for stage in pipeline[0]["stages"]]
    assert names == [{"0", "1"}, {"2", "3"}, {"4", "5"}, {"6", "7"}]
    for rank, found in enumerate(pipeline):  # a process holds two stages that are not neighbours
        held = {layer.split(".")[2] for layer in found["in_force"]}
        assert held == names[rank] | names[rank + 2]


def test_chunks_of_the_same_tokens_are_rounded_with_other_random_numbers(pipeline: Ranks) -> None:
    chunks = pipeline[1]["chunks"]
    assert [len(chunks[fmt]) for fmt in ("fp8", "fp4")] == [CHUNKS, CHUNKS]
    first, *others = chunks["fp8"]  # rounds to nearest
    assert all(torch.equal(first, other) for other in others)
    for index, chunk in enumerate(chunks["fp4"]):
        assert not any(torch.equal(chunk, other) for other in chunks["fp4"][:index])


def test_a_pattern_to_skip_may_name_layers_of_one_process_only(pipeline: Ranks) -> None:
    for found in pipeline:
        assert isinstance(found["skipping"], list), found["skipping"]
        assert len(found["skipping"]) == 49
        assert not any(name.startswith("model.layers.7.") for name in found["skipping"])


def test_the_recipe_trains_every_stage_at_the_share(tmp_path: Path) -> None:
    ended = start_ranks(RECIPES / "pipeline.py", "--steps", 12, "--output", tmp_path, folder=tmp_path)
    assert_succeeded(ended)
    assert not any("torchao" in log for log in ended.logs)
    first, last = map(float, re.findall(r"^loss (\S+) -> (\S+)$", ended.logs[1], re.MULTILINE)[0])
    assert last < first
    shares = re.findall(r"(\d+\.\d)%", ended.logs[0].partition("FP4 share per stage: ")[2])
    assert len(shares) == 4 and min(map(float, shares)) >= 75
