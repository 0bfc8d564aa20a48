"""Gated MLPs: recognition, and the forward that a run puts in place and removes."""

from __future__ import annotations

import copy
import functools
import importlib
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from configs import fp4_config
from small import tiny_llama
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers.models.llama.modeling_llama import LlamaMLP

from snip_hf import convert_model, restore_model
from snip_hf.kernels.tensor_scaled.backend import TENSOR_SCALED
from snip_hf.layers.gated import GATED_MLPS, gate_up_down, is_gated, put_gates, register_gated_mlp, remove_gates
from snip_hf.layers.state import snip_linears

LOG = logging.getLogger("snip_hf.test")


def swapped(model: nn.Module) -> nn.Module:
    """The model with its linears on the backend that runs gates."""
    convert_model(model, fp4_config())
    for layer in snip_linears(model).values():
        layer.use_backend(TENSOR_SCALED)
    return model


def llama() -> nn.Module:
    return swapped(tiny_llama(layers=2))


@pytest.mark.parametrize("name", sorted(GATED_MLPS))
def test_each_known_class_computes_the_formula(name: str) -> None:
    path, _, cls_name = name.rpartition(".")
    try:
        cls = getattr(importlib.import_module(path), cls_name)
    except (ImportError, AttributeError):
        pytest.skip("not in this version of transformers")
    mlp: Any = cls.__new__(cls)
    nn.Module.__init__(mlp)
    torch.manual_seed(0)
    mlp.gate_proj, mlp.up_proj, mlp.down_proj = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)
    mlp.act_fn, mlp.config = nn.SiLU(), None
    x = torch.randn(2, 3, 16)
    assert torch.equal(mlp.train()(x), mlp.down_proj(silu(mlp.gate_proj(x)) * mlp.up_proj(x)))


def test_those_of_llama_are_found_where_their_backend_runs_gates() -> None:
    model = tiny_llama(layers=2)
    convert_model(model, fp4_config())
    assert put_gates(model, LOG) == 0  # the emulated backend runs none
    for layer in snip_linears(model).values():
        layer.use_backend(TENSOR_SCALED)
    assert put_gates(model, LOG) == 2
    mlp = model.model.layers[1].mlp
    assert is_gated(mlp) and gate_up_down(mlp) == (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    assert put_gates(model, LOG) == 2  # and again, as when a run takes the model back


def with_a_forward_of_its_own(mlp: nn.Module) -> None:
    mlp.forward = lambda x: x  # as Liger binds one


def of_a_subclass(mlp: nn.Module) -> None:
    mlp.__class__ = type("Half", (LlamaMLP,), {})


def with_another_activation(mlp: nn.Module) -> None:
    mlp.act_fn = nn.GELU()


def with_a_patched_activation(mlp: nn.Module) -> None:
    mlp.act_fn.forward = nn.functional.gelu


def hooked(mlp: nn.Module) -> None:
    mlp.up_proj.register_forward_hook(lambda *_: None)


def with_an_adapter(mlp: nn.Module) -> None:
    mlp.up_proj = nn.Sequential(mlp.up_proj)


@pytest.mark.parametrize(
    "change",
    [
        with_a_forward_of_its_own,
        of_a_subclass,
        with_another_activation,
        with_a_patched_activation,
        hooked,
        with_an_adapter,
    ],
)
def test_modules_that_are_not_as_their_class_makes_them_are_left_alone(change: Callable[[nn.Module], None]) -> None:
    model = llama()
    change(model.model.layers[0].mlp)
    assert put_gates(model, LOG) == 1
    assert not is_gated(model.model.layers[0].mlp)


@pytest.mark.parametrize("dressed", [lambda forward: forward, functools.wraps(LlamaMLP.forward)], ids=["", "wraps"])
def test_a_class_whose_forward_was_exchanged_is_left_alone(dressed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    monkeypatch.setattr(LlamaMLP, "forward", dressed(lambda self, x: x))
    assert put_gates(model, LOG) == 0


def test_a_class_of_the_user_s_is_found_once_it_is_registered() -> None:
    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
            self.act_fn = nn.SiLU()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
            return y

    model = swapped(nn.ModuleList([MLP()]))
    assert put_gates(model, LOG) == 0
    before = set(GATED_MLPS)
    try:
        assert register_gated_mlp(MLP) is MLP
        assert put_gates(model, LOG) == 1
    finally:
        GATED_MLPS.clear()
        GATED_MLPS.update(before)


def test_no_module_runs_when_the_forwards_are_put_in_place() -> None:
    model = llama()
    for module in model.modules():
        module.register_forward_pre_hook(lambda *_: pytest.fail("ran"))
    put_gates(model, LOG)


def test_without_torch_compile_the_module_computes_what_it_did() -> None:
    model, ids = llama(), torch.arange(8)[None]
    expected = model(input_ids=ids).logits
    before = vars(model.model.layers[0].mlp).keys()
    put_gates(model, LOG)
    assert torch.equal(model(input_ids=ids).logits, expected)
    remove_gates(model)
    assert vars(model.model.layers[0].mlp).keys() == before
    assert torch.equal(model(input_ids=ids).logits, expected)


def test_the_log_that_is_given_says_what_was_found(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        put_gates(llama(), LOG)
    assert [record.getMessage() for record in caplog.records if record.name == LOG.name] == [
        "snip-hf: 2 gated MLPs run as one where they are compiled, such as model.layers.0.mlp."
    ]


def test_wrappers_around_the_forward_still_run_when_the_run_has_ended() -> None:
    model, x = llama(), torch.randn(3, 64)
    mlp = model.model.layers[0].mlp
    expected = mlp(x)
    put_gates(model, LOG)
    inner = mlp.forward
    mlp.forward = lambda x: inner(x)
    remove_gates(model)
    assert torch.equal(mlp(x), expected)


def test_a_restored_model_has_its_own_forward() -> None:
    model = llama()
    put_gates(model, LOG)
    restore_model(model)
    mlp = model.model.layers[0].mlp
    assert vars(mlp).keys().isdisjoint({"forward", "snip_gated_class"}) and type(mlp.gate_proj) is nn.Linear


def test_copies_run_by_themselves() -> None:
    model = llama()
    put_gates(model, LOG)
    ids = torch.arange(8)[None]
    expected = model(input_ids=ids).logits
    twin, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    mlp = twin.model.layers[0].mlp
    assert mlp.forward.__self__ is mlp and gate_up_down(mlp)[0] is mlp.gate_proj
    assert not is_gated(pickled.model.layers[0].mlp)
    for one in (twin, pickled):
        assert torch.equal(one(input_ids=ids).logits, expected)
    assert put_gates(pickled, LOG) == 2
    for one in (twin, pickled, pickle.loads(pickle.dumps(twin))):
        restore_model(one)
        assert "forward" not in vars(one.model.layers[0].mlp)
