"""Does the watch of a step note its micro-batch, and what clipping does to complete gradients?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import TinyLM, checkpoint_activations, text, tiny_llama, tiny_lm, tokens
from thread_ranks import on_ranks
from torch import Tensor, nn

from snip_hf.config import SnipConfig
from snip_hf.layers.convert import convert_model
from snip_hf.layers.state import snip_linears
from snip_hf.parallel.ranks import Ranks
from snip_hf.training.captured_step import StepWatch, TrainingPass


def a_model(**options: Any) -> TinyLM:
    model = tiny_lm(**options)
    convert_model(model, SnipConfig())
    return model


def watch_of(model: nn.Module, batch: dict[str, Any] | None = None, probe_tokens: int | None = None) -> StepWatch:
    watch = StepWatch(probe_tokens, snip_linears(model), model.parameters())
    watch.take(TrainingPass(tokens() if batch is None else batch, None))
    return watch


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Of the swapped layers."""
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
    convert_model(model, SnipConfig())
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


@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("watch_first", [True, False])
def test_what_a_wrapper_does_to_the_gradients_when_the_backward_pass_ends_is_no_clipping(
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


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_a_callback_that_a_callback_queues_runs_after_the_whole_backward_pass(reentrant: bool | None) -> None:
    """What the watch relies on, for gradients are complete only then."""
    model = tiny_lm(reentrant=reentrant)
    queue = torch.autograd.Variable._execution_engine.queue_callback
    seen: list[str | int] = []

    def of_the_last(parameter: Tensor) -> None:
        queue(lambda: queue(lambda: seen.append("ours")))
        queue(lambda: seen.append("DDP's"))

    def of_the_first(parameter: Tensor) -> None:
        queue(lambda: queue(lambda: seen.append(sum(p.grad is not None for p in model.parameters()))))

    model.embed.weight.register_post_accumulate_grad_hook(of_the_last)
    model.head.weight.register_post_accumulate_grad_hook(of_the_first)
    model(**tokens())["loss"].backward()
    assert seen == ["DDP's", len(list(model.parameters())), "ours"]


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
