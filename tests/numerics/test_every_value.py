"""Every format against loops over its blocks, bit for bit, on every BF16 value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from bfloat16_values import assert_same_bits, every_pattern, in_order, with_partners
from oracles import blocks
from oracles.blocks import Grid, Scale
from torch import Tensor

from snip_hf.numerics.formats import E2M1, FORMATS, NumberFormat, Operand, floats, integers
from snip_hf.numerics.gemms import OPERANDS
from snip_hf.numerics.rounding import quantize_operand

_E2M1, _E2M3, _E3M2 = blocks.floats(2, 1), blocks.floats(2, 3), blocks.floats(3, 2)
_E4M3, _E5M2 = blocks.floats(4, 3, reserved=1), blocks.floats(5, 2, reserved=4)
_INT4, _INT8 = blocks.integers(7), blocks.integers(127)
# A whole tensor is one block; any shape.
_WHOLE = (32, 32)


@dataclass(frozen=True)
class Case:
    """An operand of a format, as the table in docs/formats.md says it."""

    block: tuple[int, int]
    grid: Grid
    scales: list[Scale]
    is_random: bool = False
    of_tensor: bool = False
    """Each tensor has a scale of its own."""


def fp32(block: tuple[int, int], grid: Grid, *targets: float, **more: bool) -> Case:
    return Case(block, grid, [blocks.fp32(target) for target in targets or (grid.max,)], **more)


def mx(grid: Grid, block: tuple[int, int] = (1, 32), **more: bool) -> Case:
    return Case(block, grid, [blocks.e8m0("rceil", grid)], **more)


def nv(block: tuple[int, int], *targets: float, top: float = 448.0, is_random: bool = False) -> Case:
    scales = [blocks.fine(_E4M3, target, (top, 6.0), is_random) for target in targets]
    return Case(block, _E2M1, scales, is_random, of_tensor=True)


ROWS, SQUARES = (1, 128), (128, 128)
# Without those that equal the activation of the same format, and without rotated formats and noise.
CASES = {
    ("fp8", "activation"): fp32(ROWS, _E4M3),
    ("fp8", "weight"): fp32(SQUARES, _E4M3),
    ("fp4", "activation"): fp32(ROWS, _E2M1),
    ("fp4", "weight"): fp32(SQUARES, _E2M1),
    ("fp4", "gradient"): fp32(ROWS, _E2M1, is_random=True),
    ("fp8-tensor", "activation"): fp32(_WHOLE, _E4M3, of_tensor=True),
    ("fp8-tensor-e5m2", "activation"): fp32(_WHOLE, _E4M3, of_tensor=True),
    ("fp8-tensor-e5m2", "gradient"): fp32(_WHOLE, _E5M2, of_tensor=True),
    ("fp8-delayed", "activation"): mx(_E4M3, _WHOLE, of_tensor=True),
    ("mxfp8", "activation"): mx(_E4M3),
    ("mxfp6", "activation"): mx(_E3M2),
    ("mxfp6-e2m3", "activation"): mx(_E2M3),
    ("mxfp4", "activation"): mx(_E2M1),
    ("mxfp4", "gradient"): mx(_E2M1, is_random=True),
    ("mxfp4-32x32", "activation"): mx(_E2M1),
    ("mxfp4-32x32", "weight"): mx(_E2M1, (32, 32)),
    ("mxfp4-32x32", "gradient"): mx(_E2M1, is_random=True),
    ("nvfp4", "activation"): nv((1, 16), 6.0),
    ("nvfp4", "weight"): nv((16, 16), 6.0),
    ("nvfp4", "gradient"): nv((1, 16), 6.0, is_random=True),
    ("nvfp4-1x16", "activation"): nv((1, 16), 6.0),
    ("nvfp4-1x16", "gradient"): nv((1, 16), 6.0, is_random=True),
    ("nvfp4-46", "activation"): nv((1, 16), 6.0, 4.0, top=256.0),
    ("nvfp4-46", "weight"): nv((16, 16), 6.0, 4.0, top=256.0),
    ("nvfp4-46", "gradient"): nv((1, 16), 6.0, top=256.0, is_random=True),
    ("int8", "activation"): fp32(ROWS, _INT8),
    ("int8", "weight"): fp32(SQUARES, _INT8),
    ("int4", "activation"): fp32(ROWS, _INT4),
    ("int4", "weight"): fp32(SQUARES, _INT4),
    ("int4", "gradient"): fp32(ROWS, _INT4, is_random=True),
    ("ufp4", "activation"): mx(_INT4),
    ("ufp4", "gradient"): mx(_INT4, is_random=True),
    ("fp4-46", "activation"): fp32(ROWS, _E2M1, 6.0, 4.0),
    ("fp4-46", "weight"): fp32(SQUARES, _E2M1, 6.0, 4.0),
    ("fp4-46", "gradient"): fp32(ROWS, _E2M1, is_random=True),
}


def test_no_operand_of_a_format_is_left_out() -> None:
    expected = set()
    for name, format in FORMATS.items():
        if format.is_quantized and not format.rotation and format.activation.quantized:
            others = [operand for operand in OPERANDS if format.operand(operand) != format.activation]
            expected |= {(name, operand) for operand in ["activation", *others]}
    assert set(CASES) == expected


def check(x: Tensor, case: Case, format: NumberFormat, rule: Operand, random: Tensor | None = None) -> None:
    tile = rule.tile(1, x.shape)
    assert tile == (case.block if rule.block else x.shape)
    given = None if random is None else random.numpy()
    with np.errstate(all="ignore"):
        values, scales = blocks.quantized(x.float().numpy(), tile, case.grid, case.scales, given)
    got = quantize_operand(x.float(), format, rule, tile, None, random)
    assert_same_bits(got.scales, torch.from_numpy(scales))
    assert_same_bits(got.dequantize(), torch.from_numpy(values))


def tensors(parts: list[Tensor], case: Case) -> list[Tensor]:
    return parts if case.of_tensor else [torch.cat(parts)]


# Cases that equal another format's.
AGAIN = [("nvfp4-1x16", "activation"), ("mxfp4-32x32", "activation"), ("fp8-tensor-e5m2", "activation")]
NEAREST = [name for name, case in CASES.items() if not case.is_random and name not in AGAIN]


@pytest.mark.parametrize(("fmt", "operand"), NEAREST)
def test_every_value_beside_a_larger_one_is_rounded_as_the_loop_says(fmt: str, operand: str) -> None:
    case, format = CASES[fmt, operand], FORMATS[fmt]
    for x in tensors(with_partners(case.block), case):
        check(x, case, format, format.operand(operand))


@pytest.mark.parametrize(("fmt", "operand"), NEAREST)
def test_every_bit_pattern_in_order_is_rounded_as_the_loop_says(fmt: str, operand: str) -> None:
    """Among them infinities and NaN, whose blocks (with a tensor's scale, whose tensors) are NaN."""
    case, format = CASES[fmt, operand], FORMATS[fmt]
    for x in tensors(in_order(case.block), case):
        check(x, case, format, format.operand(operand))


@pytest.mark.parametrize(("fmt", "operand"), NEAREST)
def test_a_tensor_of_subnormal_numbers_is_rounded_as_the_loop_says(fmt: str, operand: str) -> None:
    """Scales are raised to their smallest there, and reciprocals are the largest."""
    codes = torch.arange(128, dtype=torch.int16)
    x = torch.stack([codes, codes - 2**15], 1).view(torch.bfloat16).view(16, 16)
    check(x, CASES[fmt, operand], FORMATS[fmt], FORMATS[fmt].operand(operand))


@pytest.mark.parametrize(("fmt", "operand"), [name for name, case in CASES.items() if case.is_random])
def test_every_value_goes_to_the_neighbour_that_the_random_number_says(fmt: str, operand: str) -> None:
    case, format = CASES[fmt, operand], FORMATS[fmt]
    generator = torch.Generator().manual_seed(1)
    for x in tensors(with_partners(case.block), case):
        random = (torch.randint(256, x.shape, generator=generator) + 0.5) / 256
        check(x, case, format, format.operand(operand), random)


def users(grid: Any, bits: int, block: tuple[int, int] | None, **changes: Any) -> NumberFormat:
    rule = changes.pop("rule", Operand(block))
    fixed: dict[str, Any] = {"name": "mine", "speed": 1.0, "label": "Mine", "colour": "#000000"}
    operands = {"activation": rule, "gradient": Operand(block), "weight": Operand(block)}
    return NumberFormat(grid=grid, bits=bits, **fixed, **operands, **changes)


_E2M0, _E3M1, _E5M3 = blocks.floats(2, 0), blocks.floats(3, 1), blocks.floats(5, 3, reserved=1)
_E4M2, _E5M10 = blocks.floats(4, 2, subnormals=False), blocks.floats(5, 10, reserved=1024)
_INT6 = blocks.integers(31)
USERS = {
    "E3M1 in 1x16 with E5M3 scales": (
        users(floats(3, 1), 5, (1, 16), scale="e5m3"),
        Case((1, 16), _E3M1, [blocks.fine(_E5M3, _E3M1.max)]),
    ),
    "E3M1 in 16x16 with E5M3 scales, rounded up": (
        users(floats(3, 1), 5, (16, 16), scale="e5m3", scale_rule="up"),
        Case((16, 16), _E3M1, [blocks.fine(_E5M3, _E3M1.max, up=True)]),
    ),
    "E2M1 in 1x16, four over six, E4M3 scales without a tensor's": (
        users(E2M1, 4, (1, 16), scale="e4m3", rule=Operand((1, 16), targets=(6.0, 4.0))),
        Case((1, 16), _E2M1, [blocks.fine(_E4M3, 6.0), blocks.fine(_E4M3, 4.0)]),
    ),
    "E2M1 in 16x16, four over six, FP32 scales": (
        users(E2M1, 4, (16, 16), rule=Operand((16, 16), targets=(6.0, 4.0))),
        fp32((16, 16), _E2M1, 6.0, 4.0),
    ),
    "E4M2 without subnormals in 1x64": (users(floats(4, 2, subnormals=False), 7, (1, 64)), fp32((1, 64), _E4M2)),
    "E2M0 in 64x64 by powers of two": (
        users(floats(2, 0), 3, (64, 64), scale="e8m0", scale_rule="ceil"),
        Case((64, 64), _E2M0, [blocks.e8m0("ceil", _E2M0)]),
    ),
    "6-bit integers in 4x32 by powers of two": (
        users(integers(31), 6, (4, 32), scale="e8m0", scale_rule="even"),
        Case((4, 32), _INT6, [blocks.e8m0("even", _INT6)]),
    ),
    "E5M10 with one scale": (users(floats(5, 10, infinities=True), 16, None), fp32(_WHOLE, _E5M10, of_tensor=True)),
}


@pytest.mark.parametrize(("format", "case"), USERS.values(), ids=USERS)
def test_a_format_of_ones_own_is_what_its_data_say_on_every_value(format: NumberFormat, case: Case) -> None:
    for x in [*tensors(with_partners(case.block), case), *tensors(in_order(case.block), case)]:
        check(x, case, format, format.activation)


@pytest.mark.parametrize("block", [(1, 16), (16, 16), (1, 128), (128, 128), (32, 32)])
def test_the_blocks_hold_every_value_and_scales_of_many_sizes(block: tuple[int, int]) -> None:
    """Guards the tests above."""
    found = torch.cat([x.flatten() for x in with_partners(block)])
    patterns = every_pattern()
    assert set(patterns[patterns.isfinite()].view(torch.int16).tolist()) <= set(found.view(torch.int16).tolist())
    assert found.isfinite().all()
    of_blocks = torch.cat(with_partners(block)).float()
    scales = quantize_operand(of_blocks, FORMATS["fp4"], Operand(block), block).scales
    assert len((scales.view(torch.int32) & 0x7FFFFF).unique()) > 40
    kept = quantize_operand(of_blocks, FORMATS["fp4"], Operand(block), block).values
    assert (kept != 0).float().mean() > 0.3
    assert sum(x.numel() for x in in_order(block)) == 2**16


def test_the_loop_s_grids_are_those_of_ml_dtypes() -> None:
    grids = {"float8_e4m3fn": _E4M3, "float8_e5m2": _E5M2, "float4_e2m1fn": _E2M1}
    for dtype, grid in {**grids, "float6_e2m3fn": _E2M3, "float6_e3m2fn": _E3M2}.items():
        codes = np.arange(len(grid.values), dtype=np.uint8).view(getattr(ml_dtypes, dtype))
        assert np.array_equal(grid.values, codes.astype(np.float64))
