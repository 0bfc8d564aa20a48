"""Attention in a pass is torch's own, with kernels that hold no (tokens, tokens) matrices on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from snip_hf.estimation.attention import efficient_attention, per_query_head

torch_attention = nn.functional.scaled_dot_product_attention


def drawn(device: str = "cpu") -> list[Tensor]:
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
    expected = torch_attention(*drawn(), **given, enable_gqa=True)
    torch.manual_seed(0)
    with efficient_attention():
        found = nn.functional.scaled_dot_product_attention(*drawn(), **given, enable_gqa=True)
    assert torch.equal(found, expected)
    assert nn.functional.scaled_dot_product_attention is torch_attention


def test_heads_that_do_not_fit_are_torch_s_to_refuse() -> None:
    with efficient_attention(), pytest.raises(RuntimeError):
        nn.functional.scaled_dot_product_attention(*drawn())


def test_keys_per_query_head_are_those_that_torch_shares_between_heads() -> None:
    query, key, value = drawn()
    wanted = torch_attention(query, key, value, is_causal=True, enable_gqa=True)
    found = torch_attention(query, per_query_head(query, key), per_query_head(query, value), is_causal=True)
    torch.testing.assert_close(found, wanted)


@pytest.mark.gpu
def test_on_a_gpu_shared_heads_take_the_memory_efficient_kernel() -> None:
    tensors = [one.requires_grad_() for one in drawn("cuda")]
    with efficient_attention():
        found = nn.functional.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)
    assert "EfficientAttention" in type(found.grad_fn).__name__
    expected = torch_attention(*(one.double() for one in tensors), is_causal=True, enable_gqa=True)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-4)
