"""The sums of `layer_sums` for a layer of several matrices, such as a projection of experts.

Legend: E matrices, n sampled rows of all of them, sorted by matrix, of U sampled tokens; I in_features, O out_features.
X (n, I), G (n, O), W_e (O, I). A row is a token in one matrix: a token that a router sends to k experts has k rows.

A layer of several matrices is one layer, and its divergences those of rounding all its matrices at once. What the
errors of a token's rows do adds before the square: where the rows are the same (the input of a first projection),
their errors are, and where they are unrelated the sum shows it by itself. So do the errors of the matrices: those of
different matrices are unrelated, those of equal ones the same. So experts with equal weights have the figures of the
dense layer that they are together. Only changes of the optimizer's update belong to a matrix alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial, reduce
from operator import itemgetter

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..kernels.rounding import fake_quantize
from ..kernels.sums import norms, scaled_squares
from ..numerics.formats import FORMATS
from ..numerics.gemms import TILE
from .common_errors import MetByChannels, MetByTokens, met_by
from .extrapolation import BatchSizes, Sizes, Squares
from .layer_sums import AT_ONCE, MOST_PIECES, OPERANDS, LayerSums, bend
from .optimizer_step import UpdateChange
from .pending import Pending, errors_of, squares_of
from .products import product
from .samples import LayerSample, Rows

# Rows of a matrix in a piece, on the average: fewer cost more in sums of (O, I) products than in the products.
_LEAST_ROWS = 32


class MatrixSums:
    """The sums of one layer of several matrices, prepared once for all formats; `LayerSums` says what they are.

    Args:
        sample: what the probe kept of the layer, with its `rows`.
        matrices: W_e, each (O, I).
        pushforward: as of `LayerSums`: a function of (E, O, I), or the factors of each matrix; None for a layer that is
            not trained.
        micro_batches, batch, formats: as of `LayerSums`.
    """

    def __init__(
        self,
        sample: LayerSample,
        matrices: Sequence[Tensor],
        pushforward: UpdateChange | Sequence[Tensor] | None,
        micro_batches: int,
        batch: BatchSizes | None = None,
        *,
        formats: Sequence[str],
    ) -> None:
        assert sample.rows is not None
        self._sample, self._matrices, self._pushforward, self._formats = sample, matrices, pushforward, list(formats)
        self.x, self.g = sample.x, sample.grad_output
        self.batch = batch or BatchSizes.complete(sample.tokens, sample.tokens)
        self._by_token = _ByToken(sample.rows, self._pieces(sample.rows.tokens))
        batches = micro_batches * self.batch.parts
        rows = max(1, self.x.shape[0])
        self.sizes = Sizes(sample.tokens / rows, sample.scale, self._by_token.pieces, batches)
        self._lengths = self._by_token.lengths(sample.rows, len(matrices))
        self._quantized: dict[tuple[str, str, int, int | None], Tensor] = {}
        self._meets_x = [torch.empty_like(self.x) for _ in sample.x_dot]
        self._meets_g = [torch.empty_like(self.g) for _ in sample.x_dot]
        self._g_w = torch.empty_like(self.x)
        # Format -> G_t . E_t of each row.
        self._along = {name: self.x.new_empty(self.x.shape[0]) for name in self._formats}
        # Format -> |eW|^2 of the weights as the forward GEMM sees them, and as grad_input does; and |W|^2.
        self._weight_errors = {name: self.x.new_zeros(2) for name in self._formats}
        self._weight_square = self.x.new_zeros(1)
        # Probe and format -> what `Sizes.of_pieces` takes of forward, grad_input and both.
        self._on_weight: dict[tuple[int, str], Tensor] = {}
        self._go_through_matrices()

    def _pieces(self, tokens: int) -> int:
        """Returns how many pieces of the sample are told apart: fewer for many matrices, whose products they repeat."""
        matrices = len(self._matrices)
        held = max(1, self._matrices[0].numel() * 2 * len(self._formats) * max(1, len(self._sample.x_dot)))
        most = min(MOST_PIECES, tokens // TILE, self.x.shape[0] // (_LEAST_ROWS * matrices), AT_ONCE // held)
        return min(max(1, tokens), max(2, most))

    def _parts(self) -> Iterator[tuple[int, slice, list[int]]]:
        """Gives each matrix, its rows, and how many of them are in each piece."""
        first = 0
        for index, lengths in enumerate(self._lengths):
            end = first + sum(lengths)
            yield index, slice(first, end), lengths
            first = end

    def _go_through_matrices(self) -> None:
        """Does what needs the weights, of which one at a time is rounded."""
        shape = (self.sizes.pieces, *self._matrices[0].shape)
        met = {
            (probe, name): [self.x.new_zeros(shape) for _ in range(2)]
            for probe in range(len(self._sample.x_dot))
            for name in self._formats
        }
        for index, rows, lengths in self._parts():
            w = self._matrices[index].to(torch.float32)
            self._weight_square += w.square().sum()
            self._meet(w, rows)
            errors = {name: self._round_matrix(w, rows, name) for name in self._formats}
            if rows.stop == rows.start:
                continue
            for probe in range(len(self._sample.x_dot)):
                found = self._met_by_weight(probe, rows, lengths)
                for name in self._formats:
                    for total, part, error in zip(met[probe, name], found, errors[name], strict=True):
                        total.addcmul_(part, error)
        for at, (forward, grad_input) in met.items():
            sums = [_own_and_total(forward), _own_and_total(grad_input), _own_and_total(forward.add_(grad_input))]
            self._on_weight[at] = torch.stack(sums)

    def _meet(self, w: Tensor, rows: slice) -> None:
        """Notes what the errors of one matrix's rows meet."""
        gradients = [self.g[rows], *(g_dot[rows] for g_dot in self._sample.grad_output_dot)]
        met = product(torch.cat(gradients), w).split([rows.stop - rows.start] * len(gradients))
        for into, found in zip([self._g_w, *self._meets_x], met, strict=True):
            into[rows] = found
        for into, x_dot in zip(self._meets_g, self._sample.x_dot, strict=True):
            into[rows] = product(x_dot[rows], w.t())

    def _round_matrix(self, w: Tensor, rows: slice, name: str) -> tuple[Tensor, Tensor]:
        """Returns the error of one matrix in a format, as forward and as grad_input see it; notes what follows."""
        rounded = fake_quantize(w, FORMATS[name], OPERANDS["w"], 1)
        error = rounded - w
        other = error if FORMATS[name].shares_weight else fake_quantize(w, FORMATS[name], OPERANDS["w"], 0) - w
        self._weight_errors[name] += torch.stack([error.square().sum(), other.square().sum()])
        x = self.rounded("x", name, 1)[rows]
        along = product(self.g[rows], rounded).mul_(x).addcmul_(self._g_w[rows], self.x[rows], value=-1).sum(1)
        self._along[name][rows] = along
        return error, other

    def _met_by_weight(self, probe: int, rows: slice, lengths: list[int]) -> tuple[Tensor, Tensor]:
        """Returns what eW meets along one probe's direction, in forward and in grad_input, (R, O, I) each."""
        x, x_dot, g, g_dot = (
            _padded(tensor[rows], lengths)
            for tensor in (self.x, self._sample.x_dot[probe], self.g, self._sample.grad_output_dot[probe])
        )
        return product(g_dot.mT, x), product(g.mT, x_dot)  # (R, O, L) x (R, L, I)

    def pending_weight_divergences(self, name: str, keys: tuple[int, int]) -> Pending[dict[str, Squares]]:
        """As `LayerSums.pending_weight_divergences`."""
        is_random = FORMATS[name].gradient.stochastic
        error_x = self.rounded("x", name, 1) - self.x
        error_g = self.rounded("g", name, 1, keys[0] if is_random else None) - self.g
        probes = range(len(self._sample.x_dot))
        figures, shared = [], []
        for probe in probes:
            figures += self._token_figures(self._meets_x[probe] * error_x)
            of_g = self._meets_g[probe] * error_g
            figures += [of_g] if is_random else self._token_figures(of_g)
            shared.append(self._across(probe, error_x))
        on_tokens = [norms(figures).square_()] if figures else []
        on_weight = [self._on_weight[probe, name].flatten() for probe in probes]
        on_update = self._grad_weight_sums(name, keys[1] if is_random else None)
        sums = torch.cat([*on_weight, *shared, *on_tokens, on_update])
        return Pending(sums, partial(squares_of, self.sizes, len(probes), is_random))

    def _token_figures(self, products: Tensor) -> list[Tensor]:
        """Returns what `Sizes.of_tokens` takes the squares of, from errors times what they meet, (n, channels)."""
        products = self._by_token.sums(products)
        channels = self._by_token.by_piece(products).sum(1)
        return [products, products.sum(1), channels, channels.sum(0)]

    @cached_property
    def _met_by_x(self) -> list[MetByChannels | MetByTokens]:
        """What eX meets along each probe's direction; rows of one token that are equal count as one."""
        if self._has_equal_rows:
            return [met_by(self._by_token.by_piece(self._by_token.sums(meets))) for meets in self._meets_x]
        return [met_by(self._by_token.rows_by_piece(meets)) for meets in self._meets_x]

    def _across(self, probe: int, errors: Tensor) -> Tensor:
        """Returns what tokens share across channels."""
        if self._has_equal_rows:
            return self._met_by_x[probe].across_channels(self._by_token.by_piece(self._by_token.first(errors)))
        return self._met_by_x[probe].across_channels(self._by_token.rows_by_piece(errors))

    @cached_property
    def _has_equal_rows(self) -> bool:
        """Whether all rows of a token have the same X."""
        return torch.equal(self._by_token.first(self.x)[self._by_token.token], self.x)

    def _grad_weight_sums(self, name: str, key: int | None) -> Tensor:
        """As `LayerSums._grad_weight_sums`: updates of different matrices add as squares."""
        if self._pushforward is None:
            return self.x.new_zeros(2)
        g, x = self.rounded("g", name, 0, key), self.rounded("x", name, 0)
        if isinstance(self._pushforward, UpdateChange):
            return self._function_sums(self._pushforward, g, x)
        sums = [self.x.new_zeros(2)]
        for index, rows, lengths in self._parts():
            if rows.stop > rows.start:
                change = self._change(g, x, rows, lengths)
                sums.append(scaled_squares(change, self._pushforward[index]))
        return reduce(torch.add, sums)

    def _change(self, g: Tensor, x: Tensor, rows: slice, lengths: list[int]) -> Tensor:
        """Returns the error in one matrix's gradient, of each piece, (R, O, I)."""
        # One product of twice the length instead of the difference of two.
        left = torch.cat([_padded(g[rows], lengths), _padded(-self.g[rows], lengths)], 1)
        right = torch.cat([_padded(x[rows], lengths), _padded(self.x[rows], lengths)], 1)
        return product(left.mT, right)  # (R, O, 2 L) x (R, 2 L, I)

    def _function_sums(self, pushforward: UpdateChange, g: Tensor, x: Tensor) -> Tensor:
        """As `LayerSums._function_sums`; holds the errors of all matrices' gradients at once."""
        changes = torch.stack([self._change(g, x, rows, lengths) for _, rows, lengths in self._parts()], 1)
        change = changes.sum(0)
        of_gradient = torch.stack([norms([changes])[0], norms([change])[0]]).square_()
        for piece in changes:
            piece.copy_(pushforward(piece))
        moved = torch.stack([norms([changes])[0], norms([changes.sum(0)])[0]]).square_()
        return moved * bend(self.sizes, pushforward, change, of_gradient, moved[1])

    def pending_loss_divergence(self, name: str, form: str) -> Pending[float]:
        """As `LayerSums.pending_loss_divergence`."""
        if form == "saliency":
            return Pending(self._saliencies[name][None], itemgetter(0))
        along = self._by_token.sums(self._along[name][:, None])
        rise = self.batch.labelled / 2 * self.sizes.scale * along.square().sum()
        return Pending(rise[None], itemgetter(0))

    @cached_property
    def _saliencies(self) -> dict[str, Tensor]:
        """Format -> the loss divergence of the form "saliency", of all matrices together, ()."""
        found = {name: self.x.new_zeros(()) for name in self._formats}
        for w, gradient in self._gradients():
            for name in self._formats:
                error = fake_quantize(w, FORMATS[name], OPERANDS["w"], 1) - w
                found[name] += error.mul_(gradient).abs_().sum()
        return {name: self.sizes.token_ratio * total for name, total in found.items()}

    def _gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Gives each matrix that has rows, and its gradient as far as the sample shows it, (O, n) x (n, I)."""
        for index, rows, _ in self._parts():
            if rows.stop > rows.start:
                yield self._matrices[index].to(torch.float32), product(self.g[rows].t(), self.x[rows])

    def pending_errors(self, name: str) -> Pending[dict[str, tuple[float, float]]]:
        """As `LayerSums.pending_errors`; norms are over all matrices."""
        operands = [self.x, self.x, self.g, self.g]
        rounded = [self.rounded(operand, name, contracts) for operand, contracts in _ACTIVATIONS]
        of_layer = torch.cat([self._weight_square.sqrt(), norms([self.x, self.g])])
        found = self._weight_errors[name].sqrt(), norms(torch._foreach_sub(rounded, operands)), of_layer
        ratio, batch = self.sizes.token_ratio, self.batch
        rows = max(1, batch.micro_batch_tokens) / max(1, batch.tokens)
        factors = {"x": (ratio * rows) ** 0.5, "g": (ratio / batch.parts) ** 0.5}
        return Pending(torch.cat(found), partial(errors_of, factors))

    def of_matrices(self, sample: LayerSample) -> Iterator[tuple[int, LayerSample, LayerSums]]:
        """Gives each matrix that has rows, its part of a sample of these rows, and its sums as of a layer of its own,
        without those of updates."""
        for index, rows, _ in self._parts():
            if rows.stop > rows.start:
                own = self._part_of(sample, index, rows)
                without = replace(own, x_dot=[], grad_output_dot=[])
                sums = LayerSums(without, self._matrices[index], None, 1, self.batch, formats=self._formats)
                yield index, own, sums

    def _part_of(self, sample: LayerSample, index: int, rows: slice) -> LayerSample:
        count = rows.stop - rows.start
        return LayerSample(
            max(count, round(count * self.sizes.token_ratio)),
            sample.x[rows],
            sample.grad_output[rows],
            [x_dot[rows] for x_dot in sample.x_dot],
            [g_dot[rows] for g_dot in sample.grad_output_dot],
            (self.sizes.scale, 1.0),
            sample.amaxes and (sample.amaxes[0][index], sample.amaxes[1][index]),
        )

    def rounded(self, operand: str, name: str, contracts: int, key: int | None = None) -> Tensor:
        """Returns "x" or "g" as GEMMs see it that contract this dimension of a matrix's rows; each is rounded once."""
        at = (operand, name, contracts, key)
        if at not in self._quantized:
            self._quantized[at] = self._rounded(*at)
        return self._quantized[at]

    def _rounded(self, operand: str, name: str, contracts: int, key: int | None) -> Tensor:
        format, x = FORMATS[name], self.x if operand == "x" else self.g
        rule = format.operand(OPERANDS[operand])
        amaxes = self._amaxes.get(operand)
        if rule.block is None or format.has_tensor_scale:  # scales belong to a matrix
            found = []
            for index, rows, _ in self._parts():
                amax = None if amaxes is None else amaxes[index]
                found.append(fake_quantize(x[rows], format, OPERANDS[operand], contracts, key, 0, 1, amax))
            return torch.cat(found)
        if contracts == 1:
            return fake_quantize(x, format, OPERANDS[operand], contracts, key)
        places, size = self._tile_places
        padded = x.new_zeros(size, x.shape[1])
        padded[places] = x
        return fake_quantize(padded, format, OPERANDS[operand], contracts, key)[places]

    @cached_property
    def _tile_places(self) -> tuple[Tensor, int]:
        """Where rows are when each matrix's begin a tile, zeros between them, and how many rows that makes."""
        found, size = [torch.arange(0)], 0
        for _, rows, _ in self._parts():
            count = rows.stop - rows.start
            found.append(size + torch.arange(count))
            size += -(-count // TILE) * TILE
        return torch.cat(found).to(self.x.device), size

    @cached_property
    def _amaxes(self) -> dict[str, Tensor]:
        sample = self._sample
        return dict(zip(("x", "g"), sample.amaxes, strict=True)) if sample.is_part and sample.amaxes else {}


class _ByToken:
    """Sums over the rows of each token, and pieces of the tokens.

    Args:
        rows: whose the rows are.
        pieces: R, of so many equal parts of the tokens.
    """

    def __init__(self, rows: Rows, pieces: int) -> None:
        self.token, self.pieces = rows.token, pieces
        self._order = rows.token.argsort(stable=True)
        counts = rows.token.bincount(minlength=rows.tokens)
        most = int(counts.max()) if len(rows.token) else 1
        # Token -> its rows; where it has fewer than others, the row behind the last one, which is zero.
        self._table = rows.token.new_full((rows.tokens, max(1, most)), len(rows.token))
        ordered = rows.token[self._order]
        first = counts.cumsum(0) - counts
        place = torch.arange(len(ordered), device=ordered.device) - first[ordered]
        self._table[ordered, place] = self._order
        sizes = [rows.tokens // pieces + (piece < rows.tokens % pieces) for piece in range(pieces)]
        of_piece = torch.arange(pieces).repeat_interleave(torch.tensor(sizes)).to(rows.token.device)
        self._piece = of_piece[rows.token]
        self._rows_in_piece: list[int] = self._piece.bincount(minlength=pieces).tolist()

    def lengths(self, rows: Rows, matrices: int) -> list[list[int]]:
        """Returns matrix -> piece -> rows in both."""
        both = rows.matrix() * self.pieces + self._piece
        found: list[list[int]] = both.bincount(minlength=matrices * self.pieces).view(matrices, self.pieces).tolist()
        return found

    def sums(self, of_rows: Tensor) -> Tensor:
        """Returns (n, C) summed over the rows of each token, (U, C), in a fixed order."""
        padded = torch.cat([of_rows, of_rows.new_zeros(1, of_rows.shape[1])])
        return reduce(torch.add, (padded[places] for places in self._table.unbind(1)))

    def first(self, of_rows: Tensor) -> Tensor:
        """Returns the first row of each token, (U, C); zeros without any."""
        return torch.cat([of_rows, of_rows.new_zeros(1, of_rows.shape[1])])[self._table[:, 0]]

    def by_piece(self, of_tokens: Tensor) -> Tensor:
        """Returns (U, C) as (R, L, C), shorter pieces with zeros at the end."""
        return pad_sequence(list(of_tokens.tensor_split(self.pieces)), batch_first=True)

    def rows_by_piece(self, of_rows: Tensor) -> Tensor:
        """Returns (n, C), by token, as (R, L, C), shorter pieces with zeros at the end."""
        return _padded(of_rows[self._order], self._rows_in_piece)


def _padded(rows: Tensor, lengths: list[int]) -> Tensor:
    """Returns rows (n, C) cut into pieces of these lengths as (R, L, C), with zeros at their ends."""
    return pad_sequence(list(rows.split(lengths)), batch_first=True)


def _own_and_total(parts: Tensor) -> Tensor:
    """Returns sum over pieces of |p_r|^2, and |sum of p_r|^2, (2,)."""
    return norms([parts, parts.sum(0)]).square_()


_ACTIVATIONS = (("x", 1), ("x", 0), ("g", 1), ("g", 0))
