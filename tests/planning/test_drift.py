"""Is the ranking of a check that of the policy, and does a check tell whether it has moved?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from small import text, tiny_llama
from torch import nn

from snip_hf import SnipConfig, convert_model
from snip_hf.costs.flops import linear_flops
from snip_hf.estimation import probe as probe_module
from snip_hf.estimation.batch import Batch
from snip_hf.estimation.divergence import divergences_at, gradients_of, weights_of
from snip_hf.estimation.optimizer_step import OptimizerStep
from snip_hf.estimation.table import DivergenceTable
from snip_hf.layers.state import snip_linears
from snip_hf.optimizers.response import responses
from snip_hf.planning.drift import rank_correlation, ranking
from snip_hf.policies.setting import Setting


def named(values: Any) -> dict[str, float]:
    return {f"layer {index}": float(value) for index, value in enumerate(values)}


@pytest.mark.parametrize("levels", [2, 5, 1000])
def test_the_rank_correlation_is_that_of_scipy_with_and_without_ties(levels: int) -> None:
    numbers = np.random.default_rng(levels)
    for count in (2, 3, 14, 200):
        one = numbers.integers(0, levels, count)
        one[:2] = 0, 1  # not all equal
        other = numbers.permutation(one) * 1e-9
        assert rank_correlation(named(one), named(other)) == pytest.approx(spearmanr(one, other).statistic, abs=1e-12)


def test_the_order_of_the_layers_does_not_matter() -> None:
    one = named([1, 2, 3, 4])
    assert rank_correlation(one, dict(reversed(list(one.items())))) == 1.0
    assert rank_correlation(one, named([4, 3, 2, 1])) == pytest.approx(-1.0)


def test_equal_costs_are_a_ranking_that_correlates_to_1_with_itself_and_to_0_with_others() -> None:
    assert rank_correlation(named([0, 0, 0]), named([7, 7, 7])) == 1.0
    assert rank_correlation(named([0, 0, 0]), named([1, 2, 3])) == 0.0
    assert rank_correlation(named([1]), named([2])) == 1.0


def test_rankings_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^The rankings are of 3 and 2 layers; expected the same layers in both\.$"):
        rank_correlation(named([1, 2, 3]), named([1, 2]))
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"^The cost of a layer is not finite; expected finite activations"):
            rank_correlation(named([1, 2]), named([1, value]))


@pytest.fixture(scope="module")
def situation() -> dict[str, Any]:
    """Arguments of an estimate: a Llama whose block 0 has a frozen layer, after some steps of AdamW."""
    model = tiny_llama(hidden=32)
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for index in range(5):
        model(**text(2, 128, index))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    convert_model(model, SnipConfig())
    layers = snip_linears(model)
    batch = Batch.of(text(2, 128, 9))
    _, gradients = gradients_of(model, batch, layers)
    del gradients["model.layers.0.mlp.up_proj"]
    return {
        "model": model,
        "batch": batch,
        "optimizer_step": OptimizerStep(gradients, responses(optimizer, weights_of(layers)), 0.5, micro_batches=3),
        "config": SnipConfig(probe_tokens=128),
        "step": 7,
    }


@pytest.fixture(scope="module")
def full(situation: dict[str, Any]) -> DivergenceTable:
    return divergences_at(**situation)


def setting(model: nn.Module, **options: Any) -> Setting:
    flops = linear_flops(model)
    return Setting(SnipConfig(**options), flops, (tuple(flops),))


def test_a_check_finds_in_one_pass_the_figures_that_a_refresh_needs_no_derivatives_for(
    situation: dict[str, Any], full: DivergenceTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = []
    run_pass = probe_module.run_pass
    monkeypatch.setattr(probe_module, "run_pass", lambda *args: (passes.append(args), run_pass(*args))[1])
    quick = divergences_at(**situation, probes=0)
    assert len(passes) == 1
    rows = {(row.layer, row.gemm): row for row in full.rows if row.format == "fp4"}
    assert {row.layer for row in quick.rows} == set(snip_linears(situation["model"]))
    assert {row.weight_divergence for row in quick.rows if row.gemm in ("forward", "grad_input")} == {0.0}
    found = [row for row in quick.rows if (row.gemm, row.format) == ("layer", "fp4")]
    assert sum(row.weight_divergence > 0 for row in found) >= 10
    assert [row.weight_divergence for row in found if row.layer == "model.layers.0.mlp.up_proj"] == [0.0]
    # The refresh's X and G are means of its two passes, at W + eps * d and W - eps * d: the same up to eps^2, which
    # moves some elements over the border of a rounding.
    assert quick.loss == pytest.approx(full.loss, rel=1e-3)
    for row in found:
        layer, grad_weight = rows[row.layer, "layer"], rows.get((row.layer, "grad_weight"))
        assert row.loss_divergence == pytest.approx(layer.loss_divergence, rel=0.02)
        expected = 0.0 if grad_weight is None else grad_weight.weight_divergence
        assert row.weight_divergence == pytest.approx(expected, rel=0.02)
        assert row.absolute_error == pytest.approx(layer.absolute_error, rel=0.02)
        assert row.relative_error == pytest.approx(layer.relative_error, rel=0.02)
        assert row.flops == layer.flops


@pytest.mark.parametrize("policy", ["snip", "min-abs-err", "min-rel-err"])
def test_a_check_right_after_a_refresh_ranks_the_layers_as_the_refresh_did(
    policy: str, situation: dict[str, Any], full: DivergenceTable
) -> None:
    asked = setting(situation["model"], policy=policy)
    assert rank_correlation(ranking(asked, full), ranking(asked, divergences_at(**situation, probes=0))) > 0.98


def test_the_ranking_is_the_policys_cost_of_what_a_check_sees(situation: dict[str, Any], full: DivergenceTable) -> None:
    rows = {(row.layer, row.gemm): row for row in full.rows if row.format == "fp4"}
    layers = list(snip_linears(situation["model"]))
    losses = {layer: rows[layer, "layer"].loss_divergence for layer in layers}
    found = {layer: rows.get((layer, "grad_weight")) for layer in layers}
    weights = {layer: 0.0 if row is None else row.weight_divergence for layer, row in found.items()}
    expected = {
        layer: losses[layer] / sum(losses.values()) + 2 * weights[layer] / sum(weights.values()) for layer in layers
    }
    asked: dict[str, Any] = {"objective": "paper", "weight_divergence_factor": 2.0}
    for options in ({}, {"granularity": "gemm"}, {"switching_cost": 9.0}, {"ties": (("q_proj", "k_proj"),)}):
        assert ranking(setting(situation["model"], **asked, **options), full) == pytest.approx(expected)
    for policy, error in (("min-abs-err", "absolute_error"), ("min-rel-err", "relative_error")):
        assert ranking(setting(situation["model"], policy=policy, granularity="gemm"), full) == {
            layer: getattr(rows[layer, "layer"], error) for layer in layers
        }


def test_a_layer_that_took_no_part_costs_nothing(situation: dict[str, Any], full: DivergenceTable) -> None:
    gone = "model.layers.1.mlp.down_proj"
    left = replace(full, rows=tuple(row for row in full.rows if row.layer != gone))
    ranked = ranking(setting(situation["model"]), left)
    assert list(ranked) == list(snip_linears(situation["model"]))
    assert [layer for layer, cost in ranked.items() if cost == 0] == [gone]


def test_a_loss_that_is_not_finite_is_refused(situation: dict[str, Any]) -> None:
    model = situation["model"]
    norm = model.model.norm.weight
    kept = norm.detach().clone()
    with torch.no_grad():
        norm.fill_(float("nan"))
    try:
        with pytest.raises(
            ValueError, match=r"^The loss of the probed micro-batch is nan; expected a finite number\.$"
        ):
            divergences_at(**situation, probes=0)
    finally:
        with torch.no_grad():
            norm.copy_(kept)
