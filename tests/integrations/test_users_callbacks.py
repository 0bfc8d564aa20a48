"""Copies, generation, other forward passes and runs inside a run leave a run as it is without them."""

from __future__ import annotations

import copy
import gc
import io
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from configs import fp4_config
from slow_cases import slow
from small import text, tiny_llama
from tiny_runs import SCHEDULE, Run, arguments, data, differing, train, weights, without_seconds
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from snip_hf import SnipCallback, SnipController
from snip_hf.layers.convert import restore_model
from snip_hf.layers.run_hooks import RunHook, marks_on
from snip_hf.layers.state import set_step, snip_linears

pytestmark = pytest.mark.usefixtures("one_thread_only")

# Two refreshes, applied after steps 4 and 7.
CONFIG = fp4_config(**SCHEDULE | {"refresh_every": 3})
ACCUMULATED = {"gradient_accumulation_steps": 2}
SHORT = {"max_steps": 7, **ACCUMULATED}
Act = Callable[[nn.Module], Any]


class At(TrainerCallback):
    """Does something with the model at an event, every so many steps."""

    def __init__(self, event: str, act: Act, every: int = 1) -> None:
        self.act, self.every = act, every
        setattr(self, event, self._happens)

    def _happens(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        if state.global_step % self.every == 0:
            self.act(model)


def run(folder: Path, *callbacks: TrainerCallback) -> Run:
    return train(folder, CONFIG, model=tiny_llama(hidden=32), callbacks=callbacks, **SHORT)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Any]:
    """The run that nothing disturbs, and where it leaves the random generators."""
    return run(tmp_path_factory.mktemp("quiet")), random_states()


def random_states() -> Any:
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


def assert_same(found: Run, quiet: tuple[Run, Any]) -> None:
    found_states = random_states()
    expected, states = quiet
    assert found_states == states
    assert found.losses == expected.losses
    assert without_seconds(found.history) == without_seconds(expected.history)
    assert differing(weights(found.model), weights(expected.model)) == []
    keys = [[layer.snip_state.tolist() for layer in snip_linears(one.model).values()] for one in (found, expected)]
    assert keys[0] == keys[1]


# --------------------------------------------------------------------------------------------- passes that do not count


def generate(model: nn.Module) -> None:
    model.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=2, do_sample=False)


def look(model: nn.Module) -> None:
    model(**text(2, 16))


def look_without_labels(model: nn.Module) -> None:
    model(text(2, 16)["input_ids"])


def look_without_gradients(model: nn.Module) -> None:
    with torch.no_grad():
        model(**text(2, 16))


def in_training_mode(act: Act) -> Act:
    def acting(model: nn.Module) -> None:
        was_training = model.training
        model.train()
        act(model)
        model.train(was_training)

    return acting


def test_passes_that_are_not_backpropagated_change_nothing(quiet: tuple[Run, Any], tmp_path: Path) -> None:
    def all_of_them(model: nn.Module) -> None:
        for act in (generate, look, look_without_labels, look_without_gradients):
            act(model)

    assert_same(run(tmp_path, At("on_substep_end", in_training_mode(all_of_them))), quiet)


class Rollouts(Trainer):
    """Generates before each micro-batch, and looks at what the model thinks of it before and after its own pass."""

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        generate(model)
        model(input_ids=inputs["input_ids"])
        model(**{name: value for name, value in inputs.items() if name != "num_items_in_batch"})
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        with torch.no_grad():
            model(input_ids=inputs["input_ids"])
        return loss


def test_a_pass_without_gradients_in_a_loop_of_ones_own_takes_no_number() -> None:
    model = tiny_llama(hidden=32)
    controller = SnipController(model, torch.optim.SGD(model.parameters(), lr=0.1), CONFIG)
    controller.capture(text(2, 16))
    states = [layer.snip_state.clone() for layer in snip_linears(model).values()]
    generate(model)
    assert all(torch.equal(a, b.snip_state) for a, b in zip(states, snip_linears(model).values(), strict=True))
    controller.capture(text(2, 16))
    assert not any(torch.equal(a, b.snip_state) for a, b in zip(states, snip_linears(model).values(), strict=True))


# ---------------------------------------------------------------------------------------------------- positional inputs


class Positional(Trainer):
    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        outputs = model(inputs.pop("input_ids"), **inputs, num_items_in_batch=kwargs["num_items_in_batch"])
        return outputs.loss


@pytest.mark.parametrize("kind", [Rollouts, Positional])
def test_a_loss_that_generates_first_or_gives_inputs_by_position_is_refreshed_as_others(
    kind: type[Trainer], quiet: tuple[Run, Any], tmp_path: Path
) -> None:
    trainer = kind(
        tiny_llama(hidden=32),
        arguments(tmp_path, **SHORT),
        train_dataset=data(),
        callbacks=[SnipCallback(CONFIG, keep_formats=True)],
    )
    trainer.train()
    assert_same(Run(tmp_path, trainer, None), quiet)


class Nameless(nn.Module):
    """Accepts its inputs by position, without names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_llama(hidden=32)

    def forward(self, *inputs: Tensor) -> Any:
        return self.inner(input_ids=inputs[0], labels=inputs[1])


def test_positional_inputs_without_names_are_probed_by_compute_loss(tmp_path: Path) -> None:
    class ByPosition(Trainer):
        def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            return model(inputs["input_ids"], inputs["labels"]).loss

    args = arguments(tmp_path, remove_unused_columns=False, max_steps=4)
    ByPosition(Nameless(), args, train_dataset=data(), callbacks=[SnipCallback(CONFIG)]).train()


# --------------------------------------------------------------------------------------------------------------- copies


def by_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {"deepcopy": copy.deepcopy, "torch.save": by_torch_save}


def use(model: nn.Module) -> float:
    """Trains a copy for a step and evaluates it; leaves the random generators alone."""
    with torch.random.fork_rng(devices=[]):
        model.train()
        set_step(snip_linears(model), 1, 1, 0)
        model(**text(2, 16)).loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return model.eval()(**text(2, 16)).loss.item()


@pytest.mark.parametrize("way", ["deepcopy", slow("torch.save")])
def test_copies_in_mid_run_train_and_evaluate_without_touching_the_run(
    way: str, quiet: tuple[Run, Any], tmp_path: Path
) -> None:
    copies: list[nn.Module] = []

    def make_and_use(model: nn.Module) -> None:
        copied = COPIES[way](model)
        formats = [layer.formats for layer in snip_linears(copied).values()]
        assert formats == [layer.formats for layer in snip_linears(model).values()]
        assert use(copied) > 0
        copies.append(copied)

    callbacks = [At(event, make_and_use, every=3) for event in ("on_train_begin", "on_substep_end", "on_step_end")]
    found = run(tmp_path, *callbacks)
    assert_same(found, quiet)
    assert len(copies) > 3
    for copied in copies:
        assert marks_on(copied) == []
        restore_model(copied)
        assert type(copied.model.layers[0].mlp.up_proj) is nn.Linear
        assert len(copied._forward_pre_hooks) == len(copied._forward_hooks) == 0
    assert len(snip_linears(found.model)) == 14


def test_a_copied_hook_does_not_break_a_graph() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_forward_hook(RunHook(model.forward))
    torch.compile(copy.deepcopy(model), backend="eager", fullgraph=True)(torch.ones(1, 2))


def test_a_copy_holds_neither_the_run_nor_its_batches() -> None:
    model = tiny_llama(hidden=32)
    controller = SnipController(model, torch.optim.SGD(model.parameters(), lr=0.1), fp4_config(first_refresh=1))
    controller.capture(text(2, 16))
    copied = copy.deepcopy(model)
    gone = weakref.ref(controller)
    controller.close()
    del controller
    gc.collect()
    assert gone() is None
    states = [layer.snip_state for layer in snip_linears(copied).values()]
    assert len({state.untyped_storage().data_ptr() for state in states}) == len(states)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in copied.parameters())


# ------------------------------------------------------------------------------------------------ what an error leaves


def fail(model: nn.Module) -> None:
    raise MemoryError


@pytest.mark.parametrize("event", ["on_substep_end", "on_step_end"])
def test_a_run_whose_model_is_restored_goes_on_without_snip_and_says_so_once(
    event: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def restore(model: nn.Module) -> None:
        if snip_linears(model):
            restore_model(model)

    saves: dict[str, Any] = {"max_steps": 6, "save_steps": 3, "save_strategy": "steps", **ACCUMULATED}
    found = train(tmp_path, CONFIG, model=tiny_llama(hidden=32), callbacks=[At(event, restore, 5)], **saves)
    # In step 1, or after step 5.
    with_share = [line["step"] for line in found.trainer.state.log_history if {"fp4_share", "loss"} <= line.keys()]
    assert with_share == ([1, 2, 3, 4] if event == "on_step_end" else [])
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said.count("snip-hf: the model was restored during the run; training continues without SNIP.") == 1
    assert not any("failed" in line or "later run" in line for line in said)
    checkpoint = tmp_path / "checkpoint-6"
    assert not (checkpoint / "snip_state.json").exists()
    assert train(tmp_path, CONFIG, resume=checkpoint, model=tiny_llama(hidden=32), max_steps=7).losses[7]
    assert any("with a new plan, because" in record.getMessage() for record in caplog.records)


# --------------------------------------------------------------------------------------------- a run inside another one


class Inner(TrainerCallback):
    """Trains the same model in a run of its own at an event of step 3, and puts the weights back."""

    def __init__(self, folder: Path, event: str, callback: SnipCallback | None) -> None:
        self.folder, self.callback = folder, callback
        self.losses: dict[int, tuple[float, float]] = {}
        setattr(self, event, self._train)

    def _train(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        if state.global_step != 3 or self.losses:
            return
        before = weights(model)
        states = torch.get_rng_state(), np.random.get_state(), random.getstate()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        callbacks = [self.callback] if self.callback else []
        inner = Trainer(model, arguments(self.folder, max_steps=4), train_dataset=data(), callbacks=callbacks)
        inner.train()
        self.losses = Run(self.folder, inner, None).losses
        model.train()
        model.load_state_dict(before)
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name]
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


@pytest.mark.slow
def test_a_run_goes_on_with_its_plan_and_its_schedule_after_one_without_snip_inside_it(
    quiet: tuple[Run, Any], tmp_path: Path
) -> None:
    """At the end of step 3 the first plan is under way: probed at step 2, due after step 4."""
    inner = Inner(tmp_path / "inner", "on_step_end", None)
    assert_same(run(tmp_path / "outer", inner), quiet)
    assert inner.losses


@pytest.mark.parametrize(
    ("is_same", "message"),
    [
        (True, "This SnipCallback drives a run that has not ended. Give each Trainer its own SnipCallback."),
        (
            False,
            "Another Trainer with a SnipCallback trains this model. Give a Trainer that runs inside it no "
            "SnipCallback.",
        ),
    ],
)
def test_a_run_with_snip_inside_another_one_is_refused(is_same: bool, message: str, tmp_path: Path) -> None:
    callback = SnipCallback(CONFIG)
    inner = Inner(tmp_path / "inner", "on_step_end", callback if is_same else SnipCallback(CONFIG))
    with pytest.raises(ValueError) as caught:
        train(tmp_path / "outer", callback=callback, model=tiny_llama(hidden=32), callbacks=[inner])
    assert str(caught.value) == message


def test_a_failed_run_is_released_by_the_next_one_also_by_its_own_trainer(
    quiet: tuple[Run, Any], tmp_path: Path
) -> None:
    model = tiny_llama(hidden=32)
    before = weights(model)
    failing = SnipCallback(CONFIG)
    with pytest.raises(MemoryError):
        callbacks = [At("on_substep_end", fail)]
        train(tmp_path / "failed", callback=failing, model=model, callbacks=callbacks, **ACCUMULATED)
    model.load_state_dict(before)
    again = train(tmp_path / "again", CONFIG, model=model, **SHORT)
    assert failing not in [mark.driver for mark in marks_on(model)]
    assert_same(again, quiet)
