"""Encoder-decoders, encoders and classifiers train, refresh and resume, and their estimates match measurements."""

from __future__ import annotations

import json
import statistics
from typing import Any

import pytest
import torch
from configs import fp4_config
from own_loop import Loop
from small import tokens
from tiny_runs import differing, one_thread, weights
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BertConfig,
    LlamaConfig,
    PreTrainedModel,
    T5Config,
)

from snip_hf import convert_model, coverage, estimate_divergence, measure_divergence
from snip_hf.config import DEFAULT_FP4_FRACTION
from snip_hf.estimation.batch import Batch
from snip_hf.training.micro_batches import tokens_of

_SMALL: dict[str, Any] = {"vocab_size": 40, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48}
_NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_T5 = T5Config(
    vocab_size=40,
    d_model=32,
    d_ff=48,
    d_kv=16,
    num_layers=1,
    num_heads=2,
    feed_forward_proj="gated-gelu",
    dropout_rate=0.0,
    decoder_start_token_id=0,
    pad_token_id=0,
)
FAST: dict[str, Any] = {"first_refresh": 1, "refresh_every": 4, "apply_delay": 1, "solver": "greedy"}


def built(family: str) -> tuple[PreTrainedModel, dict[str, torch.Tensor], tuple[str, ...]]:
    """A model, a batch for it, and what to include."""
    g = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(1, 40, (3, 16), generator=g), torch.randint(1, 40, (3, 12), generator=g)
    torch.manual_seed(0)
    if family == "t5":
        return AutoModelForSeq2SeqLM.from_config(_T5), {"input_ids": ids, "labels": labels}, ("encoder.*",)
    if family == "bert":
        config = BertConfig(**_SMALL, **_NO_DROPOUT, num_hidden_layers=1)
        masked = torch.where(torch.rand(3, 16, generator=g) < 0.4, ids, -100)
        return AutoModelForMaskedLM.from_config(config), {"input_ids": ids, "labels": masked}, ()
    config = LlamaConfig(**_SMALL, num_hidden_layers=1, num_labels=3, pad_token_id=0)
    model = AutoModelForSequenceClassification.from_config(config)
    return model, {"input_ids": ids, "labels": torch.tensor([0, 2, 1])}, ("score",)


# In a classifier only three tokens have a label.
@pytest.mark.parametrize(("family", "most"), [("t5", 0.1), ("bert", 0.1), ("classifier", 0.15)])
def test_their_weight_divergences_are_the_measured_ones(family: str, most: float) -> None:
    model, batch, included = built(family)
    config = fp4_config(include_modules=included, probe_tokens=None, probe_batch_tokens=None, probes=4)
    with one_thread():
        estimated = estimate_divergence(model.train(), batch, None, config)
        measured = measure_divergence(model, batch, None, config, gemms=("layer",))
    truth = {(row.layer, row.format): row.weight_divergence for row in measured.rows}
    errors = [
        abs(row.weight_divergence / truth[row.layer, row.format] - 1)
        for row in estimated.rows
        if row.gemm == "layer" and row.format == "fp4" and truth[row.layer, row.format] > 0
    ]
    assert len(errors) >= 6 and statistics.median(errors) <= most


@pytest.mark.parametrize("family", ["t5", "bert", "classifier"])
def test_they_refresh_and_resume(family: str) -> None:
    def loop() -> Loop:
        model, batch, included = built(family)
        found = Loop(fp4_config(include_modules=included, **FAST), model=model)
        found.batch = lambda index: batch
        return found

    whole, first, again = loop().run(2), loop().run(1), loop()
    again.model.load_state_dict(first.model.state_dict())
    again.optimizer.load_state_dict(first.optimizer.state_dict())
    again.controller.load_state_dict(json.loads(json.dumps(first.controller.state_dict())))
    again.step = 1
    again.run(2)
    plan = whole.controller.plan
    assert plan.provenance.step == 1 and plan.fp4_fraction >= DEFAULT_FP4_FRACTION
    assert again.controller.plan.assignment == plan.assignment
    assert differing(weights(again.model), weights(whole.model)) == []


def test_an_encoder_is_covered_if_it_is_named_and_sees_its_own_tokens() -> None:
    model, batch, included = built("t5")
    alone = coverage(model, batch)
    reason = "outside the language model's decoder (include_modules=('encoder.*',) swaps it)"
    assert {one.reason for one in alone.uncovered} == {reason} and 0.4 < alone.share < 0.6
    for patterns in (included, ("encoder.*",)):
        assert coverage(model, batch, fp4_config(include_modules=patterns)).share == 1.0
    assert all(name.startswith("decoder.") for name in convert_model(model, fp4_config()))


def test_a_classifier_has_one_label_per_sequence_and_the_tokens_of_its_inputs() -> None:
    _, batch, _ = built("classifier")
    found = Batch.of(batch)
    assert (found.tokens, found.labelled) == (48, 3)
    part = found.part(20)
    assert part.kwargs["input_ids"].shape == (1, 16) and part.micro_batch == (48, 3)
    assert Batch.of(tokens(2, 6)).counts == (12, 10), "a causal LM shifts its labels"


def test_a_classifier_of_several_labels_has_one_term_per_sequence_and_the_tokens_of_its_inputs() -> None:
    _, batch, _ = built("classifier")
    captured = Batch.of({**batch, "labels": torch.tensor([[0.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])})
    assert (captured.tokens, captured.labelled, tokens_of(captured.kwargs)) == (48, 3, 48)
