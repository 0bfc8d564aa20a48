"""The guard in a loop of one's own: it raises formats when provoked and does nothing on a healthy run."""

from __future__ import annotations

import copy
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import fp4_config
from own_loop import Loop
from slow_cases import slow_but
from tiny_runs import SCHEDULE, differing, weights
from torch import Tensor, nn

from snip_hf import SnipConfig, SnipController
from snip_hf.kernels.tensor_scaled.backend import TENSOR_SCALED
from snip_hf.layers.state import snip_linears
from snip_hf.records.events import Alarm, Refresh, read_history
from snip_hf.records.load import load_run
from snip_hf.training import guard as guard_module

pytestmark = pytest.mark.usefixtures("sensitive_guard")

# Refreshes from step 2 on, every 4 steps; plans come 2 steps later.
OPTIONS: dict[str, Any] = {**SCHEDULE, "guard": "raise", "guard_patience": 3}


def config(**changes: Any) -> SnipConfig:
    return fp4_config(**{**OPTIONS, **changes})


class Provoked(Loop):
    """A loop that tells its losses, and whose loss is multiplied by `factors[step]`."""

    def __init__(self, *args: Any, factors: dict[int, float] | None = None, lr: float = 1e-3, **options: Any) -> None:
        super().__init__(*args, **{"accumulation": 1, **options})
        self.factors = factors or {}
        self.optimizer.param_groups[0]["lr"] = lr

    def loss_of(self, batch: dict[str, Tensor]) -> Tensor:
        loss = super().loss_of(batch) * self.factors.get(self.step, 1.0)
        if self.controller is not None:
            self.controller.note_loss(loss if self.step % 2 else loss.item())
        return loss


def alarms(folder: Path) -> list[Alarm]:
    return [event for event in read_history(folder / "snip" / "history.jsonl") if isinstance(event, Alarm)]


def refreshes(folder: Path) -> list[tuple[int, int | None]]:
    events = read_history(folder / "snip" / "history.jsonl")
    return [(event.step, event.applied_step) for event in events if isinstance(event, Refresh)]


def used(loop: Loop) -> set[str]:
    return {name for row in loop.formats().values() for name in row.values()}


HEALTHY: dict[str, tuple[int, int, dict[str, Any]]] = {
    "by layer": (12, 8, {}),
    "all in FP4": (24, 16, {"policy": "uniform-fp4"}),
    "by GEMM, two stages": (24, 16, {"granularity": "gemm", "stages": 2}),
}


@pytest.mark.parametrize("name", slow_but(HEALTHY, "by layer"))
def test_healthy_runs_are_the_same_to_the_bit_without_an_alarm(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, window, changes = HEALTHY[name]
    monkeypatch.setattr(guard_module, "WINDOW", window)
    monkeypatch.setattr(guard_module, "SPIKE", 6.0)
    asked = config(**SCHEDULE | {"refresh_every": 8, "guard_patience": 50} | changes)
    found = {}
    for guard in ("off", "raise"):
        loop = Provoked(replace(asked, guard=guard), tmp_path / guard, dropout=0.1).run(steps)
        assert loop.controller is not None
        found[guard] = loop.losses, loop.formats(), weights(loop.model), refreshes(tmp_path / guard)
        assert alarms(tmp_path / guard) == []
        if guard != "off":  # Figures were judged, and not only noted.
            recent = loop.controller.state_dict()["guard"]["recent"]
            assert all(len(recent[name]) > window // 2 for name in ("loss", "gradient norm"))
        loop.controller.close()
    off, on = found["off"], found["raise"]
    assert on[0] == off[0] and on[1] == off[1] and on[3] == off[3]
    assert differing(on[2], off[2]) == []


def test_a_spike_raises_all_layers_for_a_while_and_then_the_plan_is_refreshed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Provoked(config(), tmp_path, factors={9: 1e3})
    seen = {}
    for step in range(1, 17):
        loop.run(step)
        seen[step] = used(loop)
    # FP4 became FP8, and FP8 became BF16, right after the step of the spike.
    assert seen[8] == {"fp4", "fp8"} and seen[9] == {"fp8", "bf16"}
    # Three steps of patience, then a refresh at step 13; the one that was due at step 10 is left out.
    assert refreshes(tmp_path) == [(2, 4), (6, 8), (13, 15)]
    assert seen[14] == {"fp8", "bf16"} and seen[15] == {"fp4", "fp8"}
    (alarm,) = alarms(tmp_path)
    assert (alarm.step, alarm.figure, alarm.action, alarm.failures, alarm.left_out) == (9, "loss", "raised", 1, False)
    assert alarm.value is not None and alarm.limit is not None and alarm.value > alarm.limit
    assert set(alarm.changes.values()) == {("fp4", "fp8"), ("fp8", "bf16")} and alarm.fp4_fraction == 0.0
    assert sum("snip-hf: guard, step 9: The loss" in message for message in caplog.messages) == 1
    # A report follows the plan through it.
    run = load_run(tmp_path)
    assert [step for step, _ in run.plans] == [0, 4, 8, 9, 15]
    assert not any("plan.json" in note for note in run.notes)
    assert run.alarms == [alarm] and run.plans[-1][1].assignment == loop.formats()


def test_formats_that_are_raised_before_the_first_refresh_do_not_bring_it_forward(tmp_path: Path) -> None:
    loop = Provoked(config(policy="snip", start_format="fp4", first_refresh=12), tmp_path, factors={5: 1e3}).run(12)
    assert [alarm.step for alarm in alarms(tmp_path)] == [5]
    assert loop.controller is not None and loop.controller.state_dict()["last_probe"] == 12


def test_after_a_refresh_the_next_one_waits_for_no_first_refresh(tmp_path: Path) -> None:
    loop = Provoked(config(policy="snip", first_refresh=None), tmp_path, factors={12: 1e3})
    assert loop.controller is not None
    loop.controller._schedule.max_steps = 20
    loop.run(11)
    loop.controller._schedule.max_steps = 1000  # resumed to more steps
    loop.run(16)
    assert [alarm.step for alarm in alarms(tmp_path)] == [12]
    assert [step for step, _ in refreshes(tmp_path)] == [10] and loop.controller.state_dict()["last_probe"] == 16


def test_kernels_launch_by_the_raised_formats_in_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs of the old formats would be replayed if the records kept their addresses."""
    monkeypatch.setattr(type(TENSOR_SCALED), "lacks", lambda self, device: None)
    monkeypatch.setattr(type(TENSOR_SCALED), "fails", lambda self, format, device: None)
    mxfp4 = config(formats=("mxfp4", "fp8-tensor"), backend="tensor-scaled", policy="uniform-mxfp4")
    loop = Provoked(mxfp4, tmp_path, factors={9: 1e3})

    def records() -> list[Any]:
        return [layer.snip_cache.records for layer in snip_linears(loop.model).values()]

    loop.run(8)
    before = {one.record.data_ptr() for one in records()}
    loop.run(9)
    assert used(loop) == {"fp8-tensor"}
    assert all(one.view.packed == one.view.facts for one in records())
    assert before.isdisjoint(one.record.data_ptr() for one in records())


def test_a_gradient_that_is_not_finite_is_left_out_and_raises_all_layers(tmp_path: Path) -> None:
    loop = Provoked(config(policy="uniform-fp4"), tmp_path).run(2)
    (layer,) = [module for name, module in loop.model.named_modules() if name == "model.layers.1.self_attn.q_proj"]
    hook = layer.weight.register_hook(lambda gradient: gradient * float("nan"))
    before = weights(loop.model)
    state = copy.deepcopy(loop.optimizer.state_dict())
    loop.run(3)
    hook.remove()
    # Nothing of the step is left, neither in the weights nor in Adam's moments.
    assert differing(weights(loop.model), before) == []
    assert all(
        torch.equal(tensor, state["state"][index][name])
        for index, entries in loop.optimizer.state_dict()["state"].items()
        for name, tensor in entries.items()
    )
    (alarm,) = alarms(tmp_path)
    assert (alarm.figure, alarm.value, alarm.left_out) == ("gradient norm", None, True)
    assert used(loop) == {"fp8"} and len({cell.rpartition(":")[0] for cell in alarm.changes}) == 14
    loop.run(6)
    assert len(alarms(tmp_path)) == 1 and all(loss == loss for loss in loop.losses)


def test_a_step_that_is_left_out_is_not_probed(tmp_path: Path) -> None:
    Provoked(config(), tmp_path, factors={2: float("nan")}).run(8)
    assert [alarm.left_out for alarm in alarms(tmp_path)] == [True]
    assert refreshes(tmp_path) == [(6, 8)]


def test_a_loss_that_is_not_finite_raises_all_layers_until_nothing_is_left(tmp_path: Path) -> None:
    factors = dict.fromkeys((3, 4, 5), float("nan"))
    loop = Provoked(config(policy="uniform-fp4"), tmp_path, factors=factors)
    formats = []
    for step in range(1, 8):
        loop.run(step)
        formats.append(used(loop))
    assert formats == [{"fp4"}, {"fp4"}, {"fp8"}, *[{"bf16"}] * 4]
    found = alarms(tmp_path)
    assert [alarm.action for alarm in found] == ["raised", "raised", "noted"]
    assert [alarm.failures for alarm in found] == [1, 2, 3]
    assert {alarm.figure for alarm in found} == {"loss"}


def test_a_lasting_rise_is_one_alarm_and_then_the_level(tmp_path: Path) -> None:
    loop = Provoked(config(), tmp_path, factors=dict.fromkeys(range(9, 40), 1e3)).run(30)
    (alarm,) = alarms(tmp_path)
    assert (alarm.step, alarm.action) == (9, "raised") and "the limit for a healthy step" in alarm.reason
    # Refreshes go on as scheduled, and formats come down again.
    assert refreshes(tmp_path)[-1] == (25, 27) and used(loop) == {"fp4", "fp8"}


@pytest.mark.slow
def test_a_plan_that_waits_when_formats_are_raised_is_not_applied(tmp_path: Path) -> None:
    loop = Provoked(config(), tmp_path, factors={11: 1e3}).run(12)
    assert refreshes(tmp_path) == [(2, 4), (6, 8), (10, None)]
    assert used(loop) == {"fp8", "bf16"}
    (kept,) = [e for e in read_history(tmp_path / "snip" / "history.jsonl") if isinstance(e, Refresh) and e.reason]
    assert kept.reason == "the guard raised formats after step 11, before step 12 at which its plan was due"


def go_on(state: dict[str, Any], asked: SnipConfig, first: Loop, folder: Path, **options: Any) -> Provoked:
    loop = Provoked(asked, folder, **options)
    loop.model.load_state_dict(first.model.state_dict())
    loop.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    assert loop.controller is not None
    loop.controller.load_state_dict(json.loads(json.dumps(state)))
    loop.step = state["step"]
    return loop


@pytest.mark.slow
def test_raised_formats_and_what_spikes_are_told_from_survive_a_resume(tmp_path: Path) -> None:
    factors = {9: 1e3, 14: 1e3}
    whole = Provoked(config(), tmp_path / "whole", factors=factors, dropout=0.0)
    first = Provoked(config(), tmp_path, factors=factors, dropout=0.0).run(11)
    assert first.controller is not None
    state = first.controller.state_dict()
    first.controller.close()
    second = go_on(state, config(), first, tmp_path, factors=factors, dropout=0.0)
    assert used(second) == {"fp8", "bf16"}
    second.run(18)
    whole.run(18)
    assert [*first.losses, *second.losses] == whole.losses
    assert alarms(tmp_path) == alarms(tmp_path / "whole") and len(alarms(tmp_path)) == 2
    assert refreshes(tmp_path) == refreshes(tmp_path / "whole")
    assert second.formats() == whole.formats()


@pytest.mark.slow
def test_the_norm_is_that_before_clipping_and_without_a_loss_scale(tmp_path: Path) -> None:
    loop = Provoked(config(), tmp_path, max_norm=1e-3).run(4)
    assert loop.controller is not None
    norms = loop.controller.state_dict()["guard"]["recent"]["gradient norm"]
    expected = Norms(fp4_config(**SCHEDULE)).run(4)
    assert norms == pytest.approx(expected.norms, rel=1e-5)


class Norms(Provoked):
    """Records the norms that clipping finds."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, max_norm=1e-3)
        self.norms: list[float] = []

    def clip(self) -> None:
        self.norms.append(float(nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)))


def test_a_guard_may_be_switched_on_at_a_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = Provoked(config(guard="off"), tmp_path).run(3)
    assert first.controller is not None
    state = first.controller.state_dict()
    assert state["guard"] is None
    first.controller.close()
    with caplog.at_level(logging.WARNING, "snip_hf"):
        second = go_on(state, config(), first, tmp_path, factors={4: float("nan")}).run(5)
    assert [alarm.step for alarm in alarms(tmp_path)] == [4]
    assert second.controller is not None


class Engine(nn.Module):
    """Stands for DeepSpeed's."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **inputs: Tensor) -> Any:
        return self.module(**inputs)


Engine.__name__, Engine.__module__ = "DeepSpeedEngine", "deepspeed.runtime.engine"


def test_under_deepspeed_it_is_refused() -> None:
    model = Engine(Loop(None).model)
    with pytest.raises(ValueError, match="guard='raise' cannot work under DeepSpeed, which clips, steps and zeroes"):
        SnipController(model, torch.optim.SGD(model.parameters()), config(policy="uniform-fp4"))
