"""The end of training under a Trainer: the plain model by default, whatever its layers, and the best checkpoint."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import fp4_config
from conv1d_twins import gpt2
from expert_models import build
from safetensors.torch import load_file
from slow_cases import slow_but
from small import tiny_llama
from tiny_runs import SCHEDULE, arguments, data, differing, model_with_dropout, prepare, train, weights
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Trainer, TrainerCallback

from snip_hf import SnipCallback
from snip_hf.kernels.emulated import Emulated
from snip_hf.layers.layer import SnipLayer
from snip_hf.layers.run_hooks import marks_on
from snip_hf.layers.state import snip_linears

pytestmark = pytest.mark.usefixtures("one_thread_only")

CONFIG = fp4_config(**SCHEDULE)
# A plan before the first step, so that few steps do.
AT_ONCE = fp4_config(policy="uniform-fp4")
BEST: dict[str, Any] = {
    "load_best_model_at_end": True,
    "eval_strategy": "steps",
    "save_strategy": "steps",
    "eval_steps": 3,
    "save_steps": 3,
}


def is_plain(model: nn.Module) -> bool:
    """Returns True if nothing of SNIP is left: no layer, no buffer, no hook."""
    modules = list(model.modules())
    buffers = [name for name, _ in model.named_buffers() if "snip" in name]
    hooks = [hook for module in modules for hook in (*module._forward_hooks, *module._forward_pre_hooks)]
    hooks += [hook for weight in model.parameters() for hook in weight._post_accumulate_grad_hooks or ()]
    is_swapped = any(isinstance(module, SnipLayer) for module in modules)
    return not is_swapped and not buffers and not hooks and marks_on(model) == []


def classes(model: nn.Module) -> dict[str, type[nn.Module]]:
    return {name: type(module) for name, module in model.named_modules()}


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=torch.arange(24)[None]).logits
    return found


def test_the_model_is_plain_after_training_which_changes_no_loss_and_no_weight(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = train(tmp_path / "kept", callback=SnipCallback(CONFIG, keep_formats=True), max_steps=5)
    with caplog.at_level(logging.INFO, "snip_hf"):
        plain = train(tmp_path / "plain", callback=SnipCallback(CONFIG), max_steps=5)
    assert plain.losses == kept.losses
    assert differing(weights(plain.model), weights(kept.model)) == []
    assert is_plain(plain.model) and classes(plain.model) == classes(model_with_dropout())
    assert "fp4" in {name for layer in snip_linears(kept.model).values() for name in layer.formats.values()}
    assert sum("the model is plain again" in message for message in caplog.messages) == 1
    # transformers without snip-hf loads and runs it.
    plain.trainer.save_model(str(tmp_path / "saved"))
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(plain.model), logits(loaded))
    assert not torch.equal(logits(kept.model), logits(loaded))
    # After the run its tags still describe its plan.
    assert "fp4" in plain.model.model_tags


@pytest.mark.slow
def test_the_best_model_at_the_end_is_plain_with_the_weights_of_the_best_checkpoint(tmp_path: Path) -> None:
    run = train(tmp_path, callback=SnipCallback(CONFIG), max_steps=6, **BEST)
    best = Path(run.trainer.state.best_model_checkpoint)
    assert is_plain(run.model)
    assert differing(weights(run.model), load_file(best / "model.safetensors")) == []
    # During training it was evaluated in the formats of its plan; now in its own precision, as without SNIP.
    now = run.trainer.evaluate()["eval_loss"]
    model = LlamaForCausalLM.from_pretrained(best)
    alone = Trainer(model, arguments(tmp_path / "alone"), eval_dataset=data(6)).evaluate()["eval_loss"]
    assert now == alone
    if run.trainer.state.best_global_step > 4:  # The first plan is in force then.
        assert now != run.trainer.state.best_metric


class Formats(TrainerCallback):
    """Notes the formats that evaluations run in."""

    def __init__(self) -> None:
        self.seen: dict[int, set[str]] = {}

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        layers = snip_linears(kwargs["model"]).values()
        self.seen[state.global_step] = {name for layer in layers for name in layer.formats.values()}


@pytest.mark.slow
def test_evaluation_during_training_runs_in_the_formats_of_the_plan_in_force(tmp_path: Path) -> None:
    watch = Formats()
    train(tmp_path, callback=SnipCallback(CONFIG), callbacks=[watch], max_steps=6, eval_strategy="steps", eval_steps=3)
    assert {step: "fp4" in formats for step, formats in watch.seen.items()} == {3: False, 6: True}


@pytest.mark.slow
def test_a_trainer_whose_model_was_restored_trains_again(tmp_path: Path) -> None:
    run = train(tmp_path, callback=SnipCallback(CONFIG), max_steps=4)
    again = run.trainer.train()
    assert again.global_step == 4 and is_plain(run.model)
    assert [(line["step"], line["applied_step"]) for line in run.refreshes] == [(2, 4)]


def test_a_push_after_training_leaves_the_state_of_the_last_checkpoint_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The kernels' state is gone with the layers.
    monkeypatch.setattr(Emulated, "state_dict", lambda self, layers: dict.fromkeys(layers, 1))
    run = train(tmp_path, callback=SnipCallback(AT_ONCE), max_steps=2, save_strategy="steps", save_steps=2)
    path = tmp_path / "checkpoint-2" / "snip_state.json"
    before = path.read_bytes()
    assert json.loads(before)["kernels"]["emulated"]
    trainer = run.trainer
    trainer.callback_handler.on_push_begin(trainer.args, trainer.state, trainer.control)
    assert "How this model was trained" in (tmp_path / "README.md").read_text()
    assert path.read_bytes() == before


# ------------------------------------------------------------------------- what is no part of a run that is under way


def test_a_trainer_that_has_not_trained_and_one_that_lost_its_callback_leave_the_model_plain(tmp_path: Path) -> None:
    expected = train(tmp_path / "expected", max_steps=2)
    run = prepare(tmp_path / "snip", callback=SnipCallback(AT_ONCE), max_steps=2)
    assert is_plain(run.model)
    alone = prepare(tmp_path / "alone")
    assert run.trainer.evaluate()["eval_loss"] == alone.trainer.evaluate()["eval_loss"]
    assert run.trainer.predict(data(2)).metrics["test_loss"] == alone.trainer.predict(data(2)).metrics["test_loss"]
    baseline = train(tmp_path / "baseline", model=run.model, max_steps=2)  # while the other Trainer is still there
    assert baseline.losses == expected.losses
    removed = prepare(tmp_path / "removed", callback=SnipCallback(AT_ONCE), max_steps=2)
    removed.trainer.remove_callback(SnipCallback)
    removed.trainer.train()
    assert removed.losses == expected.losses


class Removing(TrainerCallback):
    """Removes SNIP's callback from its Trainer in mid-run."""

    trainer: Trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.remove_callback(SnipCallback)


def test_a_run_whose_callback_is_removed_in_mid_run_ends_with_its_training(tmp_path: Path) -> None:
    removing = Removing()
    run = prepare(tmp_path, callback=SnipCallback(AT_ONCE), callbacks=[removing], max_steps=2)
    run.callback, removing.trainer = None, run.trainer
    run.trainer.train()
    assert is_plain(run.model)


class Failing(TrainerCallback):
    """Raises at the end of step 2."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            raise MemoryError


class Interrupted(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.state.global_step == 2:
            raise KeyboardInterrupt
        found: Tensor = super().training_step(*args, **kwargs)
        return found


def _broken(rows: list[Any]) -> Any:
    raise OSError


ENDS: dict[str, tuple[type[BaseException], dict[str, Any]]] = {
    "another callback": (MemoryError, {"callbacks": [Failing()]}),
    "Ctrl-C": (KeyboardInterrupt, {"trainer_class": Interrupted}),
    "the data": (OSError, {"trainer": {"data_collator": _broken}}),
}


@pytest.mark.parametrize("is_added_later", [False, True])
@pytest.mark.parametrize("how", ENDS)
def test_a_run_that_does_not_come_to_its_end_gives_the_plain_model_back(
    how: str, is_added_later: bool, tmp_path: Path
) -> None:
    error, options = ENDS[how]
    callback = SnipCallback(fp4_config(first_refresh=1, apply_delay=9))
    run = prepare(tmp_path / "failed", callback=None if is_added_later else callback, max_steps=4, **options)
    if is_added_later:
        run.trainer.add_callback(callback)
    with pytest.raises(error):
        run.trainer.train()
    assert is_plain(run.model) and classes(run.model) == classes(model_with_dropout())
    assert callback.controller is not None and callback.controller._run.refresher.pending is None
    model = model_with_dropout()
    model.load_state_dict(run.model.state_dict())
    assert torch.equal(logits(run.model), logits(model))
    expected = train(tmp_path / "expected", model=model, max_steps=1)
    assert train(tmp_path / "baseline", model=run.model, max_steps=1).losses == expected.losses


@pytest.mark.parametrize("fails", [False, True])
def test_formats_that_are_asked_for_stay_after_the_run(fails: bool, tmp_path: Path) -> None:
    callback = SnipCallback(AT_ONCE, keep_formats=True)
    run = prepare(tmp_path / "kept", callback=callback, callbacks=[Failing()] * fails, max_steps=2)
    with pytest.raises(MemoryError) if fails else nullcontext():
        run.trainer.train()
    assert {name for layer in snip_linears(run.model).values() for name in layer.formats.values()} == {"fp4"}
    model = model_with_dropout()
    model.load_state_dict(run.model.state_dict())
    assert not torch.equal(logits(run.model), logits(model))
    train(tmp_path / "other", callback=callback, max_steps=1)  # of another model
    assert {name for layer in snip_linears(run.model).values() for name in layer.formats.values()} == {"fp4"}


class _ReplaceLayer(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        block = kwargs["model"].model.layers[0]
        block.mlp.up_proj = nn.Linear(block.mlp.up_proj.in_features, block.mlp.up_proj.out_features, bias=False)


@pytest.mark.parametrize("fails", [False, True])
def test_formats_stay_if_a_layer_was_replaced_during_the_run(fails: bool, tmp_path: Path) -> None:
    """And the error that ended the run is the one that is raised."""
    callback, others = SnipCallback(AT_ONCE, keep_formats=True), [_ReplaceLayer(), *[Failing()] * fails]
    run = prepare(tmp_path, callback=callback, callbacks=others, max_steps=2)
    with pytest.raises(MemoryError) if fails else nullcontext():
        run.trainer.train()
    layers = snip_linears(run.model)
    assert "model.layers.0.mlp.up_proj" not in layers
    assert {name for layer in layers.values() for name in layer.formats.values()} == {"fp4"}


def _lora(**options: Any) -> nn.Module:
    peft = pytest.importorskip("peft")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        options = {"target_modules": ["q_proj", "down_proj"], "r": 2} | options
        return peft.get_peft_model(tiny_llama(hidden=32), peft.LoraConfig(**options))


def _compiled() -> nn.Module:
    model = tiny_llama(hidden=32)
    for block in model.model.layers:
        block.compile(backend="eager")
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied weights": lambda: tiny_llama(hidden=32, tie_word_embeddings=True),
    "Conv1D": gpt2,
    "experts": lambda: build("qwen3-moe"),
    "PEFT adapters": _lora,
    "compiled blocks": _compiled,
}


@pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning")
# torch itself warns when it compiles under gradient checkpointing.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not:DeprecationWarning")
@pytest.mark.parametrize("name", slow_but(MODELS, "PEFT adapters"))
def test_every_kind_of_model_is_after_training_what_it_was(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    before, keys = classes(model), list(model.state_dict())
    parameters = {id(parameter) for parameter in model.parameters()}
    config = getattr(model.config, "_experts_implementation", None)
    run = train(tmp_path, callback=SnipCallback(AT_ONCE), model=model, max_steps=2)
    assert run.callback is not None and run.callback.controller is not None
    assert run.callback.controller.plan.fp4_fraction == 1.0
    assert is_plain(model) and classes(model) == before
    assert list(model.state_dict()) == keys
    assert {id(parameter) for parameter in model.parameters()} == parameters
    assert getattr(model.config, "_experts_implementation", None) == config
    if name == "tied weights":
        assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.isfinite(logits(model)).all()
