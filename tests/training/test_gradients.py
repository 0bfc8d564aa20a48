"""FP16 training with a GradScaler makes the plans of unscaled training, and skipped steps delay a refresh."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from configs import fp4_config
from own_loop import Loop
from small import text, tiny_llama
from thread_ranks import on_ranks
from tiny_runs import FAST, SCHEDULE, Run, differing, one_thread, refreshes, train, weights, without_seconds
from torch import Tensor, nn
from transformers import Trainer

from snip_hf import SnipConfig, SnipController
from snip_hf.layers.convert import convert_model
from snip_hf.layers.state import snip_linears
from snip_hf.parallel.ranks import Ranks
from snip_hf.text import WITHOUT_PROBE
from snip_hf.training import gradients
from snip_hf.training.gradients import GradientSource, LossScaling, check_weights
from snip_hf.training.schedule import Schedule

CONFIG = fp4_config(**SCHEDULE)


def scaler(scale: float = 65536.0, enabled: bool = True) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, enabled=enabled)


def a_weight(gradient: float = 1.0, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    weight = nn.Parameter(torch.ones(2, 2, dtype=dtype))
    weight.grad = torch.full_like(weight, gradient)
    return weight


# Where the GradScaler is


def test_the_scaler_is_that_of_accelerate_s_optimizer_or_of_the_accelerator() -> None:
    one, sgd = scaler(), torch.optim.SGD([a_weight()], lr=1.0)
    one.scale(torch.ones(1))
    wrapped = SimpleNamespace(scaler=one, optimizer=sgd)
    for optimizer, accelerator in (
        (wrapped, None),
        (SimpleNamespace(scaler=None, optimizer=wrapped), None),
        ([SimpleNamespace(scaler=None, optimizer=sgd), wrapped], None),
        ({"muon": wrapped}, None),
        (sgd, SimpleNamespace(scaler=one)),
    ):
        scaling = LossScaling(optimizer, accelerator)
        one.update(8.0)
        assert scaling.is_on and scaling.scale == 8.0
        one.update(4.0)
        assert scaling.scale == 4.0
    for optimizer in (sgd, SimpleNamespace(scaler=None, optimizer=sgd), SimpleNamespace(scaler=scaler(enabled=False))):
        assert not LossScaling(optimizer).is_on and LossScaling(optimizer).scale == 1.0


def test_a_step_is_left_out_if_one_rank_has_a_gradient_that_is_not_finite() -> None:
    scaling = LossScaling(SimpleNamespace(scaler=scaler()))
    finite, infinite, alone = [a_weight(), nn.Parameter(torch.ones(1))], [a_weight(), a_weight(float("inf"))], Ranks()
    assert not scaling.skips_step(finite, alone)
    assert scaling.skips_step(infinite, alone)
    assert scaling.skips_step([a_weight(float("nan"))], alone)
    assert not LossScaling(SimpleNamespace(scaler=None)).skips_step(infinite, alone)
    found = on_ranks(2, lambda ranks: scaling.skips_step(infinite if ranks.rank == 1 else finite, ranks))
    assert found == [True, True]


def test_trained_weights_in_fp16_are_refused_before_training_also_where_nothing_is_scaled() -> None:
    groups = torch.optim.SGD([a_weight(), a_weight(dtype=torch.float16)], lr=1.0)
    message = (
        "1 of the 2 trained parameters are in FP16: a GradScaler does not unscale their gradients, and without one "
        "small gradients become 0. Load the model in FP32 (from_pretrained(..., dtype=torch.float32)), with which "
        f"fp16=True still multiplies in FP16, or use {WITHOUT_PROBE}."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_weights(groups)
    model = tiny_llama(hidden=32, layers=1).half()
    with pytest.raises(ValueError, match="trained parameters are in FP16"):
        SnipController(model, torch.optim.SGD(model.parameters()), CONFIG)


def test_frozen_weights_may_be_in_fp16() -> None:
    frozen = a_weight(dtype=torch.float16).requires_grad_(False)
    check_weights(torch.optim.SGD([a_weight(), frozen], lr=1.0))


# Accumulation in CUDA graphs


class Replays:
    """Overwrites gradients as CUDA graphs of torch.compile do: those of a backward pass that found none before it."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters, self._written, self._new = list(model.parameters()), [], set()
        for one in self._parameters:
            one.register_post_accumulate_grad_hook(self._note)

    def begin(self, *_: Any) -> None:
        """Begins a pass, which reuses the memory of the gradients of earlier ones."""
        for gradient in self._written:
            gradient.fill_(torch.nan)
        self._written, self._new = [], {one for one in self._parameters if one.grad is None}

    def _note(self, parameter: Tensor) -> None:
        if parameter in self._new:
            self._written.append(parameter.grad)


def graphs(mode: str = "reduce-overhead", kind: str = "NO") -> Any:
    return SimpleNamespace(dynamo_plugin=SimpleNamespace(mode=mode), distributed_type=kind)


def test_gradients_of_graphs_are_copied_once_per_step() -> None:
    source, weights = GradientSource(None, graphs()), [a_weight(), a_weight(), a_weight().requires_grad_(False)]
    weights[1].grad = weights[2].grad = None

    def kept() -> list[bool]:
        before = [one.grad for one in weights]
        source.keep(weights)
        return [one.grad is old for one, old in zip(weights, before, strict=True)]

    source.begin_step()
    assert kept() == [False, True, True] and weights[0].grad.eq(1).all()
    weights[1].grad = torch.ones(2, 2)  # a weight that the first micro-batch did not use
    assert kept() == [True, False, True] and kept() == [True] * 3
    source.begin_step()
    assert kept() == [False, False, True]


def test_gradients_stay_where_they_are_without_graphs_and_in_wrappers() -> None:
    weight = a_weight()
    before = weight.grad
    for accelerator in (None, graphs("default"), graphs(kind="MULTI_GPU"), SimpleNamespace(dynamo_plugin=None)):
        GradientSource(None, accelerator).keep([weight])
        assert weight.grad is before
    for accelerator in (graphs("max-autotune"), SimpleNamespace(state=graphs())):
        weight.grad = before
        GradientSource(None, accelerator).keep([weight])
        assert weight.grad is not before


@pytest.mark.filterwarnings("default")
def test_a_trainer_accumulates_gradients_that_graphs_overwrite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Trainer.training_step
    made: list[Replays] = []

    def after_a_replay(self: Trainer, model: nn.Module, *arguments: Any) -> Tensor:
        made[:] = made or [Replays(model)]
        made[0].begin()
        return step(self, model, *arguments)

    options = {
        "max_steps": 3,
        "gradient_accumulation_steps": 3,
        "torch_compile": True,
        "torch_compile_backend": "eager",
    }
    config = fp4_config(policy="uniform-fp4")
    plain = train(tmp_path / "1", config, **options)
    monkeypatch.setattr(Trainer, "training_step", after_a_replay)
    replayed = train(tmp_path / "2", config, **options, torch_compile_mode="reduce-overhead")
    torch._dynamo.reset()
    assert made and replayed.losses == plain.losses
    assert differing(weights(replayed.model), weights(plain.model)) == []


def test_a_loop_accumulates_gradients_that_graphs_overwrite(monkeypatch: pytest.MonkeyPatch) -> None:
    config = fp4_config(policy="uniform-fp4")
    plain = Loop(config, accumulation=3).run(3)
    monkeypatch.setattr(gradients, "_are_in_graphs", lambda accelerator: True)
    replayed = Loop(config, accumulation=3)
    replayed.model.register_forward_pre_hook(Replays(replayed.model).begin)
    assert differing(weights(replayed.run(3).model), weights(plain.model)) == []


# In a loop of one's own


def _loop(folder: Path, scale: float, is_told: bool = True, half: bool = False) -> dict[str, Any]:
    """The divergences of the refresh at step 2."""
    model = tiny_llama(hidden=32, layers=1)
    optimizer, one = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9), scaler(scale)
    controller = SnipController(model, optimizer, CONFIG, output_dir=folder)
    if is_told:
        controller.use_scaler(one)
    with one_thread():
        for step in range(1, 5):
            batch = text(2, 24, step)
            controller.capture(batch)
            with torch.autocast("cpu", torch.float16, enabled=half):
                loss = model(**batch).loss
            one.scale(loss).backward()
            one.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            controller.before_optimizer_step(step)
            one.step(optimizer)
            one.update()
            optimizer.zero_grad()
            controller.after_step(step)
    controller.close()
    (refresh,) = refreshes(folder)
    assert (refresh["step"], refresh["status"]) == (2, "applied")
    return refresh["divergence"]


@pytest.mark.parametrize("scale", [3.0, 512.0])
def test_a_known_scale_of_any_size_leaves_the_divergences_as_they_are(scale: float, tmp_path: Path) -> None:
    expected, found = _loop(tmp_path / "1", 1.0), _loop(tmp_path / "2", scale)
    for fmt in ("fp4", "fp8"):
        assert found[fmt] == pytest.approx(expected[fmt], rel=1e-3)
    # A guess cannot tell a scale below 1,000 from clipping.
    if scale == 512.0:
        guessed = _loop(tmp_path / "3", scale, is_told=False)
        assert guessed["fp4"]["weight"] == pytest.approx(expected["fp4"]["weight"] / scale, rel=1e-3)


def test_a_loop_in_fp16_finds_the_divergences_of_one_in_fp32(tmp_path: Path) -> None:
    expected, found = _loop(tmp_path / "1", 1.0), _loop(tmp_path / "2", 2.0**16, half=True)
    for fmt in ("fp4", "fp8"):
        assert found[fmt] == pytest.approx(expected[fmt], rel=0.02)


@pytest.mark.parametrize("fmt", ["fp4", "mxfp4", "nvfp4", "fp8", "bf16"])
def test_a_loss_scale_multiplies_the_gradients_of_layers_in_fp16_to_the_bit(fmt: str) -> None:
    """Also those that are rounded at random: blocks have scales of their own, and powers of two move no rounding."""
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(160, 96)])})
    convert_model(model, SnipConfig(formats=("fp4", "mxfp4", "nvfp4", "fp8")))
    (layer,) = snip_linears(model).values()
    layer.set_formats(dict.fromkeys(("forward", "grad_input", "grad_weight"), fmt))
    generator = torch.Generator().manual_seed(0)
    x, grad_output = (torch.randn(130, size, generator=generator) for size in (160, 96))

    def gradients(scale: float) -> tuple[Tensor, Tensor]:
        given = x.clone().requires_grad_()
        layer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            y = layer(given)
        assert y.dtype == torch.float16
        y.backward((scale * grad_output).half())
        return given.grad, layer.weight.grad.clone()

    for plain, scaled in zip(gradients(1.0), gradients(128.0), strict=True):
        assert plain.any()
        # Numbers below 2^-14 have fewer bits in FP16.
        is_normal = plain.abs() > 2.0**-14
        assert torch.equal(128.0 * plain[is_normal], scaled[is_normal])


# In the Trainer


class HalfTrainer(Trainer):
    """Trains in FP16 on a CPU, where Accelerate leaves the GradScaler out; some steps overflow."""

    scale = 65536.0
    overflows_at: tuple[int, ...] = ()

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler, self.accelerator.native_amp = scaler(self.scale), True

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(model, *args, **kwargs)
        if self.state.global_step + 1 in self.overflows_at:
            # In a weight that is no swapped layer's.
            model.get_output_embeddings().weight.grad[0, 0] = float("inf")
        return loss


@pytest.mark.gpu
def test_a_trainer_in_fp16_on_a_gpu_refreshes_with_accelerate_s_own_scaler(tmp_path: Path) -> None:
    config = fp4_config(**SCHEDULE, backend="emulated")
    run = train(tmp_path, config, fp16=True, use_cpu=False, max_steps=8)
    assert run.trainer.accelerator.scaler.is_enabled()
    assert [line["status"] for line in run.refreshes] == ["applied", "applied"]
    assert all(line["divergence"]["fp4"]["weight"] > 0 for line in run.refreshes)


class OverflowingTrainer(HalfTrainer):
    overflows_at = (2, 3)


@pytest.mark.slow
def test_a_trainer_in_fp16_plans_as_one_in_fp32(tmp_path: Path) -> None:
    of_step = {"max_steps": 4, "gradient_accumulation_steps": 2}
    plain = train(tmp_path / "1", CONFIG, **of_step)
    half = train(tmp_path / "2", CONFIG, trainer_class=HalfTrainer, fp16=True, **of_step)
    assert half.trainer.accelerator.scaler.get_scale() == 65536.0
    (expected,), (found,) = plain.refreshes, half.refreshes
    assert (found["step"], found["status"]) == (2, "applied")
    for fmt in ("fp4", "fp8"):
        assert found["divergence"][fmt] == pytest.approx(expected["divergence"][fmt], rel=0.1)
    assert half.losses[4] == pytest.approx(plain.losses[4], rel=0.01)


def _overflowing(folder: Path, **more: Any) -> Run:
    config = fp4_config(**FAST, first_refresh=2, refresh_every=4, apply_delay=1)
    saving = {"save_strategy": "steps", "save_steps": 1}
    return train(folder, config, trainer_class=OverflowingTrainer, fp16=True, max_steps=6, **saving, **more)


def test_a_refresh_waits_for_a_step_that_is_not_left_out_and_a_resumed_run_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "snip_hf"):
        full = _overflowing(tmp_path / "full")
    assert [(line["step"], line["status"], line["applied_step"]) for line in full.refreshes] == [(4, "applied", 5)]
    assert full.trainer.accelerator.scaler.get_scale() == 65536.0 / 4
    said = [record.getMessage() for record in caplog.records if "GradScaler" in record.getMessage()]
    assert said == [
        "snip-hf: the refresh of step 2 waits for the next step: the gradients are not finite in the loss's scale, and "
        "the GradScaler skips the step."
    ]
    for part in ("snip", "checkpoint-3"):
        shutil.copytree(full.folder / part, tmp_path / "resumed" / part)
    resumed = _overflowing(tmp_path / "resumed", resume=tmp_path / "resumed" / "checkpoint-3")
    assert differing(weights(resumed.model), weights(full.model)) == []
    assert without_seconds(resumed.history) == without_seconds(full.history)


def test_steps_that_go_on_overflowing_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    schedule = Schedule(CONFIG, None, logging.getLogger("snip_hf"))
    assert not schedule.refreshes(1, False) and schedule.refreshes(2, False)
    with caplog.at_level(logging.INFO, "snip_hf"):
        for step in range(2, 16):
            assert schedule.refreshes(step, False)
            schedule.postpone(step, "the step is skipped")
    assert [record.levelname for record in caplog.records] == ["INFO"]
    schedule.note_probe(16)
    assert [step for step in range(16, 25) if schedule.refreshes(step, True)] == [16, 20, 24]


def test_a_first_refresh_that_waits_until_it_is_too_late_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    schedule = Schedule(fp4_config(first_refresh=2, apply_delay=3), 6, logging.getLogger("snip_hf"))
    for step in range(2, 7):
        if schedule.refreshes(step, False):
            schedule.postpone(step, "the learning rate is 0")
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "training ends at step 6, before the plan of a refresh at step 4 would be applied after step 7" in warning
