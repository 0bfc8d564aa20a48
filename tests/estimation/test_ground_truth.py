"""Is what is called the truth what really happens to a converted model, its loss and its optimizer's next step?"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from configs import fp4_config
from small import convert_in_formats, text, tiny_llama, tiny_lm, tokens, trained_tiny_lm
from torch import Tensor, nn

from snip_hf.estimation.divergence import estimate_divergence
from snip_hf.estimation.ground_truth import measure_assignment, measure_divergence
from snip_hf.estimation.table import ROWS
from snip_hf.layers.state import set_step, snip_linears
from snip_hf.numerics.gemms import GEMMS

EXACT = fp4_config(probe_tokens=None, probe_batch_tokens=None)

LAYERS = ["layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down"]
Assignment = dict[str, dict[str, str]]
# Layers that are not named stay in high precision.
MIXED: Assignment = {
    "layers.0.up": {"forward": "fp4", "grad_input": "fp8", "grad_weight": "fp4"},
    "layers.0.down": {"grad_weight": "fp4"},
    "layers.1.down": dict.fromkeys(GEMMS, "fp8"),
}
EVERYTHING: Assignment = {layer: dict.fromkeys(GEMMS, "fp4") for layer in LAYERS}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2),
}


def next_weights(model: nn.Module, optimizer: torch.optim.Optimizer, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """The layers' weights after the optimizer's real next step, taken by a copy in float64."""
    weights = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    copies = [nn.Parameter(weight.clone()) for weight in weights.values()]
    twin = type(optimizer)(copies, lr=1.0)  # type: ignore[call-arg]
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for name, parameter in zip(weights, copies, strict=True):
        parameter.grad = gradients[name].double()
    twin.step()
    found = dict(zip(weights, copies, strict=True))
    return {layer: found[f"{layer}.weight"].detach() for layer in LAYERS}


class RealModel:
    """A converted copy that runs real forward and backward passes, and copies of the optimizer that take real steps."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, Tensor], seed: int
    ) -> None:
        self.model, self.optimizer, self.inputs, self.seed = model, optimizer, inputs, seed
        self.worker = copy.deepcopy(model)
        convert_in_formats(self.worker, fp4_config(start_format="bf16"))
        self.loss, gradients = self.run({}, 0)
        self.base = next_weights(model, optimizer, gradients)

    def run(self, assignment: Assignment, draw: int) -> tuple[float, dict[str, Tensor]]:
        layers = snip_linears(self.worker)
        for name, layer in layers.items():
            layer.set_formats({**dict.fromkeys(GEMMS, "bf16"), **assignment.get(name, {})})
        set_step(layers, self.seed, draw, 0)
        self.worker.zero_grad()
        loss = self.worker(**self.inputs)["loss"]
        loss.backward()
        return loss.item(), {name: p.grad.clone() for name, p in self.worker.named_parameters()}

    def damage(self, assignment: Assignment, draws: int) -> tuple[float, float]:
        """Relative rise of the loss; root of the mean over draws of the sum over layers of |change|^2 / |W|^2."""
        squares, losses = [], []
        for draw in range(draws):
            loss, gradients = self.run(assignment, draw)
            after = next_weights(self.model, self.optimizer, gradients)
            distances = [
                (after[m] - self.base[m]).norm() / self.model.get_submodule(m).weight.detach().double().norm()
                for m in LAYERS
            ]
            squares.append(sum(float(distance) ** 2 for distance in distances))
            losses.append(loss)
        return sum(losses) / draws / self.loss - 1, math.sqrt(sum(squares) / draws)


def trained(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = tiny_lm()
    optimizer = OPTIMIZERS[kind](model.parameters())
    for step in range(4):
        model(**tokens(seed=step))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


# -------------------------------------------------------------------------------------------------------- single layers


@pytest.mark.parametrize(
    ("gemm", "kind"), [case for case in itertools.product(ROWS, OPTIMIZERS) if case[0] == "layer" or case[1] == "AdamW"]
)
def test_measured_is_what_the_next_steps_of_copies_really_differ_by(gemm: str, kind: str) -> None:
    model, optimizer = trained(kind)
    inputs, draws = tokens(seed=9), 2
    config = fp4_config(start_format="bf16", seed=5)
    table = measure_divergence(model, inputs, optimizer, config, draws=draws, gemms=(gemm,))
    real = RealModel(model, optimizer, inputs, config.seed)
    assert table.loss == pytest.approx(real.loss, rel=1e-6)
    assert [(row.layer, row.format) for row in table.rows] == [
        (layer, fmt) for layer in LAYERS for fmt in fp4_config().formats[::-1]
    ]
    for row in table.rows:
        on = GEMMS if gemm == "layer" else (gemm,)
        rise, weight = real.damage({row.layer: dict.fromkeys(on, row.format)}, draws if row.format == "fp4" else 1)
        assert row.weight_divergence == pytest.approx(weight, rel=1e-3, abs=1e-9)
        assert row.loss_divergence == pytest.approx(rise, abs=1e-6)
        assert row.weight_bias is None
        if gemm not in ("forward", "layer"):
            assert row.loss_divergence == 0


# ---------------------------------------------------------------------------------------------------------- whole plans


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_plan_s_damage_is_what_the_next_steps_of_copies_really_differ_by(kind: str) -> None:
    model, optimizer = trained(kind)
    inputs, draws, config = tokens(seed=9), 3, fp4_config(seed=5)
    plans = [MIXED, EVERYTHING]
    found = measure_assignment(model, inputs, optimizer, plans, config, draws)
    real = RealModel(model, optimizer, inputs, config.seed)
    assert len(found) == 2
    for (rise, weight), plan in zip(found, plans, strict=True):
        wanted_rise, wanted_weight = real.damage(plan, draws)
        assert wanted_weight > 0 != wanted_rise
        assert weight == pytest.approx(wanted_weight, rel=1e-3)
        assert rise == pytest.approx(wanted_rise, abs=1e-6)


def test_a_plan_that_quantizes_nothing_does_no_damage() -> None:
    model, optimizer = trained_tiny_lm()
    plans: list[Assignment] = [{}, EVERYTHING, {layer: dict.fromkeys(GEMMS, "bf16") for layer in LAYERS}, {}]
    found = measure_assignment(model, tokens(), optimizer, plans)
    # Also not after a plan that quantizes everything.
    assert found[0] == found[2] == found[3] == (0.0, 0.0)
    assert found[1][1] > 0


def test_draws_are_those_of_the_seed_and_are_averaged_as_squares() -> None:
    model, optimizer = trained_tiny_lm()

    def weight(seed: int, draws: int) -> float:
        [(_, found)] = measure_assignment(model, tokens(), optimizer, [EVERYTHING], fp4_config(seed=seed), draws)
        return found

    assert weight(1, 1) == weight(1, 1)
    assert len({weight(seed, 1) for seed in range(4)}) == 4
    real = RealModel(model, optimizer, tokens(), 1)
    single = [real.damage(EVERYTHING, draws)[1] for draws in (1, 2)]
    assert weight(1, 2) == pytest.approx(single[1], rel=1e-3)
    assert single[0] != pytest.approx(single[1], rel=1e-3)


def test_linears_that_share_a_weight_share_its_update_which_counts_once() -> None:
    model, inputs = tiny_lm(), tokens()
    model.layers[1].up.weight = model.layers[0].up.weight
    found = estimate_divergence(model, inputs, config=EXACT)
    truth = measure_divergence(model, inputs, config=EXACT, gemms=("grad_weight",))
    estimates = {(row.layer, row.format): row.weight_divergence for row in found.rows if row.gemm == "grad_weight"}
    measured = {(row.layer, row.format): row.weight_divergence for row in truth.rows}
    assert {at: value for at, value in measured.items() if at[1] == "fp8"} == {
        at: pytest.approx(value, rel=1e-2) for at, value in estimates.items() if at[1] == "fp8"
    }


def test_the_loss_of_a_llama_in_bfloat16_is_measured_in_fp32() -> None:
    model = tiny_llama(hidden=32, layers=1).bfloat16()
    wide = copy.deepcopy(model).float()
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and "layers" in name]
    plan = {name: dict.fromkeys(GEMMS, "fp8") for name in names}
    batch = text(2, 16)
    assert measure_assignment(model, batch, None, [plan]) == measure_assignment(wide, batch, None, [plan])
    found = measure_divergence(wide, batch, gemms=("forward",), config=EXACT).rows[0]
    [(rise, _)] = measure_assignment(wide, batch, None, [{found.layer: {"forward": found.format}}])
    assert rise == pytest.approx(found.loss_divergence, abs=1e-7)


def test_dropout_masks_are_the_same_with_and_without_formats() -> None:
    model = tiny_lm(dropout=0.5)
    assert measure_assignment(model, tokens(), None, [{}]) == [(0.0, 0.0)]


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_refused_and_the_model_left_unconverted(broken: float) -> None:
    model = tiny_lm()
    with torch.no_grad():
        model.embed.weight[:] = broken
    with pytest.raises(ValueError, match=r"^The loss of the batch is nan; expected a finite number\.$"):
        measure_divergence(model, tokens())
    with pytest.raises(ValueError, match=r"^The loss of the batch is nan; expected a finite number\.$"):
        measure_assignment(model, tokens(), None, [EVERYTHING])
    assert snip_linears(model) == {}


def test_an_assignment_to_a_layer_that_is_not_there_is_refused_and_nothing_stays() -> None:
    model = tiny_lm()
    convert_in_formats(model, fp4_config(start_format="fp8"))
    plan = {"layers.0.up": {"forward": "fp4"}, "layers.7.up": {"forward": "fp4"}}
    with pytest.raises(KeyError, match=r"layers\.7\.up"):
        measure_assignment(model, tokens(), None, [plan])
    assert {fmt for layer in snip_linears(model).values() for fmt in layer.formats.values()} == {"fp8"}
