"""Does the state of SNIP travel with every checkpoint of a Trainer, whoever asks for it, wherever it is moved?"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from configs import fp4_config
from small import tiny_llama
from tiny_runs import SCHEDULE, Run, differing, one_thread, prepare, weights, without_seconds
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from snip_hf import SnipCallback

CONFIG = fp4_config(**SCHEDULE)
STEPS = 6
SAVING = {"save_strategy": "steps", "save_steps": 3, "max_steps": STEPS}


class At(TrainerCallback):
    """Calls a function with the Trainer at an event, once `step` steps are done."""

    def __init__(self, event: str, step: int, act: Callable[[Trainer], None]) -> None:
        self.step, self.act, self.trainer = step, act, None
        setattr(self, event, self.run)

    def run(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.act(self.trainer)


def run(folder: Path, *callbacks: TrainerCallback, resume: Path | None = None, **options: Any) -> Run:
    """Trains without dropout, since what a Trainer saves in mid-step has the random numbers of later."""
    callbacks = callbacks or (SnipCallback(CONFIG, keep_formats=True),)
    options = {"max_steps": STEPS, "model": tiny_llama(hidden=32), "trainer": {"callbacks": list(callbacks)}} | options
    found = prepare(folder, **options)
    for callback in callbacks:
        callback.trainer = found.trainer
    found.callback = next(one for one in callbacks if isinstance(one, SnipCallback))
    with one_thread():
        found.trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return found


def save(trainer: Trainer) -> None:
    trainer._save_checkpoint(trainer.model, trial=None)


def stop(trainer: Trainer) -> None:
    trainer.control.should_training_stop = True


def interrupt(trainer: Trainer) -> None:
    raise KeyboardInterrupt


def preempt(trainer: Trainer) -> None:
    """Does the same as transformers' SIGTERM handler after its three seconds."""
    (jit,) = (one for one in trainer.callback_handler.callbacks if isinstance(one, JITCheckpointCallback))
    jit.jit_manager.is_checkpoint_requested = True


def saved(folder: Path, step: int) -> dict[str, Any]:
    return json.loads((folder / f"checkpoint-{step}" / "snip_state.json").read_text())


def assert_same_end(resumed: Run, full: Run) -> None:
    # The Trainer logs a step after its callbacks, so that those that save leave that entry out.
    assert resumed.losses.items() <= full.losses.items() and max(resumed.losses) == STEPS
    assert differing(weights(resumed.model), weights(full.model)) == []
    assert without_seconds(resumed.history) == without_seconds(full.history)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Run:
    found = run(tmp_path_factory.mktemp("full"))
    assert [(line["step"], line["applied_step"]) for line in found.refreshes] == [(2, 4)]
    return found


@pytest.mark.parametrize(
    ("noticed", "done", "step"),
    [
        pytest.param("on_optimizer_step", 3, 4, id="at the end of a step whose plan is due"),
        pytest.param("on_step_begin", 2, 2, id="in the middle of a step, with a refresh under way"),
    ],
)
def test_a_run_that_sigterm_ends_goes_on_to_the_bit(
    noticed: str, done: int, step: int, full: Run, tmp_path: Path
) -> None:
    snip = SnipCallback(CONFIG, keep_formats=True)
    run(tmp_path, snip, At(noticed, done, preempt), enable_jit_checkpoint=True)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == [f"checkpoint-{step}"]
    assert saved(tmp_path, step)["step"] == step
    assert_same_end(run(tmp_path, resume=tmp_path / f"checkpoint-{step}"), full)


def test_a_checkpoint_that_a_callback_asks_for_goes_on_under_any_name(full: Run, tmp_path: Path) -> None:
    """At the end of the step after which the first plan is due."""
    snip, saving = SnipCallback(CONFIG, keep_formats=True), At("on_step_end", 4, save)
    run(tmp_path, saving, snip, At("on_step_end", 4, stop))
    moved = (tmp_path / "checkpoint-4").rename(tmp_path / "kept")
    assert_same_end(run(tmp_path, resume=moved), full)


def test_a_checkpoint_that_is_asked_for_after_training_has_the_state_of_its_end(full: Run, tmp_path: Path) -> None:
    """After step 3, with a refresh under way."""
    stopped = run(tmp_path, SnipCallback(CONFIG), At("on_step_end", 3, stop))
    save(stopped.trainer)
    assert saved(tmp_path, 3)["pending"]["step"] == 2
    assert_same_end(run(tmp_path, resume=tmp_path / "checkpoint-3"), full)


def test_a_checkpoint_that_is_asked_for_after_an_interrupt_has_the_state_of_the_last_whole_step(
    full: Run, tmp_path: Path
) -> None:
    snip, interrupting = SnipCallback(CONFIG), At("on_step_begin", 3, interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, snip, interrupting)
    save(interrupting.trainer)
    assert_same_end(run(tmp_path, resume=tmp_path / "checkpoint-3"), full)


def test_after_an_interrupt_in_mid_step_a_checkpoint_has_no_state_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    interrupting = At("on_optimizer_step", 2, interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, SnipCallback(CONFIG), interrupting)
    save(interrupting.trainer)
    assert "could not write" in caplog.text and "in the middle of optimizer step 3" in caplog.text
    assert not (tmp_path / "checkpoint-2" / "snip_state.json").exists()


def test_a_checkpoint_that_ray_tune_reports_goes_on(full: Run, tmp_path: Path) -> None:
    """transformers writes it outside of the output folder, after an evaluation."""

    def report(trainer: Trainer) -> None:
        trainer._tune_save_checkpoint(str(tmp_path / "reported"))
        stop(trainer)

    run(tmp_path, SnipCallback(CONFIG), At("on_evaluate", 3, report), eval_strategy="steps", eval_steps=3)
    assert saved(tmp_path / "reported", 3)["pending"]["step"] == 2
    assert_same_end(run(tmp_path, resume=tmp_path / "reported" / "checkpoint-3"), full)


class Moving(Trainer):
    """Keeps one checkpoint, in a folder of its own."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        folder = Path(self.args.output_dir)
        shutil.rmtree(folder / "last", ignore_errors=True)
        (folder / f"checkpoint-{self.state.global_step}").rename(folder / "last")


def test_a_trainer_that_moves_its_checkpoints_resumes_from_them(full: Run, tmp_path: Path) -> None:
    snip = SnipCallback(CONFIG, keep_formats=True)
    run(tmp_path, snip, At("on_save", 3, stop), trainer_class=Moving, **SAVING)
    assert_same_end(run(tmp_path, resume=tmp_path / "last"), full)


def test_a_checkpoint_between_the_optimizers_step_and_its_end_has_no_state_and_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its weights are of step 3, by its number it is of step 2."""
    run(tmp_path, SnipCallback(CONFIG), At("on_optimizer_step", 2, save), max_steps=3)
    path = tmp_path / "checkpoint-2" / "snip_state.json"
    assert (
        f"snip-hf: could not write {path}; resuming there will fail: The state was requested in the middle of "
        "optimizer step 3. Save before before_optimizer_step or after after_step (under a Trainer in on_step_begin, "
        "on_step_end or on_save)."
    ) in caplog.messages
    with pytest.raises(
        ValueError, match=r"The checkpoint of step 2 was trained with SNIP, but .* has no snip_state\.json"
    ):
        run(tmp_path, resume=path.parent)


def test_models_that_are_saved_in_mid_run_get_no_state(tmp_path: Path) -> None:
    def export(trainer: Trainer) -> None:
        trainer.save_model(str(tmp_path / "export"))

    found = run(tmp_path, SnipCallback(CONFIG), At("on_step_end", 2, export), max_steps=2)
    assert (tmp_path / "export" / "config.json").exists()
    assert not list(tmp_path.rglob("snip_state.json"))
    found.trainer.remove_callback(SnipCallback)
    with one_thread():
        found.trainer.train()
    save(found.trainer)
    assert "SnipCallback" not in found.trainer.state.stateful_callbacks
    assert not list(tmp_path.rglob("snip_state.json"))


def test_restoring_the_states_of_callbacks_neither_warns_of_snip_nor_replaces_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def stopping() -> EarlyStoppingCallback:
        return EarlyStoppingCallback(early_stopping_patience=5)

    evaluating = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True}
    options = {"restore_callback_states_from_checkpoint": True, **SAVING, **evaluating}
    run(tmp_path, SnipCallback(CONFIG), stopping(), **options | {"max_steps": 3})
    snip = SnipCallback(CONFIG)
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        resumed = run(tmp_path, snip, stopping(), resume=tmp_path / "checkpoint-3", **options)
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    assert "Ignoring" not in caplog.text
    assert snip in resumed.trainer.callback_handler.callbacks
    assert max(resumed.losses) == STEPS


def test_each_trial_of_a_search_has_its_own_record_and_states_in_its_own_folder(tmp_path: Path) -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 3, **SAVING, "max_steps": 3}
    callback = SnipCallback(CONFIG)
    found = prepare(
        tmp_path,
        trainer={"model": None, "model_init": lambda: tiny_llama(hidden=32), "callbacks": [callback]},
        **options,
    )
    with one_thread():
        found.trainer.train()
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        found.trainer.hyperparameter_search(
            lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2)},
            backend="optuna",
            n_trials=2,
        )
    assert all(path.read_bytes() == content for path, content in before.items())
    for trial in range(2):
        assert saved(tmp_path / f"run-{trial}", 3)["step"] == 3
        assert (tmp_path / f"run-{trial}" / "snip" / "history.jsonl").exists()
    found.trainer.hp_search_backend = None
    with one_thread():
        found.trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
