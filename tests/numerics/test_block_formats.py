"""Block formats against torchao, gfloat and ml_dtypes, value for value, and against loops over blocks."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from bfloat16_values import assert_same_bits, every_value, with_partners
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
E4M3 = blocks.floats(4, 3, reserved=1)
ORACLE_GRIDS = {
    "mxfp8": E4M3,
    "mxfp6": blocks.floats(3, 2),
    "mxfp6-e2m3": blocks.floats(2, 3),
    "mxfp4": blocks.floats(2, 1),
    "ufp4": blocks.integers(7),
}
TORCHAO_SQUARES = Path(__file__).parents[1] / "support" / "torchao_squares.py"
# E4M3's smallest normal number, below which torchao lets no block scale of NVFP4 fall.
SMALLEST_OF_TORCHAO = 2.0**-6


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


# --------------------------------------------------------------------------------------------------------------- MX


@pytest.mark.parametrize("sample", ["ordered", "shuffled", "normal"])
@pytest.mark.parametrize("rule", MODES)
@pytest.mark.parametrize("fmt", MX)
def test_mx_formats_match_torchao_on_every_bfloat16_value(fmt: str, rule: str, sample: str) -> None:
    """Excludes blocks with the smallest scale, 2^-127: there torchao divides by 2^-126 (or by 1) and multiplies by
    2^-127. The specification uses one scale for both, and so do we (the test after this)."""
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


# ------------------------------------------------------------------------------------------------------------ NVFP4


@pytest.mark.parametrize("sample", ["ordered", "shuffled", "normal"])
def test_nvfp4_matches_torchao_on_every_bfloat16_value(sample: str) -> None:
    """Excludes blocks whose scale is below 2^-6: torchao raises it, the published recipe uses E4M3's subnormals."""
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


def test_nvfp4_in_16x16_blocks_matches_torchao_where_rows_share_their_largest_magnitude() -> None:
    """torchao's operations on a CPU know rows of 16. Where all rows of a square block have the largest magnitude of the
    block, each of the 16 scales that torchao finds is the block's."""
    for x in with_partners((16, 16)):
        of_blocks = x.view(-1, 16, 16).clone()
        of_blocks[:, :, 0] = of_blocks[:, :1, 0]  # the block's partner
        square = of_blocks.view(-1, 16)
        if square.abs().amax() < 2.0**-100:  # where FP32 itself underflows
            continue
        of_tensor = per_tensor_amax_to_scale(square.abs().amax())
        found = NVFP4Tensor.to_nvfp4(square, per_tensor_scale=of_tensor)
        got = quantize_operand(square.float(), FORMATS["nvfp4"], FORMATS["nvfp4"].weight, (16, 16))
        assert_same_bits(got.scales.repeat_interleave(16, 0), found.get_hp_scales())
        assert_same_bits(got.dequantize(), found.dequantize(torch.float32))


@pytest.mark.slow
def test_nvfp4_in_16x16_blocks_matches_torchao_s_kernel_on_every_bfloat16_value(tmp_path: Path) -> None:
    """The kernel takes reciprocals in another order than torchao's operations on rows. That decides ties: of 16,384
    block scales one differs. Where the tensor's scale is a power of two, neither order rounds, so each tensor gets
    blocks of 2688 (448 * 6) times a power of two. Left out are the two smallest tensors, whose scales FP32 cannot
    divide by, and the largest, which BF16 has no such number for."""
    pytest.importorskip("triton")
    parts = []
    for x in with_partners((16, 16))[2:]:
        largest = 2688 * 2.0 ** math.ceil(math.log2(x.abs().max().item() / 2688))
        if largest < torch.finfo(torch.bfloat16).max:
            parts.append(torch.cat([x, torch.full((64, 16), largest, dtype=torch.bfloat16)]))
    assert len(parts) == 61
    torch.save(parts, tmp_path / "x.pt")
    command = [sys.executable, TORCHAO_SQUARES, tmp_path / "x.pt", tmp_path / "found.pt"]
    subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, check=True, capture_output=True)
    for x, (scales, scaled) in zip(parts, torch.load(tmp_path / "found.pt", weights_only=True), strict=True):
        got = quantize_operand(x.float(), FORMATS["nvfp4"], FORMATS["nvfp4"].weight, (16, 16))
        assert_same_bits(got.scales, scales * (x.abs().max().float() / 2688))
        codes = scaled.numpy().astype(ml_dtypes.float4_e2m1fn)
        assert_same_bits(got.values, torch.from_numpy(codes.astype(np.float32)))


# ------------------------------------------------------------------------------------------- FP32 scales, whole tensors


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
    expected = torch.from_numpy(blocks.nearest(x.numpy(), oracle))
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
