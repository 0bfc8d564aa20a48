"""Models that transformers, Accelerate or DeepSpeed share out among two GPUs, over NCCL.

These are the runs of test_distributed_config.py and test_zero3.py, and what CPUs cannot run: torch's ring attention,
offloading, compiled layers on the kernels of the default formats. All scripts run at once, since each start takes half
a minute. A GPU sums in another order when a rank has half of the rows or of a weight, so a number next to a rounding
threshold may be rounded to its other neighbour: bounds are wider than on CPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from comparing import LOSS, WEIGHT, distance, equal_share, errors, read_run
from rank_runs import OnTwoGpus, on_two_gpus
from run_distributed_config import COMPILED, ONCE, TRAINS_SHARDED, UNIFORM, WHY_NOT, save_mixture, save_model
from run_parallelism_config import RUNS
from run_zero3 import SAVED
from run_zero3 import STEPS as ZERO3_STEPS
from tiny_runs import differing

pytestmark = on_two_gpus

_needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
_needs_trainer = pytest.mark.skipif(not TRAINS_SHARDED, reason=WHY_NOT)
SPLITS = ("tp", "tp-tokens", "tp-ep")
LOOPS = ("fsdp", "offloaded", *SPLITS)
TRAINERS = ("trainer-tp", *(["trainer-fsdp"] if TRAINS_SHARDED else []))
Configs = dict[str, OnTwoGpus]
"""Name of a compiled run -> its script; "" -> that of a model's other runs."""


class Started(NamedTuple):
    """The scripts, each with its runs."""

    config: Configs
    accelerate: OnTwoGpus
    zero3: OnTwoGpus | None


def start(folder: Path, script: str, *words: str, save: Callable[[Path], None] = save_model) -> OnTwoGpus:
    save(folder)
    return OnTwoGpus(folder, script, *words)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Configs:
    """Starts the scripts of a model with experts."""
    new, script = tmp_path_factory.mktemp, "run_distributed_config.py"
    words = {"": ("one", "tp-ep", "ddp", "trainer-tp-ep"), "compiled-tp-ep": ("compiled-tp-ep",)}
    return {name: start(new("experts"), script, *words[name], save=save_mixture) for name in words}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, experts: Configs) -> Started:
    """Starts everything at once."""
    new, script = tmp_path_factory.mktemp, "run_distributed_config.py"
    words = {"": ("one", "fsdp", "tp", "offloaded", "ddp", *TRAINERS)}
    words |= {name: (name,) for name in ("compiled-fsdp", "compiled-tp")}
    words["tp-tokens"] = ("one", "tp-tokens")  # a script has one run for each of its folder's names
    return Started(
        {name: start(new("config"), script, *words[name]) for name in words},
        start(new("accelerate"), "run_parallelism_config.py", *RUNS),
        start(new("zero3"), "run_zero3.py") if find_spec("deepspeed") else None,
    )


@pytest.fixture
def config(request: pytest.FixtureRequest, name: str) -> OnTwoGpus:
    """Returns the script that makes the run of this name."""
    is_mixture = name.endswith("ep")
    found: Configs = request.getfixturevalue("experts") if is_mixture else request.getfixturevalue("started").config
    return found[name if name in found else ""]


@pytest.fixture(scope="module")
def zero3(started: Started) -> OnTwoGpus:
    assert started.zero3 is not None
    return started.zero3


def assert_alike(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Compares plans, divergences and losses of two runs that probed in their first step."""
    assert {fmt for row in theirs["plan"].values() for fmt in row.values()} == {"fp4", "fp8"}
    assert equal_share([ours["plan"]], [theirs["plan"]]) > 0.9
    assert list(ours["tables"]) == list(theirs["tables"]) == [1]
    for column, bound in ((LOSS, 1e-3), (WEIGHT, 2e-2)):
        found = errors(ours["tables"][1], theirs["tables"][1], column)
        assert max(found) < bound, sorted(found)
    assert ours["losses"][0] == pytest.approx(theirs["losses"][0], rel=1e-5)
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-2)


@pytest.mark.parametrize("name", LOOPS)
def test_two_gpus_that_share_a_model_plan_and_lose_as_one(config: OnTwoGpus, name: str) -> None:
    theirs = config["one"][0]["probed"]
    first, second = config[name]
    assert "DTensor" in first["kinds"] and first["plan"] == second["plan"]
    assert first["losses"] == second["losses"]
    assert_alike(first, theirs)


@pytest.mark.parametrize("name", [name for name in LOOPS if name not in ONCE])
def test_a_resumed_loop_is_the_uninterrupted_one_to_the_bit(config: OnTwoGpus, name: str) -> None:
    for whole, again in zip(config[name], config[f"{name}-resumed"], strict=True):
        assert 0 < len(again["losses"]) < len(whole["losses"])
        assert again["losses"] == whole["losses"][-len(again["losses"]) :]
        assert again["plan"] == whole["plan"]
        assert differing(again["weights"], whole["weights"]) == []


@pytest.mark.parametrize("fmt", UNIFORM)
@pytest.mark.parametrize("name", SPLITS)
def test_losses_of_a_split_model_are_those_of_one_gpu(config: OnTwoGpus, fmt: str) -> None:
    first, second = config["one"][0][fmt]["losses"]
    for found in config[fmt]:
        assert found["losses"][0] == pytest.approx(first, rel=1e-5)
        # FP4 rounds gradients stochastically, by other numbers in parts of a weight's output features, and in experts.
        assert found["losses"][1] == pytest.approx(second, rel=1e-3 if fmt == "fp8" else 5e-3)


@pytest.mark.parametrize("name", SPLITS)
def test_ranks_that_split_a_model_and_see_different_data_are_refused_together(config: OnTwoGpus) -> None:
    assert all("got different micro-batches" in refusal for refusal in config["disagreeing"])


@pytest.mark.parametrize("name", ["trainer-tp", pytest.param("trainer-fsdp", marks=_needs_trainer), "trainer-tp-ep"])
def test_the_trainer_plans_for_a_shared_model_as_under_ddp(config: OnTwoGpus, name: str) -> None:
    for ours, theirs in zip(config[name], config["ddp"], strict=True):
        assert "DTensor" in ours["kinds"] and theirs["kinds"] == {"Tensor"}
        assert equal_share([ours["plan"]], [theirs["plan"]]) > 0.9
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-2)
    assert_alike(config[name][0], config["ddp"][0])


@pytest.mark.parametrize("name", ["compiled-fsdp", "compiled-tp", "compiled-tp-ep"])
def test_compiled_layers_of_a_shared_model_lose_as_uncompiled_ones(config: OnTwoGpus, name: str) -> None:
    """A compiled graph keeps numbers in FP32 that are rounded to BF16 (by up to 0.4%) between single operations. On
    CPUs losses differed by up to 0.03%."""
    for ours, theirs in zip(config[name], config[name.replace("compiled", "plain")], strict=True):
        assert ours["backend"] == theirs["backend"]
        if torch.cuda.get_device_capability() >= (8, 9):
            assert ours["backend"] == "tensor-scaled"
        assert {fmt for row in ours["plan"].values() for fmt in row.values()} == set(COMPILED["formats"])
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=4e-3)
        assert ours["losses"][-1] < ours["losses"][0] - 1


@pytest.mark.parametrize("name", ["dp-shard", "tp"])
def test_models_under_accelerates_parallelism_plan_and_lose_as_under_ddp(started: Started, name: str) -> None:
    first, second = started.accelerate[name]
    assert "DTensor" in first["kinds"] and first["plan"] == second["plan"]
    assert_alike(first, started.accelerate["ddp"][0])


def test_the_trainer_plans_and_loses_with_offloading_as_without_it(started: Started) -> None:
    offloaded, sharded = started.accelerate["offloaded"], started.accelerate["sharded"]
    for ours, theirs in zip(offloaded, sharded, strict=True):
        assert ours["policies"] == {"CPUOffloadPolicy"} and theirs["policies"] == {"OffloadPolicy"}
        assert equal_share([ours["plan"]], [theirs["plan"]]) > 0.9
    assert_alike(offloaded[0], sharded[0])


def test_offloaded_weights_train_on_the_same_kernels(started: Started) -> None:
    for ours, theirs in zip(started.accelerate["offloaded-rule"], started.accelerate["sharded-rule"], strict=True):
        assert ours["backend"] == theirs["backend"] and ours["plan"] == theirs["plan"]
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-2)
        assert ours["losses"][-1] < ours["losses"][0] - 1


def test_context_parallelism_trains_under_a_policy_without_a_probe(started: Started) -> None:
    """The formats change losses by less than 1%, as on one process."""
    for ours, theirs in zip(started.accelerate["cp-rule"], started.accelerate["cp-plain"], strict=True):
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=2e-2)
        assert ours["losses"][-1] < ours["losses"][0] - 1


def test_ranks_with_parts_of_sequences_plan_and_lose_as_one_gpu(started: Started) -> None:
    theirs = started.accelerate["one"][0]
    first, second = started.accelerate["cp"]
    assert first["plan"] == second["plan"] and first["losses"] == second["losses"]
    assert_alike(first, theirs)


def test_a_loop_on_parts_of_sequences_goes_on_from_a_checkpoint(started: Started) -> None:
    """Not to the bit: the backward pass of torch's attention adds in no fixed order."""
    for whole, again in zip(started.accelerate["cp-loop"], started.accelerate["cp-loop-resumed"], strict=True):
        assert 0 < len(again["losses"]) < len(whole["losses"])
        assert again["losses"] == pytest.approx(whole["losses"][-len(again["losses"]) :], rel=1e-2)
        assert equal_share([again["plan"]], [whole["plan"]]) > 0.9


@_needs_deepspeed
def test_until_the_first_plan_zero3_differs_in_nothing_from_a_run_without_snip(zero3: OnTwoGpus) -> None:
    for ours, theirs in zip(zero3["zero3"], zero3["plain"], strict=True):
        assert [ours["losses"][step] for step in (1, 2)] == [theirs["losses"][step] for step in (1, 2)]
        assert ours["losses"][3] != theirs["losses"][3]


@_needs_deepspeed
def test_zero3_plans_and_loses_as_zero2(zero3: OnTwoGpus) -> None:
    for ours, theirs in zip(zero3["zero3"], zero3["zero2"], strict=True):
        assert equal_share([ours["plan"]], [theirs["plan"]]) > 0.9
        assert ours["coverage"] == theirs["coverage"] is not None
        for step, losses in theirs["losses"].items():
            assert ours["losses"][step] == pytest.approx(losses, rel=1e-2)
        # A twentieth of one of Adam's steps, 1e-2, relative to weights of 0.02.
        assert distance(ours["weights"], theirs["weights"]) < 0.025
    tables = [read_run(zero3.folder / name / "snip")[2] for name in ("zero3", "zero2")]
    for column, bound in ((LOSS, 1e-3), (WEIGHT, 2e-2)):
        assert max(errors(tables[0][1], tables[1][1], column)) < bound


@_needs_deepspeed
def test_zero3_that_is_resumed_in_the_middle_of_a_refresh_ends_with_the_same_bits(zero3: OnTwoGpus) -> None:
    for whole, resumed in zip(zero3["zero3"], zero3["resumed"], strict=True):
        for step in range(SAVED + 1, ZERO3_STEPS + 1):
            assert resumed["losses"][step] == whole["losses"][step]
        assert differing(resumed["weights"], whole["weights"]) == []
        assert resumed["plan"] == whole["plan"]


@_needs_deepspeed
def test_zero3_trains_by_rules_and_probes_models_that_are_built_in_parts(zero3: OnTwoGpus) -> None:
    first, second = zero3["in parts"]
    assert len(set(map(str, first["plan"].values()))) > 1
    assert first["plan"] == second["plan"]
    for rule, probed in zip(zero3["rule"], zero3["zero3"], strict=True):
        assert rule["coverage"] == probed["coverage"]
