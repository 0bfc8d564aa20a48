"""One layer that this process works on, nothing of it sharded any more: its sums, and a policy's criterion of it.

A layer of one matrix has `LayerSums`, one of several `MatrixSums`. A criterion is asked of each matrix as of a layer of
its own, and added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.rounding import fake_quantize
from ..numerics.formats import FORMATS
from .criterion import LayerCriterion, Rows
from .extrapolation import BatchSizes, Squares
from .layer_sums import OPERANDS, LayerSums, finishing
from .matrix_sums import MatrixSums
from .optimizer_step import UpdateChange
from .pending import ROWS, Pending, read_all
from .replayed_sums import MOST_ELEMENTS, Replays
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


def read_figures(figures: Sequence[Figures]) -> Iterator[tuple[Any, ...]]:
    """Gives the fields of each with the results in place of what is pending; waits for the device once."""
    every: list[Pending[Any]] = [pending for one in figures for pending in one[2:]]
    results = iter(read_all(every))
    for name, fmt, *pending in figures:
        yield name, fmt, *(next(results) for _ in pending)


class Task(NamedTuple):
    """What is asked of every layer."""

    criterion: type[LayerCriterion]
    loss_estimator: str
    formats: Sequence[str]
    micro_batches: int
    batch: BatchSizes
    replays: Replays | None = None
    """None: the sums of each layer are launched one by one."""


class WholeLayer(NamedTuple):
    """A layer as matrices (O, I)."""

    name: str
    weights: tuple[Tensor, ...]
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
                sums.pending_loss_divergence(name, task.loss_estimator),
                sums.pending_errors(name),
                _added([one.pending_rows(name) for one in of_matrices], sums.x),
            )
            for name in task.formats
        ]

    def _of_matrix(
        self, sample: LayerSample, task: Task, keys: tuple[int, int], directions: Directions | None
    ) -> list[Figures]:
        if task.replays is not None and self._can_be_replayed(task):
            return self._replayed(task.replays, sample, task, keys)
        (weight,), trace = self.weights, None
        if directions is not None:
            trace = task.criterion.trace_of(self.name, sample, [z for (z,) in directions])
            sample = _without_derivatives(sample)
        push = self.pushforward[0] if isinstance(self.pushforward, tuple) else self.pushforward
        sums = LayerSums(sample, weight, push, task.micro_batches, task.batch, formats=task.formats)
        criterion = task.criterion(sums, trace)
        return [
            Figures(
                self.name,
                name,
                criterion.pending_weight_divergences(name, keys),
                criterion.pending_loss_divergence(name, task.loss_estimator),
                sums.pending_errors(name),
                criterion.pending_rows(name),
            )
            for name in task.formats
        ]

    def _can_be_replayed(self, task: Task) -> bool:
        """Returns True if all sums are functions of tensors, and small."""
        is_plain = task.criterion is LayerCriterion
        is_linear = self.pushforward is None or isinstance(self.pushforward, tuple)
        return is_plain and is_linear and self.weights[0].numel() <= MOST_ELEMENTS

    def _replayed(self, replays: Replays, sample: LayerSample, task: Task, keys: tuple[int, int]) -> list[Figures]:
        """As `_of_matrix`, from launches that layers of the same shapes share."""
        (weight,), pushes = self.weights, self.pushforward or ()
        assert isinstance(pushes, tuple)
        stochastic = [name for name in task.formats if FORMATS[name].gradient.stochastic]
        rounded = [one for name in stochastic for one in _randomly_rounded(sample, name, keys)]
        of_sample = [sample.x, sample.grad_output, *sample.x_dot, *sample.grad_output_dot, *(sample.amaxes or ())]
        inputs = [weight, *pushes, *of_sample, *rounded]
        probes = len(sample.x_dot)

        def work(given: Sequence[Tensor]) -> list[Tensor]:
            left = iter(given)
            take = partial(_taken, left)
            (own_weight,), push = take(1), take(len(pushes))
            x, grad_output = take(2)
            own = replace(sample, x=x, grad_output=grad_output, x_dot=take(probes), grad_output_dot=take(probes))
            if own.amaxes is not None:
                of_x, of_g = take(2)
                own = replace(own, amaxes=(of_x, of_g))
            batch, formats = task.batch, task.formats
            sums = LayerSums(own, own_weight, push[0] if push else None, task.micro_batches, batch, formats=formats)
            for name in stochastic:
                sums.take_rounded(name, keys, take(2))
            parts = (
                (sums.divergence_sums(name, keys), sums.loss_sum(name, task.loss_estimator), sums.error_norms(name))
                for name in formats
            )
            return [one for of_format in parts for one in of_format]

        key = (
            task.loss_estimator,
            sample.tokens,
            *((one.shape, one.stride(), one.dtype, one.device) for one in inputs),
        )
        with torch.cuda.device_of(weight):
            found = iter(replays.run((*key, *task.formats), inputs, work))
        finish, nothing = finishing(sample, task.micro_batches, task.batch), weight.new_zeros(0, dtype=torch.float32)
        return [
            Figures(
                self.name,
                name,
                finish.squares(name, next(found)),
                finish.loss_divergence(task.loss_estimator, next(found)),
                finish.errors(next(found)),
                Pending(nothing, _no_rows),
            )
            for name in task.formats
        ]


def _taken(left: Iterator[Tensor], count: int) -> list[Tensor]:
    return [next(left) for _ in range(count)]


def _no_rows(figures: list[float]) -> Rows:
    return dict.fromkeys(ROWS)


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


def _randomly_rounded(sample: LayerSample, name: str, keys: tuple[int, int]) -> list[Tensor]:
    """Returns G of a format that rounds it randomly, along O and along T, as `LayerSums` rounds it by these keys."""
    amax = sample.amaxes[1] if sample.is_part and sample.amaxes else None
    return [
        fake_quantize(sample.grad_output, FORMATS[name], OPERANDS["g"], contracts, key, 0, 1, amax)
        for contracts, key in zip((1, 0), keys, strict=True)
    ]
