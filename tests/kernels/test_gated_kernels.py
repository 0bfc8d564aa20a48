"""The Triton kernels of gated MLPs: their values against torch's, and their bytes against the reference's, on a GPU and
under Triton's interpreter. And compiled for a GPU, without one."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kernel_runs import dump, either, load
from slow_cases import slow
from torch import Tensor

pytest.importorskip("triton")

from kernels.test_tensor_scaled import numbers

from snip_hf.kernels.tensor_scaled import gated
from snip_hf.kernels.tensor_scaled.encoding import table_on
from snip_hf.kernels.tensor_scaled.exponents import EXPONENT, LARGEST, Records
from snip_hf.kernels.tensor_scaled.gated import Operand, activation_of, gradients_of
from snip_hf.kernels.tensor_scaled.operators import empty_layouts
from snip_hf.numerics.formats import format_of_code

Run = Callable[..., Any]
MXFP4, UFP4, WITH_FP8 = ("mxfp4",) * 3, ("ufp4",) * 3, ("mxfp4", "mxfp4", "fp8-tensor")
DELAYED, WITH_DELAYED = ("fp8-delayed",) * 3, ("mxfp4", "mxfp4", "fp8-delayed")
ACTIVATION, GRADIENT = 0, 1
# The gradients of gate and up, and their product, in the order of the kernel.
OPERANDS = (GRADIENT, GRADIENT, ACTIVATION)


def inputs(tokens: int, channels: int) -> tuple[Tensor, Tensor, Tensor]:
    """A gradient, gate and up, over some binades."""
    generator = torch.Generator().manual_seed(tokens * channels)
    scales = torch.tensor([0.01, 3.0, 1.0])
    found = torch.randn(3, tokens, channels, generator=generator) * scales[:, None, None]
    grad, gate, up = (found * torch.linspace(0.05, 4, channels)).to(torch.bfloat16)
    return grad, gate, up


def operand(number: int, formats: Sequence[str], like: Tensor, gemms: tuple[int, int], settled: bool) -> Operand:
    """Returns an operand to encode, whose exponent the host knows if `settled`."""
    records = Records.new(like.device)
    records.record[:, EXPONENT] = -3
    records.view.set_formats([format_of_code(code) for code in numbers(formats)[:3].tolist()])
    records.view.known = (settled,) * 3
    KEPT.append(records)
    counts = number == GRADIENT or gemms[0] >= 0
    layouts = empty_layouts(like, *gemms)
    layer = numbers(formats).to(like.device), records.record, table_on(like.device)
    return Operand(layer, number, gemms, counts, layouts)


KEPT: list[Records] = []  # A note lives as long as its records.


def by_kernels(x: tuple[Tensor, ...], formats: Sequence[Sequence[str]], settled: bool, has_rows: bool = True) -> Any:
    """Launches both kernels: of the forward operand and of the three of backward the values, if any were written, the
    layouts and the record."""
    KEPT.clear()
    _, gate, up = x
    first = operand(ACTIVATION, formats[2], gate, (0, -1), settled)
    found = [(gated.launch_forward(gate, up, first), *first.outputs, first.layer[1])]
    gemms = [(1 if has_rows else -1, 2), (1 if has_rows else -1, 2), (-1, 2)]
    rest = [
        operand(number, names, gate, own, settled) for number, names, own in zip(OPERANDS, formats, gemms, strict=True)
    ]
    values = gated.launch_backward(x, rest, has_rows, True)
    found += [(of_one, *one.outputs, one.layer[1]) for of_one, one in zip(values, rest, strict=True)]
    return found


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def run(request: pytest.FixtureRequest) -> Run:
    return either(request, by_kernels)


def check(run: Run, x: tuple[Tensor, ...], formats: Sequence[Sequence[str]], has_rows: bool = True) -> None:
    """Checks that encoding in the kernel equals the reference's encoding of the values that the same kernel writes."""
    values = [one[0] for one in run(x, formats, False, has_rows)]
    encoded = run(x, formats, True, has_rows)
    rows = 1 if has_rows else -1
    cases = zip(
        values,
        encoded,
        (ACTIVATION, *OPERANDS),
        (formats[2], *formats),
        ((0, -1), (rows, 2), (rows, 2), (-1, 2)),
        strict=True,
    )
    for value, (written, *got, record), number, names, gemms in cases:
        if written is not None:  # in BF16, since a format does not encode
            assert torch.equal(written, value)
            continue
        one = operand(number, names, value, gemms, settled=False)
        one.encode(value, by_kernel=False)
        for layout, expected in zip(got, one.outputs, strict=True):
            assert layout.shape == expected.shape
            assert torch.equal(layout.float().nan_to_num(9999.0), expected.float().nan_to_num(9999.0))
        if all(part.isfinite().all() for part in x):
            assert torch.equal(record[:, : LARGEST + 1], one.layer[1][:, : LARGEST + 1])


@pytest.mark.parametrize("shape", [(70, 66)])
def test_the_kernels_compute_what_torch_does(shape: tuple[int, int], run: Run) -> None:
    x = inputs(*shape)
    expected = activation_of(*x[1:]), *gradients_of(*x), activation_of(*x[1:])
    for (got, *_), other in zip(run(x, [MXFP4] * 3, False), expected, strict=True):
        # One step of BF16 where the last bits of FP32 decide.
        assert torch.allclose(got.float(), other.float(), rtol=2.0**-7, atol=1e-30)
        assert (got == other).float().mean() > 0.99


@pytest.mark.parametrize(
    ("shape", "formats", "has_rows"),
    [
        ((70, 66), [MXFP4] * 3, True),
        slow((64, 128), [MXFP4, UFP4, MXFP4], True),
        slow((70, 66), [UFP4, MXFP4, UFP4], True),
        slow((33, 64), [MXFP4] * 3, False),
        slow((70, 66), [DELAYED] * 3, True),
        slow((64, 64), [WITH_DELAYED, MXFP4, DELAYED], True),
    ],
)
def test_operands_encoded_at_once_equal_those_of_the_reference(
    shape: tuple[int, int], formats: list[tuple[str, ...]], has_rows: bool, run: Run
) -> None:
    check(run, inputs(*shape), formats, has_rows)


@pytest.mark.slow
def test_an_operand_whose_format_does_not_encode_is_written_as_it_is(run: Run) -> None:
    x, formats = inputs(40, 64), [MXFP4, WITH_FP8, MXFP4]
    assert [one[0] is None for one in run(x, formats, True)] == [True, True, False, True]
    check(run, x, formats)
    check(run, x, [WITH_FP8, MXFP4, WITH_FP8])


@pytest.mark.slow
def test_infinities_and_nan_make_nan_of_their_blocks_alone(run: Run) -> None:
    grad, gate, up = inputs(64, 64)
    grad[3, 5], gate[40, 7], gate[50, 50], up[60, 60] = torch.inf, -torch.inf, torch.nan, torch.inf
    check(run, (grad, gate, up), [MXFP4] * 3)
    gate[:], up[:] = 0.0, 0.0
    check(run, (grad, gate, up), [MXFP4] * 3)


@pytest.mark.slow
def test_the_operators_encode_what_the_kernels_leave(interpreting: ProcessPoolExecutor) -> None:
    """With and without exponents that the host knows of."""
    found = [load(interpreting.submit(through_operators, settled).result()) for settled in (False, True)]
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.float(), other.float())


def through_operators(settled: bool) -> bytes:
    KEPT.clear()
    grad, gate, up = inputs(40, 64)
    layers = []
    for number, formats in zip((GRADIENT, GRADIENT, ACTIVATION), (MXFP4, WITH_FP8, MXFP4), strict=True):
        one = operand(number, formats, gate, (-1, 2), settled)
        layers.append(one.layer)
    with patch.object(gated.operators, "runs_kernels", lambda x: True):
        found = [*gated.encode_gated(gate, up, layers[2], True)]
        pairs = [tensor for layer in layers for tensor in layer[:2]]
        found += gated.encode_gated_gradients(grad, gate, up, [*pairs, layers[2][2]], True, True)
    return dump(found)


def compiled(backward: bool, capability: int) -> Any:
    """A kernel for a GPU, assembled by the ptxas that is part of Triton."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from snip_hf.kernels.tensor_scaled import gated_tiles

    kernel = gated_tiles.encode_gated_gradients_kernel if backward else gated_tiles.encode_gated_kernel
    runs, width, warps, registers = gated.TILES[int(backward)]
    constants: dict[str, Any] = {"COUNTS": True, "IN_BLOCKS": True, "RAGGED": False, "RUNS": runs, "CHANNELS": width}
    constants |= {"HAS_ROWS": True} if backward else {}
    kinds = {"state": "*i64", "record": "*i64", "parameters": "*fp32", "table": "*fp32", "values": "*bf16"}
    kinds |= {"rows": "*fp8e4nv", "columns": "*fp8e4nv"} | dict.fromkeys(("grad", "gate", "up"), "*bf16")
    names = kernel.arg_names
    signature = {arg: "constexpr" if arg in constants else kinds.get(arg.split("_")[-1], "i32") for arg in names}
    free = (*constants, "plain", "tokens")
    divisible = {(index,): [["tt.divisibility", 16]] for index, arg in enumerate(names) if arg not in free}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=divisible)
    options = {"num_warps": warps, "maxnreg": registers, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize(("backward", "capability"), [(False, 89), (False, 90), (True, 90), (True, 120)])
def test_the_kernels_assemble_and_on_hopper_spill_no_registers(backward: bool, capability: int, tmp_path: Path) -> None:
    import triton

    code = compiled(backward, capability)
    assert "cvt.rn.satfinite.e4m3x2" in code.asm["ptx"]
    if capability == 90:
        (tmp_path / "cubin").write_bytes(code.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        told = subprocess.run([tool, "--dump-resource-usage", tmp_path / "cubin"], capture_output=True, text=True)
        assert re.findall(r"STACK:(\d+)", told.stdout) == ["0"]
