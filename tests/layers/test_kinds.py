"""Layer kinds describe their modules, and swapped layers their weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from configs import fp4_config
from registries import restored
from small import convert_in_formats
from torch import Tensor, nn

from snip_hf import SnipConfig, SnipLinear, convert_model, restore_model
from snip_hf.kernels.backend import BACKENDS, register_backend
from snip_hf.kernels.emulated import Emulated
from snip_hf.layers.kinds import LAYER_KINDS, LayerKind, kind_of, known_weights, register_layer_kind
from snip_hf.layers.layer import SnipLayer
from snip_hf.layers.selection import skip_reasons
from snip_hf.layers.state import snip_linears


@pytest.fixture(autouse=True)
def nothing_stays_registered() -> Iterator[None]:
    with restored(LAYER_KINDS):
        yield


class Scale(nn.Module):
    """Not a linear: it has a weight, and a place in its block."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(size))
        self.bias = None
        self.in_features = self.out_features = size

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


class SnipScale(SnipLayer, Scale):
    """Replaces `Scale`."""


class ScaleKind(LayerKind):
    name = "scale"
    layer = SnipScale
    accepts = "Scale of 8"

    def knows(self, module: nn.Module) -> bool:
        return isinstance(module, Scale)

    def refuses(self, module: nn.Module) -> str | None:
        return None if module.in_features == 8 else f"{module.in_features} wide"


def block(**modules: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict(modules)])})


def test_the_weight_of_a_linear_is_its_one_matrix() -> None:
    model = block(up=nn.Linear(8, 4))
    convert_model(model, fp4_config())
    (layer,) = snip_linears(model).values()
    assert type(layer) is SnipLinear and layer.matrix is layer.weight
    assert layer.matrices(layer.weight) == (layer.weight,) and layer.laid_out([layer.weight]) is layer.weight
    assert (layer.in_features, layer.out_features) == (8, 4)
    assert layer.weight_name("layers.0.up") == "layers.0.up.weight"


def test_linears_conv1d_and_experts_are_the_kinds_that_come_with_snip_hf() -> None:
    assert list(LAYER_KINDS) == ["experts", "conv1d", "linear"]
    assert kind_of(nn.Linear(8, 8)) is LAYER_KINDS["linear"] and kind_of(nn.LayerNorm(8)) is None
    assert known_weights(nn.LayerNorm(8)) == known_weights(nn.Embedding(8, 8)) == ()
    linear = nn.Linear(8, 8)
    assert known_weights(linear) == (linear.weight,)


def test_a_weight_that_is_parametrized_is_not_asked_for() -> None:
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    assert known_weights(linear) == ()


def test_a_kind_that_is_added_decides_on_its_modules_and_says_why_not() -> None:
    model = block(up=nn.Linear(8, 8), small=Scale(8), large=Scale(16))
    assert skip_reasons(model, fp4_config()) == {"layers.0.up": None}
    register_layer_kind(ScaleKind())
    reasons = {"layers.0.up": None, "layers.0.small": None, "layers.0.large": "16 wide"}
    assert skip_reasons(model, fp4_config()) == reasons
    assert convert_model(model, fp4_config()) == ["layers.0.up", "layers.0.small"]
    assert skip_reasons(model, fp4_config()) == reasons
    assert convert_model(model, fp4_config(skip_modules=("*.small",))) == ["layers.0.up"]
    assert type(model["layers"][0]["small"]) is Scale
    restore_model(model)
    assert {type(module) for module in model["layers"][0].values()} == {nn.Linear, Scale}


def test_a_swapped_layer_of_another_kind_multiplies_in_its_formats() -> None:
    register_layer_kind(ScaleKind())
    model = block(small=Scale(8))
    convert_in_formats(model, SnipConfig(start_format="fp4", formats=("fp4", "fp8")))
    x = torch.tensor([[6.0, 4.9, 3.0, 2.1, 1.4, 1.1, 0.6, 0.0]])
    found = model["layers"][0]["small"](x)
    assert torch.equal(found, torch.tensor([[6.0, 4.0, 3.0, 2.0, 1.5, 1.0, 0.5, 0.0]]))


def test_a_layer_that_a_backend_refuses_runs_emulated() -> None:
    class Alone(Emulated):
        name = "alone"

        def refuses(self, layer: Any) -> str | None:
            return "too odd" if isinstance(layer, SnipScale) else None

    register_layer_kind(ScaleKind())
    model = block(up=nn.Linear(8, 8), small=Scale(8))
    with restored(BACKENDS):
        register_backend(Alone())
        convert_in_formats(model, fp4_config(backend="alone"))
    assert [layer.snip_backend.name for layer in snip_linears(model).values()] == ["alone", "emulated"]
    assert model["layers"][0]["small"](torch.ones(1, 8)).shape == (1, 8)
