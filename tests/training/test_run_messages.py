"""The log describes the beginning and end of a run, the expected speed and missing conditions."""

from __future__ import annotations

import gzip
import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import TorchDynamoPlugin
from configs import fp4_config
from own_loop import Loop
from small import text, tiny_llama
from thread_ranks import on_ranks
from tiny_runs import FAST, SCHEDULE, train
from torch import nn
from torch.distributed.fsdp import fully_shard

from snip_hf import SnipController, convert_model
from snip_hf.integrations import compilation
from snip_hf.kernels.backend import BACKENDS
from snip_hf.kernels.emulated import EMULATED, Emulated
from snip_hf.layers.state import snip_linears
from snip_hf.parallel.ranks import Ranks
from snip_hf.policies.target import describe_target
from snip_hf.training import messages, swapped_layers
from snip_hf.training.messages import AS_A_WHOLE, SpeedForecast, how_compiled
from snip_hf.training.micro_batches import tokens_of

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Makes the emulation a backend that was measured at the size of the tests' models and at twice of it, and which
    pays there from 4,096 and 1,024 tokens on."""
    caplog.set_level(logging.INFO, "snip_hf")
    monkeypatch.setattr(Emulated, "measured_speeds", {32: (1.1, 1.2), 64: (1.3, 1.4)}, raising=False)
    monkeypatch.setattr(messages, "LEAST_WORK", 2**22)
    return caplog


def said(model: nn.Module, tokens: int | None) -> Any:
    log = logging.getLogger("snip_hf.test")
    convert_model(model, fp4_config())
    found = SpeedForecast("emulated", model, log)
    found.make(how_compiled(model), tokens)
    return found


def texts(records: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(one.levelname, one.getMessage()) for one in records.records if "docs/hopper.md" in one.getMessage()]


def test_a_compiled_model_of_enough_tokens_is_told_its_speed(measured: pytest.LogCaptureFixture) -> None:
    model = tiny_llama(hidden=64)
    for layer in model.model.layers:
        layer.compile(backend="eager")
    assert said(model, 1024).text == (
        "compiled by regions: at 75% in 4 bits and hidden size 64 runs on H100s and H200s had 1.30 to 1.40 times the "
        "speed of compiled BF16 (docs/hopper.md)"
    )
    assert texts(measured) == []


def test_a_frozen_model_is_told_the_speed_of_adapters(
    measured: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Emulated, "adapter_speeds", {64: (0.9, 0.9)}, raising=False)
    model = tiny_llama(hidden=64).requires_grad_(False)
    for layer in model.model.layers:
        layer.compile(backend="eager")
    assert said(model, 1024).text == (
        "compiled by regions: at 75% in 4 bits and hidden size 64 LoRA on an H200 had 0.90 times the speed of compiled "
        "BF16 (docs/adapters.md)"
    )
    assert texts(measured) == []


def test_a_sharded_model_is_told_the_speed_under_fsdp2(
    measured: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, alone: None
) -> None:
    monkeypatch.setattr(Emulated, "sharded_speeds", {64: (0.8, 1.1)}, raising=False)
    model = tiny_llama(hidden=64)
    convert_model(model, fp4_config())
    for layer in model.model.layers:
        fully_shard(layer)
        layer.compile(backend="eager")
    assert said(model, 1024).text == (
        "compiled by regions: at 75% in 4 bits and hidden size 64 FSDP2 on two H200s had 0.80 to 1.10 times the speed "
        "of compiled BF16 (docs/distributed.md)"
    )
    assert texts(measured) == []


@pytest.mark.parametrize("mixed_precision", [None, "no", "bf16"])
def test_a_model_that_runs_emulated_for_its_dtype_is_promised_no_speed(
    mixed_precision: str | None, measured: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Emulated, "notice", type(BACKENDS["tensor-scaled"]).notice)
    model = tiny_llama(hidden=64)
    convert_model(model, fp4_config())
    for layer in model.model.layers:
        layer.compile(backend="eager")
    found = SpeedForecast("emulated", model, logging.getLogger("snip_hf.test"), mixed_precision)
    found.make(how_compiled(model), 1024)
    assert found.text is not None and found.text.startswith("slower than BF16") is (mixed_precision == "no")


def test_missing_conditions_are_a_warning(measured: pytest.LogCaptureFixture) -> None:
    said(tiny_llama(hidden=16), 512)
    said(tiny_llama(hidden=64), 1023)
    lacking = (
        "snip-hf: backend emulated will not reach the speed that was measured (docs/hopper.md): the model is not "
        "compiled, so launches outweigh faster products: set torch_compile=True in TrainingArguments, or call "
        "layer.compile() for each decoder layer; "
    )
    hidden = (
        "below a hidden size of 32 quantization outweighs faster products, and this model has 16: BF16 is likely to be "
        "faster."
    )
    tokens = (
        "micro-batches of 1,023 tokens are short at this hidden size: take longer or more sequences, with at least "
        "1,024 tokens; below that BF16 is likely to be faster."
    )
    assert texts(measured) == [("WARNING", lacking + hidden), ("WARNING", lacking + tokens)]


def test_the_least_number_of_tokens_is_between_those_that_were_measured() -> None:
    measured = RESULTS / "speed_crossing.jsonl.gz"
    speeds = {
        (line["hidden"], line["tokens"]): line["speedup"]
        for line in map(json.loads, gzip.decompress(measured.read_bytes()).splitlines())
        if line["recipe"] != "BF16" and line["hidden"] >= 2048
    }
    for (hidden, tokens), speed in speeds.items():
        assert (tokens * hidden**2 > messages.LEAST_WORK) is (speed > 1)
    assert min(speeds.values()) < 1 < max(speeds.values())


def test_the_speeds_that_a_forecast_names_cover_those_that_were_measured() -> None:
    # At 75%, 8 x 2,048 tokens, through the Trainer, relative to the BF16 run before. Kept lines are of H200s.
    sizes, usual = {"TinyLlama-1.1B": 2048, "8B, 8 layers": 4096}, "8 x 2,048 tokens"
    found: dict[int, list[float]] = {2048: [], 4096: []}
    for name in ("combinations", "delayed", "first", "graphs", "saliency", "shares", "trainer"):
        bf16: dict[str, float] = {}
        for line in map(json.loads, gzip.decompress((RESULTS / f"speed_{name}.jsonl.gz").read_bytes()).splitlines()):
            model = line.get("model", "TinyLlama-1.1B")
            if model not in sizes or line.get("case", usual) != usual or "rows" in line or "step_ms" not in line:
                continue
            if line["recipe"] == "BF16":
                bf16[model] = line["step_ms"]
            elif line["recipe"] == "snip-hf 75%" and line["formats"][0] == "mxfp4":
                found[sizes[model]].append(bf16[model] / line["step_ms"])
    for hidden, (lowest, highest) in BACKENDS["tensor-scaled"].measured_speeds.items():
        assert lowest <= round(min(found[hidden]), 2) and round(max(found[hidden]), 2) <= highest


def test_below_the_least_size_the_nearest_speeds_that_were_measured_are_named() -> None:
    backend = BACKENDS["tensor-scaled"]
    measured = RESULTS / "speed_crossing.jsonl.gz"
    for line in map(json.loads, gzip.decompress(measured.read_bytes()).splitlines()):
        if line["recipe"] != "BF16" and line["hidden"] in backend.layer_speeds:
            assert backend.layer_speeds[line["hidden"]][line["tokens"]] == round(line["speedup"], 2)
    for hidden in 1280, 1024, 768:
        assert messages.describe_slowdown(backend, hidden) == (
            "BF16 is likely to be faster (one layer of hidden size 1,024 on an H200, times BF16's speed: 0.63 with "
            "2,048 tokens, 0.53 with 8,192 tokens, 1.06 with 32,768 tokens)"
        )


def test_a_backend_that_was_not_measured_promises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "snip_hf")
    assert not EMULATED.measured_speeds
    said(tiny_llama(hidden=16), 512)
    assert texts(caplog) == []


@pytest.mark.parametrize(("requested", "device"), [("auto", "cuda"), ("auto", "cpu"), ("emulated", "cuda")])
def test_emulation_on_a_gpu_that_nobody_asked_for_is_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, requested: str, device: str
) -> None:
    caplog.set_level(logging.INFO, "snip_hf")
    monkeypatch.setattr(swapped_layers, "compute_device", lambda weight: torch.device(device))
    monkeypatch.setattr(swapped_layers, "why_emulated", lambda device, formats: "no kernels")
    model, config = tiny_llama(hidden=16), fp4_config(backend=requested)
    convert_model(model, config)
    swapped_layers.use_backend(snip_linears(model), EMULATED, None, config, logging.getLogger("snip_hf.test"))
    is_warning = (requested, device) == ("auto", "cuda")
    reason = "no kernels" if requested == "auto" else "asked for by backend='emulated'"
    assert [(one.levelname, one.getMessage()) for one in caplog.records[1:]] == [
        (
            "WARNING" if is_warning else "INFO",
            f"snip-hf: backend emulated: the numerics of the formats, slower than BF16 ({reason}).",
        )
    ]


def test_a_run_says_it_when_its_first_micro_batch_has_run(measured: pytest.LogCaptureFixture) -> None:
    model = tiny_llama(hidden=32)
    controller = SnipController(model, torch.optim.AdamW(model.parameters()), fp4_config(**FAST))
    assert texts(measured) == []
    controller.capture(text(2, 8))
    ((level, message),) = texts(measured)
    assert level == "WARNING" and "micro-batches of 16 tokens are short" in message
    controller.close()


def test_modules_show_how_a_model_is_compiled() -> None:
    plain, layers = tiny_llama(hidden=16), tiny_llama(hidden=16)
    layers.model.layers[0].compile(backend="eager")
    assert how_compiled(plain) is None and how_compiled(layers) == "compiled by regions"
    assert how_compiled(torch.compile(plain, backend="eager")) == AS_A_WHOLE


@pytest.mark.parametrize(
    ("regions", "backend", "expected"),
    [(True, "eager", "compiled by regions"), (False, "eager", AS_A_WHOLE), (True, "no", None), (False, "no", None)],
)
def test_a_loop_says_how_accelerate_compiles_what_it_prepares(
    regions: bool, backend: str, expected: str | None
) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = TorchDynamoPlugin(backend=backend, use_regional_compilation=regions)
    accelerator = Accelerator(cpu=True, dynamo_plugin=plugin)
    model = tiny_llama(hidden=16)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    controller = SnipController(model, optimizer, fp4_config(**FAST), accelerator)
    assert controller.compiled == expected
    controller.close()
    AcceleratorState._reset_state(reset_partial_state=True)


def test_tokens_are_counted_if_they_can_be() -> None:
    assert (tokens_of(text(2, 8)), tokens_of({"input_ids": torch.ones(3, 5)}), tokens_of({"labels": [1]})) == (
        16,
        15,
        None,
    )


# --------------------------------------------------------------------------------------------------- the Trainer


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_trainer_compiles_by_regions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(compilation.REGIONS, raising=False)
    monkeypatch.setattr(Emulated, "is_emulation", False)
    torch._dynamo.reset()
    config = fp4_config(policy="uniform-fp4", backend="emulated")
    run = train(tmp_path, config, max_steps=1, torch_compile=True, torch_compile_backend="eager")
    torch._dynamo.reset()
    message = "snip-hf: the decoder layers are compiled one by one; "
    assert any(text.startswith(message) for text in measured.messages)
    assert run.callback is not None and run.callback.controller is not None
    assert run.callback.controller.compiled == "compiled by regions"
    compiled = [module for module in run.trainer.model_wrapped.modules() if type(module).__name__ == "OptimizedModule"]
    assert len(compiled) > 1


def begin_and_end(loop: Loop, caplog: pytest.LogCaptureFixture, until: int) -> list[str]:
    """The messages of a run as a whole."""
    caplog.set_level(logging.INFO, "snip_hf")
    loop.run(until)
    assert loop.controller is not None
    for _ in range(2):
        loop.controller.close()
    whole = ("snip-hf: training under SNIP.", "snip-hf: ended after")
    return [message for message in caplog.messages if message.startswith(whole)]


def lines(message: str) -> dict[str, str]:
    """Name -> text of the first message."""
    return {line.split()[0]: line.split(maxsplit=1)[1] for line in message.splitlines()[1:]}


def test_a_run_says_what_it_begins_with_and_what_it_came_to_once(caplog: pytest.LogCaptureFixture) -> None:
    begin, end = begin_and_end(Loop(), caplog, until=8)
    assert list(lines(begin)) == ["plan", "target", "formats", "backend", "coverage", "refreshes", "speed"]
    assert lines(begin)["plan"].startswith("policy snip, 0.0% of the linear FLOPs in FP4")
    assert lines(begin)["refreshes"].endswith("every 4 steps; a plan is applied 2 steps later; until then FP8")
    assert end.startswith("snip-hf: ended after step 8: 75.4% of the linear FLOPs in FP4. New plans")
    assert ". New plans: 2; refreshes that kept the plan: 0. Probes took " in end


def test_a_run_without_a_probe_tells_no_times_of_probes_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    _, end = begin_and_end(Loop(fp4_config(policy="uniform-fp8")), caplog, until=2)
    assert end == "snip-hf: ended after step 2: 0.0% of the linear FLOPs in FP4."
    caplog.clear()
    config = fp4_config(policy="backward-first", granularity="gemm", target_fp4_fraction=((1, 0.9), (2, 0.5)))
    _, end = begin_and_end(Loop(config), caplog, until=2)
    assert end.endswith("% of the linear FLOPs in FP4. New plans: 1; refreshes that kept the plan: 0.")


def test_a_refresh_that_came_to_nothing_is_counted_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    _, end = begin_and_end(Loop(), caplog, until=3)  # before the plan of step 2 is due
    assert "New plans: 0; refreshes that kept the plan: 1. " in end


@pytest.mark.parametrize("policy", ["snip", "uniform-fp8"])
def test_what_kernels_found_is_logged_with_probes_and_without(
    policy: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps 2, 6 and 10, which probe, or else 4, 8 and 12; and at the end."""
    monkeypatch.setattr(Emulated, "findings", lambda self, layers: (True, "blocks saturate"))
    begin_and_end(Loop(fp4_config(**SCHEDULE, policy=policy)), caplog, until=13)
    found = [one for one in caplog.records if one.getMessage() == "snip-hf: backend emulated: blocks saturate"]
    assert [one.levelname for one in found] == ["WARNING"] * 4


def test_a_resumed_run_goes_on_under_the_plan_of_its_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    first = Loop()
    begin_and_end(first, caplog, until=5)  # the plan of step 2 is in force
    assert first.controller is not None
    caplog.clear()
    resumed = Loop()
    assert resumed.controller is not None
    resumed.controller.load_state_dict(first.controller.state_dict())
    resumed.step = first.step
    begin, *_ = begin_and_end(resumed, caplog, until=6)
    assert lines(begin)["refreshes"].endswith("a plan is applied 2 steps later; until then the plan above")


def test_a_run_that_took_no_step_came_to_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert begin_and_end(Loop(), caplog, until=0) == []


@pytest.mark.parametrize(
    ("options", "name", "text"),
    [
        ({"policy": "uniform-fp8"}, "target", "none"),
        ({"policy": "uniform-fp8"}, "refreshes", "none: this policy does not probe"),
        ({"policy": "uniform-fp8"}, "plan", "policy uniform-fp8, 0.0% of the linear FLOPs in FP4"),
        ({"target_fp4_fraction": ((1, 0.9), (5, 0.5))}, "target", "at least 90.0% from step 1, 50.0% from step 5 of "),
        ({"decides": "forward", "granularity": "gemm"}, "target", "at least 50.0% of the forward GEMMs' FLOPs in FP4"),
        (
            {"refresh_every": 1, "apply_delay": 1},
            "refreshes",
            "at step 2, then every 1 step; a plan is applied 1 step later; until then FP8",
        ),
        ({"refresh_every": None}, "refreshes", "at step 2, no more; a plan is applied 2 steps later; until then FP8"),
        ({"formats": ("nvfp4", "mxfp8")}, "formats", "NVFP4, MXFP8, decided per gemm"),
    ],
)
def test_the_begin_names_what_was_asked_for(
    options: dict[str, object], name: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = SCHEDULE | options if "policy" not in options else options
    begin, _ = begin_and_end(Loop(fp4_config(**settings)), caplog, until=1)  # type: ignore[arg-type]
    assert text in lines(begin)[name]


@pytest.mark.parametrize("damaged", [[1, 2], [["a", "b"]], "0.5"])
def test_a_damaged_target_of_a_file_has_no_description(damaged: object) -> None:
    assert describe_target({"policy": "snip", "target_fp4_fraction": damaged}) is None


def test_the_begin_names_the_fixed_plan(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "plan.json"
    first = Loop(fp4_config(policy="uniform-fp8"))
    begin_and_end(first, caplog, until=1)
    assert first.controller is not None
    first.controller.plan.save(path)
    caplog.clear()
    begin, _ = begin_and_end(Loop(fp4_config(fixed_plan=str(path))), caplog, until=1)
    assert lines(begin)["plan"].startswith(f"fixed plan {path}, 0.0% of the linear FLOPs in FP4")
    assert lines(begin)["formats"] == "FP8"  # not FP4, which only the config names
    assert lines(begin)["refreshes"] == "none: the plan is fixed"


def test_the_begin_names_the_speed_that_was_measured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Emulated, "measured_speeds", {32: (1.1, 1.2)}, raising=False)
    begin, _ = begin_and_end(Loop(), caplog, until=1)
    assert lines(begin)["speed"] == "less than was measured (docs/hopper.md), as the warning says"


def test_the_first_rank_alone_says_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    own = threading.local()
    monkeypatch.setattr(Ranks, "of_all", lambda timeout: own.ranks)
    caplog.set_level(logging.INFO, "snip_hf")

    def work(ranks: Ranks) -> None:
        own.ranks = ranks
        loop = Loop()
        while loop.step < 4:
            loop.one_step()
        assert loop.controller is not None and loop.controller.plan.fp4_fraction > 0
        loop.controller.close()

    on_ranks(2, work)
    for begin in ("snip-hf: training under SNIP.", "snip-hf: plan of step 2 applied", "snip-hf: ended after step 4"):
        assert len([message for message in caplog.messages if message.startswith(begin)]) == 1
