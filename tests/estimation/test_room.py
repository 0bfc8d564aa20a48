"""Do passes that hold less find the same numbers, to the bit, and do they hold what is said?"""

from __future__ import annotations

import gc
import logging
from dataclasses import astuple
from functools import partial
from typing import Any

import pytest
import torch
from models import batch as words
from models import build
from slow_cases import slow
from small import checkpoint_activations, text, tiny_llama, tiny_lm, tokens
from test_memory import peak_mib
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from snip_hf import SnipConfig, convert_model, estimate_divergence
from snip_hf.estimation import divergence
from snip_hf.estimation.batch import Batch
from snip_hf.estimation.probe import Probe, ProbeSettings, run_probe
from snip_hf.estimation.room import MIB, NO_THRIFT, Passes, Thrift, default_room, find_thrift
from snip_hf.layers.layer import SnipLayer
from snip_hf.layers.state import block_of, snip_linears

SHAPES = {"8B": (4096, 14336, 8, 32, 8), "1.1B": (2048, 5632, 22, 32, 4)}


def halved(z: Tensor) -> Tensor:
    return z / 2


def probe(model: nn.Module, batch: Any, thrift: Thrift, probes: int = 1) -> Probe:
    settings = ProbeSettings(probes, 128, thrift=thrift)
    return run_probe(model, batch, dict.fromkeys(snip_linears(model), halved), settings)


def everything(model: nn.Module) -> Thrift:
    layers = snip_linears(model)
    return Thrift(tuple(dict.fromkeys(map(block_of, layers))), frozenset(layers))


def assert_same(one: Probe, other: Probe) -> None:
    assert one.loss == other.loss and one.layers.keys() == other.layers.keys()
    for name, sample in one.layers.items():
        also = other.layers[name]
        assert sample.energies == also.energies
        for left, right in ((sample.x, also.x), (sample.grad_output, also.grad_output)):
            assert torch.equal(left, right)
        for left, right in zip(sample.x_dot + sample.grad_output_dot, also.x_dot + also.grad_output_dot, strict=True):
            assert torch.equal(left, right)
    assert all(sample.grad_output_dot[0].any() for sample in one.layers.values())


MODELS = {
    "dropout": lambda: tiny_llama(hidden=32, attention_dropout=0.1),
    "bfloat16": lambda: tiny_llama(hidden=32).to(torch.bfloat16),
    "biases": lambda: build("gpt-neox"),
    "a cache of keys": lambda: build("llama"),
    "checkpointed by itself": lambda: tiny_lm(dropout=0.1, reentrant=False),
    "checkpointed by itself, reentrant": lambda: tiny_lm(dropout=0.1, reentrant=True),
}


@pytest.mark.parametrize("case", MODELS)
def test_blocks_that_run_twice_and_weights_that_are_made_again_change_no_bit(case: str) -> None:
    model = MODELS[case]().train()
    model_config = getattr(model, "config", None)
    if model_config is not None:
        model_config.use_cache = case == "a cache of keys"
    batch = Batch.of(tokens(2, 9) if model_config is None else words(2, 12))
    convert_model(model, SnipConfig())
    plain, thrifty = (probe(model, batch, thrift, 2) for thrift in (NO_THRIFT, everything(model)))
    assert_same(plain, thrifty)
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, slow(torch.optim.SGD), torch.optim.Muon, slow(None)])
def test_a_small_bound_gives_the_same_divergences(
    optimizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "snip_hf")
    model, batch = tiny_llama(hidden=32).train(), text(2, 40)
    convert_model(model, SnipConfig())
    stepped = None
    if optimizer is not None:
        matrices = [layer.weight for layer in snip_linears(model).values()]
        stepped = optimizer(matrices, lr=1e-3)
        for _ in range(2):
            model(**batch).loss.backward()
            stepped.step()
            stepped.zero_grad()
    used: list[Thrift] = []
    find = divergence.find_thrift

    def noted(*args: Any) -> Thrift:
        # The least that a bound can be is larger than this model.
        used.append(find(*args[:3], 0.0 if args[3] == MIB else args[3], args[4]))
        return used[-1]

    monkeypatch.setattr(divergence, "find_thrift", noted)
    tables = [estimate_divergence(model, batch, stepped, SnipConfig(probe_memory_mib=bound)) for bound in (None, 1)]
    assert [astuple(row) for row in tables[0].rows] == [astuple(row) for row in tables[1].rows]
    assert used[0] == NO_THRIFT and len(used[1].recomputed) == len({block_of(name) for name in snip_linears(model)})
    assert caplog.messages[-1] == (
        "snip-hf: to stay within 1 MiB, the probe computes the activations of "
        f"{len(used[1].recomputed)} blocks and the moved weights of {len(used[1].remade)} layers twice."
    )
    # Muon's direction is found by autograd, which does not work inside of a pass.
    assert bool(used[1].remade) is (optimizer is not torch.optim.Muon)


def test_what_is_done_twice_is_not_held() -> None:
    model = tiny_llama(hidden=64, layers=4)
    convert_model(model, SnipConfig())
    batch = Batch.of(text(2, 256))
    plain, thrifty = (peak_mib(partial(probe, model, batch, thrift)) for thrift in (NO_THRIFT, everything(model)))
    assert thrifty < 0.65 * plain


# --------------------------------------------------------------------------------------------------------- the room


class Shaped(nn.Module):
    """A Llama of a large shape without memory, whose swapped layers are known by their shapes."""

    def __init__(self, shape: str) -> None:
        super().__init__()
        hidden, inner, layers, heads, key_heads = SHAPES[shape]
        sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": 32000}
        config = LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=key_heads)
        with torch.device("meta"):
            self.model = LlamaForCausalLM(config)

    def get_output_embeddings(self) -> nn.Module:
        return self.model.lm_head


def swapped(model: nn.Module) -> dict[str, SnipLayer]:
    convert_model(model, SnipConfig(backend="emulated"))
    return snip_linears(model)


@pytest.mark.parametrize(("shape", "gib", "recomputed", "remade"), [("8B", 11.7, 6, 6), ("1.1B", 17.8, 7, 0)])
def test_the_default_room_follows_from_model_and_micro_batch(
    shape: str, gib: float, recomputed: int, remade: int
) -> None:
    model = Shaped(shape)
    layers = swapped(model)
    room = default_room(model, layers, 16384)
    assert room / 2**30 == pytest.approx(gib, abs=0.05)
    thrift = find_thrift(model, layers, list(layers), room, Passes(tokens=4096, kept=1024, probes=1))
    assert thrift.recomputed == tuple(f"model.model.layers.{index}" for index in range(recomputed))
    assert {block_of(name) for name in thrift.remade} == set(thrift.recomputed[:remade])
    assert len(thrift.remade) == 7 * remade
    assert find_thrift(model, layers, list(layers), 40 * 2**30, Passes(4096, 1024, 1)) == NO_THRIFT
    no_derivatives = find_thrift(model, layers, list(layers), 8 * 2**30, Passes(4096, 1024, 0))
    assert no_derivatives.recomputed and not no_derivatives.remade
    # Without room, everything is done twice.
    assert find_thrift(model, layers, list(layers), 0.0, Passes(4096, 1024, 1)) == everything(model)


def test_a_small_model_holds_everything() -> None:
    model = tiny_llama(hidden=128, layers=3)
    convert_model(model, SnipConfig())
    layers = snip_linears(model)
    assert default_room(model, layers, 512) == 1024 * MIB
    assert find_thrift(model, layers, list(layers), 1024 * MIB, Passes(512, 512, 1)) == NO_THRIFT


def test_a_model_that_recomputes_its_blocks_only_makes_weights_again() -> None:
    model = tiny_llama(hidden=128, layers=3)
    checkpoint_activations(model, reentrant=False)
    convert_model(model.train(), SnipConfig())
    layers = snip_linears(model)
    thrift = find_thrift(model, layers, list(layers), 0.0, Passes(512, 512, 1))
    assert thrift == Thrift((), frozenset(layers))
    batch = Batch.of(text(2, 20))
    assert_same(probe(model, batch, NO_THRIFT), probe(model, batch, thrift))


@pytest.mark.gpu
def test_on_cuda_passes_stay_within_the_room_that_they_get() -> None:
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=8,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=32000,
        use_cache=False,
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).train()
        batch = Batch.of(dict.fromkeys(("input_ids", "labels"), torch.randint(32000, (2, 2048))))
    convert_model(model, SnipConfig())
    layers = snip_linears(model)

    def taken(thrift: Thrift) -> float:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run_probe(model, batch, dict.fromkeys(layers, halved), ProbeSettings(1, 1024, thrift=thrift))
        return (torch.cuda.max_memory_allocated() - before) / 2**30

    passes = Passes(tokens=4096, kept=1024, probes=1)
    whole = taken(NO_THRIFT)
    for gib in (7, 6, 5):
        thrift = find_thrift(model, layers, list(layers), gib * 2**30, passes)
        assert taken(thrift) < min(whole, 1.1 * gib)
