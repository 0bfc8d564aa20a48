"""Block formats against torchao, gfloat and ml_dtypes, value for value, and against loops over blocks."""

from __future__ import annotations

import dataclasses
import logging

import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat import BlockFormatInfo, FormatInfo, RoundMode, compute_scale_amax, quantize_block, round_ndarray
from gfloat import formats as gfloat_formats
from oracles import blocks
from torch import Tensor

from snip_hf.numerics.formats import FORMATS, NumberFormat, Operand, floats
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


@pytest.mark.parametrize(("exponent", "mantissa"), [(1, 2), (2, 0), (3, 0), (3, 1), (4, 2), (3, 5), (2, 10)])
def test_user_s_floats_match_gfloat(exponent: int, mantissa: int) -> None:
    info = FormatInfo(
        f"e{exponent}m{mantissa}",
        1 + exponent + mantissa,
        1 + mantissa,
        bias=2 ** (exponent - 1) - 1,
        is_signed=True,
        domain=gfloat_formats.format_info_ocp_e2m1.domain,
        has_nz=True,
        num_high_nans=0,
        has_subnormals=True,
        is_twos_complement=False,
    )
    x = every_value().float()
    x = torch.cat([x[x.abs() <= info.max], x[x.abs() < 100] * 1.001])
    expected = round_ndarray(info, x.double().numpy(), RoundMode.TiesToEven, sat=True)
    assert_same_bits(round_to_grid(x, floats(exponent, mantissa)), torch.from_numpy(expected).float())


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
