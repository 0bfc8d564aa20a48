"""A plan survives disk and model unchanged, and everything else is refused."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import random
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import fp4_config
from torch import nn

from snip_hf.costs.flops import linear_flops, relative_tokens
from snip_hf.costs.timing import Machine, MeasuredCost
from snip_hf.layers.convert import convert_model
from snip_hf.layers.state import snip_linears
from snip_hf.numerics.formats import FORMATS
from snip_hf.numerics.gemms import GEMMS
from snip_hf.planning.plan import PlanProvenance, PrecisionPlan, raised_plan

FIRST = (
    "A format of your own is registered first: by `snip_hf.register_format`, or by `--import MODULE` on the command "
    "line."
)
ADVICE = "Restore the file or let a run write it again."


def random_plan(seed: int) -> PrecisionPlan:
    rng = random.Random(seed)
    layers = [f"model.layers.{i}.{name}" for i in range(rng.randint(1, 5)) for name in ("q_proj", "down_proj")]
    rng.shuffle(layers)
    cuts = sorted(rng.sample(range(1, len(layers)), rng.randint(0, len(layers) - 1)))
    stages = tuple(tuple(layers[a:b]) for a, b in zip([0, *cuts], [*cuts, len(layers)], strict=True))
    provenance = PlanProvenance(
        step=rng.randint(0, 10**6),
        policy="snip",
        objective=rng.choice([None, rng.random() * 10 ** rng.randint(-300, 300)]),
        gap=rng.choice([None, 0.0, rng.random()]),
        config=rng.choice([None, {"ties": (("q_proj", "k_proj"),), "seed": 3, "plan": None}]),
        model_name=rng.choice([None, "Llama ü"]),
    )
    return PrecisionPlan(
        {layer: {gemm: rng.choice(("bf16", "fp8", "fp4")) for gemm in GEMMS} for layer in layers},
        {layer: {gemm: rng.uniform(1.0, 1e9) for gemm in GEMMS} for layer in rng.sample(layers, len(layers))},
        stages,
        provenance,
    )


def small_plan(**changes: Any) -> PrecisionPlan:
    plan = PrecisionPlan.uniform(
        {"a": dict.fromkeys(GEMMS, 2.0), "b": dict.fromkeys(GEMMS, 1.0)},
        "fp8",
        [["a"], ["b"]],
        PlanProvenance(step=0, policy="uniform-fp8"),
    )
    return dataclasses.replace(plan, **changes)


class Blocks(nn.Module):
    def __init__(self, count: int = 2, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))


def plan_for(model: nn.Module, **formats: str) -> PrecisionPlan:
    """A plan for the SnipLinears of `model`: bf16, except for the GEMMs in `formats`."""
    layers = list(snip_linears(model))
    assignment = {layer: dict.fromkeys(GEMMS, "bf16") | formats for layer in layers}
    return PrecisionPlan(assignment, linear_flops(model), (tuple(layers),), PlanProvenance(step=0, policy="snip"))


def plan_of(model: nn.Module) -> PrecisionPlan:
    """A plan of FP4 for a model that is not converted."""
    twin = copy.deepcopy(model)
    convert_model(twin, fp4_config())
    return plan_for(twin, **dict.fromkeys(GEMMS, "fp4"))


def test_a_saved_plan_loads_as_the_same_plan_and_saves_as_the_same_bytes(tmp_path: Path) -> None:
    for seed in range(60):
        plan = random_plan(seed)
        plan.save(tmp_path / "plan.json")
        loaded = PrecisionPlan.load(tmp_path / "plan.json")
        assert loaded == plan
        loaded.save(tmp_path / "again.json")
        assert (tmp_path / "again.json").read_bytes() == (tmp_path / "plan.json").read_bytes()


def test_the_order_in_which_layers_were_given_does_not_change_the_file() -> None:
    plan = random_plan(5)
    turned = PrecisionPlan(
        {layer: dict(reversed(plan.assignment[layer].items())) for layer in reversed(plan.assignment)},
        dict(reversed(plan.flops.items())),
        plan.stages,
        plan.provenance,
    )
    assert json.dumps(turned.to_dict()) == json.dumps(plan.to_dict())


def test_the_file_has_the_documented_layout(tmp_path: Path) -> None:
    small_plan().save(tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    assert list(document) == ["schema_version", "kind", "assignment", "flops", "stages", "provenance"]
    assert document["schema_version"] == 1
    assert document["kind"] == "snip-hf precision plan"
    assert document["assignment"]["a"] == {"forward": "fp8", "grad_input": "fp8", "grad_weight": "fp8"}
    assert document["stages"] == [["a"], ["b"]]
    assert document["provenance"]["policy"] == "uniform-fp8"
    assert document["provenance"]["gap"] is None


def test_fp4_fractions_are_those_of_exact_rational_arithmetic() -> None:
    def share(plan: PrecisionPlan, layers: tuple[str, ...]) -> Fraction:
        cells = [(layer, gemm) for layer in layers for gemm in GEMMS]
        total = sum(Fraction(plan.flops[layer][gemm]) for layer, gemm in cells)
        fp4 = sum(Fraction(plan.flops[layer][gemm]) for layer, gemm in cells if plan.assignment[layer][gemm] == "fp4")
        return Fraction(fp4, total)

    for seed in range(60):
        plan = random_plan(seed)
        assert plan.fp4_fraction == pytest.approx(float(share(plan, tuple(plan.assignment))), rel=1e-15)
        assert plan.stage_fp4_fractions == pytest.approx([float(share(plan, s)) for s in plan.stages], rel=1e-15)


def test_changes_name_what_leads_from_one_plan_to_the_other() -> None:
    old = small_plan()
    new = small_plan(assignment={"a": old.assignment["a"], "b": {**old.assignment["b"], "grad_input": "fp4"}})
    assert old.changes(new) == {"b:grad_input": ("fp8", "fp4")}
    assert new.changes(old) == {"b:grad_input": ("fp4", "fp8")}
    assert old.changes(old) == {}


def test_changes_leave_out_the_grad_weight_of_a_layer_that_is_frozen_in_one_plan() -> None:
    trained = small_plan()
    gemms = ("forward", "grad_input")
    frozen = small_plan(
        assignment={"a": trained.assignment["a"], "b": dict.fromkeys(gemms, "fp4")},
        flops={"a": trained.flops["a"], "b": dict.fromkeys(gemms, 1.0)},
    )
    assert trained.changes(frozen) == {f"b:{gemm}": ("fp8", "fp4") for gemm in gemms}
    assert frozen.changes(trained) == {f"b:{gemm}": ("fp4", "fp8") for gemm in gemms}


def test_changes_between_plans_of_two_models_are_refused() -> None:
    other = PrecisionPlan.uniform({"a": dict.fromkeys(GEMMS, 2.0)}, "fp8", [["a"]], PlanProvenance(step=0, policy="x"))
    for one, two in ((small_plan(), other), (other, small_plan())):
        with pytest.raises(ValueError) as caught:
            one.changes(two)
        assert str(caught.value) == "Layer 'b' is in only one of the two plans; compare plans of the same model."


def test_a_plan_does_not_change_with_the_mappings_it_was_built_from_and_cannot_be_written() -> None:
    assignment = {layer: dict(formats) for layer, formats in small_plan().assignment.items()}
    config = {"ties": [["a", "b"]]}
    plan = small_plan(assignment=assignment, provenance=PlanProvenance(step=0, policy="snip", config=config))
    assignment["a"]["forward"] = "fp4"
    config["ties"][0][0] = "changed"
    assert plan.assignment["a"]["forward"] == "fp8"
    assert plan.to_dict()["provenance"]["config"] == {"ties": [["a", "b"]]}
    with pytest.raises(TypeError):
        plan.assignment["a"]["forward"] = "fp4"  # type: ignore[index]
    with pytest.raises(TypeError):
        plan.flops["c"] = {}  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.stages = ()  # type: ignore[misc]
    plan.to_dict()["assignment"]["a"]["forward"] = "fp4"
    assert plan.assignment["a"]["forward"] == "fp8"


ROW = {"forward": 1.0, "grad_input": 1.0, "grad_weight": 1.0}
FP8 = dict.fromkeys(GEMMS, "fp8")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"assignment": {}}, "assignment is empty, expected at least one layer."),
        ({"assignment": {"a": FP8, "b": "fp8"}}, "assignment['b'] is 'fp8', expected an object."),
        (
            {"assignment": {"a": FP8, "b": {"forward": "fp8", "grad_input": "fp8"}}},
            "assignment['b'] has no format for grad_weight, which has FLOPs: the plan was made for a frozen weight. "
            "Freeze the weight, or use a plan that was made for a trained one.",
        ),
        (
            {"assignment": {"a": FP8, "b": {**FP8, "backward": "fp8"}}},
            "assignment['b'] has the entries 'forward, grad_input, grad_weight, backward'; expected exactly forward, "
            "grad_input, grad_weight.",
        ),
        (
            {"assignment": {"a": FP8, "b": {**FP8, "forward": "fp6"}}},
            "Unknown format 'fp6' for assignment['b']['forward']. Did you mean 'mxfp6'? "
            f"`list(snip_hf.formats)` lists all {len(FORMATS)}. {FIRST}",
        ),
        ({"assignment": {"a": FP8}}, "assignment has no entry for layer 'b'; flops and assignment must name the same."),
        ({"flops": {"a": ROW}}, "flops has no entry for layer 'b'; flops and assignment must name the same."),
        (
            {"flops": {"a": ROW, "b": {**ROW, "forward": -1.0}}},
            "flops['b']['forward'] is -1.0, expected a number of at least 0.",
        ),
        (
            {"flops": {"a": ROW, "b": dict.fromkeys(GEMMS, 0.0)}},
            "stages[1] has no FLOPs, so its FP4 share means nothing; leave the stage out.",
        ),
        ({"stages": (("a",),)}, "stages name layer 'b' 0 times, expected 1."),
        ({"stages": (("a",), ("b", "a"))}, "stages name layer 'a' 2 times, expected 1."),
        ({"stages": (("a",), ("b", "c"))}, "stages name layer 'c' 1 times, expected 0."),
        ({"stages": (("a", "b"), ())}, "stages[1] has no FLOPs, so its FP4 share means nothing; leave the stage out."),
        ({"stages": ("a", "b")}, "stages[0] is 'a', expected a list."),
    ],
)
def test_a_file_that_is_not_a_plan_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        small_plan(**changes)
    assert str(caught.value) == message


def edited(**changes: Any) -> str:
    return json.dumps({**small_plan().to_dict(), **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "the document is a list of 0, expected an object."),
        ("{}", "kind is None, expected 'snip-hf precision plan'."),
        (edited(schema_version=2), "schema_version is 2, expected 1."),
        (edited(provenance={"step": "1", "policy": "x"}), "provenance.step is '1', expected an integer."),
    ],
)
def test_a_file_that_is_no_plan_is_refused_with_its_name_the_field_and_a_way_out(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        PrecisionPlan.load(path)
    assert str(caught.value) == f"{path} cannot be used as a precision plan: {message} {ADVICE}"


def test_apply_sets_every_gemm_of_every_layer_by_exact_name() -> None:
    model = Blocks(11)  # layers.1 and layers.10: names match whole, not by prefix
    names = convert_model(model, fp4_config())
    plan = plan_for(model, grad_input="fp4")
    rng = random.Random(0)
    plan = dataclasses.replace(
        plan, assignment={name: {gemm: rng.choice(("bf16", "fp8", "fp4")) for gemm in GEMMS} for name in names}
    )
    plan.apply(model)
    assert {name: layer.formats for name, layer in snip_linears(model).items()} == plan.to_dict()["assignment"]


@pytest.mark.parametrize(
    ("planned", "blocks", "message"),
    [
        (2, 3, "The plan has no entry for layer 'layers.2' (it names 2 layers, e.g. 'layers.0'). "),
        (
            3,
            2,
            "The plan names layer 'layers.2', which is not a swapped layer of the model (it has 2, e.g. 'layers.0'). ",
        ),
    ],
)
def test_apply_refuses_a_plan_of_other_layers_and_writes_nothing(planned: int, blocks: int, message: str) -> None:
    other, model = Blocks(planned), Blocks(blocks)
    convert_model(other, fp4_config())
    convert_model(model, fp4_config())
    before = [layer.snip_state.clone() for layer in snip_linears(model).values()]
    with pytest.raises(KeyError) as caught:
        plan_for(other, forward="fp4").apply(model)
    assert caught.value.args[0] == (
        f"{message}Was it made for another model? Run `snip-hf inspect PLAN --model MODEL` to compare."
    )
    assert all(torch.equal(a, b.snip_state) for a, b in zip(before, snip_linears(model).values(), strict=True))


def test_a_misspelt_layer_is_the_example_of_what_the_plan_names() -> None:
    model = Blocks(2)
    convert_model(model, fp4_config())
    plan = plan_for(model, forward="fp4")
    with pytest.raises(KeyError, match=r"no entry for layer 'layers\.x' \(it names 2 layers, e\.g\. 'layers\.1'\)"):
        plan.check_layers(["layers.0", "layers.x"])


def test_apply_refuses_what_does_not_fit_in_one_sentence_and_leaves_the_layers_plain() -> None:
    model, wide = Blocks(), Blocks(width=12)
    with pytest.raises(ValueError) as caught:
        plan_of(wide).apply(model)
    assert str(caught.value) == (
        "Blocks has no swapped layers that a plan could give formats. Call convert_model(model, config) before, with "
        "the skip_modules of the run that made the plan."
    )
    convert_model(model, fp4_config())
    with pytest.raises(ValueError) as caught:
        plan_of(wide).apply(model)
    assert str(caught.value) == (
        "The plan is for a layer 'layers.0' of 288 FLOPs per token, the model's has 128. Was it made for another "
        "model? Run `snip-hf inspect PLAN --model MODEL` to compare."
    )
    assert all(layer.snip_is_plain for layer in snip_linears(model).values())


def test_mismatches_lists_both_directions_in_order() -> None:
    assert small_plan().mismatches(["x", "b", "y"]) == (["x", "y"], ["a"])
    assert small_plan().mismatches(["b", "a"]) == ([], [])


def test_a_plan_with_a_models_flops_counts_its_shares_by_them() -> None:
    plan = small_plan(assignment={"a": dict.fromkeys(GEMMS, "fp4"), "b": dict.fromkeys(GEMMS, "fp8")})
    assert plan.fp4_fraction == 2 / 3
    flops = {"b": dict.fromkeys(GEMMS, 1.0), "a": {**dict.fromkeys(GEMMS, 2.0), "grad_weight": 0.0}}
    changed = plan.with_flops(flops)
    assert changed.fp4_fraction == 4 / 7
    assert changed.stage_fp4_fractions == (1.0, 0.0)
    assert changed == dataclasses.replace(plan, flops=flops)
    assert plan.with_flops({layer: dict(row) for layer, row in plan.flops.items()}) is plan


def test_measured_times_stay_with_a_plan_whose_flops_are_the_models() -> None:
    machine = Machine("NVIDIA H200", "2.11.0+cu130", "hopper", "bfloat16")
    seconds = {layer: {gemm: dict.fromkeys(FORMATS, 1.0) for gemm in GEMMS} for layer in "ab"}
    plan = small_plan(measured=MeasuredCost(machine=machine, tokens=8, seconds=seconds))
    assert plan.with_flops(plan.flops).measured is plan.measured
    assert plan.with_flops({**plan.flops, "b": ROW}).measured is not None
    frozen = {"forward": 1.0, "grad_input": 1.0}
    assert plan.with_flops({**plan.flops, "b": frozen}).measured is None


def test_a_plan_is_not_for_the_flops_of_other_layers() -> None:
    for flops in ({"a": ROW}, {"a": ROW, "b": ROW, "c": ROW}):
        with pytest.raises(KeyError, match="Was it made for another model"):
            small_plan().with_flops(flops)


def test_tokens_turn_flops_into_those_that_run_and_come_back_from_the_file(tmp_path: Path) -> None:
    formats = {"a": dict.fromkeys(GEMMS, "fp4"), "b": dict.fromkeys(GEMMS, "fp8")}
    plan = small_plan(stages=[["a", "b"]], assignment=formats)
    assert plan.fp4_fraction == 6 / 9 and "tokens" not in plan.to_dict()
    counted = dataclasses.replace(plan, tokens={"a": 0.25, "b": 2.0})
    # 6 FLOPs per token for a quarter of the tokens, 3 for each token twice.
    assert counted.fp4_fraction == counted.stage_fp4_fractions[0] == 1.5 / 7.5
    assert counted.executed["b"] == dict.fromkeys(GEMMS, 2.0) and counted.flops == plan.flops
    counted.save(tmp_path / "plan.json")
    assert PrecisionPlan.load(tmp_path / "plan.json") == counted
    machine = Machine(device="x", torch_version="2", backend="y", dtype="z")
    seconds = {layer: {gemm: {"fp8": 1.0, "fp4": 1.0, "bf16": 2.0} for gemm in GEMMS} for layer in ("a", "b")}
    timed = dataclasses.replace(counted, measured=MeasuredCost(machine=machine, tokens=8, seconds=seconds))
    assert timed.fp4_time_fraction == 0.25 / 2.25 and timed.linear_speedup() == 2.0
    assert timed.measured.seconds == seconds
    assert counted.with_flops({**plan.flops, "b": {"forward": 1.0, "grad_input": 1.0}}).fp4_fraction == 1.5 / 5.5


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ({"a": 1.0}, "tokens and flops do not both name layer 'b'; expected the same layers."),
        ({"a": 1.0, "b": math.nan}, "tokens['b'] is nan, expected a finite number or an object."),
        ({"a": 1.0, "b": 0.0}, "No layer of stages[1], such as 'b', saw a token of the micro-batch"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(tokens: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        small_plan(tokens=tokens)


@pytest.mark.parametrize(
    ("seen", "tokens", "expected"),
    [
        ({"a": 8, "b": 8}, 8, None),
        ({"a": 16, "b": 16}, 8, None),
        ({"a": 0, "b": 0}, 8, None),
        ({}, 8, None),
        ({"a": 4, "b": 16}, 8, {"a": 0.5, "b": 2.0}),
        ({"a": 4, "b": 16}, None, {"a": 0.25, "b": 1.0}),
        ({"a": 8, "mlp.experts.up_proj": 8}, 8, {"a": 1.0, "mlp.experts.up_proj": 1.0}),
        ({"a": 8, "mlp.shared_experts.up_proj": 8}, 8, None),
    ],
)
def test_tokens_are_told_where_layers_saw_different_numbers_or_there_are_experts(
    seen: dict[str, int], tokens: int | None, expected: dict[str, float] | None
) -> None:
    assert relative_tokens(seen, seen, tokens) == expected


def test_tokens_are_told_where_a_grad_input_did_not_run_for_all_of_them() -> None:
    found = relative_tokens({"a": 8, "b": 8, "c": 8}, {"a": 0, "b": 8, "c": 4}, 8)
    assert found == {"a": {"forward": 1.0, "grad_input": 0.0}, "b": 1.0, "c": {"forward": 1.0, "grad_input": 0.5}}


def test_a_grad_input_that_does_not_run_has_no_share(tmp_path: Path) -> None:
    formats = {"a": {**dict.fromkeys(GEMMS, "fp8"), "grad_input": "fp4"}, "b": dict.fromkeys(GEMMS, "fp4")}
    plan = small_plan(stages=[["a", "b"]], assignment=formats)
    assert plan.fp4_fraction == 5 / 9
    counted = dataclasses.replace(plan, tokens={"a": {"forward": 1.0, "grad_input": 0.0}, "b": 2.0})
    assert counted.fp4_fraction == 6 / 10
    assert counted.executed["a"] == {"forward": 2.0, "grad_input": 0.0, "grad_weight": 2.0}
    counted.save(tmp_path / "plan.json")
    assert PrecisionPlan.load(tmp_path / "plan.json") == counted
    machine = Machine(device="x", torch_version="2", backend="y", dtype="z")
    seconds = {layer: {gemm: {"fp8": 1.0, "fp4": 1.0} for gemm in GEMMS} for layer in ("a", "b")}
    timed = dataclasses.replace(counted, measured=MeasuredCost(machine=machine, tokens=8, seconds=seconds))
    assert timed.fp4_time_fraction == 6 / 8


# --- raised formats


def plan_in(**formats: str) -> PrecisionPlan:
    assignment = {layer: dict.fromkeys(GEMMS, name) for layer, name in formats.items()}
    flops = {layer: dict.fromkeys(GEMMS, 2.0) for layer in formats}
    return PrecisionPlan(assignment, flops, (tuple(formats),), PlanProvenance(step=3, policy="snip"))


@pytest.mark.parametrize(
    ("formats", "steps"),
    [
        (("fp4", "fp8"), ["fp4", "fp8", "bf16", "bf16"]),
        (("fp4", "mxfp4", "fp8"), ["mxfp4", "fp8", "bf16", "bf16"]),
        (("mxfp4", "mxfp6", "mxfp8"), ["mxfp4", "mxfp6", "mxfp8", "bf16"]),
        (("fp4", "bf16"), ["fp4", "bf16", "bf16"]),
    ],
)
def test_formats_go_up_by_their_bits(formats: tuple[str, ...], steps: list[str]) -> None:
    found = plan_in(a=steps[0])
    seen = [steps[0]]
    for _ in steps[1:]:
        found = raised_plan(found, formats)
        assert len(set(found.assignment["a"].values())) == 1
        seen.append(found.assignment["a"]["forward"])
    assert seen == steps


def test_stages_flops_and_provenance_stay_and_what_is_unquantized() -> None:
    before = plan_in(a="fp4", b="bf16", c="fp8")
    after = raised_plan(before, ("fp4", "fp8"))
    assert {layer: row["grad_weight"] for layer, row in after.assignment.items()} == {
        "a": "fp8",
        "b": "bf16",
        "c": "bf16",
    }
    assert (after.flops, after.stages, after.provenance) == (before.flops, before.stages, before.provenance)
