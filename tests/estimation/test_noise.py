"""Is the noise of a pass what its draw says, and do layers answer to it as they must?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from configs import fp4_config
from small import tiny_lm, tokens
from torch import Tensor, nn

from snip_hf.estimation.batch import Batch
from snip_hf.estimation.noise import PLACES, Noise
from snip_hf.estimation.probe import Probe, ProbeSettings, run_probe
from snip_hf.layers.convert import convert_model

OF_INPUTS = Noise("input", (0, 5, 0), 0.01)
OF_GRADIENTS = replace(OF_INPUTS, place="grad_output")


def a_tensor(rows: int = 200, columns: int = 50) -> Tensor:
    return 3 + torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))


def added(noise: Noise, name: str = "layers.0.up", x: Tensor | None = None) -> Tensor:
    """Returns the noise that is added to an input or to an output's gradient."""
    x = a_tensor() if x is None else x
    if noise.place == "input":
        return noise.on_input(name, x) - x
    y = torch.zeros_like(x, requires_grad=True)
    noise.on_output(name, y).backward(x)
    assert y.grad is not None
    return y.grad - x


@pytest.mark.parametrize("noise", [OF_INPUTS, OF_GRADIENTS], ids=PLACES)
def test_it_is_normal_and_has_its_size_relative_to_the_tensor(noise: Noise) -> None:
    x, found = a_tensor(), added(noise)
    numbers = found / (0.01 * x.square().mean().sqrt())
    assert numbers.std().item() == pytest.approx(1.0, abs=0.03) and numbers.mean().item() == pytest.approx(0, abs=0.03)
    assert (numbers.abs() > 1).double().mean().item() == pytest.approx(math.erfc(2**-0.5), abs=0.02)


def test_it_leaves_alone_what_it_is_not_for() -> None:
    x = a_tensor()
    assert OF_GRADIENTS.on_input("up", x) is x and OF_INPUTS.on_output("up", x) is x
    assert torch.equal(OF_GRADIENTS.on_output("up", x), x)
    assert OF_INPUTS.on_input("up", x[:0]).shape == (0, 50)
    assert torch.equal(OF_INPUTS.on_input("up", torch.zeros(3, 4)), torch.zeros(3, 4))


@pytest.mark.parametrize(
    "change",
    [{"draw": (1, 5, 0)}, {"draw": (0, 6, 0)}, {"draw": (0, 5, 1)}, {"rank": 1}, {"place": "grad_output"}],
    ids=["seed", "step", "index", "rank", "place"],
)
def test_its_numbers_are_a_function_of_draw_rank_place_and_layer(change: dict[str, Any]) -> None:
    first, other = added(OF_INPUTS), added(replace(OF_INPUTS, **change))
    assert torch.equal(first, added(OF_INPUTS))
    for found in (other, added(OF_INPUTS, "layers.1.up")):
        correlation = torch.corrcoef(torch.stack([first.flatten(), found.flatten()]))[0, 1]
        assert abs(float(correlation)) < 0.05


# --------------------------------------------------------------------------------------------------------------- probes


class Straight(nn.Module):
    """One linear whose output's gradient does not depend on anything: loss = mean(Y * C)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 12)
        self.layers = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(12, 9, bias=False)})])
        self.head = nn.Linear(9, 17)
        self.register_buffer("c", torch.randn(32, 9, generator=torch.Generator().manual_seed(3)))

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = self.layers[0]["up"](self.embed(input_ids)).flatten(0, 1)
        return {"loss": 2 + (y * self.c[: len(y)]).sum(1).mean()}


def probed(model: nn.Module, noise: float, **settings: Any) -> Probe:
    inputs = tokens(rows=2, length=16)
    return run_probe(model, Batch.of(inputs), {}, ProbeSettings(noise=noise, **settings))


@pytest.mark.parametrize("place", [0, 1], ids=PLACES)
def test_a_linear_answers_with_the_expected_size(place: int) -> None:
    """E |G^T N|^2 = |G|^2 |X|^2 / T for noise on X of unit relative size, and the same for noise on G."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Straight()
    convert_model(model, fp4_config())
    sample = probed(model, 0.01, probes=60).layers["layers.0.up"]
    x, g = sample.x.double(), sample.grad_output.double()
    found = []
    for x_dot, g_dot in list(zip(sample.x_dot, sample.grad_output_dot, strict=True))[place::2]:
        changes = (g.T @ x_dot.double(), g_dot.double().T @ x)
        # The other operand is that of the pass without noise.
        assert changes[1 - place].abs().max() < 1e-3 * changes[place].abs().max()
        found.append(float(changes[place].square().sum()))
    expected = float(x.square().sum() * g.square().sum()) / 32
    # Each of 60 squares has about 100 degrees of freedom, fewer where G or X have few directions.
    assert sum(found) / 60 == pytest.approx(expected, rel=0.12)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_two_passes_per_draw_differ_from_the_one_without_noise(reentrant: bool | None) -> None:
    """The derivatives show it at any size; recomputed blocks repeat the numbers of their first run."""
    samples = []
    for noise in (1e-2, 1e-3):
        model = tiny_lm(dropout=0.2, reentrant=reentrant)
        convert_model(model, fp4_config())
        torch.manual_seed(4)  # of the dropout, which is the same in every pass
        samples.append(probed(model, noise, probes=2, seed=3).layers["layers.0.up"])
    one, other = samples
    assert len(one.x_dot) == len(one.grad_output_dot) == 4
    for large, small in zip(one.grad_output_dot, other.grad_output_dot, strict=True):
        assert float((large - small).norm()) < 0.05 * float(small.norm())
    # Noise in the backward pass changes no input.
    assert [bool(x_dot.any()) for x_dot in one.x_dot] == [True, False, True, False]
    model = tiny_lm(dropout=0.2)
    convert_model(model, fp4_config())
    torch.manual_seed(4)
    plain = probed(model, 1e-2, probes=2, seed=3).layers["layers.0.up"]
    assert torch.allclose(one.grad_output_dot[0], plain.grad_output_dot[0], rtol=1e-4, atol=1e-7)


def test_the_loss_is_that_of_the_pass_without_noise() -> None:
    model, inputs = tiny_lm(), tokens(rows=2, length=16)
    expected = model(**inputs)["loss"].item()
    convert_model(model, fp4_config())
    assert probed(model, 0.5, probes=3).loss == pytest.approx(expected, rel=1e-6)


class Dropping(Straight):
    """`Straight` with fewer tokens in each pass than in the one before, as behind a router."""

    def __init__(self, dropped: Iterator[int]) -> None:
        super().__init__()
        # In a tuple: what a probe finds in attributes it puts back.
        self.dropped = (dropped,)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return super().forward(input_ids[:, next(self.dropped[0]) :], labels)


def test_other_tokens_in_a_pass_with_noise_are_refused() -> None:
    """This holds for two draws too, whose pairs of differences would be complete without one pass of each."""
    model = Dropping(itertools.count())
    convert_model(model, fp4_config())
    with pytest.raises(ValueError, match=r"Layer 'layers\.0\.up' saw different tokens in a pass with noise"):
        probed(model, 0.01, probes=2)
