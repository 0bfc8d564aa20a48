"""A compiled model is one graph, computes what eager mode does, and no plan, step or probe compiles it again.

The backend "aot_eager" takes the same graphs as the default "inductor" and runs them without the minute that a C++
compiler needs; what inductor makes of them is tested once, on a small model (`slow`: on a Llama).
"""

from __future__ import annotations

import copy
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from configs import fp4_config
from models import CONFIGS, batch
from own_loop import take_steps
from slow_cases import slow_but
from small import checkpoint_activations, relative_error, text, tiny_llama
from tiny_runs import SCHEDULE, arguments, data, differing, one_thread, train, weights, without_seconds
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PretrainedConfig, PreTrainedModel, Qwen3Config, Trainer

from snip_hf import SnipCallback, SnipController
from snip_hf.config import DEFAULT_FP4_FRACTION
from snip_hf.layers.convert import convert_model
from snip_hf.layers.linear import SnipLinear
from snip_hf.layers.state import set_step, snip_linears
from snip_hf.numerics.gemms import GEMMS

# torch's compiler does this internally, and torch warns of it.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler on a CPU"
)

CONFIG = fp4_config(**SCHEDULE)
SHORT = {"max_steps": 5}  # Probe at step 2, plan applied after step 4: one step under it.


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Nothing compiled before counts, and sums are formed in one order."""
    torch._dynamo.reset()
    counters.clear()
    with one_thread():
        yield
    torch._dynamo.reset()


@contextmanager
def one_graph() -> Iterator[None]:
    """Asserts that what runs inside compiles exactly one graph, without a break, and nothing a second time."""
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    assert dict(counters["graph_break"]) == {}
    assert counters["stats"]["unique_graphs"] == 1


def llama(layers: int = 1) -> LlamaForCausalLM:
    model = tiny_llama(hidden=32, layers=layers)
    # The Trainer does so too: the cache distinguishes its layers, and with recomputation its warning breaks the graph.
    model.config.use_cache = False
    return model


def draw_plan(layers: dict[str, SnipLinear], seed: int) -> None:
    """FP8 or FP4 for each GEMM of each layer."""
    draws = random.Random(seed)
    for layer in layers.values():
        layer.set_formats({gemm: draws.choice(["fp8", "fp4"]) for gemm in GEMMS})


FAMILIES: dict[str, PretrainedConfig] = {
    **{family: copy.deepcopy(CONFIGS[family]) for family in ("llama", "gpt-neox", "gpt2")},
    "qwen3": Qwen3Config(**CONFIGS["llama"].to_dict() | {"model_type": "qwen3", "head_dim": 16}),
}


def one_block(family: str) -> PreTrainedModel:
    """A model in training mode."""
    config = FAMILIES[family]
    config.num_hidden_layers = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).train()
    # transformers finds it by the name of the class, and else warns, which breaks the graph.
    model.loss_type = "ForCausalLM"
    return model


def pass_through(model: nn.Module, call: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one forward and backward pass."""
    model.zero_grad()
    loss = call(**inputs).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_same_pass(got: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    """The same loss, to the bit; gradients up to the order of sums.

    "aot_eager" calls the functions of aten that eager calls, but may add the gradients of a tensor with several uses in
    another order: measured 0 to 4e-7 here, and a last bit that tips one FP4 rounding makes 1e-4 of it. Other formats
    or random numbers make 3e-2 and more.
    """
    assert torch.equal(got[0], expected[0])
    assert max(relative_error(got[1][name], gradient) for name, gradient in expected[1].items()) < 1e-3


# ------------------------------------------------------------------------------------------------ models and layers


@pytest.mark.parametrize("family", slow_but(FAMILIES))
def test_whole_models_are_one_graph_and_compute_what_they_do_uncompiled_under_any_plan(family: str) -> None:
    plain, model = (one_block(family) for _ in range(2))
    for one in (plain, model):
        convert_model(one, CONFIG)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    losses = set()
    with one_graph():
        for step in range(1, 4):
            for one in (plain, model):
                draw_plan(snip_linears(one), step)
                set_step(snip_linears(one), 0, step, step % 2)
            found = pass_through(model, compiled, batch())
            assert_same_pass(found, pass_through(plain, plain, batch()))
            losses.add(float(found[0]))
    assert len(losses) > 1  # The plans did make a difference.


def test_all_decoder_layers_share_one_graph_whatever_their_formats() -> None:
    plain, model = (llama(12) for _ in range(2))  # More than dynamo's limit of 8 recompilations.
    for one in (plain, model):
        convert_model(one, CONFIG)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    with one_graph():
        for step in range(1, 4):
            for one in (plain, model):
                draw_plan(snip_linears(one), step)
                set_step(snip_linears(one), 0, step, 0)
            assert_same_pass(pass_through(model, model, text(2, 16)), pass_through(plain, plain, text(2, 16)))


def test_refreshes_of_a_plain_loop_compile_nothing(tmp_path: Path) -> None:
    def run(compiled: bool, folder: Path) -> tuple[list[float], SnipController]:
        model = llama()
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        controller = SnipController(call, optimizer, CONFIG, output_dir=folder)
        # Probes at steps 2 and 6, plans applied after steps 4 and 8.
        losses = take_steps(call, optimizer, controller, (text(2, 32, step) for step in range(1, 10)))
        controller.close()
        return losses, controller

    expected, eager = run(False, tmp_path / "eager")
    with one_graph():
        losses, controller = run(True, tmp_path / "compiled")
    assert controller.plan.provenance.step == 6
    assert DEFAULT_FP4_FRACTION <= controller.plan.fp4_fraction < 1
    assert controller.plan.assignment == eager.plan.assignment
    assert losses == pytest.approx(expected, rel=1e-4)


def test_a_compiled_recomputation_draws_the_same_random_numbers() -> None:
    """The run is in FP32: under BF16 autocast another order of sums moves FP4 gradients by a tenth."""
    runs = []
    for checkpointed in (False, True):
        model = llama()
        convert_model(model, fp4_config(policy="uniform-fp4"))
        if checkpointed:
            checkpoint_activations(model, False)
        for layer in snip_linears(model).values():
            layer.set_formats(dict.fromkeys(GEMMS, "fp4"))
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if checkpointed else model
        steps = []
        for step in (1, 2):
            set_step(snip_linears(model), 0, step, 0)
            steps.append(pass_through(model, call, text(2, 32)))
        runs.append(steps)
    assert dict(counters["graph_break"]) == {} and counters["stats"]["unique_graphs"] == 1
    for expected, found in zip(*runs, strict=True):
        assert_same_pass(found, expected)
    # Other numbers in another step.
    name = "model.layers.0.mlp.up_proj.weight"
    assert relative_error(runs[1][0][1][name], runs[1][1][1][name]) > 3e-2


def test_a_step_that_is_set_between_forward_and_backward_is_never_silently_taken() -> None:
    """A compiled graph may copy the state only in its backward pass; torch then refuses to run it."""
    grads = []
    for compiled in (False, True):
        model = llama()
        convert_model(model, fp4_config())
        for layer in snip_linears(model).values():
            layer.set_formats(dict.fromkeys(GEMMS, "fp4"))
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        set_step(snip_linears(model), 0, 1, 0)
        loss = call(**text(2, 32)).loss
        set_step(snip_linears(model), 0, 1, 1)
        try:
            loss.backward()
        except RuntimeError as error:
            assert compiled and "modified by an inplace operation" in str(error)
            return
        grads.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert differing(*grads) == []


# -------------------------------------------------------------------------------------------------- under a Trainer


WHOLE: dict[str, Any] = {"backend": "eager", "fullgraph": True}  # Dynamo's part alone: which graphs there are.


def compiled_model(way: str) -> nn.Module:
    model = llama(2 if way == "layer by layer" else 1)
    if way == "wrapped before":
        return torch.compile(model, **WHOLE)
    if way == "in place":
        model.compile(**WHOLE)
    for layer in model.model.layers if way == "layer by layer" else []:
        layer.compile(**WHOLE)
    return model


BY_TRAINER = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "by the Trainer, bf16": ("", {**BY_TRAINER, "bf16": True}),
    # The Trainer cannot read the wrapper's signature.
    "wrapped before, bf16": ("wrapped before", {"remove_unused_columns": False, "bf16": True}),
    "in place": ("in place", {}),
    "layer by layer": ("layer by layer", {}),
}


@pytest.mark.parametrize("way", slow_but(WAYS))
def test_a_compiled_run_refreshes_without_a_graph_break_or_a_recompilation(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how, changes = WAYS[way]
    steps = []
    count = SnipController.count

    def noted(self: SnipController, one: Any) -> None:
        if not one.is_counted:
            steps.append(self.step + 1)
        count(self, one)

    monkeypatch.setattr(SnipController, "count", noted)
    with one_graph():
        run = train(tmp_path / "compiled", CONFIG, model=compiled_model(how), **SHORT, **changes)
    assert [(line["step"], line["status"]) for line in run.refreshes] == [(2, "applied")]
    assert steps == [1, 2, 3, 4, 5]  # The probe's passes in step 2 are no micro-batches.
    eager = llama(2 if how == "layer by layer" else 1)
    plain = train(tmp_path / "plain", CONFIG, model=eager, **SHORT, bf16=changes.get("bf16", False))
    # BF16: the compiler rounds elsewhere, and FP4 takes a last bit to the next grid point.
    tolerance = 1e-3 if "bf16" in changes else 1e-5
    for step, (loss, _) in plain.losses.items():
        assert run.losses[step][0] == pytest.approx(loss, rel=tolerance)
    assert run.refreshes[0]["loss"] == pytest.approx(plain.refreshes[0]["loss"], rel=tolerance)
    hooked = [run.trainer.model, run.trainer.model_wrapped]
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in hooked)


def test_a_compiled_run_saves_evaluates_generates_and_resumes_in_the_middle_of_a_refresh(tmp_path: Path) -> None:
    """The Trainer evaluates the model that it has not wrapped, uncompiled."""
    changes = {**BY_TRAINER, **SHORT, "save_strategy": "steps", "save_steps": 3}
    evaluating = {**changes, "eval_strategy": "steps", "eval_steps": 2}
    with one_graph():
        full = train(tmp_path / "full", CONFIG, model=llama(), **evaluating)
        assert len(full.eval_losses) == 3
        assert full.model.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=2, do_sample=False).shape == (
            1,
            5,
        )
    checkpoint = tmp_path / "full" / "checkpoint-3"
    resumed = train(tmp_path / "full", CONFIG, model=llama(), resume=checkpoint, **evaluating)
    assert resumed.losses == full.losses
    assert without_seconds(resumed.refreshes) == without_seconds(full.refreshes)
    assert differing(weights(resumed.model), weights(full.model)) == []
    assert set(weights(full.model)) == set(weights(llama()))


class OwnStep(Trainer):
    def training_step(self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        loss = nn.functional.cross_entropy(model(**inputs).logits.flatten(0, 1), inputs["labels"].flatten())
        self.accelerator.backward(loss)
        return loss.detach()


def test_a_loss_that_nobody_sees_is_noticed_behind_a_compiled_model_too(tmp_path: Path) -> None:
    trainer = OwnStep(
        model=llama(), args=arguments(tmp_path, **BY_TRAINER), train_dataset=data(), callbacks=[SnipCallback(CONFIG)]
    )
    with pytest.raises(ValueError, match=r"^The training loss depends neither on the loss that the model returns"):
        trainer.train()


@pytest.mark.slow
@needs_compiler
def test_inductor_under_a_trainer_gives_the_losses_of_an_uncompiled_run(tmp_path: Path) -> None:
    """Inductor fuses and sums in another order, which FP32 shows in the last digits of the loss."""
    plain = train(tmp_path / "plain", CONFIG, model=llama(), **SHORT)
    with one_graph():
        run = train(tmp_path / "compiled", CONFIG, model=llama(), **SHORT, torch_compile=True)
    assert [(line["step"], line["status"]) for line in run.refreshes] == [(2, "applied")]
    assert [loss for loss, _ in run.losses.values()] == pytest.approx(
        [loss for loss, _ in plain.losses.values()], rel=1e-5
    )
