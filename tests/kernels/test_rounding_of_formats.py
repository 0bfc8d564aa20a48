"""The rounding kernel in every registered format and in formats of users, against `numerics.rounding`, bit for bit: on
a GPU, and anywhere under Triton's interpreter; and layers on a GPU against the CPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from kernel_runs import Run, assert_same_bits, on_cuda
from slow_cases import slow, slow_but
from torch import Tensor

from snip_hf import SnipLinearConfig
from snip_hf.kernels import rounding
from snip_hf.numerics.formats import FORMATS, NumberFormat, Operand, floats, integers
from snip_hf.numerics.gemms import CONTRACTIONS
from snip_hf.numerics.rounding import round_operand

KEY = 0xF123_4567_89AB_CDEF
# Each operand with each dimension that a GEMM contracts.
OPERANDS = [operand for operands in CONTRACTIONS.values() for operand in operands]
QUANTIZED = [name for name, format in FORMATS.items() if format.is_quantized]
# Between them: scales of the three kinds, of tiles and of the tensor, two targets, both kinds of rounding, rotations.
FAST = ["mxfp4", "nvfp4-46", "nvfp4-rht"]
# Every kind of scale, block and rotation, and operands that are not rounded.
KINDS = ["fp8-tensor", "fp8-delayed", "mxfp8", "mxfp4-32x32", "nvfp4", "nvfp4-46", "ufp4-rht", "int4", "fp4-pqt"]
each_format = pytest.mark.parametrize("fmt", QUANTIZED)


def random(contracts: int, large: bool = False) -> Tensor:
    """Ragged in both dimensions, over many magnitudes; zeros of both signs, a block of zeros, blocks of tiny numbers.

    Small, since the interpreter is slow, with a whole run of 128 and a part of one along the contracted dimension.
    """
    shape = (600, 1351) if large else (18, 175)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * torch.exp(2 * torch.randn(shape, generator=generator))
    x[:, 5:6] *= 1e-7
    x[1:2], x[:, 3:4] = 0.0, -0.0
    x[2], x[3, :64], x[4, :64] = 2.0**-126 * x[2], 1e-40, 1e-30
    x[5, 32:64] = torch.arange(-16, 16) / 4 + 0.25  # ties where the largest number is 4
    x[6, 96:128:2], x[6, 97:128:2] = 6.0, 0.5  # the scale is a power of two, and the next one loses the 0.5
    return x if contracts == 1 else x.t().contiguous()


def not_finite(contracts: int, large: bool = False) -> Tensor:
    x = random(contracts, large)
    x[-1, 0], x[-1, -1], x[x.shape[0] // 3, -2:-1] = torch.nan, torch.inf, -torch.inf
    return x


def enormous(contracts: int, large: bool = False) -> Tensor:
    return random(contracts, large).clamp(-1, 1) * 3.4e38


def check(run: Run, x: Tensor, format: NumberFormat, operand: str, contracts: int, *more: Any) -> None:
    """Compares the kernel with the reference, except for operands that the kernel does not support."""
    if rounding.takes(format, operand) and format.operand(operand).quantized:
        expected = round_operand(x, format, operand, contracts, *more)
        assert_same_bits(run("fake_quantize", x, format, operand, contracts, *more), expected)


@pytest.mark.parametrize("fmt", slow_but(QUANTIZED, *FAST))
def test_the_kernel_rounds_every_operand_as_the_reference_does(fmt: str, interpreter: Run) -> None:
    for operand, contracts in OPERANDS:
        check(interpreter, random(contracts).bfloat16(), FORMATS[fmt], operand, contracts, KEY, 1, 3)


@pytest.mark.parametrize("fmt", slow_but(KINDS, "mxfp8"))
@pytest.mark.parametrize("data", [not_finite, slow(enormous)])
def test_it_does_with_nan_infinity_and_the_largest_numbers(fmt: str, data: Any, interpreter: Run) -> None:
    for operand, contracts in OPERANDS:
        check(interpreter, data(contracts), FORMATS[fmt], operand, contracts)


def users(**fields: Any) -> NumberFormat:
    grid = fields.get("grid", FORMATS["fp4"].grid)
    return dataclasses.replace(FORMATS["fp4"], name="own", bits=grid.bits, **fields)


USERS = {
    "no subnormals": users(grid=floats(3, 2, subnormals=False)),
    "no mantissa": users(grid=floats(3, 0), gradient=Operand((1, 32), stochastic=True)),
    "neither": users(grid=floats(4, 0, subnormals=False), activation=Operand((1, 8))),
    "seven exponent bits": users(grid=floats(7, 10), gradient=Operand((4, 4), stochastic=True)),
    "many integers": users(grid=integers(2047), activation=Operand((2, 64)), scale="e8m0", scale_rule="ceil"),
    "floor": users(scale="e8m0", scale_rule="floor", gradient=Operand((1, 64)), weight=Operand((64, 64))),
    "even": users(scale="e8m0", scale_rule="even", gradient=Operand((128, 1)), weight=Operand((1, 1))),
    "small scales": users(scale="e5m3", gradient=Operand((1, 16), stochastic=True)),
    "powers as scales": users(scale="e4m0", gradient=Operand((1, 16), stochastic=True), weight=Operand((8, 16))),
    "scales up": users(scale="e4m3", scale_rule="up", tensor_scale=100.0, weight=Operand((16, 32))),
    "targets": users(activation=Operand((1, 32), targets=(4.0, 5.3)), weight=Operand((32, 1), targets=(3.0,))),
    "rotated targets": users(activation=Operand((1, 16), targets=(6.0, 4.0)), rotation=32, rotated=("forward",)),
    "rotated tensor": users(activation=Operand(None), rotation=64, rotated=("grad_weight",)),
    "rotated squares": users(weight=Operand((16, 16)), rotation=2, rotated=("forward", "grad_input")),
}


@pytest.mark.parametrize("name", slow_but(USERS, "neither", "powers as scales", "rotated targets"))
def test_it_does_in_formats_of_users(name: str, interpreter: Run) -> None:
    for operand, contracts in OPERANDS:
        check(interpreter, random(contracts), USERS[name], operand, contracts, KEY)


@pytest.mark.parametrize("fmt", ["fp8-tensor", slow("fp8-delayed"), slow("nvfp4")])
def test_it_takes_the_largest_magnitude_of_a_larger_tensor(fmt: str, interpreter: Run) -> None:
    x, whole = random(1), torch.tensor([2e4])
    check(interpreter, x, FORMATS[fmt], "activation", 1, None, 0, 1, whole)
    assert not torch.equal(*(round_operand(x, FORMATS[fmt], "activation", 1, amax=amax) for amax in (None, whole)))


@pytest.mark.gpu
@each_format
def test_on_a_gpu_every_format_gives_the_bits_of_the_cpu(fmt: str) -> None:
    format = FORMATS[fmt]
    for operand, contracts in OPERANDS:
        for data in (random, not_finite, enormous):
            x = data(contracts, large=True).bfloat16()
            keys = (None, KEY) if format.operand(operand).stochastic else (None,)
            for key in keys:
                check(on_cuda, x, format, operand, contracts, key, 1, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["fp8-tensor-e5m2", "mxfp6", "nvfp4-46", "nvfp4-rht", "ufp4-rht"])
def test_on_a_gpu_fp32_operands_give_the_bits_of_the_cpu(fmt: str) -> None:
    for operand, contracts in OPERANDS:
        for data in (random, not_finite, enormous):
            check(on_cuda, data(contracts, large=True), FORMATS[fmt], operand, contracts, KEY)


@pytest.mark.gpu
@pytest.mark.parametrize("name", USERS)
def test_on_a_gpu_formats_of_users_give_the_bits_of_the_cpu(name: str) -> None:
    for operand, contracts in OPERANDS:
        check(on_cuda, random(contracts), USERS[name], operand, contracts, KEY)


@pytest.mark.gpu
@pytest.mark.parametrize("contracts", [1, 0])
@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4-46", "mxfp4-rht"])
def test_on_a_gpu_strides_and_whole_blocks_change_nothing(fmt: str, contracts: int) -> None:
    x = torch.randn(512, 384, generator=torch.Generator().manual_seed(1)).bfloat16()
    for view in (x, x.t(), x[3:, 7:]):
        for operand in ("activation", "gradient", "weight"):
            check(on_cuda, view, FORMATS[fmt], operand, contracts, KEY)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_format
def test_on_a_gpu_a_layer_agrees_with_the_cpu(fmt: str, dtype: torch.dtype) -> None:
    """Forward and backward pass: rounded operands are the same, only the order of sums differs."""
    results = []
    for device in ("cpu", "cuda"):
        model, x, grad_output = layer_in(fmt, dtype)
        model, x = model.to(device), x.to(device).requires_grad_()
        y = model(x)
        y.backward(grad_output.to(device))
        results.append([found.detach().float().cpu() for found in (y, x.grad, model[0].weight.grad)])
    # One rounding to BF16 tips over where sums differ in their last bits.
    tolerance = 2.0**-7 if dtype == torch.bfloat16 else 1e-5
    for cpu, cuda in zip(*results, strict=True):
        assert float((cpu - cuda).abs().max()) <= tolerance * float(cpu.abs().max())


def layer_in(fmt: str, dtype: torch.dtype) -> tuple[torch.nn.Module, Tensor, Tensor]:
    from torchao.quantization import quantize_

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(200, 136)).to(dtype)
    quantize_(model, SnipLinearConfig(start_format=fmt, backend="emulated"))
    model[0].snip_state[3] = KEY - 2**64
    return model, torch.randn(150, 200).to(dtype), torch.randn(150, 136).to(dtype)
