"""Are the kernels that a first step launches, and steps under a plan with folded formats, those that were foreseen?"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from snip_hf import SnipConfig, convert_model
from snip_hf.kernels.tensor_scaled import foreseen, gated_operators, linear, operators
from snip_hf.kernels.tensor_scaled.backend import TENSOR_SCALED
from snip_hf.layers.gated import put_gates
from snip_hf.layers.state import snip_linears
from snip_hf.numerics.gemms import GEMMS

pytest.importorskip("triton")
TOKENS = 64
CONFIG = LlamaConfig(
    vocab_size=32,
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
)
Launch = tuple[Any, ...]


def product(left: Tensor, right: Tensor, *rest: Any) -> Tensor:
    return left.new_zeros((left.shape[0], right.shape[1]), dtype=rest[4])


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """Of each launch the kernel's name and what Triton compiles for."""
    found: list[Launch] = []

    def launch(
        kernel: Any, grid: Any, tensors: Any, numbers: Any, constants: Any, free: Any = (), key: Any = None, **more: Any
    ) -> None:
        dtypes, seen = tuple(tensor.dtype for tensor in tensors), tuple((one % 16 == 0, one == 1) for one in numbers)
        found.append((kernel.fn.__name__, dtypes, seen, constants, *more.items()))

    for module in (operators, gated_operators):
        monkeypatch.setattr(module, "launch", launch)
        monkeypatch.setattr(module, "relaunch", lambda key, tensors, free=(): False)
    yield found


def train(monkeypatch: pytest.MonkeyPatch, format: str, is_frozen: bool, tokens: int = TOKENS, step: int = 1) -> None:
    """Forward and backward of a compiled decoder layer; after the first step its operands have exponents."""
    monkeypatch.setattr(operators, "runs_kernels", lambda x: True)
    monkeypatch.setattr(torch, "_scaled_mm", product)
    model = LlamaForCausalLM(CONFIG).train()
    convert_model(model, SnipConfig())
    for layer in snip_linears(model).values():
        layer.weight.requires_grad_(not is_frozen)
        layer.use_backend(TENSOR_SCALED)
        layer.set_formats(dict.fromkeys(GEMMS, format))
        layer.snip_cache.own.note.known, layer.snip_cache.own.note.steps = [step > 1] * 3, step - 1
    assert put_gates(model, logging.getLogger()) == 1
    block = model.model.layers[0]
    torch._dynamo.reset()
    block.compile(backend="aot_eager")
    x = torch.randn(1, tokens, 128, requires_grad=True)
    positions = model.model.rotary_emb(x, torch.arange(tokens)[None])
    with torch.autocast("cpu", torch.bfloat16):
        block(x, position_embeddings=positions).sum().backward()
    torch._dynamo.reset()


def foreseen_launches(launches: list[Launch], calls: Iterable[tuple[str, Callable[[], object]]]) -> set[Launch]:
    for _, call in calls:
        call()
    found = set(launches)
    launches.clear()
    return found


def layers_of(is_frozen: bool) -> list[dict[str, Any]]:
    shapes = [(128, 128), (64, 128), (192, 128), (128, 192)]
    return [{"shape": shape, "dtype": "float32", "is_trained": not is_frozen} for shape in shapes]


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_step_under_a_plan_launches_no_fold_that_was_not_foreseen(
    is_frozen: bool, launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = foreseen.fold_calls(layers_of(is_frozen), TOKENS, ["mxfp4", "fp8-tensor"])
    expected = foreseen_launches(launches, calls)
    monkeypatch.setattr(TENSOR_SCALED, "fuses_gates", False, raising=False)  # their kernels are those of the first step
    train(monkeypatch, "mxfp4", is_frozen, step=3)
    assert len(set(launches)) >= (3 if is_frozen else 4) and set(launches) <= expected


@pytest.mark.parametrize(("tokens", "small"), [(TOKENS, linear.SMALL), (TOKENS - 5, 0)])
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("format", ["mxfp4", pytest.param("fp8-tensor", marks=pytest.mark.slow)])
def test_a_first_step_launches_no_kernel_that_was_not_foreseen(
    format: str, is_frozen: bool, tokens: int, small: int, launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    gates = [] if is_frozen else [192]
    calls = TENSOR_SCALED.kernels_of_first_step(layers_of(is_frozen), gates, tokens)
    expected = foreseen_launches(launches, calls)
    monkeypatch.setattr(linear, "SMALL", small)  # larger weights are folded for each GEMM by itself
    train(monkeypatch, format, is_frozen, tokens)
    found = set(launches)
    assert found <= expected and len(found) >= len(expected) // 2
    names = {"scales_kernel", "fold_kernel"}
    if not is_frozen:
        names |= {"fold_gated_kernel", "fold_gated_gradients_kernel"}
    assert {name for name, *_ in found} == names


def test_gates_that_do_not_run_as_one_have_no_kernels(launches: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TENSOR_SCALED, "fuses_gates", False, raising=False)
    found = foreseen_launches(launches, TENSOR_SCALED.kernels_of_first_step(layers_of(False), [192], TOKENS))
    assert {name for name, *_ in found} == {"scales_kernel", "fold_kernel"}


def test_nothing_more_is_foreseen_where_no_format_folds() -> None:
    assert list(foreseen.fold_calls(layers_of(False), TOKENS, ["fp8-tensor"])) == []
