"""Forks whose passes are CUDA graphs: the same numbers as without, and what is captured when."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_forks import BF16, CPU, SNIP, StandIn, random_text, write_recipe
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

from eval.bakeoff import forks
from eval.bakeoff.fork_base import Trainee, deterministic, state_path, train_base, unpacked
from eval.bakeoff.fork_cells import Contender, Fork
from eval.bakeoff.fork_lines import differences, origin
from eval.bakeoff.fork_recipe import ForkRecipe, ForkRun, load_recipe
from eval.bakeoff.fork_run import run_fork
from eval.bakeoff.fork_shifts import Shift
from eval.bakeoff.step_graphs import StepGraphs
from snip_hf.estimation.replayed_sums import cuda_graph
from snip_hf.kernels.tensor_scaled import operators

START = Fork(base_seed=0, point=3, data_seed=0)
FP4 = Contender("nvfp4", "all", {})
REFRESHING = Contender(None, "all", SNIP | {"refresh_every": 3})
TEXT = random_text(80)
STEPS = 8


def trainee_of(recipe: ForkRecipe) -> tuple[Trainee, StandIn]:
    capture = StandIn()
    trainee = Trainee(recipe, TEXT, CPU, 0, capture=capture)
    capture.parameters = list(trainee.model.parameters())
    return trainee, capture


def recipes(folder: Path, **changes: Any) -> tuple[ForkRecipe, ForkRecipe]:
    """A recipe whose base is trained, and the same with graphs and the same base."""
    path = write_recipe(folder, [{"format": "bf16"}], **changes)
    layers = "model.config.num_hidden_layers=2"  # so many that a plan changes at a refresh
    plain, graphs = load_recipe(path, [layers]), load_recipe(path, [layers, "forks.cuda_graph=true"])
    train_base(plain, TEXT, 0, CPU, folder)
    state_path(graphs, TEXT, START, folder).write_bytes(state_path(plain, TEXT, START, folder).read_bytes())
    return plain, graphs


def ran(
    recipe: ForkRecipe, folder: Path, contender: Contender, trainee: Trainee | None = None, fork: Fork = START
) -> dict[str, Any]:
    """What the line of a fork says, without times."""
    run = ForkRun(contender, fork, {STEPS: "id"})
    ((_, found),) = run_fork(recipe, TEXT, run, CPU, folder, None, trainee)
    return {name: value for name, value in found.items() if name != "seconds"}


# --------------------------------------------------------------------------------------------------- captured, replayed


@pytest.mark.parametrize(
    ("contender", "captures", "replays"),
    [
        # The first step runs as it is. A refresh at steps 4 and 7: these steps are watched, and those after them the
        # first ones of their plans, if the plans are others.
        (FP4, 1, STEPS - 1),
        pytest.param(BF16, 1, STEPS - 1, marks=pytest.mark.slow),
        pytest.param(REFRESHING, 2, 3, marks=pytest.mark.slow),
    ],
    ids=lambda one: getattr(one, "name", str(one)),
)
def test_replayed_steps_train_to_the_same_bits(
    tmp_path: Path, contender: Contender, captures: int, replays: int
) -> None:
    plain, graphs = recipes(tmp_path)
    expected = ran(plain, tmp_path, contender)
    trainee, capture = trainee_of(graphs)
    assert ran(graphs, tmp_path, contender, trainee) == expected
    assert (capture.captures, capture.replays) == (captures, replays)
    assert ran(graphs, tmp_path, contender, trainee) == expected  # nothing is left of the first fork
    assert capture.captures == 2 * captures


def test_a_batch_of_another_size_is_captured_anew(tmp_path: Path) -> None:
    plain, graphs = recipes(tmp_path)
    halved = Fork(base_seed=0, point=3, data_seed=0, shift=Shift(name="half", after=3, batch=0.5))
    expected = ran(plain, tmp_path, BF16, fork=halved)
    trainee, capture = trainee_of(graphs)
    assert ran(graphs, tmp_path, BF16, trainee, halved) == expected
    assert (capture.captures, capture.replays) == (2, STEPS - 2)


class Plan:
    """A plan as far as graphs look at it."""

    def __init__(self, format: str) -> None:
        self.assignment = {"layer": dict.fromkeys(("forward", "grad_input", "grad_weight"), format)}


def test_a_step_that_is_watched_runs_as_it_is_and_the_graph_stays() -> None:
    weight, log = nn.Parameter(torch.ones(1)), list[str]()

    def passes(ids: Tensor) -> Tensor:
        log.append("passes")
        loss = (weight * ids).sum()
        loss.backward()
        return loss.detach()

    def capture(work: Callable[[], None]) -> Callable[[], None]:
        work()
        log[-1] = "capture"
        return lambda: log.append("replay")

    graphs, plan, ids = StepGraphs(passes, [weight], capture), Plan("fp4"), torch.ones(1, 1)
    for is_watched in (False, False, True, False):
        graphs.run(ids, plan, is_watched)  # type: ignore[arg-type]
    assert log == ["passes", "capture", "replay", "passes", "replay"]
    graphs.run(ids, Plan("fp8"), False)  # type: ignore[arg-type]
    graphs.run(ids, Plan("fp8"), False)  # type: ignore[arg-type]
    assert log[5:] == ["passes", "capture", "replay"]
    graphs.forget()
    graphs.run(ids, Plan("fp8"), False)  # type: ignore[arg-type]
    assert log[8:] == ["passes"]


def test_too_little_memory_for_a_graph_is_an_error() -> None:
    def passes(ids: Tensor) -> Tensor:
        return ids.sum()

    graphs = StepGraphs(passes, [], lambda work: None)
    graphs.run(torch.ones(1, 1), None, False)
    with pytest.raises(torch.OutOfMemoryError, match=r"less than 3 GiB free.*fewer processes on it"):
        graphs.run(torch.ones(1, 1), None, False)


class NothingFromTheHost(TorchDispatchMode):
    """Refuses what a capture does on a GPU: numbers that the host reads, and tensors made of its numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in (torch.ops.aten._local_scalar_dense, torch.ops.aten.lift_fresh), func
        return func(*args, **(kwargs or {}))


def test_a_pass_has_nothing_that_a_capture_refuses(tmp_path: Path) -> None:
    trainee = Trainee(load_recipe(write_recipe(tmp_path, [{"format": "bf16"}])), TEXT, CPU, 0)
    ids = trainee.put([TEXT.train[:4]])[0]
    with NothingFromTheHost():
        trainee._passes(ids)
        with pytest.raises(AssertionError, match="_local_scalar_dense"):
            trainee.model(input_ids=ids)


def test_a_pass_does_not_look_for_several_texts_in_a_row(tmp_path: Path) -> None:
    plain = load_recipe(write_recipe(tmp_path, [{"format": "bf16"}]))
    trainee, ids = Trainee(plain, TEXT, CPU, 0), torch.arange(64).view(1, 64)
    model = trainee.model
    expected = model(input_ids=ids, labels=ids).loss
    with unpacked():
        assert torch.equal(model(input_ids=ids, labels=ids).loss, expected)
        # Two texts of 32 tokens, which are taken for one.
        apart = torch.arange(32).repeat(2)[None]
        assert torch.equal(
            model(input_ids=ids, position_ids=apart).logits,
            model(input_ids=ids, position_ids=apart, attention_mask=torch.ones_like(ids)).logits,
        )
    assert torch.equal(model(input_ids=ids, labels=ids).loss, expected)


def test_transformers_makes_no_mask_for_a_stream_that_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert masking_utils.is_tracing()
    with unpacked():
        assert not masking_utils.is_tracing()
    assert masking_utils.is_tracing()


# ---------------------------------------------------------------------------------------------------------- the recipe


def test_with_graphs_lines_and_bases_are_others_and_without_those_of_before(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, [{"format": "bf16"}])
    plain, said, graphs = (
        load_recipe(path, overrides) for overrides in ([], ["forks.cuda_graph=false"], ["forks.cuda_graph=true"])
    )
    assert plain.base_id("text", 0) == said.base_id("text", 0) != graphs.base_id("text", 0)
    ids, said_ids, graph_ids = (
        {name for run in one.runs("text") for name in run.ids.values()} for one in (plain, said, graphs)
    )
    assert ids == said_ids and not ids & graph_ids
    assert plain.setting("text", 4, START) == graphs.setting("text", 4, START)  # one table
    with pytest.raises(ValueError, match=r"forks\.cuda_graph='on'; expected true or false"):
        load_recipe(path, ["forks.cuda_graph='on'"])


def test_graphs_are_refused_where_there_is_no_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, text = write_recipe(tmp_path, [{"format": "bf16"}]), tmp_path / "text.npz"
    assert forks.main(["text", str(path), "--text", str(text)]) == 0
    command = ["run", str(path), "--text", str(text), "--output", str(tmp_path / "lines.jsonl"), "--device", "cpu"]
    assert forks.main([*command, "--override", "forks.cuda_graph=true"]) == 1
    assert "forks.cuda_graph=True on the device 'cpu'; expected 'cuda'" in capsys.readouterr().err


def test_a_report_pairs_forks_with_graphs_among_each_other_and_says_how_many_there_are() -> None:
    fork = {"base_seed": 0, "point": 3, "data_seed": 0}
    common = {"fork": fork, "state": "a", "machine": "H200", "commit": "b", "diverged": False}

    def line(contender: str, loss: float, **more: Any) -> dict[str, Any]:
        return common | {"contender": contender, "loss": {"train": loss}} | more

    plain, captured = [line("fp4", 1.1)], [line("fp4", 1.2, cuda_graph=True)]
    others = [line("bf16", 1.0, cuda_graph=False), line("bf16", 1.1, cuda_graph=True)]
    assert differences(plain, others, "train") == pytest.approx([10.0])
    assert differences(captured, others, "train") == pytest.approx([100 / 11])
    assert origin([*plain, *captured]).endswith("commit b. Steps of 1 fork from CUDA graphs.")
    assert origin(plain).endswith("commit b.")


@pytest.mark.parametrize(("device", "within"), [("cuda", (True, False)), ("cpu", (True, True))])
def test_the_passes_of_steps_on_a_gpu_take_deterministic_kernels_alone(device: str, within: tuple[bool, bool]) -> None:
    def mode() -> tuple[bool, bool]:
        return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()

    before = mode()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with deterministic(torch.device(device)):
            assert mode() == within
        assert mode() == (True, True)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


# -------------------------------------------------------------------------------------------------------------- a GPU


@pytest.fixture
def as_workers_train(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before, config = torch.are_deterministic_algorithms_enabled(), torch._dynamo.config
    limits = config.recompile_limit, config.fail_on_recompile_limit_hit
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch._dynamo.reset()
    yield
    torch.use_deterministic_algorithms(before)
    config.recompile_limit, config.fail_on_recompile_limit_hit = limits
    torch._dynamo.reset()


LOW = {"policy": "snip", "formats": ["fp4", "fp8"], "granularity": "gemm", "target_fp4_fraction": 0.75}
LOW |= {"refresh_every": 3, "backend": "auto", "solver": "greedy"}
EMULATED = REFRESHING.settings | {"backend": "auto", "solver": "greedy"}
SHAPE = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 2}
CASES = [
    (BF16, None, False),
    (Contender("fp8", "all", {}), "hopper", False),
    (Contender("fp4", "forward", {}), "hopper", False),
    (Contender(None, "all", LOW), "hopper", False),
    (Contender(None, "all", LOW), "hopper", True),
    (FP4, "emulated", False),
    (Contender(None, "all", EMULATED), "emulated", True),
    (Contender("mxfp4", "all", {}), "tensor-scaled", False),
    (Contender("mxfp4", "all", {}), "tensor-scaled", True),
]


@pytest.mark.gpu
@pytest.mark.usefixtures("as_workers_train")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("contender", "backend", "compiled"), CASES, ids=lambda one: getattr(one, "name", str(one)))
def test_on_a_gpu_captured_steps_train_to_the_bits_of_uncaptured_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, contender: Contender, backend: str | None, compiled: bool
) -> None:
    # In a graph all sums are exact.
    monkeypatch.setattr(operators, "FAST_SUMS_FOLDED", dict.fromkeys(operators.FAST_SUMS_FOLDED, False))
    path = write_recipe(
        tmp_path,
        [{"format": "bf16"}],
        model={"model_type": "llama", "config": SHAPE},
        training={"learning_rate": 3e-3, "steps": 40, "sequences": 4, "warmup_steps": 2, "format": "fp8"},
        forks={"base_seeds": [0], "points": [6], "data_seeds": [0], "steps": 10},
        snip={"backend": "auto", "solver": "greedy"},
    )
    device, fork, text = torch.device("cuda"), Fork(base_seed=0, point=6, data_seed=0), random_text(160)
    found, replays = [], list[int]()

    def counted(work: Callable[[], None]) -> Callable[[], Any]:
        replay = cuda_graph(work)
        assert replay is not None
        return lambda: (replays.append(1), replay())

    for graphs in (False, True):
        recipe = load_recipe(path, [f"forks.cuda_graph={graphs}", f"training.compile={compiled}"])
        train_base(recipe, text, 0, device, tmp_path)
        trainee = Trainee(recipe, text, device, 0, capture=counted)
        run = ForkRun(contender, fork, {10: "id"})
        ((_, one),) = run_fork(recipe, text, run, device, tmp_path, None, trainee)
        found.append({name: value for name, value in one.items() if name != "seconds"})
    plain, replayed = found
    assert replayed["backend"] == backend
    assert replayed == plain  # the hash of the base's weights, too
    # Of ten steps; of those that refresh, steps 4, 7 and 10 are watched, and perhaps followed by the first of a plan.
    assert len(replays) in ((4, 5, 6) if contender.settings else (9,))


@pytest.mark.gpu
@pytest.mark.usefixtures("as_workers_train")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("captured", [False, True])
def test_on_a_gpu_a_base_that_is_trained_again_has_the_same_weights(tmp_path: Path, captured: bool) -> None:
    path = write_recipe(
        tmp_path,
        [{"format": "bf16"}],
        model={"model_type": "llama", "config": SHAPE},
        training={"learning_rate": 3e-3, "steps": 40, "sequences": 16, "warmup_steps": 2, "format": "fp8"},
        forks={"base_seeds": [0], "points": [6], "data_seeds": [0], "steps": 10},
        snip={"backend": "auto"},
    )
    recipe = load_recipe(path, [f"forks.cuda_graph={captured}", "training.compile=True"])
    text, device = random_text(640, length=512), torch.device("cuda")
    digests = set()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        train_base(recipe, text, 0, device, tmp_path / name)
        state = state_path(recipe, text, Fork(base_seed=0, point=6, data_seed=0), tmp_path / name)
        digests.add(torch.load(state, weights_only=True)["digest"])
    assert len(digests) == 1
