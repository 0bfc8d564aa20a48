"""SNIP under a real Trainer refreshes on schedule, keeps its promises, and refuses settings that cannot work."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_runs
import torch
import transformers
from accelerate import FullyShardedDataParallelPlugin
from configs import fp4_config
from events import records_of
from safetensors.torch import load_file
from slow_cases import slow
from small import tiny_llama
from tiny_runs import (
    FAST,
    SCHEDULE,
    STEPS,
    Run,
    data,
    differing,
    history,
    model_with_dropout,
    noted_divergences,
    solve_with,
    weights,
    without_seconds,
)
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from snip_hf import PrecisionPlan, SnipCallback, SnipConfig, SnipController, convert_model
from snip_hf.config import DEFAULT_FP4_FRACTION
from snip_hf.estimation.table import LAYER
from snip_hf.integrations import trainer as trainer_module
from snip_hf.layers.state import snip_linears
from snip_hf.numerics.gemms import GEMMS
from snip_hf.records.events import Refresh
from snip_hf.records.load import load_run
from snip_hf.reporting.run_report import reason_table
from snip_hf.training import refresh

pytestmark = pytest.mark.usefixtures("one_thread_only")

CONFIG = fp4_config(stages=2, **SCHEDULE)
SHORT = 5


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    """Two micro-batches a step."""
    return tiny_runs.arguments(folder, **{"gradient_accumulation_steps": 2} | changes)


def train(folder: Path, config: SnipConfig | None = None, **options: Any) -> Run:
    return tiny_runs.train(folder, config, **{"gradient_accumulation_steps": 2} | options)


class Watch(TrainerCallback):
    """Notes the model's formats before and after every optimizer step."""

    def __init__(self) -> None:
        self.before: dict[int, dict[str, dict[str, str]]] = {}
        self.after: dict[int, dict[str, dict[str, str]]] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.before[state.global_step + 1] = formats(kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.after[state.global_step] = formats(kwargs["model"])


def formats(model: nn.Module) -> dict[str, dict[str, str]]:
    return {name: layer.formats for name, layer in snip_linears(model).items()}


def names(assignment: dict[str, dict[str, str]]) -> set[str]:
    return {fmt for layer in assignment.values() for fmt in layer.values()}


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, watch: Watch) -> Run:
    return train(tmp_path_factory.mktemp("run"), CONFIG, callbacks=[watch], save_strategy="steps", save_steps=STEPS)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Without dropout, to the first step under the first plan."""
    run = train(tmp_path_factory.mktemp("short"), CONFIG, model=tiny_llama(hidden=32), max_steps=SHORT)
    assert "fp4" in names(formats(run.model))
    return run


# -------------------------------------------------------------------------------------------------------- the refresh


def test_the_history_begins_with_what_was_asked_and_what_was_found(run: Run) -> None:
    start = dict(run.history[0])
    versions = start.pop("versions")
    # A wheel from an index has the version without "+cu130".
    assert torch.__version__.startswith(versions["torch"]) and versions["transformers"] == transformers.__version__
    assert start == {
        "event": "start",
        "schema_version": 1,
        "step": 0,
        "config": json.loads(json.dumps(CONFIG.to_dict())),
        "plan": {name: dict.fromkeys(GEMMS, "fp8") for name in snip_linears(run.model)},
        "flops": {
            name: dict.fromkeys(GEMMS, 2.0 * layer.weight.numel()) for name, layer in snip_linears(run.model).items()
        },
        "stages": [[name for name in snip_linears(run.model) if f".{block}." in name] for block in range(2)],
        "model_name": "LlamaForCausalLM",
    }


def test_every_refresh_has_one_line_with_all_its_fields(run: Run) -> None:
    assert [line["step"] for line in run.refreshes] == [2, 6, 10]
    for line in run.refreshes:
        assert set(line) == {"event", "status", *(field.name for field in dataclasses.fields(Refresh))}
        assert (line["event"], line["status"], line["reason"]) == ("refresh", "applied", None)
        assert line["applied_step"] == line["decided_step"] == line["step"] + 2
        assert line["layers_changed"] == len({change.split(":")[0] for change in line["changes"]})
        assert line["objective"] >= line["bound"] > 0
        assert line["gap"] == pytest.approx((line["objective"] - line["bound"]) / line["objective"], abs=1e-9)
        assert line["solver"] == "greedy"
        assert set(line["seconds"]) == {"probe", "solver", "waited"}
        assert all(seconds >= 0 for seconds in line["seconds"].values())
        assert set(line["divergence"]) == {"fp8", "fp4"}
        assert line["memory_mib"] == {"measured": None}
        assert 4 < line["loss"] < 6


def test_the_history_retold_from_its_first_plan_ends_at_the_plan_in_force(run: Run) -> None:
    plan = run.history[0]["plan"]
    for line in run.refreshes:
        for change, (old, new) in line["changes"].items():
            layer, _, gemm = change.rpartition(":")
            assert plan[layer][gemm] == old != new
            plan[layer][gemm] = new
    saved = PrecisionPlan.load(run.folder / "snip" / "plan.json")
    assert plan == saved.assignment == run.callback.controller.plan.assignment == formats(run.model)
    assert saved.provenance.step == 10
    assert saved.provenance.config == json.loads(json.dumps(CONFIG.to_dict()))


def test_every_stage_attains_the_target_and_the_figures_are_those_of_the_plan(run: Run) -> None:
    saved = PrecisionPlan.load(run.folder / "snip" / "plan.json")
    line = run.refreshes[-1]
    assert line["stage_fp4_fractions"] == list(saved.stage_fp4_fractions)
    assert line["fp4_fraction"] == saved.fp4_fraction
    assert len(saved.stages) == 2
    for line in run.refreshes:
        assert all(DEFAULT_FP4_FRACTION <= share < 1 for share in line["stage_fp4_fractions"])


def test_the_divergence_file_holds_every_choice_and_sums_to_the_historys_figures(run: Run) -> None:
    assert sorted(path.name for path in (run.folder / "snip").iterdir()) == [
        *("divergence-10.json", "divergence-2.json", "divergence-6.json", "history.jsonl", "plan.json")
    ]
    for line in run.refreshes:
        document = json.loads((run.folder / "snip" / f"divergence-{line['step']}.json").read_text())
        assert (document["schema_version"], document["step"], document["loss"]) == (1, line["step"], line["loss"])
        records = {(record["layer"], record["gemm"], record["format"]): record for record in records_of(document)}
        assert set(records) == {
            (name, gemm, fmt)
            for name in snip_linears(run.model)
            for gemm in (*GEMMS, "layer")
            for fmt in ("fp8", "fp4")
        }
        for fmt, kind in [(fmt, kind) for fmt in ("fp8", "fp4") for kind in ("loss", "weight")]:
            values = [r[f"{kind}_divergence"] for (_, gemm, f), r in records.items() if (gemm, f) == ("layer", fmt)]
            assert line["divergence"][fmt][kind] == pytest.approx(sum(values), rel=1e-12)
        assert line["divergence"]["fp4"]["weight"] > line["divergence"]["fp8"]["weight"] > 0


def test_the_probed_loss_is_the_models_on_the_steps_first_micro_batch(tmp_path: Path) -> None:
    """Without dropout, and with all of it in bf16 until the plan is applied, it can be computed beside the run."""
    losses = {}

    class Recording(Trainer):
        def training_step(self, model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Any = None) -> Tensor:
            losses.setdefault(self.state.global_step + 1, float(model(**inputs).loss.detach()))
            return super().training_step(model, inputs, num_items_in_batch)

    model = tiny_llama(hidden=32)
    # A model in training mode would be taken for the step's own pass.
    Recording.training_step = _in_evaluation_mode(Recording.training_step)
    trainer = Recording(
        model=model,
        args=arguments(tmp_path, max_steps=4),
        train_dataset=data(),
        callbacks=[SnipCallback(fp4_config(start_format="bf16", **SCHEDULE))],
    )
    trainer.train()
    (line,) = history(tmp_path)[1:]
    # The probe takes the mean of the losses at W + eps * d and W - eps * d.
    assert line["loss"] == pytest.approx(losses[2], rel=1e-4)
    assert abs(losses[1] - losses[2]) > 1e-3


def _in_evaluation_mode(step: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run_step(self: Trainer, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        model.eval()  # Trainer.training_step puts it back
        return step(self, model, *args, **kwargs)

    return run_step


def test_a_plan_is_applied_exactly_after_its_step_and_stays_until_the_next(run: Run, watch: Watch) -> None:
    assert all(names(watch.before[step]) == {"fp8"} for step in range(1, 5))
    assert names(watch.after[3]) == {"fp8"}
    assert names(watch.after[4]) == {"fp8", "fp4"}
    for step in range(1, STEPS):
        assert watch.before[step + 1] == watch.after[step]
        if step not in (4, 8, 12):
            assert watch.after[step] == watch.before[step]


def test_without_a_delay_a_plan_is_applied_after_the_step_it_was_probed_in(tmp_path: Path) -> None:
    watch = Watch()
    config = fp4_config(first_refresh=1, refresh_every=2, apply_delay=0, granularity="gemm", **FAST)
    run = train(tmp_path, config, callbacks=[watch], max_steps=3, warmup_steps=0)
    assert [(line["step"], line["applied_step"], line["decided_step"]) for line in run.refreshes] == [
        (1, 1, 1),
        (3, 3, 3),
    ]
    assert names(watch.before[1]) == {"fp8"}
    assert names(watch.before[2]) == {"fp8", "fp4"}
    assert any(len(set(layer.values())) == 2 for layer in watch.before[2].values())


def test_evaluation_in_between_changes_nothing(short: Run, tmp_path: Path) -> None:
    """Without dropout and within an epoch: an evaluation's data loader draws from torch's generator, SNIP or not."""
    evaluating = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}
    run = train(tmp_path, CONFIG, model=tiny_llama(hidden=32), max_steps=SHORT, **evaluating)
    assert len(run.eval_losses) == SHORT + 1
    assert run.losses == short.losses
    assert without_seconds(run.history) == without_seconds(short.history)


@pytest.mark.slow
def test_a_callback_that_is_added_later_and_a_model_init_give_the_same_run(run: Run, tmp_path: Path) -> None:
    later = Trainer(model=model_with_dropout(), args=arguments(tmp_path / "later"), train_dataset=data())
    later.add_callback(SnipCallback(CONFIG))
    later.train()
    made = Trainer(
        model_init=lambda: model_with_dropout(),
        args=arguments(tmp_path / "made"),
        train_dataset=data(),
        callbacks=[SnipCallback(CONFIG)],
    )
    made.train()
    for trainer in (later, made):
        other = Run(Path(trainer.args.output_dir), trainer, None)
        assert other.losses == run.losses
        assert without_seconds(other.history) == without_seconds(run.history)
        assert differing(weights(other.model), weights(run.model)) == []


def test_a_recomputed_forward_does_not_count_as_another_micro_batch(short: Run, tmp_path: Path) -> None:
    """Recomputation draws the same rounding numbers again, so that it changes nothing, in FP4 as in BF16."""
    model = tiny_llama(hidden=32)
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    run = train(tmp_path, CONFIG, model=model, max_steps=SHORT)
    assert run.losses == short.losses
    assert without_seconds(run.refreshes) == without_seconds(short.refreshes)


def test_the_divergences_are_told_the_trainers_clip_factor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = noted_divergences(monkeypatch)
    config = fp4_config(first_refresh=2, refresh_every=1, apply_delay=1, **FAST)
    run = train(tmp_path, config, trainer={"train_dataset": data(10)}, max_steps=4)
    norms = [run.losses[step][1] for step in (2, 3)]
    assert min(norms) > 0.6
    steps = [call["optimizer_step"] for call in calls]
    assert [step.clip_factor for step in steps] == pytest.approx([0.5 / norm for norm in norms], rel=1e-5)
    # Step 3 ends the epoch with a single micro-batch.
    assert [step.micro_batches for step in steps] == [2, 1]


class Batches(Trainer):
    """Keeps every micro-batch with the number of labels in its step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept: list[tuple[int, dict[str, Any]]] = []

    def training_step(self, model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Any = None) -> Tensor:
        self.kept.append((self.state.global_step, dict(inputs, num_items_in_batch=num_items_in_batch)))
        return super().training_step(model, inputs, num_items_in_batch)


def test_a_plain_loop_over_the_same_batches_gives_the_trainers_losses_and_plans(tmp_path: Path) -> None:
    settings = {"lr_scheduler_type": "constant", "warmup_steps": 0, "optim": "adamw_torch", "weight_decay": 0.0}
    trainer = Batches(
        model=tiny_llama(hidden=32),
        args=arguments(tmp_path / "trainer", max_steps=SHORT, **settings),
        train_dataset=data(14),  # step 4 ends the epoch with a single micro-batch
        callbacks=[SnipCallback(CONFIG)],
    )
    trainer.train()
    run = Run(tmp_path / "trainer", trainer, None)

    model = tiny_llama(hidden=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    controller = SnipController(model, optimizer, CONFIG, output_dir=tmp_path / "loop")
    controller.start()
    losses = {}
    for step in range(1, SHORT + 1):
        total = 0.0
        for batch in (batch for done, batch in trainer.kept if done == step - 1):
            controller.capture(batch)
            loss = model(**batch).loss
            loss.backward()
            total += loss.item()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        controller.before_optimizer_step(step)
        optimizer.step()
        optimizer.zero_grad()
        controller.after_step(step)
        losses[step] = (total, norm)
    controller.close()

    assert {step: norm for step, (_, norm) in losses.items()} == {step: norm for step, (_, norm) in run.losses.items()}
    assert [loss for loss, _ in losses.values()] == pytest.approx([loss for loss, _ in run.losses.values()], rel=1e-6)
    assert without_seconds(history(tmp_path / "loop")) == without_seconds(run.history)
    assert differing(weights(model), weights(run.model)) == []


def test_training_again_starts_a_new_history_and_asks_no_batch_twice(short: Run, tmp_path: Path) -> None:
    class Stop(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1 and not stopped:
                stopped.append(True)
                raise MemoryError  # between the micro-batches of step 2, whose gradients are being watched

    stopped: list[bool] = []
    model, callbacks = tiny_llama(hidden=32), [SnipCallback(CONFIG), Stop()]
    before, settings = weights(model), arguments(tmp_path, max_steps=SHORT)
    trainer = Trainer(model=model, args=settings, train_dataset=data(), callbacks=callbacks)
    with pytest.raises(MemoryError):
        trainer.train()
    model.load_state_dict(before)
    again = Trainer(model=model, args=settings, train_dataset=data(), callbacks=callbacks)
    again.train()
    second = Run(tmp_path, again, None)
    assert second.losses == short.losses
    assert without_seconds(second.history) == without_seconds(short.history)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert len(model._forward_pre_hooks) == 0


# ------------------------------------------------------------------------------------------------- what is refused


def fake_state(**changes: Any) -> Callable[[], SimpleNamespace]:
    values = {"mixed_precision": "no", "num_processes": 1, "distributed_type": "DistributedType.NO"} | changes
    return lambda: SimpleNamespace(**values)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"mixed_precision": "fp8"}, "mixed_precision='fp8' would convert the linears a second time"),
        (
            {"distributed_type": "DistributedType.FSDP", "fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=1)},
            "policy='snip' cannot probe a model under FSDP version 1",
        ),
        ({"distributed_type": "DistributedType.MEGATRON_LM"}, "policy='snip' cannot probe a model under Megatron-LM"),
    ],
)
def test_settings_of_accelerate_are_checked_before_anything_is_swapped(
    changes: dict[str, Any], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_with_dropout()
    monkeypatch.setattr(trainer_module, "AcceleratorState", fake_state(**changes))
    with pytest.raises(ValueError) as caught:
        trainer = Trainer(model=model, args=arguments(tmp_path), train_dataset=data(), callbacks=[SnipCallback(CONFIG)])
        trainer.train()
    assert str(caught.value).startswith(expected)
    assert snip_linears(model) == {}


@pytest.mark.parametrize("policy", ["snip", "uniform-fp8"])
@pytest.mark.parametrize("added_later", [False, True])
def test_data_parallel_is_refused_with_every_policy(added_later: bool, policy: str, tmp_path: Path) -> None:
    model, args, callback = model_with_dropout(), arguments(tmp_path), SnipCallback(fp4_config(policy=policy))
    args._n_gpu = 2
    with pytest.raises(ValueError) as caught:
        trainer = Trainer(model=model, args=args, train_dataset=data(), callbacks=[] if added_later else [callback])
        trainer.add_callback(callback)
        trainer.train()
    assert str(caught.value) == (
        "The Trainer would put the model into nn.DataParallel on 2 GPUs, which copies the plan in every step. Start "
        "one process per GPU with `accelerate launch`, or make only one GPU visible (CUDA_VISIBLE_DEVICES=0)."
    )
    assert snip_linears(model) == {}


def test_an_event_before_training_says_what_is_missing() -> None:
    with pytest.raises(RuntimeError) as caught:
        SnipCallback().on_step_end(None, SimpleNamespace(global_step=1), None)  # type: ignore[arg-type]
    assert str(caught.value) == (
        "SnipCallback got a training event before on_train_begin; add it before train() is called."
    )


# ------------------------------------------------------------------------------------------- failures under a Trainer


def children() -> set[str]:
    """Process ids of this thread's children, zombies too."""
    return set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())


def test_every_kind_of_failure_in_one_run_keeps_the_plan_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class NanLoss(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            added.append(math.nan if state.global_step + 1 == 5 else 0.0)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 9

    added = [0.0]
    before = children()
    model = model_with_dropout()
    loss_function = model.loss_function
    # A constant leaves the gradients alone, so that only the probe and the log see it.
    model.loss_function = lambda **kwargs: loss_function(**kwargs) + added[-1]
    processes = solve_with(
        monkeypatch, "raise SystemExit('crashed here')", "print('garbage')", "import time; time.sleep(60)"
    )
    config = fp4_config(first_refresh=1, refresh_every=2, apply_delay=1, solver_time_limit=0.3, solver="greedy")
    monkeypatch.setattr(refresh, "GRACE", 0.0)
    callback = SnipCallback(config, keep_formats=True)
    one = {"gradient_accumulation_steps": 1, "warmup_steps": 0}
    run = train(tmp_path, callback=callback, model=model, callbacks=[NanLoss()], max_steps=10, **one)
    reasons = [(line["step"], line["status"], line["reason"]) for line in run.refreshes]
    assert len(processes) == 4
    assert [step for step, _, _ in reasons] == [1, 3, 5, 7, 9]
    assert {status for _, status, _ in reasons} == {"kept"}
    for (_, _, reason), expected in zip(
        reasons,
        [
            "SolverError: The solver process crashed (exit code 1): crashed here",
            "SolverError: The solver's output is not a solution (it begins with 'garbage",
            "ValueError: The loss of the probed micro-batch is nan; expected a finite number.",
            "SolverError: The solver ran past the 0.3 s that it had and was killed.",
            "training ended at step 9, before step 10 at which its plan was due",
        ],
        strict=True,
    ):
        assert reason.startswith(expected)
        assert any(expected in message for message in caplog.messages)
    assert names(formats(run.model)) == {"fp8"}
    assert len(run.losses) == 9
    assert children() <= before


# --------------------------------------------------------------------------------------------- what a run leaves behind


def test_the_checkpoint_is_one_of_plain_transformers(run: Run) -> None:
    checkpoint = run.folder / f"checkpoint-{STEPS}"
    assert set(weights(run.model)) == set(weights(model_with_dropout()))
    config = json.loads((checkpoint / "config.json").read_text())
    assert "quantization_config" not in config
    assert "snip" not in json.dumps(config).lower()

    model, report = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    saved = load_file(checkpoint / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in model.state_dict().items() if name in saved)
    assert {type(module) for module in model.modules() if isinstance(module, nn.Linear)} == {nn.Linear}
    ids = torch.arange(24)[None]
    expected = plain_of(run)(input_ids=ids, labels=ids).loss.item()
    assert model(input_ids=ids, labels=ids).loss.item() == pytest.approx(expected, rel=1e-6)


def plain_of(run: Run) -> nn.Module:
    """The run's weights in a model that was never converted."""
    plain = tiny_llama(hidden=32)
    plain.load_state_dict(weights(run.model))
    return plain.eval()


def test_a_folder_to_resume_from_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"resume='.*checkpoint-5' is not supported; give the checkpoint's folder to "):
        SnipCallback(fp4_config(), resume=tmp_path / "checkpoint-5")  # type: ignore[arg-type]


class OwnStep(Trainer):
    """Computes the loss where nobody sees it; or, in `compute_loss`, as twice the model's."""

    twice = False

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        if self.twice:
            return super().training_step(model, inputs, num_items_in_batch)
        loss = model(**self._prepare_inputs(inputs))["logits"].square().mean()
        self.accelerator.backward(loss)
        return loss.detach()

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        return model(**inputs)["loss"] + model(**inputs)["loss"]


def own_step(folder: Path, config: SnipConfig, steps: int = 4) -> Trainer:
    callback = SnipCallback(config)
    return OwnStep(model_with_dropout(), arguments(folder, max_steps=steps), train_dataset=data(), callbacks=[callback])


def test_a_loss_that_nobody_sees_is_refused_before_the_first_step(tmp_path: Path) -> None:
    trainer = own_step(tmp_path, CONFIG)
    before = weights(trainer.model)
    with pytest.raises(ValueError) as caught:
        trainer.train()
    assert str(caught.value) == (
        "The training loss depends neither on the loss that the model returns nor on the loss that the Trainer's "
        "compute_loss returns, so SNIP cannot probe it. Compute the loss in an override of compute_loss, by "
        "compute_loss_func, or in the model, or use a policy that needs no probe, such as policy='layer-position'."
    )
    assert differing(weights(trainer.model), before) == []
    own_step(tmp_path, fp4_config(policy="layer-position"), steps=1).train()


def test_a_refused_run_leaves_the_record_of_the_run_before_it(tmp_path: Path) -> None:
    train(tmp_path, CONFIG, max_steps=4)
    before = {path.name: path.read_bytes() for path in (tmp_path / "snip").iterdir()}
    assert "divergence-2.json" in before
    with pytest.raises(ValueError, match="does not fit"):
        train(tmp_path, fp4_config(fixed_plan=str(tmp_path / "snip" / "plan.json")), model=tiny_llama(hidden=64))
    assert {path.name: path.read_bytes() for path in (tmp_path / "snip").iterdir()} == before


@pytest.mark.parametrize("policy", ["snip", slow("uniform-fp4")])
def test_two_forward_passes_before_one_backward_pass_train(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OwnStep, "twice", True)
    trainer = own_step(tmp_path, fp4_config(policy=policy, **SCHEDULE))
    trainer.train()
    assert trainer.state.global_step == trainer.args.max_steps


def test_a_start_that_is_refused_leaves_the_model_plain_unless_the_user_converted_it(tmp_path: Path) -> None:
    config = fp4_config(fixed_plan=str(tmp_path / "missing.json"))
    for is_converted in (False, True):
        model = tiny_llama(hidden=32)
        if is_converted:
            convert_model(model, fp4_config())
        with pytest.raises(ValueError, match=r"missing\.json"):
            train(tmp_path / "run", config, model=model)
        assert bool(snip_linears(model)) == is_converted


def test_a_second_start_that_is_refused_leaves_the_formats_that_the_first_run_kept(tmp_path: Path) -> None:
    callback = SnipCallback(CONFIG, keep_formats=True)
    run = train(tmp_path, callback=callback, max_steps=4, save_strategy="steps", save_steps=3)
    kept = list(snip_linears(run.model))
    callback.config = replace(CONFIG, target_fp4_fraction=0.5, granularity="layer")
    with pytest.raises(ValueError, match="granularity"):
        run.trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert kept and list(snip_linears(run.model)) == kept


def test_two_snip_callbacks_of_one_trainer_are_refused_and_one_that_an_error_left_is_released(
    short: Run, tmp_path: Path
) -> None:
    with pytest.raises(ValueError) as caught:
        train(tmp_path / "two", CONFIG, callbacks=[SnipCallback(fp4_config(policy="uniform-fp8"))])
    assert str(caught.value) == "The Trainer has two SnipCallbacks; expected one. Remove the other."
    model = tiny_llama(hidden=32)
    with pytest.raises(ValueError):
        train(tmp_path / "left", CONFIG, model=model, trainer={"train_dataset": [{"input_ids": [1, 2, 3]}] * 8})
    assert train(tmp_path / "again", CONFIG, model=model, max_steps=SHORT).losses == short.losses


def test_a_run_that_ends_before_its_first_plan_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, fp4_config(), max_steps=2)
    assert (
        "snip-hf: training ends at step 2, before the plan of a refresh at step 100 would be applied after step 110: "
        "the plan in force stays. Train longer, or lower first_refresh or apply_delay."
    ) in caplog.messages


def test_fields_outside_a_config_are_refused_with_what_to_write() -> None:
    with pytest.raises(TypeError) as caught:
        SnipCallback({"seed": 1})  # type: ignore[arg-type]
    assert str(caught.value) == (
        "Got a dict for config; expected a SnipConfig, e.g. SnipConfig(target_fp4_fraction=0.5), or "
        "SnipConfig.from_dict(...) for a dict."
    )


def test_the_report_has_one_row_for_tied_gemms(tmp_path: Path) -> None:
    train(tmp_path, fp4_config(ties="auto", **SCHEDULE), max_steps=4)
    run = load_run(tmp_path)
    table = reason_table(run)
    assert table is not None
    layers, loss, weight, _, formats = ([str(cell) for cell in column.cells] for column in list(table.columns)[1:])
    assert "0 q_proj:forward x 3" in layers and "1 gate_proj:grad_weight x 2" in layers
    assert not any("k_proj" in layer or "up_proj" in layer for layer in layers)
    (divergences,) = run.divergences.values()
    rows = {(row.layer, row.gemm): row for row in divergences.rows if row.format == "fp4"}
    tied = [rows[f"model.layers.0.self_attn.{name}_proj", "forward"] for name in "qkv"]
    place = layers.index("0 q_proj:forward x 3")
    assert loss[place] == f"{sum(row.loss_divergence for row in tied):.1e}"
    assert weight[place] == f"{sum(row.weight_divergence for row in tied):.1e}"
    assert formats[place] == run.plans[-1][1].assignment["model.layers.0.self_attn.k_proj"]["forward"]


def test_the_report_shows_the_criterion_that_a_policy_decides_by(tmp_path: Path) -> None:
    train(tmp_path, fp4_config(policy="fisher", granularity="layer", ties=(), **SCHEDULE), max_steps=4)
    run = load_run(tmp_path)
    table = reason_table(run)
    assert table is not None
    (column,) = (column for column in table.columns if column.header == "criterion")
    (divergences,) = run.divergences.values()
    rows = [row for row in divergences.rows if (row.format, row.gemm) == ("fp4", LAYER)]
    assert sorted(column.cells) == sorted(f"{row.criterion:.1e}" for row in rows)


def test_the_report_says_why_with_the_prices_of_the_program_that_was_solved(tmp_path: Path) -> None:
    train(tmp_path, fp4_config(stages=2, granularity="layer", **SCHEDULE), max_steps=4)
    table = reason_table(load_run(tmp_path))
    assert table is not None
    cells = [list(column.cells) for column in table.columns]
    layers, chosen = cells[1], [str(name) for name in cells[5]]
    rows = [(int(stage), float(price)) for stage, price in zip(cells[0], cells[4], strict=True)]
    assert len(layers) == 14 and rows == sorted(rows)
    plan = load_run(tmp_path).plans[-1][1]
    shown = {(name.split(".")[2], name.split(".")[-1]): name for name in plan.assignment}
    modules = [shown[block, kind] for block, kind in (str(layer).split() for layer in layers)]
    assert chosen == [plan.assignment[name]["forward"] for name in modules]
    # The dearest layer stays in FP8; of layers of a stage with equal FLOPs, the cheaper ones go to FP4.
    assert chosen[-1] == "fp8" and "fp4" in chosen
    for one, other in itertools.combinations(range(14), 2):
        if rows[one][0] == rows[other][0] and plan.flops[modules[one]] == plan.flops[modules[other]]:
            assert (chosen[one], chosen[other]) != ("fp8", "fp4")
