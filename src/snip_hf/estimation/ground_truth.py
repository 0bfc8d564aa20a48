"""Directly measured divergences: the truth that `divergence` estimates. Slow.

Layers are quantized, and the model's gradients and the optimizer's next updates are compared with those in high
precision, on FP32 copies of the weights and without a trace in the model or the optimizer (see `probe`).

An update is `optimizers.response.Response.update`. For Lion (smoothed sign) and Muon (FP32 Newton-Schulz) this models
the real step; docs/optimizers.md states the difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..config import SnipConfig
from ..costs.flops import linear_flops
from ..layers.layer import SnipLayer
from ..layers.state import set_step
from ..numerics.formats import FORMATS, UNQUANTIZED
from ..numerics.gemms import GEMMS, Assignment
from ..optimizers.response import Response, responses, trained_by
from ..parallel.sharding import compute_device
from ..progress import progress
from .batch import Batch, Compute, objective_of
from .divergence import converted, gradients_of
from .nonsmooth import FixedRouting
from .optimizer_step import compared_parameters
from .table import LAYER, ROWS, Divergence, DivergenceTable

_UNQUANTIZED = dict.fromkeys(GEMMS, UNQUANTIZED.name)


def measure_divergence(
    model: nn.Module,
    batch: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None = None,
    config: SnipConfig | None = None,
    draws: int = 2,
    gemms: tuple[str, ...] = ROWS,
    fixed_routing: bool = False,
    compute_loss: Compute | None = None,
) -> DivergenceTable:
    """Measures the divergences of every layer, GEMM and format, quantizing one at a time, on one batch.

    The loss divergence is the measured relative rise of the loss, of either sign. "token-fisher" estimates it;
    the default, "saliency", does not.

    Args:
        model: as in `estimate_divergence`, and so are the next three.
        batch: keyword arguments of the model's forward.
        optimizer: None means plain SGD with learning rate 1.
        config: its `seed` decides the rounding.
        draws: draws of stochastic rounding per row (root mean square over the draws); other formats have one.
        gemms: the rows to measure, of "forward", "grad_input", "grad_weight", "layer".
        fixed_routing: whether quantized passes send tokens to the experts chosen in high precision, as the estimate
            does, instead of those that quantized scores choose, as training does.
        compute_loss: as in `estimate_divergence`; the rise is relative to the loss if the batch has labels.

    Raises:
        ValueError: the batch has no labels, or its loss is not finite.
        TypeError: an optimizer that cannot be differentiated.
    """
    config = config or SnipConfig(probe_tokens=None)
    rows: list[Divergence] = []
    captured = Batch.of(batch, objective_of(compute_loss))
    with _high_precision(model, config) as layers:
        measurement = _Measurement(model, captured, optimizer, config, layers, fixed_routing)
        flops = linear_flops(model)
        cells = [
            (name, fmt, gemm)
            for name in layers
            for fmt in config.quantized_formats
            for gemm in gemms
            if gemm in (*flops[name], LAYER)
        ]
        with progress("measured divergences", len(cells)) as tell:
            for name, fmt, gemm in cells:
                chosen = tuple(flops[name]) if gemm == LAYER else (gemm,)
                count = draws if FORMATS[fmt].is_random else 1
                rise, weight = measurement.divergences({name: dict.fromkeys(chosen, fmt)}, count)
                rows.append(Divergence(name, gemm, fmt, rise, weight, sum(flops[name][g] for g in chosen)))
                tell()
        return DivergenceTable(measurement.loss, tuple(rows))


def measure_assignment(
    model: nn.Module,
    batch: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None,
    assignments: Iterable[Assignment],
    config: SnipConfig | None = None,
    draws: int = 2,
) -> list[tuple[float, float]]:
    """Measures whole plans: (relative rise of the loss, joint weight divergence) of each assignment, on one batch.

    Args:
        model, batch, optimizer, config, draws: as in `measure_divergence`.
        assignments: layer -> GEMM -> format; other GEMMs stay in high precision.

    Raises:
        as `measure_divergence`.
    """
    config = config or SnipConfig(probe_tokens=None)
    captured = Batch.of(batch)
    with _high_precision(model, config) as layers:
        measurement = _Measurement(model, captured, optimizer, config, layers)
        return [measurement.divergences(assignment, draws) for assignment in assignments]


class _Measurement:
    """The updates in high precision, with which those of every quantized pass are compared."""

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        optimizer: Any,
        config: SnipConfig,
        layers: dict[str, SnipLayer],
        fixed_routing: bool = False,
    ) -> None:
        self._routing = FixedRouting() if fixed_routing else None
        self._model, self._batch, self._config, self._layers = model, batch, config, layers
        compared = compared_parameters(model, layers, trained_by(optimizer), config)
        of_gradients = config.objective == "gradients"
        self._responses: dict[str, Response] = responses(optimizer, compared.parameters, of_gradients)
        self._others = compared.others
        self.loss, base = self._gradients()
        self._base = {}
        # Linears that share a weight share its gradient, and count once.
        for name in {id(base[name]): name for name in self._responses if name in base}.values():
            response = self._responses[name]
            update, meaningful = response.update(base[name]), response.meaningful(base[name])
            size = compared.weights[name].detach().to(torch.float32) if compared.others is None else update
            norm = torch.ones(()) if of_gradients else size.square().sum().sqrt()
            if norm != 0:  # as in `divergences_at`
                self._base[name] = update, meaningful / norm
        if not math.isfinite(self.loss):
            raise ValueError(f"The loss of the batch is {self.loss}; expected a finite number.")

    def _gradients(self) -> tuple[float, dict[str, Tensor]]:
        with nullcontext() if self._routing is None else self._routing.one_pass(self._model):
            return gradients_of(self._model, self._batch, self._layers, self._others)

    def divergences(self, assignment: Assignment, draws: int) -> tuple[float, float]:
        """Returns the rise of the loss and the weight divergence (root mean square over the draws).

        The rise is relative to the loss if that is a mean over tokens with a label (`Batch.is_likelihood`).
        """
        squares, losses = [], []
        for name in {**self._layers, **assignment}:
            self._layers[name].set_formats({**_UNQUANTIZED, **assignment.get(name, {})})
        for draw in range(draws):
            set_step(self._layers, self._config.seed, draw, 0)
            loss, gradients = self._gradients()
            squares.append(self._distance(gradients))
            losses.append(loss)
        mean = sum(losses) / draws
        rise = mean / self.loss - 1 if self._batch.is_likelihood else mean - self.loss
        return rise, (sum(squares) / draws) ** 0.5

    def _distance(self, gradients: Mapping[str, Tensor]) -> float:
        """Returns the sum over the compared parameters of |h(gradient) - h(base)|^2 / |W|^2, or / |h(base)|^2."""
        total = 0.0
        for name, (update, meaningful_by_norm) in self._base.items():
            if name in gradients:  # an expert without tokens takes no part in a pass
                moved = (self._responses[name].update(gradients[name]) - update) * meaningful_by_norm
                total += float(moved.square().sum())
        return total


@contextmanager
def _high_precision(model: nn.Module, config: SnipConfig) -> Iterator[dict[str, SnipLayer]]:
    """Yields the swapped layers, all unquantized, without autocast; restores their formats afterwards."""
    device = compute_device(next(model.parameters())).type
    with converted(model, config) as layers, torch.autocast(device, enabled=False):
        in_force = {
            name: (layer.snip_is_plain, layer.formats, layer.snip_state.clone()) for name, layer in layers.items()
        }
        try:
            for layer in layers.values():
                layer.set_formats(_UNQUANTIZED)
            yield layers
        finally:
            for name, layer in layers.items():
                is_plain, formats, state = in_force[name]
                layer.set_formats(formats)
                layer.snip_state.copy_(state)
                layer.snip_is_plain = is_plain
