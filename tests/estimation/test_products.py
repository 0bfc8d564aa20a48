"""Are products of split matrices those of FP32, as far as they promise?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from snip_hf.estimation import products
from snip_hf.estimation.products import (
    SplitLinear,
    efficient_products,
    is_split,
    per_query_head,
    product,
    rough_product,
    split_product,
)

SHAPES = {"matrices": ((37, 200), (200, 53)), "batches": ((3, 37, 200), (3, 200, 53))}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers of sizes that span ten decades."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 10 ** (5 * (torch.rand(shape, generator=generator) - 0.5))


def error(found: Tensor, left: Tensor, right: Tensor) -> float:
    """The largest error against float64, in parts of the terms' magnitudes."""
    exact = left.double() @ right.double()
    return float(((found.double() - exact).abs() / (left.double().abs() @ right.double().abs())).max())


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("transposed", [(), (0,), (1,), (0, 1)], ids=str)
def test_split_products_are_right_to_a_part_in_2_to_the_16(
    shapes: tuple[tuple[int, ...], ...], transposed: tuple[int, ...]
) -> None:
    operands = [drawn(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    left, right = (x.mT.contiguous().mT if index in transposed else x for index, x in enumerate(operands))
    found = split_product(left, right)
    assert found.dtype == torch.float32 and found.shape == (left @ right).shape
    assert error(found, left, right) < 2**-16
    # One product of BF16 numbers is not.
    assert error(left.bfloat16().float() @ right.bfloat16().float(), left, right) > 2**-12


def test_numbers_of_two_bf16_parts_without_a_low_one_on_the_other_side_are_multiplied_exactly() -> None:
    left = torch.tensor([[1 + 2.0**-9, -3.0]])
    right = torch.tensor([[4.0], [2.0**-20]])
    assert split_product(left, right).item() == 4 * (1 + 2.0**-9) - 3 * 2.0**-20


@pytest.mark.parametrize("where", ["left", "right"])
def test_operands_that_are_not_finite_do_not_become_finite(where: str) -> None:
    left, right = drawn(4, 8), drawn(8, 5, seed=1)
    (left if where == "left" else right)[1, 2] = float("inf")
    found = split_product(left, right)
    touched = found[1] if where == "left" else found[:, 2]
    assert not touched.isfinite().any()
    assert int(found.isfinite().sum()) == found.numel() - touched.numel()


def test_on_a_cpu_and_for_other_dtypes_products_are_torch_s_own() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        left, right = drawn(6, 8).to(dtype), drawn(8, 5, seed=1).to(dtype)
        assert not is_split(left, right)
        assert torch.equal(product(left, right), left @ right)


@pytest.mark.gpu
@pytest.mark.parametrize("shapes", [*SHAPES.values(), ((1024, 2048), (2048, 256)), ((8, 256, 128), (8, 128, 5632))])
def test_on_cuda_fp32_products_are_split_outside_of_autocast(shapes: tuple[tuple[int, ...], ...]) -> None:
    left, right = (drawn(*shape, seed=seed).cuda() for seed, shape in enumerate(shapes))
    transposed = left.mT.contiguous().mT
    assert is_split(left, right)
    for one in (left, transposed):
        found = product(one, right)
        # Tensor cores cut their FP32 sums off instead of rounding them: measured up to 2.3e-5 here.
        assert found.dtype == torch.float32 and error(found, left, right) < 2**-15
        # The emulation differs only in the order of the sums and their rounding.
        emulated = split_product(left.cpu(), right.cpu()).cuda()
        assert ((found - emulated).abs() <= 2**-16 * (left.abs() @ right.abs())).all()
    assert not is_split(left.bfloat16(), right.bfloat16()) and not is_split(left[:0], right)
    with torch.autocast("cuda", torch.bfloat16):
        assert not is_split(left, right)


def test_rough_products_are_torch_s_own_where_products_are(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = drawn(6, 8), drawn(8, 5, seed=1)
    assert torch.equal(rough_product(left, right), left @ right)
    monkeypatch.setattr(products, "is_split", lambda left, right: True)
    found = rough_product(left, right)
    assert found.dtype == torch.float32
    assert 2**-17 < error(found, left, right) < 2**-8


def test_narrow_products_are_bf16_where_there_are_kernels_that_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = drawn(6, 8), drawn(8, 5, seed=1)
    assert torch.equal(rough_product(left, right, True), left @ right)
    monkeypatch.setattr(products, "is_split", lambda left, right: True)
    wide = rough_product(left, right, True)
    monkeypatch.setattr(products, "has_kernels", lambda device: True)
    assert wide.dtype == torch.float32 and torch.equal(rough_product(left, right, True), wide.bfloat16())


@pytest.mark.gpu
def test_on_cuda_products_of_operands_in_bf16_are_those_of_what_was_rounded() -> None:
    left, right = drawn(64, 128).cuda(), drawn(128, 256, seed=1).cuda()
    wide = rough_product(left, right)
    assert torch.equal(rough_product(left.bfloat16(), right), wide)
    narrow = rough_product(left.bfloat16(), right.bfloat16(), True)
    assert narrow.dtype == torch.bfloat16 and (narrow - wide).norm() <= 2**-8 * wide.norm()


# -------------------------------------------------------------------------------------------------- large linears


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "OUTPUTS", 10)


def operands(outputs: int = 37) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator) for shape in ((6, 16), (outputs, 16), (outputs,))]
    return drawn[0], drawn[1], drawn[2]


@pytest.mark.parametrize("has_bias", [False, True])
def test_outputs_and_gradients_are_those_of_torch_s_linear(small_parts: None, has_bias: bool) -> None:
    x, weight, bias = operands()
    given = bias.requires_grad_() if has_bias else None
    found, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    direction = torch.randn(6, 37, generator=torch.Generator().manual_seed(1))
    y = SplitLinear.apply(found, weight, given)
    (y * direction).sum().backward()
    grad_bias, bias.grad = bias.grad, None
    exact = nn.functional.linear(expected, weight, given)
    (exact * direction).sum().backward()
    torch.testing.assert_close(y, exact)
    torch.testing.assert_close(found.grad, expected.grad)
    assert not has_bias or torch.equal(grad_bias, bias.grad)


def test_a_loss_may_differentiate_its_gradient(small_parts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A penalty of gradients does so; the kernels that split operands would count as constants."""

    def without_derivative(left: Tensor, right: Tensor) -> Tensor:
        return left.detach() @ right.detach()

    monkeypatch.setattr(products, "product", without_derivative)
    x, weight = (one.double() for one in operands()[:2])
    found = []
    for function in (SplitLinear.apply, nn.functional.linear):
        at = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(function(at, weight, None).square().sum(), at, create_graph=True)
        gradient.square().sum().backward()
        found.append(at.grad)
    torch.testing.assert_close(*found)


def test_only_large_frozen_weights_are_taken_and_torch_s_function_comes_back(
    small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "is_split", lambda left, right: True)
    (x, weight, _), original = operands(), nn.functional.linear
    x.requires_grad_()
    trained = nn.Parameter(weight.clone())
    with efficient_products():
        head = nn.functional.linear(x.view(2, 3, 16), weight)
        others = [nn.functional.linear(x, trained), nn.functional.linear(x, weight[:9])]
    assert head.shape == (2, 3, 37) and "SplitLinear" in type(head.grad_fn.next_functions[0][0]).__name__  # type: ignore[union-attr]
    assert all("SplitLinear" not in type(one.grad_fn).__name__ for one in others)
    assert nn.functional.linear is original


def test_on_a_cpu_linears_are_torch_s_own() -> None:
    x, weight, bias = operands(products.OUTPUTS)
    expected = nn.functional.linear(x, weight, bias)
    with efficient_products():
        assert torch.equal(nn.functional.linear(x, weight, bias), expected)


# ------------------------------------------------------------------------------------------------------ attention


torch_attention = nn.functional.scaled_dot_product_attention


def heads_of(device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, 9, 8, generator=generator).to(device) for heads in (6, 2, 2)]


@pytest.mark.parametrize(
    "given",
    [
        {"is_causal": True},
        {"is_causal": True, "scale": 0.7},
        {"attn_mask": torch.ones(9, 9, dtype=torch.bool).tril()},
        {"dropout_p": 0.5},
    ],
    ids=["causal", "a scale", "a mask", "dropout"],
)
def test_on_a_cpu_attention_is_torch_s_own(given: dict[str, Any]) -> None:
    torch.manual_seed(0)
    expected = torch_attention(*heads_of(), **given, enable_gqa=True)
    torch.manual_seed(0)
    with efficient_products():
        found = nn.functional.scaled_dot_product_attention(*heads_of(), **given, enable_gqa=True)
    assert torch.equal(found, expected)
    assert nn.functional.scaled_dot_product_attention is torch_attention


def test_keys_per_query_head_are_those_that_torch_shares_between_heads() -> None:
    query, key, value = heads_of()
    wanted = torch_attention(query, key, value, is_causal=True, enable_gqa=True)
    found = torch_attention(query, per_query_head(query, key), per_query_head(query, value), is_causal=True)
    torch.testing.assert_close(found, wanted)


@pytest.mark.gpu
def test_on_a_gpu_shared_heads_take_the_memory_efficient_kernel() -> None:
    tensors = [one.requires_grad_() for one in heads_of("cuda")]
    with efficient_products():
        found = nn.functional.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)
    assert "EfficientAttention" in type(found.grad_fn).__name__
    expected = torch_attention(*(one.double() for one in tensors), is_causal=True, enable_gqa=True)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-4)
