"""Does the loss divergence follow the terms that a loss is a mean over: tokens, sequences or pairs of them?

The truth is measured, in a model whose tokens do not see each other: how far quantization moves the terms of the loss.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_loss_divergence_counts_labels import pointwise
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from snip_hf.config import SnipConfig
from snip_hf.estimation.divergence import estimate_divergence
from snip_hf.estimation.ground_truth import measure_divergence

# The policy takes gradients that are 0, as where preferences of either kind balance.
CONFIG = SnipConfig(
    policy="fisher", loss_estimator="token-fisher", probe_tokens=None, probe_batch_tokens=None, probes=1
)
ROWS, LENGTH, BETA = 64, 33, 0.1
Inputs = dict[str, Any]
Terms = Callable[[nn.Module, Inputs], Tensor]


def log_probs(model: Any, inputs: Inputs) -> Tensor:
    """Of the tokens but the first ones, (sequences, tokens)."""
    ids = inputs["input_ids"]
    return torch.log_softmax(model.logits(ids)[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]


def by_tokens(model: nn.Module, inputs: Inputs) -> Tensor:
    """A policy's tokens, as in GRPO: minus the advantage times the ratio of probabilities, now and then."""
    return -inputs["advantages"][:, None] * (log_probs(model, inputs) - inputs["before"]).exp()


def by_sequences(model: nn.Module, inputs: Inputs) -> Tensor:
    """A policy's completions, as in RLOO."""
    return -inputs["advantages"] * (log_probs(model, inputs) - inputs["before"]).sum(-1).exp()


def by_pairs(model: nn.Module, inputs: Inputs) -> Tensor:
    """Preferences, as in DPO: the first half of the sequences was chosen. The reference is the model itself."""
    chosen, rejected = (log_probs(model, inputs) - inputs["before"]).sum(-1).chunk(2)
    return -logsigmoid(BETA * (chosen - rejected))


def mean_of(terms: Terms) -> Terms:
    return lambda model, inputs: terms(model, inputs).mean()


def half_square_of(terms: Terms) -> Terms:
    """Half the mean square by which the terms differ from those that the inputs have."""
    return lambda model, inputs: (terms(model, inputs) - inputs["terms"]).square().mean() / 2


def a_case(terms: Terms) -> tuple[nn.Module, Inputs]:
    generator = torch.Generator().manual_seed(3)
    model = pointwise(blocks=2)
    ids = torch.randint(0, 17, (ROWS, LENGTH), generator=generator)
    inputs = {"input_ids": ids, "advantages": torch.randint(0, 2, (ROWS,), generator=generator) * 2.0 - 1}
    with torch.no_grad():
        inputs["before"] = log_probs(model, inputs)
        inputs["terms"] = terms(model, inputs)
    return model, inputs


def ratios(model: nn.Module, inputs: Inputs, loss: Terms, truth: Terms, terms: int) -> list[float]:
    """Estimate over truth, of the forward GEMMs in FP8: FP4 moves sums over tokens beyond first order."""
    found = estimate_divergence(model, inputs, None, CONFIG, loss, terms)
    true = measure_divergence(model, inputs, None, CONFIG, 1, ("forward",), compute_loss=truth)
    expected = {(row.layer, row.format): row.loss_divergence for row in true.rows}
    forward = [row for row in found.rows if row.gemm == "forward" and row.format == "fp8"]
    return [row.loss_divergence / expected[row.layer, row.format] for row in forward]


@pytest.mark.parametrize(
    ("terms", "count", "tolerance"),
    [(by_tokens, ROWS * (LENGTH - 1), 0.1), (by_sequences, ROWS, 0.25), (by_pairs, ROWS // 2, 0.6)],
)
def test_it_is_half_the_mean_square_by_which_the_terms_move(terms: Terms, count: int, tolerance: float) -> None:
    """Errors of tokens are taken as independent: in terms of several tokens, products of theirs average to nothing."""
    model, inputs = a_case(terms)
    found = ratios(model, inputs, mean_of(terms), half_square_of(terms), count)
    assert statistics.median(found) == pytest.approx(1, rel=tolerance)
    assert all(1 / 3 < ratio < 3 for ratio in found)


def test_it_is_the_rise_of_a_loss_of_preferences_that_are_drawn_from_the_model() -> None:
    """Where the model prefers neither, both orders of a pair are as likely: here each pair is in the batch in both."""
    model, inputs = a_case(by_pairs)
    first, second = inputs["input_ids"].chunk(2)
    inputs["input_ids"] = torch.cat([first, second, second, first])
    with torch.no_grad():
        inputs["before"] = log_probs(model, inputs)
    found = ratios(model, inputs, mean_of(by_pairs), mean_of(by_pairs), ROWS)
    assert statistics.median(found) == pytest.approx(1, rel=0.6)
    assert all(1 / 3 < ratio < 3 for ratio in found)
