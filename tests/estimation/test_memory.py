"""A probe holds the predicted memory, stays within a bound, and gives the same bits with savings."""

from __future__ import annotations

import copy
import gc
import logging
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import fp4_config
from models import batch as words
from models import build
from own_loop import Loop
from peft import PrefixTuningConfig, get_peft_model
from same_samples import assert_same_samples
from slow_cases import slow
from small import checkpoint_activations, convert_in_formats, text, tiny_llama, tiny_lm, tokens
from tiny_runs import SCHEDULE, history, noted_divergences
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from snip_hf import convert_model, estimate_divergence
from snip_hf.estimation import divergence
from snip_hf.estimation.batch import Batch
from snip_hf.estimation.memory import (
    MIB,
    NO_SAVINGS,
    PassSizes,
    Savings,
    find_savings,
    kept_tokens,
    measured_peak,
    step_memory,
)
from snip_hf.estimation.passes import run_pass
from snip_hf.estimation.probe import Probe, ProbeSettings, run_probe
from snip_hf.layers.layer import SnipLayer
from snip_hf.layers.state import block_of, snip_linears


def halved(z: torch.Tensor) -> torch.Tensor:
    return z / 2


def probe(model: nn.Module, probes: int, kept: int | None, batch: Batch) -> None:
    run_probe(model, batch, dict.fromkeys(trained(model), halved), ProbeSettings(probes, kept))


def trained(model: nn.Module) -> list[str]:
    return [name for name, layer in snip_linears(model).items() if layer.weight.requires_grad]


def peak_mib(function: Any) -> float:
    """The most that is allocated at once on the CPU while a function runs, beyond what is there before.

    Taken from the record of torch's allocator that the profiler keeps.
    """
    function()  # what is allocated once and kept is allocated here
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        function()
    changes = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most / MIB


def test_low_precision_weights_that_do_not_move_are_not_copied() -> None:
    model, batch = tiny_llama(hidden=128, layers=3).to(torch.bfloat16), Batch.of(text(2, 20))
    wide = copy.deepcopy(model).float()
    for each in (model, wide):
        convert_model(each, fp4_config())
    still = ProbeSettings(0, 128)
    taken, least = (peak_mib(partial(run_probe, one, batch, {}, still)) for one in (model, wide))
    swapped = sum(layer.weight.numel() for layer in snip_linears(model).values())
    assert taken - least < 0.25 * 4 * swapped / MIB
    one, other = (run_probe(each, batch, {}, still) for each in (model, wide))
    assert one.loss == other.loss
    assert_same_samples(one.layers, other.layers)


def test_a_probe_keeps_as_many_tokens_as_predicted() -> None:
    model = tiny_lm()
    convert_model(model, fp4_config())
    for wanted in (None, 128, 200, 256, 300):
        for length in (9, 100, 128, 129, 256, 300):
            config = fp4_config(probe_tokens=wanted)
            found = run_probe(model, Batch.of(tokens(1, length)), {}, ProbeSettings(0, wanted))
            assert {sample.x.shape[0] for sample in found.layers.values()} == {kept_tokens(config, length)}


class LongBatches(Loop):
    def batch(self, index: int) -> dict[str, torch.Tensor]:
        return text(4, 256, index)


def test_the_controller_probes_a_part_of_the_micro_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = noted_divergences(monkeypatch)
    config = fp4_config(probe_tokens=None, probe_batch_tokens=700, **{**SCHEDULE, "first_refresh": 1})
    LongBatches(config, tmp_path, dropout=0.0).run(3)
    (line,) = history(tmp_path)[1:]
    assert line["reason"] is None and len(calls) == 1
    # Of four sequences of 256 tokens, the first and the third.
    part = {key: value[::2] for key, value in text(4, 256, 1).items()}
    with torch.no_grad():
        assert line["loss"] == pytest.approx(float(tiny_llama(hidden=32)(**part).loss), rel=1e-4)


def test_on_a_cpu_nothing_is_measured() -> None:
    with measured_peak(torch.ones(2)) as peak:
        torch.ones(1000)
    assert peak == [None]


@pytest.mark.gpu
def test_on_cuda_the_peak_is_measured_and_left_alone() -> None:
    model = tiny_llama(hidden=1024, layers=8).cuda()
    convert_in_formats(model)
    batch = Batch.of({key: value.cuda() for key, value in text(8, 256).items()})
    gc.collect()  # what the tests before left would be freed within a peak
    for probes, kept in ((1, 256), (1, None), (2, 1024)):
        probe(model, probes, kept, batch)  # what cuBLAS keeps for itself
        torch.cuda.reset_peak_memory_stats()
        with measured_peak(model.lm_head.weight) as bare:
            run_pass(model, batch, {})
        torch.cuda.reset_peak_memory_stats()
        with measured_peak(model.lm_head.weight) as taken:
            probe(model, probes, kept, batch)
        assert taken[0] > bare[0]
        with measured_peak(model.lm_head.weight) as again:
            run_pass(model, batch, {})
        assert again == [None]  # below the peak before, which is left alone
        assert torch.cuda.max_memory_allocated() > taken[0] * MIB


# -------------------------------------------------------------------------------------------------------- savings


SHAPES = {"8B": (4096, 14336, 8, 32, 8), "1.1B": (2048, 5632, 22, 32, 4)}


def probe_with(model: nn.Module, batch: Any, savings: Savings, probes: int = 1) -> Probe:
    settings = ProbeSettings(probes, 128, savings=savings)
    return run_probe(model, batch, dict.fromkeys(snip_linears(model), halved), settings)


def everything(model: nn.Module) -> Savings:
    layers = snip_linears(model)
    return Savings(tuple(dict.fromkeys(map(block_of, layers))), frozenset(layers))


def assert_same(one: Probe, other: Probe) -> None:
    assert one.loss == other.loss
    assert_same_samples(one.layers, other.layers)
    assert all(sample.energies == other.layers[name].energies for name, sample in one.layers.items())
    assert all(sample.grad_output_dot[0].any() for sample in one.layers.values())


def with_shared_weight() -> nn.Module:
    model = tiny_lm()
    model.layers[1].up.weight = model.layers[0].up.weight
    return model


MODELS = {
    "a weight of two layers": with_shared_weight,
    "dropout": lambda: tiny_llama(hidden=32, attention_dropout=0.1),
    "bfloat16": lambda: tiny_llama(hidden=32).to(torch.bfloat16),
    "biases": lambda: build("gpt-neox"),
    "a cache of keys": lambda: build("llama"),
    "weights read without a call": lambda: build("mamba"),
    "a prefix of PEFT": lambda: get_peft_model(
        build("llama"), PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    ),
    "checkpointed by itself": lambda: tiny_lm(dropout=0.1, reentrant=False),
    "checkpointed by itself, reentrant": lambda: tiny_lm(dropout=0.1, reentrant=True),
}


@pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning")  # PEFT's use of transformers
@pytest.mark.parametrize("case", MODELS)
def test_blocks_that_run_twice_and_weights_that_are_made_again_change_no_bit(case: str) -> None:
    model = MODELS[case]().train()
    model_config = getattr(model, "config", None)
    if model_config is not None:
        model_config.use_cache = case == "a cache of keys"
    batch = Batch.of(tokens(2, 9) if model_config is None else words(2, 12))
    convert_model(model, fp4_config())
    plain, frugal = (probe_with(model, batch, savings, 2) for savings in (NO_SAVINGS, everything(model)))
    assert_same(plain, frugal)
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, slow(torch.optim.SGD), torch.optim.Muon, slow(None)])
def test_a_small_bound_gives_the_same_divergences(
    optimizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "snip_hf")
    model, batch = tiny_llama(hidden=32).train(), text(2, 40)
    convert_model(model, fp4_config())
    stepped = None
    if optimizer is not None:
        matrices = [layer.weight for layer in snip_linears(model).values()]
        stepped = optimizer(matrices, lr=1e-3)
        for _ in range(2):
            model(**batch).loss.backward()
            stepped.step()
            stepped.zero_grad()
    used: list[Savings] = []
    find = divergence.find_savings
    monkeypatch.setattr(divergence, "find_savings", lambda *args: used.append(find(*args)) or used[-1])
    tables = []
    for bound in (1024 * MIB, 0):
        monkeypatch.setattr(divergence, "step_memory", lambda *args, bound=bound: bound)
        tables.append(estimate_divergence(model, batch, stepped))
    assert [astuple(row) for row in tables[0].rows] == [astuple(row) for row in tables[1].rows]
    assert used[0] == NO_SAVINGS and len(used[1].recomputed) == len({block_of(name) for name in snip_linears(model)})
    assert caplog.messages[-1] == (
        "snip-hf: to stay within 0 MiB, the probe recomputes the activations of "
        f"{len(used[1].recomputed)} blocks and the moved weights of {len(used[1].remade)} layers."
    )
    # Muon's direction is found by autograd, which does not work inside of a pass.
    assert bool(used[1].remade) is (optimizer is not torch.optim.Muon)


def test_recomputed_parts_are_not_held() -> None:
    model = tiny_llama(hidden=64, layers=4)
    convert_model(model, fp4_config())
    batch = Batch.of(text(2, 256))
    plain, frugal = (
        peak_mib(partial(probe_with, model, batch, savings)) for savings in (NO_SAVINGS, everything(model))
    )
    assert frugal < 0.65 * plain


# --------------------------------------------------------------------------------------------------------- the bound


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
    convert_model(model, fp4_config(backend="emulated"))
    return snip_linears(model)


@pytest.mark.parametrize(("shape", "gib", "recomputed", "remade"), [("8B", 11.7, 8, 56), ("1.1B", 17.8, 4, 0)])
def test_the_step_memory_follows_from_model_and_micro_batch(
    shape: str, gib: float, recomputed: int, remade: int
) -> None:
    model = Shaped(shape)
    layers = swapped(model)
    bound = step_memory(model, layers, 16384)
    assert bound / 2**30 == pytest.approx(gib, abs=0.05)
    savings = find_savings(model, layers, list(layers), bound, PassSizes(tokens=4096, sampled=1024, probes=1))
    assert savings.recomputed == tuple(f"model.model.layers.{index}" for index in range(recomputed))
    assert len(savings.remade) == remade
    assert find_savings(model, layers, list(layers), 40 * 2**30, PassSizes(4096, 1024, 1)) == NO_SAVINGS
    no_derivatives = find_savings(model, layers, list(layers), 8 * 2**30, PassSizes(4096, 1024, 0))
    assert no_derivatives.recomputed and not no_derivatives.remade
    # Without memory, everything is done twice.
    assert find_savings(model, layers, list(layers), 0.0, PassSizes(4096, 1024, 1)) == everything(model)


def test_parameters_that_move_beside_the_swapped_weights_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    model, found = Shaped("1.1B"), list[int]()
    layers = swapped(model)
    bound, beside = (
        step_memory(model, layers, 16384),
        [model.model.model.embed_tokens.weight, model.model.lm_head.weight],
    )
    alone, more = (
        find_savings(model, layers, [], bound, PassSizes(4096, 1024, 1), others).recomputed for others in ([], beside)
    )
    assert len(alone) < len(more)

    def counted(*args: Any) -> Savings:
        found.append(sum(parameter.numel() for parameter in args[-1]))
        return NO_SAVINGS

    monkeypatch.setattr(divergence, "find_savings", counted)
    for objective in ("additive", "gradients"):
        estimate_divergence(tiny_llama(layers=1), text(2, 20), config=fp4_config(objective=objective))
    # Embeddings, head and three norms.
    assert found == [0, 2 * 128 * 64 + 3 * 64]


def test_a_small_model_holds_everything() -> None:
    model = tiny_llama(hidden=128, layers=3)
    convert_model(model, fp4_config())
    layers = snip_linears(model)
    assert step_memory(model, layers, 512) == 1024 * MIB
    assert find_savings(model, layers, list(layers), 1024 * MIB, PassSizes(512, 512, 1)) == NO_SAVINGS


def test_a_model_that_recomputes_its_blocks_only_makes_weights_again() -> None:
    model = tiny_llama(hidden=128, layers=3)
    checkpoint_activations(model, reentrant=False)
    convert_model(model.train(), fp4_config())
    layers = snip_linears(model)
    savings = find_savings(model, layers, list(layers), 0.0, PassSizes(512, 512, 1))
    assert savings == Savings((), frozenset(layers))
    batch = Batch.of(text(2, 20))
    assert_same(probe_with(model, batch, NO_SAVINGS), probe_with(model, batch, savings))


@pytest.mark.gpu
def test_on_cuda_passes_stay_within_their_bound() -> None:
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
    convert_model(model, fp4_config())
    layers = snip_linears(model)

    def taken(savings: Savings) -> float:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run_probe(model, batch, dict.fromkeys(layers, halved), ProbeSettings(1, 1024, savings=savings))
        return (torch.cuda.max_memory_allocated() - before) / 2**30

    passes = PassSizes(tokens=4096, sampled=1024, probes=1)
    whole = taken(NO_SAVINGS)
    for gib in (7, 6, 5):
        savings = find_savings(model, layers, list(layers), gib * 2**30, passes)
        assert taken(savings) < min(whole, 1.1 * gib)
