"""The emulated GEMMs of layers of several matrices: each matrix as the operators of one matrix run it, to the bit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from snip_hf.kernels.emulated import (
    _emulated_linear,
    bias_gradient,
    forward_gemm,
    grad_input_gemm,
    grad_weight_gemm,
    unquantized,
)
from snip_hf.numerics.formats import FORMATS
from snip_hf.numerics.random_streams import matrix_keys

KEY = 0x8123_4567_89AB_CDEF
# Case -> in_features, out_features, tokens of each matrix, tokens of none. In the first one blocks end where matrices
# and their tokens do not; in the second one they do, and all matrices are rounded together.
CASES: dict[str, tuple[int, int, tuple[int, ...], int]] = {
    "ragged": (200, 136, (70, 0, 3, 60, 0), 5),
    "aligned": (128, 256, (128, 0, 256), 0),
    "none behind": (128, 128, (130,), 70),
}
FEW = ("bf16", "fp4", "fp8", "nvfp4", "mxfp4-rht", "fp8-tensor", "fp8-delayed")


def state(fmt: str, key: int = KEY, device: torch.device | str = "cpu") -> Tensor:
    signed = key - 2**64 if key >= 2**63 else key
    return torch.tensor([*[FORMATS[fmt].code] * 3, signed, 1, 2], device=device)


def operands(case: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x (S, I), weight (E, O, I), bias (E, O), grad_output (S, O), ends (E,)."""
    in_features, out_features, tokens, behind = CASES[case]
    generator, rows, matrices = torch.Generator().manual_seed(0), sum(tokens) + behind, len(tokens)
    shapes = (rows, in_features), (matrices, out_features, in_features), (matrices, out_features), (rows, out_features)
    x, weight, bias, grad_output = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return x, weight, bias, grad_output, torch.tensor(tokens).cumsum(0)


def one_by_one(case: str, fmt: str, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, grad_input, grad_weight and bias gradient, by the operators of one matrix."""
    x, weight, bias, grad_output, ends = tensors
    y, grad_input = torch.zeros_like(grad_output), torch.zeros_like(x)
    grad_weight, grad_bias = torch.zeros_like(weight), torch.zeros_like(bias)
    starts = [0, *ends.tolist()[:-1]]
    for matrix, (key, start, end) in enumerate(zip(matrix_keys(KEY, len(ends)), starts, ends.tolist(), strict=True)):
        own, rows = state(fmt, key, x.device), slice(start, end)
        if start < end:
            y[rows] = forward_gemm(x[rows], weight[matrix], bias[matrix], own)
            grad_input[rows] = grad_input_gemm(grad_output[rows], weight[matrix], own)
            grad_weight[matrix] = grad_weight_gemm(grad_output[rows], x[rows], own)
            grad_bias[matrix] = grad_output[rows].sum(0)
    return y, grad_input, grad_weight, grad_bias


def grouped(fmt: str, tensors: Sequence[Tensor], transposed: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, weight, bias, grad_output, ends = tensors
    numbers = state(fmt, device=x.device)
    return (
        forward_gemm(x, weight, bias, numbers, ends),
        grad_input_gemm(grad_output, weight, numbers, ends),
        grad_weight_gemm(grad_output, x, numbers, ends, transposed),
        bias_gradient(grad_output, ends),
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("fmt", FEW)
def test_each_matrix_gets_the_bits_that_it_gets_alone(fmt: str, case: str) -> None:
    tensors = operands(case)
    for got, expected in zip(grouped(fmt, tensors), one_by_one(case, fmt, tensors), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fmt", FEW)
def test_on_a_gpu_each_matrix_gets_what_it_gets_alone(fmt: str, dtype: torch.dtype) -> None:
    """Widths and token counts that leave rows aligned, so that cuBLAS may choose the same kernels."""
    tensors = [tensor.cuda() for tensor in operands("aligned", dtype)]
    for got, expected in zip(grouped(fmt, tensors), one_by_one("aligned", fmt, tensors), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("fmt", ["bf16", "fp4", "mxfp8"])
def test_so_it_does_in_bfloat16(fmt: str) -> None:
    tensors = operands("ragged", torch.bfloat16)
    for got, expected in zip(grouped(fmt, tensors), one_by_one("ragged", fmt, tensors), strict=True):
        assert got.dtype == torch.bfloat16 and torch.equal(got, expected)


@pytest.mark.parametrize("fmt", ["bf16", "fp4", "fp8"])
@pytest.mark.parametrize("case", ["ragged", "aligned"])
def test_a_transposed_weight_gives_the_bits_of_its_transpose_and_a_gradient_laid_out_as_it_is(
    case: str, fmt: str
) -> None:
    x, weight, *others = operands(case)
    stored = weight.transpose(1, 2).contiguous()
    view = stored.transpose(1, 2)
    found = grouped(fmt, (x, view, *others), transposed=True)
    assert found[2].stride() == view.stride()
    # Products in high precision take the view as it is, in the order of sums of its layout.
    expected = one_by_one(case, fmt, (x, view, *others))
    assert all(torch.equal(got, want) for got, want in zip(found, expected, strict=True))


def test_matrices_draw_random_numbers_of_their_own() -> None:
    _, weight, _, grad_output, _ = operands("aligned")
    same, grad = weight[:1].expand(2, -1, -1), grad_output[:64].repeat(2, 1)
    twice = grad_input_gemm(grad, same, state("fp4"), torch.tensor([64, 128]))
    assert not torch.equal(twice[:64], twice[64:])
    assert len({*matrix_keys(KEY, 100), *matrix_keys(KEY + 1, 100), KEY}) == 201


def test_gradients_in_high_precision_are_autograd_s() -> None:
    """Against numerical differences in FP64, through the function that layers call."""
    generator, ends, high = torch.Generator().manual_seed(0), torch.tensor([2, 2, 5]), state("bf16")
    for transposed in (False, True):
        shapes = (6, 3), (3, 3, 4) if transposed else (3, 4, 3), (3, 4)
        x, weight, bias = (
            torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes
        )

        def run(x: Tensor, weight: Tensor, bias: Tensor, is_view: bool = transposed) -> Tensor:
            matrices = weight.transpose(1, 2) if is_view else weight
            y: Tensor = _emulated_linear(x, matrices, bias, is_view, high, ends)
            return y

        assert gradcheck(run, (x, weight, bias))
        matrices = weight.transpose(1, 2) if transposed else weight
        assert torch.equal(run(x, weight, bias), unquantized(x, matrices, bias, ends))


def test_no_tokens_at_all_give_empty_results_and_zero_gradients() -> None:
    x, weight, bias, grad_output, ends = operands("ragged")
    none = torch.zeros_like(ends)
    y, grad_input, grad_weight, grad_bias = grouped("fp4", (x[:0], weight, bias, grad_output[:0], none))
    assert y.shape == (0, 136) and grad_input.shape == (0, 200)
    assert grad_weight.shape == weight.shape and not grad_weight.any() and not grad_bias.any()


@pytest.mark.parametrize("transposed", [False, True])
def test_shapes_and_strides_are_known_without_running(transposed: bool) -> None:
    x, weight, bias, grad_output, ends = operands("ragged")
    if transposed:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    for operator, arguments in (
        (forward_gemm, (x, weight, bias, state("fp4"), ends)),
        (grad_input_gemm, (grad_output, weight, state("fp4"), ends)),
        (grad_weight_gemm, (grad_output, x, state("fp4"), ends, transposed)),
        (bias_gradient, (grad_output, ends)),
    ):
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
