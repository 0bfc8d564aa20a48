"""Is each weight answered for by the optimizer that trains it, where several share the weights?"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from own_loop import Loop
from small import text, tiny_llama
from tiny_runs import SCHEDULE, history, model_with_dropout, one_thread, train
from torch import nn, optim

from snip_hf import SnipConfig, SnipController
from snip_hf.optimizers.parts import groups_of, parts_of
from snip_hf.optimizers.response import check_optimizer, responses

CONFIG = SnipConfig(**SCHEDULE)


def split(model: nn.Module) -> tuple[optim.Muon, optim.AdamW]:
    """Muon for the blocks' matrices, AdamW for the rest."""
    matrices = {name for name, value in model.named_parameters() if value.dim() == 2 and "layers" in name}
    named = dict(model.named_parameters())
    rest = [value for name, value in named.items() if name not in matrices]
    return optim.Muon([named[name] for name in sorted(matrices)], lr=2e-3), optim.AdamW(rest, lr=1e-3)


class Combined(optim.Optimizer):
    """As users write it: one optimizer to the outside, several inside."""

    def __init__(self, *optimizers: optim.Optimizer) -> None:
        self.optimizers = list(optimizers)
        self.defaults: dict[str, Any] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for one in self.optimizers for group in one.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        return {key: value for one in self.optimizers for key, value in one.state.items()}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.optimizers:
            one.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.optimizers:
            one.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {str(index): one.state_dict() for index, one in enumerate(self.optimizers)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for index, one in enumerate(self.optimizers):
            one.load_state_dict(state_dict[str(index)])


def two() -> tuple[dict[str, nn.Parameter], list[optim.Optimizer]]:
    weights = {name: nn.Parameter(torch.ones(2, 2)) for name in ("first", "second")}
    return weights, [optim.SGD([weights["first"]], lr=0.5), optim.SGD([weights["second"]], lr=0.25)]


@pytest.mark.parametrize("around", [list, tuple, lambda both: dict(enumerate(both)), lambda both: Combined(*both)])
def test_each_weight_is_answered_for_by_its_own_optimizer(around: Any) -> None:
    weights, both = two()
    together = SimpleNamespace(optimizer=around(both))  # as Accelerate wraps it
    assert check_optimizer(together) == parts_of(together) == both
    assert [group["lr"] for group in groups_of(together)] == [0.5, 0.25]
    found = {name: answer.update(torch.ones(2, 2)) for name, answer in responses(together, weights).items()}
    assert {name: update.unique().tolist() for name, update in found.items()} == {"first": [0.5], "second": [0.25]}


def test_each_of_a_list_may_be_wrapped() -> None:
    _, both = two()
    assert parts_of([SimpleNamespace(optimizer=one) for one in both]) == both


def test_one_of_several_that_cannot_be_differentiated_is_refused_by_name() -> None:
    weights, (first, _) = two()
    with pytest.raises(TypeError, match=r"^Cannot differentiate the update of torch\.optim\.rprop\.Rprop: "):
        check_optimizer([first, optim.Rprop([weights["second"]])])
    with pytest.raises(TypeError, match=r"^Cannot differentiate the update of builtins\.str: it is no torch\.optim"):
        check_optimizer([first, "adamw"])


def test_a_trainer_with_muon_and_adamw_in_one_object_refreshes_its_plan(tmp_path: Path) -> None:
    model = model_with_dropout()
    combined = Combined(*split(model))
    scheduler = optim.lr_scheduler.LambdaLR(combined.optimizers[0], lambda step: 1.0)
    run = train(tmp_path, CONFIG, model=model, trainer={"optimizers": (combined, scheduler)}, max_steps=4)
    ((step, status, weight),) = [
        (line["step"], line["status"], line["divergence"]["fp4"]["weight"]) for line in run.refreshes
    ]
    assert (step, status) == (2, "applied") and weight > 0


def _own_loop(folder: Path, replaced_at: int) -> list[str]:
    model = tiny_llama(hidden=32)
    both = list(split(model))
    controller = SnipController(model, both, SnipConfig(**SCHEDULE | {"refresh_every": 12}), output_dir=folder)
    with one_thread():
        for step in range(1, 15):
            if step == replaced_at:
                both[0] = split(model)[0]
            batch = text(2, 24, step)
            controller.capture(batch)
            model(**batch).loss.backward()
            controller.before_optimizer_step(step)
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
            controller.after_step(step)
        controller.close()
    return [line["reason"] or "" for line in history(folder) if line["event"] == "refresh"]


def test_a_loop_of_one_s_own_gives_both_and_the_one_of_the_layers_is_missed_when_it_is_replaced(tmp_path: Path) -> None:
    reasons = _own_loop(tmp_path, replaced_at=4)
    assert reasons[0] == ""
    assert reasons[1].startswith(
        "ValueError: The Muon that training began with has not taken the last 10 steps: another optimizer trains the "
        "model"
    )


def test_another_one_that_trains_no_layer_may_stand_still(tmp_path: Path) -> None:
    loop = Loop(CONFIG, tmp_path)
    assert len(loop.optimizer.param_groups) == 1
    idle = optim.AdamW([nn.Parameter(torch.ones(2))], lr=1e-3)
    loop.controller.close()
    loop.controller = SnipController(loop.model, [loop.optimizer, idle], CONFIG, output_dir=tmp_path)
    loop.run(7)
    assert [line["status"] for line in history(tmp_path) if line["event"] == "refresh"] == ["applied"]
