"""Coverage and executed FLOPs follow the tokens that each layer sees in a real micro-batch."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import own_loop
import pytest
import torch
from configs import fp4_config
from models import CHOSEN, build, text, with_images
from rich.text import Text
from small import TinyLM, tiny_llama
from thread_ranks import on_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from snip_hf import PrecisionPlan, SnipConfig, convert_model, coverage
from snip_hf.estimation.coverage import PassCounts
from snip_hf.integrations.model_card import trained_section
from snip_hf.integrations.trackers import quantities_in_force
from snip_hf.numerics.formats import FORMATS
from snip_hf.parallel.ranks import Processes, Ranks
from snip_hf.records.events import Counted
from snip_hf.records.load import load_run
from snip_hf.reporting.differences import Compared, share_table
from snip_hf.reporting.figures import plan_figure
from snip_hf.reporting.run_report import run_contents
from snip_hf.training import checks
from snip_hf.training import coverage as coverage_module
from snip_hf.training.coverage import CoverageCounter
from snip_hf.training.micro_batches import TrainingPass

FAST: dict[str, Any] = {"first_refresh": 2, "refresh_every": 4, "apply_delay": 1, "solver": "greedy"}
LOG = "snip_hf.training.controller"


class Sparse(nn.Module):
    """A linear, and two that see parts of the tokens: those of even and of odd numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 12, bias=False)
        self.experts = nn.ModuleList([nn.Linear(12, 12, bias=False) for _ in range(2)])

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            chosen = ids % 2 == index
            y[chosen] = expert(x[chosen])
        return x + torch.tanh(self.up(x)) + y


class SparseLM(TinyLM):
    """A causal LM of such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Sparse() for _ in range(2)])

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, input_ids)
        logits = self.head(x)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def ids(odd: int, tokens: int = 16) -> dict[str, Tensor]:
    """One sequence, some of whose tokens have odd numbers."""
    found = torch.tensor([[1] * odd + [2] * (tokens - odd)])
    return {"input_ids": found, "labels": found}


def seeded(model: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return model()


class Loop(own_loop.Loop):
    """Trains a model on given batches."""

    def __init__(self, model: nn.Module, config: SnipConfig, folder: Path | None = None) -> None:
        super().__init__(config, folder, model=model)

    def run(self, *batches: dict[str, Tensor]) -> Loop:  # type: ignore[override]
        for batch in batches:
            self.batch = lambda index, batch=batch: batch  # type: ignore[method-assign]
            super().run(self.step + 1)
        return self


def events(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "snip" / "history.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == Counted.event]


def by_hand(plan: PrecisionPlan, tokens: Mapping[str, float]) -> float:
    """The FP4 share of what runs."""
    work = {(layer, gemm): flops * tokens[layer] for layer, row in plan.flops.items() for gemm, flops in row.items()}
    low = [count for (layer, gemm), count in work.items() if FORMATS[plan.assignment[layer][gemm]].counts_as_fp4]
    return sum(low) / sum(work.values())


def test_if_all_layers_see_the_same_tokens_only_the_coverage_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, LOG):
        loop = Loop(build("llama"), fp4_config(policy="layer-position"), tmp_path).run(text(), text())
    assert loop.controller.coverage == coverage(build("llama"), text())
    (line,) = events(tmp_path)
    counted = line["coverage"]
    assert (line["step"], line["tokens"], line["changes"], counted["uncovered"]) == (1, None, {}, [])
    assert counted["flops"] == counted["covered"] == coverage(build("llama"), text()).flops
    assert "tokens" not in json.loads((tmp_path / "snip" / "plan.json").read_text())
    told = "the plan can decide on 100.0% of the model's matmul FLOPs (output head and attention products aside)\n"
    assert len([message for message in caplog.messages if told in message]) == 1
    assert not [record for record in caplog.records if "decides on only" in record.getMessage()]


def test_experts_count_by_the_tokens_that_their_routers_gave_them() -> None:
    loop = Loop(build("mixtral"), fp4_config(policy="uniform-fp8")).run(text())
    tokens = loop.controller.plan.tokens
    assert tokens == {name: CHOSEN if "experts" in name else 1 for name in loop.controller.plan.assignment}


@pytest.mark.parametrize("odd", [4, 12])
def test_a_rule_decides_once_more_by_what_runs(odd: int, tmp_path: Path) -> None:
    config = fp4_config(policy="layer-type", target_fp4_fraction=0.6)
    loop = Loop(seeded(SparseLM), config, tmp_path)
    before = loop.controller.plan
    loop.run(ids(odd), ids(odd))
    plan = loop.controller.plan
    tokens = {name: {"up": 1.0, "0": 1 - odd / 16, "1": odd / 16}[name.rpartition(".")[2]] for name in plan.assignment}
    assert dict(plan.tokens) == tokens
    assert plan.fp4_fraction == pytest.approx(by_hand(plan, tokens)) and plan.fp4_fraction >= 0.6
    assert before.fp4_fraction >= 0.6, "as if every layer saw all tokens"
    (line,) = events(tmp_path)
    assert {cell: tuple(pair) for cell, pair in line["changes"].items()} == before.changes(plan) != {}
    assert {name: layer.formats for name, layer in loop.controller._layers.all.items()} == plan.to_dict()["assignment"]
    run = load_run(tmp_path)
    assert run.plans[-1][1].assignment == plan.assignment and run.plans[-1][1].fp4_fraction == plan.fp4_fraction
    assert run.counted[-1].coverage == loop.controller.coverage


def test_each_refresh_counts_again_and_meets_the_target_by_what_runs(tmp_path: Path) -> None:
    config = fp4_config(target_fp4_fraction=0.7, **FAST)
    loop = Loop(seeded(SparseLM), config, tmp_path).run(ids(4), ids(12), ids(8), ids(8))
    assert [line["step"] for line in events(tmp_path)] == [1, 2]
    plan = loop.controller.plan
    assert plan.provenance.step == 2
    assert plan.tokens["layers.0.experts.1"] == 12 / 16 and plan.tokens["layers.0.experts.0"] == 4 / 16
    assert plan.fp4_fraction == pytest.approx(by_hand(plan, plan.tokens)) and plan.fp4_fraction >= 0.7
    refresh = load_run(tmp_path).refreshes[-1]
    assert refresh.fp4_fraction == plan.fp4_fraction == load_run(tmp_path).plans[-1][1].fp4_fraction
    assert PrecisionPlan.load(tmp_path / "snip" / "plan.json") == plan


def test_a_micro_batch_that_was_counted_is_not_counted_again_by_the_part_of_it_that_is_probed(tmp_path: Path) -> None:
    rows = torch.cat([ids(4, 128)["input_ids"], ids(124, 128)["input_ids"]])
    config = fp4_config(**FAST | {"first_refresh": 1}, probe_batch_tokens=128)
    plan = Loop(seeded(SparseLM), config, tmp_path).run(*[{"input_ids": rows, "labels": rows}] * 2).controller.plan
    assert [line["step"] for line in events(tmp_path)] == [1]
    assert plan.provenance.step == 1 and plan.tokens["layers.0.experts.1"] == 0.5


def upper_only(model: Any) -> Any:
    """Freezes all but the second block and the head."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("model.layers.1.", "model.norm", "lm_head")))
    return model


@pytest.mark.parametrize("policy", ["snip", "layer-position", "backward-first"])
def test_gemms_that_never_run_do_not_help_to_reach_the_target(policy: str, tmp_path: Path) -> None:
    config = fp4_config(target_fp4_fraction=0.5, granularity="gemm", policy=policy, **FAST)
    loop = Loop(upper_only(build("llama")), config, tmp_path).run(*[text()] * 4)
    plan = loop.controller.plan
    idle = {name for name, own in plan.tokens.items() if own == {"forward": 1.0, "grad_input": 0.0}}
    assert {name for name in plan.tokens if ".layers.0." in name} == idle and len(idle) == 7
    assert {own for name, own in plan.tokens.items() if name not in idle} == {1.0}
    work = {
        (layer, gemm): flops
        for layer, row in plan.flops.items()
        for gemm, flops in row.items()
        if not (gemm == "grad_input" and layer in idle)
    }
    low = [flops for (layer, gemm), flops in work.items() if plan.assignment[layer][gemm] == "fp4"]
    assert plan.fp4_fraction == pytest.approx(sum(low) / sum(work.values())) and plan.fp4_fraction >= 0.5
    assert load_run(tmp_path).plans[-1][1].fp4_fraction == plan.fp4_fraction
    assert PrecisionPlan.load(tmp_path / "snip" / "plan.json") == plan
    assert load_run(tmp_path).counted[-1].tokens == plan.tokens


def test_measured_times_count_by_the_tokens_too() -> None:
    config = fp4_config(policy="layer-type", target_fp4_fraction=0.6, budget="measured", timing_tokens=16)
    plan = Loop(seeded(SparseLM), config).run(ids(4)).controller.plan
    assert plan.measured is not None and plan.times is not None
    for layer, row in plan.measured.seconds.items():
        for gemm, times in row.items():
            expected = {name: seconds * plan.tokens[layer] for name, seconds in times.items()}
            assert plan.times.seconds[layer][gemm] == expected
    assert plan.fp4_time_fraction >= 0.6


def test_a_text_only_batch_of_a_vision_model_gives_its_tower_no_share() -> None:
    config = fp4_config(policy="layer-type", target_fp4_fraction=0.5, include_modules=("model.vision_tower.*",))
    plan = Loop(build("llava"), config).run(text()).controller.plan
    tower = {name for name in plan.assignment if "vision" in name}
    assert {plan.tokens[name] for name in tower} == {0.0}
    assert {plan.tokens[name] for name in plan.assignment.keys() - tower} == {1.0}
    assert plan.fp4_fraction >= 0.5
    seen = Loop(build("llava"), config).run(with_images()).controller.plan.tokens
    # A class token beside 4 patches; text has 8 tokens and the image's 4 places.
    assert {seen[name] for name in tower} == {5 / 12}


def test_a_stage_whose_layers_see_no_token_leaves_the_plan_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    model = build("llava")
    names = convert_model(model, fp4_config(include_modules=("model.vision_tower.*",)))
    stages = [[name for name in names if ("vision" in name) == first] for first in (True, False)]
    config = fp4_config(policy="uniform-fp8", include_modules=("model.vision_tower.*",), stages=stages)
    loop = Loop(model, config).run(text())
    assert loop.controller.plan.tokens is None and loop.controller.coverage is None
    (warning,) = [message for message in caplog.messages if "could not be counted" in message]
    assert "No layer of stages[0], such as 'model.vision_tower.encoder.layers.0.self_attn.k_proj', saw" in warning


def test_little_coverage_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    config = fp4_config(policy="uniform-fp8", skip_modules=("*.mlp.*",))
    with caplog.at_level(logging.INFO, LOG):
        Loop(build("llama"), config).run(text())
    (warning,) = [record.getMessage() for record in caplog.records if "decides on only" in record.getMessage()]
    assert warning == (
        "snip-hf: the plan decides on only 40.0% of the model's matmul FLOPs (output head and attention products "
        "aside); Linear: 60.0%, not covered (skip_modules). FP4 shares are of that part, and the rest stays in high "
        "precision."
    )


@pytest.mark.parametrize("is_called", [False, True])
def test_an_included_head_that_the_loss_never_calls_is_named(is_called: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Liger's and TRL's fused losses multiply with its weight themselves."""
    model = tiny_llama(tie_word_embeddings=False)

    def forward(input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = model.model(input_ids=input_ids).last_hidden_state
        logits = hidden @ model.lm_head.weight.t() + (model.lm_head(hidden) if is_called else 0.0)
        return {"loss": nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}

    model.forward = forward
    with caplog.at_level(logging.INFO, LOG):
        loop = Loop(model, fp4_config(policy="uniform-fp4", include_modules=("lm_head",))).run(text(), text())
    assert loop.controller.coverage is not None
    assert "; lm_head: " in loop.controller.coverage.describe()
    warnings = [message for message in caplog.messages if message.startswith("snip-hf: include_modules")]
    if is_called:
        assert warnings == [] and loop.controller.plan.tokens is None
    else:
        (warning,) = warnings
        assert warning.startswith("snip-hf: include_modules names 'lm_head', but training multiplies with its weight")
        assert set(loop.controller.plan.executed["lm_head"].values()) == {0.0}


def test_a_resumed_run_does_not_count_again_and_decides_the_same() -> None:
    config = fp4_config(target_fp4_fraction=0.7, **FAST)
    batches = [ids(4), ids(12), ids(8), ids(8), ids(8), ids(10), ids(8), ids(8)]
    whole = Loop(seeded(SparseLM), config).run(*batches)
    first = Loop(seeded(SparseLM), config).run(*batches[:2])
    state = json.loads(json.dumps(first.controller.state_dict()))
    assert state["plan"]["tokens"]["layers.0.experts.1"] == 12 / 16
    first.controller.close()
    second = Loop(first.model, config)
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.controller.load_state_dict(state)
    assert second.controller.coverage == first.controller.coverage and second.controller.plan == first.controller.plan
    second.step = 2
    second.run(*batches[2:])
    assert second.controller.plan.assignment == whole.controller.plan.assignment
    assert second.controller.plan.tokens == whole.controller.plan.tokens
    assert second.controller.coverage == whole.controller.coverage


def test_a_loop_that_captures_nothing_counts_nothing() -> None:
    loop = Loop(seeded(SparseLM), fp4_config(policy="layer-type"))
    loop.controller.capture = lambda batch: None
    loop.run(ids(4))
    assert loop.controller.coverage is None and loop.controller.plan.tokens is None


def test_a_model_that_cannot_be_counted_trains_on_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    class Writing(SparseLM):
        def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            if _get_current_dispatch_mode() is not None:
                raise RuntimeError("no counters")
            return super().forward(input_ids, labels)

    loop = Loop(seeded(Writing), fp4_config(policy="layer-type")).run(ids(4), ids(4))
    assert loop.controller.coverage is None and loop.controller.plan.tokens is None and loop.controller.step == 2
    (warning,) = [message for message in caplog.messages if "could not be counted" in message]
    assert warning.startswith("snip-hf: the FLOPs of the micro-batch of step 1") and "no counters" in warning


def mixed(model: Any) -> Any:
    """A model in BF16 with its head in FP32, which trains under autocast alone."""
    model.bfloat16().lm_head.float()
    return model


@pytest.mark.parametrize("captures_inside", [False, True])
def test_a_model_of_two_dtypes_is_counted_as_it_trains_under_autocast(captures_inside: bool) -> None:
    loop = Loop(mixed(build("mixtral")), fp4_config(policy="uniform-fp8"))
    if not captures_inside:
        loop.controller.capture(text())
    with torch.autocast("cpu", torch.bfloat16):
        if captures_inside:
            loop.controller.capture(text())
        loss = loop.model(**text())["loss"]
    loss.backward()
    loop.controller.before_optimizer_step(1)
    assert loop.controller.coverage == coverage(build("mixtral"), text())
    assert loop.controller.plan.tokens == {
        name: CHOSEN if "experts" in name else 1 for name in loop.controller.plan.assignment
    }


class OnlyUnderAutocast(TinyLM):
    """Stands for attention kernels that accept only half precision."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        assert torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.float16
        return super().forward(input_ids, labels)


@pytest.mark.parametrize("by_accelerate", [False, True])
def test_the_pass_runs_under_the_autocast_of_training(by_accelerate: bool) -> None:
    loop = Loop(seeded(OnlyUnderAutocast), fp4_config(policy="uniform-fp8"))
    controller, processes = loop.controller, Processes()
    if not by_accelerate:
        with torch.autocast("cpu", torch.float16):
            controller.capture(ids(4))
        controller.before_optimizer_step(1)
        assert controller.coverage is not None
        return
    accelerator = SimpleNamespace(native_amp=True, mixed_precision="fp16")
    check = CoverageCounter(loop.model, controller._run.in_force, processes, controller._record, accelerator)
    check.take(TrainingPass(ids(4), None))
    check.count_first(1, is_new=True)
    assert check.latest is not None


def test_the_share_of_experts_that_were_not_counted_is_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no counters")

    monkeypatch.setattr(coverage_module, "count_pass", fail)
    config = fp4_config(policy="layer-type", target_fp4_fraction=0.6, rates="ideal")
    with caplog.at_level(logging.INFO, LOG):
        loop = Loop(build("mixtral"), config, tmp_path).run(text())
    plan = loop.controller.plan
    assert plan.linear_speedup() is plan.stage_linear_speedups() is None
    assert not plan.is_share_known and quantities_in_force(plan, loop.controller.coverage) == {}
    (begun,) = [message for message in caplog.messages if "training under SNIP" in message]
    assert "an unknown FP4 share (no micro-batch was counted" in begun and "%" not in begun.split("target")[0]
    run = load_run(tmp_path)
    assert run.plans[-1][1].describe().startswith("an unknown FP4 share") and run.fp4_fractions == [(0, None)]
    texts = [line for line in run_contents(run) if isinstance(line, Text)]
    assert any("has an unknown FP4 share" in line.plain for line in texts)
    assert not any("are in FP4" in line.plain for line in texts)
    assert plan_figure(run).get_suptitle() == "Precision plan"
    columns = share_table([Compared("A", "run", plan, run, {})]).columns
    assert [list(column.cells) for column in columns[3:7]] == [["-"]] * 4
    assert "| formats | FP4, FP8 |" in trained_section(plan, None, "emulated", None)
    dense = Loop(build("llama"), config).run(text()).controller
    assert dense.plan.linear_speedup() is not None
    assert dense.plan.is_share_known and "fp4_share" in quantities_in_force(dense.plan, dense.coverage)


def test_a_pass_that_shows_no_product_leaves_coverage_unknown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(coverage_module, "count_pass", lambda *_: PassCounts())
    loop = Loop(seeded(SparseLM), fp4_config(policy="layer-type")).run(ids(4))
    assert loop.controller.coverage is None and loop.controller.plan.tokens is None
    (warning,) = [message for message in caplog.messages if "could not be counted" in message]
    assert "the forward pass showed no matrix product with a weight; expected those of the layers" in warning


def test_ranks_count_the_micro_batches_of_all_of_them() -> None:
    def work(ranks: Ranks) -> tuple[Any, Any]:
        loop = Loop(seeded(SparseLM), fp4_config(policy="layer-type", target_fp4_fraction=0.6))
        in_force, processes = loop.controller._run.in_force, Processes(data=ranks, everyone=ranks)
        check = CoverageCounter(loop.model, in_force, processes, loop.controller._record)
        check.take(TrainingPass(ids(4) if ranks.rank == 0 else ids(16), None))
        check.count_first(1, is_new=True)
        return check.latest, in_force.plan

    (first, plan), (second, other) = on_ranks(2, work)
    assert first == second and plan == other
    assert plan.tokens["layers.0.experts.1"] == 20 / 32 and plan.tokens["layers.0.up"] == 1
    # 2 blocks of 12 x 12, twice each token.
    assert first.flops == 3 * 2 * 2 * 144 * (32 + 32)


def test_of_parts_of_sequences_the_parts_are_counted_though_their_context_has_ended() -> None:
    loop = Loop(build("llama"), fp4_config(policy="layer-position"))
    in_force, processes = loop.controller._run.in_force, Processes(context=SimpleNamespace())  # type: ignore[arg-type]
    check = CoverageCounter(loop.model, in_force, processes, loop.controller._record)
    batch = text()
    check.take(TrainingPass(batch, None))
    for value in batch.values():
        value.resize_(2 * value.shape[0], *value.shape[1:]).zero_()
    check.count_first(1, is_new=True)
    assert check.latest == Loop(build("llama"), fp4_config(policy="layer-position")).run(text()).controller.coverage


def test_if_no_extra_pass_can_run_nothing_is_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(model: nn.Module) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.INFO, LOG):
            assert Loop(model, fp4_config(policy="layer-type")).run(ids(4)).controller.coverage is None
        return [message for message in caplog.messages if "coverage is not known" in message]

    class FullyShardedDataParallel(nn.Module):
        """Stands for FSDP 1, which is recognized by its name."""

    message = "snip-hf: the FLOPs of a micro-batch are not counted %s, so coverage is not known."
    sharded, spread, parallel = seeded(SparseLM), seeded(SparseLM), seeded(SparseLM)
    sharded.extra = FullyShardedDataParallel()
    spread.embed.weight.ds_tensor = SimpleNamespace(final_location="nvme")
    parallel.tp_size = 2
    routed = seeded(SparseLM)
    assert told(sharded) == [message % "under FSDP version 1"]
    assert told(spread) == [message % "under DeepSpeed's ZeRO-3 with weights on disk"]
    assert told(parallel) == [message % "under tensor parallelism"]
    monkeypatch.setattr(checks, "is_fully_sharded", lambda model: True)
    assert told(routed) == [message % "under FSDP2 or ZeRO-3 with experts that are layers of their own"]


def test_ranks_count_which_grad_inputs_run() -> None:
    def work(ranks: Ranks) -> Any:
        loop = Loop(upper_only(build("llama")), fp4_config(policy="layer-position"))
        in_force, processes = loop.controller._run.in_force, Processes(data=ranks, everyone=ranks)
        check = CoverageCounter(loop.model, in_force, processes, loop.controller._record)
        check.take(TrainingPass(text(), None))
        check.count_first(1, is_new=True)
        return in_force.plan

    plan, other = on_ranks(2, work)
    assert (
        plan
        == other
        == Loop(upper_only(build("llama")), fp4_config(policy="layer-position")).run(text()).controller.plan
    )
