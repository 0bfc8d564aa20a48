"""Do a fork's numbers depend on nothing that its process did before, and do forks share what is compiled?"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small_forks import BF16, CPU, SNIP, StandIn, random_text, write_recipe
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit

from eval.bakeoff.compiling import compile_layers, compile_parts
from eval.bakeoff.fork_base import Trainee, state_path, train_base
from eval.bakeoff.fork_cells import Contender, Fork
from eval.bakeoff.fork_lines import origin
from eval.bakeoff.fork_recipe import ForkRecipe, ForkRun, load_recipe
from eval.bakeoff.fork_run import run_fork
from eval.bakeoff.fork_shifts import Shift
from eval.bakeoff.fork_workers import OwnTrainee, _Once, _OwnPace
from snip_hf.kernels.hopper.backend import HOPPER

TRAINING = {"learning_rate": 3e-3, "steps": 20, "sequences": 4, "warmup_steps": 2}
START = Fork(base_seed=0, point=3, data_seed=0)
LATER = Fork(base_seed=0, point=6, data_seed=0)
REFRESHING = Contender(None, "all", SNIP | {"refresh_every": 2})
RANDOM = Contender(None, "all", SNIP | {"policy": "random"})
TEXT = random_text(60)


def based(folder: Path, **training: Any) -> ForkRecipe:
    """A recipe whose base is trained."""
    recipe = load_recipe(write_recipe(folder, [{"format": "bf16"}], training=TRAINING | training))
    train_base(recipe, TEXT, 0, CPU, folder)
    return recipe


def ran(
    recipe: ForkRecipe, folder: Path, contender: Contender, fork: Fork, trainee: Trainee | None = None
) -> dict[str, Any]:
    """What the line of a fork of four steps says, without times."""
    run = ForkRun(contender, fork, {4: "id"})
    ((_, found),) = run_fork(recipe, TEXT, run, CPU, folder, None, trainee)
    return {name: value for name, value in found.items() if name != "seconds"}


# ------------------------------------------------------------------------------------------------------------- reused


@pytest.mark.parametrize(
    "contender",
    [
        Contender("nvfp4", "all", {}),
        *(pytest.param(one, marks=pytest.mark.slow) for one in (BF16, REFRESHING, RANDOM)),
    ],
    ids=lambda one: one.name,
)
def test_a_fork_gives_the_same_bits_first_and_after_others_in_its_process(tmp_path: Path, contender: Contender) -> None:
    recipe = based(tmp_path)
    alone = ran(recipe, tmp_path, contender, START)
    trainee = Trainee(recipe, TEXT, CPU, 7)
    shift = Shift(name="faster", after=2, learning_rate=8.0)
    for other, fork in (
        (Contender("fp4", "all", {}), LATER),
        (Contender(None, "all", SNIP), Fork(base_seed=0, point=3, data_seed=1, shift=shift)),
    ):
        ran(recipe, tmp_path, other, fork, trainee)
    assert ran(recipe, tmp_path, contender, START, trainee) == alone


def test_loading_a_state_leaves_nothing_of_what_was_trained_before(tmp_path: Path) -> None:
    recipe = based(tmp_path)
    trainee, fresh = Trainee(recipe, TEXT, CPU, 0), Trainee(recipe, TEXT, CPU, 0)
    for one in (trainee, fresh):
        one.load(state_path(recipe, TEXT, START, tmp_path))
    ids = trainee.put([TEXT.train[:4]])[0]
    trainee.step(4, ids, None)
    trainee.shift(Shift(name="faster", after=1, learning_rate=8.0, other_text=True))
    trainee.model(input_ids=ids, labels=ids).loss.backward()
    trainee.model.eval()
    for buffer in trainee.model.buffers():
        buffer.add_(1)
    trainee.load(state_path(recipe, TEXT, START, tmp_path))
    assert trainee.model.training
    assert all(parameter.grad is None for parameter in trainee.model.parameters())
    assert all(map(torch.equal, trainee.model.buffers(), fresh.model.buffers()))
    assert trainee.schedule.state_dict() == fresh.schedule.state_dict()
    assert trainee.evaluate() == fresh.evaluate()
    assert float(trainee.step(4, ids, None)) == float(fresh.step(4, ids, None))
    assert all(map(torch.equal, trainee.model.parameters(), fresh.model.parameters()))


def test_a_worker_that_waits_for_a_base_compiles_once_and_its_forks_do_not_see_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = based(tmp_path, format="fp8")
    alone = ran(recipe, tmp_path, RANDOM, START)
    steps: list[str | None] = []
    step = Trainee.step

    def noted(self: Trainee, number: int, ids: torch.Tensor, controller: Any) -> torch.Tensor:
        steps.append(None if controller is None else controller.plan.provenance.policy)
        return step(self, number, ids, controller)

    monkeypatch.setattr(Trainee, "step", noted)
    own = OwnTrainee(recipe, TEXT, CPU)
    own.warm()
    assert steps == []  # nothing is compiled here
    compiled = replace(recipe, base=replace(recipe.base, compile=True))
    own = OwnTrainee(compiled, TEXT, CPU, partial(Trainee, compile=lambda model: None))
    own.warm()
    own.warm()
    assert steps == [None, "uniform-fp8"]
    assert ran(recipe, tmp_path, RANDOM, START, own.get()) == alone
    trainee = own.get()
    own.drop()
    assert own.get() is not trainee


def test_a_worker_forgets_a_fork_that_was_compiled_when_it_says_how_long_the_next_one_takes() -> None:
    pace, run = _OwnPace(), ForkRun(BF16, START, {4: "id"})
    assert pace.seconds(run) == 0.0
    pace.note(run, 80.0)
    pace.note(run, 2.0)
    assert pace.seconds(run) == 80.0
    for _ in range(4):
        pace.note(run, 2.0)
    assert pace.seconds(ForkRun(BF16, START, {8: "id"})) == 4.0


def test_a_warning_of_every_fork_is_said_once() -> None:
    once = _Once()
    records = [logging.LogRecord("snip_hf", 30, "", 0, "%s waits", (who,), None) for who in ("a", "b", "a")]
    assert [once.filter(record) for record in records] == [True, True, False]


# ----------------------------------------------------------------------------------------------------------- compiled


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    config = torch._dynamo.config
    before = config.recompile_limit, config.fail_on_recompile_limit_hit
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    config.recompile_limit, config.fail_on_recompile_limit_hit = before
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("captured", [False, True])
def test_forks_of_one_process_share_their_graphs_whatever_ran_before(tmp_path: Path, captured: bool) -> None:
    plain = based(tmp_path)
    recipe = load_recipe(tmp_path / "recipe.yaml", ["training.compile=true", f"forks.cuda_graph={captured}"])
    state_path(plain, TEXT, START, tmp_path).rename(state_path(recipe, TEXT, START, tmp_path))
    traced = partial(compile_parts, backend="aot_eager")
    capture = StandIn()
    trainee = Trainee(recipe, TEXT, CPU, 0, traced, capture)
    capture.parameters = list(trainee.model.parameters())
    counts, first = [], {}
    contenders = [BF16, Contender("fp8", "all", {}), Contender("mxfp4", "forward", {}), RANDOM, REFRESHING]
    for index, contender in enumerate(contenders * 2):
        if index == len(contenders):
            halved = Fork(base_seed=0, point=3, data_seed=0, shift=Shift(name="half", after=1, batch=0.5))
            ran(recipe, tmp_path, BF16, halved, trainee)
        found = ran(recipe, tmp_path, contender, START, trainee)
        assert first.setdefault(contender.name, found) == found
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    # In training and in evaluation, layers and loss; quantized layers; a batch of another size, in training.
    assert counts == [4, 6, 6, 6, 6, 8, 8, 8, 8, 8]
    assert not torch._dynamo.utils.counters["graph_break"]


def test_a_compiled_training_is_another_setting_and_one_that_is_not_has_the_id_of_before(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, [{"format": "bf16"}])
    plain, said, compiled = (
        load_recipe(path, overrides) for overrides in ([], ["training.compile=false"], ["training.compile=true"])
    )
    assert plain.base_id("text", 0) == said.base_id("text", 0) != compiled.base_id("text", 0)
    assert plain.setting("text", 4, START) == said.setting("text", 4, START) != compiled.setting("text", 4, START)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.first(x))
        return found


class Head(nn.Module):
    loss_function = torch.nn.functional.cross_entropy

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(2, 2)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_what_needs_more_graphs_than_there_may_be_fails_and_does_not_run_uncompiled() -> None:
    model = Head()
    compile_parts(model, backend="eager")
    torch._dynamo.config.recompile_limit = 1
    model.layers[0](torch.ones(2, 2))
    with pytest.raises(FailOnRecompileLimitHit):
        model.layers[0](torch.ones(3, 2))


def test_every_decoder_layer_is_compiled_once_and_nothing_else() -> None:
    model, limit = Head(), torch._dynamo.config.recompile_limit
    compiled: list[nn.Module] = []

    def compile(module: nn.Module) -> None:
        compiled.append(module)
        module._compiled_call_impl = module._call_impl

    try:
        compile_layers(model, compile)
        compile_layers(model, compile)
        assert compiled == list(model.layers)
        assert torch._dynamo.config.recompile_limit >= 64
    finally:
        torch._dynamo.config.recompile_limit = limit


# ----------------------------------------------------------------------------------------------------------- backends


@pytest.mark.slow
def test_auto_takes_a_backend_by_each_contender_s_formats_and_lines_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    low = {"policy": "random", "formats": ["fp4", "fp8"], "granularity": "gemm", "target_fp4_fraction": 0.75}
    contenders = [BF16, Contender("fp4", "forward", {}), Contender("mxfp8", "all", {})]
    contenders += [Contender(None, "all", low), RANDOM]
    recipe = based(tmp_path, format="fp8")
    automatic = load_recipe(tmp_path / "recipe.yaml", ["snip.backend=auto"])
    # Where the compute dtype is not BF16, as on a CPU, this backend leaves the GEMMs to the emulated one.
    monkeypatch.setattr(type(HOPPER), "lacks", lambda self, device: None)
    train_base(automatic, TEXT, 0, CPU, tmp_path)
    for contender, backend in zip(contenders, [None, "hopper", "emulated", "hopper", "emulated"], strict=True):
        emulated = ran(recipe, tmp_path, _named(contender, "emulated"), START)
        assert ran(automatic, tmp_path, contender, START) == emulated | {"backend": backend}


def test_auto_chooses_for_a_cell_of_one_format_by_that_format() -> None:
    assert Contender("mxfp8", "all", {}).config(START, "auto").formats == ("mxfp8",)


def _named(contender: Contender, backend: str) -> Contender:
    settings = dict(contender.settings)
    return Contender(contender.format, contender.gemms, settings | ({"backend": backend} if settings else {}))


def test_a_report_says_whose_kernels_differ() -> None:
    fork = {"base_seed": 0, "point": 3, "data_seed": 0}
    line = {"fork": fork, "state": "a", "machine": "H200", "commit": "b"}
    ran_on = [("bf16", None), ("fp4", "hopper"), ("fp8", "hopper"), ("mxfp4", "emulated")]
    lines = [line | {"contender": contender, "backend": backend} for contender, backend in ran_on]
    plain = "1 fork of 1 base; H200; commit b."
    assert origin(lines) == f"{plain} Kernels: hopper; emulated for mxfp4."
    assert origin(lines[:3]) == plain
    assert origin([line | {"contender": "fp4"}]) == plain
