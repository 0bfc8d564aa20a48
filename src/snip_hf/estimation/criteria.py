"""What do the criteria of other methods say of a format? One figure per GEMM, from what the probe sampled of a layer.

Each criterion gives rows, a GEMM or "layer" -> cost, that a program adds up as it adds SNIP's divergences. Sources, and
what was changed: docs/policies.md. Legend: as in `terms`; H is the Hessian of the micro-batch's mean loss with respect
to one layer's weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..numerics.gemms import COLUMN_TILE, GEMMS, ROW_TILE, SQUARE_TILE
from .layer_sums import LAYER, ROWS, LayerTerms, Pending, read_all
from .products import product
from .samples import LayerSample

Rows = dict[str, float | None]

# Equal bins of a histogram (ours); the same for all layers, so that they compare.
BINS = 100
# Added to the count of every bin (Jeffreys), without which a bin that rounding empties would cost infinitely much.
_UNSEEN = 0.5
# A GEMM's two operands and their tiles.
_OPERANDS = {
    "forward": (("x", ROW_TILE), ("w", SQUARE_TILE)),
    "grad_input": (("g", ROW_TILE), ("w", SQUARE_TILE)),
    "grad_weight": (("g", COLUMN_TILE), ("x", COLUMN_TILE)),
}


class LayerCriterion:
    """The rows of one layer, prepared once for all formats.

    Args:
        policy: one of `CRITERIA`, or another, for which all rows hold None.
        terms: of the layer.
        trace: of H, (1,), for "hessian-trace" (`hessian_trace`).
    """

    def __init__(self, policy: str, terms: LayerTerms, trace: Tensor | None = None) -> None:
        self._terms, self._trace = terms, trace
        self._find = _CRITERIA.get(policy)
        # Operand -> inner edges and counts of its histogram before rounding.
        self._before: dict[str, tuple[Tensor, Tensor]] = {}

    def rows(self, name: str) -> Rows:
        """Returns row -> what the criterion gives for this format; None in all rows without a criterion."""
        return read_all([self.pending_rows(name)])[0]

    def pending_rows(self, name: str) -> Pending[Rows]:
        """As `rows`, not waiting for the device, but for histograms."""
        if self._find is None:
            return Pending(self._terms.w.new_zeros(0), _without_criterion)
        return self._find(self, name)

    def fisher(self, name: str) -> Pending[Rows]:
        """N sum over tokens and outputs of G^2 E^2, E = Q(X) Q(W)^T - X W^T, N the tokens with a label."""
        terms = self._terms
        # One product of twice the length instead of the difference of two.
        left = torch.cat([terms.rounded("x", name, ROW_TILE), -terms.x], 1)
        right = torch.cat([terms.rounded("w", name, SQUARE_TILE), terms.w], 1)
        errors = product(left, right.t())  # (n, 2 I) x (2 I, O)
        # As for the loss divergence: the mean over N tokens of what the gradients of their own losses give.
        score = terms.batch.labelled * terms.sizes.scale * errors.mul_(terms.g).square_().sum()
        return Pending(score[None], _forward_only)

    def greedy(self, name: str) -> Pending[Rows]:
        """sum over elements of |G^T X * eW|: by how much each element's rounding can move the loss, to first order."""
        terms = self._terms
        error = terms.rounded("w", name, SQUARE_TILE) - terms.w
        moves = terms.sizes.token_ratio * error.mul_(self._gradient).abs_().sum()
        return Pending(moves[None], _forward_only)

    @property
    def _gradient(self) -> Tensor:
        """Of the weight, (O, I), as far as the sample shows it."""
        return product(self._terms.g.t(), self._terms.x)  # (O, n) x (n, I)

    def hessian(self, name: str) -> Pending[Rows]:
        """The mean eigenvalue of H, tr H / numel, times |eW|^2; a trace below 0 counts as 0."""
        terms = self._terms
        trace = terms.w.new_zeros(1) if self._trace is None else self._trace
        return Pending(trace.clamp(min=0.0) / terms.w.numel() * terms.weight_error(name), _forward_only)

    def kl(self, name: str) -> Pending[Rows]:
        """KL(before || after) of histograms, in nats: a GEMM's sum over its operands, the layer's over its GEMMs."""
        figures = [self._of_operand(*at, name) for gemm in GEMMS for at in _OPERANDS[gemm]]
        return Pending(torch.stack(figures), _by_gemm)

    def _of_operand(self, operand: str, tile: tuple[int, int], name: str) -> Tensor:
        if operand not in self._before:
            values = getattr(self._terms, operand)
            edges = inner_edges(values)
            self._before[operand] = edges, histogram(values, edges)
        edges, before = self._before[operand]
        return kl_divergence(before, histogram(self._terms.rounded(operand, name, tile), edges))


_CRITERIA = {
    "fisher": LayerCriterion.fisher,
    "hessian-trace": LayerCriterion.hessian,
    "greedy": LayerCriterion.greedy,
    "kl": LayerCriterion.kl,
}
# The policies that decide by a criterion of this module.
CRITERIA = tuple(_CRITERIA)


def hessian_trace(layer: str, sample: LayerSample, directions: Sequence[Tensor]) -> Tensor:
    """Estimates tr H by Hutchinson's method: the mean over the probes of <z, H z>, (1,).

    H z is how the weight's gradient G^T X answers when all weights move along z: cross terms with the other layers'
    directions have mean zero. The sampled tokens stand for all by their number, since terms have either sign.

    Args:
        layer: its name.
        sample: with the derivatives along `directions`.
        directions: probe -> z ~ N(0, 1), (O, I).

    Raises:
        ValueError: there is not one derivative for each direction.
    """
    if len(sample.x_dot) != len(directions):
        raise ValueError(
            f"Layer {layer!r} has derivatives along {len(sample.x_dot)} of {len(directions)} directions (a router sent "
            "it other tokens), so its Hessian trace is not known. Use another policy for this model."
        )
    figures = []
    for z, x_dot, g_dot in zip(directions, sample.x_dot, sample.grad_output_dot, strict=True):
        left, right = torch.cat([g_dot, sample.grad_output]), torch.cat([sample.x, x_dot])
        figures.append((product(left.t(), right) * z).sum())  # (O, 2 n) x (2 n, I)
    return sample.tokens / max(1, sample.x.shape[0]) * torch.stack(figures).mean(0, keepdim=True)


def inner_edges(values: Tensor) -> Tensor:
    """Returns the edges between `BINS` equal bins over the range of the values, (BINS - 1,).

    The first and the last bin have no end: they also take what lies beyond the range.
    """
    if values.numel() == 0:
        return values.new_zeros(BINS - 1)
    least, most = values.aminmax()
    return least + (most - least) * (torch.arange(1, BINS, device=values.device) / BINS)


def histogram(values: Tensor, edges: Tensor) -> Tensor:
    """Returns how many values are in each bin, (BINS,); a value on an edge is in the bin above it.

    Exact for any number of values. On a GPU it waits for the device, which costs less than sorting would.
    """
    return torch.bucketize(values.flatten(), edges, out_int32=True, right=True).bincount(minlength=BINS)


def kl_divergence(before: Tensor, after: Tensor) -> Tensor:
    """Returns sum p log(p / q), in nats, of the distributions that two histograms show, (), FP32."""
    p, q = ((counts + _UNSEEN).to(torch.float64) for counts in (before, after))
    p, q = p / p.sum(), q / q.sum()
    return (p * (p / q).log()).sum().to(torch.float32)


def _forward_only(figures: list[float]) -> Rows:
    """Rows of a criterion that sees the forward GEMM only."""
    return {row: figures[0] if row in ("forward", LAYER) else 0.0 for row in ROWS}


def _by_gemm(figures: list[float]) -> Rows:
    sums = {gemm: figures[2 * index] + figures[2 * index + 1] for index, gemm in enumerate(GEMMS)}
    return {**sums, LAYER: sum(sums.values())}


def _without_criterion(figures: list[float]) -> Rows:
    return dict.fromkeys(ROWS)
