"""Are the errors that kernels find those of torch's operations? On a GPU, and anywhere under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_runs import assert_same_bits, either
from torch import Tensor

from snip_hf.kernels import errors
from snip_hf.kernels.errors import error_norms, joined_errors, rises_of_tokens, weight_errors

Run = Callable[..., Any]


def of_weight(launch: Run, weight: Tensor, *rounded: Tensor) -> tuple[Tensor, ...]:
    """Returns the written errors, the sums, and the first error."""
    found = weight.new_empty(1 if len(rounded) == 1 else 3, *weight.shape)
    return found, *launch(weight, rounded, found)


def by_kernel(name: str, *given: Any) -> Any:
    if name == "weight_errors":
        return of_weight(weight_errors, *given)
    if name == "error_products":
        found = errors.error_products(*given)
        return found.error, *found.sums, found.in_channel()
    return getattr(errors, name)(*given)


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def run(request: pytest.FixtureRequest) -> Run:
    return either(request, by_kernel)


def drawn(rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A tensor and two roundings of it."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return x, x.bfloat16().float(), (8 * x).round() / 8


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("shape", [(1, 1), (37, 61)])
def test_a_weight_s_squared_errors_are_torch_s_to_the_bit(shape: tuple[int, int], count: int, run: Run) -> None:
    weight, *rounded = drawn(*shape)
    given = weight.t(), *(one.t() for one in rounded[:count])  # as a Conv1D holds it
    found, sums, first = run("weight_errors", *given)
    expected, of_torch, _ = of_weight(weight_errors, *given)
    assert_same_bits(found, expected)
    torch.testing.assert_close(sums, of_torch)
    assert sums.shape == (count,) and torch.equal(first, (given[1] - given[0]).bfloat16())


@pytest.mark.parametrize("shape", [(1, 1), (37, 61)])
def test_norms_of_errors_are_torch_s(shape: tuple[int, int], run: Run) -> None:
    x, *rounded = drawn(*shape)
    expected = torch.stack([(one - x).double().norm() for one in rounded])
    torch.testing.assert_close(run("error_norms", x, rounded).double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(error_norms(x, rounded).double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("is_first", [True, False], ids=["errors first", "errors last"])
@pytest.mark.parametrize(("rows", "pieces"), [(2, 2), (60, 3), (40, 1)])
def test_errors_are_joined_with_what_they_belong_to_piece_by_piece(
    rows: int, pieces: int, is_first: bool, run: Run
) -> None:
    x, rounded, _ = drawn(rows, 45)
    found = run("joined_errors", x, rounded, pieces, is_first)
    expected = joined_errors(x, rounded, pieces, is_first)
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected)
    length = rows // pieces
    halves = (rounded - x, x) if is_first else (rounded, rounded - x)
    for half, of_half in zip(expected.split(length, 1), halves, strict=True):
        assert torch.equal(half.reshape(rows, 45), of_half.bfloat16())


@pytest.mark.parametrize(("rows", "columns", "pieces"), [(2, 1, 2), (210, 70, 3), (64, 130, 1)])
def test_errors_meet_what_they_are_multiplied_with_by_token_by_piece_and_by_channel(
    rows: int, columns: int, pieces: int, run: Run
) -> None:
    x, rounded, _ = drawn(rows, columns)
    factors = drawn(columns, rows, seed=1)[0].t()
    error, *figures, in_channel = run("error_products", x, rounded, factors, pieces)
    assert torch.equal(error, (rounded - x).bfloat16())
    products = (rounded - x).double() * factors
    channels = products.unflatten(0, (pieces, -1)).sum(1)
    expected = [products.norm(), products.sum(1), channels, channels.sum(0)]
    figures[0] = figures[0].norm()
    scale = float(products.abs().max())
    for found, one in zip(figures, expected, strict=True):
        torch.testing.assert_close(found.double(), one, rtol=1e-5, atol=1e-5 * scale)
    wanted = channels.sum(0).square().sum() - products.square().sum()
    torch.testing.assert_close(in_channel.double(), wanted, rtol=1e-4, atol=1e-4 * float(products.square().sum()))


@pytest.mark.parametrize("shape", [(1, 1), (37, 1300)])
def test_rises_of_tokens_are_sums_over_their_channels(shape: tuple[int, int], run: Run) -> None:
    x, rounded, slopes = drawn(*shape)
    along = drawn(*shape, seed=1)[0]
    expected = (along.double() * rounded + slopes.double() * (rounded - x)).sum(1)
    for found in (run("rises_of_tokens", along, slopes, x, rounded), rises_of_tokens(along, slopes, x, rounded)):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_empty_tensors_have_no_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "has_kernels", lambda device: True)
    x = torch.zeros(0, 8)
    assert error_norms(x, [x, x]).tolist() == [0.0, 0.0]
    assert weight_errors(x, [x], x[None]).sums.tolist() == [0.0]
