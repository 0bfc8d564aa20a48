"""Every format against loops over its blocks, bit for bit, on every BF16 value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from bfloat16_values import assert_same_bits, every_pattern, in_order, with_partners
from oracles import blocks
from oracles.blocks import Grid, Scale
from slow_cases import slow
from torch import Tensor

from snip_hf.numerics.formats import E2M1, FORMATS, NumberFormat, Operand, floats, integers
from snip_hf.numerics.gemms import OPERANDS
from snip_hf.numerics.rounding import quantize_operand, round_to_grid

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


NEAREST = [name for name, case in CASES.items() if not case.is_random]
# As another one's.
AGAIN = [("nvfp4-1x16", "activation"), ("mxfp4-32x32", "activation"), ("fp8-tensor-e5m2", "activation")]


@pytest.mark.parametrize(("fmt", "operand"), [slow(*name) if name in AGAIN else name for name in NEAREST])
def test_every_value_beside_a_larger_one_is_rounded_as_the_loop_says(fmt: str, operand: str) -> None:
    case, format = CASES[fmt, operand], FORMATS[fmt]
    for x in tensors(with_partners(case.block), case):
        check(x, case, format, format.operand(operand))


@pytest.mark.parametrize(("fmt", "operand"), [slow(*name) if name in AGAIN else name for name in NEAREST])
def test_every_bit_pattern_in_order_is_rounded_as_the_loop_says(fmt: str, operand: str) -> None:
    """Among them infinities and NaN, whose blocks (with a tensor's scale, whose tensors) are NaN."""
    case, format = CASES[fmt, operand], FORMATS[fmt]
    for x in tensors(in_order(case.block), case):
        check(x, case, format, format.operand(operand))


@pytest.mark.parametrize(("fmt", "operand"), [name for name, case in CASES.items() if case.is_random])
def test_every_value_goes_to_the_neighbour_that_the_random_number_says(fmt: str, operand: str) -> None:
    case, format = CASES[fmt, operand], FORMATS[fmt]
    generator = torch.Generator().manual_seed(1)
    for x in tensors(with_partners(case.block), case):
        random = (torch.randint(256, x.shape, generator=generator) + 0.5) / 256
        check(x, case, format, format.operand(operand), random)
