"""The fused kernels on a GPU, and anywhere under Triton's interpreter: rounding against `numerics.rounding`, bit for
bit; sums against float64."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from kernel_runs import HOMES, Run, assert_same_bits, on_cuda
from rounded import COLUMN_TILE, fake_quantize_tiles, of_tiles
from torch import Tensor

from snip_hf.estimation.extrapolation import BatchSizes
from snip_hf.estimation.layer_sums import LayerSums
from snip_hf.estimation.samples import LayerSample
from snip_hf.kernels import emulated, rounding, sums
from snip_hf.numerics import rounding as reference
from snip_hf.numerics.formats import E2M1, E4M3, E5M2, FORMATS, UNQUANTIZED, ElementGrid, Operand, floats
from snip_hf.numerics.formats import REFERENCE as FP8
from snip_hf.numerics.gemms import ROW_TILE, SQUARE_TILE, TILE
from snip_hf.numerics.random_streams import stream_key

GRIDS = [E2M1, E4M3, E5M2]
TILES = [ROW_TILE, COLUMN_TILE, SQUARE_TILE]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Two 64-bit keys, of which one is negative as an int64, and one of few bits.
KEYS = [stream_key(2**40 + 7, 3, 4, 123456789, 1), stream_key(1, 2, 3, 4, 1), 3]
# On a GPU: whole tiles of an odd number of blocks, long columns, long rows, ragged in both.
LARGE = [(2048, 4096), (8192, 640), (129, 11008), (3001, 1357)]


# ------------------------------------------------------------------------------------- what it is given


def random(shape: tuple[int, int]) -> Tensor:
    """Over many magnitudes, with zeros of both signs, a zero row and a zero column."""
    generator = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
    x = torch.randn(shape, generator=generator) * torch.exp(2 * torch.randn(shape, generator=generator))
    x[:, 5:6] *= 1e-7  # so small beside the others that it becomes zero, of either sign
    x[1:2], x[:, 3:4] = 0.0, -0.0
    return x


def not_finite(shape: tuple[int, int]) -> Tensor:
    x = random(shape)
    x[-1, 0], x[-1, -1], x[shape[0] // 3, -2:-1] = torch.nan, torch.inf, -torch.inf
    return x


def tiny(shape: tuple[int, int]) -> Tensor:
    """Around and below the smallest normal FP32 number, so that scales are raised to it."""
    sizes = torch.tensor([1e-4, 0.01, 1.0, 20.0, 1000.0, 1e5])
    return random(shape).clamp(-4, 4) * 2.0**-126 * sizes.repeat(shape[1])[: shape[1]]


def large(shape: tuple[int, int]) -> Tensor:
    return random(shape).clamp(-1, 1) * 3.4e38


def ties(shape: tuple[int, int]) -> Tensor:
    """On the grids of FP4 and FP8 and halfway between their numbers, with scale 1."""
    x = torch.randint(-96, 97, shape, generator=torch.Generator().manual_seed(3)) / 16
    x[:, ::TILE], x[::TILE] = 6.0, -6.0
    return x


DATA = [(data, torch.float32) for data in (random, not_finite, tiny, large, ties)]
DATA += [(data, dtype) for data in (random, tiny) for dtype in (torch.bfloat16, torch.float16)]


# ------------------------------------------------------------------------------------- the numbers


@pytest.mark.parametrize(
    ("fmt", "tile", "data", "dtype"),
    [
        # Every other case of the first two grids, which still has all pairs of grid, tile and data.
        (fmt, tile, *data)
        for i, fmt in enumerate(GRIDS)
        for j, tile in enumerate(TILES)
        for k, data in enumerate(DATA)
        if fmt is not E5M2 and (i + j + k) % 2 == 0
    ],
)
def test_the_kernel_rounds_as_the_reference_does(
    fmt: ElementGrid, tile: tuple[int, int], data: Any, dtype: torch.dtype, run: Run
) -> None:
    x = data((130, 200)).to(dtype)
    for key in (None, KEYS[0]):
        expected = fake_quantize_tiles(x, fmt, tile, key)
        assert expected.isnan().any() == (not x.isfinite().all())
        assert_same_bits(run("fake_quantize", x, *of_tiles(fmt, tile), key), expected)


@pytest.mark.parametrize(
    ("shape", "key"), [((1, 1), KEYS[0]), ((5, 129), KEYS[1]), ((128, 128), KEYS[2]), ((257, 40), KEYS[0])]
)
@pytest.mark.parametrize("tile", TILES)
def test_it_does_for_every_shape_and_key(tile: tuple[int, int], shape: tuple[int, int], key: int, run: Run) -> None:
    x = random(shape)
    nearest, by_key = (fake_quantize_tiles(x, E2M1, tile, k) for k in (None, key))
    assert torch.equal(nearest, by_key) == (shape == (1, 1))
    assert_same_bits(run("fake_quantize", x, *of_tiles(E2M1, tile)), nearest)
    assert_same_bits(run("fake_quantize", x, *of_tiles(E2M1, tile), key), by_key)


@pytest.mark.parametrize(("rank", "ranks"), [(1, 2), (6, 7)])
@pytest.mark.parametrize("shape", [(5, 129), (257, 40)])
@pytest.mark.parametrize("tile", TILES)
def test_it_does_on_every_rank(tile: tuple[int, int], shape: tuple[int, int], rank: int, ranks: int, run: Run) -> None:
    x = random(shape) + 0.01
    for key in KEYS:
        alone, expected = (fake_quantize_tiles(x, E2M1, tile, key, *place) for place in ((0, 1), (rank, ranks)))
        assert not torch.equal(alone, expected)
        assert_same_bits(run("fake_quantize", x, *of_tiles(E2M1, tile), key, rank, ranks), expected)


@pytest.mark.parametrize("tile", TILES)
def test_two_ranks_round_together_as_one_process_does(tile: tuple[int, int], run: Run) -> None:
    x = random((256, 200))
    halves = [
        run("fake_quantize", half, *of_tiles(E2M1, tile), KEYS[0], rank, 2) for rank, half in enumerate(x.chunk(2))
    ]
    assert_same_bits(torch.cat(halves), run("fake_quantize", x, *of_tiles(E2M1, tile), KEYS[0]))


@pytest.mark.parametrize(
    ("view", "tile"),
    [
        *[(lambda x: x.t(), tile) for tile in TILES],
        (lambda x: x[3:, 7:], ROW_TILE),
        (lambda x: x[::2, ::3], COLUMN_TILE),
        (lambda x: x[:1].expand(130, -1), SQUARE_TILE),
    ],
    ids=[*["transposed"] * 3, "offset", "every other", "expanded"],
)
def test_it_does_for_every_stride(view: Callable[[Tensor], Tensor], tile: tuple[int, int], run: Run) -> None:
    x = view(random((260, 390)))
    for key in (None, KEYS[0]):
        assert_same_bits(run("fake_quantize", x, *of_tiles(E4M3, tile), key), fake_quantize_tiles(x, E4M3, tile, key))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("shape", LARGE)
def test_it_does_for_large_tensors(shape: tuple[int, int], tile: tuple[int, int], dtype: torch.dtype) -> None:
    x = random(shape).to(dtype)
    for fmt in GRIDS:
        for key in (None, KEYS[1]):
            assert_same_bits(
                on_cuda("fake_quantize", x, *of_tiles(fmt, tile), key), fake_quantize_tiles(x, fmt, tile, key)
            )
    place = KEYS[1], 5, 8
    found = on_cuda("fake_quantize", x, *of_tiles(E2M1, tile), *place)
    assert_same_bits(found, fake_quantize_tiles(x, E2M1, tile, *place))


@pytest.mark.gpu
def test_it_runs_where_the_tensor_is() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = random((130, 200))
    found = rounding.fake_quantize(x.to("cuda:1"), *of_tiles(E4M3, ROW_TILE))
    assert found.device == torch.device("cuda", 1)
    assert_same_bits(found.cpu(), fake_quantize_tiles(x, E4M3, ROW_TILE))


# ------------------------------------------------------------------------------------- the sums


def of_torch(name: str, *arguments: Any) -> Tensor:
    """Runs torch's operations without kernels, on copies of the arguments."""
    return getattr(HOMES[name][0], name)(*(argument.clone() for argument in arguments))


@pytest.fixture(params=["torch", "interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def run_any(request: pytest.FixtureRequest) -> Run:
    runs = {"torch": lambda: of_torch, "cuda": lambda: on_cuda}
    return runs.get(request.param, lambda: request.getfixturevalue("interpreter"))()


def squares(parts: Tensor) -> list[Tensor]:
    """Returns the sum of the pieces' squares and the square of their sum, in float64."""
    return [sum(part.double() ** 2 for part in parts), sum(part.double() for part in parts) ** 2]


@pytest.mark.parametrize(("pieces", "height", "width", "kinds"), [(1, 1, 1, 1), (8, 33, 64, 2), (3, 47, 51, 2)])
def test_the_error_of_a_weight_meets_the_squares_of_two_gemms_and_of_both(
    pieces: int, height: int, width: int, kinds: int, run_any: Run
) -> None:
    first, second = (random((pieces * height, width)).view(pieces, height, width) for _ in range(2))
    second = second.flip(1) + 1
    # One part of the outputs: rows of a larger tensor.
    errors = random((kinds * 2 * height, width)).square_().view(kinds, 2 * height, width)[:, height:]
    expected = torch.tensor(
        [
            [
                [(square * error.double()).sum() for square in squares(parts)]
                for parts in (first, second, first + second)
            ]
            for error in errors
        ]
    )
    found = run_any("error_squares", first, second, errors)
    assert found.shape == (kinds, 3, 2)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("pieces", "height", "width"), [(1, 1, 1), (8, 33, 64), (3, 47, 51)])
def test_changes_are_scaled_before_they_are_squared(pieces: int, height: int, width: int, run_any: Run) -> None:
    """Also where their squares, or those of the factors, are no FP32 numbers."""
    parts, factors = random((pieces * height, width)).view(pieces, height, width), random((height, width)) + 2
    expected = torch.stack([square.sum() for square in squares(parts.double() * factors.double())])
    found = run_any("scaled_squares", parts * 1e-25, factors * 1e25)
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["error_squares", "scaled_squares"])
def test_sums_of_products_in_bf16_are_those_of_their_numbers(name: str, run: Run) -> None:
    parts = [random((24, 64)).view(3, 8, 64).bfloat16() for _ in range(2)][: 2 if name == "error_squares" else 1]
    factors = random((8, 64)).square_()
    factors = factors[None] if name == "error_squares" else factors
    found = run(name, *parts, factors)
    expected = getattr(sums, name)(*(one.float() for one in parts), factors)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("shapes", [(7, 1500, 33), (1, 1, 1)], ids=str)
def test_tokens_have_the_energies_and_amaxes_of_their_rows(shapes: tuple[int, int, int], run: Run) -> None:
    tokens, inputs, outputs = shapes
    x, grad_output = random((tokens, 2 * inputs))[:, :inputs], random((outputs, tokens)).t()
    is_kept = torch.arange(tokens) % 3 == 0
    found = run("token_figures", run("row_figures", x), grad_output, is_kept)
    energies = x.double().square().sum(1) * grad_output.double().square().sum(1)
    expected = torch.stack([energies, energies * is_kept, x.abs().amax(1), grad_output.abs().amax(1)], 1)
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-5, atol=0)


def test_numbers_that_are_not_finite_show_in_the_figures_of_their_token(run: Run) -> None:
    x = torch.ones(3, 40)
    x[0, 3], x[1, 39] = torch.nan, torch.inf
    of_x, is_kept = run("row_figures", x), torch.ones(3, dtype=torch.bool)
    energies, _, largest, _ = run("token_figures", of_x, torch.ones(3, 2), is_kept).unbind(1)
    assert energies.isfinite().tolist() == largest.isfinite().tolist() == [False, False, True]


def test_norms_are_right_to_fp32_of_many_numbers_too() -> None:
    x = torch.randn(3_000_000, generator=torch.Generator().manual_seed(0))
    found = sums.norms([x, x[:100].view(10, 10)])
    for got, given in zip(found, (x, x[:100]), strict=True):
        assert got.item() == pytest.approx(given.double().norm().item(), rel=1e-6)


# ------------------------------------------------------------------------------------- the choice


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of what a kernel was asked for, as if every device had it."""
    calls = []

    def by_kernel(x: Tensor, *arguments: Any) -> Tensor:
        calls.append(tuple(x.shape))
        return reference.round_operand(x, *arguments)

    for module in (rounding, sums):
        monkeypatch.setattr(module, "has_kernels", lambda device: True)
    monkeypatch.setattr(rounding, "round_by_kernel", by_kernel)
    return calls


def test_inputs_that_the_kernel_does_not_support_go_to_the_reference(kernel_calls: list[tuple[int, ...]]) -> None:
    x = random((40, 50))
    fine = dataclasses.replace(FP8, name="fine", grid=floats(8, 7, infinities=True), bits=16)
    three = dataclasses.replace(FP8, name="three", activation=Operand(ROW_TILE, targets=(448.0, 384.0, 320.0)))
    cases = [(x.double(), FP8, "activation"), (x[:0], FP8, "activation"), (x, FORMATS["fp4-pqt"], "weight")]
    for given, fmt, operand in (*cases, (x, fine, "weight"), (x, three, "activation")):
        expected = reference.round_operand(given, fmt, operand, 1, KEYS[0])
        assert_same_bits(rounding.fake_quantize(given, fmt, operand, 1, KEYS[0]), expected)
    for fmt in (UNQUANTIZED, FORMATS["fp4-pqt"]):
        assert_same_bits(rounding.fake_quantize(x, fmt, "activation", 1), x)
    with pytest.raises(ValueError, match="expects a 2-D floating-point tensor"):
        rounding.fake_quantize(x[None], FP8, "activation", 1)
    assert kernel_calls == []
    rounding.fake_quantize(x, FP8, "activation", 1)
    assert kernel_calls == [(40, 50)]


def test_a_cpu_has_no_kernel() -> None:
    assert not rounding.has_kernels(torch.device("cpu"))


@pytest.mark.parametrize("capability", [(7, 5), (8, 0)])
def test_if_triton_fails_the_reference_rounds_and_a_warning_gives_the_reason(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    def ones(*shape: int, device: torch.device) -> Tensor:
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(torch, "ones", ones)
    assert not rounding.has_kernels.__wrapped__(torch.device("cuda", 0))
    assert ("Failed to find C compiler." in caplog.text) == (capability >= (8, 0))


def test_emulated_gemms_round_by_the_kernel(kernel_calls: list[tuple[int, ...]]) -> None:
    x, weight, grad_output = random((20, 16)), random((24, 16)), random((20, 24))
    state = torch.tensor([2, 1, 2, 12345, 0, 1])
    emulated.forward_gemm(x, weight, None, state)
    emulated.grad_input_gemm(grad_output, weight, state)
    emulated.grad_weight_gemm(grad_output, x, state)
    assert kernel_calls == [(20, 16), (24, 16), (20, 24), (24, 16), (20, 24), (20, 16)]


def test_the_sums_of_a_refresh_are_those_of_the_kernels(
    kernel_calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, grad_output = random((20, 16)), random((24, 16)), random((20, 24))
    pytest.importorskip("triton")

    def launch(kernel: Any, grid: Any, tensors: Sequence[Tensor], *arguments: Any, **options: Any) -> None:
        tensors[-1].fill_(2.0 if kernel is sums._error_squares_kernel else 5.0)

    monkeypatch.setattr(sums, "launch", launch)
    terms = LayerSums(
        LayerSample(20, x, grad_output, [x], [grad_output]),
        [weight],
        [weight],
        1,
        BatchSizes(20, 20, 20, 20),
        formats=("fp8", "fp4"),
    )
    squares = terms.weight_divergences("fp8", (1, 2))
    # W in both formats, X and G along their channels, and along the tokens.
    assert kernel_calls == [(24, 16), (24, 16), (20, 16), (20, 24), (20, 24), (20, 16)]
    assert squares.sums[:6].tolist() == [2.0] * 6 and squares.sums[-2:].tolist() == [5.0] * 2


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
def test_the_kernel_assembles() -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from snip_hf.kernels import rounding_tiles

    call = rounding._call(FORMATS["nvfp4"], "gradient", 1)
    kinds = ["*bf16", "*fp32", "*fp32", "i64", "i64", *["i32"] * 4]
    kinds += ["fp32" if isinstance(number, float) else "i32" for number in call.numbers]
    values = (*call.tiles, True, *call.flags)
    names = rounding_tiles.rounding_kernel.arg_names
    signature = dict(zip(names, (*kinds, *["constexpr"] * len(values)), strict=True))
    constants = dict(zip(names[len(kinds) :], values, strict=True))
    source = ASTSource(fn=rounding_tiles.rounding_kernel, signature=signature, constexprs=constants)
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=call.options)
    assert len(code.asm["cubin"]) > 1000
