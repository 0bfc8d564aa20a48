"""Does a layer's update answer to a gradient's change as the optimizer's does?"""

from __future__ import annotations

import pytest
import torch
from configs import fp4_config
from small import drawn
from torch import nn

from snip_hf.estimation.optimizer_step import OptimizerStep, RelativeUpdates, UpdateChange, of_matrices
from snip_hf.layers.convert import convert_model
from snip_hf.layers.state import snip_linears
from snip_hf.optimizers.response import responses


@pytest.mark.parametrize("clip_factor", [1.0, 0.25])
def test_the_change_in_full_is_the_difference_of_two_updates_after_clipping(clip_factor: float) -> None:
    model = nn.Sequential(nn.Linear(6, 4))
    convert_model(model, fp4_config())
    layers = snip_linears(model)
    weight = layers["0"].weight
    optimizer = torch.optim.Muon([weight], lr=0.1)
    gradient, change = drawn(4, 6, seed=1), drawn(4, 6, seed=2)
    answers = responses(optimizer, {"0": weight})
    updates = RelativeUpdates.of(OptimizerStep({"0": gradient}, answers), layers, fp4_config())
    push = updates.pushforward("0", clip_factor)
    assert isinstance(push, UpdateChange)
    moved = answers["0"].update(gradient + clip_factor * change) - answers["0"].update(gradient)
    expected = moved / clip_factor / weight.detach().norm()
    assert torch.allclose(push.in_full(change), expected, rtol=1e-5, atol=1e-6)
    of_layer = of_matrices(push, layers["0"])
    assert isinstance(of_layer, UpdateChange)
    assert torch.equal(of_layer.in_full(change), push.in_full(change))
    # To first order they are the same.
    assert torch.allclose(
        1e3 * push.in_full(1e-3 * change), push(change), rtol=0.02, atol=0.02 * float(push(change).norm())
    )


def test_elementwise_updates_stay_factors() -> None:
    model = nn.Sequential(nn.Linear(6, 4))
    convert_model(model, fp4_config())
    layers = snip_linears(model)
    weight = layers["0"].weight
    answers = responses(torch.optim.AdamW([weight]), {"0": weight})
    updates = RelativeUpdates.of(OptimizerStep({"0": drawn(4, 6, seed=1)}, answers), layers, fp4_config())
    found = updates.pushforward("0", 0.25)
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, updates.pushforward("0"))
