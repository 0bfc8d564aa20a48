"""Do the samples of several ranks become that of one process with all the data, each layer's on one rank?"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from configs import fp4_config
from same_samples import tensors_of
from small import Batch as Inputs
from small import tiny_llama, tiny_lm, tokens
from thread_ranks import on_ranks
from torch import Tensor, nn

from snip_hf.estimation import pooling
from snip_hf.estimation.batch import Batch
from snip_hf.estimation.pooling import pooled
from snip_hf.estimation.probe import ProbeSettings, run_probe
from snip_hf.estimation.samples import LayerSample, Rows
from snip_hf.layers.convert import convert_model
from snip_hf.layers.state import snip_linears
from snip_hf.parallel.ranks import Processes, Ranks

Samples = dict[str, LayerSample]
LAYERS = {f"layers.{index}": nn.Linear(3 + index, 7 - index) for index in range(5)}


def a_sample(name: str, rows: int, probes: int = 2, seed: int = 0) -> LayerSample:
    generator = torch.Generator().manual_seed(seed)
    layer = LAYERS[name]

    def draw(width: int) -> Tensor:
        return torch.randn(rows, width, generator=generator)

    x_dot = [draw(layer.in_features) for _ in range(probes)]
    grad_dot = [draw(layer.out_features) for _ in range(probes)]
    energies = (3.0 + seed, 1.0 + seed)
    return LayerSample(4 * rows + 1, draw(layer.in_features), draw(layer.out_features), x_dot, grad_dot, energies)


def pool(by_rank: list[Samples], weights: list[float]) -> tuple[Samples, list[list[str]]]:
    """Layer -> what its owner has, and rank -> the layers that it owns."""
    found = on_ranks(len(by_rank), lambda ranks: pooled(dict(by_rank[ranks.rank]), weights[ranks.rank], LAYERS, ranks))
    owned = [list(samples) for samples in found]
    together = {name: sample for samples in found for name, sample in samples.items()}
    assert len(together) == sum(map(len, owned))  # no layer twice
    return together, owned


def assert_is_together(found: LayerSample, parts: list[LayerSample], weights: list[float], probes: int = 2) -> None:
    """To the bit, in the order of the ranks; gradients are those of the mean over all ranks."""
    assert found.tokens == sum(part.tokens for part in parts)
    assert torch.equal(found.x, torch.cat([part.x for part in parts]))
    pairs = list(zip(parts, weights, strict=True))
    assert torch.equal(found.grad_output, torch.cat([weight * part.grad_output for part, weight in pairs]))
    assert len(found.x_dot) == len(found.grad_output_dot) == probes
    for index in range(probes):
        assert torch.equal(found.x_dot[index], torch.cat([part.x_dot[index] for part in parts]))
        wanted = torch.cat([weight * part.grad_output_dot[index] for part, weight in pairs])
        assert torch.equal(found.grad_output_dot[index], wanted)
    for kind in range(2):
        wanted = sum(weight**2 * part.energies[kind] for part, weight in pairs)
        assert found.energies[kind] == pytest.approx(wanted)


@pytest.mark.parametrize("weights", [[0.5, 0.5], [0.2, 0.5, 0.3]])
def test_largest_magnitudes_are_those_of_all_ranks_for_the_mean_over_all(weights: list[float]) -> None:
    samples = [a_sample("layers.0", 4, seed=rank) for rank in range(len(weights))]
    measured = [(torch.tensor(3.0 + rank), torch.tensor(9.0 - rank)) for rank in range(len(weights))]
    samples = [replace(sample, amaxes=amaxes) for sample, amaxes in zip(samples, measured, strict=True)]
    found, _ = pool([{"layers.0": sample} for sample in samples], weights)
    amaxes = found["layers.0"].amaxes
    assert amaxes is not None and float(amaxes[0]) == 2.0 + len(weights)
    of_g = [weight * (9.0 - rank) for rank, weight in enumerate(weights)]
    assert float(amaxes[1]) == pytest.approx(max(of_g))
    without, _ = pool([{"layers.0": a_sample("layers.0", 4)}] * len(weights), weights)
    assert without["layers.0"].amaxes is None


def test_a_rank_that_is_alone_keeps_its_samples_as_they_are() -> None:
    samples = {"layers.0": a_sample("layers.0", 3)}
    assert pooled(samples, 1.0, LAYERS, Ranks()) is samples


def test_a_sharded_layer_that_only_one_rank_ran_is_an_error_on_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank may have gathered another layer's weight meanwhile."""

    def error(ranks: Ranks) -> str:
        names = ("layers.0", "layers.1") if ranks.rank else ("layers.0", "layers.2")
        try:
            pooled({name: a_sample(name, 2) for name in names}, 0.5, LAYERS, ranks)
        except ValueError as caught:
            return str(caught)
        return ""

    assert on_ranks(2, error) == ["", ""]
    monkeypatch.setattr(pooling, "is_sharded", lambda weight: True)
    for message in on_ranks(2, error):
        assert message == (
            "Only some ranks ran layer 'layers.1', and each rank holds a part of its weight: those that gathered it "
            "may have got parts of another layer's. Name layers that only some tokens reach in skip_modules, use DDP "
            "or ZeRO-2, or use a policy that needs no probe, such as policy='layer-position'."
        )


@pytest.mark.parametrize("weights", [[0.5, 0.5], [0.25, 0.75], [0.2, 0.5, 0.3]])
@pytest.mark.parametrize("probes", [0, 1, 2])
def test_each_layer_s_owner_has_the_tokens_of_all_ranks(weights: list[float], probes: int) -> None:
    size = len(weights)
    by_rank = [{name: a_sample(name, 4 + 3 * rank, probes, seed=rank) for name in LAYERS} for rank in range(size)]
    found, owned = pool(by_rank, weights)
    assert owned == [list(LAYERS)[rank::size] for rank in range(size)]
    for name in LAYERS:
        assert_is_together(found[name], [samples[name] for samples in by_rank], weights, probes)


def test_more_ranks_than_layers_leave_some_without_one() -> None:
    by_rank = [{"layers.1": a_sample("layers.1", 2, seed=rank)} for rank in range(3)]
    found, owned = pool(by_rank, [0.5, 0.25, 0.25])
    assert owned == [["layers.1"], [], []]
    assert_is_together(found["layers.1"], [samples["layers.1"] for samples in by_rank], [0.5, 0.25, 0.25])


def test_a_rank_whose_tokens_did_not_pass_through_a_layer_adds_nothing_to_it() -> None:
    """Experts are an example. Layers that no rank saw have no owner."""
    names = list(LAYERS)
    by_rank = [{name: a_sample(name, 4, seed=rank) for name in names[:4] if name != names[rank]} for rank in range(2)]
    weights = [0.5, 0.5]
    found, owned = pool(by_rank, weights)
    assert owned == [names[0:4:2], names[1:4:2]]
    for index, name in enumerate(names[:4]):
        seen = [rank for rank in range(2) if rank != index]
        assert_is_together(found[name], [by_rank[rank][name] for rank in seen], [weights[rank] for rank in seen])


def test_a_rank_that_kept_no_token_of_a_layer_counts_with_those_that_it_saw() -> None:
    name = "layers.0"
    by_rank = [{name: a_sample(name, 4)}, {name: a_sample(name, 0, seed=1)}]
    found, _ = pool(by_rank, [0.5, 0.5])
    assert_is_together(found[name], [by_rank[0][name], by_rank[1][name]], [0.5, 0.5])
    assert found[name].x.shape == (4, 3)


def test_derivatives_that_one_rank_lacks_are_left_out_of_all() -> None:
    name = "layers.2"
    by_rank = [{name: a_sample(name, 4, probes=2)}, {name: a_sample(name, 5, probes=1, seed=1)}]
    found, _ = pool(by_rank, [0.5, 0.5])
    assert_is_together(found[name], [by_rank[0][name], by_rank[1][name]], [0.5, 0.5], probes=1)


def test_rows_of_several_matrices_are_those_of_all_ranks_by_matrix() -> None:
    """Each rank's tokens follow those of the ranks before it; a rank may have sampled tokens without a row."""
    name, weights = "layers.0", [0.25, 0.5, 0.25]
    all_rows = [
        Rows(torch.tensor([1, 1, 4]), torch.tensor([1, 0, 1, 2]), 3),
        Rows(torch.tensor([0, 0, 0]), torch.empty(0, dtype=torch.int64), 2),
        Rows(torch.tensor([0, 2, 3]), torch.tensor([0, 1, 1]), 2),
    ]
    parts = []
    for rank, rows in enumerate(all_rows):
        part = replace(a_sample(name, len(rows.token), seed=rank), rows=rows)
        parts.append(replace(part, amaxes=(torch.full((3,), 1.0 + rank), torch.tensor([8.0, 0.0, 4.0]))))
    found = pool([{name: part} for part in parts], weights)[0][name]
    assert found.rows is not None and found.rows.tokens == 7
    assert found.rows.ends.tolist() == [1, 3, 7] and found.rows.token.tolist() == [1, 5, 6, 0, 1, 2, 6]
    order = torch.tensor([0, 4, 5, 1, 2, 3, 6])
    assert torch.equal(found.x, torch.cat([part.x for part in parts])[order])
    grads = torch.cat([weight * part.grad_output for part, weight in zip(parts, weights, strict=True)])
    assert torch.equal(found.grad_output, grads[order])
    assert torch.equal(found.x_dot[1], torch.cat([part.x_dot[1] for part in parts])[order])
    assert found.amaxes is not None
    assert found.amaxes[0].tolist() == [3.0] * 3 and found.amaxes[1].tolist() == [4.0, 0.0, 2.0]


def of_rank(inputs: Inputs, rank: int, size: int) -> Inputs:
    rows = len(inputs["labels"]) // size
    return {name: value[rank * rows : (rank + 1) * rows] for name, value in inputs.items()}


@pytest.mark.parametrize("size", [4])
@pytest.mark.parametrize("probe_tokens", [None, 256, 384])
@pytest.mark.parametrize("build", [lambda: tiny_lm(blocks=1), lambda: tiny_llama(hidden=32, layers=1)])
def test_the_ranks_parts_together_are_probed_as_one_process_probes_the_whole(
    size: int, probe_tokens: int | None, build: Callable[[], nn.Module]
) -> None:
    model, inputs = build(), tokens(rows=4, length=256)  # runs of 128: 8
    convert_model(model, fp4_config())
    pullbacks = {name: torch.ones_like(layer.weight).mul for name, layer in snip_linears(model).items()}
    settings = ProbeSettings(probes=2, probe_tokens=probe_tokens, seed=1, step=5)
    whole = run_probe(model, Batch.of(inputs), pullbacks, settings)

    def work(ranks: Ranks) -> tuple[float, Samples]:
        processes = Processes(data=ranks, everyone=ranks)
        own = copy.deepcopy(model)
        part = Batch.of(of_rank(inputs, ranks.rank, size))
        every = ranks.gather(part.tokens)
        probe = run_probe(own, part, pullbacks, settings, processes, every)
        return probe.loss, pooled(probe.layers, 1 / size, snip_linears(own), ranks)

    results = on_ranks(size, work)
    assert sum(loss for loss, _ in results) / size == pytest.approx(whole.loss, rel=1e-5)
    found = {name: sample for _, samples in results for name, sample in samples.items()}
    assert found.keys() == whole.layers.keys()
    for name, wanted in whole.layers.items():
        sample = found[name]
        assert sample.tokens == wanted.tokens == 1024
        assert sample.scale == pytest.approx(wanted.scale, rel=1e-4)
        for got, expected in zip(tensors_of(sample), tensors_of(wanted), strict=True):
            # FP32 matrix products of other sizes, whose rounding a difference of 1e-3 multiplies.
            torch.testing.assert_close(got, expected, rtol=0, atol=2e-3 * float(expected.abs().max()))
