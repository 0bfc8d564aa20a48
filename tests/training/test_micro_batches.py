"""Forward passes count as micro-batches if they are backpropagated, and a probed step knows its batch and clipping."""

from __future__ import annotations

import gc
import json
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import fp4_config
from slow_cases import slow_but
from small import TinyLM, checkpoint_activations, text, tiny_llama, tiny_lm, tokens
from thread_ranks import on_ranks
from tiny_runs import SCHEDULE, Run, arguments, data, history, train
from torch import Tensor, nn
from transformers import Trainer
from transformers.modeling_outputs import ModelOutput

from snip_hf import SnipCallback, SnipConfig, SnipController
from snip_hf.layers.convert import convert_model
from snip_hf.layers.run_hooks import RunMark
from snip_hf.layers.state import snip_linears
from snip_hf.parallel.ranks import Ranks
from snip_hf.training import micro_batches
from snip_hf.training.gradients import Clipping
from snip_hf.training.micro_batches import StepWatch, TrainingPass, TrainingPasses

pytestmark = pytest.mark.usefixtures("one_thread_only")


def a_model(**options: Any) -> TinyLM:
    model = tiny_lm(**options)
    convert_model(model, fp4_config())
    return model


def watch_of(model: nn.Module, batch: dict[str, Any] | None = None, probe_tokens: int | None = None) -> StepWatch:
    watch = StepWatch(probe_tokens, Clipping(snip_linears(model), model.parameters(), {}))
    watch.take(TrainingPass(tokens() if batch is None else batch, None))
    return watch


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns the gradients of the swapped layers' weights."""
    weights = {name: layer.weight for name, layer in snip_linears(model).items()}
    return {name: weight.grad for name, weight in weights.items() if weight.grad is not None}


def norm(model: nn.Module) -> float:
    return float(torch.cat([gradient.double().flatten() for gradient in gradients_of(model).values()]).norm())


def factor(model: nn.Module, watch: StepWatch) -> float:
    watch.end()
    return watch.clipping.factor(gradients_of(model), Ranks())


# ------------------------------------------------------------------------------------------------------------- clipping


@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_clipping_by_norm_multiplies_by_the_norm_asked_for_over_that_of_all_gradients(
    reentrant: bool | None, micro_batches: int
) -> None:
    model = a_model(reentrant=reentrant)
    watch = watch_of(model)
    for index in range(micro_batches):
        (model(**tokens(seed=index))["loss"] / micro_batches).backward()
    before = float(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
    assert before > 0.02
    assert factor(model, watch) == pytest.approx(0.01 / before, rel=1e-4)


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_same_goes_for_a_transformers_model_with_activation_checkpointing(reentrant: bool) -> None:
    model = tiny_llama(hidden=32)
    convert_model(model, fp4_config())
    model.train()
    checkpoint_activations(model, reentrant)
    watch = watch_of(model, text(2, 16))
    for index in range(2):
        model(**text(2, 16, index)).loss.backward()
    before = float(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
    assert factor(model, watch) == pytest.approx(0.01 / before, rel=1e-4)


def test_clipping_by_value_is_told_by_the_norms_before_and_after_it() -> None:
    model = a_model()
    watch = watch_of(model)
    model(**tokens())["loss"].backward()
    before = norm(model)
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    assert norm(model) < 0.9 * before
    assert factor(model, watch) == pytest.approx(norm(model) / before, rel=1e-5)


@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_without_clipping_the_factor_is_exactly_1(reentrant: bool | None, micro_batches: int) -> None:
    model = a_model(reentrant=reentrant, dropout=0.2)
    watch = watch_of(model)
    for index in range(micro_batches):
        model(**tokens(seed=index))["loss"].backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e6)
    assert factor(model, watch) == 1.0


@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("frozen", ["embed", "layers.0", "head"])
def test_frozen_parameters_do_not_matter(frozen: str, reentrant: bool | None) -> None:
    model = a_model(reentrant=reentrant)
    model.get_submodule(frozen).requires_grad_(False)
    if frozen == "embed":  # else reentrant checkpointing does not run backward
        model.embed.register_forward_hook(lambda _, args, output: output.requires_grad_())
    watch = watch_of(model)
    model(**tokens())["loss"].backward()
    assert len(gradients_of(model)) == (2 if frozen == "layers.0" else 4)
    before = float(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
    assert factor(model, watch) == pytest.approx(0.01 / before, rel=1e-4)


def test_gradients_of_nothing_or_of_zero_were_not_clipped() -> None:
    model = a_model()
    watch = watch_of(model)
    assert factor(model, watch) == 1.0
    watch = watch_of(model)
    (0 * model(**tokens())["loss"]).backward()
    assert factor(model, watch) == 1.0


def test_a_gradient_that_a_loop_removes_was_not_clipped() -> None:
    model = a_model()
    watch = watch_of(model)
    model(**tokens())["loss"].backward()
    next(iter(snip_linears(model).values())).weight.grad = None
    assert factor(model, watch) == 1.0


@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("watch_first", [True, False])
def test_changes_of_gradients_by_a_wrapper_at_the_end_of_the_backward_pass_are_not_clipping(
    watch_first: bool, reentrant: bool | None
) -> None:
    """DDP takes their mean over the ranks in a callback that the last bucket's hook queues."""
    model = a_model(reentrant=reentrant)
    ended: list[int] = []

    def reduce() -> None:
        ended.append(len(gradients_of(model)))
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)

    def queue(parameter: Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(reduce)

    watch = watch_of(model) if watch_first else None
    hook = model.embed.weight.register_post_accumulate_grad_hook(queue)  # the last to get its gradient
    watch = watch or watch_of(model)
    model(**tokens())["loss"].backward()
    hook.remove()
    assert ended == [4]
    halved = norm(model)
    before = float(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
    assert norm(model) < halved
    assert factor(model, watch) == pytest.approx(0.01 / before, rel=1e-4)


def test_every_rank_s_part_of_the_gradients_counts() -> None:
    def work(ranks: Ranks) -> tuple[float, float, float]:
        model = a_model(seed=ranks.rank)
        watch = watch_of(model)
        model(**tokens())["loss"].backward()
        before = norm(model)
        nn.utils.clip_grad_value_(model.parameters(), 1e-3 * (1 + ranks.rank))
        watch.end()
        return watch.clipping.factor(gradients_of(model), ranks), before, norm(model)

    found = on_ranks(3, work)
    before, after = (sum(result[index] ** 2 for result in found) ** 0.5 for index in (1, 2))
    assert [result[0] for result in found] == [pytest.approx(after / before, rel=1e-5)] * 3
    assert len({result[0] for result in found}) == 1


# ---------------------------------------------------------------------------------------------- micro-batch and its end


def test_the_batch_is_a_part_and_the_counts_are_of_the_whole() -> None:
    batch = tokens(rows=4, length=10)
    batch["labels"][0, :4] = -100
    watch = watch_of(a_model(), batch, probe_tokens=20)
    assert torch.equal(watch.batch.kwargs["input_ids"], batch["input_ids"][[0, 2]])
    assert watch.counts == (40, 4 * 9 - 3)  # the first token's label is not counted
    assert watch_of(a_model(), batch).batch.tokens == 40


def test_a_batch_that_cannot_be_probed_raises_when_it_is_asked_for() -> None:
    watch = watch_of(a_model(), {"input_ids": tokens()["input_ids"]})
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^The batch has no labels \(its keys are input_ids\)"):
            _ = watch.batch
    assert watch.counts == (0, 0)


def hooked(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter._post_accumulate_grad_hooks}


def test_all_trained_parameters_are_watched_until_the_end() -> None:
    model = a_model()
    model.layers[1].norm.requires_grad_(False)
    watch = watch_of(model)
    assert hooked(model) == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    watch.end()
    watch.end()
    assert hooked(model) == set()


def test_after_the_end_a_backward_pass_is_not_noted() -> None:
    model = a_model()
    watch = watch_of(model)
    model(**tokens())["loss"].backward()
    noted = norm(model)
    watch.end()
    model(**tokens(seed=2))["loss"].backward()
    assert watch.clipping.factor(gradients_of(model), Ranks()) == pytest.approx(norm(model) / noted, rel=1e-5)


CONFIG = fp4_config(**SCHEDULE)
# Until a plan is applied, nothing differs from a run without SNIP.
UNTOUCHED = fp4_config(start_format="bf16", **SCHEDULE)
SHORT = {"max_steps": 5}


# ------------------------------------------------------------------- losses from what the model returns beside its own


class FromOutputs(Trainer):
    """Computes the loss from the log-probabilities that the model returns, as TRL's SFTTrainer does."""

    form = "nll"

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        outputs = model(**inputs, fused=True)
        log_probs, count = outputs.log_probs, kwargs["num_items_in_batch"]
        if self.form == "dft":
            log_probs = log_probs * log_probs.exp().detach()
        if self.form == "negative":
            log_probs = -log_probs
        if self.form == "nan":
            log_probs = log_probs * (torch.nan if self.state.global_step == 0 else 1)
        loss = -log_probs.sum() / count
        return loss + outputs.squares.sum() if self.form == "penalty" else loss


@dataclass
class Outputs(ModelOutput):
    loss: Tensor | None = None
    log_probs: Tensor | None = None
    squares: Tensor | None = None


def fused(model: nn.Module) -> nn.Module:
    """Gives a model the forward that TRL gives it: log-probabilities in place of logits, and the loss of them."""
    original = model.forward

    def forward(self: nn.Module, *args: Any, fused: bool = False, labels: Any = None, **kwargs: Any) -> Any:
        kwargs.pop("num_items_in_batch", None)
        if not fused:
            return original(*args, labels=labels, **kwargs)
        logits, labels = original(*args, **kwargs).logits[:, :-1], labels[:, 1:]
        mask = labels != -100
        picked = torch.log_softmax(logits, -1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        log_probs = picked.masked_fill(~mask, 0)
        loss = -log_probs.sum() / mask.sum().clamp(min=1)
        return Outputs(loss=loss, log_probs=log_probs, squares=logits.square().mean(-1))

    model.forward = types.MethodType(forward, model)
    return model


def from_outputs(folder: Path, form: str, config: SnipConfig | None = UNTOUCHED, **changes: Any) -> Run:
    callbacks = [] if config is None else [SnipCallback(config)]
    args = arguments(folder, remove_unused_columns=False, **SHORT | changes)
    trainer = FromOutputs(fused(tiny_llama(hidden=32)), args, train_dataset=data(), callbacks=callbacks)
    trainer.form = form
    trainer.train()
    return Run(folder, trainer, None)


@pytest.mark.parametrize("changes", slow_but([{}, {"bf16": True}], {}), ids=str)
def test_a_loss_that_is_computed_once_more_from_the_outputs_is_the_models(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    run = from_outputs(tmp_path / "snip", "nll", **changes)
    assert [(line["step"], line["status"]) for line in run.refreshes] == [(2, "applied")]
    plain = from_outputs(tmp_path / "plain", "nll", None, **changes)
    assert [run.losses[step] for step in (1, 2, 3, 4)] == [plain.losses[step] for step in (1, 2, 3, 4)]


@pytest.mark.filterwarnings("ignore")  # of what torch's compiler does inside
@pytest.mark.slow
def test_the_same_is_seen_behind_a_compiled_model(tmp_path: Path) -> None:
    changes = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    assert [line["status"] for line in from_outputs(tmp_path, "nll", **changes).refreshes] == ["applied"]
    torch._dynamo.reset()


def probed_loss(folder: Path) -> float:
    return json.loads((folder / "snip" / "divergence-2.json").read_text())["loss"]


def test_another_loss_of_the_outputs_is_probed_as_it_is(tmp_path: Path) -> None:
    run = from_outputs(tmp_path / "dft", "dft")
    assert probed_loss(tmp_path / "dft") == pytest.approx(run.losses[2][0], rel=0.05)
    for form in ("nll", "penalty"):
        assert [line["status"] for line in from_outputs(tmp_path / form, form).refreshes] == ["applied"]
    assert probed_loss(tmp_path / "penalty") > probed_loss(tmp_path / "nll") > 100 * probed_loss(tmp_path / "dft")


def test_a_negative_mean_over_tokens_costs_the_refresh(tmp_path: Path) -> None:
    (line,) = from_outputs(tmp_path, "negative").refreshes
    assert line["status"] == "kept"
    assert "expected a positive number, because the loss divergence is relative to it" in line["reason"]


def test_gradients_that_are_not_finite_say_nothing_about_the_loss(tmp_path: Path) -> None:
    assert [line["status"] for line in history(from_outputs(tmp_path, "nan").folder)[1:]] == ["kept"]


def test_the_models_own_loss_computed_from_its_logits_is_accepted(tmp_path: Path) -> None:
    class FromLogits(Trainer):
        def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            logits = model(**inputs).logits[:, :-1].float()
            return nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"][:, 1:].flatten())

    trainer = FromLogits(
        tiny_llama(hidden=32), arguments(tmp_path, **SHORT), train_dataset=data(), callbacks=[SnipCallback(CONFIG)]
    )
    trainer.train()
    assert [line["status"] for line in history(tmp_path)[1:]] == ["applied"]


# -------------------------------------------------------------------------------------------------- which passes count


def watched(**options: Any) -> tuple[nn.Module, SnipController, TrainingPasses]:
    model = tiny_llama(hidden=32, **options)
    controller = SnipController(model, torch.optim.SGD(model.parameters(), lr=0.1), fp4_config(first_refresh=1))
    passes = TrainingPasses(model, controller, RunMark())
    passes.is_open = True
    return model.train(), controller, passes


def test_a_pass_counts_once_however_often_it_is_backpropagated() -> None:
    model, controller, passes = watched()
    loss = model(**text(2, 16)).loss
    assert controller._micro_batch == 0
    loss.backward(retain_graph=True)
    loss.backward()
    assert controller._micro_batch == 1
    assert passes.known_loss


def test_in_eval_mode_too_a_pass_counts_if_it_is_backpropagated() -> None:
    """Training without dropout, or with frozen normalizations, works like this."""
    model, controller, passes = watched()
    model.eval()
    keys = []
    for index in range(2):
        with torch.no_grad():
            model(**text(2, 16))
        assert controller._micro_batch == index
        model(**text(2, 16, index)).loss.backward()
        keys.append(model.model.layers[0].mlp.up_proj.snip_state.clone())
    assert controller._micro_batch == 2 and passes.known_loss
    assert not torch.equal(*keys)


def test_passes_before_one_backward_pass_share_a_key_and_both_count() -> None:
    model, controller, _passes = watched()
    keys = []
    losses = []
    for index in range(2):
        losses.append(model(**text(2, 16, index)).loss)
        keys.append(model.model.layers[0].mlp.up_proj.snip_state.clone())
    sum(losses).backward()
    assert torch.equal(*keys)
    assert controller._micro_batch == 2


def test_the_first_pass_that_counts_is_the_batch_of_the_probe() -> None:
    model, controller, _passes = watched()
    model(**text(2, 16, 0))
    real = text(2, 16, 1)
    state = torch.get_rng_state()
    model(**real).loss.backward()
    batch = controller._watch.batch
    assert torch.equal(batch.kwargs["input_ids"], real["input_ids"])
    assert torch.equal(batch.random_state.cpu, state)
    controller.close()
    assert hooked(model) == set()


def test_outside_a_step_nothing_counts() -> None:
    model, controller, passes = watched()
    passes.is_open = False
    model(**text(2, 16)).loss.backward()
    assert controller._micro_batch == 0
    assert not passes.known_loss


def test_a_loss_of_inner_layers_counts_though_it_is_not_the_models() -> None:
    model, controller, passes = watched()
    model(**text(2, 16), output_hidden_states=True).hidden_states[1].sum().backward()
    assert controller._micro_batch == 1
    passes.is_open = False
    assert not passes.known_loss


def test_a_pass_that_is_never_backpropagated_is_not_held() -> None:
    model, _controller, _passes = watched()
    model(**text(2, 16)).loss.backward()
    outputs = model(**text(2, 16))
    gone = [weakref.ref(outputs.loss), weakref.ref(outputs.logits)]
    del outputs
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_logits_are_no_loss() -> None:
    assert micro_batches._loss((torch.ones(2, 3, requires_grad=True),)) is None


class _NamedOutputs(dict[str, Tensor]):
    pass


@pytest.mark.parametrize("output", [lambda loss: (loss,), lambda loss: _NamedOutputs(loss=loss)], ids=["tuple", "dict"])
def test_a_bare_loss_is_a_loss(output: Callable[[Tensor], Any], tmp_path: Path) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny_llama(hidden=32)

        def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
            return output(self.inner(input_ids=input_ids, labels=labels).loss)

    run = train(tmp_path, CONFIG, model=Bare(), **SHORT)
    assert [line["status"] for line in run.refreshes] == ["applied"]
