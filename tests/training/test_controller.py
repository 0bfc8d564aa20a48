"""The controller in a loop of one's own; any failure in a refresh costs only that refresh."""

from __future__ import annotations

import copy
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import ParallelismConfig
from configs import fp4_config
from own_loop import CONFIG, Loop
from registries import restored
from small import text, tiny_llama
from tiny_runs import (
    FAST,
    SCHEDULE,
    begun_late,
    differing,
    history,
    noted_divergences,
    one_thread,
    solve_with,
    weights,
    without_seconds,
)
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from snip_hf import PrecisionPlan, SnipConfig, SnipController, convert_model, is_probing
from snip_hf.config import DEFAULT_FP4_FRACTION
from snip_hf.estimation.table import Divergence, DivergenceTable
from snip_hf.kernels.backend import BACKENDS, register_backend
from snip_hf.kernels.emulated import Emulated
from snip_hf.layers.state import snip_linears
from snip_hf.numerics.formats import NumberFormat
from snip_hf.numerics.gemms import GEMMS
from snip_hf.numerics.random_streams import stream_key
from snip_hf.parallel.sharding import unwrap
from snip_hf.planning.program import problem
from snip_hf.planning.solver import ilp
from snip_hf.planning.solver import process as process_module
from snip_hf.planning.solver.process import SolverProcess
from snip_hf.policies.setting import Setting
from snip_hf.records.load import read_divergence
from snip_hf.training import micro_batches, refresh
from snip_hf.training.checks import check_launch

SLEEP = "import time; time.sleep(60)"


@pytest.fixture
def accelerator() -> Any:
    """One that has nothing of an earlier test's."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    yield Accelerator(cpu=True, gradient_accumulation_steps=2)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def test_a_loop_of_ones_own_is_refreshed_on_schedule(tmp_path: Path) -> None:
    loop = Loop(folder=tmp_path)
    loop.controller.start()
    seen = []
    for step in range(1, 9):
        loop.run(step)
        seen.append({fmt for formats in loop.formats().values() for fmt in formats.values()})
    assert seen == [{"fp8"}] * 3 + [{"fp8", "fp4"}] * 5
    assert [(line["step"], line["applied_step"]) for line in history(tmp_path)[1:]] == [(2, 4), (6, 8)]
    assert PrecisionPlan.load(tmp_path / "snip" / "plan.json").assignment == loop.formats()


def test_an_accelerate_loop_gives_the_same_losses_and_plans_as_one_without(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    plain = Loop(folder=tmp_path / "plain", accumulation=2).run(8)
    accelerated = Loop(folder=tmp_path / "accelerated", accelerator=accelerator, accumulation=2).run(8)
    assert accelerated.losses == plain.losses
    assert accelerated.formats() == plain.formats()
    assert differing(weights(accelerated.model), weights(plain.model)) == []
    assert without_seconds(history(tmp_path / "accelerated")) == without_seconds(history(tmp_path / "plain"))
    assert [line["event"] for line in history(tmp_path / "plain")] == ["start", "refresh", "refresh"]


def in_accumulate(accelerator: Accelerator, folder: Path, max_steps: int, guards: bool = False) -> Loop:
    """Runs the README's loop inside `accelerator.accumulate`, or one that calls once per optimizer step."""
    loop = Loop(None, accelerator=accelerator)
    loop.controller = SnipController(loop.model, loop.optimizer, CONFIG, accelerator, folder, max_steps=max_steps)
    with one_thread():
        for step in range(1, 11):
            with accelerator.accumulate(loop.model):
                loop.controller.capture(loop.batch(step))
                loss = loop.model(**loop.batch(step))["loss"]
                accelerator.backward(loss)
                loop.losses.append(loss.item())
                calls = accelerator.sync_gradients or not guards
                if calls:
                    loop.controller.before_optimizer_step(step)
                loop.optimizer.step()
                loop.optimizer.zero_grad()
                if calls:
                    loop.controller.after_step(step)
    return loop


def test_inside_accumulate_only_steps_that_synchronise_gradients_count(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    """There are 10 micro-batches, two per step."""
    loop = in_accumulate(accelerator, tmp_path / "all", max_steps=5)
    assert loop.controller.step == 5
    assert [(line["step"], line["applied_step"]) for line in history(tmp_path / "all")[1:]] == [(2, 4)]
    formats = loop.formats()
    loop.controller.close()
    guarded = in_accumulate(accelerator, tmp_path / "guarded", max_steps=5, guards=True)
    assert guarded.losses == loop.losses and guarded.formats() == formats
    assert without_seconds(history(tmp_path / "guarded")) == without_seconds(history(tmp_path / "all"))


def test_accelerate_saves_and_loads_the_controller_in_the_middle_of_a_refresh(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    expected = Loop(accumulation=2).run(5)
    loop = Loop(accelerator=accelerator, accumulation=2)
    accelerator.register_for_checkpointing(loop.controller)
    loop.run(3)
    accelerator.save_state(str(tmp_path / "state"))
    before = loop.losses[:]
    loop.run(4)
    accelerator.load_state(str(tmp_path / "state"))
    loop.step, loop.losses = 3, before
    assert loop.controller.step == 3
    loop.run(5)
    assert loop.losses == expected.losses
    assert loop.formats() == expected.formats()


def test_a_controller_without_a_folder_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loop = Loop(fp4_config(**SCHEDULE))
    loop.controller.start()
    loop.run(4)
    assert loop.controller.plan.fp4_fraction >= DEFAULT_FP4_FRACTION
    assert list(tmp_path.iterdir()) == []


def test_the_state_continues_a_run_from_memory_and_is_not_changed_by_it() -> None:
    full = Loop().run(5)
    first = Loop().run(3)
    state = json.loads(json.dumps(first.controller.state_dict()))
    kept = copy.deepcopy(state)
    generator = torch.get_rng_state()
    for _ in range(2):
        second = Loop()
        second.model.load_state_dict(first.model.state_dict())
        second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
        second.controller.load_state_dict(state)
        states = [next(iter(snip_linears(loop.model).values())).snip_state for loop in (first, second)]
        assert torch.equal(*states)
        second.step = 3
        torch.set_rng_state(generator)
        second.run(5)
        assert second.losses == full.losses[3:]
        assert second.formats() == full.formats()
        assert state == kept
    first.controller.close()


@pytest.mark.parametrize("saved_at", [1, 3])
def test_a_state_that_is_loaded_in_the_middle_of_a_refresh_takes_its_place(
    saved_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = solve_with(monkeypatch, SLEEP)
    loop = Loop(folder=tmp_path).run(saved_at)
    state = json.loads(json.dumps(loop.controller.state_dict()))
    loop.run(3)
    loop.controller.load_state_dict(state)
    assert processes[0]._process.returncode == -9
    assert len(processes) == 1 + (saved_at == 3)
    assert loop.controller.state_dict() == state
    assert [line["event"] for line in history(tmp_path)] == ["start"]
    loop.controller.close()


def drop(*path: str) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        for key in path[:-1]:
            state = state[key]
        del state[path[-1]]

    return change


def put(value: Any, *path: str) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        for key in path[:-1]:
            state = state[key]
        state[path[-1]] = value

    return change


INCOMPLETE = [
    *[
        drop(key)
        for key in ("step", "config", "plan", "pending", "last_probe", "postponed", "kernels", "ties", "guard")
    ],
    *[drop("pending", key) for key in ("step", "due", "problem", "record")],
    *[put(None, key) for key in ("step", "config", "plan")],
    *[put([1], key) for key in ("step", "config", "plan", "pending", "last_probe")],
    *[put("x", key) for key in ("step", "config", "plan", "pending", "last_probe")],
    *[put("x", "pending", key) for key in ("step", "due", "problem", "record")],
    drop("plan", "assignment"),
    drop("plan", "assignment", "model.layers.1.mlp.up_proj"),
    put("fp3", "plan", "assignment", "model.layers.1.mlp.up_proj", "forward"),
]


def test_an_incomplete_or_damaged_state_is_refused_and_changes_nothing() -> None:
    first = Loop().run(3)
    good = json.loads(json.dumps(first.controller.state_dict()))
    first.controller.close()
    loop = Loop()
    for change in INCOMPLETE:
        state = copy.deepcopy(good)
        change(state)
        with pytest.raises(ValueError, match=r"^The SNIP state is not complete or damaged \(.*\); restore the file"):
            loop.controller.load_state_dict(state)
        assert (loop.controller.step, loop.controller._run.refresher.pending) == (0, None)
        assert {fmt for formats in loop.formats().values() for fmt in formats.values()} == {"fp8"}


@pytest.mark.parametrize("state", [None, [], {}, {"schema_version": 2}, "state"])
def test_data_that_is_not_a_state_is_refused(state: Any) -> None:
    with pytest.raises(ValueError) as caught:
        Loop().controller.load_state_dict(state)
    assert (
        str(caught.value)
        == "The SNIP state has no schema_version 1; expected what `SnipController.state_dict` of this version returned."
    )


def test_a_pending_problem_that_was_damaged_costs_the_refresh_and_not_the_run(tmp_path: Path) -> None:
    first = Loop().run(3)
    state = json.loads(json.dumps(first.controller.state_dict()))
    first.controller.close()
    state["pending"]["problem"]["groups"] = "x"
    second = Loop(folder=tmp_path)
    second.controller.load_state_dict(state)
    second.step = 3
    second.run(5)
    assert len(second.losses) == 2
    (line,) = history(tmp_path)[1:]
    assert (line["step"], line["status"], line["decided_step"]) == (2, "kept", 3)
    assert "groups" in line["reason"]


@pytest.mark.parametrize("every", [1, 3])
def test_a_plan_that_is_due_at_the_next_refresh_is_applied_there(every: int, tmp_path: Path) -> None:
    """apply_delay = refresh_every is the longest delay that the configuration allows."""
    loop = Loop(fp4_config(first_refresh=2, refresh_every=every, apply_delay=every, **FAST), tmp_path)
    loop.run(2 + 2 * every)
    assert [(line["step"], line["applied_step"]) for line in history(tmp_path)[1:]] == [
        (2, 2 + every),
        (2 + every, 2 + 2 * every),
    ]
    loop.controller.close()


def test_every_micro_batch_has_rounding_numbers_of_its_own_and_each_step_starts_anew() -> None:
    loop = Loop(fp4_config(seed=5, **SCHEDULE), accumulation=2)
    layer = next(iter(snip_linears(loop.model).values()))
    times = [(step, micro_batch) for step in range(6) for micro_batch in range(4)]
    keys = {stream_key(5, *time, layer.snip_key, 1): time for time in times}  # 1: the output gradient
    seen = []

    def note(module: Any, args: Any) -> None:
        if not is_probing():
            seen.append(keys[module.snip_state[3].item() % 2**64])

    handle = layer.register_forward_pre_hook(note)
    loop.run(3)
    handle.remove()
    assert seen == [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]
    loop.controller.close()


@pytest.mark.parametrize("max_norm", [0.05, 1e9])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_divergences_are_told_what_clipping_multiplied_the_gradients_by(
    max_norm: float, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = noted_divergences(monkeypatch)
    loop = Loop(accumulation=accumulation, max_norm=max_norm)
    norms = []
    clip = loop.clip
    monkeypatch.setattr(
        loop,
        "clip",
        lambda: (norms.append(float(nn.utils.get_total_norm([p.grad for p in loop.model.parameters()]))), clip()),
    )
    loop.run(2)
    loop.controller.close()
    (call,) = calls
    assert call["optimizer_step"].clip_factor == pytest.approx(min(1.0, max_norm / norms[1]), rel=1e-5)
    assert call["optimizer_step"].micro_batches == accumulation


def test_the_divergences_are_told_the_tokens_and_labels_of_the_whole_micro_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = noted_divergences(monkeypatch)
    loop = Loop(fp4_config(**SCHEDULE, probe_batch_tokens=128))

    def masked(index: int) -> dict[str, Tensor]:
        batch = text(8, 24, index=index)
        labels = batch["labels"].clone()
        labels[1, :12] = -100
        return batch | {"labels": labels}

    monkeypatch.setattr(loop, "batch", masked)
    loop.run(2)
    loop.controller.close()
    (call,) = calls
    assert call["batch"].micro_batch == (8 * 24, 7 * 23 + 12)


# ------------------------------------------------------------------------------------------------------- criteria


def events(folder: Path) -> list[tuple[Any, ...]]:
    """(probe step, application) of the refreshes."""
    return [(line["step"], line["applied_step"]) for line in history(folder)[1:]]


@pytest.mark.parametrize(
    ("granularity", "policy"),
    [*(("layer", policy) for policy in ("fisher", "hessian-trace", "greedy", "kl")), ("gemm", "greedy")],
)
def test_a_run_decides_by_the_criterion_that_its_file_of_divergences_has(
    policy: str, granularity: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = fp4_config(policy=policy, granularity=granularity, target_fp4_fraction=0.5, **SCHEDULE)
    loop = Loop(config, tmp_path).run(4)
    plan = loop.controller.plan
    assert (plan.provenance.step, plan.provenance.policy, caplog.messages) == (2, policy, [])
    assert plan.provenance.solver == ("greedy" if policy == "greedy" else FAST["solver"])
    assert 0.5 <= plan.fp4_fraction < 0.65
    step, table = read_divergence(tmp_path / "snip" / "divergence-2.json")
    assert step == 2 and sum(row.criterion for row in table.rows) > 0
    setting = Setting(config, plan.flops, plan.stages)
    assert setting.assignment(ilp.solve(problem(setting, table))["choices"]) == plan.assignment
    if granularity == "gemm" and policy in ("fisher", "greedy"):
        assert {formats["forward"] for formats in plan.assignment.values()} == {"fp8"}


@pytest.mark.parametrize("policy", ["first2-last8", "last-15-percent", "backward-first"])
def test_a_rule_is_in_force_before_the_first_step_and_stays(policy: str, tmp_path: Path) -> None:
    loop = Loop(fp4_config(policy=policy, granularity="gemm", target_fp4_fraction=0.5, **SCHEDULE), tmp_path)
    plan = loop.controller.plan
    assert 0.5 <= plan.fp4_fraction < 0.6
    loop.run(4)
    assert loop.formats() == plan.assignment and loop.controller.plan == plan
    assert len(history(tmp_path)) == 1


# ------------------------------------------------------------------------------------------------------------- one plan


STATIC = {"first_refresh": 2, "refresh_every": None, "apply_delay": 1, **FAST}


def test_without_refreshes_the_first_plan_stays(tmp_path: Path) -> None:
    loop = Loop(fp4_config(**STATIC), tmp_path).run(3)
    plan = loop.controller.plan
    state = json.loads(json.dumps(loop.controller.state_dict()))
    loop.run(6)
    assert events(tmp_path) == [(2, 3)]
    assert loop.controller.plan == plan and plan.provenance.step == 2
    resumed = Loop(fp4_config(**STATIC), tmp_path)
    resumed.controller.load_state_dict(state)
    resumed.step = 3
    assert events(tmp_path) == [(2, 3)]
    assert resumed.run(6).controller.plan == plan
    assert events(tmp_path) == [(2, 3)]


def test_a_first_plan_that_is_not_applied_is_tried_again(tmp_path: Path) -> None:
    """Every `first_refresh` steps, but not while one is under way."""
    loop = Loop(fp4_config(**STATIC | {"first_refresh": 1, "apply_delay": 2}), tmp_path)
    clean, loop.batch = loop.batch, lambda index: {**text(2, 24), "labels": torch.full((2, 24), -100)}
    loop.run(1)
    loop.batch = clean
    loop.run(7)
    statuses = [(line["step"], line["status"], line["applied_step"]) for line in history(tmp_path)[1:]]
    assert statuses == [(1, "kept", None), (2, "applied", 4)]


def test_the_schedule_is_a_grid(tmp_path: Path) -> None:
    Loop(fp4_config(first_refresh=1, refresh_every=3, apply_delay=1, **FAST), tmp_path).run(8)
    assert events(tmp_path) == [(1, 2), (4, 5), (7, 8)]


# --------------------------------------------------------------------------------------------------- what is refused


def fake_accelerator(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"mixed_precision": "no", "num_processes": 1, "distributed_type": "NO"} | changes)


def refusal(call: Callable[[], Any], kind: type[Exception] = ValueError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value.args[0])


def test_fp8_mixed_precision_is_refused_with_every_policy() -> None:
    check_launch(fp4_config(), fake_accelerator(mixed_precision="bf16"))
    for policy in ("snip", "uniform-fp8"):
        assert refusal(
            lambda p=policy: check_launch(fp4_config(policy=p), fake_accelerator(mixed_precision="fp8"))
        ) == (
            "mixed_precision='fp8' would convert the linears a second time; snip-hf handles FP8 itself. Use 'bf16' or "
            "'no'."
        )


def test_fp16_is_refused_where_its_loss_scale_is_not_known_and_gradients_are_probed() -> None:
    check_launch(fp4_config(), fake_accelerator(mixed_precision="fp16"))
    sharded = fake_accelerator(
        mixed_precision="fp16",
        distributed_type="DistributedType.FSDP",
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=False),
    )
    assert refusal(lambda: check_launch(fp4_config(), sharded)) == (
        "policy='snip' cannot probe a model under FSDP2 with mixed_precision='fp16', whose loss scale it does not "
        "know; use 'bf16', or DDP, or use a plan file or a policy that needs no probe, such as policy='layer-position'."
    )
    check_launch(fp4_config(policy="layer-position"), sharded)


@pytest.mark.parametrize(
    "setting",
    [
        {"distributed_type": "DistributedType.MULTI_GPU", "num_processes": 4},
        {"distributed_type": "DistributedType.MULTI_CPU", "num_processes": 2},
        {
            "distributed_type": "DistributedType.FSDP",
            "fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=True),
        },
        {"parallelism_config": ParallelismConfig(dp_replicate_size=2)},
    ],
)
def test_several_processes_are_accepted_with_every_policy(setting: dict[str, Any]) -> None:
    for policy in ("snip", "min-abs-err", "random"):
        check_launch(fp4_config(policy=policy), fake_accelerator(**setting))


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        (
            {
                "distributed_type": "DistributedType.FSDP",
                "fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=1, cpu_offload=False),
            },
            "FSDP version 1, which flattens the weights; use version 2 (fsdp_version: 2)",
        ),
        ({"distributed_type": "DistributedType.MEGATRON_LM"}, "Megatron-LM; use FSDP2 (fsdp_version: 2)"),
        (
            {"parallelism_config": ParallelismConfig(sp_size=2)},
            "sp_size=2: its ranks hold parts of the activations; use cp_size",
        ),
    ],
)
def test_launches_under_which_nothing_can_be_probed_are_refused_even_in_one_process(
    setting: dict[str, Any], reason: str
) -> None:
    for accelerator in (fake_accelerator(**setting), fake_accelerator(state=SimpleNamespace(**setting), **setting)):
        assert refusal(lambda it=accelerator: check_launch(fp4_config(policy="min-abs-err"), it)) == (
            f"policy='min-abs-err' cannot probe a model under {reason}, or use a plan file or a policy that needs no "
            "probe, such as policy='layer-position'."
        )
        check_launch(fp4_config(policy="random"), accelerator)
        check_launch(fp4_config(fixed_plan="plan.json"), accelerator)


def test_tensor_parallelism_that_has_split_nothing_is_refused() -> None:
    accelerator = fake_accelerator(parallelism_config=ParallelismConfig(tp_size=2))
    model = tiny_llama(hidden=32)
    message = refusal(lambda: SnipController(model, torch.optim.SGD(model.parameters()), fp4_config(), accelerator))
    assert message.startswith("The model is tensor-parallel (tp_size is above 1), but not by transformers")


def in_context_parallelism(model: nn.Module) -> SnipController:
    sizes = {"parallelism_config": ParallelismConfig(cp_size=2), "device_mesh": {"cp": SimpleNamespace()}}
    return SnipController(model, torch.optim.SGD(model.parameters()), fp4_config(), fake_accelerator(**sizes))


def test_context_parallelism_without_sdpa_is_refused() -> None:
    model = tiny_llama(hidden=32)
    model.config._attn_implementation = "eager"
    assert refusal(lambda: in_context_parallelism(model)) == (
        "Context parallelism (cp_size) works with attn_implementation='sdpa', but the model has 'eager'. Load it with "
        "'sdpa', or use a policy that needs no probe, such as policy='layer-position'."
    )


def test_a_first_batch_without_what_parts_of_sequences_need_is_refused() -> None:
    batch = text(2, 24)
    batch["shift_labels"] = batch["labels"]
    assert refusal(lambda: in_context_parallelism(tiny_llama(hidden=32)).capture(batch)) == (
        "The batch has no `position_ids` (its keys are input_ids, labels, shift_labels), which a part of a sequence "
        "needs under context parallelism. Give the model `position_ids` and `shift_labels`, as the Trainer does, or "
        "use a policy that needs no probe, such as policy='layer-position'."
    )
    batch["position_ids"] = torch.arange(24)[None]
    controller = in_context_parallelism(tiny_llama(hidden=32))
    assert refusal(lambda: controller.capture(batch, lambda model, inputs: model(**inputs).loss)) == (
        "Under context parallelism, whose ranks hold parts of sequences, the probe needs a loss that is a mean over "
        "tokens. Use the model's own loss or TRL's SFTTrainer, or a policy that needs no probe, such as "
        "policy='layer-position'."
    )


def test_inputs_and_contexts_that_context_parallelism_cannot_cut_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = text(2, 24)
    batch |= {"shift_labels": batch["labels"], "position_ids": torch.arange(24)[None]}
    masked = {**batch, "attention_mask": torch.ones(2, 1, 24, 24).tril()}
    assert refusal(lambda: in_context_parallelism(tiny_llama(hidden=32)).capture(masked)) == (
        "The input 'attention_mask' cannot be cut by tokens, as context parallelism needs. Leave it out (attention is "
        "causal there, whatever a mask says), or use a policy that needs no probe, such as policy='layer-position'."
    )
    assert refusal(lambda: in_context_parallelism(tiny_llama(hidden=32)).capture(batch)) == (
        "A micro-batch was announced outside of the context that cuts its sequences. Call capture, and run the "
        "backward pass, inside accelerator.maybe_context_parallel."
    )
    monkeypatch.setattr(micro_batches, "in_context", lambda: True)
    model = tiny_llama(hidden=32)
    controller = SnipController(model, torch.optim.SGD(model.parameters()), fp4_config())
    assert refusal(lambda: controller.capture(batch)) == (
        "torch's context_parallel cuts the sequences, but the controller has no Accelerator with a cp_size, so the "
        "probe would take parts for whole ones. Give it that of ParallelismConfig(cp_size=...), or use a policy that "
        "needs no probe, such as policy='layer-position'."
    )


def test_a_model_that_says_it_is_split_but_has_no_parts_is_refused() -> None:
    model = tiny_llama(hidden=32)
    model._tp_size = 2  # transformers' own, behind `tp_size`
    message = refusal(lambda: SnipController(model, torch.optim.SGD(model.parameters()), fp4_config()))
    assert message.startswith("The model is tensor-parallel (tp_size is above 1), but not by transformers")


def test_parallelism_of_an_older_accelerate_is_accepted() -> None:
    """Version 1.10 has no `sp_size`."""
    check_launch(fp4_config(), fake_accelerator(parallelism_config=SimpleNamespace(tp_size=1, cp_size=1)))


def test_a_controller_refuses_before_it_touches_the_model() -> None:
    model = tiny_llama(hidden=32)
    optimizer = torch.optim.AdamW(model.parameters())
    refusal(lambda: SnipController(model, optimizer, fp4_config(), fake_accelerator(mixed_precision="fp8")))
    refusal(lambda: SnipController(model, optimizer, fp4_config(backend="hopper")))
    assert snip_linears(model) == {}


def test_data_parallel_is_refused_and_other_wrappers_are_looked_through() -> None:
    model = tiny_llama(hidden=32)
    assert refusal(lambda: unwrap(nn.DataParallel(model))) == (
        "nn.DataParallel copies the model in every step, and the plan with it; start one process per GPU with "
        "`accelerate launch`, or make only one GPU visible (CUDA_VISIBLE_DEVICES=0)."
    )
    assert unwrap(model) is model
    assert unwrap(torch.compile(model, backend="eager")) is model
    refusal(lambda: unwrap(torch.compile(nn.DataParallel(model), backend="eager")))


def test_an_optimizer_that_cannot_be_differentiated_is_refused_only_where_it_is_probed() -> None:
    model = tiny_llama(hidden=32)
    optimizer = torch.optim.Rprop(model.parameters())
    message = refusal(lambda: SnipController(model, optimizer, fp4_config()), TypeError)
    assert message.startswith("Cannot differentiate the update of torch.optim.rprop.Rprop: its update does not depend")
    assert message.endswith("or a policy that needs no probe, such as policy='layer-position'.")
    assert SnipController(model, optimizer, fp4_config(policy="uniform-fp4")).plan.fp4_fraction == 1.0


def test_attention_that_cannot_be_switched_is_refused_only_where_it_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(hidden=32)
    model.config._attn_implementation = "flash_attention_2"
    monkeypatch.setattr(LlamaForCausalLM, "_can_set_attn_implementation", lambda self: False)
    optimizer = torch.optim.AdamW(model.parameters())
    assert refusal(lambda: SnipController(model, optimizer, fp4_config())) == (
        "attn_implementation='flash_attention_2' cannot run the probe's FP32 passes, and LlamaForCausalLM cannot "
        "switch it, since its code does not use transformers' attention interface. Load the model with "
        "attn_implementation='sdpa' or 'eager', or use a policy that needs no probe, such as policy='layer-position'."
    )
    SnipController(model, optimizer, fp4_config(policy="layer-type"))


def test_a_first_batch_without_labels_is_refused_and_a_later_one_costs_a_refresh(tmp_path: Path) -> None:
    loop = Loop(folder=tmp_path)
    batch = {"input_ids": text(2, 24)["input_ids"]}
    assert refusal(lambda: loop.controller.capture(list(batch.values())), TypeError) == (  # type: ignore[arg-type]
        "capture got a list; expected a dict of the model's inputs, or of compute_loss's."
    )
    assert refusal(lambda: loop.controller.capture(batch)) == (
        "The batch has no labels (its keys are input_ids), so the model gives no loss to probe. Expected a causal LM "
        "batch with `labels`. If the model does not return the loss, say how it is computed: by compute_loss=... in "
        "your own loop; in a Trainer by compute_loss_func or an override of compute_loss, which training_step must "
        "call (if it does, name the input with the labels: TrainingArguments(label_names=[NAME])). Or use a policy "
        "that needs no probe, such as policy='layer-position'."
    )
    loop.run(1)
    loop.controller.capture(batch)
    loop.controller.before_optimizer_step(2)
    loop.controller.after_step(2)
    (line,) = history(tmp_path)[1:]
    assert (line["step"], line["status"]) == (2, "kept")
    assert line["reason"].startswith("ValueError: The batch has no labels (its keys are input_ids)")


def test_a_policy_without_a_probe_takes_any_batch() -> None:
    loop = Loop(fp4_config(policy="random", target_fp4_fraction=0.5))
    loop.controller.capture({"input_ids": text(2, 24)["input_ids"]})
    assert loop.run(3).controller.plan.fp4_fraction >= 0.5


def test_a_plan_file_is_held_fixed_and_that_of_another_model_is_refused(tmp_path: Path) -> None:
    loop = Loop(folder=tmp_path).run(4)
    path = tmp_path / "snip" / "plan.json"
    fixed = Loop(fp4_config(fixed_plan=str(path), **SCHEDULE))
    assert fixed.formats() == loop.formats()
    assert fixed.run(5).formats() == loop.formats()

    other = tiny_llama(hidden=32, layers=3)
    message = refusal(lambda: SnipController(other, None, fp4_config(fixed_plan=str(path))))
    assert message == (
        f"fixed_plan={str(path)!r} does not fit the model: The plan has no entry for layer "
        "'model.layers.2.self_attn.q_proj' (it names 14 layers, e.g. 'model.layers.0.self_attn.q_proj'). Was it "
        "made for another model? Run `snip-hf inspect PLAN --model MODEL` to compare."
    )


def test_a_plan_file_that_is_none_is_refused_by_field_path_and_what_was_expected(tmp_path: Path) -> None:
    path, folder = tmp_path / "plan.json", tmp_path / "nothing"
    Loop().controller.plan.save(path)
    text = path.read_text()

    def said(content: str, where: Path = path) -> str:
        path.write_text(content)
        return refusal(lambda: Loop(fp4_config(fixed_plan=str(where))))

    expected = "Expected a plan that a run wrote (OUTPUT_DIR/snip/plan.json) or `PrecisionPlan.save`."
    advice = f"Restore the file or let a run write it again. {expected}"
    start = f"fixed_plan: {path} cannot be used as a precision plan: "
    cut = said(text[:500])
    assert cut.startswith(f"{start}it is not valid JSON, perhaps truncated (line ") and cut.endswith(advice)
    assert said("[1]") == f"{start}the document is a list of 1, expected an object. {advice}"
    assert said("{}") == f"{start}kind is None, expected 'snip-hf precision plan'. {advice}"
    unknown = said(text.replace('"fp8"', '"fp9"', 1))
    assert unknown.startswith(f"{start}Unknown format 'fp9' for assignment['model.layers.")
    missing = said(text, folder)
    assert missing.startswith(f"fixed_plan={str(folder)!r} cannot be read: ") and missing.endswith(expected)


def test_the_backend_is_chosen_by_the_formats_of_a_plan_file(tmp_path: Path) -> None:
    loop = Loop(SnipConfig(policy="uniform-nvfp4", formats=("nvfp4", "mxfp8")))
    path = tmp_path / "plan.json"
    loop.controller.plan.save(path)

    class Other(Emulated):
        name = "other"
        is_emulation = False

        def runs(self, format: NumberFormat) -> bool:
            return format.name != "nvfp4"

    class Only(Emulated):
        name = "only"

        def runs(self, format: NumberFormat) -> bool:
            return format.name == "nvfp4"

    with restored(BACKENDS):
        register_backend(Other())
        register_backend(Only())
        assert Loop(fp4_config()).controller.backend == "other"
        assert Loop(fp4_config(fixed_plan=str(path))).controller.backend == "emulated"
        assert Loop(fp4_config(fixed_plan=str(path), backend="only")).controller.backend == "only"
        with pytest.raises(ValueError, match="backend='only' cannot run: its kernels do not know the format 'fp4'"):
            Loop(fp4_config(backend="only"))


def test_beside_a_plan_file_no_other_backend_than_the_one_asked_for_is_tried(tmp_path: Path) -> None:
    """The trial of another one may leave a GPU unusable."""
    path = tmp_path / "plan.json"
    Loop(fp4_config(policy="uniform-fp4")).controller.plan.save(path)

    class Other(Emulated):
        name = "other"
        is_emulation = False

        def fails(self, format: NumberFormat, device: torch.device) -> str | None:
            raise AssertionError("tried")

    with restored(BACKENDS):
        register_backend(Other())
        assert Loop(fp4_config(fixed_plan=str(path), backend="emulated")).controller.backend == "emulated"
        with pytest.raises(AssertionError, match="tried"):
            Loop(fp4_config(fixed_plan=str(path)))


def test_the_share_of_a_plan_file_is_that_of_the_models_flops_whatever_the_file_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(folder=tmp_path).run(4)
    plan = loop.controller.plan
    document = plan.to_dict()
    for layer, formats in plan.assignment.items():  # nearly all FLOPs of the backward passes are said to be in FP4
        number = 1e9 if formats["forward"] == "fp4" else 1.0
        document["flops"][layer] |= dict.fromkeys(("grad_input", "grad_weight"), number)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    assert PrecisionPlan.load(path).fp4_fraction > 0.999
    caplog.set_level("INFO", "snip_hf")
    held = Loop(fp4_config(fixed_plan=str(path)), tmp_path / "held").run(1).controller
    assert held.plan.fp4_fraction == plan.fp4_fraction
    assert f"fixed plan {path}, {plan.fp4_fraction:.1%} of the linear FLOPs in FP4" in caplog.text
    (start,) = history(tmp_path / "held")
    assert start["flops"] == plan.to_dict()["flops"]


def test_a_plan_file_for_layers_of_another_size_is_refused_by_its_name(tmp_path: Path) -> None:
    document = Loop(folder=tmp_path).run(4).controller.plan.to_dict()
    document["flops"]["model.layers.0.mlp.up_proj"]["forward"] = 1.0
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    assert refusal(lambda: Loop(fp4_config(fixed_plan=str(path)))) == (
        f"fixed_plan={str(path)!r} does not fit the model: The plan is for a layer 'model.layers.0.mlp.up_proj' of 1 "
        "FLOPs per token, the model's has 5120. Was it made for another model? Run `snip-hf inspect PLAN --model "
        "MODEL` to compare."
    )


# ------------------------------------------------------------------------- what costs a refresh, and never the training

FAILURES = {
    "crash": (
        "raise RuntimeError('out of luck')",
        "SolverError: The solver process crashed (exit code 1)",
        "out of luck",
    ),
    "half an answer": ("print('{}')", "SolverError: The solver's output is not a solution", ""),
    "timeout": (SLEEP, "SolverError: The solver ran past the 0.2 s that it had and was killed.", ""),
}


def kept(folder: Path) -> list[str]:
    """The reasons of the history's refreshes, all of which kept the plan."""
    lines = [line for line in history(folder) if line["event"] == "refresh"]
    assert {(line["status"], line["applied_step"], line["layers_changed"], len(line["changes"])) for line in lines} == {
        ("kept", None, 0, 0)
    }
    assert {line["fp4_fraction"] for line in lines} == {0.0}
    return [line["reason"] for line in lines]


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failing_solver_keeps_the_plan_and_says_why(
    failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program, beginning, detail = FAILURES[failure]
    processes = solve_with(monkeypatch, program)
    limit = {"solver_time_limit": 0.2} if failure == "timeout" else {}
    config = fp4_config(**limit, **SCHEDULE | {"refresh_every": 100})
    monkeypatch.setattr(refresh, "GRACE", 0.0)
    loop = Loop(config, tmp_path).run(5)
    (reason,) = kept(tmp_path)
    assert reason.startswith(beginning)
    assert detail in reason
    assert caplog.messages == [f"snip-hf: the refresh of step 2 failed, the plan in force stays: {reason}"]
    assert {fmt for formats in loop.formats().values() for fmt in formats.values()} == {"fp8"}
    assert loop.losses == Loop(fp4_config(first_refresh=99)).run(5).losses
    assert processes[0]._process.returncode is not None


def test_the_refresh_after_a_failed_one_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    solve_with(monkeypatch, "raise SystemExit(1)", "")
    Loop(folder=tmp_path).run(8)
    assert [(line["step"], line["status"]) for line in history(tmp_path)[1:]] == [(2, "kept"), (6, "applied")]


def test_targets_that_cannot_be_met_keep_the_plan_and_no_other_solver_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = SolverProcess.start

    def too_much(program: dict[str, Any]) -> SolverProcess:
        program["constraints"][0]["minimum"] = 1.5
        return start(program)

    loop = Loop(fp4_config(**SCHEDULE | {"solver": "auto"}), tmp_path)
    monkeypatch.setattr(SolverProcess, "start", too_much)
    loop.run(5)
    assert kept(tmp_path) == [
        "SolverError: No plan meets all constraints ('stage 0': minimum 1.5, attainable 1). Lower the target or tie "
        "less."
    ]
    assert "from now on" not in caplog.text


@pytest.mark.parametrize(
    ("program", "refreshes", "asked_for", "reason"),
    [
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGILL)",
            ["applied", "applied"],
            ["auto", "highs", "highs"],
            "The solver process crashed (exit code -4): nothing on stderr",
        ),
        # Other ranks would not wait as long again.
        (SLEEP, ["kept", "applied"], ["auto", "highs"], "The solver ran past the 3 s that it had and was killed."),
    ],
    ids=["crashes", "hangs"],
)
def test_after_a_solver_that_fails_auto_takes_the_next_one_for_good_and_warns_once(
    program: str,
    refreshes: list[str],
    asked_for: list[str],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked: list[str] = []
    start = SolverProcess.start

    def without_cbc(problem: dict[str, Any]) -> SolverProcess:
        asked.append(problem["solver"])
        fails = [sys.executable, "-c", program]
        return start(problem, fails if problem["solver"] == "auto" else None)

    config = fp4_config(**SCHEDULE | {"solver": "auto", "solver_time_limit": 3.0})
    monkeypatch.setattr(refresh, "GRACE", 0.0)
    monkeypatch.setattr(SolverProcess, "start", without_cbc)
    loop = Loop(config, tmp_path)
    asked.clear()  # the start tries the solver out, once per process
    loop.run(9)
    assert loop.controller is not None
    assert asked == asked_for and loop.controller.plan.provenance.solver == "highs"
    assert [line["status"] for line in history(tmp_path) if line["event"] == "refresh"] == refreshes
    said = [message for message in caplog.messages if "from now on" in message]
    assert said == [f"snip-hf: from now on solver='auto' uses 'highs', because: {reason}"]


def test_a_resumed_run_may_have_another_solver_and_backend(tmp_path: Path) -> None:
    first = Loop(fp4_config(**SCHEDULE | {"solver": "cbc"}), tmp_path / "first").run(3)
    assert first.controller is not None
    state = json.loads(json.dumps(first.controller.state_dict()))
    second = Loop(fp4_config(**SCHEDULE | {"solver": "greedy", "backend": "emulated"}), tmp_path / "second")
    assert second.controller is not None and state["pending"] is not None
    second.controller.load_state_dict(state)
    second.step = 3
    second.run(4)
    assert second.controller.plan.provenance.solver == "greedy"


def test_a_solver_that_cannot_be_started_keeps_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module.sys, "executable", "/nowhere/python")
    Loop(folder=tmp_path).run(5)
    (reason,) = kept(tmp_path)
    assert reason.startswith("SolverError: The solver process could not be started: [Errno 2]")


def test_a_loss_that_is_nan_at_the_probe_keeps_the_plan(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(folder=tmp_path)
    loss_function = loop.model.loss_function

    def nan_at_step_2(**kwargs: Any) -> torch.Tensor:
        # A constant: the gradients stay finite, so that training itself is as before.
        return loss_function(**kwargs) + (math.nan if loop.step == 2 else 0.0)

    loop.model.loss_function = nan_at_step_2
    loop.run(5)
    assert [math.isnan(loss) for loss in loop.losses] == [False, True, False, False, False]
    assert kept(tmp_path) == ["ValueError: The loss of the probed micro-batch is nan; expected a finite number."]
    assert len(caplog.messages) == 1
    loop.run(8)
    assert [(line["step"], line["status"]) for line in history(tmp_path)[1:]] == [(2, "kept"), (6, "applied")]


def test_divergences_that_are_not_finite_are_refused() -> None:
    table = DivergenceTable(1.0, (Divergence("a", "layer", "fp4", 1.0, math.inf, 1.0),))
    with pytest.raises(ValueError, match="The divergences of layer 'a' are not finite; expected finite activations"):
        refresh._check_table(table)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_keeps_the_plan_and_is_named(value: float, tmp_path: Path) -> None:
    loop = Loop(folder=tmp_path)
    before = loop.controller.before_optimizer_step

    def spoil(step: int) -> None:
        weight = loop.model.model.layers[1].mlp.up_proj.weight
        good = weight.grad.clone()
        if step == 2:
            weight.grad[3, 4] = value
        before(step)
        weight.grad.copy_(good)

    loop.controller.before_optimizer_step = spoil
    loop.run(5)
    assert kept(tmp_path) == [
        "ValueError: The gradient of layer 'model.layers.1.mlp.up_proj' is not finite; expected finite numbers."
    ]
    assert all(math.isfinite(loss) for loss in loop.losses)


def test_a_probe_that_raises_keeps_the_plan_and_the_layers_run_on(tmp_path: Path) -> None:
    loop = Loop(folder=tmp_path)
    expected = Loop(fp4_config(first_refresh=99)).run(5)
    norm, loop.step = loop.model.model.norm, 0

    def out_of_memory(module: nn.Module, args: Any) -> None:
        if is_probing():
            raise RuntimeError("out of memory")

    norm.register_forward_pre_hook(out_of_memory)
    torch.manual_seed(0)
    loop.run(5)
    assert kept(tmp_path) == ["RuntimeError: out of memory"]
    assert loop.losses == expected.losses
    assert differing(weights(loop.model), weights(expected.model)) == []


def test_training_that_ends_in_a_refresh_stops_its_solver_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = solve_with(monkeypatch, SLEEP)
    loop = Loop(folder=tmp_path).run(3)
    assert processes[0]._process.poll() is None
    loop.controller.close()
    loop.controller.close()
    assert processes[0]._process.returncode == -9
    assert kept(tmp_path) == ["training ended at step 3, before step 4 at which its plan was due"]


def test_training_that_ends_inside_a_refreshs_step_leaves_no_hooks_on_the_parameters() -> None:
    loop = Loop().run(1)
    loop.controller.capture(text(2, 24))
    assert all(p._post_accumulate_grad_hooks for p in loop.model.parameters())
    loop.controller.close()
    assert [p for p in loop.model.parameters() if p._post_accumulate_grad_hooks] == []


def test_training_waits_for_a_slow_solver_only_at_the_step_its_plan_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    solve_with(monkeypatch, begun_late(monkeypatch, tmp_path))
    Loop(fp4_config(**SCHEDULE | {"apply_delay": 0}), tmp_path).run(2)
    (line,) = history(tmp_path)[1:]
    assert (line["step"], line["applied_step"], line["decided_step"]) == (2, 2, 2)
    assert line["seconds"]["waited"] >= 0.5


def test_frozen_linears_get_formats_too_and_have_no_grad_weight(tmp_path: Path) -> None:
    loop = Loop(None)
    for parameter in loop.model.model.layers[0].parameters():
        parameter.requires_grad_(False)
    loop.controller = SnipController(loop.model, loop.optimizer, fp4_config(**SCHEDULE), None, tmp_path)
    loop.run(4)
    (line,) = history(tmp_path)[1:]
    assert line["status"] == "applied"
    assert line["fp4_fraction"] >= DEFAULT_FP4_FRACTION
    plan = loop.controller.plan
    for table in (plan.flops, plan.assignment):
        assert list(table["model.layers.0.mlp.up_proj"]) == ["forward", "grad_input"]
        assert list(table["model.layers.1.mlp.up_proj"]) == list(GEMMS)
    records = json.loads((tmp_path / "snip" / "divergence-2.json").read_text())
    rows = [dict(zip(records["columns"], row, strict=True)) for row in records["rows"]]
    frozen = {row["gemm"] for row in rows if row["layer"] == "model.layers.0.mlp.up_proj"}
    assert frozen == {"forward", "grad_input", "layer"}


def test_converting_before_hand_changes_nothing() -> None:
    model = tiny_llama(hidden=32)
    config = fp4_config(policy="uniform-fp4")
    convert_model(model, config)
    before = {name: id(layer) for name, layer in snip_linears(model).items()}
    controller = SnipController(model, None, config)
    assert {name: id(layer) for name, layer in snip_linears(model).items()} == before
    assert controller.plan.assignment == {name: dict.fromkeys(GEMMS, "fp4") for name in before}


def test_a_refresh_whose_micro_batches_nobody_captured_says_so(tmp_path: Path) -> None:
    loop = Loop(folder=tmp_path)
    for step in (1, 2):
        loop.controller.before_optimizer_step(step)
        loop.controller.after_step(step)
    start, *refreshes = history(tmp_path)
    assert start["event"] == "start"
    assert [line["reason"] for line in refreshes] == [
        "ValueError: No micro-batch of this step was given to capture(). Call capture(batch) before each forward pass, "
        "and after_step(step) after each optimizer step."
    ]


def test_ties_that_could_not_hold_are_refused() -> None:
    def build(**options: Any) -> None:
        model = tiny_llama(hidden=32)
        SnipController(model, torch.optim.AdamW(model.parameters()), fp4_config(**options))

    assert refusal(lambda: build(ties=(("query", "k_proj"),))) == (
        "ties: no swapped layer's last name is 'query'; the last names are down_proj, gate_proj, k_proj, o_proj, "
        "q_proj, up_proj, v_proj."
    )
    names = convert_model(tiny_llama(hidden=32), fp4_config())
    stages = (tuple(names[:1]), tuple(names[1:]))
    assert refusal(lambda: build(ties=(("q_proj", "k_proj"),), stages=stages)) == (
        "ties: the tied layers of 'model.layers.0.self_attn' are in stages 0 and 1; expected all of them in one stage."
    )


@pytest.mark.parametrize(
    ("changes", "probed"), [({}, 3), ({"objective": "gradients"}, 2), ({"policy": "fisher"}, 2)], ids=str
)
def test_a_refresh_waits_for_a_learning_rate_above_0(changes: dict[str, str], probed: int, tmp_path: Path) -> None:
    """Not if updates are not weighed. A resumed run whose schedule had ended begins with a rate of 0."""
    loop = Loop(fp4_config(**SCHEDULE, **changes), tmp_path)
    loop.optimizer.param_groups[0]["lr"] = 0.0
    loop.run(2)
    loop.optimizer.param_groups[0]["lr"] = 1e-3
    loop.run(5)
    refresh = history(tmp_path)[1]
    assert (refresh["step"], refresh["status"]) == (probed, "applied")
