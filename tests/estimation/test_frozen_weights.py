"""Frozen swapped weights: which parameters' updates count instead, and how true the estimate is."""

from __future__ import annotations

import copy
import logging
import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from configs import fp4_config
from small import (
    adamw_after,
    convert_in_formats,
    text,
    tiny_llama,
    tiny_lm,
    tokens,
    trained_tiny_lm,
    weight_divergences,
)
from torch import Tensor, nn

from snip_hf.config import SnipConfig
from snip_hf.estimation.batch import Batch
from snip_hf.estimation.divergence import estimate_divergence
from snip_hf.estimation.ground_truth import measure_divergence
from snip_hf.estimation.optimizer_step import compared_parameters
from snip_hf.estimation.probe import run_probe
from snip_hf.estimation.table import DivergenceTable
from snip_hf.layers.state import set_step, snip_linears
from snip_hf.numerics.gemms import GEMMS
from snip_hf.optimizers.response import trained_by

EXACT = fp4_config(probe_tokens=None, probe_batch_tokens=None)

LAYERS = ["layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down"]
NORMS = [f"layers.{block}.norm.{kind}" for block in range(2) for kind in ("weight", "bias")]
BESIDE = ["embed.weight", "layers.0.norm.weight", "layers.0.norm.bias", "layers.0.up.bias"]
BESIDE += ["layers.1.norm.weight", "layers.1.norm.bias", "layers.1.up.bias", "head.weight"]


def frozen_lm(*trained: str) -> nn.Module:
    """A tiny model of which only these layers' weights are trained, and all that is no weight of a layer."""
    model = tiny_lm()
    for name in LAYERS:
        model.get_submodule(name).weight.requires_grad_(name in trained)
    return model


def converted_copy(model: nn.Module) -> nn.Module:
    converted = copy.deepcopy(model)
    convert_in_formats(converted, fp4_config(start_format="bf16"))
    return converted


# ---------------------------------------------------------------------------------------------------------- what counts


@pytest.mark.parametrize("trained", [(), ("layers.1.up",), ("layers.0.up", "layers.1.down")])
def test_if_a_swapped_weight_is_frozen_all_trained_parameters_count(trained: tuple[str, ...]) -> None:
    model = converted_copy(frozen_lm(*trained))
    found = compared_parameters(model, snip_linears(model), trained_by(None), SnipConfig())
    assert list(found.weights) == LAYERS
    assert list(found.others or {}) == BESIDE
    assert list(found.parameters) == LAYERS + BESIDE


def test_if_every_swapped_weight_is_trained_only_these_count() -> None:
    model = converted_copy(tiny_lm())
    everything = trained_by(torch.optim.SGD(model.parameters(), lr=1.0))
    found = compared_parameters(model, snip_linears(model), everything, SnipConfig())
    assert found.others is None and list(found.parameters) == LAYERS
    of_gradients = compared_parameters(model, snip_linears(model), everything, SnipConfig(objective="gradients"))
    assert list(of_gradients.parameters) == LAYERS + BESIDE


def test_a_parameter_that_the_optimizer_does_not_hold_is_not_trained() -> None:
    model = converted_copy(tiny_lm())
    norms = [parameter for name, parameter in model.named_parameters() if name in NORMS]
    found = compared_parameters(model, snip_linears(model), trained_by(torch.optim.SGD(norms, lr=1.0)), SnipConfig())
    assert list(found.others or {}) == NORMS


# ------------------------------------------------------------------------------------------------------------ the probe


@pytest.mark.parametrize("scale", [1.0, 1e-4])  # the first step is far too large for such an embedding
@pytest.mark.parametrize("layer", LAYERS)
def test_the_probe_of_what_is_trained_is_the_adjoint_of_an_error_in_a_frozen_layer(layer: str, scale: float) -> None:
    """<d, change of all gradients> = <Gdot, E> for an error E of the layer's output."""
    model, inputs = frozen_lm(), tokens()
    with torch.no_grad():
        model.embed.weight.mul_(scale)
    converted = converted_copy(model)
    others = compared_parameters(converted, snip_linears(converted), trained_by(None), SnipConfig()).others
    assert others is not None
    directions: dict[str, Tensor] = {}

    def pullback(name: str) -> Any:
        def kept(z: Tensor) -> Tensor:
            directions[name] = z.double() / others[name].numel()  # another scale for every parameter
            return z / others[name].numel()

        return kept

    probe = run_probe(converted, Batch.of(inputs), {name: pullback(name) for name in others}, others=others)
    exact = copy.deepcopy(model).double()
    assert probe.loss == pytest.approx(exact(**inputs)["loss"].item(), rel=1e-5)
    linear = exact.get_submodule(layer)
    error = torch.randn(18, linear.out_features, generator=torch.Generator().manual_seed(8), dtype=torch.float64)

    def gradients(size: float) -> dict[str, Tensor]:
        hook = linear.register_forward_hook(lambda _, args, output: output + size * error.view_as(output))
        exact.zero_grad()
        exact(**inputs)["loss"].backward()
        hook.remove()
        return {name: dict(exact.named_parameters())[name].grad.clone() for name in others}

    up, down = gradients(1e-6), gradients(-1e-6)
    response = sum(float((directions[name] * (up[name] - down[name])).sum()) / 2e-6 for name in others)
    found = probe.layers[layer].grad_output_dot[0]
    assert response == pytest.approx(float((found * error).sum()), abs=2e-3 * float(found.norm() * error.norm()))


@pytest.mark.parametrize("policy", ["min-abs-err", "kl"])
def test_the_errors_of_a_layer_are_those_of_the_gemms_that_it_runs(policy: str) -> None:
    config = fp4_config(policy=policy, probe_tokens=None, probe_batch_tokens=None)
    rows = estimate_divergence(frozen_lm("layers.1.up"), tokens(), config=config).rows
    for whole in (row for row in rows if row.gemm == "layer"):
        gemms = [row for row in rows if (row.layer, row.format) == (whole.layer, whole.format) and row is not whole]
        assert len(gemms) == (3 if whole.layer == "layers.1.up" else 2)
        for figure in ("absolute_error", "relative_error", "criterion" if policy == "kl" else "flops"):
            expected = sum(getattr(row, figure) for row in gemms)
            assert getattr(whole, figure) == pytest.approx(expected, rel=1e-6), (whole, figure)


# ------------------------------------------------------------------------------------------------------------ the truth


def test_measured_is_the_change_of_the_next_updates_relative_to_them() -> None:
    model, inputs = frozen_lm("layers.1.up"), tokens()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    for _ in range(2):
        model(**inputs)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    table = weight_divergences(measure_divergence(model, inputs, optimizer, draws=1, gemms=("layer",), config=EXACT))
    converted = converted_copy(model)
    layers = snip_linears(converted)
    names = [*BESIDE, "layers.1.up.weight"]

    def updates() -> dict[str, Tensor]:
        converted.zero_grad()
        converted(**inputs)["loss"].backward()
        parameters = dict(converted.named_parameters())
        buffers = {name: optimizer.state[dict(model.named_parameters())[name]]["momentum_buffer"] for name in names}
        return {name: 0.1 * (0.9 * buffers[name] + parameters[name].grad) for name in names}

    before = updates()
    for layer in LAYERS:
        for fmt in ("fp8", "fp4"):
            layers[layer].set_formats(dict.fromkeys(GEMMS, fmt))
            set_step(layers, fp4_config().seed, 0, 0)
            after = updates()
            layers[layer].set_formats(dict.fromkeys(GEMMS, "bf16"))
            distance = sum(float(((after[n] - before[n]).norm() / before[n].norm()) ** 2) for n in names)
            assert table[layer, "layer", fmt] == pytest.approx(math.sqrt(distance), rel=1e-3)


def test_under_the_objective_gradients_measured_is_the_change_of_all_gradients_whatever_the_optimizer() -> None:
    model, inputs, config = tiny_lm(), tokens(), replace(EXACT, objective="gradients")
    optimizer = torch.optim.AdamW(model.parameters())
    table = weight_divergences(measure_divergence(model, inputs, optimizer, draws=1, gemms=("layer",), config=config))
    converted = converted_copy(model)
    layers = snip_linears(converted)

    def gradients() -> Tensor:
        converted.zero_grad()
        converted(**inputs)["loss"].backward()
        return torch.cat([parameter.grad.flatten() for parameter in converted.parameters()])

    before = gradients()
    for layer in LAYERS:
        for fmt in ("fp8", "fp4"):
            layers[layer].set_formats(dict.fromkeys(GEMMS, fmt))
            set_step(layers, config.seed, 0, 0)
            distance = float((gradients() - before).norm())
            layers[layer].set_formats(dict.fromkeys(GEMMS, "bf16"))
            assert table[layer, "layer", fmt] == pytest.approx(distance, rel=1e-3)


def test_under_the_objective_gradients_estimates_do_not_depend_on_the_optimizer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, trained = trained_tiny_lm()
    config = replace(EXACT, objective="gradients")
    with caplog.at_level(logging.INFO, "snip_hf"):
        table = weight_divergences(estimate_divergence(model, tokens(), trained, config))
        assert "SGD" not in caplog.text
    assert table == weight_divergences(estimate_divergence(model, tokens(), None, config))


@pytest.mark.parametrize("find", [estimate_divergence, measure_divergence])
def test_under_the_objective_gradients_a_weight_that_the_optimizer_does_not_hold_counts_as_a_frozen_one(
    find: Callable[..., DivergenceTable],
) -> None:
    config, tables = replace(EXACT, objective="gradients"), []
    for requires_grad in (True, False):
        model = tiny_lm()
        left = model.layers[1].up.weight.requires_grad_(requires_grad)
        optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight is not left])
        tables.append(weight_divergences(find(model, tokens(), optimizer, config)))
    not_held, frozen = tables
    assert frozen == pytest.approx({key: not_held[key] for key in frozen})


def test_under_the_objective_gradients_a_probe_needs_no_more_passes() -> None:
    model, passes = tiny_llama(), list[int]()
    model.register_forward_hook(lambda *_: passes.append(1))
    estimate_divergence(model, text(4, 96), config=replace(EXACT, objective="gradients"))
    assert len(passes) == 3


@pytest.mark.slow
def test_under_the_objective_gradients_it_is_right_to_a_ninth_for_the_typical_layer() -> None:
    """Two directions. The median over seeds of the median over layers, of 3 models and 2 batches each."""
    errors: dict[str, dict[int, list[float]]] = {"fp8": {}, "fp4": {}}
    config = replace(EXACT, objective="gradients", probes=2)
    for seed in range(3):
        model = tiny_llama(seed=seed)
        optimizer = adamw_after(model, steps=40)
        for index in (90, 91):
            batch = text(4, 96, index)
            truth = weight_divergences(measure_divergence(model, batch, optimizer, config, draws=2, gemms=("layer",)))
            assert len(truth) == 14 * 2
            for draw in range(3):
                found = weight_divergences(estimate_divergence(model, batch, optimizer, replace(config, seed=draw)))
                for key, value in truth.items():
                    errors[key[2]].setdefault(draw, []).append(abs(found[key] / value - 1))
    medians = {fmt: statistics.median(map(statistics.median, seeds.values())) for fmt, seeds in errors.items()}
    assert all(median <= 1 / 9 for median in medians.values()), medians


def test_the_learning_rate_makes_no_difference() -> None:
    model, inputs, found = frozen_lm(), tokens(), []
    for rate in (1e-6, 1.0):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate)
        found.append(weight_divergences(estimate_divergence(model, inputs, optimizer, config=EXACT)))
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert all(value > 0 for value in found[0].values())


def lora_after(steps: int, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    """A Llama trained for some steps, and then as many with adapters on all its linears."""
    peft = pytest.importorskip("peft")
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = tiny_llama(seed=seed)
        for stage in range(2):
            if stage == 1:
                model = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=16, target_modules=names))
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
            for step in range(steps):
                model(**text(4, 96, stage * steps + step)).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    return model, optimizer


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning")
def test_under_lora_it_is_right_to_a_ninth_for_the_typical_layer() -> None:
    """Four directions: the adapters are so few that one says little of them. The median over seeds of the median over
    layers, of 3 models and 2 batches each."""
    errors: dict[str, dict[int, list[float]]] = {"fp8": {}, "fp4": {}}
    for seed in range(3):
        model, optimizer = lora_after(40, seed)
        for index in (90, 91):
            batch = text(4, 96, index)
            truth = weight_divergences(
                measure_divergence(model, batch, optimizer, draws=2, gemms=("layer",), config=EXACT)
            )
            assert len(truth) == 14 * 2
            for draw in range(3):
                config = fp4_config(probes=4, probe_tokens=None, probe_batch_tokens=None, seed=draw)
                found = weight_divergences(estimate_divergence(model, batch, optimizer, config))
                for key, value in truth.items():
                    errors[key[2]].setdefault(draw, []).append(abs(found[key] / value - 1))
    medians = {fmt: statistics.median(map(statistics.median, seeds.values())) for fmt, seeds in errors.items()}
    assert all(median <= 1 / 9 for median in medians.values()), medians
