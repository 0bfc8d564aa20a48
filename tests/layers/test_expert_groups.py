"""Groups of experts: layers of their own, with one parameter and one operator for all groups of a projection."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch
from mixtures import CONFIGS, EXPERTS, HIDDEN, OWN_FORWARDS, VOCABULARY, build
from slow_cases import slow, slow_but
from small import convert_in_formats, tiny_llama
from torch import Tensor, nn
from torch._dynamo.utils import counters

from snip_hf import SnipConfig, convert_model, coverage, restore_model
from snip_hf.layers.expert_groups import SnipExpertGroup
from snip_hf.layers.experts import SnipExperts
from snip_hf.layers.state import one_per_weight, set_step, snip_linears, without_group
from snip_hf.layers.weight_matrices import weight_matrices
from snip_hf.numerics.gemms import GEMMS

HIGH = SnipConfig(start_format="bf16", expert_groups=2)
each_family = pytest.mark.parametrize("family", slow_but([*CONFIGS, *OWN_FORWARDS], "gpt-oss", "dbrx"))


def loss_and_gradients(model: nn.Module) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    ids = torch.randint(0, VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(1))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(one: tuple[float, dict[str, Tensor]], other: tuple[float, dict[str, Tensor]]) -> bool:
    return one[0] == other[0] and all(torch.equal(gradient, other[1][name]) for name, gradient in one[1].items())


def groups_of(model: nn.Module) -> dict[str, SnipExpertGroup]:
    return {name: layer for name, layer in snip_linears(model).items() if isinstance(layer, SnipExpertGroup)}


@each_family
def test_in_high_precision_groups_change_nothing(family: str) -> None:
    model, undivided = build(family), build(family)
    keys, parameters = list(model.state_dict()), {name: id(p) for name, p in model.named_parameters()}
    names = convert_in_formats(model, HIGH)
    projections = convert_in_formats(undivided, SnipConfig(start_format="bf16"))
    found = groups_of(model)
    experts = {name for name, layer in snip_linears(undivided).items() if isinstance(layer, SnipExperts)}
    assert set(map(without_group, found)) == experts and len(found) == 2 * len(experts)
    assert list(dict.fromkeys(map(without_group, names))) == projections and names == list(snip_linears(model))
    assert list(model.state_dict()) == keys and {name: id(p) for name, p in model.named_parameters()} == parameters
    assert same(loss_and_gradients(model), loss_and_gradients(undivided))
    restore_model(model)
    plain = build(family)
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    assert same(loss_and_gradients(model), loss_and_gradients(plain))


def test_groups_are_called_by_their_projection_and_their_experts() -> None:
    model = build("mixtral")
    convert_in_formats(model, HIGH)
    first = [name for name in groups_of(model) if ".0." in name]
    projection = "model.layers.0.mlp.experts"
    assert first == [
        f"{projection}.{part}[{ends}]" for part in ("gate_up_proj", "down_proj") for ends in ("0:2", "2:4")
    ]
    assert len(one_per_weight(snip_linears(model))) == len(snip_linears(model)) - 4


@each_family
def test_a_group_has_the_matrices_of_its_experts_and_zeros_for_others(family: str) -> None:
    model = build(family)
    convert_in_formats(model, HIGH)
    for name, group in groups_of(model).items():
        weight = model.get_parameter(group.weight_name(name))
        assert group.weight is weight
        every = group.layout.stacked(weight)
        assert torch.equal(torch.stack(group.matrices(weight)), every[group.experts])
        assert torch.equal(group.stacked, every[group.experts]) and len(group.matrices(weight)) == group.num_matrices
        own = group.layout.stacked(group.laid_out(group.matrices(weight)))
        assert torch.equal(own[group.experts], every[group.experts])
        assert int(own.abs().sum((1, 2)).count_nonzero()) == group.num_matrices


@each_family
def test_a_format_of_one_group_changes_its_tokens_alone(family: str) -> None:
    model = build(family)
    convert_in_formats(model, HIGH)
    exact = loss_and_gradients(model)
    for name, group in groups_of(model).items():
        group.set_formats({**dict.fromkeys(GEMMS, "bf16"), "grad_weight": "fp4"})
        found, weight = loss_and_gradients(model), group.weight_name(name)
        assert found[0] == exact[0]
        assert all(torch.equal(one, exact[1][other]) for other, one in found[1].items() if other != weight)
        changed = group.layout.stacked(found[1][weight] - exact[1][weight]).abs().sum((1, 2)) > 0
        assert bool(changed[group.experts].any()) and int(changed.sum()) == int(changed[group.experts].sum())
        group.set_formats(dict.fromkeys(GEMMS, "bf16"))


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_runs_alike_and_on_its_own(how: str) -> None:
    model = build("dbrx")
    convert_in_formats(model, HIGH)
    for index, layer in enumerate(groups_of(model).values()):
        layer.set_formats(dict.fromkeys(GEMMS, ("fp4", "fp8")[index % 2]))
    twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    expected = loss_and_gradients(model)
    assert same(loss_and_gradients(twin), expected)
    for layer in groups_of(twin).values():
        layer.set_formats(dict.fromkeys(GEMMS, "bf16"))
    assert loss_and_gradients(twin)[0] != expected[0] and same(loss_and_gradients(model), expected)
    restore_model(twin)
    assert not groups_of(twin) and groups_of(model)
    assert "snip" not in repr(twin) and "gate_up_proj" not in repr(model)


def test_another_number_of_groups_divides_anew_and_the_same_one_changes_nothing() -> None:
    model = build("mixtral")
    convert_in_formats(model, HIGH)
    before = snip_linears(model)
    convert_in_formats(model, HIGH)
    assert snip_linears(model) == before
    convert_in_formats(model, SnipConfig(expert_groups=EXPERTS))
    assert len(groups_of(model)) == 4 * EXPERTS and {group.num_matrices for group in groups_of(model).values()} == {1}
    assert {name for group in groups_of(model).values() for name in group.formats.values()} == {"fp8"}
    convert_in_formats(model, SnipConfig(start_format="bf16"))
    assert not groups_of(model)
    undivided = build("mixtral")
    convert_in_formats(undivided, SnipConfig())
    for layer in snip_linears(model).values():
        layer.set_formats(dict.fromkeys(GEMMS, "fp8"))
    set_step(snip_linears(model), 0, 0, 0)
    assert list(snip_linears(model)) == list(snip_linears(undivided))
    assert same(loss_and_gradients(model), loss_and_gradients(undivided))


def test_what_does_not_divide_the_experts_is_refused() -> None:
    message = "^expert_groups=3 does not divide the 4 experts of 'gate_up_proj' in a MixtralExperts; expected one of "
    model = build("mixtral")
    with pytest.raises(ValueError, match=f"{message}1, 2, 4\\.$"):
        convert_model(model, SnipConfig(expert_groups=3))
    assert not snip_linears(model)


def test_without_experts_the_log_says_that_groups_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_llama(hidden=32)
    with caplog.at_level(logging.WARNING):
        names = convert_model(model, HIGH)
        assert convert_model(model, HIGH) == names  # as a run converts again what is converted: said once
    assert len(names) == 14
    (message,) = [record.getMessage() for record in caplog.records if "expert_groups" in record.getMessage()]
    assert message.startswith("snip-hf: expert_groups=2 has no effect: no projection of experts is swapped.")


def test_a_projection_can_be_left_in_high_precision_by_its_name() -> None:
    model = build("mixtral")
    config = SnipConfig(
        expert_groups=2, skip_modules=("*.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj")
    )
    convert_in_formats(model, HIGH)
    names = convert_model(model, config)
    assert [name for name in names if "experts" in name] == [
        f"model.layers.0.mlp.experts.down_proj[{ends}]" for ends in ("0:2", "2:4")
    ]
    uncovered = {one.name for one in weight_matrices(model, None) if one.reason is not None and "experts" in one.name}
    assert uncovered == {f"model.layers.*.mlp.experts.{part}" for part in ("gate_up_proj", "down_proj")}
    assert loss_and_gradients(model)[0] > 0


def test_groups_are_covered_as_their_projection_is_and_count_their_own_tokens() -> None:
    ids = torch.randint(0, VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(1))
    batch, undivided, model = {"input_ids": ids, "labels": ids}, build("mixtral"), build("mixtral")
    convert_model(undivided, SnipConfig())
    convert_model(model, SnipConfig(expert_groups=2))
    assert coverage(model, batch) == coverage(undivided, batch)


@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not:DeprecationWarning")
@pytest.mark.parametrize("family", ["dbrx", slow("gpt-oss")])
def test_a_compiled_module_is_one_graph_that_reads_the_formats_of_groups_as_data(family: str) -> None:
    model = build(family)
    convert_in_formats(model, HIGH)
    module = next(group.owner for group in groups_of(model).values())
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    generator, before = torch.Generator().manual_seed(0), counters["stats"]["unique_graphs"]
    hidden, weights = torch.randn(1, 12, HIDDEN, generator=generator), torch.rand(12, 2, generator=generator)
    hidden = hidden if family == "dbrx" else hidden[0]
    own = [group for group in groups_of(model).values() if group.owner is module]
    for formats in (("fp4", "fp8"), ("bf16", "fp4")):
        for index, group in enumerate(own):
            group.set_formats(dict.fromkeys(GEMMS, formats[index % 2]))
        index = torch.rand(12, EXPERTS, generator=generator).topk(2).indices
        found = []
        for run in (module, compiled):
            module.zero_grad()
            y = run(hidden, index, weights)
            y.square().sum().backward()
            found.append([y.detach(), *(p.grad.clone() for p in module.parameters())])
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert counters["stats"]["unique_graphs"] == before + 1
