"""Does a Trainer run on FP8 tensor cores: refreshed, compiled once, resumed, and with the losses of the emulation?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from backends import hopper_lacks
from configs import fp4_config
from tiny_runs import refreshes
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from snip_hf import SnipCallback
from snip_hf.layers.state import snip_linears

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(hopper_lacks(torch.device("cuda")) is not None, reason="needs a Hopper GPU"),
    pytest.mark.filterwarnings("default"),
]

TIES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
SNIP = {
    "target_fp4_fraction": 0.5,
    "granularity": "gemm",
    "first_refresh": 3,
    "refresh_every": 3,
    "apply_delay": 1,
    "solver": "highs",
}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    return LlamaForCausalLM(config)


class NothingCompiledAfter(TrainerCallback):
    """Counts the graphs when a step has ended; whatever is compiled later shows."""

    def __init__(self, step: int) -> None:
        self.step, self.graphs = step, -1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.graphs = counters["stats"]["unique_graphs"]


def run(
    folder: Path,
    compiled: bool,
    steps: int = 11,
    resume: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    callbacks: Iterable[TrainerCallback] = (),
    **snip: Any,
) -> tuple[Any, Any, Any]:
    """Trains with more of the Trainer's arguments and callbacks; returns ours, the counter of graphs and the losses."""
    torch._dynamo.reset()
    counters.clear()
    rows = torch.randint(0, 8, (64, 200), generator=torch.Generator().manual_seed(1)).cumsum(1) % 256
    every = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        bf16=True,
        torch_compile=compiled,
        logging_steps=1,
        save_steps=5,
        report_to=[],
        seed=0,
        **arguments or {},
    )
    ours, watch = SnipCallback(fp4_config(**SNIP | snip)), NothingCompiledAfter(2)
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(llama(), every, train_dataset=data, callbacks=[ours, watch, *callbacks])
    trainer.train(resume_from_checkpoint=resume)
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    return ours, watch, losses


@pytest.mark.parametrize("regions", [False, True], ids=["whole", "regions"])
@pytest.mark.parametrize("ties", [(), TIES], ids=["untied", "tied"])
def test_refreshes_change_formats_and_compile_nothing(
    regions: bool, ties: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", str(regions).lower())
    ours, watch, losses = run(tmp_path, compiled=True, ties=ties)
    assert ours.controller.backend == "hopper"
    lines = refreshes(tmp_path)
    assert [line["status"] for line in lines] == ["applied"] * 3
    assert lines[0]["layers_changed"] > 0 and lines[0]["fp4_fraction"] >= 0.5
    assert dict(counters["graph_break"]) == {}
    assert counters["stats"]["unique_graphs"] == watch.graphs > 0
    assert all(torch.isfinite(torch.tensor(loss)) for loss in losses.values()) and losses[11] < losses[1]


def test_losses_are_those_of_the_emulation_up_to_rounding(tmp_path: Path) -> None:
    """Both under their own plans; BF16 rounding tips FP4 rounding, so that runs drift apart slowly."""
    _, _, tensor_cores = run(tmp_path / "hopper", compiled=False)
    _, _, emulated = run(tmp_path / "emulated", compiled=False, backend="emulated")
    assert abs(tensor_cores[1] - emulated[1]) < 1e-3 * emulated[1]
    assert all(abs(tensor_cores[step] - emulated[step]) < 2e-2 * emulated[step] for step in emulated)


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    _, _, whole = run(tmp_path, compiled=False)
    _, _, resumed = run(tmp_path, compiled=False, resume=str(tmp_path / "checkpoint-5"))
    assert {step: whole[step] for step in range(6, 12)} == {step: resumed[step] for step in range(6, 12)}


def test_weights_are_kept_only_where_a_step_has_several_micro_batches(tmp_path: Path) -> None:
    class Look(TrainerCallback):
        kept = 0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.kept = sum(len(layer.snip_cache.weights) > 0 for layer in snip_linears(kwargs["model"]).values())

    seen = {}
    for micro_batches in (1, 2):
        look = Look()
        arguments = TrainingArguments(
            output_dir=str(tmp_path / str(micro_batches)),
            max_steps=3,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=micro_batches,
            bf16=True,
            report_to=[],
        )
        rows = torch.randint(0, 256, (32, 64), generator=torch.Generator().manual_seed(1))
        data = [{"input_ids": row, "labels": row} for row in rows]
        model = llama()
        callbacks = [SnipCallback(fp4_config(policy="uniform-fp4")), look]
        Trainer(model, arguments, train_dataset=data, callbacks=callbacks).train()
        assert all(layer.snip_cache.weights == () for layer in snip_linears(model).values())
        seen[micro_batches] = look.kept
    assert seen == {1: 0, 2: 14}
