"""Does a probe hold what is said of it, and does it stay within a bound?"""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_models import tiny_gpt_oss, tiny_qwen3_moe
from slow_cases import slow, slow_but
from small import convert_in_formats, text, tiny_llama, tiny_lm, tokens
from tiny_runs import FAST, SCHEDULE, history, noted_divergences
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaForCausalLM

from snip_hf import SnipConfig, SnipController, convert_model
from snip_hf.estimation import probe as probe_module
from snip_hf.estimation.batch import Batch
from snip_hf.estimation.memory import bounded, kept_tokens, measured_peak, probe_memory
from snip_hf.estimation.passes import run_pass
from snip_hf.estimation.probe import ProbeSettings, run_probe
from snip_hf.layers.state import snip_linears

MIB = 2**20


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


def llama(dtype: torch.dtype = torch.float32, frozen: str = "", **options: Any) -> LlamaForCausalLM:
    model = tiny_llama(hidden=128, layers=3, **options).to(dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and frozen in name))
    convert_model(model, SnipConfig())
    return model


CASES = {
    "fp32": {},
    "bf16": {"dtype": torch.bfloat16},
    "frozen block": {"frozen": "layers.1."},
    "frozen block in bf16": {"frozen": "layers.1.", "dtype": torch.bfloat16},
    "tied": {"tie_word_embeddings": True},
}


@pytest.mark.parametrize("case", slow_but(CASES, "bf16"))
@pytest.mark.parametrize(("probes", "kept"), [slow(1, None), (1, 128), slow(2, None), slow(3, 256)])
def test_a_probe_holds_what_is_predicted_beyond_the_activations_of_a_pass(
    case: str, probes: int, kept: int | None
) -> None:
    model, batch = llama(**CASES[case]), Batch.of(text(2, 256))
    predicted = probe_memory(model, probes, kept or 512)
    taken = peak_mib(lambda: probe(model, probes, kept, batch))
    # A bare pass has activations, and the copies and gradients that the prediction knows too.
    bare = peak_mib(lambda: run_pass(model, batch, {}))
    assert predicted < taken < predicted + bare


def test_the_prediction_is_exact_where_activations_and_the_share_of_one_layer_are_small() -> None:
    model = tiny_lm(hidden=128, inner=128, blocks=40)
    convert_model(model, SnipConfig())
    batch = Batch.of(tokens(1, 4))
    taken = peak_mib(lambda: probe(model, 1, None, batch))
    assert taken == pytest.approx(probe_memory(model, 1, 4), rel=0.03)


@pytest.mark.parametrize("probes", slow_but([1, 2, 3], 2))
def test_the_samples_take_what_is_predicted_of_them(probes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = llama(), Batch.of(text(2, 256))
    samples = probe_memory(model, probes, 384) - probe_memory(model, probes, 0)
    widths = {width for layer in snip_linears(model).values() for width in (layer.in_features, layer.out_features)}
    held = []
    combine = probe_module._combine

    def count(*args: Any) -> None:
        alive = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.ndim == 2]
        kept = [x for x in alive if x.shape[0] == 384 and x.shape[1] in widths]
        held.append(sum({x.data_ptr(): x.numel() * x.element_size() for x in kept}.values()) / MIB)
        combine(*args)

    monkeypatch.setattr(probe_module, "_combine", count)
    gc.collect()  # what the tests before left would be counted
    probe(model, probes, 384, batch)
    assert len(held) == probes
    assert held[-1] == max(held) == pytest.approx(samples)


def test_a_pass_without_directions_holds_one_side_only() -> None:
    model, batch = llama(), Batch.of(text(2, 256))
    one_side = probe_memory(model, 0, 512) - probe_memory(model, 0, 0)
    assert one_side == pytest.approx((probe_memory(model, 1, 512) - probe_memory(model, 1, 0)) / 2)
    taken = peak_mib(lambda: run_probe(model, batch, {}, ProbeSettings(probes=0)))
    assert (
        probe_memory(model, 0, 512) < taken < probe_memory(model, 0, 512) + peak_mib(lambda: run_pass(model, batch, {}))
    )


# ------------------------------------------------------------------------------------------------------- the bound


def test_a_bound_keeps_as_many_runs_of_128_tokens_as_fit(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "snip_hf")
    model = llama()
    for probes, bound in ((1, 11), (1, 25), (3, 25)):
        for wanted in (None, 512, 1 << 20):
            config = SnipConfig(probe_memory_mib=bound, probes=probes, probe_tokens=wanted)
            caplog.clear()
            kept = bounded(config, model).probe_tokens
            assert probe_memory(model, probes, kept) <= bound
            if kept == wanted:
                assert caplog.messages == []
            else:
                assert kept % 128 == 0 and probe_memory(model, probes, kept + 128) > bound
                assert caplog.messages == [
                    f"snip-hf: probe_memory_mib={bound} lets the probe keep at most {kept} tokens per layer "
                    f"(probe_tokens={wanted})."
                ]


def test_without_a_bound_nothing_changes() -> None:
    for wanted in (None, 200, 1024):
        config = SnipConfig(probe_tokens=wanted)
        assert bounded(config, llama()) is config


def test_a_bound_that_holds_not_even_one_tile_is_refused_with_what_it_takes() -> None:
    model = llama()
    needed = probe_memory(model, 1, 128)
    with pytest.raises(ValueError) as caught:
        SnipController(model, torch.optim.AdamW(model.parameters()), SnipConfig(probe_memory_mib=1, **FAST))
    assert str(caught.value) == (
        "probe_memory_mib=1 is too small: 128 tokens per layer and the FP32 copies of this model's weights take "
        f"{int(needed) + 1} MiB ({int(probe_memory(model, 1, 0)) + 1} without the tokens). Raise it to at least "
        f"{int(needed) + 1}, set it to None, or use a policy that needs no probe, such as policy='layer-position'."
    )
    bounded(SnipConfig(probe_memory_mib=int(needed) + 1), model)
    SnipController(model, None, SnipConfig(probe_memory_mib=1, policy="layer-position"))


def test_what_the_probe_keeps_of_a_micro_batch_is_what_is_said() -> None:
    model = tiny_lm()
    convert_model(model, SnipConfig())
    for wanted in (None, 128, 200, 256, 300):
        for length in (9, 100, 128, 129, 256, 300):
            config = SnipConfig(probe_tokens=wanted)
            found = run_probe(model, Batch.of(tokens(1, length)), {}, ProbeSettings(0, wanted))
            assert {sample.x.shape[0] for sample in found.layers.values()} == {kept_tokens(config, length)}


def test_the_controller_probes_within_the_bound_and_writes_the_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = noted_divergences(monkeypatch)
    model = tiny_llama(hidden=128, layers=3)
    optimizer = torch.optim.AdamW(model.parameters())
    config = SnipConfig(probe_memory_mib=10, probe_tokens=None, **SCHEDULE)
    controller = SnipController(model, optimizer, config, None, tmp_path)
    for step in range(1, 5):
        controller.capture(text(4, 256, step))
        model(**text(4, 256, step))["loss"].backward()
        controller.before_optimizer_step(step)
        optimizer.step()
        optimizer.zero_grad()
        controller.after_step(step)
    (line,) = history(tmp_path)[1:]
    kept = bounded(config, model).probe_tokens
    assert 128 <= kept < 1024 and len(calls) == 1
    assert line["memory_mib"] == {"predicted": pytest.approx(probe_memory(model, 1, kept)), "measured": None}
    assert line["memory_mib"]["predicted"] <= 10
    assert history(tmp_path)[0]["config"]["probe_tokens"] is None


@pytest.mark.parametrize(("asked", "tokens"), [slow(None, 1024), (700, 512), slow(128, 256)])
def test_the_controller_probes_a_part_of_the_micro_batch_and_predicts_what_it_keeps_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: int | None, tokens: int
) -> None:
    calls = noted_divergences(monkeypatch)
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters())
    config = SnipConfig(probe_tokens=None, probe_batch_tokens=asked, **{**SCHEDULE, "first_refresh": 1})
    controller = SnipController(model, optimizer, config, None, tmp_path)
    for step in range(1, 4):
        controller.capture(text(4, 256, step))
        model(**text(4, 256, step))["loss"].backward()
        controller.before_optimizer_step(step)
        optimizer.step()
        optimizer.zero_grad()
        controller.after_step(step)
    (line,) = history(tmp_path)[1:]
    assert line["reason"] is None and len(calls) == 1
    assert line["memory_mib"]["predicted"] == pytest.approx(probe_memory(model, 1, tokens))
    # Of four sequences, spread evenly: all, the first and the third, or the first.
    part = {key: value[:: 1024 // tokens] for key, value in text(4, 256, 1).items()}
    with torch.no_grad():
        assert line["loss"] == pytest.approx(float(tiny_llama()(**part).loss), rel=1e-4)


def test_on_a_cpu_nothing_is_measured() -> None:
    with measured_peak(torch.ones(2)) as peak:
        torch.ones(1000)
    assert peak == [None]


@pytest.mark.gpu
def test_on_cuda_the_peak_is_measured_and_the_prediction_is_a_bound_beyond_the_activations() -> None:
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
        predicted = probe_memory(model, probes, kept or 2048)
        assert predicted < taken[0] < predicted + bare[0]
        with measured_peak(model.lm_head.weight) as again:
            run_pass(model, batch, {})
        assert again == [None]  # below the peak before, which is left alone
        assert torch.cuda.max_memory_allocated() > taken[0] * MIB


@pytest.mark.parametrize("build", [tiny_qwen3_moe, tiny_gpt_oss])
def test_a_token_of_experts_counts_with_all_its_rows(build: Any) -> None:
    """What samples of a single pass hold is what the figure grows by with their tokens."""
    model = build(0)
    convert_model(model, SnipConfig())
    samples = run_probe(model, Batch.of(text(1, 128)), {}, ProbeSettings(0, None)).layers.values()
    held = sum(4 * (sample.x.numel() + sample.grad_output.numel()) for sample in samples)
    found = probe_memory(model, 0, 128) - probe_memory(model, 0, 0)
    assert found * MIB == pytest.approx(held)
