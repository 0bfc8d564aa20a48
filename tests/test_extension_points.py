"""A number format, a backend, a layer kind, a policy and a tracker of events can each be added in one place.

Each is added here, in a test of its own and below 40 lines, and takes part in a small training.
`test_names_in_one_place.py` looks for the names of what is built in.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import fp4_config
from registries import nothing_stays_registered, restored
from slow_cases import slow_but
from small import tiny_llama, trained_tiny_lm
from small import tokens as small_batch
from tiny_runs import SCHEDULE, Run, differing, history, train, weights, without_seconds
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from snip_hf import (
    SnipCallback,
    SnipConfig,
    SnipController,
    convert_model,
    estimate_divergence,
    formats,
    measure_divergence,
    quantize,
    register_format,
    register_layer_kind,
    register_linear_class,
    restore_model,
)
from snip_hf.costs.timing import timed_formats
from snip_hf.estimation import layer_sums
from snip_hf.estimation.table import Divergence, DivergenceTable
from snip_hf.kernels.backend import BACKENDS, Backend, register_backend
from snip_hf.kernels.emulated import EMULATED
from snip_hf.layers.kinds import LayerKind
from snip_hf.layers.layer import SnipLayer
from snip_hf.layers.state import snip_linears
from snip_hf.numerics.formats import FORMATS, NumberFormat, Operand, integers
from snip_hf.numerics.gemms import GEMMS
from snip_hf.planning.plan import PrecisionPlan
from snip_hf.planning.solver.process import SolverProcess
from snip_hf.policies.registry import Policy, register_policy
from snip_hf.policies.setting import Setting
from snip_hf.records.events import Counted, Event, Refresh, Start, installed_versions
from snip_hf.records.load import load_run, read_divergence
from snip_hf.reporting.figures import plan_figure
from snip_hf.reporting.run_report import run_report

# The first refresh, at step 2, is applied after step 4, and one step is taken in its plan.
ONE_REFRESH = 5


@pytest.fixture(autouse=True)
def _nothing_stays_registered() -> Iterator[None]:
    with nothing_stays_registered():
        yield


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The integer programs that solvers are started with."""
    found: list[dict[str, Any]] = []
    start = SolverProcess.start

    def noting(program: dict[str, Any], *rest: Any) -> SolverProcess:
        found.append(program)
        return start(program, *rest)

    monkeypatch.setattr(SolverProcess, "start", noting)
    return found


def go_on(folder: Path, config: SnipConfig, checkpoint: Path, **options: Any) -> Run:
    return train(folder, callback=SnipCallback(config), resume=checkpoint, **options)


def options_of(program: dict[str, Any]) -> set[tuple[str, ...]]:
    return {tuple(option["name"] for option in group["options"]) for group in program["groups"]}


def used(plan: PrecisionPlan) -> set[str]:
    return {name for row in plan.assignment.values() for name in row.values()}


def final_plan(run: Run) -> PrecisionPlan:
    return PrecisionPlan.load(run.folder / "snip" / "plan.json")


# ------------------------------------------------------------------------------------------------------- number formats


def own4() -> NumberFormat:
    """Uniform integers -7..7."""
    gradient = Operand((1, 128), stochastic=True)
    return NumberFormat(
        name="own4", grid=integers(7), bits=4, gradient=gradient, speed=2.0, label="INT4", colour="#009e73"
    )


def test_a_new_format_is_chosen_trained_in_resumed_and_drawn(tmp_path: Path, programs: list[dict[str, Any]]) -> None:
    register_format(own4())
    config = SnipConfig(**SCHEDULE, formats=("own4", "fp8"), target_fp4_fraction=0.5, granularity="gemm")
    whole = train(tmp_path / "whole", config, save_strategy="steps", save_steps=3, max_steps=ONE_REFRESH)
    assert options_of(programs[0]) == {("fp8", "own4")}
    plan = final_plan(whole)
    assert used(plan) == {"own4", "fp8"} and 0.5 <= plan.fp4_fraction < 0.7
    layer_formats = {name: layer.formats for name, layer in snip_linears(whole.model).items()}
    assert layer_formats == plan.to_dict()["assignment"]
    # Saved between a probe and the application of its plan.
    resumed = go_on(tmp_path / "resumed", config, whole.folder / "checkpoint-3", max_steps=ONE_REFRESH)
    assert differing(weights(resumed.model), weights(whole.model)) == []
    # The rounding is not that of another format.
    built_in = fp4_config(**SCHEDULE, target_fp4_fraction=0.5, granularity="gemm")
    other = train(tmp_path / "other", built_in, max_steps=ONE_REFRESH)
    assert other.losses != whole.losses
    run = load_run(whole.folder)
    assert run.formats == ("own4", "fp8")
    colours = {patch.get_label(): patch.get_facecolor() for patch in plan_figure(run).legends[0].get_patches()}
    assert colours["INT4"][:3] == pytest.approx((0, 0x9E / 255, 0x73 / 255)) and list(colours) == ["INT4", "FP8"]
    run_report(whole.folder)
    assert (whole.folder / "snip" / "plan.png").stat().st_size > 10_000


def test_a_new_format_rounds_as_its_data_say() -> None:
    register_format(own4())
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    scales = x.view(4, 2, 128).abs().amax(2, keepdim=True) / 7
    expected = ((x.view(4, 2, 128) / scales).round() * scales).view(4, 256)
    torch.testing.assert_close(quantize(x, "own4"), expected)
    many = torch.stack([quantize(x, "own4", "gradient", seed) for seed in range(400)])
    assert (many.mean(0) - x).abs().max() < 0.2 * scales.max() and (many.std(0) > 0).float().mean() > 0.9


def test_layers_run_on_a_backend_that_knows_all_formats_of_the_run() -> None:
    class Narrow(CountingBackend):
        name = "narrow"

        def runs(self, format: NumberFormat) -> bool:
            return format.name != "own4"

    register_format(own4())
    register_backend(Narrow())
    model = tiny_llama(hidden=32)
    for names, backend in ((("fp4", "fp8"), "narrow"), (("own4", "fp8"), "emulated")):
        convert_model(model, SnipConfig(formats=names))
        assert {layer.snip_backend.name for layer in snip_linears(model).values()} == {backend}
        restore_model(model)
    convert_model(model, fp4_config(backend="narrow"))
    with pytest.raises(ValueError, match="'narrow' has no kernels for the format 'own4'"):
        next(iter(snip_linears(model).values())).set_formats(dict.fromkeys(GEMMS, "own4"))
    with pytest.raises(ValueError, match="backend='narrow' cannot run: its kernels do not know the format 'own4'"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        SnipController(model, optimizer, SnipConfig(backend="narrow", formats=("own4", "fp8")))


def test_three_formats_can_be_options_of_one_run_and_no_quantization_is_free(
    tmp_path: Path, programs: list[dict[str, Any]]
) -> None:
    config = SnipConfig(**SCHEDULE, formats=("fp4", "fp8", "bf16"), target_fp4_fraction=0.5, granularity="layer")
    run = train(tmp_path, config, save_strategy="steps", save_steps=3, max_steps=ONE_REFRESH)
    assert config.start_format == "bf16"
    assert options_of(programs[0]) == {("bf16", "fp8", "fp4")}
    groups = programs[0]["groups"]
    for group in groups:
        assert [option["weight"] > 0 for option in group["options"]] == [False, False, True]
    bf16, fp8, fp4 = (sum(group["options"][index]["cost"] for group in groups) for index in range(3))
    assert bf16 == 0 < fp8 < fp4
    # GEMMs that are not in FP4 stay in BF16, since nothing asks for FP8.
    assert used(final_plan(run)) == {"fp4", "bf16"}
    _, table = read_divergence(tmp_path / "snip" / "divergence-2.json")
    assert {row.format for row in table.rows} == {"fp4", "fp8"}
    resumed = go_on(tmp_path / "resumed", config, tmp_path / "checkpoint-3", max_steps=ONE_REFRESH)
    assert differing(weights(resumed.model), weights(run.model)) == []
    colours = [patch.get_label() for patch in plan_figure(load_run(tmp_path)).legends[0].get_patches()]
    assert colours == ["FP4", "FP8", "BF16"]


def test_no_quantization_is_neither_estimated_nor_measured() -> None:
    model, optimizer = trained_tiny_lm()
    config = SnipConfig(formats=("fp4", "fp8", "bf16"))
    found = [
        estimate_divergence(model, small_batch(), optimizer, config),
        measure_divergence(model, small_batch(), optimizer, config, draws=1, gemms=("layer",)),
    ]
    assert [list(dict.fromkeys(row.format for row in table.rows)) for table in found] == [["fp8", "fp4"]] * 2


@pytest.mark.parametrize(
    "policy",
    slow_but(
        ["fisher", "hessian-trace", "greedy", "kl", "min-rel-err", "layer-position", "random"],
        "hessian-trace",
        "kl",
        "random",
    ),
)
def test_every_kind_of_policy_decides_between_three_formats(policy: str, tmp_path: Path) -> None:
    register_format(own4())
    names = ("fp4", "own4", "bf16")
    config = SnipConfig(**SCHEDULE, policy=policy, formats=names, target_fp4_fraction=0.5, probes=2)
    run = train(tmp_path, config, max_steps=4)
    plan = final_plan(run)
    assert 0.5 <= plan.fp4_fraction < 1 and used(plan) <= set(names)
    assert all(line["status"] == "applied" for line in run.refreshes)


def refresh_counts(monkeypatch: pytest.MonkeyPatch, **config: Any) -> tuple[DivergenceTable, dict[str, int]]:
    """The table of one estimate, and how many products and roundings it took."""
    counts = {"product": 0, "fake_quantize": 0}
    model, optimizer = trained_tiny_lm()
    with monkeypatch.context() as patch:
        for name in counts:
            patch.setattr(layer_sums, name, counting(counts, name, getattr(layer_sums, name)))
        return estimate_divergence(model, small_batch(), optimizer, fp4_config(**config)), counts


def counting(counts: dict[str, int], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        counts[name] += 1
        return function(*arguments)

    return call


def test_a_registered_format_that_is_not_used_changes_no_plan_and_no_file_and_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Refreshes at steps 2 and 5.
    config = fp4_config(**SCHEDULE | {"refresh_every": 3, "apply_delay": 1})
    length = {"save_strategy": "steps", "save_steps": 5, "max_steps": 7}
    expected = train(tmp_path / "without", config, **length)
    estimate, counts = refresh_counts(monkeypatch)
    register_format(own4())
    run = train(tmp_path / "with", config, **length)
    assert differing(weights(run.model), weights(expected.model)) == []
    for name in ("snip/plan.json", "snip/divergence-2.json", "checkpoint-5/snip_state.json"):
        found, before = (json.loads((folder / name).read_text()) for folder in (run.folder, expected.folder))
        assert without_seconds(found | {"run": None}) == without_seconds(before | {"run": None}), name
    assert without_seconds(run.history) == without_seconds(expected.history)
    # A file of before is read, and its run goes on.
    resumed = go_on(tmp_path / "resumed", config, expected.folder / "checkpoint-5", **length)
    assert differing(weights(resumed.model), weights(expected.model)) == []
    assert refresh_counts(monkeypatch) == (estimate, counts)
    assert timed_formats(config.formats) == ("bf16", "fp8", "fp4")
    # Nor does an option that quantizes nothing.
    _, three = refresh_counts(monkeypatch, formats=("fp4", "fp8", "bf16"))
    assert three == counts


def test_a_name_is_taken_once_and_free_again_when_a_context_ends() -> None:
    built_in = list(formats)
    register_format(own4())
    register_format(own4())  # the same again, as when a module is imported twice
    with pytest.raises(ValueError, match="There is a format named 'fp4' already"):
        register_format(NumberFormat(name="fp4", grid=integers(7), bits=4, speed=2.0, label="", colour="#000000"))
    with restored(FORMATS):
        register_format(NumberFormat(name="int3", grid=integers(3), bits=3, speed=2.0, label="", colour="#000000"))
        assert list(formats) == [*built_in, "own4", "int3"]
    assert list(formats) == [*built_in, "own4"]


# ------------------------------------------------------------------------------------------------------------- backends


class CountingBackend(Backend):
    """The emulation, which counts the passes through a layer."""

    name = "counting"
    passes = 0

    def lacks(self, device: torch.device) -> str | None:
        return None

    def runs(self, format: NumberFormat) -> bool:
        return True

    def forward(self, layer: Any, input: Tensor, x: Tensor, bias: Tensor | None, ends: Tensor | None) -> Tensor:
        type(self).passes += 1
        return EMULATED.forward(layer, input, x, bias, ends)

    def gemm_call(self, *arguments: Any) -> Callable[[], Tensor]:
        return EMULATED.gemm_call(*arguments)


def test_a_new_backend_runs_the_layers_of_a_run(tmp_path: Path) -> None:
    register_backend(CountingBackend())
    accumulated = {"gradient_accumulation_steps": 2}
    expected = train(
        tmp_path / "emulated", fp4_config(**SCHEDULE, backend="emulated"), max_steps=ONE_REFRESH, **accumulated
    )
    assert CountingBackend.passes == 0
    run = train(tmp_path / "counting", fp4_config(**SCHEDULE, backend="counting"), max_steps=ONE_REFRESH, **accumulated)
    assert run.losses == expected.losses and differing(weights(run.model), weights(expected.model)) == []
    # Two micro-batches per step.
    assert CountingBackend.passes == 2 * ONE_REFRESH * len(snip_linears(run.model))
    layer = next(iter(snip_linears(run.model).values()))
    assert layer.snip_backend is copy.deepcopy(layer).snip_backend is BACKENDS["counting"]


# ---------------------------------------------------------------------------------------------------------- layer kinds


class Pointwise(nn.Conv1d):
    """A convolution of size 1 over (..., T, I), which stores its weight as (O, I, 1)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mT).mT


class SnipPointwise(SnipLayer, Pointwise):
    in_features = property(lambda self: self.in_channels)
    out_features = property(lambda self: self.out_channels)

    def matrices(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (tensor[:, :, 0],)

    def laid_out(self, matrices: Sequence[Tensor]) -> Tensor:
        return matrices[0][:, :, None]


class PointwiseKind(LayerKind):
    name = "pointwise"
    layer = SnipPointwise
    accepts = "Pointwise"

    def knows(self, module: nn.Module) -> bool:
        return isinstance(module, Pointwise)


MLP = [f"model.layers.{block}.mlp.{part}" for block in (0, 1) for part in ("gate_proj", "up_proj", "down_proj")]


def llama_of(kind: type[Pointwise] | type[nn.Linear]) -> LlamaForCausalLM:
    """A tiny Llama with the same numbers in its MLPs' layers, which are of one class or of the other."""
    model = tiny_llama(hidden=32, mlp_bias=True)
    for name in MLP if kind is Pointwise else ():
        linear = model.get_submodule(name)
        layer = Pointwise(linear.in_features, linear.out_features, 1)
        layer.weight, layer.bias = nn.Parameter(linear.weight.detach()[:, :, None].clone()), linear.bias
        model.set_submodule(name, layer)
    return model


def as_linears(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor[..., 0] if name.removesuffix(".weight") in MLP else tensor for name, tensor in state.items()}


def test_a_new_layer_kind_is_probed_planned_trained_saved_and_restored(tmp_path: Path) -> None:
    register_layer_kind(PointwiseKind())
    config = fp4_config(**SCHEDULE, target_fp4_fraction=0.5, granularity="gemm")
    length = {"save_strategy": "steps", "save_steps": 3, "max_steps": ONE_REFRESH}
    run = train(tmp_path / "pointwise", config, model=llama_of(Pointwise), **length)
    assert set(MLP) < set(final_plan(run).assignment)
    in_force = {name: layer.formats for name, layer in snip_linears(run.model).items()}
    assert in_force == final_plan(run).to_dict()["assignment"]
    assert {name for name in MLP if isinstance(run.model.get_submodule(name), SnipPointwise)} == set(MLP)
    # A model of linears with the same numbers gets the same plan.
    linears = train(tmp_path / "linear", config, model=llama_of(nn.Linear), max_steps=ONE_REFRESH)
    assert final_plan(linears).assignment == final_plan(run).assignment
    for name, tensor in as_linears(weights(run.model)).items():
        torch.testing.assert_close(tensor, weights(linears.model)[name], rtol=1e-3, atol=1e-5)
    # Saved between a probe and the application of its plan, under the keys and in the layout of the plain model.
    checkpoint = tmp_path / "pointwise" / "checkpoint-3"
    plain = {name: tuple(tensor.shape) for name, tensor in llama_of(Pointwise).state_dict().items()}
    assert {name: tuple(tensor.shape) for name, tensor in run.model.state_dict().items()} == plain
    resumed = go_on(tmp_path / "resumed", config, checkpoint, model=llama_of(Pointwise), **length)
    assert differing(weights(resumed.model), weights(run.model)) == []
    restore_model(run.model)
    assert {type(run.model.get_submodule(name)) for name in MLP} == {Pointwise}


@pytest.mark.slow
def test_a_class_of_linears_is_swapped_once_it_is_registered(tmp_path: Path) -> None:
    @register_linear_class
    class OtherLinear(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return input @ self.weight.mT if self.bias is None else input @ self.weight.mT + self.bias

    def model() -> LlamaForCausalLM:
        found = tiny_llama(hidden=32)
        for name in MLP:
            found.get_submodule(name).__class__ = OtherLinear
        return found

    config = fp4_config(**SCHEDULE, target_fp4_fraction=0.5)
    run, expected = (
        train(tmp_path / "own", config, model=model(), max_steps=ONE_REFRESH),
        train(tmp_path / "plain", config, model=tiny_llama(hidden=32), max_steps=ONE_REFRESH),
    )
    assert final_plan(run).assignment == final_plan(expected).assignment
    assert run.losses == expected.losses and differing(weights(run.model), weights(expected.model)) == []
    restore_model(run.model)
    assert {type(run.model.get_submodule(name)) for name in MLP} == {OtherLinear}


# ------------------------------------------------------------------------------------------------------------- policies


def test_a_new_policy_prices_the_options(tmp_path: Path, programs: list[dict[str, Any]]) -> None:
    def by_flops(config: SnipConfig, table: DivergenceTable) -> Callable[[Divergence], float]:
        return lambda row: row.flops * (row.format == config.least_precise)

    register_policy(Policy(name="by-flops", cost=by_flops))
    run = train(tmp_path, fp4_config(**SCHEDULE, policy="by-flops", target_fp4_fraction=0.5), max_steps=ONE_REFRESH)
    assert [line["status"] for line in run.refreshes] == ["applied"]
    assert final_plan(run).provenance.policy == "by-flops"
    for group in programs[0]["groups"]:
        fp8, fp4 = group["options"]
        assert fp8["cost"] == 0 and fp4["cost"] == pytest.approx(fp4["weight"] * total_flops(final_plan(run)))


def total_flops(plan: PrecisionPlan) -> float:
    return sum(sum(row.values()) for row in plan.flops.values())


def test_a_new_policy_assigns_formats_itself(tmp_path: Path) -> None:
    def last_block(setting: Setting) -> dict[str, dict[str, str]]:
        layers = [layer for stage in setting.stages for layer in stage]
        low, high = setting.config.least_precise, setting.config.most_precise
        return {layer: dict.fromkeys(GEMMS, low if ".1." in layer else high) for layer in layers}

    register_policy(Policy(name="last-block", assign=last_block, aims_at_share=False))
    run = train(tmp_path, fp4_config(policy="last-block"), max_steps=2)
    assert final_plan(run).fp4_fraction == 0.5
    assert history(tmp_path)[0]["config"]["policy"] == "last-block"
    assert snip_linears(run.model)["model.layers.1.mlp.up_proj"].formats == dict.fromkeys(GEMMS, "fp4")


def test_a_new_policy_that_forgets_layers_is_refused_by_its_name(tmp_path: Path) -> None:
    register_policy(Policy(name="forgets", assign=lambda setting: {}))
    with pytest.raises(ValueError, match="policy='forgets' made no usable plan: assignment is empty, expected"):
        train(tmp_path, fp4_config(policy="forgets"), max_steps=2)


def test_a_policy_has_either_prices_or_an_assignment() -> None:
    for both in ({}, {"cost": lambda config, table: None, "assign": lambda setting: {}}):
        with pytest.raises(ValueError, match="Policy 'x' has both or neither of cost and assign"):
            register_policy(Policy(name="x", **both))


# --------------------------------------------------------------------------------------------------- trackers of events


class Shares:
    """A tracker that draws the FP4 share over the steps."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.points: list[tuple[int, float | None]] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Start):
            self.points.append((event.step, event.plan.fp4_fraction))
        elif isinstance(event, Refresh) and event.applied_step is not None:
            self.points.append((event.applied_step, event.fp4_fraction))

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [event.to_record() for event in self.events]


def written(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "snip" / "history.jsonl").read_text().splitlines()]


def test_a_new_tracker_is_told_what_the_history_holds_also_after_resuming(tmp_path: Path) -> None:
    config = fp4_config(**SCHEDULE)
    whole, rest = Shares(), Shares()
    length = {"save_strategy": "steps", "save_steps": 7, "max_steps": 9}
    run = train(tmp_path, callback=SnipCallback(config, trackers=[whole]), **length)
    assert whole.lines == written(tmp_path)
    assert whole.lines[0]["versions"] == installed_versions()
    kinds = [Start, Counted, Refresh, Refresh]
    steps = (0, 1, 2, 6)
    assert [(type(event), event.step) for event in whole.events] == list(zip(kinds, steps, strict=True))
    share = final_plan(run).fp4_fraction
    assert [step for step, _ in whole.points] == [0, 4, 8] and whole.points[-1] == (8, share)
    # From a checkpoint in the middle of the second refresh on: nothing is told twice.
    resumed = train(
        tmp_path, callback=SnipCallback(config, trackers=[rest]), resume=tmp_path / "checkpoint-7", **length
    )
    assert rest.lines == resumed.history[2:] and without_seconds(rest.lines) == without_seconds(whole.lines[3:])
