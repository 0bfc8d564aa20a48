"""Block formats against torchao, gfloat and ml_dtypes, value for value, and against loops over blocks."""

from __future__ import annotations

import dataclasses
import logging
import math

import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat import BlockFormatInfo, RoundMode, compute_scale_amax, quantize_block
from gfloat import formats as gfloat_formats
from oracles import blocks
from torch import Tensor

from snip_hf.numerics.formats import FORMATS, NumberFormat, Operand, floats
from snip_hf.numerics.gemms import OPERANDS
from snip_hf.numerics.grids import ElementGrid
from snip_hf.numerics.rounding import Quantized, quantize, quantize_operand, round_operand, round_to_grid

for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
from torchao.prototype.mx_formats.config import ScaleCalculationMode  # noqa: E402
from torchao.prototype.mx_formats.mx_tensor import MXTensor  # noqa: E402
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale  # noqa: E402

MX = {"mxfp8": torch.float8_e4m3fn, "mxfp6": "fp6_e3m2", "mxfp6-e2m3": "fp6_e2m3", "mxfp4": torch.float4_e2m1fn_x2}
MODES = {mode.name.lower(): mode for mode in ScaleCalculationMode}
ORACLE_GRIDS = {
    "mxfp8": blocks.floats(4, 3, reserved=1),
    "mxfp6": blocks.floats(3, 2),
    "mxfp6-e2m3": blocks.floats(2, 3),
    "mxfp4": blocks.floats(2, 1),
    "ufp4": blocks.integers(7),
}
# E4M3's smallest normal number, below which torchao lets no block scale of NVFP4 fall.
SMALLEST_OF_TORCHAO = 2.0**-6
QUANTIZED = [name for name, format in FORMATS.items() if format.is_quantized]


def every_value() -> Tensor:
    """All 65,280 finite BF16 values."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return values[values.isfinite()]


def samples(block: int) -> dict[str, Tensor]:
    """BF16 tensors (R, C) of whole blocks: all values in order, all of them shuffled, normal ones of all magnitudes."""
    generator = torch.Generator().manual_seed(0)
    values = every_value()
    powers = torch.randint(-40, 40, (256, 1), generator=generator).float().exp2()
    return {
        "ordered": values.view(-1, block),
        "shuffled": values[torch.randperm(len(values), generator=generator)].view(-1, block),
        "normal": (torch.randn(256, 4 * block, generator=generator) * powers).to(torch.bfloat16),
    }


def with_rule(fmt: str, rule: str | None) -> tuple[NumberFormat, Operand]:
    return FORMATS[fmt], dataclasses.replace(FORMATS[fmt].activation, scale_rule=rule)


def quantized(x: Tensor, fmt: str, rule: str | None = None) -> Quantized:
    format, operand = with_rule(fmt, rule)
    return quantize_operand(x.float(), format, operand, operand.tile(1, x.shape))


def assert_same_bits(got: Tensor, expected: Tensor) -> None:
    got, expected = got.contiguous(), expected.contiguous()
    assert got.dtype == expected.dtype == torch.float32 and got.shape == expected.shape
    wrong = (got.view(torch.int32) != expected.view(torch.int32)).nonzero()
    assert len(wrong) == 0, f"{len(wrong)} differ, first at {wrong[0].tolist()}."


# --------------------------------------------------------------------------------------------------------------- MX


@pytest.mark.parametrize("sample", ["ordered", "shuffled", "normal"])
@pytest.mark.parametrize("rule", MODES)
@pytest.mark.parametrize("fmt", MX)
def test_mx_formats_match_torchao_on_every_bfloat16_value(fmt: str, rule: str, sample: str) -> None:
    """But for blocks with the smallest scale, 2^-127: there torchao divides by 2^-126 (or by 1) and multiplies by
    2^-127. The specification has one scale for both, and so have we (the test after this)."""
    x = samples(32)[sample]
    found = MXTensor.to_mx(x, MX[fmt], 32, MODES[rule])
    codes = found.scale.view(torch.uint8).view(x.shape[0], -1)
    got = quantized(x, fmt, rule)
    assert_same_bits(got.scales, torch.ldexp(torch.ones(codes.shape), codes.int() - 127))
    is_smallest = (codes == 0).repeat_interleave(32, 1)
    assert is_smallest.float().mean() < 0.05
    expected = found.dequantize(torch.float32)
    assert_same_bits(got.dequantize()[~is_smallest], expected[~is_smallest])


GFLOAT = {
    "mxfp8": gfloat_formats.format_info_ocp_e4m3,
    "mxfp6": gfloat_formats.format_info_ocp_e3m2,
    "mxfp6-e2m3": gfloat_formats.format_info_ocp_e2m3,
    "mxfp4": gfloat_formats.format_info_ocp_e2m1,
}


@pytest.mark.parametrize("fmt", GFLOAT)
def test_mx_formats_match_gfloat_under_the_specification_s_rule_also_at_the_smallest_scale(fmt: str) -> None:
    generator = torch.Generator().manual_seed(1)
    powers = torch.linspace(-132, 120, 64)[:, None].round().exp2()
    x = (torch.randn(64, 32, generator=generator) * powers).to(torch.bfloat16).float()
    info = BlockFormatInfo(fmt, GFLOAT[fmt], 32, gfloat_formats.format_info_ocp_e8m0)
    rows = [quantize_block(info, row, compute_scale_amax, RoundMode.TiesToEven) for row in x.double().numpy()]
    got = quantized(x, fmt, "floor")
    assert (got.scales == 2.0**-127).sum() > 1
    assert torch.equal(got.dequantize(), torch.from_numpy(np.stack(rows)).float())


@pytest.mark.parametrize("rule", ["floor", "ceil", "rceil", "even"])
@pytest.mark.parametrize("fmt", ORACLE_GRIDS)
def test_mx_formats_match_loops_over_blocks_with_ragged_ends(fmt: str, rule: str) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(37, 75, generator=generator) * torch.linspace(-133, 100, 37)[:, None].exp2()
    x[5] = 0.0
    grid = ORACLE_GRIDS[fmt]
    values, scales = blocks.quantized(x.numpy(), (1, 32), grid, blocks.e8m0(rule, grid))
    got = quantized(x, fmt, rule)
    assert_same_bits(got.scales, torch.from_numpy(scales))
    assert torch.equal(got.dequantize(), torch.from_numpy(values))
    # A 2-D block, and blocks along the rows.
    values, _ = blocks.quantized(x.numpy(), (32, 32), grid, blocks.e8m0(rule, grid))
    format, _ = with_rule(fmt, rule)
    square = quantize_operand(x, format, Operand((32, 32), scale_rule=rule), (32, 32))
    assert torch.equal(square.dequantize(), torch.from_numpy(values))
    down = quantize_operand(x.t().contiguous(), format, Operand((1, 32), scale_rule=rule), (32, 1))
    assert_same_bits(down.dequantize().t(), got.dequantize())


def test_scales_of_mx_formats_are_those_of_ml_dtypes() -> None:
    scales = quantized(samples(32)["ordered"], "mxfp4").scales
    stored = scales.numpy().astype(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert np.array_equal(stored, scales.numpy()) and 2.0**-127 in stored


# ------------------------------------------------------------------------------------------------------------ NVFP4


def nvfp4_blocks(x: Tensor, top: float = 448.0, target: float = 6.0, up: bool = False) -> tuple[Tensor, Tensor]:
    grid = ORACLE_GRIDS["mxfp4"]
    found = blocks.quantized(x.float().numpy(), (1, 16), grid, blocks.e4m3_in_tensor(target, top, 6.0, up))
    return torch.from_numpy(found[0]), torch.from_numpy(found[1])


@pytest.mark.parametrize("sample", ["ordered", "shuffled", "normal"])
def test_nvfp4_matches_torchao_on_every_bfloat16_value(sample: str) -> None:
    """But for blocks whose scale is below 2^-6: torchao raises it, the published recipe takes E4M3's subnormals."""
    x = samples(16)[sample]
    for part in x.split(255) if sample == "ordered" else [x]:  # tensors of many magnitudes, 16 binades each
        part = part[(part != 0).any(1)]
        of_tensor = per_tensor_amax_to_scale(part.abs().amax())
        if of_tensor < 2.0**-120:  # where FP32 itself underflows
            continue
        found = NVFP4Tensor.to_nvfp4(part.contiguous(), per_tensor_scale=of_tensor)
        got = quantized(part, "nvfp4")
        is_low = got.scales / of_tensor < SMALLEST_OF_TORCHAO
        assert_same_bits(got.scales[~is_low], found.get_hp_scales()[~is_low])
        same = ~is_low.repeat_interleave(16, 1)
        assert_same_bits(got.dequantize()[same], found.dequantize(torch.float32)[same])
        assert sample == "normal" or same.any()


def test_nvfp4_matches_the_recipe_written_out_also_where_scales_are_subnormal_or_zero() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 40, generator=generator) * torch.linspace(-30, 3, 64)[:, None].exp2()
    values, scales = nvfp4_blocks(x)
    got = quantized(x, "nvfp4")
    assert_same_bits(got.scales, scales)
    assert torch.equal(got.dequantize(), values)
    of_tensor = per_tensor_amax_to_scale(x.abs().amax())
    # The recipe's scale would be 0 for the smallest blocks; it is raised to the smallest one above it.
    assert (got.scales / of_tensor).min() == 2.0**-9 and ((got.scales / of_tensor) < SMALLEST_OF_TORCHAO).any()


def test_nvfp4_scales_are_e4m3_numbers_and_the_largest_block_s_is_448() -> None:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(4))
    of_tensor = per_tensor_amax_to_scale(x.abs().amax())
    of_blocks = (quantized(x, "nvfp4").scales / of_tensor).numpy()
    assert np.array_equal(of_blocks, of_blocks.astype(ml_dtypes.float8_e4m3fn).astype(np.float32))
    assert of_blocks.max() == 448


def test_stochastic_nvfp4_rounds_scales_up_so_that_nothing_is_cut_off() -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(5))
    format = FORMATS["nvfp4"]
    up = quantize_operand(x, format, format.gradient, (1, 16)).scales
    _, expected = nvfp4_blocks(x, up=True)
    assert_same_bits(up, expected)
    largest = x.view(64, 4, 16).abs().amax(2)
    nearest = quantized(x, "nvfp4").scales
    assert (largest / up).max() <= 6 * (1 + 2.0**-22) and (largest / nearest).max() > 6.1


@pytest.mark.parametrize(("fmt", "top"), [("nvfp4-46", 256.0), ("fp4-46", None)])
def test_four_over_six_takes_the_scale_with_the_smaller_squared_error(fmt: str, top: float | None) -> None:
    x = torch.randn(48, 200, generator=torch.Generator().manual_seed(6)).numpy()
    if top is None:
        block, rules = (1, 128), [blocks.fp32(6.0), blocks.fp32(4.0)]
    else:
        block, rules = (1, 16), [blocks.e4m3_in_tensor(target, top, 6.0) for target in (6.0, 4.0)]
    values, scales = blocks.quantized(x, block, ORACLE_GRIDS["mxfp4"], rules)
    got = quantized(torch.from_numpy(x), fmt)
    assert_same_bits(got.scales, torch.from_numpy(scales))
    assert torch.equal(got.dequantize(), torch.from_numpy(values))
    of_six = quantized(torch.from_numpy(x), fmt.removesuffix("-46")).dequantize().numpy()
    assert ((values - x) ** 2).sum() < ((of_six - x) ** 2).sum()


# ------------------------------------------------------------------------------------------- FP32 scales, whole tensors


@pytest.mark.parametrize(
    ("fmt", "grid"),
    [("int8", blocks.integers(127)), ("int4", blocks.integers(7)), ("fp8-tensor", blocks.floats(4, 3, reserved=1))],
)
def test_integers_and_whole_tensors_match_loops(fmt: str, grid: blocks.Grid) -> None:
    x = torch.randn(20, 150, generator=torch.Generator().manual_seed(7))
    block = (20, 150) if fmt == "fp8-tensor" else (1, 128)
    values, scales = blocks.quantized(x.numpy(), block, grid, blocks.fp32(grid.max))
    got = quantized(x, fmt)
    assert_same_bits(got.scales, torch.from_numpy(scales))
    # x / scale in FP64 there, x * (1 / scale) in FP32 here: another side of a tie, at most.
    differ = got.dequantize() != torch.from_numpy(values)
    assert differ.float().mean() < 1e-3
    assert torch.equal(quantize(x, fmt), got.dequantize())


def test_whole_tensors_match_torch_s_own_cast() -> None:
    x = torch.randn(30, 70, generator=torch.Generator().manual_seed(8))
    for operand, dtype, largest in (("activation", torch.float8_e4m3fn, 448), ("gradient", torch.float8_e5m2, 57344)):
        scale = x.abs().max() / torch.tensor([float(largest)])
        expected = (x * scale.reciprocal()).clamp(-largest, largest).to(dtype).float() * scale
        assert torch.equal(quantize(x, "fp8-tensor-e5m2", operand), expected)


@pytest.mark.parametrize("fmt", ["fp8-tensor", "nvfp4", "nvfp4-46"])
def test_a_part_of_a_tensor_is_rounded_as_in_the_whole_if_its_largest_magnitude_is_known(fmt: str) -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(9))
    x[50, 3] = 40.0
    whole = round_operand(x, FORMATS[fmt], "activation", 1)
    part = round_operand(x[:32], FORMATS[fmt], "activation", 1, amax=x.abs().amax())
    assert torch.equal(part, whole[:32])
    assert not torch.equal(round_operand(x[:32], FORMATS[fmt], "activation", 1), whole[:32])


# -------------------------------------------------------------------------------------------------------- user's grids


@pytest.mark.parametrize("subnormals", [True, False])
@pytest.mark.parametrize("specials", ["none", "nans", "infinities"])
@pytest.mark.parametrize(("exponent", "mantissa"), [(1, 2), (2, 0), (2, 1), (3, 0), (3, 2), (4, 3), (5, 2), (5, 10)])
def test_user_s_floats_round_to_the_nearest_code(exponent: int, mantissa: int, specials: str, subnormals: bool) -> None:
    named = {} if specials == "none" else {specials: True}
    if exponent == 1 and specials == "infinities" and not subnormals:
        with pytest.raises(ValueError, match="has the largest value 0; expected one above 0"):
            floats(exponent, mantissa, subnormals=subnormals, **named)
        return
    grid = floats(exponent, mantissa, subnormals=subnormals, **named)
    values = user_values(exponent, mantissa, specials, subnormals)
    assert grid.max == values[-1] and grid.smallest == values[1]
    x = torch.from_numpy(np.concatenate([values, (values[1:] + values[:-1]) / 2, values * 1.01])).float()
    oracle = blocks.Grid(values, codes_of(values, exponent, mantissa, subnormals), mantissa)
    expected = torch.tensor([blocks.nearest(float(one), oracle) for one in x])
    assert torch.equal(round_to_grid(x, grid), expected)
    assert torch.equal(round_to_grid(-x, grid), -expected)


def user_values(exponent: int, mantissa: int, specials: str, subnormals: bool) -> np.ndarray:
    reserved = {"none": 0, "nans": 1, "infinities": 2**mantissa}[specials]
    return blocks.floats(exponent, mantissa, reserved, subnormals).values


def codes_of(values: np.ndarray, exponent: int, mantissa: int, subnormals: bool) -> np.ndarray:
    return blocks.floats(exponent, mantissa, 0, subnormals).codes[: len(values)]


def test_bfloat16_and_float16_are_user_s_floats() -> None:
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(10)) * torch.linspace(-28, 15, 10_000).exp2()
    assert torch.equal(round_to_grid(x, floats(8, 7, infinities=True)), x.to(torch.bfloat16).float())
    half = x[x.abs() < 65000]
    assert torch.equal(round_to_grid(half, floats(5, 10, infinities=True)), half.half().float())


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

    def test_ragged_widths_are_those_of_a_padded_tensor(self, fmt: str, operand: str) -> None:
        rule = FORMATS[fmt].operand(operand)
        if rule.stochastic or rule.noise or FORMATS[fmt].rotation:
            pytest.skip("random numbers go by the shape; a rotation's last run is a shorter one")
        x = torch.randn(37, 75, generator=torch.Generator().manual_seed(0))
        padded = torch.nn.functional.pad(x, (0, 53, 0, 91))
        assert torch.equal(quantize(x, fmt, operand), quantize(padded, fmt, operand)[:37, :75])

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
    format = FORMATS[fmt]
    rule = dataclasses.replace(format.gradient, stochastic=True)
    x = torch.randn(48, 160, generator=torch.Generator().manual_seed(11)) * torch.linspace(-12, 3, 48)[:, None].exp2()
    mean, spacing = means_over_all_random_numbers(x, format, rule)
    assert ((mean - x).abs() / spacing).max() < 1 / 512 + 1e-4


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
