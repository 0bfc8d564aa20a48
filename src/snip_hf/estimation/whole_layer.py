"""One layer that this process works on, nothing of it sharded any more: its sums, and a policy's criterion of it.

A layer of one matrix has `LayerSums`, one of several `MatrixSums`. A criterion is asked of each matrix as of a layer of
its own, and added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .criterion import LayerCriterion, Rows
from .extrapolation import BatchSizes, Squares
from .layer_sums import ROWS, LayerSums, Pending
from .matrix_sums import MatrixSums
from .optimizer_step import UpdateChange
from .samples import LayerSample

Directions = Sequence[tuple[Tensor, ...]]
"""Probe -> z of each matrix."""


class Figures(NamedTuple):
    """What one layer and format still have on the device."""

    layer: str
    format: str
    squares: Pending[dict[str, Squares]]
    loss: Pending[float]
    errors: Pending[dict[str, tuple[float, float]]]
    criterion: Pending[Rows]


class Task(NamedTuple):
    """What is asked of every layer."""

    criterion: type[LayerCriterion]
    loss_estimator: str
    formats: Sequence[str]
    micro_batches: int
    batch: BatchSizes


class WholeLayer(NamedTuple):
    """A layer as matrices (O, I)."""

    name: str
    weights: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...] | None
    """Before clipping, where the loss's form needs them."""
    pushforward: UpdateChange | tuple[Tensor, ...] | None

    def figures(
        self, sample: LayerSample, task: Task, keys: tuple[int, int], directions: Directions | None
    ) -> list[Figures]:
        """Sets the sums of each format under way.

        Args:
            sample: of the layer.
            task: what is asked.
            keys: of the random rounding of G.
            directions: along which the criterion wants the sample's derivatives; None: they belong to the update.
        """
        if sample.rows is None:
            return self._of_matrix(sample, task, keys, directions)
        without = sample if directions is None else _without_derivatives(sample)
        sums = MatrixSums(without, self.weights, self.pushforward, task.micro_batches, task.batch, formats=task.formats)
        of_matrices: list[LayerCriterion] = []
        if task.criterion is not LayerCriterion:
            for index, own, own_sums in sums.of_matrices(sample):
                z = None if directions is None else [direction[index] for direction in directions]
                trace = None if z is None else task.criterion.trace_of(self.name, own, z)
                of_matrices.append(task.criterion(own_sums, trace))
        return [
            Figures(
                self.name,
                name,
                sums.pending_weight_divergences(name, keys),
                sums.pending_loss_divergence(name, task.loss_estimator, self.gradients),
                sums.pending_errors(name),
                _added([one.pending_rows(name) for one in of_matrices], sums.x),
            )
            for name in task.formats
        ]

    def _of_matrix(
        self, sample: LayerSample, task: Task, keys: tuple[int, int], directions: Directions | None
    ) -> list[Figures]:
        (weight,), trace = self.weights, None
        if directions is not None:
            trace = task.criterion.trace_of(self.name, sample, [z for (z,) in directions])
            sample = _without_derivatives(sample)
        push = self.pushforward[0] if isinstance(self.pushforward, tuple) else self.pushforward
        sums = LayerSums(sample, weight, push, task.micro_batches, task.batch, formats=task.formats)
        criterion = task.criterion(sums, trace)
        gradient = None if self.gradients is None else self.gradients[0]
        return [
            Figures(
                self.name,
                name,
                criterion.pending_weight_divergences(name, keys),
                criterion.pending_loss_divergence(name, task.loss_estimator, gradient),
                sums.pending_errors(name),
                criterion.pending_rows(name),
            )
            for name in task.formats
        ]


def _without_derivatives(sample: LayerSample) -> LayerSample:
    return replace(sample, x_dot=[], grad_output_dot=[])


def _added(of_matrices: Sequence[Pending[Rows]], like: Tensor) -> Pending[Rows]:
    """Returns the sum of the rows of all matrices; None in all rows of none."""
    sums = torch.cat([like.new_zeros(0), *(pending.sums for pending in of_matrices)])
    parts: list[tuple[int, Callable[[list[float]], Rows]]] = [(len(one.sums), one.finish) for one in of_matrices]
    return Pending(sums, partial(_sum_of, parts))


def _sum_of(parts: Sequence[tuple[int, Callable[[list[float]], Rows]]], figures: list[float]) -> Rows:
    if not parts:
        return dict.fromkeys(ROWS)
    left = iter(figures)
    found = [finish([next(left) for _ in range(count)]) for count, finish in parts]
    values = {row: [rows[row] for rows in found] for row in ROWS}
    return {row: None if None in own else sum(value or 0.0 for value in own) for row, own in values.items()}
