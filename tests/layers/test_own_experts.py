"""Experts modules that do not run through transformers' interface: what they compute is what their classes compute."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from mixtures import EXPERTS, HIDDEN, INNER, OWN_FORWARDS, VOCABULARY, build
from small import convert_in_formats
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

from snip_hf import SnipConfig, restore_model
from snip_hf.layers.experts import SnipExperts
from snip_hf.layers.own_experts import OwnExperts
from snip_hf.layers.selection import skip_reasons
from snip_hf.layers.state import snip_linears
from snip_hf.numerics.gemms import GEMMS

HIGH = SnipConfig(start_format="bf16")
each_family = pytest.mark.parametrize("family", OWN_FORWARDS)


def loss_and_gradients(model: PreTrainedModel) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    ids = torch.randint(0, VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(1))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def experts_of(model: nn.Module) -> list[str]:
    return [name for name, layer in snip_linears(model).items() if isinstance(layer, SnipExperts)]


@each_family
def test_in_high_precision_it_gives_what_its_class_gives_and_so_it_does_when_it_is_restored(family: str) -> None:
    model, plain = build(family), build(family)
    convert_in_formats(model, HIGH)
    found = experts_of(model)
    assert set(found) == {name for name, p in plain.named_parameters() if p.dim() == 3 or ".experts.mlp." in name}
    assert list(model.state_dict()) == list(plain.state_dict())
    (loss, gradients), (expected_loss, expected) = loss_and_gradients(model), loss_and_gradients(plain)
    assert loss == pytest.approx(expected_loss, rel=1e-6) and gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
    restore_model(model)
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    assert loss_and_gradients(model)[0] == expected_loss


@each_family
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_runs_alike_in_low_precision_and_stays_an_instance_of_its_class(family: str, how: str) -> None:
    model = build(family)
    convert_in_formats(model, HIGH)
    for layer in snip_linears(model).values():
        layer.set_formats(dict.fromkeys(GEMMS, "fp4"))
    twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert loss_and_gradients(twin)[0] == loss_and_gradients(model)[0] != loss_and_gradients(build(family))[0]
    restore_model(twin)
    assert not experts_of(twin) and experts_of(model)
    for layer in snip_linears(model).values():
        if isinstance(layer, SnipExperts):
            assert type(layer.owner).__mro__[2].__module__.startswith("transformers.models")


@each_family
def test_matrices_are_those_of_the_experts_and_come_back_in_the_parameter_s_layout(family: str) -> None:
    model = build(family)
    convert_in_formats(model, HIGH)
    for layer in (layer for layer in snip_linears(model).values() if isinstance(layer, SnipExperts)):
        matrices = layer.matrices(layer.weight)
        assert len(matrices) == layer.num_matrices and torch.equal(layer.laid_out(matrices), layer.weight)
        assert {tuple(matrix.shape) for matrix in matrices} == {(layer.out_features, layer.in_features)}
        assert torch.equal(torch.stack(matrices), layer.stacked)


@each_family
def test_their_routers_stay_in_high_precision(family: str) -> None:
    reasons = skip_reasons(build(family), SnipConfig())
    routers = {name: reason for name, reason in reasons.items() if "router" in name}
    assert routers and None not in routers.values()


def test_experts_with_a_gate_of_their_own_are_step3p7_s() -> None:
    config = SimpleNamespace(
        num_local_experts=EXPERTS, hidden_size=HIDDEN, moe_intermediate_size=INNER, hidden_act="silu"
    )
    experts = Step3p7Experts(config, swiglu_limit=1.0)
    generator = torch.Generator().manual_seed(0)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    hidden, weights = torch.randn(12, HIDDEN, generator=generator), torch.rand(12, 2, generator=generator)
    index = torch.rand(12, EXPERTS, generator=generator).topk(2).indices
    model = nn.ModuleDict({"layers": nn.ModuleList([experts])})
    expected = experts(hidden, index, weights)
    assert convert_in_formats(model, HIGH) == ["layers.0.gate_up_proj", "layers.0.down_proj"]
    torch.testing.assert_close(experts(hidden, index, weights), expected)
    assert isinstance(experts, Step3p7Experts)


def test_shared_experts_in_one_parameter_are_inkling_s() -> None:
    modeling = pytest.importorskip("transformers.models.inkling.modeling_inkling")
    config = SimpleNamespace(n_shared_experts=2, hidden_size=HIDDEN, moe_intermediate_size=INNER, hidden_act="silu")
    experts = modeling.InklingSharedExperts(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    hidden, gammas = torch.randn(3, 4, HIDDEN, generator=generator), torch.rand(3, 4, 2, generator=generator)
    model = nn.ModuleDict({"layers": nn.ModuleList([experts])})

    def output_and_gradients() -> list[Tensor]:
        x = hidden.clone().requires_grad_()
        output = experts(x, gammas)
        return [output, *torch.autograd.grad(output.square().sum(), [x, *experts.parameters()])]

    expected = output_and_gradients()
    assert convert_in_formats(model, HIGH) == [f"layers.0.{part}_proj" for part in ("gate", "up", "down")]
    torch.testing.assert_close(output_and_gradients(), expected)
    restore_model(model)
    assert type(experts) is modeling.InklingSharedExperts


def test_a_class_of_the_same_name_from_elsewhere_and_one_with_another_forward_are_left_alone() -> None:
    elsewhere = type("Llama4TextExperts", (nn.Module,), {})()
    assert not OwnExperts().knows(elsewhere)
    module = build("llama4").model.layers[0].feed_forward.experts
    cls = type(module)
    later = type(
        cls.__name__, (cls,), {"forward": lambda self, hidden_states, more: None, "__module__": cls.__module__}
    )
    module.__class__ = later
    assert OwnExperts().refuses(module) == "its forward takes hidden_states, more, expected hidden_states"
