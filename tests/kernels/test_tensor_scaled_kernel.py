"""The Triton kernels that encode operands into E4M3 against the reference, byte for byte: on a GPU, and anywhere under
Triton's interpreter. And compiled for a GPU, without one."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kernel_runs import either
from torch import Tensor

pytest.importorskip("triton")

from kernels.test_tensor_scaled import encoded, numbers, rising

from snip_hf.kernels.tensor_scaled import operators
from snip_hf.kernels.tensor_scaled.encoding import table_on
from snip_hf.kernels.tensor_scaled.exponents import EXPONENT, LARGEST, UNSET, Records
from snip_hf.numerics.formats import format_of_code
from snip_hf.numerics.gemms import OPERANDS

Run = Callable[..., tuple[Tensor, ...]]
MXFP4 = ("mxfp4", "mxfp4", "mxfp4")
MIXED = [("ufp4", "mxfp4", "fp8-tensor"), ("fp8-tensor", "ufp4", "mxfp4")]
DELAYED = [("fp8-delayed",) * 3, ("fp8-delayed", "mxfp4", "mxfp4"), ("mxfp4", "fp8-tensor", "fp8-delayed")]
# Operand -> the GEMMs that read its rows and its columns.
GEMMS_OF = {"activation": (0, 2), "gradient": (1, 2), "weight": (0, 1)}


def by_kernel(
    x: Tensor,
    state: Tensor,
    record: Tensor,
    operand: int,
    gemms: tuple[int, int],
    settled: bool = False,
    captured: bool = False,
) -> tuple[Tensor, ...]:
    records = Records(record, table_on(x.device))
    if settled:
        records.view.set_formats([format_of_code(code) for code in state[:3].tolist()])
        records.view.known = tuple(index == operand for index in range(3))
    with patch.multiple(operators, is_captured=lambda x: captured, serves_all_plans=lambda *_: False):
        assert settled == (not operators.facts_of(record, operand, gemms, True).needs_scales)
        return *encoded(x, state, records, operand, gemms, True), records.record


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def run(request: pytest.FixtureRequest) -> Run:
    return either(request, by_kernel)


def record_with(exponent: int = UNSET) -> Tensor:
    record = Records.new(torch.device("cpu")).record
    record[:, EXPONENT] = exponent
    return record


def check(
    run: Run,
    x: Tensor,
    formats: tuple[str, ...],
    operand: str,
    gemms: tuple[int, int],
    exponent: int = UNSET,
    settled: bool = False,
    captured: bool = False,
) -> None:
    number = OPERANDS.index(operand)
    records = Records(record_with(exponent), table_on(torch.device("cpu")))
    expected = encoded(x, numbers(formats), records, number, gemms)
    *got, record = run(x, numbers(formats), record_with(exponent), number, gemms, settled, captured)
    for name, one, other in zip(("rows", "their scale", "columns", "their scale"), got, expected, strict=True):
        assert one.shape == other.shape, name
        assert torch.equal(one.float().nan_to_num(9999.0), other.float().nan_to_num(9999.0)), name
    if x.isfinite().all():  # what else is noted does not matter
        noted = slice(LARGEST + 1) if settled else slice(None)  # blocks are counted by the other launch
        assert torch.equal(record[:, noted], records.record[:, noted])


@pytest.mark.parametrize("formats", [MXFP4, *MIXED, *DELAYED], ids="/".join)
@pytest.mark.parametrize("operand", OPERANDS)
def test_the_kernels_write_the_bytes_of_the_reference(operand: str, formats: tuple[str, ...], run: Run) -> None:
    check(run, rising(130, 70), formats, operand, GEMMS_OF[operand])
    check(run, rising(64, 128), formats, operand, GEMMS_OF[operand], 3)


@pytest.mark.parametrize("operand", OPERANDS)
def test_one_launch_writes_them_where_the_exponent_and_encoded_formats_are_known(operand: str, run: Run) -> None:
    row_gemm, column_gemm = GEMMS_OF[operand]
    mixed = ("mxfp4", "fp8-delayed", "fp8-delayed")
    for formats in (MXFP4, ("ufp4", "mxfp4", "ufp4"), *DELAYED[:2], mixed):
        check(run, rising(70, 66), formats, operand, (row_gemm, column_gemm), 3, settled=True)
    for formats in (MXFP4, mixed):
        for gemms in ((row_gemm, -1), (-1, column_gemm)):
            check(run, rising(70, 66), formats, operand, gemms, 3, settled=True)
    check(run, rising(64, 128), MXFP4, operand, GEMMS_OF[operand], -20, settled=True)


@pytest.mark.parametrize("operand", OPERANDS)
def test_in_captures_they_do_without_knowing_that_the_formats_have_blocks(operand: str, run: Run) -> None:
    row_gemm, _ = GEMMS_OF[operand]
    for formats in (MXFP4, ("fp8-delayed", "mxfp4", "mxfp4")):
        for gemms in (GEMMS_OF[operand], (row_gemm, -1)):
            check(run, rising(70, 66), formats, operand, gemms, 3, settled=True, captured=True)


@pytest.mark.parametrize("exponent", [-20, 12, 30])
def test_they_do_outside_the_range(exponent: int, run: Run) -> None:
    for operand, gemms in GEMMS_OF.items():
        check(run, rising(64, 96), MXFP4, operand, gemms, exponent)
        check(run, rising(64, 96), ("ufp4", "ufp4", "ufp4"), operand, gemms, exponent)
        check(run, rising(64, 96), DELAYED[0], operand, gemms, exponent)
        check(run, rising(64, 96), DELAYED[0], operand, gemms, exponent, settled=True)


@pytest.mark.parametrize("operand", OPERANDS)
def test_they_do_for_one_layout_alone(operand: str, run: Run) -> None:
    row_gemm, column_gemm = GEMMS_OF[operand]
    for gemms in ((row_gemm, -1), (-1, column_gemm)):
        check(run, rising(40, 64), MIXED[0], operand, gemms)
        check(run, rising(40, 64), MXFP4, operand, gemms, 1)
        check(run, rising(1, 200), ("ufp4", "ufp4", "ufp4"), operand, gemms)


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (33, 257)])
def test_they_do_for_every_shape(shape: tuple[int, int], run: Run) -> None:
    check(run, rising(*shape), MXFP4, "gradient", (1, 2))
    check(run, rising(*shape).float() * 1.001, MIXED[1], "weight", (0, 1))


def test_they_do_for_zeros_nan_and_infinities(run: Run) -> None:
    x = rising(64, 64)
    x[3, 5], x[40, 7], x[50] = torch.nan, -torch.inf, 0.0
    check(run, x, MXFP4, "gradient", (1, 2), 2)
    check(run, x, MIXED[0], "activation", (0, 2), 2)
    for settled in (False, True):
        check(run, x, DELAYED[0], "gradient", (1, 2), 2, settled=settled)
    zeros = torch.zeros(64, 64, dtype=torch.bfloat16)
    check(run, zeros, MXFP4, "activation", (0, 2))
    check(run, zeros, MIXED[1], "activation", (0, 2), 5)


@pytest.mark.parametrize(
    "view", [lambda x: x.t(), lambda x: x[3:, 7:], lambda x: x[::2]], ids=["transposed", "offset", "every other"]
)
def test_they_do_for_every_stride(view: Callable[[Tensor], Tensor], run: Run) -> None:
    check(run, view(rising(70, 140)), MXFP4, "gradient", (1, 2))


def compiled(is_gradient: bool, capability: int, finds: bool) -> Any:
    """The kernel for a GPU, assembled by the ptxas that is part of Triton."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from snip_hf.kernels.tensor_scaled.tiles import encode_kernel

    runs, width, warps, registers = operators.TILES[int(is_gradient)]
    constants: dict[str, Any] = dict.fromkeys(("HAS_ROWS", "HAS_COLUMNS", "COUNTS"), True)
    constants |= {"FINDS": finds, "ROW_GEMM": int(is_gradient) if finds else -1, "COLUMN_GEMM": 2 if finds else -1}
    constants |= {"IS_GRADIENT": is_gradient, "IN_BLOCKS": finds, "RAGGED": False, "RUNS": runs, "CHANNELS": width}
    kinds = {"x": "*bf16", "state": "*i64", "record": "*i64", "row_parameters": "*fp32", "column_parameters": "*fp32"}
    kinds |= {"table": "*fp32"}
    kinds |= {"rows": "*fp8e4nv", "columns": "*fp8e4nv"}
    names = encode_kernel.arg_names
    signature = {arg: "constexpr" if arg in constants else kinds.get(arg, "i32") for arg in names}
    divisible = {(index,): [["tt.divisibility", 16]] for index, arg in enumerate(names) if arg not in constants}
    source = ASTSource(fn=encode_kernel, signature=signature, constexprs=constants, attrs=divisible)
    options = {"num_warps": warps, "maxnreg": registers, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize(
    ("is_gradient", "capability", "finds"),
    [(False, 89, True), (False, 90, False), (True, 90, False), (True, 120, True)],
)
def test_the_kernel_assembles_and_converts_to_fp8_in_hardware(is_gradient: bool, capability: int, finds: bool) -> None:
    code = compiled(is_gradient, capability, finds)
    assert len(code.asm["cubin"]) > 1000
    assert "cvt.rn.satfinite.e4m3x2.f32" in code.asm["ptx"]
