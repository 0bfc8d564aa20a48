"""Are the criteria of other methods what their formulas say, written out in float64?"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from configs import fp4_config
from rounded import COLUMN_TILE, fake_quantize
from scipy.stats import entropy
from slow_cases import slow_but
from small import adamw_after, drawn, text, tiny_llama, tiny_lm, tokens
from sums_of_layer import LayerSums
from torch import Tensor, nn

from snip_hf.config import POLICIES
from snip_hf.estimation.batch import Batch
from snip_hf.estimation.criterion import LayerCriterion
from snip_hf.estimation.divergence import divergences_at, estimate_divergence
from snip_hf.estimation.extrapolation import BatchSizes
from snip_hf.estimation.layer_sums import read_all
from snip_hf.estimation.moved_weights import random_direction
from snip_hf.estimation.optimizer_step import OptimizerStep
from snip_hf.estimation.probe import ProbeSettings, run_probe
from snip_hf.estimation.samples import LayerSample
from snip_hf.estimation.table import LAYER, ROWS, DivergenceTable
from snip_hf.layers.convert import convert_model
from snip_hf.layers.state import snip_linears
from snip_hf.numerics.formats import FORMATS
from snip_hf.numerics.gemms import ROW_TILE, SQUARE_TILE
from snip_hf.policies.hessian_trace import HessianTrace
from snip_hf.policies.kl import BINS, KL, histogram, inner_edges, kl_divergence

# Those with noise give divergences in place of a figure of their own: tests/policies/test_snip_paper.py.
CRITERIA = [
    name
    for name, policy in POLICIES.items()
    if policy.criterion is not LayerCriterion and policy.criterion.noise is None
]


def a_sample(n: int = 130, tokens: int = 390, energies: tuple[float, float] = (0.0, 0.0)) -> LayerSample:
    return LayerSample(tokens, drawn(n, 12, seed=1), 0.01 * drawn(n, 9, seed=2), energies=energies)


def a_weight() -> Tensor:
    return drawn(9, 12, seed=3)


def rows_of(
    policy: str, fmt: str, sample: LayerSample, batch: BatchSizes | None = None, trace: Tensor | None = None
) -> Any:
    criterion = POLICIES[policy].criterion(LayerSums(sample, a_weight(), None, 1, batch), trace)
    return read_all([criterion.rows(fmt)])[0]


def rounded(x: Tensor, fmt: str, tile: tuple[int, int]) -> np.ndarray:
    return fake_quantize(x, FORMATS[fmt], tile).double().numpy()


def only_forward(value: float) -> dict[str, Any]:
    return {"forward": value, "grad_input": 0.0, "grad_weight": 0.0, LAYER: value}


# --------------------------------------------------------------------------------------------------------------- fisher


@pytest.mark.parametrize("fmt", fp4_config().formats[::-1])
@pytest.mark.parametrize(("energies", "scale"), [((0.0, 0.0), 3.0), ((7.0, 2.0), 3.5)])
def test_fisher_is_the_labels_times_the_sum_of_squared_gradients_times_squared_errors(
    fmt: str, energies: tuple[float, float], scale: float
) -> None:
    sample = a_sample(energies=energies)
    x, g, w = (one.double().numpy() for one in (sample.x, sample.grad_output, a_weight()))
    x_q, w_q = rounded(sample.x, fmt, ROW_TILE), rounded(a_weight(), fmt, SQUARE_TILE)
    total = 0.0
    for t in range(len(x)):
        for o in range(len(w)):
            error = sum(x_q[t, i] * w_q[o, i] - x[t, i] * w[o, i] for i in range(x.shape[1]))
            total += g[t, o] ** 2 * error**2
    # From the sample to all tokens as all sums of squares.
    total *= scale
    assert rows_of("fisher", fmt, sample) == pytest.approx(only_forward(390 * total), rel=1e-4)
    # Whatever the layer saw of the batch, and whatever the batch is a part of.
    sizes = BatchSizes(tokens=500, labelled=70, micro_batch_tokens=1000, micro_batch_labelled=280)
    assert rows_of("fisher", fmt, sample, sizes) == pytest.approx(only_forward(70 * total), rel=1e-4)


# --------------------------------------------------------------------------------------------------------------- greedy


@pytest.mark.parametrize("fmt", fp4_config().formats[::-1])
def test_greedy_is_the_sum_of_what_every_element_s_rounding_can_move_the_loss(fmt: str) -> None:
    sample = a_sample()
    x, g, w = (one.double().numpy() for one in (sample.x, sample.grad_output, a_weight()))
    w_q = rounded(a_weight(), fmt, SQUARE_TILE)
    total = 0.0
    for o in range(w.shape[0]):
        for i in range(w.shape[1]):
            gradient = 3 * sum(g[t, o] * x[t, i] for t in range(len(x)))  # 130 of 390 tokens are sampled
            total += abs(gradient * (w_q[o, i] - w[o, i]))
    assert rows_of("greedy", fmt, sample) == pytest.approx(only_forward(total), rel=1e-4)


def test_greedy_takes_the_gradient_of_the_probed_micro_batch() -> None:
    """Against autograd; all tokens are sampled."""
    model, inputs = tiny_lm(), tokens(rows=4, length=32)
    table = estimate_divergence(model, inputs, config=fp4_config(policy="greedy", probe_tokens=None))
    model(**inputs)["loss"].backward()
    for row in table.rows:
        if row.gemm == "forward":
            weight = model.get_submodule(row.layer).weight
            error = fake_quantize(weight.detach(), FORMATS[row.format], SQUARE_TILE) - weight.detach()
            assert row.criterion == pytest.approx(float((weight.grad * error).abs().sum()), rel=1e-3)


# ------------------------------------------------------------------------------------------------------------------- kl


def kl_of(values: Tensor, after: np.ndarray) -> float:
    """Computes the expected values by numpy and scipy."""
    before = values.double().numpy().ravel()
    inner = inner_edges(values).double().numpy()
    assert inner == pytest.approx(np.linspace(before.min(), before.max(), BINS + 1)[1:-1], rel=1e-5, abs=1e-6)
    edges = np.concatenate([[-1e30], inner, [1e30]])
    p, q = (np.histogram(one.ravel(), edges)[0] + 0.5 for one in (before, after))
    return float(entropy(p, q))


@pytest.mark.parametrize("fmt", fp4_config().formats[::-1])
def test_kl_is_that_of_scipy_on_numpy_s_histograms_of_the_operands(fmt: str) -> None:
    sample, w = a_sample(), a_weight()
    x, g = sample.x, sample.grad_output
    of_w = kl_of(w, rounded(w, fmt, SQUARE_TILE))
    expected = {
        "forward": kl_of(x, rounded(x, fmt, ROW_TILE)) + of_w,
        "grad_input": kl_of(g, rounded(g, fmt, ROW_TILE)) + of_w,
        "grad_weight": kl_of(g, rounded(g, fmt, COLUMN_TILE)) + kl_of(x, rounded(x, fmt, COLUMN_TILE)),
    }
    found = rows_of("kl", fmt, sample)
    assert found == pytest.approx({**expected, LAYER: sum(expected.values())}, rel=1e-4)
    assert all(value > 0 for value in found.values())


def test_kl_is_larger_in_fp4_than_in_fp8_and_0_where_rounding_changes_nothing() -> None:
    fp8, fp4 = (rows_of("kl", fmt, a_sample()) for fmt in fp4_config().formats[::-1])
    assert all(fp4[row] > fp8[row] for row in ROWS)
    x, g = torch.zeros(4, 12), torch.zeros(4, 9)
    samples = LayerSample(4, x, g), LayerSample(0, x[:0], g[:0])
    zeros, none = read_all([KL(LayerSums(one, torch.zeros(9, 12), None, 1)).rows("fp4") for one in samples])
    assert zeros == dict.fromkeys(ROWS, 0.0) and none[LAYER] == 0.0


def test_values_on_an_edge_or_beyond_the_range_are_counted_once() -> None:
    values = torch.linspace(-1.0, 1.0, BINS + 1)
    edges = inner_edges(values)
    counts = histogram(torch.cat([values, edges, torch.tensor([-9.0, 9.0])]), edges)
    assert counts.sum() == 2 * BINS + 2
    # Its own edge and the value there; the last bin also has the greatest value, and both ends what is beyond.
    assert counts[1:-1].float().mean() == pytest.approx(2.0, abs=0.05)
    assert int(counts[0]) >= 2 and int(counts[-1]) >= 3
    assert kl_divergence(counts, counts) == 0


# -------------------------------------------------------------------------------------------------------- hessian-trace


def hessian_traces(model: nn.Module, inputs: dict[str, Tensor], names: list[str]) -> dict[str, float]:
    """Differentiates twice in float64, one weight's gradient after the other."""
    model = copy.deepcopy(model).double()
    weights = [model.get_submodule(name).weight for name in names]
    gradients = torch.autograd.grad(model(**inputs)["loss"], weights, create_graph=True)
    found = {}
    for name, weight, gradient in zip(names, weights, gradients, strict=True):
        trace = 0.0
        for index, element in enumerate(gradient.flatten()):
            (second,) = torch.autograd.grad(element, weight, retain_graph=True)
            trace += float(second.flatten()[index])
        found[name] = trace
    return found


def estimated_traces(
    model: nn.Module, inputs: dict[str, Tensor], probes: int, kept: int | None = None, seeds: int = 1
) -> dict[str, list[float]]:
    """Layer -> seed -> the mean over its probes."""
    model = copy.deepcopy(model)
    convert_model(model, fp4_config())
    layers = snip_linears(model)
    found: dict[str, list[float]] = {name: [] for name in layers}
    for seed in range(seeds):
        same: dict[str, Callable[[Tensor], Tensor]] = {name: lambda z: z for name in layers}
        probe = run_probe(model, Batch.of(inputs), same, ProbeSettings(probes, kept, seed, 5))
        for name, sample in probe.layers.items():
            draws = [(seed, 5, index) for index in range(probes)]
            directions = [random_direction(name, layers[name].weight, draw) for draw in draws]
            found[name].append(float(HessianTrace.trace_of(name, sample, directions)))
    return found


@pytest.mark.slow
def test_the_mean_over_many_probes_is_the_trace_of_the_hessian() -> None:
    model, inputs = tiny_lm(), tokens(rows=8, length=16)
    names = [name for name, _ in model.named_modules() if name.endswith((".up", ".down"))]
    expected = hessian_traces(model, inputs, names)
    found = estimated_traces(model, inputs, probes=25, seeds=12)
    for name, trace in expected.items():
        error = np.std(found[name], ddof=1) / math.sqrt(len(found[name]))
        assert error < 0.2 * abs(trace), name  # or the comparison says nothing
        assert abs(np.mean(found[name]) - trace) < 4 * error, name


def test_a_trace_is_the_mean_of_products_and_stands_for_all_tokens_by_their_number() -> None:
    n, probes = 5, 3
    sample = LayerSample(
        4 * n,
        drawn(n, 12, seed=1),
        drawn(n, 9, seed=2),
        [drawn(n, 12, seed=10 + index) for index in range(probes)],
        [drawn(n, 9, seed=20 + index) for index in range(probes)],
        energies=(100.0, 1.0),
    )
    directions = [drawn(9, 12, seed=30 + index) for index in range(probes)]
    total = 0.0
    for z, x_dot, g_dot in zip(directions, sample.x_dot, sample.grad_output_dot, strict=True):
        for t in range(n):
            for o in range(9):
                for i in range(12):
                    moved = g_dot[t, o] * sample.x[t, i] + sample.grad_output[t, o] * x_dot[t, i]
                    total += float(z[o, i] * moved)
    assert float(HessianTrace.trace_of("up", sample, directions)) == pytest.approx(4 * total / probes, rel=1e-4)
    # Which probe a missing derivative was of is not known.
    with pytest.raises(ValueError, match="Layer 'up' has derivatives along only 2 of 3 directions"):
        HessianTrace.trace_of("up", replace(sample, x_dot=sample.x_dot[1:]), directions)


@pytest.mark.parametrize("fmt", fp4_config().formats[::-1])
def test_hessian_trace_is_the_mean_eigenvalue_times_the_weight_s_squared_error(fmt: str) -> None:
    w = a_weight().double().numpy()
    square = float(((rounded(a_weight(), fmt, SQUARE_TILE) - w) ** 2).sum())
    found = rows_of("hessian-trace", fmt, a_sample(), trace=torch.tensor([5.0]))
    assert found == pytest.approx(only_forward(5.0 / (9 * 12) * square), rel=1e-5)
    assert rows_of("hessian-trace", fmt, a_sample(), trace=torch.tensor([-5.0])) == only_forward(0.0)


def test_a_table_has_the_mean_over_its_probes_and_no_derivative_by_the_optimizer() -> None:
    model, inputs = tiny_lm(), tokens(rows=8, length=16)
    config = fp4_config(policy="hessian-trace", probes=4, seed=2, probe_tokens=None)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name != "layers.0.down.weight")  # a weight that is not trained has a Hessian too
    table = estimate_divergence(model, inputs, torch.optim.AdamW(model.parameters(), lr=1e-3), config)
    model.requires_grad_(True)
    draws = [estimated_traces_at(model, inputs, seed=2, index=index) for index in range(4)]
    for row in (row for row in table.rows if row.gemm == LAYER):
        weight = model.get_submodule(row.layer).weight.detach()
        square = float((fake_quantize(weight, FORMATS[row.format], SQUARE_TILE) - weight).square().sum())
        trace = max(0.0, float(np.mean([draw[row.layer] for draw in draws])))
        assert row.criterion == pytest.approx(trace / weight.numel() * square, rel=1e-2, abs=1e-6)
    by_gemm = {(row.layer, row.gemm, row.format): row.weight_divergence for row in table.rows}
    assert by_gemm["layers.1.up", "forward", "fp4"] == 0
    assert by_gemm["layers.1.up", "grad_weight", "fp4"] > 0


def estimated_traces_at(model: nn.Module, inputs: dict[str, Tensor], seed: int, index: int) -> dict[str, float]:
    """Layer -> <z, H z> of one probe of step 0, by autograd in float64: the gradient's derivative along all z."""
    plain = copy.deepcopy(model).double()
    names = [name for name, _ in plain.named_modules() if name.endswith((".up", ".down"))]
    directions = {name: random_direction(name, model.get_submodule(name).weight, (seed, 0, index)) for name in names}
    weights = [plain.get_submodule(name).weight for name in names]
    gradients = torch.autograd.grad(plain(**inputs)["loss"], weights, create_graph=True)
    along = sum(((g * directions[n].double()).sum() for n, g in zip(names, gradients, strict=True)), torch.tensor(0.0))
    found = torch.autograd.grad(along, weights)
    return {n: float((h * directions[n].double()).sum()) for n, h in zip(names, found, strict=True)}


# -------------------------------------------------------------------------------------------------------------- samples


def table_at(policy: str, inputs: dict[str, Tensor], kept: int | None = None, seed: int = 0) -> DivergenceTable:
    model = tiny_llama(hidden=32, layers=1)
    adamw_after(model, steps=4)
    convert_model(model, fp4_config())
    config = fp4_config(policy=policy, probe_tokens=kept, seed=seed)
    batch = Batch.of(inputs)
    part = batch.part(None if kept else batch.tokens // 2)
    return divergences_at(model, part, OptimizerStep({}, {}), config)


def test_four_policies_bring_their_own_criterion() -> None:
    assert set(CRITERIA) == {"fisher", "greedy", "kl", "hessian-trace"}


@pytest.mark.parametrize("policy", CRITERIA)
def test_half_of_a_micro_batch_stands_for_a_whole_whose_other_half_is_the_same(policy: str) -> None:
    half = text(2, 128)
    twice = {name: value.repeat_interleave(2, 0) for name, value in half.items()}
    part = table_at(policy, twice)
    model = tiny_llama(hidden=32, layers=1)
    adamw_after(model, steps=4)
    convert_model(model, fp4_config())
    config = fp4_config(policy=policy, probe_tokens=None)
    whole = divergences_at(model, Batch.of(twice), OptimizerStep({}, {}), config)
    largest = max(row.criterion or 0.0 for row in whole.rows)
    assert largest > 0
    for a, b in zip(part.rows, whole.rows, strict=True):
        # Counts of a histogram that are twice as large weigh more against what is added to them.
        assert a.criterion == pytest.approx(b.criterion, rel=0.1 if policy == "kl" else 1e-2, abs=1e-3 * largest)


@pytest.mark.parametrize("policy", slow_but(["fisher", "greedy", "kl"], "greedy"))
def test_a_sample_of_tokens_stands_for_all(policy: str) -> None:
    inputs = text(16, 128)
    every = table_at(policy, inputs, kept=2048)
    ratios = []
    for seed in range(3):
        for a, b in zip(table_at(policy, inputs, kept=512, seed=seed).rows, every.rows, strict=True):
            if a.gemm == "forward":
                assert a.criterion is not None and b.criterion is not None
                ratios.append(a.criterion / b.criterion)
    # A gradient of fewer tokens has more noise, whose size adds to that of its elements.
    assert 0.8 < np.median(ratios) < (1.6 if policy == "greedy" else 1.25)


def test_other_policies_have_no_criterion() -> None:
    for policy in ("snip", "min-abs-err"):
        table = estimate_divergence(tiny_lm(), tokens(), config=fp4_config(policy=policy, probe_tokens=None))
        assert {row.criterion for row in table.rows} == {None}
