"""A NaN or an infinity at the probed micro-batch costs only one refresh."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from fault_runs import CONFIG, SHORT, WITHOUT_FIRST, assert_cost_only_the_first_refresh
from tiny_runs import Run, model_with_dropout, train
from torch import Tensor
from transformers import TrainerCallback

from snip_hf import SnipConfig
from snip_hf.layers.state import snip_linears

pytestmark = pytest.mark.usefixtures("no_children_of_other_tests")

LAYER = "model.layers.1.mlp.down_proj"


class _Poison(TrainerCallback):
    """Puts a number that is not finite into step 2, which then leaves the weights alone, as careful loops do."""

    def __init__(self, model: Any, where: str, value: float) -> None:
        self.model, self.where, self.value = model, where, value
        self.on = False
        loss_function = model.loss_function
        model.loss_function = lambda **kwargs: self.spoil(loss_function(**kwargs), "loss")
        model.model.layers[1].mlp.down_proj.register_forward_hook(self.hook)

    def spoil(self, tensor: Tensor, where: str) -> Tensor:
        return tensor * self.value if self.on and where == self.where else tensor

    def hook(self, layer: Any, args: Any, output: Tensor) -> Tensor:
        output = self.forward(output)
        return output  # by name: the hook acts in the probe

    def forward(self, output: Tensor) -> Tensor:
        if self.on and self.where == "probe alone" and snip_linears(self.model)[LAYER].snip_recorder is not None:
            return output * self.value
        if output.requires_grad:
            output.register_hook(lambda gradient: self.spoil(gradient, "gradient"))
        return self.spoil(output, "activation")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on = state.global_step + 1 == 2

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.on and self.where != "probe alone":
            self.model.zero_grad(set_to_none=True)
        self.on = False


def poisoned(folder: Path, config: SnipConfig, where: str, value: float) -> Run:
    model = model_with_dropout()
    return train(folder, config, model=model, callbacks=[_Poison(model, where, value)], **SHORT)


@pytest.mark.parametrize(("where", "value"), [("loss", math.nan), ("gradient", math.nan)])
def test_a_micro_batch_that_is_not_finite_costs_one_refresh(
    where: str, value: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = poisoned(tmp_path / "expected", WITHOUT_FIRST, where, value)
    assert "nan" in str(expected.losses[2])
    run = poisoned(tmp_path / "run", CONFIG, where, value)
    assert_cost_only_the_first_refresh(run, expected, "is not finite; expected finite numbers.", caplog.messages)


def test_a_number_that_is_not_finite_in_the_probes_own_passes_costs_one_refresh(
    without_first: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = poisoned(tmp_path, CONFIG, "probe alone", math.inf)
    assert_cost_only_the_first_refresh(run, without_first, "expected", caplog.messages)
