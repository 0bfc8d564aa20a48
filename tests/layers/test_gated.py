"""Gated MLPs: which modules are taken for one, and what putting their forward in place leaves behind."""

from __future__ import annotations

import copy
import functools
import logging
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from small import tiny_llama
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from snip_hf import SnipConfig, convert_model, restore_model
from snip_hf.kernels.tensor_scaled.backend import TENSOR_SCALED
from snip_hf.layers.gated import gate_up_down, is_gated, put_gates, remove_gates
from snip_hf.layers.state import snip_linears

Formula = Callable[["MLP", Tensor], Tensor]
LOG = logging.getLogger("snip_hf.test")


class MLP(nn.Module):
    """Three linears, named as in no family, and what they compute."""

    def __init__(self, formula: Formula, inner: int = 24, outer: int = 16) -> None:
        super().__init__()
        self.c = nn.Linear(inner, outer)
        self.a, self.b = nn.Linear(16, inner), nn.Linear(16, inner)
        self.dropout, self.formula = nn.Dropout(0.5), formula

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(self, x)


class Decoder(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([mlp])


def gated(mlp: MLP, x: Tensor) -> Tensor:
    y: Tensor = mlp.c(silu(mlp.b(x)) * mlp.a(x))
    return y


def swapped(mlp: nn.Module) -> nn.Module:
    """The MLP with linears on the backend that runs gates."""
    model = Decoder(mlp)
    convert_model(model, SnipConfig())
    for layer in snip_linears(model).values():
        layer.use_backend(TENSOR_SCALED)
    return model


def test_a_gated_mlp_is_found_by_what_it_computes_whatever_its_linears_are_called() -> None:
    model = swapped(MLP(gated))
    assert put_gates(model, LOG) == 1
    mlp = model.layers[0]
    assert is_gated(mlp) and gate_up_down(mlp) == (mlp.b, mlp.a, mlp.c)
    assert put_gates(model, LOG) == 1  # and again, as when a run takes the model back


def test_those_of_llama_are_found() -> None:
    model = tiny_llama(layers=2)
    convert_model(model, SnipConfig())
    assert put_gates(model, LOG) == 0  # the emulated backend runs none
    for layer in snip_linears(model).values():
        layer.use_backend(TENSOR_SCALED)
    assert put_gates(model, LOG) == 2
    mlp = model.model.layers[1].mlp
    assert gate_up_down(mlp) == (mlp.gate_proj, mlp.up_proj, mlp.down_proj)


def limited(mlp: MLP, x: Tensor) -> Tensor:
    y: Tensor = mlp.c(silu(mlp.b(x)).clamp(max=7.0) * mlp.a(x))
    return y


OTHERS: dict[str, Formula] = {
    "GELU": lambda mlp, x: mlp.c(gelu(mlp.b(x)) * mlp.a(x)),
    "limited": limited,
    "dropout in training": lambda mlp, x: mlp.c(mlp.dropout(silu(mlp.b(x)) * mlp.a(x))),
    "a scaled output": lambda mlp, x: 0.5 * gated(mlp, x),
    "a residual": lambda mlp, x: x + gated(mlp, x),
    "another input": lambda mlp, x: mlp.c(silu(mlp.b(x)) * mlp.a(x.flip(-1))),
    "a linear called twice": lambda mlp, x: mlp.c(silu(mlp.b(x)) * mlp.a(x)) + 0 * mlp.c(mlp.a(x)),
    "a cast": lambda mlp, x: mlp.c((silu(mlp.b(x)) * mlp.a(x)).bfloat16()).float(),
    "two outputs": lambda mlp, x: (gated(mlp, x), x),  # type: ignore[dict-item,return-value]
    "an error": lambda mlp, x: gated(mlp, x[..., :3, :].reshape(7, 7)),
}


@pytest.mark.parametrize("formula", OTHERS.values(), ids=OTHERS)
def test_other_modules_are_left_alone(formula: Formula) -> None:
    model = swapped(MLP(formula).eval())
    random_state = torch.random.get_rng_state()
    assert put_gates(model, LOG) == 0
    assert vars(model.layers[0]).keys().isdisjoint({"forward", "snip_gate_up_down"})
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert not model.layers[0].dropout.training
    assert all(layer.snip_recorder is None for layer in snip_linears(model).values())


def test_so_are_modules_that_hold_more_than_their_linears_or_are_watched() -> None:
    trained, hooked, replaced, partly = (swapped(MLP(gated)) for _ in range(4))
    trained.layers[0].scale = nn.Parameter(torch.ones(1))
    hooked.layers[0].a.register_forward_hook(lambda *_: None)
    replaced.layers[0].forward = lambda x: x
    partly.layers[0].a = nn.Sequential(partly.layers[0].a)  # as an adapter holds it
    buffered, plain, calling = (swapped(MLP(gated)) for _ in range(3))
    buffered.layers[0].register_buffer("factor", torch.ones(1))
    plain.layers[0]._factor = torch.ones(1)
    calling.layers[0].act = functools.partial(silu, inplace=False)
    unequal, patched = (swapped(MLP(gated)) for _ in range(2))
    unequal.layers[0].limit = float("nan")
    patched.layers[0].dropout.forward = lambda x: x
    for model in (trained, hooked, replaced, partly, buffered, plain, calling, unequal, patched):
        assert put_gates(model, LOG) == 0


@pytest.mark.parametrize("now", [2.0, None, torch.ones(2), np.ones(2)])
def test_an_attribute_of_another_value_or_type_is_a_change(now: object) -> None:
    model = swapped(MLP(gated))
    mlp = model.layers[0]
    mlp.limit = 1.0
    assert put_gates(model, LOG) == 1
    parts = vars(mlp)["snip_made_of"].parts
    assert all(part.is_in(mlp) for part in parts)
    mlp.limit = now
    assert not all(part.is_in(mlp) for part in parts)


def test_without_torch_compile_the_module_computes_what_it_did() -> None:
    model, x = swapped(MLP(gated)), torch.randn(3, 16)
    expected = model.layers[0](x)
    put_gates(model, LOG)
    assert torch.equal(model.layers[0](x), expected)
    remove_gates(model)
    assert vars(model.layers[0]).keys().isdisjoint({"forward", "snip_gate_up_down"})
    assert torch.equal(model.layers[0](x), expected)


def test_without_torch_compile_a_call_does_not_look_at_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = swapped(MLP(gated)), []
    put_gates(model, LOG)
    walk = nn.Module.modules
    monkeypatch.setattr(nn.Module, "modules", lambda self: seen.append(self) or walk(self))
    model.layers[0](torch.randn(3, 16))
    assert seen == []
    model.layers[0].b.register_forward_hook(lambda *_: seen.append("hook"))
    model.layers[0](torch.randn(3, 16))
    assert seen == ["hook"]


def test_the_log_that_is_given_says_what_was_found(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        put_gates(swapped(MLP(gated)), LOG)
        put_gates(swapped(MLP(limited)), LOG)
    assert [(record.name, record.getMessage()) for record in caplog.records if "swapped" not in record.msg] == [
        (LOG.name, "snip-hf: 1 gated MLP runs as one where it is compiled: layers.0."),
        (LOG.name, "snip-hf: linears run one by one in layers.0: no down(silu(gate(x)) * up(x))."),
    ]


def test_what_was_put_around_the_forward_still_runs_when_the_run_has_ended() -> None:
    model, x = swapped(MLP(gated)), torch.randn(3, 16)
    expected = model.layers[0](x)
    put_gates(model, LOG)
    inner = model.layers[0].forward
    model.layers[0].forward = lambda x: inner(x)
    remove_gates(model)
    assert torch.equal(model.layers[0](x), expected)


def test_a_restored_model_has_its_own_forward() -> None:
    model = swapped(MLP(gated))
    put_gates(model, LOG)
    restore_model(model)
    assert vars(model.layers[0]).keys().isdisjoint({"forward", "snip_gate_up_down"})
    assert type(model.layers[0].a) is nn.Linear


def test_copies_run_by_themselves() -> None:
    model = tiny_llama(layers=1)
    convert_model(model, SnipConfig())
    for layer in snip_linears(model).values():
        layer.use_backend(TENSOR_SCALED)
    put_gates(model, LOG)
    ids = torch.arange(8)[None]
    expected = model(input_ids=ids).logits
    twin, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    mlp = twin.model.layers[0].mlp
    assert mlp.forward.__self__ is mlp and gate_up_down(mlp)[0] is mlp.gate_proj
    assert not is_gated(pickled.model.layers[0].mlp)
    for one in (twin, pickled):
        assert torch.equal(one(input_ids=ids).logits, expected)
    assert put_gates(pickled, LOG) == 1
    for one in (twin, pickled, pickle.loads(pickle.dumps(twin))):
        restore_model(one)
        assert "forward" not in vars(one.model.layers[0].mlp)
