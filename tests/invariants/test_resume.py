"""A run that was interrupted anywhere goes on, to the bit, as if it had not been."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_runs
from configs import fp4_config
from safetensors.torch import load_file
from tiny_runs import (
    SCHEDULE,
    Run,
    data,
    differing,
    history,
    model_with_dropout,
    one_thread,
    tiny_llama,
    weights,
    without_seconds,
)
from transformers import TrainerCallback

from snip_hf import PrecisionPlan, SnipCallback, SnipConfig
from snip_hf.integrations import state_files
from snip_hf.layers.state import snip_linears
from snip_hf.planning.solver import process as process_module

CONFIG = fp4_config(stages=2, **SCHEDULE)
BACK_TO_BACK = SCHEDULE | {"refresh_every": 3, "apply_delay": 3}
OTHER = fp4_config(stages=2, granularity="gemm", target_fp4_fraction=0.5, probes=2, **BACK_TO_BACK)
SAVING = {"save_strategy": "steps", "save_steps": 1}
STEPS = 8
ACCUMULATED = {"bf16": True, "gradient_accumulation_steps": 2}


def train(folder: Path, config: SnipConfig | None = None, **options: Any) -> Run:
    """Trains to the end of the second refresh, over an end of the data."""
    short = {"max_steps": STEPS, "trainer": {"train_dataset": data(12)}}
    return tiny_runs.train(folder, config, **short | options)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The uninterrupted run, a checkpoint after each step."""
    run = train(tmp_path_factory.mktemp("full"), CONFIG, **SAVING)
    assert [(line["step"], line["applied_step"]) for line in run.refreshes] == [(2, 4), (6, 8)]
    assert run.refreshes[0]["layers_changed"] > 0
    return run


def interrupted(run: Run, step: int, folder: Path) -> Path:
    """Copies what a run leaves to `folder`, with the checkpoint of `step` as the only one; returns the checkpoint."""
    shutil.copytree(run.folder / "snip", folder / "snip")
    return shutil.copytree(run.folder / f"checkpoint-{step}", folder / f"checkpoint-{step}")


def state(folder: Path, step: int) -> dict[str, Any]:
    return json.loads((folder / f"checkpoint-{step}" / "snip_state.json").read_text())


def assert_same_end(resumed: Run, full: Run) -> None:
    assert resumed.losses == full.losses
    assert differing(weights(resumed.model), weights(full.model)) == []
    plans = [json.loads((run.folder / "snip" / "plan.json").read_text()) for run in (resumed, full)]
    assert without_seconds(plans[0]) == without_seconds(plans[1])


def assert_same_states(resumed: Run, full: Run, steps: range) -> None:
    """The plan in force, and the problem and the record of a refresh under way, after each step."""
    for step in steps:
        assert without_seconds(state(resumed.folder, step)) == without_seconds(state(full.folder, step))


def test_resuming_after_any_step_gives_the_uninterrupted_run(
    full: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step = 3
    caplog.set_level(logging.INFO, "snip_hf")
    checkpoint = interrupted(full, step, tmp_path)
    resumed = train(tmp_path, CONFIG, resume=checkpoint, **SAVING)
    share = ([0.0] + [line["fp4_fraction"] for line in full.refreshes if line["applied_step"] <= step])[-1]
    assert f"snip-hf: resumed at step {step}: {share:.1%} of the linear FLOPs in FP4" in caplog.text
    assert_same_end(resumed, full)
    assert_same_states(resumed, full, range(step + 1, STEPS + 1))
    assert without_seconds(resumed.history) == without_seconds(full.history)


def test_the_states_are_of_runs_in_the_middle_of_a_refresh_too(full: Run) -> None:
    pending = {step: state(full.folder, step)["pending"] for step in range(1, STEPS + 1)}
    assert [step for step in pending if pending[step] is not None] == [2, 3, 6, 7]


def test_the_comparison_notices_a_state_of_another_seed(full: Run, tmp_path: Path) -> None:
    checkpoint = interrupted(full, 5, tmp_path)
    saved = state(tmp_path, 5)
    saved["config"]["seed"] = 1
    (checkpoint / "snip_state.json").write_text(json.dumps(saved))
    resumed = train(tmp_path, fp4_config(stages=2, seed=1, **SCHEDULE), resume=checkpoint, **SAVING)
    assert resumed.losses[5] == full.losses[5]
    assert resumed.losses[6] != full.losses[6]


def test_resuming_holds_under_autocast_accumulation_gemm_granularity_and_back_to_back_refreshes(
    other: Run, tmp_path: Path
) -> None:
    checkpoint = interrupted(other, 5, tmp_path)
    resumed = train(tmp_path, OTHER, resume=checkpoint, **ACCUMULATED, **SAVING)
    assert_same_end(resumed, other)
    assert without_seconds(resumed.history) == without_seconds(other.history)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = train(tmp_path_factory.mktemp("other"), OTHER, **ACCUMULATED, **SAVING)
    # The refresh of step 8 would be due after step 11, when training is over, and is left out.
    assert [(line["step"], line["applied_step"]) for line in run.refreshes] == [(2, 5), (5, 8)]
    return run


class _Power(TrainerCallback):
    """Ends training after a step and its checkpoint: politely, or by an error as a lost machine would."""

    def __init__(self, step: int, polite: bool) -> None:
        self.step, self.polite = step, polite

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if state.global_step == self.step:
            if not self.polite:
                raise KeyboardInterrupt
            control.should_training_stop = True
        return control


def test_a_run_that_was_really_stopped_goes_on_in_its_folder(full: Run, tmp_path: Path) -> None:
    callback = SnipCallback(CONFIG)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, callback=callback, callbacks=[_Power(7, False)], **SAVING)
    assert callback.controller._run.refresher.pending is None  # the run has ended, and with it its solver
    resumed = train(tmp_path, CONFIG, resume=tmp_path / "checkpoint-7", **SAVING)
    assert_same_end(resumed, full)
    assert without_seconds(resumed.history) == without_seconds(full.history)


def test_a_history_that_a_crash_left_broken_is_repaired(full: Run, tmp_path: Path) -> None:
    checkpoint = interrupted(full, 5, tmp_path)
    path = tmp_path / "snip" / "history.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    assert without_seconds(train(tmp_path, CONFIG, resume=checkpoint, **SAVING).history) == without_seconds(
        full.history
    )


def test_a_solver_that_cannot_be_started_again_costs_the_refresh_and_not_the_run(
    full: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = interrupted(full, 3, tmp_path)
    monkeypatch.setattr(process_module.sys, "executable", "/nowhere/python")
    resumed = train(tmp_path, CONFIG, resume=checkpoint, max_steps=5)
    assert [(line["step"], line["status"], line["decided_step"]) for line in resumed.refreshes] == [(2, "kept", 3)]
    assert "could not be started" in resumed.refreshes[0]["reason"]
    assert "the refresh of step 2 failed, the plan in force stays: SolverError" in caplog.text
    assert set(resumed.losses) == {1, 2, 3, 4, 5}


def test_a_moved_checkpoint_is_found_whatever_lies_in_the_output_folder(full: Run, tmp_path: Path) -> None:
    """There: the same step of another run of the same configuration."""
    step = 5
    moved = shutil.copytree(full.folder / f"checkpoint-{step}", tmp_path / "elsewhere" / "best")
    shutil.copytree(full.folder / "checkpoint-6", tmp_path / "run" / f"checkpoint-{step}")
    resumed = train(tmp_path / "run", CONFIG, resume=moved)
    assert_same_end(resumed, full)
    start, *refreshes = resumed.history
    assert (start["event"], start["step"], start["plan"]) == (
        "start",
        step,
        state(full.folder, step)["plan"]["assignment"],
    )
    assert without_seconds(refreshes) == without_seconds(
        [line for line in full.refreshes if line["decided_step"] > step]
    )


@pytest.mark.slow
def test_a_checkpoint_trained_without_snip_is_continued_with_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saving = SAVING | {"save_steps": 5, "max_steps": 12, "lr_scheduler_type": "constant"}
    train(tmp_path, **saving | {"max_steps": 5})
    resumed = train(tmp_path, CONFIG, resume=tmp_path / "checkpoint-5", **saving)
    expected = (
        f"snip-hf: resuming at step 5 with a new plan, because there is no snip_state.json in {tmp_path}/checkpoint-5: "
        "the checkpoint was trained without SNIP."
    )
    assert [record.message for record in caplog.records if record.name == "snip_hf.integrations.state_files"] == [
        expected
    ]
    start, *refreshes = resumed.history
    assert (start["step"], {fmt for formats in start["plan"].values() for fmt in formats.values()}) == (5, {"fp8"})
    assert [(line["step"], line["applied_step"]) for line in refreshes] == [(6, 8), (10, 12)]
    assert state(tmp_path, 10)["pending"]["step"] == 10


def test_resume_false_starts_a_new_plan_from_the_weights(
    full: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "snip_hf")
    checkpoint = interrupted(full, 7, tmp_path)
    callback = SnipCallback(fp4_config(**SCHEDULE | {"refresh_every": 2, "apply_delay": 1}), resume=False)
    resumed = train(tmp_path, callback=callback, resume=checkpoint, max_steps=9)
    start, *refreshes = resumed.history
    assert (start["step"], {fmt for formats in start["plan"].values() for fmt in formats.values()}) == (7, {"fp8"})
    assert [(line["step"], line["applied_step"]) for line in refreshes] == [(8, 9)]
    assert [record.message for record in caplog.records if record.name.startswith("snip_hf")] == []


def files(folder: Path) -> dict[str, bytes]:
    """All files of a folder, without the lock that runs leave."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "_snip.lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def refused(folder: Path, callback: SnipCallback, resume: Path, kind: type[Exception] = ValueError, **more: Any) -> str:
    """Returns the message with which training is refused, after checking that not one file was changed."""
    before = files(folder)
    with pytest.raises(kind) as caught:
        train(folder, callback=callback, resume=resume, **more)
    assert files(folder) == before
    return str(caught.value)


def test_a_checkpoint_of_another_configuration_is_refused_unless_only_the_solvers_time_limit_differs(
    full: Run, tmp_path: Path
) -> None:
    checkpoint = interrupted(full, 7, tmp_path)
    config = fp4_config(stages=2, target_fp4_fraction=0.5, seed=3, **SCHEDULE)
    model = model_with_dropout()
    assert refused(tmp_path, SnipCallback(config), checkpoint, model=model) == (
        f"Cannot resume from {checkpoint}/snip_state.json: The checkpoint was trained with seed=0, this run asks "
        "for seed=3 (different fields: seed). Use the checkpoint's "
        "configuration to resume its run, or start a new plan from its weights: SnipCallback(..., resume=False), or no "
        "load_state_dict in a loop of your own."
    )
    assert not snip_linears(model)  # plain, as before
    # The message's advice works, with the same model and the unchanged state.
    patient = fp4_config(stages=2, solver_time_limit=5.0, **SCHEDULE)
    resumed = train(tmp_path, patient, model=model, resume=checkpoint, **SAVING)
    assert resumed.losses == full.losses
    assert differing(weights(resumed.model), weights(full.model)) == []
    assert without_seconds(resumed.refreshes) == without_seconds(full.refreshes)


def test_a_damaged_state_is_refused_by_the_name_of_its_file(full: Run, tmp_path: Path) -> None:
    path = interrupted(full, 7, tmp_path) / "snip_state.json"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    expected = f"Cannot resume from {path}: it is not valid JSON, perhaps truncated"
    assert refused(tmp_path, SnipCallback(CONFIG), path.parent).startswith(expected)


def test_a_state_of_another_step_is_refused(full: Run, tmp_path: Path) -> None:
    checkpoint = interrupted(full, 7, tmp_path)
    shutil.copy(full.folder / "checkpoint-6" / "snip_state.json", checkpoint)
    assert refused(tmp_path, SnipCallback(CONFIG), checkpoint) == (
        f"Cannot resume from {checkpoint}/snip_state.json: The SNIP state is of step 6, but the weights are of step 7. "
        "Take both from the same checkpoint folder."
    )


def test_a_state_of_another_model_is_refused(full: Run, tmp_path: Path) -> None:
    config = fp4_config(**SCHEDULE)
    bigger = train(tmp_path / "bigger", config, model=tiny_llama(hidden=32, layers=3), max_steps=1, **SAVING)
    plain = train(tmp_path / "run", max_steps=1, **SAVING)
    checkpoint = plain.folder / "checkpoint-1"
    shutil.copy(bigger.folder / "checkpoint-1" / "snip_state.json", checkpoint)
    assert refused(plain.folder, SnipCallback(config), checkpoint) == (
        f"Cannot resume from {checkpoint}/snip_state.json: The plan names layer "
        "'model.layers.2.self_attn.q_proj', which is not a swapped layer of the model (it has 14, e.g. "
        "'model.layers.0.self_attn.q_proj'). Was it made for another model? Run `snip-hf inspect PLAN --model MODEL` "
        "to compare."
    )


def test_a_checkpoint_that_lost_its_state_is_refused_even_where_it_was_moved_to(full: Run, tmp_path: Path) -> None:
    moved = shutil.copytree(full.folder / "checkpoint-7", tmp_path / "elsewhere")
    (moved / "snip_state.json").unlink()
    (tmp_path / "run").mkdir()
    assert refused(tmp_path / "run", SnipCallback(CONFIG), moved) == (
        f"The checkpoint of step 7 was trained with SNIP, but {moved} has no snip_state.json. Restore the file, or "
        "start a new plan with SnipCallback(resume=False)."
    )


def test_a_state_that_cannot_be_written_costs_a_warning_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full_disk(path: Path, document: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state_files, "write_json_atomic", full_disk)
    run = train(tmp_path, CONFIG, max_steps=1, **SAVING)
    assert len(run.losses) == 1
    path = tmp_path / "checkpoint-1" / "snip_state.json"
    assert not path.exists()
    assert (
        f"snip-hf: could not write {path}; resuming there will fail: [Errno 28] No space left on device"
    ) in caplog.messages


def test_a_run_that_ended_early_resumes_without_a_second_line_for_its_last_refresh(tmp_path: Path) -> None:
    train(tmp_path, CONFIG, callbacks=[_Power(3, True)], max_steps=5, **SAVING)
    assert [(line["step"], line["status"]) for line in history(tmp_path)[1:]] == [(2, "kept")]
    train(tmp_path, CONFIG, max_steps=5, resume=tmp_path / "checkpoint-3", **SAVING)
    assert [(line["step"], line["status"], line["applied_step"]) for line in history(tmp_path)[1:]] == [
        (2, "applied", 4)
    ]


# --- what the Trainer can be asked to save, and where checkpoints may come to lie


def test_a_checkpoint_of_the_model_alone_goes_on_with_plan_and_schedule_but_not_with_the_optimizer(
    full: Run, tmp_path: Path
) -> None:
    alone = train(tmp_path / "alone", CONFIG, save_only_model=True, callbacks=[_Power(3, True)], **SAVING)
    assert alone.losses == {step: full.losses[step] for step in (1, 2, 3)}
    checkpoint = interrupted(alone, 3, tmp_path)
    assert not (checkpoint / "optimizer.pt").exists()
    assert state(tmp_path, 3)["pending"]["step"] == 2
    resumed = train(tmp_path, CONFIG, resume=checkpoint, **SAVING)
    assert [(line["step"], line["applied_step"]) for line in resumed.refreshes] == [(2, 4), (6, 8)]
    assert without_seconds(resumed.refreshes[0]) == without_seconds(full.refreshes[0])
    # The Trainer begins with a new optimizer, without a word: these are other weights from the first step on.
    assert resumed.losses[5] != full.losses[5]


def test_the_best_model_at_the_end_has_its_plan_in_its_checkpoint_and_the_record_is_that_of_the_run(
    tmp_path: Path,
) -> None:
    run = train(
        tmp_path,
        CONFIG,
        trainer={},
        gradient_accumulation_steps=2,
        load_best_model_at_end=True,
        eval_strategy="steps",
        eval_steps=3,
        **SAVING | {"save_steps": 3},
    )
    step = run.trainer.state.best_global_step
    assert step in (3, 6)
    best = tmp_path / f"checkpoint-{step}"
    assert run.trainer.state.best_model_checkpoint == str(best)
    assert differing(weights(run.model), load_file(best / "model.safetensors")) == []
    plan, of_best = run.callback.controller.plan, PrecisionPlan.from_dict(state(tmp_path, step)["plan"])
    assert PrecisionPlan.load(tmp_path / "snip" / "plan.json") == plan
    assert plan.provenance.step == 6 > of_best.provenance.step
    assert {name: layer.formats for name, layer in snip_linears(run.model).items()} == plan.assignment
    # Evaluated under the plan that it was saved with, it is as good as it was.
    assert run.trainer.evaluate()["eval_loss"] != run.trainer.state.best_metric
    of_best.apply(run.model)
    with one_thread():
        assert run.trainer.evaluate()["eval_loss"] == run.trainer.state.best_metric
