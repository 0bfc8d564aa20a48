"""Is a loss that a loop computes itself differentiated as it is, and are its terms and tokens counted?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from configs import fp4_config
from small import adamw_after, text, tiny_llama
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from snip_hf import SnipController, estimate_divergence, measure_divergence
from snip_hf.estimation.batch import Batch, Objective, copied, objective_of
from snip_hf.estimation.passes import forward_inputs, run_pass
from snip_hf.layers.run_hooks import IdleHook
from snip_hf.parallel.ranks import Processes

EXACT = fp4_config(probe_tokens=None, probe_batch_tokens=None)


def model_loss(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """The one that the model returns, computed from its logits."""
    logits = model(input_ids=inputs["input_ids"]).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1), inputs["labels"][:, 1:].flatten())


def sequence_loss(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    return model(**{"input_ids": inputs.pop("input_ids")}).logits[:, -1].tanh().sum(-1).mean()


def test_the_models_own_loss_written_out_gives_the_same_estimate_and_truth() -> None:
    batch = text(2, 32)
    model = tiny_llama(hidden=32)
    optimizer = adamw_after(model, 2)
    own = estimate_divergence(model, batch, optimizer, EXACT)
    found = estimate_divergence(model, batch, optimizer, EXACT, model_loss)
    assert found.loss == pytest.approx(own.loss, rel=1e-6)
    for one, other in zip(found.rows, own.rows, strict=True):
        assert one.loss_divergence == pytest.approx(other.loss_divergence, rel=1e-3)
        assert one.weight_divergence == pytest.approx(other.weight_divergence, rel=1e-3)
    own = measure_divergence(model, batch, optimizer, EXACT, 1, ("forward",))
    found = measure_divergence(model, batch, optimizer, EXACT, 1, ("forward",), compute_loss=model_loss)
    for one, other in zip(found.rows, own.rows, strict=True):
        assert one.loss_divergence == pytest.approx(other.loss_divergence, abs=1e-6)
        assert one.weight_divergence == pytest.approx(other.weight_divergence, rel=1e-3)


@pytest.mark.parametrize("form", ["token-fisher", "saliency"])
def test_with_terms_the_loss_divergence_is_not_relative_and_token_fisher_is_multiplied_by_them(form: str) -> None:
    batch, model, config = text(4, 16), tiny_llama(hidden=32), replace(EXACT, loss_estimator=form)
    labelled = Batch.of(batch).labelled
    own = estimate_divergence(model, batch, None, config)
    found = estimate_divergence(model, batch, None, config, model_loss, 10)
    factor = 10 / labelled if form == "token-fisher" else 1.0
    for one, other in zip(found.rows, own.rows, strict=True):
        assert one.loss_divergence == pytest.approx(other.loss_divergence * own.loss * factor, rel=1e-3)


def test_inputs_and_cache_stay_as_they_are() -> None:
    model, inputs = tiny_llama(hidden=32), {"input_ids": text(2, 8)["input_ids"], "more": [{"a": 1}]}
    seen: list[bool] = []

    def loss(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        seen.append(model.config.use_cache)
        inputs["more"][0]["a"] = 2
        return sequence_loss(model, inputs)

    assert model.config.use_cache is True
    batch = Batch.of(inputs, Objective(loss))
    first = float(run_pass(model, batch, {}))
    assert float(run_pass(model, batch, {})) == first
    assert seen == [False, False] and model.config.use_cache is True
    assert set(inputs) == {"input_ids", "more"} and inputs["more"] == [{"a": 1}]


def test_copies_of_mappings_keep_their_class() -> None:
    from transformers import BatchEncoding

    inputs = BatchEncoding({"input_ids": torch.zeros(1, 2)})
    copy = copied(inputs)
    copy.pop("input_ids")
    assert type(copy) is BatchEncoding and list(inputs) == ["input_ids"]


@pytest.mark.parametrize(
    ("inputs", "seen", "tokens", "terms"),
    [
        ({"input_ids": torch.zeros(3, 4, dtype=torch.long)}, 0, 12, 3),
        ({"input_ids": torch.zeros(3, 4, dtype=torch.long)}, 24, 24, 3),
        ({"a_input_ids": torch.zeros(3, 4, dtype=torch.long), "b_input_ids": torch.ones(3, 5).long()}, 0, 27, 3),
        ({"prompt_ids": torch.zeros(2, 4, dtype=torch.long), "position_ids": torch.zeros(2, 4).long()}, 0, 8, 2),
        ({"labels": torch.tensor([[1, 2, -100], [1, -100, -100]])}, 0, 6, 1),
    ],
)
def test_tokens_and_terms_are_those_of_the_inputs(inputs: dict[str, Any], seen: int, tokens: int, terms: int) -> None:
    batch = Batch.of(inputs, Objective(model_loss), seen)
    assert tuple(batch.counts) == (tokens, terms)
    assert batch.is_likelihood is ("labels" in inputs)


def test_a_micro_batch_is_cut_only_where_its_loss_allows_it() -> None:
    inputs = text(8, 16)
    assert len(Batch.of(inputs, Objective(model_loss)).part(32).kwargs["labels"]) == 8
    assert len(Batch.of(inputs, Objective(model_loss, can_be_cut=True)).part(32).kwargs["labels"]) == 2
    unlabelled = {"input_ids": inputs["input_ids"]}
    assert len(Batch.of(unlabelled, Objective(sequence_loss, can_be_cut=True)).part(32).kwargs["input_ids"]) == 8


def test_hooks_before_the_forward_pass_act_once_also_where_the_loss_calls_the_model() -> None:
    model, inputs = tiny_llama(hidden=32), text(2, 8)

    def shift(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {"input_ids": (kwargs["input_ids"] + 1) % 100}

    shifted = {"input_ids": (inputs["input_ids"] + 1) % 100, "labels": inputs["labels"]}
    expected = float(run_pass(model, Batch.of(shifted), {}))
    model.register_forward_pre_hook(shift, with_kwargs=True)
    model.register_forward_pre_hook(IdleHook(), with_kwargs=True)  # as of a run
    assert float(run_pass(model, Batch.of(inputs, Objective(model_loss)), {})) == pytest.approx(expected, rel=1e-6)


def test_results_that_are_not_a_loss_are_refused() -> None:
    model, inputs = tiny_llama(hidden=32), text(2, 8)
    with pytest.raises(ValueError, match=r"^terms=3 says what a loss of your own is a mean over, but there is no comp"):
        objective_of(None, 3)
    with pytest.raises(ValueError, match=r"^The batch has no token ids \(its keys are x\). Expected `input_ids`, or"):
        Batch.of({"x": torch.zeros(1)}, Objective(model_loss))
    with pytest.raises(TypeError, match=r"^compute_loss returned tuple; expected the micro-batch's loss, a tensor of"):
        run_pass(model, Batch.of(inputs, Objective(lambda *_: (1, 2))), {})


# ------------------------------------------------------------------------------------------------- loops of one's own


def test_a_loop_of_ones_own_gives_its_loss_to_capture() -> None:
    model = tiny_llama(hidden=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = fp4_config(first_refresh=2, refresh_every=None, apply_delay=1, solver="greedy")
    controller = SnipController(model, optimizer, config)
    for step in range(1, 4):
        for index in range(2):
            batch = {"input_ids": text(2, 16, 2 * step + index)["input_ids"]}
            controller.capture(batch, sequence_loss, terms=2)
            (sequence_loss(model, dict(batch)) / 2).backward()
        controller.before_optimizer_step(step)
        optimizer.step()
        optimizer.zero_grad()
        controller.after_step(step)
    assert controller.plan.provenance.step == 2
    assert controller.plan.fp4_fraction >= config.target_fp4_fraction
    controller.close()


def test_a_loss_without_a_gradient_costs_the_refresh(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_llama(hidden=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    controller = SnipController(model, optimizer, fp4_config(first_refresh=1, solver="greedy"))
    for factor in (0, 1):  # as with advantages of a group whose rewards are all the same
        batch = {"input_ids": text(2, 16, factor)["input_ids"], "factor": factor}

        def loss(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
            return inputs.pop("factor") * sequence_loss(model, inputs)

        controller.capture(batch, loss)
        loss(model, dict(batch)).backward()
    controller.before_optimizer_step(1)
    assert "The loss of the probed micro-batch has no gradient, so all divergences are 0" in caplog.text
    controller.close()


def test_the_inputs_of_the_forward_are_found_without_running_it() -> None:
    model, inputs = tiny_llama(hidden=32), text(2, 8)
    runs: list[bool] = []
    model.model.register_forward_hook(lambda *_: runs.append(torch.is_grad_enabled()))

    def loss(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        with torch.no_grad():
            model(inputs["labels"])  # a reference
        try:
            return model(inputs["input_ids"], use_cache=False).logits.sum()
        except Exception:
            raise AssertionError from None

    found = Objective(loss).forward_inputs(model, inputs)
    assert list(found) == ["input_ids", "use_cache"] and found["input_ids"] is inputs["input_ids"]
    assert runs == [False] and "forward" not in vars(model)
    with pytest.raises(ValueError, match="The loss does not call the model as a whole"):
        Objective(lambda model, inputs: model.model(inputs["input_ids"])[0].sum()).forward_inputs(model, inputs)
    assert forward_inputs(model, inputs, None) is inputs


def test_the_tokens_of_a_loss_of_ones_own_are_counted_for_the_coverage() -> None:
    model = tiny_llama(hidden=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for loss in (None, model_loss):
        controller = SnipController(model, optimizer, fp4_config())
        controller.capture(text(2, 16), loss)
        model(**text(2, 16)).loss.backward()
        controller.before_optimizer_step(1)
        found.append(controller.coverage)
        controller.close()
    assert found[0] is not None and found[0] == found[1]


def test_a_loss_of_ones_own_is_refused_in_a_pipeline_which_computes_its_own() -> None:
    model = tiny_llama(hidden=32)
    controller = SnipController(model, torch.optim.AdamW(model.parameters()), fp4_config())
    controller.processes = Processes(run=lambda batch: None)
    with pytest.raises(ValueError, match=r"^Pipeline.run computes the loss of a pipeline, and not compute_loss"):
        controller.capture(text(2, 16), model_loss)
    controller.close()
