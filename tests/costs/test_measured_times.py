"""FLOPs of every GEMM against torch's own flop counter; measured times against hand-made ones, through whole runs."""

from __future__ import annotations

import copy
import json
import math
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import fp4_config
from models import LINEARS, build
from own_loop import Loop
from small import tiny_llama
from thread_ranks import on_ranks
from tiny_runs import SCHEDULE, history
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers.pytorch_utils import Conv1D

from snip_hf import PrecisionPlan, convert_model, restore_model
from snip_hf.costs import timing as gemm_timing_module
from snip_hf.costs.flops import linear_flops
from snip_hf.costs.timing import GemmShape, Machine, MeasuredCost, cost_shares, describe_cost, read_times
from snip_hf.json_io import from_json
from snip_hf.numerics.formats import FORMATS
from snip_hf.numerics.gemms import GEMMS
from snip_hf.parallel.ranks import Ranks
from snip_hf.planning.plan import PlanProvenance
from snip_hf.training import setup as run_setup

measure_cost = partial(gemm_timing_module.measure_cost, formats=fp4_config().formats)
MACHINE = Machine("a GPU", "2.11.0", "hopper", "bfloat16")


def counted(layer: nn.Module, tokens: int, backward: bool) -> float:
    """FLOPs that torch counts in this layer for `tokens` tokens, forward or backward."""
    features = layer.nx if isinstance(layer, Conv1D) else layer.in_features
    x = torch.randn(tokens, features, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        y = layer(x)
        forward = counter.get_total_flops()
        y.sum().backward()
    return counter.get_total_flops() - forward if backward else forward


@pytest.mark.parametrize("family", LINEARS)
def test_match_torch_s_flop_counter_layer_by_layer(family: str) -> None:
    model, tokens = build(family), 10
    convert_model(model, fp4_config())
    flops = linear_flops(model)
    restore_model(model)
    assert set(flops) == LINEARS[family]
    for name, gemms in flops.items():
        layer = model.get_submodule(name)
        assert gemms["forward"] * tokens == counted(layer, tokens, backward=False)
        assert (gemms["grad_input"] + gemms["grad_weight"]) * tokens == counted(layer, tokens, backward=True)
        assert gemms["grad_input"] == gemms["grad_weight"]


def test_a_frozen_weight_costs_no_weight_gradient() -> None:
    model = build("llama")
    convert_model(model, fp4_config())
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    flops = linear_flops(model)
    assert flops["model.layers.0.mlp.up_proj"] == {"forward": 12288.0, "grad_input": 12288.0}
    assert flops["model.layers.1.mlp.up_proj"]["grad_weight"] == 12288.0


# ---------------------------------------------------------------------------------------------------------- measured


def made_up(backend: str, device: torch.device, shape: GemmShape, format: str) -> float:
    """An overhead of 1 ms per GEMM, in FP8 and FP4 another one, and a nanosecond per element of the weight."""
    launch = 1e-3 if format == "bf16" else 2e-3 + 1e-4 * GEMMS.index(shape.gemm)
    return launch + 1e-9 * shape.in_features * shape.out_features * (shape.tokens / 48) / (1 + (format == "fp4"))


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> list[GemmShape]:
    """Puts `made_up` in place of the real timer; returns the list of what it is asked for."""
    asked: list[GemmShape] = []

    def note(backend: str, device: torch.device, shape: GemmShape, format: str) -> float:
        asked.append(shape)
        return made_up(backend, device, shape, format)

    monkeypatch.setattr(gemm_timing_module, "time_gemm", note)
    return asked


def frozen_llama() -> Any:
    model = build("llama")
    convert_model(model, fp4_config())
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    return model


def test_every_gemm_gets_the_time_of_its_shape_and_a_frozen_weight_s_gradient_none(timer: list[GemmShape]) -> None:
    model = frozen_llama()
    measured = measure_cost(model, 48, "emulated")
    assert list(measured.seconds) == list(linear_flops(model))
    for name, row in measured.seconds.items():
        layer = model.get_submodule(name)
        assert list(row) == [gemm for gemm in GEMMS if gemm != "grad_weight" or layer.weight.requires_grad]
        for gemm, times in row.items():
            shape = GemmShape(gemm, 48, layer.in_features, layer.out_features)
            assert times == {fmt: made_up("", torch.device("cpu"), shape, fmt) for fmt in ("bf16", "fp8", "fp4")}
    assert measured.work["model.layers.1.mlp.up_proj"]["grad_input"] == 2.1e-3 + 1e-9 * 64 * 96
    assert (measured.tokens, measured.machine) == (48, Machine.of(torch.device("cpu"), "emulated"))


def test_a_gemm_counts_its_time_in_the_most_precise_quantized_format_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def by_bits(backend: str, device: torch.device, shape: GemmShape, format: str) -> float:
        return float(FORMATS[format].bits)

    monkeypatch.setattr(gemm_timing_module, "time_gemm", by_bits)
    measured = measure_cost(frozen_llama(), 48, "emulated", formats=("nvfp4", "mxfp8", "bf16"))
    assert (measured.formats, measured.reference) == (("bf16", "mxfp8", "nvfp4"), "mxfp8")
    assert measured.work["model.layers.1.mlp.up_proj"]["grad_input"] == FORMATS["mxfp8"].bits
    assert from_json(MeasuredCost, measured.to_dict()).reference == "mxfp8"


def test_layers_of_one_shape_share_a_measurement(timer: list[GemmShape]) -> None:
    measure_cost(frozen_llama(), 48, "emulated")
    # q and o 64x64; k and v 64x32; gate and up 64x96; down 96x64.
    assert len(timer) == len(set(timer)) * 3 == 4 * 3 * 3


def hand_cost() -> tuple[dict[str, dict[str, float]], MeasuredCost]:
    """Two blocks with a large `up` and a small `v`, which takes more than its share of the time."""
    flops, seconds = {}, {}
    for block in range(2):
        for name, size, fp8 in (("up", 6.0, 3e-3), ("v", 2.0, 2e-3)):
            flops[f"layers.{block}.{name}"] = dict.fromkeys(GEMMS, size)
            times = {"bf16": 2 * fp8, "fp8": fp8, "fp4": fp8 / 2}
            seconds[f"layers.{block}.{name}"] = dict.fromkeys(GEMMS, times)
    return flops, MeasuredCost(machine=MACHINE, tokens=4096, seconds=seconds)


def test_shares_of_flops_and_time_are_those_of_all_layers_of_a_kind() -> None:
    flops, measured = hand_cost()
    shares = cost_shares(flops, measured)
    assert [(share.kind, share.gemm) for share in shares] == [(kind, gemm) for kind in ("up", "v") for gemm in GEMMS]
    assert [share.flops for share in shares] == [pytest.approx(x / 3) for x in [0.75] * 3 + [0.25] * 3]
    assert [share.time for share in shares] == [pytest.approx(x / 3) for x in [0.6] * 3 + [0.4] * 3]
    assert shares[3].ratio == pytest.approx(1.6)
    assert shares[3].seconds == {"bf16": 8e-3, "fp8": 4e-3, "fp4": 2e-3}
    for layer in ("layers.0.v", "layers.1.v"):
        flops[layer]["grad_weight"] = 0.0
    assert [(share.kind, share.gemm) for share in cost_shares(flops, measured)][-1] == ("v", "grad_input")


def test_kinds_of_one_last_name_count_apart_and_experts_of_one_projection_together() -> None:
    names = ("attn.c_proj", "mlp.c_proj", "mlp.experts.0.up", "mlp.experts.1.up")
    layers = [f"h.{block}.{name}" for block in range(2) for name in names]
    flops = {layer: dict.fromkeys(GEMMS, 1.0) for layer in layers}
    seconds = {layer: {gemm: {"bf16": 2.0, "fp8": 1.0} for gemm in GEMMS} for layer in layers}
    shares = cost_shares(flops, MeasuredCost(machine=MACHINE, tokens=1, seconds=seconds))
    kinds = [kind for kind in ("attn.c_proj", "mlp.c_proj", "up") for _ in GEMMS]
    assert [share.kind for share in shares] == kinds
    assert [share.flops for share in shares] == [pytest.approx(n / 24) for n in [2] * 6 + [4] * 3]


def test_the_sentence_names_the_totals_and_what_differs_most() -> None:
    assert describe_cost(*hand_cost()) == (
        "All GEMMs of the linears take 60 ms in BF16, 30 ms in FP8, 15 ms in FP4 per micro-batch of 4096 tokens "
        "(hopper backend, a GPU); by measured time v forward counts 1.60 times what it counts by FLOPs (13.3% against "
        "8.3%), up forward 0.80 times (20.0% against 25.0%)."
    )


def test_a_second_sentence_names_what_is_fastest_in_bf16() -> None:
    flops, measured = hand_cost()
    for block in range(2):
        row = dict(measured.seconds[f"layers.{block}.v"])
        row["grad_input"] = {"bf16": 1e-3, "fp8": 2e-3, "fp4": 2e-3}
        measured = replace(measured, seconds={**measured.seconds, f"layers.{block}.v": row})
    assert describe_cost(flops, measured).endswith(" Fastest in BF16: v grad_input.")


# --------------------------------------------------------------------------------------------------- plans with times


def plan_with_times() -> PrecisionPlan:
    """FP4: up of block 0, v of block 1."""
    flops, measured = hand_cost()
    in_fp4 = ("layers.0.up", "layers.1.v")
    assignment = {layer: dict.fromkeys(GEMMS, "fp4" if layer in in_fp4 else "fp8") for layer in flops}
    stages = (("layers.0.up", "layers.0.v"), ("layers.1.up", "layers.1.v"))
    return PrecisionPlan(assignment, flops, stages, PlanProvenance(step=0, policy="snip"), measured)


def test_a_plan_has_both_shares_and_survives_its_file(tmp_path: Path) -> None:
    plan = plan_with_times()
    assert (plan.fp4_fraction, plan.stage_fp4_fractions) == (0.5, (0.75, 0.25))
    assert plan.fp4_time_fraction == pytest.approx(0.5)
    assert plan.stage_fp4_time_fractions == (pytest.approx(0.6), pytest.approx(0.4))
    plan.save(tmp_path / "plan.json")
    loaded = PrecisionPlan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.measured == plan.measured
    assert replace(loaded, assignment=plan.assignment) == plan
    without = replace(plan, measured=None)
    assert (without.fp4_time_fraction, without.stage_fp4_time_fractions) == (None, None)
    assert "measured" not in without.to_dict()


def changed(**changes: Any) -> Any:
    return lambda measured: measured.update(changes)


BAD_TIMES: list[tuple[Any, str]] = [
    (changed(seconds={}), "measured.seconds and flops do not both name layer 'layers.0."),
    (changed(reference="fp9"), "Unknown format 'fp9' for measured.reference. `list(snip_hf.formats)` lists all "),
    (changed(reference="mxfp8"), "measured.seconds['layers.0.up']['forward'] has times in 'bf16, fp8, fp4'; expected"),
    (
        lambda m: m["seconds"].pop("layers.0.v"),
        "measured.seconds and flops do not both name layer 'layers.0.v'; expected the same layers.",
    ),
    (
        lambda m: m["seconds"]["layers.0.v"].pop("forward"),
        "measured.seconds['layers.0.v']['forward'] has times in ''; expected one in each format.",
    ),
    (
        lambda m: m["seconds"]["layers.0.v"]["forward"].update(fp8=0.0),
        "measured.seconds['layers.0.v']['forward'] has a time that is not above 0; expected seconds.",
    ),
    (
        lambda m: m["seconds"]["layers.0.v"]["forward"].pop("fp4"),
        "measured.seconds['layers.0.v']['forward'] has times in 'bf16, fp8'; expected one in each format.",
    ),
]


@pytest.mark.parametrize(("change", "message"), BAD_TIMES)
def test_a_plan_with_damaged_times_is_refused_by_field(change: Any, message: str) -> None:
    document = json.loads(json.dumps(plan_with_times().to_dict()))
    change(document["measured"])
    with pytest.raises(ValueError) as caught:
        PrecisionPlan.from_dict(document)
    assert str(caught.value).startswith(message)


def test_a_gemm_without_flops_has_no_time() -> None:
    document = json.loads(json.dumps(plan_with_times().to_dict()))
    document["flops"]["layers.0.v"]["grad_input"] = 0.0
    document["measured"]["seconds"]["layers.0.v"]["grad_input"] = dict.fromkeys(("bf16", "fp8", "fp4"), 0)
    assert PrecisionPlan.from_dict(document).measured is not None


def test_a_plan_that_names_no_reference_counts_time_in_fp8() -> None:
    document = plan_with_times().to_dict()
    assert "reference" not in document["measured"]  # type: ignore[operator]
    loaded = PrecisionPlan.from_dict(document)
    assert loaded.measured is not None and loaded.measured.reference == "fp8"


# -------------------------------------------------------------------------------------------------------- whole runs


def loop_of(folder: Path | None = None, **config: Any) -> Any:
    """A loop that plans by measured times."""
    return Loop(fp4_config(**{**SCHEDULE, "budget": "measured", "target_fp4_fraction": 0.75, **config}), folder)


def test_one_rank_measures_for_all_that_hold_the_same_layers(
    timer: list[GemmShape], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    own = threading.local()

    def note(model: nn.Module, tokens: int, backend: str, path: str | None, **options: Any) -> MeasuredCost:
        asked.append(own.ranks.rank)
        return measure_cost(model, tokens, backend, path, **options)

    monkeypatch.setattr(run_setup, "measure_cost", note)
    monkeypatch.setattr(Ranks, "of_all", lambda timeout: own.ranks)

    def work(ranks: Ranks) -> PrecisionPlan:
        own.ranks = ranks
        return loop_of(policy="layer-type", timing_tokens=48).controller.plan

    one, two, three = on_ranks(3, work)
    assert asked == [0]
    assert one == two == three
    model = tiny_llama(hidden=32)
    convert_model(model, fp4_config())
    assert one.measured == measure_cost(model, 48, "emulated")


def attained(plan: PrecisionPlan, tokens: int) -> float:
    """The share of time in FP4, worked out from the shapes alone."""
    total = in_fp4 = 0.0
    for layer, formats in plan.assignment.items():
        kind = layer.rpartition(".")[2]
        sizes = {"q_proj": (32, 32), "k_proj": (32, 16), "v_proj": (32, 16), "o_proj": (32, 32)}
        features = sizes.get(kind, (80, 32) if kind == "down_proj" else (32, 80))
        for gemm, fmt in formats.items():
            seconds = made_up("", torch.device("cpu"), GemmShape(gemm, tokens, *features), "fp8")
            total, in_fp4 = total + seconds, in_fp4 + seconds * (fmt == "fp4")
    return in_fp4 / total


def test_a_probing_policy_measures_at_its_first_refresh_for_the_tokens_of_its_micro_batch(
    tmp_path: Path, timer: list[GemmShape], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="snip_hf")
    # The probe may take a part of the micro-batch; training multiplies all of it.
    loop = loop_of(tmp_path, granularity="layer").run(1)
    assert timer == []
    assert loop.controller.plan.measured is None
    loop.run(2)
    assert {shape.tokens for shape in timer} == {48}
    count = len(timer)
    saved = PrecisionPlan.load(tmp_path / "snip" / "plan.json")
    assert saved.measured is not None and saved.fp4_time_fraction == 0.0
    loop.run(8)
    assert len(timer) == count
    refreshes = history(tmp_path)[1:]
    assert [line["status"] for line in refreshes] == ["applied", "applied"]
    plan = PrecisionPlan.load(tmp_path / "snip" / "plan.json")
    assert plan == loop.controller.plan
    assert refreshes[-1]["fp4_time_fraction"] == plan.fp4_time_fraction == pytest.approx(attained(plan, 48))
    assert refreshes[-1]["fp4_fraction"] == plan.fp4_fraction
    # Most of the made-up time is overhead, the same for every layer: 11 of 14 layers make up three quarters.
    assert sum(formats["forward"] == "fp4" for formats in plan.assignment.values()) == 11
    assert 0.75 <= plan.fp4_time_fraction < 0.8
    sentence = describe_cost(plan.flops, plan.measured)
    assert any("measured the GEMMs in" in entry and entry.endswith(sentence) for entry in caplog.messages)
    assert any("The emulated backend was timed".lower() in entry.lower() for entry in caplog.messages)
    assert f"{plan.fp4_time_fraction:.1%} of their time" in caplog.text


def test_a_number_of_tokens_in_the_config_is_what_is_measured(timer: list[GemmShape]) -> None:
    loop = loop_of(timing_tokens=4096).run(2)
    assert {shape.tokens for shape in timer} == {4096}
    assert loop.controller.plan.measured is not None and loop.controller.plan.measured.tokens == 4096
    loop.controller.close()


@pytest.mark.parametrize("policy", ["random", "layer-type", "layer-position"])
def test_a_rule_measures_before_the_first_step(policy: str, timer: list[GemmShape], tmp_path: Path) -> None:
    loop = loop_of(tmp_path, policy=policy, timing_tokens=128, target_fp4_fraction=0.5, granularity="gemm")
    assert {shape.tokens for shape in timer} == {128}
    plan = loop.controller.plan
    assert plan.fp4_time_fraction == pytest.approx(attained(plan, 128))
    assert 0.5 <= plan.fp4_time_fraction < 0.5 + 1 / 42
    loop.run(1)
    assert PrecisionPlan.load(tmp_path / "snip" / "plan.json") == plan


def test_policies_that_share_out_nothing_measure_nothing(timer: list[GemmShape], tmp_path: Path) -> None:
    plan = loop_of(policy="uniform-fp4").controller.plan
    assert plan.measured is None
    plan.save(tmp_path / "plan.json")
    assert loop_of(fixed_plan=str(tmp_path / "plan.json"), timing_tokens=3).controller.plan == plan
    assert timer == []


def test_a_resumed_run_decides_by_the_times_of_the_run_before(
    timer: list[GemmShape], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    full = loop_of().run(9)
    for saved_at in (3, 5):  # in the middle of a refresh, and between two
        first = loop_of().run(saved_at)
        state = json.loads(json.dumps(first.controller.state_dict()))
        with monkeypatch.context() as patch:

            def fails(*arguments: object) -> float:
                raise AssertionError("timed again")

            patch.setattr(gemm_timing_module, "time_gemm", fails)
            second = loop_of(timing_file=str(tmp_path / "other.json"))
            second.model.load_state_dict(first.model.state_dict())
            second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
            second.controller.load_state_dict(state)
            second.step = saved_at
            second.run(9)
        assert second.controller.plan.measured == full.controller.plan.measured
        assert second.controller.plan.assignment == full.controller.plan.assignment
        assert second.controller.plan.fp4_time_fraction == full.controller.plan.fp4_time_fraction
        assert second.controller.plan.provenance.step == 6
        first.controller.close()


def test_a_state_of_a_run_by_flops_is_refused_by_one_by_time(timer: list[GemmShape]) -> None:
    state = json.loads(json.dumps(loop_of(budget="flops").run(5).controller.state_dict()))
    with pytest.raises(
        ValueError, match=r"^The checkpoint was trained with budget='flops', this run asks for budget='me"
    ):
        loop_of().controller.load_state_dict(state)


def test_runs_share_a_file_of_times(timer: list[GemmShape], tmp_path: Path) -> None:
    path = tmp_path / "times" / "gemm.json"
    first = loop_of(timing_file=str(path)).run(2)
    count = len(timer)
    second = loop_of(timing_file=str(path)).run(2)
    assert len(timer) == count == 3 * len(read_times(path))
    assert second.controller.plan == first.controller.plan
    loop_of(timing_file=str(path), timing_tokens=49).run(2).controller.close()
    assert len(timer) == 2 * count
    for loop in (first, second):
        loop.controller.close()


def test_a_damaged_file_is_refused_before_training(timer: list[GemmShape], tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=f"^{path} is not a usable file of GEMM times: it is not valid JSON"):
        loop_of(timing_file=str(path))


def test_a_measurement_that_fails_costs_the_refresh_and_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = []

    def out_of_memory_at_first(*arguments: Any) -> float:
        calls.append(arguments)
        if len(calls) == 1:
            raise torch.cuda.OutOfMemoryError("out of memory")
        return made_up(*arguments)

    monkeypatch.setattr(gemm_timing_module, "time_gemm", out_of_memory_at_first)
    loop = loop_of(tmp_path).run(8)
    first, second = history(tmp_path)[1:]
    assert (first["status"], first["reason"]) == ("kept", "OutOfMemoryError: out of memory")
    assert second["status"] == "applied"
    assert math.isclose(second["fp4_time_fraction"], attained(loop.controller.plan, 48))


def test_real_times_on_this_machine_make_a_plan_that_meets_its_target() -> None:
    loop = loop_of(stages=2).run(4)
    plan = loop.controller.plan
    assert plan.measured is not None and plan.measured.machine.backend == "emulated"
    assert plan.stage_fp4_time_fractions is not None and min(plan.stage_fp4_time_fractions) >= 0.75 - 1e-9
    loop.controller.close()
