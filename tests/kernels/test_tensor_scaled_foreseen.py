"""Are the kernels that steps launch under a plan with folded formats those that were foreseen?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from snip_hf import SnipConfig, convert_model
from snip_hf.kernels.tensor_scaled import foreseen, operators
from snip_hf.kernels.tensor_scaled.backend import TENSOR_SCALED
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
    """What Triton compiles for in each launch that takes its parameters from the exponent in force."""
    found: list[Launch] = []

    def launch(
        kernel: Any, grid: Any, tensors: Any, numbers: Any, constants: Any, free: Any = (), key: Any = None, **more: Any
    ) -> None:
        if kernel is operators.fold_kernel and constants[4]:
            dtypes = tuple(tensor.dtype for tensor in tensors)
            found.append(
                (dtypes, tuple((number % 16 == 0, number == 1) for number in numbers), constants, *more.items())
            )

    monkeypatch.setattr(operators, "launch", launch)
    monkeypatch.setattr(operators, "relaunch", lambda key, tensors: False)
    yield found


def train_under_a_plan(launches: list[Launch], monkeypatch: pytest.MonkeyPatch, is_frozen: bool) -> None:
    """Two passes of a compiled decoder layer in MXFP4, whose operands have exponents."""
    monkeypatch.setattr(operators, "runs_kernels", lambda x: True)
    monkeypatch.setattr(torch, "_scaled_mm", product)
    monkeypatch.setattr(TENSOR_SCALED, "fuses_gates", False, raising=False)  # their kernels were compiled at the start
    model = LlamaForCausalLM(CONFIG).train()
    convert_model(model, SnipConfig())
    for layer in snip_linears(model).values():
        layer.weight.requires_grad_(not is_frozen)
        layer.use_backend(TENSOR_SCALED)
        layer.set_formats(dict.fromkeys(GEMMS, "mxfp4"))
        layer.snip_cache.own.note.known, layer.snip_cache.own.note.steps = [True] * 3, 2
    block = model.model.layers[0]
    block.compile(backend="aot_eager")
    x = torch.randn(1, TOKENS, 128, requires_grad=True)
    positions = model.model.rotary_emb(x, torch.arange(TOKENS)[None])
    with torch.autocast("cpu", torch.bfloat16):
        block(x, position_embeddings=positions).sum().backward()


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_step_under_a_plan_launches_no_fold_that_was_not_foreseen(
    is_frozen: bool, launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    shapes = [(128, 128), (64, 128), (192, 128), (128, 192)]
    layers = [{"shape": shape, "dtype": "float32", "is_trained": not is_frozen} for shape in shapes]
    for _, call in foreseen.fold_calls(layers, TOKENS, ["mxfp4", "fp8-tensor"]):
        call()
    expected = set(launches)
    launches.clear()
    train_under_a_plan(launches, monkeypatch, is_frozen)
    torch._dynamo.reset()
    assert len(set(launches)) >= (3 if is_frozen else 4) and set(launches) <= expected


def test_nothing_is_foreseen_where_no_format_folds() -> None:
    layers = [{"shape": (128, 128), "dtype": "float32", "is_trained": True}]
    assert list(foreseen.fold_calls(layers, TOKENS, ["fp8-tensor"])) == []
