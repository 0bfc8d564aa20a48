"""Which attention do passes take, and may a loss differentiate its gradients?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM

from snip_hf.estimation import attention
from snip_hf.estimation.attention import SplitAttention, efficient_attention, per_query_head
from snip_hf.estimation.divergence import estimate_divergence
from snip_hf.kernels.split_attention import Attention, takes

torch_attention = nn.functional.scaled_dot_product_attention


def drawn(dtype: torch.dtype = torch.float32, shared: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, 9, 8, generator=generator, dtype=dtype) for heads in (6, shared, shared)]


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> list[Attention]:
    """Lets the kernels take all, and torch stand for them, whose gradients count as constants; notes their tasks."""
    tasks: list[Attention] = []

    def attend(query: Tensor, key: Tensor, value: Tensor, task: Attention) -> tuple[Tensor, Tensor]:
        tasks.append(task)
        out = torch_attention(query, key, value, is_causal=task.is_causal, scale=task.scale, enable_gqa=True)
        return out, out.new_empty(0)

    def gradients(grad_output: Tensor, tensors: Any, out: Tensor, logs: Tensor, task: Attention) -> Any:
        with torch.enable_grad():
            leaves = [one.detach().requires_grad_() for one in tensors]
            return torch.autograd.grad(attend(*leaves, task)[0], leaves, grad_output)

    monkeypatch.setattr(attention, "attend", attend)
    monkeypatch.setattr(attention, "attention_gradients", gradients)
    monkeypatch.setattr(attention, "takes", lambda *given: True)
    return tasks


def gradients_of(function: Any, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    leaves = [one.clone().requires_grad_() for one in tensors]
    out = function(*leaves)
    return out.detach(), *torch.autograd.grad((out * out.detach().cos()).sum(), leaves)


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("is_causal", [True, False])
def test_what_the_kernels_take_they_get_with_its_scale(
    by_torch: list[Attention], is_causal: bool, scale: float | None
) -> None:
    def run(*leaves: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(*leaves, is_causal=is_causal, scale=scale, enable_gqa=True)

    expected = gradients_of(run, drawn())
    with efficient_attention():
        found = gradients_of(run, drawn())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert by_torch and set(by_torch) == {Attention(8**-0.5 if scale is None else scale, is_causal)}


@pytest.mark.parametrize(
    "given", [{"attn_mask": torch.ones(9, 9, dtype=torch.bool).tril()}, {"dropout_p": 0.5}], ids=["a mask", "dropout"]
)
def test_masks_and_dropout_are_left_to_torch(by_torch: list[Attention], given: dict[str, Any]) -> None:
    torch.manual_seed(0)
    expected = torch_attention(*drawn(), **given, enable_gqa=True)
    torch.manual_seed(0)
    with efficient_attention():
        found = nn.functional.scaled_dot_product_attention(*drawn(), **given, enable_gqa=True)
    assert torch.equal(found, expected) and not by_torch


def test_heads_that_do_not_fit_are_torch_s_to_refuse(by_torch: list[Attention]) -> None:
    with efficient_attention(), pytest.raises(RuntimeError):
        nn.functional.scaled_dot_product_attention(*drawn())
    assert not by_torch


def test_a_loss_may_differentiate_the_gradients(by_torch: list[Attention]) -> None:
    task = Attention(0.4, True)
    found = []
    for function in (
        lambda *given: SplitAttention.apply(*given, task),
        lambda *given: torch_attention(*given, is_causal=True, scale=0.4, enable_gqa=True),
    ):
        query, key, value = drawn(torch.float64)
        leaves = [query.requires_grad_(), key.requires_grad_()]
        with sdpa_kernel(SDPBackend.MATH):  # torch's others have no second derivative
            out = function(query, key, value)
        gradients = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        torch.stack([one.square().sum() for one in gradients]).sum().backward()
        found.append([one.grad for one in leaves])
    torch.testing.assert_close(*found)


def test_on_a_cpu_attention_is_torch_s_own() -> None:
    tensors = drawn()
    with efficient_attention():
        found = nn.functional.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)
    assert torch.equal(found, torch_attention(*tensors, is_causal=True, enable_gqa=True))


def test_keys_per_query_head_are_those_that_torch_shares_between_heads() -> None:
    query, key, value = drawn()
    wanted = torch_attention(query, key, value, is_causal=True, enable_gqa=True)
    found = torch_attention(query, per_query_head(query, key), per_query_head(query, value), is_causal=True)
    torch.testing.assert_close(found, wanted)


ON_HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="kernels for Hopper"
)


@pytest.mark.gpu
@ON_HOPPER
@pytest.mark.parametrize("channels", [64, 128])
def test_on_hopper_attention_is_that_of_fp32_and_holds_keys_once(channels: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(2, 700, heads, channels) for heads in (8, 2, 2)]
    tensors = [torch.randn(shape, generator=generator, device="cuda").transpose(1, 2) for shape in shapes]

    def run(*leaves: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)

    expected = gradients_of(run, [one.double() for one in tensors])
    with efficient_attention():
        found = gradients_of(run, tensors)
        held = run(*(one.clone().requires_grad_() for one in tensors)).grad_fn
    assert "SplitAttention" in type(held).__name__
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 3e-5 * other.norm()


@pytest.mark.gpu
@ON_HOPPER
def test_on_hopper_divergences_are_those_of_attention_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, optimizer = trained("cuda")
    calls: list[bool] = []

    def noted(*given: Any) -> bool:
        calls.append(takes(*given))
        return calls[-1]

    tables = []
    for function in (lambda *given: False, noted):
        monkeypatch.setattr(attention, "takes", function)
        tables.append(estimate_divergence(model, batch, optimizer))
    assert calls and all(calls)
    for name in ("fp8", "fp4"):
        expected, found = (table.totals(name) for table in tables)
        assert found == pytest.approx(expected, rel=0.02)  # 0.0006 where products are emulated


def trained(device: str, steps: int = 30) -> tuple[nn.Module, dict[str, Tensor], torch.optim.Optimizer]:
    """A small Llama whose heads have 64 channels, after some steps on texts of 64 words."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps + 1):
        words = torch.randint(64, (2, 200)) // torch.randint(1, 4, (2, 200))
        batch = dict.fromkeys(("input_ids", "labels"), (words * 7 % 512).to(device))
        if step < steps:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model, batch, optimizer
