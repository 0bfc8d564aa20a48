"""The noise of a weight's gradient is that of the GEMM itself, where all tokens are sampled."""

from __future__ import annotations

import math

import pytest
import torch
from small import tiny_lm, tokens
from sums_of_layer import LayerSums
from torch import Tensor, nn

from snip_hf import SnipConfig, estimate_divergence
from snip_hf.estimation.gradient_noise import pending_gradient_noise
from snip_hf.estimation.pending import read_all
from snip_hf.estimation.samples import LayerSample
from snip_hf.kernels.rounding import fake_quantize
from snip_hf.numerics.formats import FORMATS

KEY = 12345


def operands(count: int = 256) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(count, size, generator=generator) for size in (40, 24)) + (
        torch.randn(24, 40, generator=generator),
    )  # type: ignore[return-value]


@pytest.mark.parametrize("name", ["fp8", "fp4"])
def test_it_is_the_error_of_the_gemm(name: str) -> None:
    x, g, w = operands()
    sums = LayerSums(LayerSample(len(x), x, g), w, None, 1)
    [square] = read_all([pending_gradient_noise(sums, name, KEY)])
    key = KEY if FORMATS[name].gradient.stochastic else None
    rounded_g = fake_quantize(g, FORMATS[name], "gradient", 0, key, 0, 1)
    rounded_x = fake_quantize(x, FORMATS[name], "activation", 0, None, 0, 1)
    expected = (rounded_g.t() @ rounded_x - g.t() @ x).square().sum()
    assert square == pytest.approx(float(expected), rel=1e-4)


def test_a_table_has_the_ratio_of_each_trained_layer_only_where_it_is_asked_for() -> None:
    model, batch = tiny_lm(), tokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    table = estimate_divergence(model, batch, optimizer, SnipConfig(guard="raise", guard_noise=2.0))
    assert set(table.noise) == {"layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down"}
    for row in table.noise.values():
        assert set(row) == {"fp4", "fp8"} and math.inf > row["fp8"] > row["fp4"] > 1
    without = estimate_divergence(model, batch, optimizer, SnipConfig())
    assert without.noise == {} and without.rows == table.rows


def test_a_frozen_layer_has_none() -> None:
    model: nn.Module = tiny_lm()
    model.layers[0].up.weight.requires_grad_(False)  # type: ignore[index, union-attr]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    table = estimate_divergence(model, tokens(), optimizer, SnipConfig(guard="raise", guard_noise=2.0))  # type: ignore[arg-type]
    assert set(table.noise) == {"layers.0.down", "layers.1.up", "layers.1.down"}
