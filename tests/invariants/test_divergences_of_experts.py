"""Experts' estimated divergences are those of the equivalent dense layers, and those that happen."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from configs import fp4_config
from expert_models import RoutedLM, routed_lm, tiny_gpt_oss, tiny_qwen3_moe
from small import adamw_after, text, tokens
from thread_ranks import on_ranks
from torch import nn
from transformers import PreTrainedModel

from snip_hf.config import SnipConfig
from snip_hf.estimation.batch import Batch
from snip_hf.estimation.divergence import converted, divergences_at, estimate_divergence, gradients_of
from snip_hf.estimation.ground_truth import measure_divergence
from snip_hf.estimation.optimizer_step import OptimizerStep
from snip_hf.estimation.table import LAYER, Divergence, DivergenceTable
from snip_hf.optimizers.response import responses
from snip_hf.parallel.ranks import Processes, Ranks

Rows = dict[tuple[str, str, str], Divergence]
PROJECTIONS = ("up", "down")


def config_of(**options: Any) -> SnipConfig:
    # The estimate's gradients, as those of the truth, are in high precision.
    return fp4_config(probe_tokens=None, probe_batch_tokens=None, start_format="bf16", **options)


def rows_of(table: DivergenceTable) -> Rows:
    """Divergences by the names that the layers have in a dense model."""
    return {(row.layer.replace("experts.", "").replace("_proj", ""), row.gemm, row.format): row for row in table.rows}


def rows_with_trained_mixers(model: RoutedLM, **options: Any) -> Rows:
    """Experts and dense layers have other parameters, so that only updates of other layers can be the same."""
    optimizer = torch.optim.SGD([layer.mix.weight for layer in model.layers], lr=0.1)
    return rows_of(estimate_divergence(model, tokens(8, 64), optimizer, config_of(**options)))


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (4, 1), (4, 2), (4, 4)])
def test_equal_experts_have_the_figures_of_the_dense_layer_that_they_are_together(experts: int, top_k: int) -> None:
    """To 2%; all but grad_weight, whose changes belong to each expert's own update. The rows of a token in several
    experts are rounded stochastically with different numbers."""
    dense, found = (
        rows_with_trained_mixers(model, loss_estimator="token-fisher")
        for model in (routed_lm(0), routed_lm(experts, top_k))
    )
    compared = 0
    for (name, gemm, fmt), row in found.items():
        expected = dense[name, gemm, fmt]
        if name.endswith(PROJECTIONS) and gemm != "grad_weight":
            tolerance = 0.02 if fmt == "fp8" or gemm == "forward" or top_k == 1 else 0.05
            assert row.weight_divergence == pytest.approx(expected.weight_divergence, rel=tolerance), row
            assert row.weight_bias == pytest.approx(expected.weight_bias, rel=tolerance), row
            assert row.loss_divergence == pytest.approx(expected.loss_divergence, rel=1e-3), row
            compared += 1
    assert compared == 2 * 2 * 3 * 2


@pytest.mark.parametrize("experts", [0, 4])
def test_the_saliency_is_greedy_s_figure_of_all_experts_as_a_part_of_the_loss(experts: int) -> None:
    model = routed_lm(experts, 2)
    own, greedy = (
        estimate_divergence(model, tokens(8, 64), None, config_of(**options))
        for options in ({"loss_estimator": "saliency"}, {"policy": "greedy"})
    )
    for row, other in zip(own.rows, greedy.rows, strict=True):
        assert row.loss_divergence == pytest.approx(other.criterion / own.loss, rel=1e-4), row


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (2, 1), (4, 1), (4, 2), (4, 4)])
def test_the_saliency_of_equal_experts_is_at_least_that_of_the_dense_layer(experts: int, top_k: int) -> None:
    """More where each sees some of the tokens, since magnitudes of different experts do not cancel. Where all see all
    of them, or there is one, it is the dense layer's."""
    is_split = top_k < experts
    dense, found = (
        rows_with_trained_mixers(model, loss_estimator="saliency")
        for model in (routed_lm(0), routed_lm(experts, top_k))
    )
    names = [at for at in found if at[0].endswith(PROJECTIONS) and at[1] in ("forward", LAYER)]
    assert len(names) == 2 * 2 * 2 * 2
    for at in names:
        together, expected = found[at].loss_divergence, dense[at].loss_divergence
        assert together >= expected * (1 - 1e-5), at
        assert together > 1.01 * expected if is_split else together == pytest.approx(expected, rel=1e-5), at


SHAPES: dict[str, Callable[[int], PreTrainedModel]] = {"Qwen3-MoE": tiny_qwen3_moe, "gpt-oss": tiny_gpt_oss}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_weight_divergences_of_trained_experts_are_those_that_happen_at_fixed_choices(shape: str) -> None:
    """The typical layer to an eighth, the median over five random directions; over 3 models and 2 batches.

    On one processor it was a tenth in all, on another 0.103 in gpt-oss's attention: training goes other ways.
    """
    errors: dict[tuple[str, str, int], list[float]] = {}
    for seed in range(3):
        model = SHAPES[shape](seed)
        optimizer = adamw_after(model, steps=60)
        for index in (60, 61):
            batch = text(4, 96, index)
            measured = measure_divergence(
                model, batch, optimizer, config_of(), draws=2, gemms=(LAYER,), fixed_routing=True
            )
            truth = rows_of(measured)
            for draw in range(5):
                config = config_of(seed=draw)
                estimate = rows_of(estimate_divergence(model, batch, optimizer, config))
                for (name, _, fmt), row in truth.items():
                    part = name.rpartition(".")[2] if ".mlp." in name else "attention"
                    ratio = estimate[name, LAYER, fmt].weight_divergence / row.weight_divergence
                    errors.setdefault((part, fmt, draw), []).append(abs(ratio - 1))
    assert {part for part, _, _ in errors} == {"gate_up", "down", "attention"}
    for part, fmt in {(part, fmt) for part, fmt, _ in errors}:
        medians = [statistics.median(errors[part, fmt, draw]) for draw in range(5)]
        assert statistics.median(medians) <= 0.125, (part, fmt, medians)


def with_idle_experts() -> tuple[RoutedLM, RoutedLM]:
    """A model of two experts, and one of four, of which the last two get no token."""
    model, wider = routed_lm(2), routed_lm(4)
    for layer, other in zip(model.layers, wider.layers, strict=True):
        with torch.no_grad():
            layer.scores.copy_(other.scores[:, :2])
            other.norm.bias[0] = layer.norm.bias[0] = 100.0
            # Scores of the two more are below those of the others, whatever the token is.
            layer.scores[0], other.scores[0] = 0.0, torch.tensor([0.0, 0.0, -1000.0, -1000.0])
    return model, wider


def test_experts_without_tokens_change_nothing() -> None:
    model, wider = with_idle_experts()
    found, expected = rows_with_trained_mixers(wider), rows_with_trained_mixers(model)
    for at, row in found.items():
        assert row.loss_divergence == pytest.approx(expected[at].loss_divergence, rel=1e-4)
        assert row.weight_divergence == pytest.approx(expected[at].weight_divergence, rel=1e-3)


def test_experts_that_adam_has_all_but_forgotten_do_not_fill_the_direction() -> None:
    """Its derivative there is as large as their second moments are small."""
    _, model = with_idle_experts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(**tokens(8, 64))["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()
    found = []
    for moment in (1.0, 1e-12):
        for layer in model.layers:
            for weight in (layer.experts.up_proj, layer.experts.down_proj):
                optimizer.state[weight]["exp_avg_sq"][2:] = moment
        found.append(estimate_divergence(model, tokens(8, 64), optimizer, config_of()).rows)
    for one, other in zip(*found, strict=True):
        assert one.weight_divergence == pytest.approx(other.weight_divergence, rel=1e-2), one


def table_on(ranks: Ranks, model: nn.Module, **options: Any) -> DivergenceTable:
    """The table of the whole batch, of which each rank probes its part."""
    config = fp4_config(probe_batch_tokens=None, **options)
    own, inputs = copy.deepcopy(model), tokens(4, 256)
    count = 4 // ranks.size
    part = {name: value[ranks.rank * count : (ranks.rank + 1) * count] for name, value in inputs.items()}
    with converted(own, config) as layers:
        answers = responses(
            torch.optim.SGD(own.parameters(), lr=1.0), {name: layer.weight for name, layer in layers.items()}
        )
        _, gradients = gradients_of(own, Batch.of(inputs), layers)
        processes = Processes(data=ranks, everyone=ranks)
        return divergences_at(own, Batch.of(part), OptimizerStep(gradients, answers), config, processes=processes)


@pytest.mark.parametrize("options", [{"probe_tokens": None}, {"probe_tokens": 512}], ids=str)
def test_two_ranks_find_what_one_process_finds(options: dict[str, Any]) -> None:
    model = routed_lm(4, 2, blocks=1)
    expected = table_on(Ranks(), model, **options)
    found = on_ranks(2, lambda ranks: table_on(ranks, model, **options))
    assert found[0] == found[1]
    for row, other in zip(found[0].rows, expected.rows, strict=True):
        assert (row.layer, row.gemm, row.format) == (other.layer, other.gemm, other.format)
        assert row.loss_divergence == pytest.approx(other.loss_divergence, rel=1e-3), row
        assert row.weight_divergence == pytest.approx(other.weight_divergence, rel=5e-3), row


@pytest.mark.parametrize("policy", ["fisher", "greedy", "kl"])
def test_one_expert_has_the_criterion_of_a_dense_layer_and_several_have_their_sum(policy: str) -> None:
    dense, one, four = (
        rows_with_trained_mixers(routed_lm(count, max(1, count // 2)), policy=policy) for count in (0, 1, 4)
    )
    for at, row in one.items():
        several = four[at].criterion
        assert row.criterion == pytest.approx(dense[at].criterion, rel=1e-3), row
        assert several is not None and row.criterion is not None
        if policy == "greedy":  # no less than the figure of the sum of their gradients
            assert several >= 0.999 * row.criterion


def test_the_hessian_trace_of_experts_is_the_mean_over_directions_of_all_matrices() -> None:
    def trace_of(experts: int) -> float:
        figures = []
        for seed in range(12):
            rows = rows_with_trained_mixers(routed_lm(experts, blocks=1), policy="hessian-trace", seed=seed)
            figures.append(rows["layers.0.down", LAYER, "fp8"].criterion or 0.0)
        return statistics.mean(figures)

    # Each of two equal experts has half of the tokens and so, by its own parameters, its part of the trace.
    assert trace_of(2) == pytest.approx(trace_of(0), rel=0.25)
