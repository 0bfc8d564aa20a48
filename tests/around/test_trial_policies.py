"""Are the loss divergences on trial what they are called: sums of how far each element's rounding moves the loss?"""

from __future__ import annotations

import pytest
import torch
from rounded import fake_quantize
from small import tiny_lm, tokens
from sums_of_layer import LayerSums

from eval.bakeoff.fork_cells import contender_of
from eval.bakeoff.trial_policies import TRIALS, Magnitudes, WeightErrors, WeightMagnitudes
from snip_hf.config import SnipConfig
from snip_hf.estimation.divergence import estimate_divergence
from snip_hf.estimation.pending import LAYER, read_all
from snip_hf.estimation.samples import LayerSample
from snip_hf.numerics.formats import FORMATS
from snip_hf.numerics.gemms import ROW_TILE, SQUARE_TILE
from snip_hf.policies.registry import cost_of

TILES = {"x": ROW_TILE, "w": SQUARE_TILE}
# Of a row: what the objective adds up, and its power.
PARTS = (("loss_divergence", 1), ("weight_divergence", 2))


@pytest.fixture(autouse=True)
def registered() -> None:
    for name in TRIALS:
        contender_of({"policy": name}, {})


def test_magnitudes_of_weights_are_the_figure_of_greedy_as_a_part_of_the_loss() -> None:
    model, inputs = tiny_lm(), tokens(rows=4, length=32)
    own, greedy, snip = (
        estimate_divergence(model, inputs, config=SnipConfig(policy=policy, probe_tokens=None))
        for policy in ("snip-weight-magnitudes", "greedy", "snip")
    )
    for row, of_greedy, of_snip in zip(own.rows, greedy.rows, snip.rows, strict=True):
        assert row.loss_divergence == pytest.approx(of_greedy.criterion / own.loss, rel=1e-5)
        assert row.weight_divergence == of_snip.weight_divergence


@pytest.mark.parametrize("fmt", SnipConfig().formats)
def test_they_are_what_rounding_the_weight_and_the_input_moves(fmt: str) -> None:
    draw = torch.Generator().manual_seed(0)
    x, g, w = (torch.randn(shape, generator=draw) for shape in ((130, 12), (130, 9), (9, 12)))
    sums = LayerSums(LayerSample(390, x, g), w, None, 1)  # 130 of 390 tokens are sampled
    error = {name: (fake_quantize(one, FORMATS[fmt], TILES[name]) - one).double() for name, one in (("x", x), ("w", w))}
    of_weight = 3 * float(((g.double().T @ x.double()) * error["w"]).abs().sum())
    of_input = 3 * float(((g.double() @ w.double()) * error["x"]).abs().sum())
    kinds = (WeightMagnitudes, Magnitudes, WeightErrors)
    found = [kind(sums).pending_loss_divergence(fmt, "token-fisher", None) for kind in kinds]
    rises = (g.double() * (x.double() @ error["w"].T)).sum(1)
    squares = 390 / 2 * 3 * float(rises.square().sum())  # the mean of 390 tokens' losses
    assert read_all(found) == pytest.approx([of_weight, of_weight + of_input, squares], rel=1e-5)


@pytest.mark.parametrize("policy", TRIALS)
def test_they_are_weighed_as_snip_weighs_its_own(policy: str) -> None:
    config = SnipConfig(policy=policy, probe_tokens=None)
    table = estimate_divergence(tiny_lm(), tokens(rows=4, length=32), config=config)
    prices = cost_of(config, table)
    rows = [row for row in table.rows if row.format == "fp4"]
    totals = [sum(getattr(row, name) ** power for row in rows if row.gemm == LAYER) for name, power in PARTS]
    for row in rows:
        expected = row.loss_divergence / totals[0] + 0.1 * row.weight_divergence**2 / totals[1]
        assert prices(row) == pytest.approx(expected)
