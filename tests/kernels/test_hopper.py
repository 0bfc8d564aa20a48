"""The Triton kernels against `quantize`, bit for bit: on a GPU, and anywhere under Triton's interpreter. The product
against float64."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import kernel_runs
from backends import gemm_call, hopper_lacks, select_backend
from kernel_runs import hasten_the_interpreter, interpreting, triton_ir
from oracles.three_gemms import product
from rounded import COLUMN_TILE, quantize

from snip_hf.kernels.emulated import grad_input_gemm, grad_weight_gemm
from snip_hf.kernels.hopper import operators
from snip_hf.numerics.formats import E2M1, FORMATS, format_of_code
from snip_hf.numerics.gemms import GEMMS, ROW_TILE, SQUARE_TILE, TILE
from snip_hf.numerics.random_streams import stream_key
from snip_hf.numerics.rounding import Quantized

Run = Callable[..., tuple[Tensor, ...]]

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(hopper_lacks(torch.device("cuda")) is not None, reason="needs a Hopper GPU"),
]
# Two 64-bit keys, of which one is negative as an int64.
KEYS = [stream_key(2**40 + 7, 3, 4, 123456789, 1), stream_key(1, 2, 3, 4, 1)]
# A rank among how many.
RANKS = [(0, 2), (1, 2), (6, 7), (2**20, 2**21)]
SHAPES = [(1, 1), (5, 129), (130, 200), (257, 384), (128, 128)]
# On a GPU: whole tiles of an odd number of blocks, long columns, long rows, ragged in both.
LARGE = [(2048, 4096), (8192, 640), (129, 11008), (3001, 1357)]
EACH_TWO = list(itertools.product(["fp8", "fp4"], repeat=2))


# ------------------------------------------------------------------------------------- where the kernels run


def by_kernel(name: str, *arguments: Any) -> tuple[Tensor, ...]:
    """Calls one of `operators`' functions."""
    outputs: tuple[Tensor, ...] = getattr(operators, name)(*arguments)
    return outputs


on_cuda: Run = kernel_runs.on_gpu(by_kernel)


def correct_the_interpreter() -> None:
    """Gives Triton's interpreter casts that round to nearest: its own cut off on the way to BF16, lose the carry into
    the exponent on the way to FP8, and make numbers of NaN. Its `tl.max` leaves NaN out, as a GPU's would, whereas the
    kernels' own maximum, which is used there, does not."""
    import triton.language as tl
    from triton.runtime import interpreter

    hasten_the_interpreter()
    dtypes = {tl.float32: torch.float32, tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn}
    raw = {torch.float32: (np.float32, torch.float32), torch.bfloat16: (np.uint16, torch.uint16)}
    raw[torch.float8_e4m3fn] = (np.uint8, torch.uint8)

    def convert(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        given, wanted = dtypes[source], dtypes[target]
        numbers = torch.from_numpy(np.ascontiguousarray(data).view(raw[given][0])).view(given)
        return numbers.to(wanted).view(raw[wanted][1]).numpy()

    interpreter._convert_float = convert
    reduced = interpreter.ReduceOps.min_max
    interpreter.ReduceOps.min_max = lambda self, input, **_: reduced(self, input, val_reduce_op=np.max)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Run]:
    """Calls of `operators`' functions in another process."""
    with interpreting(correct_the_interpreter) as pool:
        yield kernel_runs.interpreter(pool, by_kernel)


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=on_gpu)])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs one of `operators`' functions on tensors of the CPU; results come back to the CPU."""
    return request.getfixturevalue("interpreter") if request.param == "interpreter" else on_cuda


# ------------------------------------------------------------------------------------- what they are given, and give


def state(*formats: str, key: int = KEYS[0], rank: tuple[int, int] = (0, 1)) -> Tensor:
    """A layer's, with the formats of forward, grad_input and grad_weight."""
    return torch.tensor([*(FORMATS[fmt].code for fmt in formats), key - 2**64 if key >= 2**63 else key, *rank])


def random(shape: tuple[int, int]) -> Tensor:
    """BF16, over many magnitudes, with a zero row and a zero column."""
    generator = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
    x = torch.randn(shape, generator=generator) * torch.exp(2 * torch.randn(shape, generator=generator))
    x[-1 if shape[0] > 1 else 1 :] = 0
    x[:, 3:4] = 0
    return x.to(torch.bfloat16)


def outliers(shape: tuple[int, int]) -> Tensor:
    """One element in a hundred is 1,000 times as large; some rows and columns are near the dtype's largest number."""
    x = random(shape).float()
    x[torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.01] *= 1000
    x[::50] *= 1e30
    x[:, ::40] = (x[:, ::40] * 1e35).clamp(-3e38, 3e38)
    return x.to(torch.bfloat16)


def tiny(shape: tuple[int, int]) -> Tensor:
    """Around and below the smallest normal number, so that scales are raised to it."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)) * 2.0**-126
    x *= torch.tensor([0.01, 1.0, 20.0, 1000.0]).repeat(-(-shape[0] // 4))[: shape[0], None]
    return x.to(torch.bfloat16)


def on_the_grid(shape: tuple[int, int]) -> Tensor:
    """Ties and grid values of FP4 with scale 1: multiples of 1/8 up to 6."""
    x = torch.randint(-48, 49, shape, generator=torch.Generator().manual_seed(3)) / 8
    x[:, ::TILE], x[::TILE] = 6, -6
    return x.to(torch.bfloat16)


def not_finite(shape: tuple[int, int]) -> Tensor:
    x = random(shape)
    x[0, 0], x[shape[0] // 2, shape[1] // 3], x[-2:-1, -1] = torch.nan, torch.inf, -torch.inf
    return x


DATA = {
    "random": random,
    "outliers": outliers,
    "tiny": tiny,
    "zero": lambda shape: torch.zeros(shape, dtype=torch.bfloat16),
    "ties": on_the_grid,
    "not-finite": not_finite,
}


def rounded_up(size: int, multiple: int = TILE) -> int:
    return -(-size // multiple) * multiple


def assert_same(got: Tensor, expected: Tensor, what: str) -> None:
    """The same numbers; NaN equals NaN, and -0.0 equals 0.0."""
    got, expected = got.to(torch.float32), expected.to(torch.float32)
    assert got.shape == expected.shape, f"{what}: {tuple(got.shape)} not {tuple(expected.shape)}."
    wrong = ~((got == expected) | (got.isnan() & expected.isnan()))
    assert not wrong.any(), (
        f"{what}: {int(wrong.sum())} of {wrong.numel()} differ, first at {wrong.nonzero()[0].tolist()}: "
        f"{got[wrong][0]} not {expected[wrong][0]}."
    )


def assert_padding(values: Tensor, inside: tuple[int, int]) -> None:
    """Checks that the padding adds nothing to a product, unless its whole tile is NaN."""
    rows, columns = inside
    beyond = torch.ones(values.shape, dtype=torch.bool)
    beyond[:rows, :columns] = False
    padding = values.to(torch.float32)[beyond]
    assert ((padding == 0) | padding.isnan()).all()
    poisoned_rows = values[:rows, :columns].to(torch.float32).isnan().any(1)
    assert not values[:rows, columns:].to(torch.float32)[~poisoned_rows].isnan().any()


def assert_tokens(
    outputs: tuple[Tensor, ...], x: Tensor, numbers: Tensor, row_gemm: int, column_gemm: int, is_gradient: bool
) -> None:
    """Both layouts that `quantize_tokens` gave are those of `quantize`."""
    rows, row_scales, columns, column_scales = outputs
    tokens, channels = x.shape
    padded_tokens, padded_channels = rounded_up(tokens), rounded_up(channels)
    assert rows.dtype == columns.dtype == torch.float8_e4m3fn
    assert row_scales.dtype == column_scales.dtype == torch.float32
    if row_gemm >= 0:
        expected = reference(x, numbers, row_gemm, ROW_TILE, is_gradient)
        assert rows.shape == (padded_tokens, padded_channels)
        assert row_scales.shape == (padded_channels // TILE, padded_tokens)
        assert_same(rows[:tokens, :channels], expected.values, "rows")
        assert_same(row_scales.t()[:tokens], expected.scales, "scales of rows")
        assert_padding(rows, (tokens, channels))
        assert row_scales[:, tokens:].isfinite().all()
    else:
        assert rows.numel() == row_scales.numel() == 0
    if column_gemm >= 0:
        expected = reference(x, numbers, column_gemm, COLUMN_TILE, is_gradient)
        assert columns.shape == (padded_channels, padded_tokens)
        assert column_scales.shape == (padded_tokens // TILE, padded_channels)
        assert_same(columns.t()[:tokens, :channels], expected.values, "columns")
        assert_same(column_scales[:, :channels], expected.scales, "scales of columns")
        assert_padding(columns, (channels, tokens))
        assert column_scales[:, channels:].isfinite().all()
    else:
        assert columns.numel() == column_scales.numel() == 0


def reference(x: Tensor, numbers: Tensor, gemm: int, tile: tuple[int, int], is_gradient: bool = False) -> Quantized:
    """`quantize` in the format of the GEMM, stochastically where training does so."""
    fmt = format_of_code(int(numbers[gemm]))
    assert fmt.grid is not None
    key, rank, ranks = numbers[3:].tolist()
    return quantize(x, fmt, tile, key % 2**64 if is_gradient and fmt.grid == E2M1 else None, rank, ranks)


def assert_weight(outputs: tuple[Tensor, ...], weight: Tensor, numbers: Tensor, *uses: bool) -> None:
    """Checks that `quantize_weight` equals `quantize` for the forward GEMM and, transposed, for grad_input."""
    for gemm, used in enumerate(uses):
        values, scales = outputs[2 * gemm : 2 * gemm + 2]
        assert values.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32
        if not used:
            assert values.numel() == scales.numel() == 0
            continue
        expected = reference(weight.to(torch.bfloat16), numbers, gemm, SQUARE_TILE)
        wanted_values, wanted_scales = expected.values, expected.scales
        if gemm == 1:
            wanted_values, wanted_scales = wanted_values.t(), wanted_scales.t()
        rows, columns = wanted_values.shape
        assert values.shape == (rounded_up(rows), rounded_up(columns))
        assert scales.shape == (rounded_up(rows) // TILE, rounded_up(rounded_up(columns) // TILE, 4))
        assert_same(values[:rows, :columns], wanted_values, GEMMS[gemm])
        assert_same(scales[:, : wanted_scales.shape[1]], wanted_scales, f"scales for {GEMMS[gemm]}")
        assert_padding(values, (rows, columns))


# The interpreter takes a second for a tile of 128x128 numbers. Two different formats show what two of the same do.
each_two = pytest.mark.parametrize("formats", [("fp8", "fp4"), ("fp4", "fp8")], ids="/".join)
each_shape = pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
each_large_shape = pytest.mark.parametrize("shape", LARGE, ids=str)
each_data = pytest.mark.parametrize("data", [name for name in DATA if name != "random"])


def x_in_and_gradient_in(of_x: tuple[str, str], of_gradient: tuple[str, str]) -> Any:
    """Tokens in one pair of formats, and gradients in another one."""
    return pytest.mark.parametrize(
        ("formats", "is_gradient"),
        [(of_x, False), (of_gradient, True)],
        ids=lambda value: "/".join(value) if isinstance(value, tuple) else ("gradient" if value else "x"),
    )


class TestTokens:
    @x_in_and_gradient_in(("fp8", "fp4"), ("fp4", "fp8"))
    @each_shape
    def test_both_layouts_are_those_of_the_reference(
        self, run: Run, formats: tuple[str, str], shape: tuple[int, int], is_gradient: bool
    ) -> None:
        x, numbers = random(shape), state("bf16", *formats)
        assert_tokens(run("quantize_tokens", x, numbers, 1, 2, is_gradient), x, numbers, 1, 2, is_gradient)

    @x_in_and_gradient_in(("fp4", "fp8"), ("fp8", "fp4"))
    @each_data
    def test_every_kind_of_number_is_treated_as_by_the_reference(
        self, run: Run, formats: tuple[str, str], data: str, is_gradient: bool
    ) -> None:
        x, numbers = DATA[data]((130, 100)), state("bf16", *formats, key=KEYS[1])
        assert_tokens(run("quantize_tokens", x, numbers, 1, 2, is_gradient), x, numbers, 1, 2, is_gradient)

    @pytest.mark.parametrize("fmt", ["fp8", "fp4"])
    @pytest.mark.parametrize(("row_gemm", "column_gemm"), [(1, -1), (-1, 2)])
    @pytest.mark.parametrize("shape", [(130, 100)], ids=str)
    def test_a_layout_is_the_same_without_the_other_and_reads_the_format_of_its_gemm(
        self, run: Run, shape: tuple[int, int], row_gemm: int, column_gemm: int, fmt: str
    ) -> None:
        x, other = random(shape), "fp4" if fmt == "fp8" else "fp8"
        formats = [fmt if gemm in (row_gemm, column_gemm) else other for gemm in range(3)]
        for is_gradient in (False, True):
            arguments = (x, state(*formats), row_gemm, column_gemm, is_gradient)
            assert_tokens(run("quantize_tokens", *arguments), *arguments)

    @pytest.mark.parametrize("shape", [(5, 129)], ids=str)
    @pytest.mark.parametrize("rank", [(6, 7)], ids=str)
    def test_each_rank_rounds_as_the_reference_does(
        self, run: Run, shape: tuple[int, int], rank: tuple[int, int]
    ) -> None:
        x = random(shape)
        for key in KEYS:
            numbers = state("bf16", "fp4", "fp4", key=key, rank=rank)
            assert_tokens(run("quantize_tokens", x, numbers, 1, 2, True), x, numbers, 1, 2, True)

    def test_two_ranks_round_together_as_one_process_does(self, run: Run) -> None:
        x, formats = random((256, 200)), ("bf16", "fp4", "fp4")
        rows, _, columns, _ = run("quantize_tokens", x, state(*formats), 1, 2, True)
        halves = [
            run("quantize_tokens", half, state(*formats, rank=(rank, 2)), 1, 2, True)
            for rank, half in enumerate(x.chunk(2))
        ]
        assert_same(torch.cat([half[0] for half in halves]), rows, "rows")
        assert_same(torch.cat([half[2] for half in halves], 1), columns, "columns")
        other = run("quantize_tokens", x[128:].contiguous(), state(*formats, rank=(0, 2)), 1, 2, True)
        assert not torch.equal(other[0].float(), halves[1][0].float())

    def test_no_layout_at_all_gives_empty_tensors(self, run: Run) -> None:
        arguments = (random((130, 200)), state("fp8", "fp8", "fp8"), -1, -1, True)
        assert_tokens(run("quantize_tokens", *arguments), *arguments)

    @pytest.mark.parametrize("shape", [(0, 200), (0, 128)], ids=str)
    def test_no_tokens_give_empty_tensors(self, run: Run, shape: tuple[int, int]) -> None:
        rows, row_scales, columns, column_scales = run(
            "quantize_tokens", torch.empty(shape, dtype=torch.bfloat16), state("fp8", "fp8", "fp8"), 0, 2, False
        )
        channels = rounded_up(shape[1])
        assert [rows.shape, columns.shape] == [(0, channels), (channels, 0)]
        assert [row_scales.shape, column_scales.shape] == [(channels // TILE, 0), (0, channels)]

    @pytest.mark.parametrize(
        "view", [lambda x: x.t(), lambda x: x[3:133, ::2]], ids=["transposed", "every-second-channel"]
    )
    def test_inputs_may_have_any_strides(self, run: Run, view: Callable[[Tensor], Tensor]) -> None:
        x, numbers = view(random((270, 400))), state("fp4", "fp4", "fp8")
        assert not x.is_contiguous()
        assert_tokens(run("quantize_tokens", x, numbers, 0, 2, True), x, numbers, 0, 2, True)

    @pytest.mark.gpu
    @pytest.mark.skipif(hopper_lacks(torch.device("cuda")) is not None, reason="needs a Hopper GPU")
    @each_two
    @each_large_shape
    @pytest.mark.parametrize("data", ["random", "outliers", "ties"])
    @pytest.mark.parametrize("is_gradient", [False, True], ids=["x", "gradient"])
    def test_large_tensors_are_those_of_the_reference(
        self, formats: tuple[str, str], shape: tuple[int, int], data: str, is_gradient: bool
    ) -> None:
        for rank in ((0, 1), (5, 8)):
            x, numbers = DATA[data](shape), state("bf16", *formats, rank=rank)
            assert_tokens(on_cuda("quantize_tokens", x, numbers, 1, 2, is_gradient), x, numbers, 1, 2, is_gradient)


class TestWeight:
    @each_two
    @each_shape
    def test_both_layouts_are_those_of_the_reference(
        self, run: Run, formats: tuple[str, str], shape: tuple[int, int]
    ) -> None:
        """FP32 weights are rounded to BF16 first, to nearest: 1.0017 times BF16 numbers are, up and down, ties too."""
        weight, numbers = random(shape).float(), state(*formats, "bf16")
        weight *= torch.tensor([1.0017, 1 + 2.0**-8, 1.0]).repeat(shape[1])[: shape[1]]
        assert_weight(run("quantize_weight", weight, numbers, True, True), weight, numbers, True, True)

    @each_two
    @each_data
    def test_every_kind_of_number_is_treated_as_by_the_reference(
        self, run: Run, formats: tuple[str, str], data: str
    ) -> None:
        weight, numbers = DATA[data]((130, 100)), state(*formats, "bf16")
        assert_weight(run("quantize_weight", weight, numbers, True, True), weight, numbers, True, True)

    @each_two
    @pytest.mark.parametrize("uses", [(True, False), (False, True), (False, False)], ids=str)
    @pytest.mark.parametrize("shape", [(130, 100)], ids=str)
    def test_a_layout_is_the_same_without_the_other(
        self, run: Run, formats: tuple[str, str], uses: tuple[bool, bool], shape: tuple[int, int]
    ) -> None:
        weight, numbers = random(shape), state(*formats, "bf16")
        assert_weight(run("quantize_weight", weight, numbers, *uses), weight, numbers, *uses)

    def test_inputs_may_have_any_strides(self, run: Run) -> None:
        weight, numbers = random((270, 400)), state("fp4", "fp8", "bf16")
        for view in (weight.t(), weight[:, 70:270], weight[::2]):
            assert_weight(run("quantize_weight", view, numbers, True, True), view, numbers, True, True)

    @pytest.mark.gpu
    @pytest.mark.skipif(hopper_lacks(torch.device("cuda")) is not None, reason="needs a Hopper GPU")
    @each_two
    @each_large_shape
    @pytest.mark.parametrize("data", ["random", "outliers", "ties"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
    def test_large_weights_are_those_of_the_reference(
        self, formats: tuple[str, str], shape: tuple[int, int], data: str, dtype: torch.dtype
    ) -> None:
        weight, numbers = DATA[data](shape).to(dtype), state(*formats, "bf16")
        if dtype == torch.float32:
            weight = weight * 0.9985
        assert_weight(on_cuda("quantize_weight", weight, numbers, True, True), weight, numbers, True, True)

    @pytest.mark.gpu
    @pytest.mark.skipif(hopper_lacks(torch.device("cuda")) is not None, reason="needs a Hopper GPU")
    @pytest.mark.parametrize("uses", [(True, True), (True, False), (False, True)], ids=str)
    def test_into_given_tensors_is_the_same_with_new_weights_and_formats(self, uses: tuple[bool, bool]) -> None:
        numbers, other = state("fp8", "fp4", "bf16"), state("fp4", "fp8", "bf16")
        outputs = operators.quantize_weight(random((130, 200)).cuda(), numbers.cuda(), *uses)
        weight, places = outliers((130, 200)), [output.data_ptr() for output in outputs]
        operators.quantize_weight_into(weight.cuda(), other.cuda(), outputs)
        assert [output.data_ptr() for output in outputs] == places
        assert_weight(tuple(output.cpu() for output in outputs), weight, other, *uses)


def description(outputs: Any) -> list[tuple[Any, ...]]:
    found = outputs if isinstance(outputs, tuple) else (outputs,)
    return [(x.shape, x.stride(), x.dtype, x.device.type) for x in found]


def fake_description(operator: Callable[..., Any], *arguments: Any) -> list[tuple[Any, ...]]:
    with torch._subclasses.FakeTensorMode() as mode:
        return description(operator(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments)))


def assert_same_description(operator: Callable[..., Any], *arguments: Any) -> None:
    """A fake call tells shapes, strides, dtypes and devices of the real one."""
    assert fake_description(operator, *arguments) == description(operator(*arguments))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
def test_weights_are_transposed_as_bytes_not_as_fp8() -> None:
    """Triton writes garbage for a transposed tile of FP8 beside a maximum that keeps NaN (triton-lang/triton#11111)."""
    from snip_hf.kernels.hopper.tiles import weight_kernel

    constants = {"FORWARD": True, "GRAD_INPUT": True, "RAGGED": False}
    kinds = {"weight": "*bf16", "state": "*i64", "by_output": "*fp8e4nv", "by_input": "*fp8e4nv"}
    kinds |= dict.fromkeys(("output_scales", "input_scales"), "*fp32")
    code = triton_ir(weight_kernel, kinds, constants, num_warps=8)
    transposed = [line for line in code.splitlines() if "tt.trans" in line]
    assert len(transposed) == 1 and "xi8>" in transposed[0]


@pytest.mark.parametrize("shape", [(150, 200), (128, 384), (0, 200)], ids=str)
def test_fake_results_have_the_shapes_strides_and_dtypes_of_interpreted_ones(
    interpreter: Run, shape: tuple[int, int]
) -> None:
    """torch.compile asks for shapes in this way, without running a kernel."""
    x, numbers = torch.zeros(shape, dtype=torch.bfloat16), state("fp8", "fp4", "fp8")
    for layouts in ((0, 2), (1, -1), (-1, 2), (-1, -1)):
        arguments = (x, numbers, *layouts, False)
        assert fake_description(operators.quantize_tokens, *arguments) == description(
            interpreter("quantize_tokens", *arguments)
        )
    for uses in itertools.product([True, False], repeat=2):
        assert fake_description(operators.quantize_weight, x, numbers, *uses) == description(
            interpreter("quantize_weight", x, numbers, *uses)
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_fake_product_is_without_the_padding(dtype: torch.dtype) -> None:
    left, right = (torch.zeros(size, 256, dtype=torch.float8_e4m3fn) for size in (256, 384))
    arguments = (left, torch.zeros(2, 256), right, torch.zeros(3, 4), True, 150, 300, dtype)
    assert fake_description(operators.multiply, *arguments) == [((150, 300), (300, 1), dtype, "cpu")]


# ------------------------------------------------------------------------------------- products, on a GPU


# Hopper's FP8 tensor cores align the products of a step and keep about 14 bits of their sum (arXiv:2412.19437, section
# 3.5.2); cuBLASLt adds those of 128 elements in FP32. So beside BF16's rounding each sum may be off by this, relative
# to the sum of the absolute products (measured: up to 2**-12). Products of FP4 values have so few bits that none are
# lost (measured: up to 2e-8).
TENSOR_CORE = {"fp8": 2.0**-11, "fp4": 2.0**-22}


def assert_product(
    got: Tensor, left: Tensor, right: Tensor, dtype: torch.dtype = torch.bfloat16, fmt: str = "fp8"
) -> None:
    """`got` is left @ right in float64, up to its own rounding and the tensor cores' sums."""
    exact = product(left.numpy(), right.numpy())
    numbers = got.cpu().to(torch.float64).numpy()
    assert got.dtype == dtype and numbers.shape == exact.value.shape
    unit, limit = (2.0**-8, 2.5e-3) if dtype == torch.bfloat16 else (2.0**-24, 5e-4)
    assert (np.abs(numbers - exact.value) <= unit * np.abs(exact.value) + TENSOR_CORE[fmt] * exact.absolute).all()
    assert np.linalg.norm(numbers - exact.value) < limit * np.linalg.norm(exact.value)


class GemmCase:
    """Tensors of one layer on the GPU, (T, I, O), and their references on the CPU."""

    def __init__(self, size: tuple[int, int, int], formats: tuple[str, str, str]) -> None:
        t, i, o = size
        generator = torch.Generator().manual_seed(t)
        x, weight, grad_output = (torch.randn(shape, generator=generator) for shape in ((t, i), (o, i), (t, o)))
        x[:, ::7] *= 20
        self.x, self.weight, self.grad_output = (v.to(torch.bfloat16) for v in (x, weight / 8, grad_output))
        self.state = state(*formats)

    def on_gpu(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.x.cuda(), self.weight.cuda(), self.grad_output.cuda(), self.state.cuda()

    @functools.cached_property
    def products(self) -> dict[str, tuple[Tensor, Tensor]]:
        numbers = self.state
        return {
            "forward": (
                reference(self.x, numbers, 0, ROW_TILE).dequantize(),
                reference(self.weight, numbers, 0, SQUARE_TILE).dequantize().t(),
            ),
            "grad_input": (
                reference(self.grad_output, numbers, 1, ROW_TILE, True).dequantize(),
                reference(self.weight, numbers, 1, SQUARE_TILE).dequantize(),
            ),
            "grad_weight": (
                reference(self.grad_output, numbers, 2, COLUMN_TILE, True).dequantize().t(),
                reference(self.x, numbers, 2, COLUMN_TILE).dequantize(),
            ),
        }


SIZES = [(128, 128, 128), (1, 200, 136), (150, 200, 136), (1000, 384, 1280), (2048, 1024, 640)]


@pytest.mark.gpu
@pytest.mark.skipif(hopper_lacks(torch.device("cuda")) is not None, reason="needs a Hopper GPU")
class TestOnHopper:
    @pytest.mark.parametrize("formats", list(itertools.product(["fp8", "fp4"], repeat=3)), ids="/".join)
    @pytest.mark.parametrize("size", SIZES, ids=str)
    def test_each_gemm_is_the_product_of_the_reference_s_operands(
        self, size: tuple[int, int, int], formats: tuple[str, str, str]
    ) -> None:
        case = GemmCase(size, formats)
        for gemm, fmt in zip(GEMMS, formats, strict=True):
            got = gemm_call("hopper", gemm, *case.on_gpu())()
            assert got.is_contiguous()
            assert_product(got, *case.products[gemm], fmt=fmt)

    @pytest.mark.parametrize("formats", [("fp8", "fp8", "fp8"), ("fp4", "fp4", "fp4")], ids="/".join)
    def test_each_gemm_is_close_to_the_emulated_one(self, formats: tuple[str, str, str]) -> None:
        """The same random numbers: with others FP4 gradients are 10% and more away."""
        x, weight, grad_output, numbers = GemmCase((1000, 384, 1280), formats).on_gpu()
        for gemm in GEMMS:
            ours, emulated = (
                gemm_call(backend, gemm, x, weight, grad_output, numbers)().double()
                for backend in ("hopper", "emulated")
            )
            assert (ours - emulated).norm() < 2e-3 * emulated.norm()

    @pytest.mark.parametrize("formats", [("fp8", "fp8", "fp8"), ("fp4", "fp4", "fp4")], ids="/".join)
    @pytest.mark.parametrize("size", SIZES, ids=str)
    def test_a_product_in_fp32_is_not_rounded_to_bf16(
        self, size: tuple[int, int, int], formats: tuple[str, str, str]
    ) -> None:
        case = GemmCase(size, formats)
        x, _, grad_output, numbers = case.on_gpu()
        _, _, left, left_scales = operators.quantize_tokens(grad_output, numbers, -1, 2, True)
        _, _, right, right_scales = operators.quantize_tokens(x, numbers, -1, 2, False)
        got = operators.multiply(left, left_scales, right, right_scales, False, size[2], size[1], torch.float32)
        assert got.is_contiguous()
        assert_product(got, *case.products["grad_weight"], dtype=torch.float32)

    def test_memory_beyond_the_scales_of_a_weight_does_not_matter(self) -> None:
        """cuBLASLt wants a multiple of four scales per row of blocks; those that have no block are never written."""
        case = GemmCase((150, 200, 136), ("fp8", "fp8", "fp8"))
        x, weight, _, numbers = case.on_gpu()
        rows, row_scales, _, _ = operators.quantize_tokens(x, numbers, 0, -1, False)
        values, scales, _, _ = operators.quantize_weight(weight, numbers, True, False)
        for beyond in (0.0, torch.nan, torch.inf):
            scales[:, 2:] = beyond
            got = operators.multiply(rows, row_scales, values, scales, True, 150, 136)
            assert_product(got, *case.products["forward"])

    def test_a_nan_reaches_every_product_that_its_tiles_enter_and_no_other(self) -> None:
        case = GemmCase((150, 200, 136), ("fp8", "fp4", "fp8"))
        x, weight, grad_output, numbers = case.on_gpu()
        x[140, 5] = torch.nan
        y = gemm_call("hopper", "forward", x, weight, grad_output, numbers)()
        assert y[140].isnan().all() and y.isnan().sum() == 136
        columns = gemm_call("hopper", "grad_weight", x, weight, grad_output, numbers)().isnan()
        assert columns[:, 5].all() and columns.sum() == 136
        grad_output[7, 0] = torch.inf
        rows = ~gemm_call("hopper", "grad_input", x, weight, grad_output, numbers)().isfinite()
        assert rows[7].all() and rows.sum() == 200

    @pytest.mark.parametrize(("rows", "columns"), [(0, 136), (0, 0)])
    def test_no_rows_give_an_empty_product(self, rows: int, columns: int) -> None:
        left = torch.empty(0, 128, dtype=torch.float8_e4m3fn, device="cuda")
        right = torch.empty(256, 128, dtype=torch.float8_e4m3fn, device="cuda")
        scales = torch.ones(2, 4, device="cuda")
        got = operators.multiply(left, torch.empty(1, 0, device="cuda"), right, scales, True, rows, columns)
        assert got.shape == (rows, columns) and got.dtype == torch.bfloat16

    def test_a_sum_over_no_tokens_is_zero(self) -> None:
        numbers = state("fp8", "fp8", "fp8").cuda()
        empty = [torch.empty(0, size, dtype=torch.bfloat16, device="cuda") for size in (136, 200)]
        (_, _, left, left_scales), (_, _, right, right_scales) = (
            operators.quantize_tokens(x, numbers, -1, 2, False) for x in empty
        )
        got = operators.multiply(left, left_scales, right, right_scales, False, 136, 200)
        assert got.shape == (136, 200) and (got == 0).all()

    @pytest.mark.parametrize("size", [(150, 200, 136), (256, 128, 384), (0, 200, 136)], ids=str)
    def test_fake_results_have_the_real_ones_shape_strides_and_dtype(self, size: tuple[int, int, int]) -> None:
        x, weight, _, numbers = GemmCase(size, ("fp8", "fp4", "fp8")).on_gpu()
        for layouts in ((0, 2), (0, -1), (-1, 2), (-1, -1)):
            assert_same_description(operators.quantize_tokens, x, numbers, *layouts, False)
            assert_same_description(operators.quantize_tokens, x, numbers, *layouts, True)
        for uses in itertools.product([True, False], repeat=2):
            assert_same_description(operators.quantize_weight, weight, numbers, *uses)
        rows, row_scales, _, _ = operators.quantize_tokens(x, numbers, 0, -1, False)
        values, scales, _, _ = operators.quantize_weight(weight, numbers, True, False)
        for dtype in (torch.bfloat16, torch.float32):
            assert_same_description(operators.multiply, rows, row_scales, values, scales, True, size[0], size[2], dtype)

    def test_operators_pass_torch_s_own_checks(self) -> None:
        x, weight, grad_output, numbers = GemmCase((150, 200, 136), ("fp8", "fp4", "fp8")).on_gpu()
        registered = torch.ops.snip_hf
        # Not its check of the schema, which torch cannot do with FP8 tensors.
        checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(registered.quantize_tokens.default, (x, numbers, 0, 2, False), test_utils=checks)
        torch.library.opcheck(
            registered.quantize_tokens.default, (grad_output, numbers, 1, -1, True), test_utils=checks
        )
        # Four scales a row: where there are fewer, the rest of what the GEMM wants aligned is never written nor read.
        _, aligned, _, _ = GemmCase((128, 512, 512), ("fp8", "fp4", "fp8")).on_gpu()
        torch.library.opcheck(registered.quantize_weight.default, (aligned, numbers, True, True), test_utils=checks)
        rows, row_scales, _, _ = operators.quantize_tokens(x, numbers, 0, -1, False)
        values, scales, _, _ = operators.quantize_weight(weight, numbers, True, False)
        for dtype in (torch.bfloat16, torch.float32):
            arguments = (rows, row_scales, values, scales, True, 150, 136, dtype)
            torch.library.opcheck(registered.multiply.default, arguments, test_utils=checks)

    def test_a_new_state_is_new_data_for_the_same_kernels(self) -> None:
        """In a CUDA graph that was captured once: formats, keys and ranks are read when it is replayed."""
        x, numbers = random((256, 384)), state("fp8", "fp8", "fp8")
        x_gpu, state_gpu = x.cuda(), numbers.cuda()
        operators.quantize_tokens(x_gpu, state_gpu, 1, 2, True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = operators.quantize_tokens(x_gpu, state_gpu, 1, 2, True)
        for formats, key, rank in itertools.product(EACH_TWO, KEYS, RANKS):
            numbers = state("bf16", *formats, key=key, rank=rank)
            state_gpu.copy_(numbers)
            graph.replay()
            assert_tokens(tuple(output.cpu() for output in outputs), x, numbers, 1, 2, True)

    def test_is_what_auto_chooses_here(self) -> None:
        assert [select_backend(requested, "cuda") for requested in ("auto", "hopper", "emulated")] == [
            "hopper",
            "hopper",
            "emulated",
        ]

    def test_bf16_gemms_are_those_of_aten(self) -> None:
        x, weight, grad_output, numbers = GemmCase((150, 200, 136), ("bf16", "bf16", "bf16")).on_gpu()
        calls = {gemm: gemm_call("hopper", gemm, x, weight, grad_output, numbers)() for gemm in GEMMS}
        assert torch.equal(calls["forward"], torch.nn.functional.linear(x, weight))
        assert torch.equal(calls["grad_input"], grad_input_gemm(grad_output, weight, numbers))
        assert torch.equal(calls["grad_weight"], grad_weight_gemm(grad_output, x, numbers))
