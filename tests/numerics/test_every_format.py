"""Properties of every built-in format: edge cases, unbiased stochastic rounding, noise, stored bits."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from snip_hf.numerics.formats import FORMATS, NumberFormat, Operand
from snip_hf.numerics.gemms import OPERANDS
from snip_hf.numerics.grids import ElementGrid, floats, integers
from snip_hf.numerics.rounding import quantize, quantize_operand

QUANTIZED = [name for name, format in FORMATS.items() if format.is_quantized]


# --------------------------------------------------------------------------------------------------------- edge cases


@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("fmt", QUANTIZED)
class TestEveryFormat:
    def test_zeros_stay_zero_and_so_do_zero_blocks(self, fmt: str, operand: str) -> None:
        assert not quantize(torch.zeros(40, 70), fmt, operand, seed=0).any()
        x = torch.zeros(256, 256)
        x[:128, :128] = torch.randn(128, 128, generator=torch.Generator().manual_seed(0))
        got = quantize(x, fmt, operand, seed=0)
        assert got.isfinite().all() and not got[128:].any() and not got[:, 128:].any()

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_a_block_with_nan_or_infinity_is_nan_in_full(self, fmt: str, operand: str, bad: float) -> None:
        rule = FORMATS[fmt].operand(operand)
        x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
        x[3, 5] = bad
        got = quantize(x, fmt, operand, seed=0)
        if not rule.quantized:
            assert torch.equal(got.nan_to_num(7.0), x.nan_to_num(7.0))
            return
        is_rotated = operand != "gradient" and "forward" in FORMATS[fmt].rotated
        is_rotated |= operand == "gradient" and "grad_input" in FORMATS[fmt].rotated
        across, along = rule.block or (256, 256)
        if FORMATS[fmt].tensor_scale is not None:
            across, along = 256, 256
        along = max(along, FORMATS[fmt].rotation) if is_rotated else along
        expected = torch.zeros(256, 256, dtype=torch.bool)
        first = 3 // across * across
        expected[first : first + across, :along] = True
        assert torch.equal(got.isnan(), expected)

    def test_tiny_and_huge_values_stay_finite(self, fmt: str, operand: str) -> None:
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).clamp(-3, 3)
        # A rotation adds up to 128 numbers.
        for power in (-149, -135, -127, -126, -120, 100, 118 if FORMATS[fmt].rotation else 125):
            scaled = x * 2.0**power
            got = quantize(scaled, fmt, operand, seed=0)
            assert got.isfinite().all()
            assert (got - scaled).abs().max() <= max(1.1 * float(scaled.abs().max()), 2.0**-126)

    def test_an_empty_tensor_stays_empty(self, fmt: str, operand: str) -> None:
        for shape in ((0, 5), (5, 0)):
            assert quantize(torch.zeros(shape), fmt, operand, seed=0).shape == shape

    def test_the_argument_is_left_alone_in_every_dtype(self, fmt: str, operand: str) -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = torch.randn(20, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
            before = x.clone()
            got = quantize(x, fmt, operand, seed=0)
            assert torch.equal(x, before) and got.dtype == torch.float32
            assert torch.equal(got, quantize(x.float(), fmt, operand, seed=0))


# Random numbers go by the shape, and a rotation's last run is a shorter one.
BY_BLOCK = [
    (name, operand)
    for name in QUANTIZED
    for operand in OPERANDS
    if not (FORMATS[name].operand(operand).stochastic or FORMATS[name].operand(operand).noise or FORMATS[name].rotation)
]


@pytest.mark.parametrize(("fmt", "operand"), BY_BLOCK)
def test_ragged_widths_are_those_of_a_padded_tensor(fmt: str, operand: str) -> None:
    x = torch.randn(37, 75, generator=torch.Generator().manual_seed(0))
    padded = torch.nn.functional.pad(x, (0, 53, 0, 91))
    assert torch.equal(quantize(x, fmt, operand), quantize(padded, fmt, operand)[:37, :75])


# ----------------------------------------------------------------------------------------- unbiasedness, by counting


def means_over_all_random_numbers(x: Tensor, format: NumberFormat, rule: Operand) -> tuple[Tensor, Tensor]:
    """Mean of the rounded x over the 256 numbers that `uniform` gives, in FP64; and scale * largest spacing."""
    total = torch.zeros(x.shape, dtype=torch.float64)
    tile = rule.tile(1, x.shape)
    for k in range(256):
        random = torch.full(x.shape, (k + 0.5) / 256)
        total += quantize_operand(x, format, rule, tile, None, random).dequantize().double()
    grid: ElementGrid = rule.grid or format.grid  # type: ignore[assignment]
    scales = quantize_operand(x, format, rule, tile).scales
    spread = scales.repeat_interleave(tile[0], 0)[: x.shape[0]].repeat_interleave(tile[1], 1)[:, : x.shape[1]]
    values = x.abs() / spread
    spacing = (torch.frexp(values).exponent - 1 - grid.mantissa_bits).float().exp2()
    return total / 256, spread * spacing.clamp_min(grid.smallest)


@pytest.mark.parametrize("fmt", [name for name in QUANTIZED if FORMATS[name].gradient.quantized])
def test_stochastic_rounding_is_unbiased_in_every_format(fmt: str) -> None:
    """The mean over all random numbers is x up to half of 1/256 of a spacing, also of the largest in a block."""
    check_unbiased(FORMATS[fmt], FORMATS[fmt].gradient)


@pytest.mark.parametrize("scale", ["fp32", "e8m0", "e5m3"])
@pytest.mark.parametrize(
    "grid", [floats(3, 1), floats(2, 2, subnormals=False), integers(3)], ids=lambda grid: grid.name
)
def test_stochastic_rounding_is_unbiased_in_a_format_of_ones_own(grid: ElementGrid, scale: str) -> None:
    own = dataclasses.replace(FORMATS["fp4"], name="own", grid=grid, bits=grid.bits, scale=scale)
    check_unbiased(own, Operand((1, 64)))


def check_unbiased(format: NumberFormat, operand: Operand) -> None:
    rule = dataclasses.replace(operand, stochastic=True)
    x = torch.randn(48, 160, generator=torch.Generator().manual_seed(11)) * torch.linspace(-12, 3, 48)[:, None].exp2()
    mean, spacing = means_over_all_random_numbers(x, format, rule)
    assert ((mean - x).abs() / spacing).max() < 1 / 512 + 1e-4


STOCHASTIC = [name for name in QUANTIZED if FORMATS[name].gradient.stochastic]


@pytest.mark.parametrize("fmt", STOCHASTIC)
def test_no_scale_cuts_the_largest_element_off_whatever_bfloat16_value_it_is(fmt: str) -> None:
    """The largest random number takes it up or leaves it, but for FP32's rounding. Under a scale that is too small, as
    E8M0's rules that round down give, nothing on the grid would be above it. Each number is a block; tensors have 510
    of them, 4 binades."""
    format = FORMATS[fmt]
    for x in torch.arange(64 * 510, dtype=torch.int16).view(torch.bfloat16).float().view(64, 510, 1):
        if format.tensor_scale is not None and x.max() < 2.0**-114:
            continue  # the reciprocals of such scales are beyond FP32 (docs/formats.md, edge cases)
        random = torch.full(x.shape, 255.5 / 256)
        up = quantize_operand(x, format, format.gradient, (1, 16), None, random).dequantize()
        assert (up >= x * (1 - 2.0**-22)).all()


def test_scales_that_cut_the_largest_elements_off_would_be_biased() -> None:
    """Guards the test above, and says why such rules are refused with stochastic rounding."""
    x = torch.randn(48, 160, generator=torch.Generator().manual_seed(11))
    for fmt, rule in (("mxfp4", "floor"), ("mxfp4", "even"), ("nvfp4", "nearest")):
        format = FORMATS[fmt]
        operand = Operand(format.gradient.block, stochastic=True, scale_rule=rule)
        mean, spacing = means_over_all_random_numbers(x, format, operand)
        assert ((mean - x).abs() / spacing).max() > 0.05
        with pytest.raises(ValueError, match="since others cut elements off"):
            dataclasses.replace(format, name="biased", gradient=operand)


def test_noise_on_weights_has_the_variance_of_rounding_and_is_normal() -> None:
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(12))
    noise = quantize(x, "fp4-pqt", "weight", seed=1) - x
    assert torch.equal(noise, quantize(x, "fp4-pqt", "weight", seed=1) - x)
    assert not torch.equal(noise, quantize(x, "fp4-pqt", "weight", seed=2) - x)
    rounding = quantize(x, "fp4", "weight") - x
    assert noise.square().mean().item() == pytest.approx(rounding.square().mean().item(), rel=0.1)
    scale = (x.view(4, 128, 4, 128).abs().amax((1, 3), keepdim=True) / 6).expand(4, 128, 4, 128).reshape(512, 512)
    spacing = (torch.frexp(x.abs() / scale).exponent - 2).float().exp2().clamp_min(0.5) * scale
    unit = noise / spacing * 12**0.5
    assert abs(unit.mean()) < 0.01 and unit.var().item() == pytest.approx(1.0, abs=0.01)
    assert (unit**4).mean().item() == pytest.approx(2.9, abs=0.05)
    assert torch.equal(quantize(x, "fp4-pqt"), x) and torch.equal(quantize(x, "fp4-pqt", "gradient"), x)


# ------------------------------------------------------------------------------------------------------- stored bits


@pytest.mark.parametrize(
    ("fmt", "activation", "weight"),
    [
        ("bf16", 16, 16),
        ("fp8", 8.25, 8.0),
        ("fp4", 4.25, 4.0),
        ("fp8-tensor", 8, 8),
        ("mxfp8", 8.25, 8.25),
        ("mxfp6", 6.25, 6.25),
        ("mxfp6-e2m3", 6.25, 6.25),
        ("mxfp4", 4.25, 4.25),
        ("mxfp4-32x32", 4.25, 4.01),
        ("nvfp4", 4.5, 4.03),
        ("nvfp4-1x16", 4.5, 4.5),
        ("int8", 8.25, 8.0),
        ("int4", 4.25, 4.0),
        ("ufp4", 4.25, 4.25),
    ],
)
def test_stored_bits_count_a_value_s_share_of_its_scale(fmt: str, activation: float, weight: float) -> None:
    format = FORMATS[fmt]
    assert format.stored_bits() == format.stored_bits("gradient") == activation
    assert round(format.stored_bits("weight"), 2) == weight
