"""The sums over one layer's sampled tokens from which the divergences of each format follow.

Legend: T tokens that the layer saw, N tokens with a label in the batch that was run, E matrices of the layer, n sampled
rows, sorted by matrix, I in_features, O out_features. X (n, I), G (n, O) and W_e (O, I) are the layer's input, output
gradient and weight in high precision; eX, eG, eW their quantization errors; Xdot, Gdot the derivatives of X and G along
the probe's direction. Formulas: docs/method.md, sections 2 and 3.

A linear has one matrix, and a row per sampled token. A projection of E experts has E matrices, and a row per token and
expert that the router sends it to. Such a projection is one layer: its divergences are those of rounding all its
matrices at once. Errors of one token's rows add before the square, and so do errors of different matrices, so experts
with equal weights have the divergences of the dense layer that they are together. Only changes of the optimizer's
update belong to one matrix each.

G is the gradient of a mean loss over N tokens. T differs from N under masks (fewer labels than tokens), in an expert
(which sees some of the tokens) and in a layer that is called several times (which sees each token again).

A divergence has two parts. The part of an error's effect on the update that all tokens share comes back at every step
(the bias); the rest is drawn anew with every batch. The sample is cut into pieces: products of different pieces
estimate the bias, because what is random in them is independent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..kernels.errors import (
    ErrorProducts,
    error_norms,
    error_products,
    has_error_products,
    joined_errors,
    rises_of_tokens,
    weight_errors,
)
from ..kernels.rounding import fake_quantize
from ..kernels.sums import error_squares, norms, scaled_squares
from ..numerics.formats import FORMATS
from ..numerics.gemms import TILE
from ..numerics.random_streams import normal
from .common_errors import ByChannels, ByTokens, prepared
from .extrapolation import BatchSizes, Sizes, Squares
from .optimizer_step import UpdateChange
from .products import is_split, product, rough_product, roughly
from .samples import LayerSample, Rows
from .table import LAYER

OPERANDS = {"x": "activation", "g": "gradient", "w": "weight"}
# Most pieces of a sample: more separate bias from noise better and cost more products.
MOST_PIECES = 8
# Elements of the (R, O, I) products of R pieces that are held at once: 512 MiB.
AT_ONCE = 2**27
# Least mean number of rows of one of several matrices in a piece: with fewer, sums of (O, I) products cost more than
# the products.
_LEAST_ROWS = 32

Result = TypeVar("Result")
Pushforward = Callable[[Tensor], Tensor] | Sequence[Tensor]
"""The change of the optimizer's update that a change of the gradient causes, relative to |W|: the factors of each
matrix's elements, (O, I), or a function of the changes of all matrices, (E, O, I), or (O, I) of one. An `UpdateChange`
is linear to first order only; other functions are linear."""


@dataclass(frozen=True)
class Deferred(Generic[Result]):
    """A result whose sums are still on the device: reading them one by one would wait for it every time."""

    sums: Tensor
    """(any,)"""
    finish: Callable[[list[float]], Result]


def read_all(deferred: Sequence[Deferred[Result]]) -> list[Result]:
    """Returns all results; waits for the device once."""
    if not deferred:
        return []
    device = deferred[0].sums.device
    figures = iter(torch.cat([one.sums.to(device) for one in deferred]).tolist())
    return [one.finish([next(figures) for _ in range(len(one.sums))]) for one in deferred]


class LayerSums:
    """The sums of one layer, prepared once for all formats. Results are `Deferred`.

    Args:
        sample: the layer's sample; without `rows` it is of a single matrix.
        matrices: W_e.
        pushforward: of the layer; None for a layer that is not trained.
        micro_batches: micro-batches of the optimizer step; the sampled one stands for all.
        batch: sizes of the batch whose mean loss has the gradient G.
        formats: the quantized formats of the run.
    """

    def __init__(
        self,
        sample: LayerSample,
        matrices: Sequence[Tensor],
        pushforward: Pushforward | None,
        micro_batches: int,
        batch: BatchSizes,
        *,
        formats: Sequence[str],
    ) -> None:
        self.x, self.g, self.matrices = sample.x, sample.grad_output, tuple(matrices)
        self.batch = batch
        self._sample, self._pushforward, self._formats = sample, pushforward, list(formats)
        self._shape, self._probes = self.matrices[0].shape, len(sample.x_dot)
        count = self.x.shape[0]
        self._tokens = _DenseRows(count, self._pieces(count))
        if sample.rows is not None:
            self._tokens = _RoutedRows(sample.rows, len(self.matrices), self._pieces(sample.rows.tokens))
        self.sizes = sizes_of(sample, micro_batches, self.batch, self._tokens.pieces)
        # Largest magnitudes of the whole tensors that the sample is from, for scales of whole tensors.
        self._amaxes = dict(zip(("x", "g"), sample.amaxes, strict=True)) if sample.is_part and sample.amaxes else {}
        self._quantized: dict[tuple[str, str, int, int | None], Tensor] = {}
        # Format -> sums of eW^2 as the forward GEMM rounds W, and, if that differs, as grad_input does.
        self._weight_squares: dict[str, Tensor] = {}
        # Format -> eW of one matrix, in BF16, if kernels compute it.
        self._narrow_errors: dict[str, Tensor | None] = {}
        self._rough_x, self._rough_g = roughly(self.x), roughly(self.g)
        self._dots = [
            (roughly(x_dot), roughly(g_dot)) for x_dot, g_dot in zip(sample.x_dot, sample.grad_output_dot, strict=True)
        ]
        # The weight divergence multiplies eX by Gdot W and eG by Xdot W^T.
        self._gdot_w, self._xdot_w = self._products_with_weights()
        # (Probe, format) -> what `Sizes.of_pieces` takes, for eW in forward, in grad_input and in both, (3, 2).
        self._on_weight = self._weight_terms() if sample.rows is None else self._terms_of_several()

    def _pieces(self, tokens: int) -> int:
        """Returns the number of pieces, R; fewer for several matrices, whose products repeat for each piece."""
        if self._sample.rows is None:
            return pieces_of(tokens)
        held = max(1, self._shape.numel() * 2 * len(self._formats) * max(1, self._probes))
        most = min(self.x.shape[0] // (_LEAST_ROWS * len(self.matrices)), AT_ONCE // held)
        return min(pieces_of(tokens), max(2, most))

    @cached_property
    def w(self) -> Tensor:
        """W in FP32, (O, I), of a layer of one matrix."""
        (weight,) = self.matrices
        return weight.to(torch.float32)

    def _each_matrix(self) -> Iterator[tuple[int, Tensor, slice, list[int]]]:
        """Yields each matrix in FP32, with its rows and how many of them are in each piece."""
        if len(self.matrices) == 1:
            yield 0, self.w, slice(None), self._tokens.lengths[0]
            return
        first = 0
        for index, lengths in enumerate(self._tokens.lengths):
            end = first + sum(lengths)
            yield index, self.matrices[index].to(torch.float32), slice(first, end), lengths
            first = end

    # ------------------------------------------------------------------------------------------------------- rounding

    def rounded(self, operand: str, name: str, contracts: int, key: int | None = None) -> Tensor:
        """Returns "x", "g", or "w" of one matrix, as a GEMM sees it that contracts this dimension; rounded once."""
        at = operand, name, contracts, key
        if at not in self._quantized:
            self._quantized[at] = self._round(*at)
        return self._quantized[at]

    def take_rounded_gradient(self, name: str, keys: Sequence[int], rounded: Sequence[Tensor]) -> None:
        """Uses G as rounded elsewhere, along O and along T, in place of rounding it by these keys."""
        for contracts, key, one in zip((1, 0), keys, rounded, strict=True):
            self._quantized["g", name, contracts, key] = one

    def _round(self, operand: str, name: str, contracts: int, key: int | None) -> Tensor:
        x, format, kind = getattr(self, operand), FORMATS[name], OPERANDS[operand]
        amax = self._amaxes.get(operand)
        if self._sample.rows is None or operand == "w":
            return fake_quantize(x, format, kind, contracts, key, 0, 1, amax)
        if format.operand(kind).block is None or format.has_tensor_scale:  # scales belong to a matrix
            parts = [
                fake_quantize(x[rows], format, kind, contracts, key, 0, 1, None if amax is None else amax[index])
                for index, _, rows, _ in self._each_matrix()
            ]
            return torch.cat(parts)
        if contracts == 1:
            return fake_quantize(x, format, kind, contracts, key)
        places, size = self._tile_places
        padded = x.new_zeros(size, x.shape[1])
        padded[places] = x
        return fake_quantize(padded, format, kind, contracts, key)[places]

    @cached_property
    def _tile_places(self) -> tuple[Tensor, int]:
        """Row -> its place if each matrix's rows begin a tile, with zeros between; and how many places there are."""
        found, size = [torch.arange(0)], 0
        for lengths in self._tokens.lengths:
            count = sum(lengths)
            found.append(size + torch.arange(count))
            size += -(-count // TILE) * TILE
        return torch.cat(found).to(self.x.device), size

    def _rounded_weight(self, w: Tensor, name: str, contracts: int) -> Tensor:
        """Returns a matrix as a GEMM sees it; of several matrices none is kept."""
        if len(self.matrices) == 1:
            return self.rounded("w", name, contracts)
        return fake_quantize(w, FORMATS[name], OPERANDS["w"], contracts)

    # ------------------------------------------------------------------------------------ what errors are multiplied by

    def _products_with_weights(self) -> tuple[list[Tensor], list[Tensor]]:
        """Returns for each probe Gdot W (n, I) and Xdot W^T (n, O)."""
        found: list[list[Tensor]] = []
        for _, w, rows, _ in self._each_matrix():
            rough = roughly(w)
            found.append(
                [
                    *(rough_product(g_dot[rows], rough) for _, g_dot in self._dots),  # (n, O) x (O, I)
                    *(rough_product(x_dot[rows], rough.t()) for x_dot, _ in self._dots),  # (n, I) x (I, O)
                ]
            )
        met = [_one_after_the_other(parts) for parts in zip(*found, strict=True)]
        return met[: self._probes], met[self._probes :]

    @cached_property
    def g_w(self) -> Tensor:
        """G W, (n, I), by which some loss divergences multiply eX."""
        return _one_after_the_other([product(self.g[rows], w) for _, w, rows, _ in self._each_matrix()])

    def _weight_terms(self) -> dict[tuple[int, str], Tensor]:
        """Returns the sums of eW times its factors along each probe's direction, for a layer of one matrix.

        The factor is Gdot^T X in forward and G^T Xdot in grad_input. These add before the square, since the weight's
        error is the same for all tokens.
        """
        # eW^2 if one quantized weight serves both GEMMs; else eW^2 of forward, that of grad_input, and the product of
        # both errors.
        kinds = [1 if FORMATS[name].shares_weight else 3 for name in self._formats]
        squares = self.w.new_empty(sum(kinds), *self.w.shape)
        for name, own in zip(self._formats, squares.split(kinds), strict=True):
            rounded = [self.rounded("w", name, contracts) for contracts in (1, 0)[: len(own)]]
            self._weight_squares[name], self._narrow_errors[name] = weight_errors(self.w, rounded, own)
        at_once = outputs_at_once(self.sizes.pieces, self.w.shape[1])
        x, g = self._by_piece(self._rough_x), self._by_piece(self._rough_g)
        terms = {}
        for probe, dots in enumerate(self._dots):
            x_dot, g_dot = map(self._by_piece, dots)
            sums = []
            outputs = zip(g_dot.split(at_once, 2), g.split(at_once, 2), squares.split(at_once, 1), strict=True)
            for g_dot_r, g_r, errors in outputs:
                forward = rough_product(g_dot_r.mT, x, True)  # (R, O, L) x (R, L, I)
                grad_input = rough_product(g_r.mT, x_dot, True)  # (R, O, L) x (R, L, I)
                sums.append(error_squares(forward, grad_input, errors))
            for name, found in zip(self._formats, reduce(torch.add, sums).split(kinds), strict=True):
                terms[probe, name] = found[0] if len(found) == 1 else _of_two_errors(found)
        return terms

    def _terms_of_several(self) -> dict[tuple[int, str], Tensor]:
        """Returns `_weight_terms` for several matrices, whose errors add before the square; rounds one at a time."""
        shape, probes = (self.sizes.pieces, *self._shape), range(self._probes)
        met = {(probe, name): [self.x.new_zeros(shape) for _ in "fg"] for probe in probes for name in self._formats}
        self._weight_squares = {name: self.x.new_zeros(2) for name in self._formats}
        for _, w, rows, lengths in self._each_matrix():
            errors = {}
            for name in self._formats:
                first = self._rounded_weight(w, name, 1) - w
                second = first if FORMATS[name].shares_weight else self._rounded_weight(w, name, 0) - w
                self._weight_squares[name] += torch.stack([first.square().sum(), second.square().sum()])
                errors[name] = first, second
            if not sum(lengths):
                continue
            for probe, (x_dot, g_dot) in enumerate(self._dots):
                operands = self._rough_x, x_dot, self._rough_g, g_dot
                x_r, x_dot_r, g_r, g_dot_r = (_by_lengths(one[rows], lengths) for one in operands)
                # (R, O, L) x (R, L, I)
                found = rough_product(g_dot_r.mT, x_r), rough_product(g_r.mT, x_dot_r)
                for name in self._formats:
                    for total, part, error in zip(met[probe, name], found, errors[name], strict=True):
                        total.addcmul_(part, error)
        terms = {}
        for at, (forward, grad_input) in met.items():
            sums = [_own_and_total(forward), _own_and_total(grad_input), _own_and_total(forward.add_(grad_input))]
            terms[at] = torch.stack(sums)
        return terms

    def _by_piece(self, rows: Tensor) -> Tensor:
        """Returns rows (n, C) of a single matrix as (R, L, C)."""
        return _by_lengths(rows, self._tokens.lengths[0])

    # ---------------------------------------------------------------------------------------------- weight divergence

    def weight_divergences(self, name: str, keys: tuple[int, int]) -> Deferred[dict[str, Squares]]:
        """Returns row (a GEMM or "layer") -> squared weight divergence; the mean over the probes' squares.

        Args:
            name: format.
            keys: keys of the random rounding of G, along O and along T, for formats that round it at random.
        """
        is_random = FORMATS[name].gradient.stochastic
        figures, across = [], []
        for gdot_w, xdot_w, met in zip(self._gdot_w, self._xdot_w, self._gdot_w_prepared, strict=True):
            of_x = self._error_products("x", name, None, gdot_w)
            of_g = self._error_products("g", name, keys[0] if is_random else None, xdot_w, is_random)
            figures += of_x.sums + of_g.sums
            across.append(met.across_channels(self._across_pieces(of_x.error), of_x.in_channel()))
        on_weight = [self._on_weight[probe, name].flatten() for probe in range(self._probes)]
        on_tokens = [norms(figures).square_()] if figures else []
        on_update = self._update_sums(name, keys[1] if is_random else None)
        sums = torch.cat([*on_weight, *across, *on_tokens, on_update])
        return Deferred(sums, finish_squares(name, self.sizes, self._probes))

    @cached_property
    def _gdot_w_prepared(self) -> list[ByChannels | ByTokens]:
        """Gdot W along each probe's direction, prepared for the errors of all formats."""
        if self._has_equal_rows:
            return [prepared(self._tokens.by_piece(self._tokens.sums(factors))) for factors in self._gdot_w]
        return [prepared(self._tokens.rows_by_piece(factors)) for factors in self._gdot_w]

    def _across_pieces(self, errors: Tensor) -> Tensor:
        """Returns errors (n, I) by piece; equal rows of one token count once."""
        if self._has_equal_rows:
            return self._tokens.by_piece(self._tokens.first(errors))
        return self._tokens.rows_by_piece(errors)

    @cached_property
    def _has_equal_rows(self) -> bool:
        """True if all rows of a token have the same X."""
        return self._sample.rows is None or torch.equal(self._tokens.first(self.x)[self._sample.rows.token], self.x)

    def _error_products(
        self, operand: str, name: str, key: int | None, factors: Tensor, is_random: bool = False
    ) -> ErrorProducts:
        """Returns the errors of "x" or "g", and sums of their products with `factors`, for `Sizes.of_tokens`."""
        exact, rounded, pieces = getattr(self, operand), self.rounded(operand, name, 1, key), self.sizes.pieces
        if self._sample.rows is None and has_error_products(exact, pieces):
            found = error_products(exact, rounded, factors, pieces)
            return found._replace(sums=found.sums[:1]) if is_random else found
        error = rounded - exact
        products = factors * error
        if is_random:
            return ErrorProducts(error, [products])
        products = self._tokens.sums(products)
        channels = self._tokens.by_piece(products).sum(1)
        return ErrorProducts(error, [products, products.sum(1), channels, channels.sum(0)])

    def _update_sums(self, name: str, key: int | None) -> Tensor:
        """Returns the sums of J (Q(G)^T Q(X) - G^T X) for `Sizes.of_pieces`; they need no derivative of the model.

        Updates of different matrices add as squares.
        """
        push = self._pushforward
        if push is None or not (FORMATS[name].gradient.quantized or FORMATS[name].activation.quantized):
            return self.x.new_zeros(2)
        g, x = self.rounded("g", name, 0, key), self.rounded("x", name, 0)
        operands = [self._gradient_error(g, x, rows, lengths) for _, _, rows, lengths in self._each_matrix()]
        if callable(push):
            return self._function_sums(push, operands)
        at_once = outputs_at_once(self.sizes.pieces, self._shape[1])
        sums = [self.x.new_zeros(2)]
        for (left, right), factors in zip(operands, push, strict=True):
            for g_r, own in zip(left.split(at_once, 2), factors.split(at_once), strict=True):
                if left.shape[1]:
                    sums.append(scaled_squares(rough_product(g_r.mT, right, True), own))  # (R, O, 2 L) x (R, 2 L, I)
        return reduce(torch.add, sums)

    def _gradient_error(self, g: Tensor, x: Tensor, rows: slice, lengths: list[int]) -> tuple[Tensor, Tensor]:
        """Returns operands by piece of Q(G)^T Q(X) - G^T X of one matrix: (R, 2 L, O) and (R, 2 L, I).

        One product of twice the length takes the place of a difference of two. For `rough_product`.
        """
        g, x, exact_g, exact_x = g[rows], x[rows], self.g[rows], self.x[rows]
        if not is_split(g, x):
            return _joined(g, -exact_g, lengths), _joined(x, exact_x, lengths)
        # The same as eG^T Q(X) + G^T eX, all of whose terms are small: one BF16 product will do.
        if len(set(lengths)) == 1:
            pieces = len(lengths)
            return joined_errors(exact_g, g, pieces, True), joined_errors(exact_x, x, pieces, False)
        return _joined(g - exact_g, exact_g, lengths), _joined(x, x - exact_x, lengths)

    def _function_sums(self, push: Callable[[Tensor], Tensor], operands: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Returns `_update_sums` for a function of whole changes; holds all matrices of a few pieces at a time."""
        own: list[Tensor] = []
        totals: list[Tensor] = []
        at_once = max(1, AT_ONCE // max(1, self._shape.numel() * len(self.matrices)))
        for first in range(0, self.sizes.pieces, at_once):
            pieces = slice(first, first + at_once)
            parts = [rough_product(g[pieces].mT, x[pieces]) for g, x in operands]  # (R, O, 2 L) x (R, 2 L, I)
            changes = parts[0] if self._sample.rows is None else torch.stack(parts, 1)
            of_gradient = norms([changes]), changes.sum(0)
            for change in changes:
                change.copy_(push(change))
            own.append(torch.cat([of_gradient[0], norms([changes])]).square_())
            totals.append(torch.stack([of_gradient[1], changes.sum(0)]))
        change, moved = reduce(torch.add, totals)
        # (2, 2): of the gradient's change and of the update's; own and total.
        sums = torch.stack([reduce(torch.add, own), norms([change, moved]).square_()], 1)
        if isinstance(push, UpdateChange):
            return sums[1] * _saturation(self.sizes, push, change, sums[0], sums[1, 1])
        return sums[1]

    def mean_square_of_update(self) -> Tensor:
        """Returns |J|^2 / (O I) of one matrix, (): the mean square of the elements of the update's derivative.

        If J is not elementwise, it is taken from one random direction, whose mean over directions it is. 0 without an
        update.
        """
        if self._pushforward is None:
            return self.w.new_zeros(())
        if callable(self._pushforward):
            return self._pushforward(normal(0, self.w.shape, self.w.device)).square().mean()
        return self._pushforward[0].square().mean()

    # ------------------------------------------------------------------------------------------------ loss divergence

    def loss_divergence(self, name: str, form: str) -> Deferred[float]:
        """Returns the loss divergence (not yet relative to the loss) of quantizing the forward GEMM.

        Args:
            name: format.
            form: one of `SnipConfig.loss_estimator`.
        """
        sums = self.saliency_sums[name] if form == "saliency" else self._fisher_sum(name)
        return Deferred(sums, finish_loss(form, self.sizes, self.batch))

    @cached_property
    def saliency_sums(self) -> dict[str, Tensor]:
        """Format -> sum over the weights' elements of |G^T X * eW|, (1,)."""
        found = {name: self.x.new_zeros(()) for name in self._formats}
        for _, w, rows, lengths in self._each_matrix():
            if not sum(lengths):
                continue
            # A rounding error of 2^-9 of its terms hardly shows in the magnitude of an element, less in their sum.
            gradient = rough_product(self._rough_g[rows].t(), self._rough_x[rows], True)  # (O, n) x (n, I)
            for name in self._formats:
                error = self._narrow_errors.get(name)
                error = self._rounded_weight(w, name, 1) - w if error is None else error
                found[name] += (error * gradient).abs_().sum(dtype=torch.float32)
        return {name: total[None] for name, total in found.items()}

    def _fisher_sum(self, name: str) -> Tensor:
        """Returns the sum over tokens of (G_t . E_t)^2, with E = Q(X) Q(W)^T - X W^T, (1,)."""
        parts = []
        for _, w, rows, _ in self._each_matrix():
            g, x, g_w, exact = self.g[rows], self.rounded("x", name, 1)[rows], self.g_w[rows], self.x[rows]
            rounded = self._rounded_weight(w, name, 1)
            if is_split(g, rounded):  # E = Q(X) eW^T + eX W^T
                error = self._narrow_errors.get(name)
                along = rough_product(self._rough_g[rows], rounded - w if error is None else error)
                parts.append(rises_of_tokens(along, g_w, exact, x))
            else:
                parts.append(product(g, rounded).mul_(x).addcmul_(g_w, exact, value=-1).sum(1))
        along = self._tokens.sums(torch.cat(parts)[:, None])
        return along.square_().sum()[None]

    # --------------------------------------------------------------------------------------------- errors of operands

    def errors(self, name: str) -> Deferred[dict[str, tuple[float, float]]]:
        """Returns GEMM -> (absolute, relative) error of its operands, rounded to nearest (norms over all matrices)."""
        of_weight = torch.stack([self.weight_error(name, contracts) for contracts in (1, 0)]).sqrt_()
        of_operands = [
            error_norms(exact, [self.rounded(operand, name, contracts) for contracts in (1, 0)])
            for operand, exact in (("x", self.x), ("g", self.g))
        ]
        return Deferred(torch.cat([of_weight, *of_operands, self._norms]), finish_errors(self.sizes, self.batch))

    @cached_property
    def _norms(self) -> Tensor:
        """|W|, |X| and |G|."""
        if len(self.matrices) == 1:
            return norms([self.w, self.x, self.g])
        square = self.x.new_zeros(1)
        for _, w, _, _ in self._each_matrix():
            square += w.square().sum()
        return torch.cat([square.sqrt(), norms([self.x, self.g])])

    def weight_error(self, name: str, contracts: int = 1) -> Tensor:
        """Returns |eW|^2, of the weight as the GEMM sees it that contracts this dimension of it."""
        sums = self._weight_squares[name]
        return sums[1 if contracts == 0 and len(sums) > 1 else 0]

    # ------------------------------------------------------------------------------------------------- single matrices

    def of_matrices(self, sample: LayerSample) -> Iterator[tuple[int, LayerSample, LayerSums]]:
        """Yields each matrix that has rows, with its part of a sample of these rows and its sums as a layer of its own.

        They have no sums of updates.
        """
        for index, _, rows, lengths in self._each_matrix():
            if count := sum(lengths):
                own = LayerSample(
                    max(count, round(count * self.sizes.token_ratio)),
                    sample.x[rows],
                    sample.grad_output[rows],
                    [x_dot[rows] for x_dot in sample.x_dot],
                    [g_dot[rows] for g_dot in sample.grad_output_dot],
                    (self.sizes.scale, 1.0),
                    sample.amaxes and (sample.amaxes[0][index], sample.amaxes[1][index]),
                )
                matrix = [self.matrices[index]]
                yield index, own, LayerSums(own.without_dots(), matrix, None, 1, self.batch, formats=self._formats)


def pieces_of(tokens: int) -> int:
    """Returns the number of pieces of a sample of one matrix, R."""
    return min(max(1, tokens), max(2, min(MOST_PIECES, tokens // TILE)))


def sizes_of(sample: LayerSample, micro_batches: int, batch: BatchSizes, pieces: int) -> Sizes:
    """Returns the factors of a sample's sums; arguments as of `LayerSums`."""
    # A part with its own mean loss counts as one of several micro-batches.
    ratio = sample.tokens / max(1, sample.x.shape[0])
    return Sizes(ratio, sample.scale, pieces, micro_batches * batch.parts)


def finish_squares(name: str, sizes: Sizes, probes: int) -> Callable[[list[float]], dict[str, Squares]]:
    """Returns the function that computes `LayerSums.weight_divergences` from its sums."""
    return partial(_squares, sizes, probes, FORMATS[name].gradient.stochastic)


def finish_loss(form: str, sizes: Sizes, batch: BatchSizes) -> Callable[[list[float]], float]:
    """Returns the function that computes `LayerSums.loss_divergence` from its sums."""
    if form == "saliency":
        return partial(_times, sizes.token_ratio)
    # N^2 for the gradients of the tokens' own losses, 1 / N for the mean over their rises.
    return partial(_times, batch.labelled / 2 * sizes.scale)


def finish_errors(sizes: Sizes, batch: BatchSizes) -> Callable[[list[float]], dict[str, tuple[float, float]]]:
    """Returns the function that computes `LayerSums.errors` from its sums."""
    # From the sample to all tokens of the batch, and from there to the micro-batch: X has more rows by its tokens, G
    # also smaller ones, as a mean over more labels.
    rows = max(1, batch.micro_batch_tokens) / max(1, batch.tokens)
    return partial(
        _errors, {"w": 1.0, "x": (sizes.token_ratio * rows) ** 0.5, "g": (sizes.token_ratio / batch.parts) ** 0.5}
    )


class _DenseRows:
    """Rows of a layer of one matrix: each is a token.

    Args:
        count: n.
        pieces: R, of as even lengths as can be.
    """

    def __init__(self, count: int, pieces: int) -> None:
        self.pieces = pieces
        self.lengths = [[count // pieces + (piece < count % pieces) for piece in range(pieces)]]
        """Matrix -> piece -> rows in both."""

    def sums(self, rows: Tensor) -> Tensor:
        return rows

    def first(self, rows: Tensor) -> Tensor:
        return rows

    def by_piece(self, tokens: Tensor) -> Tensor:
        return _by_lengths(tokens, self.lengths[0])

    def rows_by_piece(self, rows: Tensor) -> Tensor:
        return self.by_piece(rows)


class _RoutedRows(_DenseRows):
    """Rows of a layer of several matrices: a token has a row in each matrix that it is sent to.

    Args:
        rows: matrix and token of each row.
        matrices: E.
        pieces: R, of so many equal parts of the tokens.
    """

    def __init__(self, rows: Rows, matrices: int, pieces: int) -> None:
        super().__init__(rows.tokens, pieces)
        of_piece = torch.arange(pieces).repeat_interleave(torch.tensor(self.lengths[0])).to(rows.token.device)
        self._token_lengths = self.lengths[0]
        self._order = rows.token.argsort(stable=True)
        counts = rows.token.bincount(minlength=rows.tokens)
        most = int(counts.max()) if len(rows.token) else 1
        # Token -> its rows; missing ones are the row after the last, which is zero.
        self._table = rows.token.new_full((rows.tokens, max(1, most)), len(rows.token))
        ordered = rows.token[self._order]
        first = counts.cumsum(0) - counts
        place = torch.arange(len(ordered), device=ordered.device) - first[ordered]
        self._table[ordered, place] = self._order
        piece = of_piece[rows.token]
        self._rows_in_piece: list[int] = piece.bincount(minlength=pieces).tolist()
        both = rows.matrix() * pieces + piece
        self.lengths = both.bincount(minlength=matrices * pieces).view(matrices, pieces).tolist()

    def sums(self, rows: Tensor) -> Tensor:
        """Returns (n, C) summed over the rows of each token, (tokens, C), in a fixed order."""
        padded = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        return reduce(torch.add, (padded[places] for places in self._table.unbind(1)))

    def first(self, rows: Tensor) -> Tensor:
        """Returns the first row of each token, (tokens, C); zeros without any."""
        return torch.cat([rows, rows.new_zeros(1, rows.shape[1])])[self._table[:, 0]]

    def by_piece(self, tokens: Tensor) -> Tensor:
        """Returns (tokens, C) as (R, L, C)."""
        return _by_lengths(tokens, self._token_lengths)

    def rows_by_piece(self, rows: Tensor) -> Tensor:
        """Returns (n, C), ordered by token, as (R, L, C)."""
        return _by_lengths(rows[self._order], self._rows_in_piece)


def _by_lengths(rows: Tensor, lengths: list[int]) -> Tensor:
    """Returns rows (n, C) cut into pieces of these lengths, (R, L, C); shorter ones have zeros at the end."""
    if len(set(lengths)) == 1:
        return rows.view(len(lengths), lengths[0], rows.shape[1])
    return pad_sequence(list(rows.split(lengths)), batch_first=True)


def _joined(first: Tensor, second: Tensor, lengths: list[int]) -> Tensor:
    """Returns two (n, C) by piece, one after the other, (R, 2 L, C)."""
    return torch.cat([_by_lengths(first, lengths), _by_lengths(second, lengths)], 1)


def _one_after_the_other(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


def _own_and_total(parts: Tensor) -> Tensor:
    """Returns the sum over pieces of |p_r|^2, and |sum of p_r|^2, (2,)."""
    return norms([parts, parts.sum(0)]).square_()


def _of_two_errors(found: Tensor) -> Tensor:
    """Returns the sums for an error eW in forward and another, eW', in grad_input, from `error_squares` of eW^2, eW'^2
    and eW eW'."""
    forward, grad_input, (of_first, of_second, of_both) = found
    # (a eW + b eW')^2 = a^2 eW^2 + b^2 eW'^2 + 2 a b eW eW', and 2 a b = (a + b)^2 - a^2 - b^2.
    both = forward[0] + grad_input[1] + of_both - of_first - of_second
    return torch.stack([forward[0], grad_input[1], both])


def outputs_at_once(pieces: int, inputs: int) -> int:
    """Returns for how many outputs products (R, O, I) may be held at once.

    A multiple of 128 if possible: if rows of BF16 begin off multiples of 16 bytes, cuBLAS takes slow kernels.
    """
    most = max(1, AT_ONCE // max(1, pieces * inputs))
    return most - most % TILE if most >= TILE else most


def _saturation(sizes: Sizes, push: UpdateChange, change: Tensor, sums: Tensor, moved: Tensor) -> Tensor:
    """Returns |h(g + d) - h(g)|^2 / |J d|^2 for an error d of a whole step.

    d is the sample's error, scaled to the norm of the step's error.

    Args:
        sizes: of the sample.
        push: of the update h.
        change: the sample's error in the gradient.
        sums: its squares, as `Sizes.of_pieces` takes them.
        moved: |J change|^2.
    """
    weights = [sizes.of_pieces(*one).step for one in ((1.0, 0.0), (0.0, 1.0))]
    step = weights[0] * sums[0] + weights[1] * sums[1]
    scale = torch.where(sums[1] > 0, step / sums[1], 0.0).clamp(min=0.0)
    in_full = norms([push.in_full(scale.sqrt() * change)]).square_()[0]
    to_first_order = scale * moved
    return torch.where(to_first_order > 0, in_full / to_first_order, 1.0)


def _times(factor: float, figures: list[float]) -> float:
    # In FP32, as the sum is.
    return float(torch.tensor(figures[0], dtype=torch.float32) * factor)


def _squares(sizes: Sizes, probes: int, is_random: bool, figures: list[float]) -> dict[str, Squares]:
    """Returns the result of `LayerSums.weight_divergences` from its sums, in their order."""
    left = iter(figures)

    def take(count: int) -> list[float]:
        return [next(left) for _ in range(count)]

    rows: dict[str, list[Squares]] = {"forward": [], "grad_input": [], LAYER: []}
    on_weight = [[sizes.of_pieces(*take(2)) for _ in range(3)] for _ in range(probes)]
    across = [take(2) for _ in range(probes)]
    for (on_forward, on_grad_input, on_both), across_x in zip(on_weight, across, strict=True):
        of_x = sizes.of_tokens(*take(4), *across_x)
        of_g = sizes.of_random_tokens(*take(1)) if is_random else sizes.of_tokens(*take(4))
        rows["forward"].append(of_x + on_forward)
        rows["grad_input"].append(of_g + on_grad_input)
        rows[LAYER].append(of_x + of_g + on_both)
    grad_weight = sizes.of_pieces(*take(2))
    means = {row: Squares.mean(squares) for row, squares in rows.items()}
    return {**means, "grad_weight": grad_weight, LAYER: means[LAYER] + grad_weight}


def _errors(factors: dict[str, float], figures: list[float]) -> dict[str, tuple[float, float]]:
    """Returns the result of `LayerSums.errors` from the norms of the errors of W, X and G, each as a GEMM sees it that
    contracts dimension 1, and 0; then of W, X and G."""
    operands = [operand for operand in "wxg" for _ in range(2)]
    sizes = dict(zip("wxg", figures[len(operands) :], strict=True))
    pairs = [
        (absolute * factors[operand], absolute / sizes[operand] if sizes[operand] > 0 else 0.0)
        for operand, absolute in zip(operands, figures, strict=False)
    ]
    w_row, w_column, x_row, x_column, g_row, g_column = pairs
    of_gemms = {"forward": (x_row, w_row), "grad_input": (g_row, w_column), "grad_weight": (g_column, x_column)}
    return {gemm: (left[0] + right[0], left[1] + right[1]) for gemm, (left, right) in of_gemms.items()}
