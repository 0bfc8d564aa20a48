"""Keys of random numbers on the device of the weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from snip_hf import SnipConfig, SnipController
from snip_hf.kernels.tensor_scaled.backend import TENSOR_SCALED
from snip_hf.layers.state import KeysOnDevice, snip_linears


def swapped() -> tuple[nn.Module, SnipController]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    config = SnipConfig(policy="uniform-fp4", formats=("fp4",), backend="emulated")
    return model, SnipController(model, torch.optim.AdamW(model.parameters()), config)


def test_emulated_gemms_draw_by_the_keys_that_were_taken_last() -> None:
    (model, _), (other, _) = swapped(), swapped()
    layers, others = snip_linears(model), snip_linears(other)
    keys, x = KeysOnDevice(layers), torch.randn(8, 32)

    def gradients(one: nn.Module) -> list[Tensor]:
        one.zero_grad()
        one(x).square().sum().backward()
        return [parameter.grad for parameter in one.parameters() if parameter.grad is not None]

    found: list[Tensor] = []
    for step in (1, 2):
        for one in (layers, others):
            for index, layer in enumerate(one.values()):
                layer.snip_state[3] = 2**40 * step - 2**50 * index
        if step == 2:
            stale = gradients(model)
            assert all(map(torch.equal, stale, found))
        keys.renew()
        found = gradients(model)
        assert all(map(torch.equal, found, gradients(other)))
    assert not all(map(torch.equal, found, stale))


def test_keys_of_layers_that_do_not_run_emulated_stay_where_they_are() -> None:
    model, _ = swapped()
    layers = snip_linears(model)
    layers["1"].snip_backend = TENSOR_SCALED
    with pytest.raises(ValueError, match=r"Layer '1' is a SnipLinear on the backend 'tensor-scaled'; expected a layer"):
        KeysOnDevice(layers)


def test_a_tensor_that_another_backend_keeps_of_a_layer_is_no_key() -> None:
    (model, _), (other, _) = swapped(), swapped()
    layers, x = snip_linears(model), torch.randn(8, 32)
    for layer in layers.values():
        layer.snip_cache = torch.full((1,), 7)  # and runs the layer emulated in this pass
    for one in (model, other):
        one(x).square().sum().backward()
    for parameter, expected in zip(model.parameters(), other.parameters(), strict=True):
        assert parameter.grad is not None and expected.grad is not None
        assert torch.equal(parameter.grad, expected.grad)
