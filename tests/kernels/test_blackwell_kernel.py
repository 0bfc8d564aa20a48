"""The Triton kernel against torch's operations, byte for byte: on a GPU, and anywhere under Triton's interpreter. And
compiled for Blackwell's GPUs, without one."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable

import pytest
import torch
from kernel_runs import either
from torch import Tensor

pytest.importorskip("triton")

from kernels.test_blackwell_packing import KEY, OPERANDS, large, not_finite, random, state, tiny

from snip_hf.kernels.blackwell import quantization
from snip_hf.kernels.blackwell.packing import kind_of
from snip_hf.numerics.formats import FORMATS, NumberFormat

Run = Callable[..., tuple[Tensor, Tensor, Tensor]]

# One of each kind, square blocks of both sizes, weights quantized twice, rotated operands. What has targets is torch's.
BY_KERNEL = ["mxfp8", "mxfp4", "mxfp4-32x32", "nvfp4", "nvfp4-rht"]


# ------------------------------------------------------------------------------------- where the kernel runs


def by_kernel(
    x: Tensor, fmt: NumberFormat, operand: str, contracts: int, numbers: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    packed = quantization.quantize(x, fmt, operand, contracts, numbers, by_kernel=True)
    return packed.data.clone(), packed.scales.clone(), packed.tensor_scale.clone()


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def run(request: pytest.FixtureRequest) -> Run:
    return either(request, by_kernel)


# ------------------------------------------------------------------------------------- the bytes


def check(run: Run, x: Tensor, fmt: NumberFormat, numbers: Tensor) -> None:
    done = []
    for operand, contracts in OPERANDS:
        if (fmt.operand(operand), contracts) in done:
            continue
        done.append((fmt.operand(operand), contracts))
        expected = quantization.quantize(x, fmt, operand, contracts, numbers, by_kernel=False)
        data, scales, tensor_scale = run(x, fmt, operand, contracts, numbers)
        assert torch.equal(data, expected.data), (operand, contracts)
        assert torch.equal(scales, expected.scales), (operand, contracts)
        assert torch.equal(tensor_scale.isnan(), expected.tensor_scale.isnan())
        assert torch.equal(tensor_scale.nan_to_num(0.0), expected.tensor_scale.nan_to_num(0.0))


@pytest.mark.parametrize(
    ("name", "data"),
    [
        # Random numbers in every format, and each kind of special ones in every other format.
        (name, data)
        for i, name in enumerate(BY_KERNEL)
        for j, data in enumerate((random, not_finite, tiny, large))
        if j == 0 or (i + j) % 2 == 0
    ],
)
def test_the_kernel_writes_the_bytes_of_torch(name: str, data: Callable[[tuple[int, int]], Tensor], run: Run) -> None:
    check(run, data((131, 70)), FORMATS[name], state())


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (256, 33)])
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4"])
def test_it_does_for_every_shape(name: str, shape: tuple[int, int], run: Run) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    check(run, x, FORMATS[name], state(1))


@pytest.mark.parametrize("rule", ["floor", "ceil", "even", "rceil"])
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_it_does_under_every_rule_of_powers(name: str, rule: str, run: Run) -> None:
    fmt = FORMATS[name]
    nearest = dataclasses.replace(fmt.gradient, stochastic=False)
    for data in (random, tiny, large):
        check(run, data((33, 40)), dataclasses.replace(fmt, scale_rule=rule, gradient=nearest), state())


@pytest.mark.parametrize("rule", ["nearest", "up"])
@pytest.mark.parametrize("tensor_scale", [None, 448.0])
def test_it_does_under_every_rule_of_fine_scales(rule: str, tensor_scale: float | None, run: Run) -> None:
    fmt = dataclasses.replace(FORMATS["nvfp4"], tensor_scale=tensor_scale)
    nearest = dataclasses.replace(fmt.gradient, stochastic=False)
    for data in (random, tiny):
        check(run, data((33, 40)), dataclasses.replace(fmt, scale_rule=rule, gradient=nearest), state())


@pytest.mark.parametrize("rank", [(0, 2), (6, 7), (2**20, 2**21)], ids=str)
def test_it_does_on_every_rank(rank: tuple[int, int], run: Run) -> None:
    for key in (KEY, 3):
        check(run, random((33, 70)), FORMATS["nvfp4"], state(key, *rank))


@pytest.mark.parametrize(
    "view",
    [lambda x: x.t(), lambda x: x[3:, 7:], lambda x: x[::2, ::3], lambda x: x.float()],
    ids=["transposed", "offset", "every other", "FP32"],
)
def test_it_does_for_every_stride_and_fp32(view: Callable[[Tensor], Tensor], run: Run) -> None:
    x = view(random((140, 210)))
    for name in ("mxfp8", "nvfp4"):
        check(run, x, FORMATS[name], state())


# ------------------------------------------------------------------------------------- compiled for Blackwell


def compiled(name: str, operand: str, contracts: int, capability: int) -> str:
    """PTX of the kernel for a GPU; ptxas, which is part of Triton, has then assembled it for it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from snip_hf.kernels.blackwell.tiles import quantize_kernel

    fmt = FORMATS[name]
    kind, rule = kind_of(fmt), fmt.operand(operand)
    assert kind is not None and rule.block is not None
    constants = quantization.constants_of(kind, fmt, rule, contracts)
    kinds = {"x": "*bf16", "state": "*i64", "tensor_amax": "*fp32", "data": "*u8", "scales": "*u8"}
    numbers = ("largest", "target", "other_target", "tensor_target", "scale_largest", "scale_smallest")
    kinds |= dict.fromkeys(numbers, "fp32")
    signature = {arg: "constexpr" if arg in constants else kinds.get(arg, "i32") for arg in quantize_kernel.arg_names}
    source = ASTSource(fn=quantize_kernel, signature=signature, constexprs=constants)
    options = {"num_warps": quantization._WARPS[contracts], "enable_fp_fusion": False}
    code = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert len(code.asm["cubin"]) > 1000
    found: str = code.asm["ptx"]
    return found


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize(
    ("name", "operand", "contracts", "capability"),
    [("mxfp8", "activation", 1, 100), ("mxfp4", "gradient", 1, 120), ("nvfp4", "gradient", 0, 100)],
)
def test_the_kernel_assembles_for_blackwell_and_needs_none_of_its_conversions(
    name: str, operand: str, contracts: int, capability: int
) -> None:
    """sm_120 lacks some of those of sm_100, and neither is at hand."""
    ptx = compiled(name, operand, contracts, capability)
    assert re.search(rf"\.target sm_{capability}a", ptx)
    assert [word for word in re.findall(r"cvt\.\S+", ptx) if re.search(r"e2m1|e4m3|ue8m0|\.rs\.", word)] == []
