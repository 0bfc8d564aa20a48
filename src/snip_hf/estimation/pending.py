"""Sums of a layer that are still on the device, and what they mean once they are read.

Legend: X, G and W, a layer's input, output gradient and weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..numerics.formats import FORMATS
from ..numerics.gemms import GEMMS
from .extrapolation import BatchSizes, Sizes, Squares

LAYER = "layer"
ROWS = (*GEMMS, LAYER)
# Operands of the GEMMs beside the weight, and the dimension that is contracted.
ACTIVATIONS = (("x", 1), ("x", 0), ("g", 1), ("g", 0))

Result = TypeVar("Result")


@dataclass(frozen=True)
class Pending(Generic[Result]):
    """A result whose sums are still on the device: reading them one by one would wait for it every time."""

    sums: Tensor
    """(any,)"""
    finish: Callable[[list[float]], Result]


def read_all(pending: Sequence[Pending[Result]]) -> list[Result]:
    """Returns the results of all, read from the device at once."""
    if not pending:
        return []
    device = pending[0].sums.device
    figures = iter(torch.cat([one.sums.to(device) for one in pending]).tolist())
    return [one.finish([next(figures) for _ in range(len(one.sums))]) for one in pending]


class Finishing(NamedTuple):
    """What turns the sums of a layer of one matrix into results: all that is not on the device."""

    sizes: Sizes
    batch: BatchSizes
    probes: int

    def squares(self, name: str, sums: Tensor) -> Pending[dict[str, Squares]]:
        """Of `LayerSums.divergence_sums`."""
        is_random = FORMATS[name].gradient.stochastic
        return Pending(sums, partial(squares_of, self.sizes, self.probes, is_random))

    def loss_divergence(self, form: str, sums: Tensor) -> Pending[float]:
        """Of `LayerSums.loss_sum`."""
        return Pending(sums, partial(_times, self.sizes.token_ratio if form == "saliency" else self.fisher_factor))

    @property
    def fisher_factor(self) -> float:
        # N^2 for the gradients of the tokens' own losses, 1 / N for the mean over their rises.
        return self.batch.labelled / 2 * self.sizes.scale

    def errors(self, sums: Tensor) -> Pending[dict[str, tuple[float, float]]]:
        """Of `LayerSums.error_norms`."""
        # From the sample to all tokens of the batch, and from there to the micro-batch: X has more rows by its tokens,
        # G also smaller ones, as a mean over more labels.
        ratio, batch = self.sizes.token_ratio, self.batch
        rows = max(1, batch.micro_batch_tokens) / max(1, batch.tokens)
        factors = {"x": (ratio * rows) ** 0.5, "g": (ratio / batch.parts) ** 0.5}
        return Pending(sums, partial(errors_of, factors))


def _times(factor: float, figures: list[float]) -> float:
    # In FP32, as the sum is.
    return float(torch.tensor(figures[0], dtype=torch.float32) * factor)


def squares_of(sizes: Sizes, probes: int, is_random: bool, figures: list[float]) -> dict[str, Squares]:
    """Returns what `LayerSums.weight_divergences` does, from its sums in their order."""
    left = iter(figures)

    def take(count: int) -> list[float]:
        return [next(left) for _ in range(count)]

    rows: dict[str, list[Squares]] = {"forward": [], "grad_input": [], LAYER: []}
    on_weight = [[sizes.of_pieces(*take(2)) for _ in range(3)] for _ in range(probes)]
    shared = [take(2) for _ in range(probes)]
    for (on_forward, on_grad_input, on_both), across_x in zip(on_weight, shared, strict=True):
        of_x = sizes.of_tokens(*take(4), *across_x)
        of_g = sizes.of_random_tokens(*take(1)) if is_random else sizes.of_tokens(*take(4))
        rows["forward"].append(of_x + on_forward)
        rows["grad_input"].append(of_g + on_grad_input)
        rows[LAYER].append(of_x + of_g + on_both)
    grad_weight = sizes.of_pieces(*take(2))
    means = {row: Squares.mean(squares) for row, squares in rows.items()}
    return {**means, "grad_weight": grad_weight, LAYER: means[LAYER] + grad_weight}


def errors_of(factors: dict[str, float], norms: list[float]) -> dict[str, tuple[float, float]]:
    """Returns what `LayerSums.errors` does, from the norms of W's errors, of `ACTIVATIONS`' and of W, X and G."""
    operands = ["w", "w", *(operand for operand, _ in ACTIVATIONS)]
    of_operands = dict(zip(("w", "x", "g"), norms[len(operands) :], strict=True))
    pairs = []
    for operand, absolute in zip(operands, norms, strict=False):
        norm = of_operands[operand]
        pairs.append((absolute * factors.get(operand, 1.0), absolute / norm if norm > 0 else 0.0))
    w_row, w_column, x_row, x_column, g_row, g_column = pairs
    of_gemms = {"forward": (x_row, w_row), "grad_input": (g_row, w_column), "grad_weight": (g_column, x_column)}
    sums = {gemm: (left[0] + right[0], left[1] + right[1]) for gemm, (left, right) in of_gemms.items()}
    return {**sums, LAYER: (sum(value[0] for value in sums.values()), sum(value[1] for value in sums.values()))}
