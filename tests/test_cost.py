"""FLOPs of every GEMM against torch's own flop counter on the plain model."""

from __future__ import annotations

import pytest
import torch
from models import LINEARS, batch, build
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from snip_hf import SnipConfig, convert_model, restore_model
from snip_hf.cost import linear_flops


def counted(layer: nn.Linear, tokens: int, backward: bool) -> float:
    """FLOPs that torch counts in this layer for `tokens` tokens, forward or backward."""
    x = torch.randn(tokens, layer.in_features, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        y = layer(x)
        forward = counter.get_total_flops()
        y.sum().backward()
    return counter.get_total_flops() - forward if backward else forward


@pytest.mark.parametrize("family", LINEARS)
def test_match_torch_s_flop_counter_layer_by_layer(family: str) -> None:
    model, tokens = build(family), 10
    convert_model(model, SnipConfig())
    flops = linear_flops(model)
    restore_model(model)
    assert set(flops) == LINEARS[family]
    for name, gemms in flops.items():
        layer = model.get_submodule(name)
        assert gemms["forward"] * tokens == counted(layer, tokens, backward=False)
        assert (gemms["grad_input"] + gemms["grad_weight"]) * tokens == counted(layer, tokens, backward=True)
        assert gemms["grad_input"] == gemms["grad_weight"]


def test_name_the_layers_in_the_model_s_order_with_all_three_gemms() -> None:
    model = build("llama")
    names = convert_model(model, SnipConfig())
    flops = linear_flops(model)
    assert list(flops) == names
    gemms = {"forward": 2.0 * 64 * 32, "grad_input": 2.0 * 64 * 32, "grad_weight": 2.0 * 64 * 32}
    assert flops["model.layers.0.self_attn.k_proj"] == gemms  # two of four heads: 32 of 64 features


def test_a_frozen_weight_costs_no_weight_gradient() -> None:
    model = build("llama")
    convert_model(model, SnipConfig())
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    flops = linear_flops(model)
    assert flops["model.layers.0.mlp.up_proj"] == {"forward": 12288.0, "grad_input": 12288.0, "grad_weight": 0.0}
    assert flops["model.layers.1.mlp.up_proj"]["grad_weight"] == 12288.0


def test_an_unconverted_model_has_none() -> None:
    assert linear_flops(build("llama")) == {}


def test_counting_leaves_no_trace_in_the_model() -> None:
    model = build("llama")
    convert_model(model, SnipConfig())
    before = model(**batch()).loss
    linear_flops(model)
    assert torch.equal(model(**batch()).loss, before)
