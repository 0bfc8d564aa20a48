"""The sums that tell what a format does to one layer, over what the probe sampled there.

Legend: T tokens that the layer saw, n of them sampled, N tokens with a label in the batch that was run, I in_features,
O out_features. X (n, I), G (n, O) and W (O, I) are the layer's input, output gradient and weight in high precision; eX,
eG, eW their quantization errors; Xdot, Gdot the derivatives along the probe's direction. Formulas: docs/method.md,
sections 2 and 3.

G is the gradient of a mean loss over N tokens. T is another number than N under masks (fewer labels than tokens), in
an expert (which sees some of the tokens) and in a layer that is called several times (which sees each token again).

A divergence has two parts. What a rounding error does to the update on the average over tokens comes back at every step
(the bias); the rest is drawn anew with every batch. The sample is cut into pieces: products of different pieces tell
the bias, because what is random in them is independent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, reduce

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..kernels.errors import (
    MetErrors,
    WeightErrors,
    error_norms,
    joined_errors,
    meets_by_kernel,
    met_errors_by_kernel,
    rises_of_tokens,
    weight_errors,
)
from ..kernels.rounding import fake_quantize
from ..kernels.sums import error_squares, norms, scaled_squares
from ..numerics.formats import FORMATS
from ..numerics.gemms import TILE
from ..numerics.random_streams import normal
from .common_errors import MetByChannels, MetByTokens, met_by
from .extrapolation import BatchSizes, Sizes, Squares
from .optimizer_step import UpdateChange
from .pending import Finishing, Pending, read_all
from .products import is_split, product, rough_product, roughly
from .samples import LayerSample

OPERANDS = {"x": "activation", "g": "gradient", "w": "weight"}
# Pieces of a sample, at most; more separate bias from noise better and cost more products.
MOST_PIECES = 8
# Elements of (R, O, I) products of R pieces that are held at once: 512 MiB.
AT_ONCE = 2**27


class LayerSums:
    """The sums of one layer, prepared once for all formats.

    Args:
        sample: what the probe kept of the layer.
        weight: (O, I).
        pushforward: how a gradient's change (O, I) changes the optimizer's update, relative to |W|: a linear function,
            or the factor of every element (O, I), or a function that is linear to first order only (`UpdateChange`);
            None for a layer that is not trained.
        micro_batches: micro-batches of the optimizer step; the sampled one stands for all.
        batch: of what G is the gradient; None: of a whole micro-batch, all of whose tokens the layer saw once, each of
            them with a label.
        formats: the quantized formats of the run.
    """

    def __init__(
        self,
        sample: LayerSample,
        weight: Tensor,
        pushforward: Callable[[Tensor], Tensor] | Tensor | None,
        micro_batches: int,
        batch: BatchSizes | None = None,
        *,
        formats: Sequence[str],
    ) -> None:
        self.x, self.g, self.w = sample.x, sample.grad_output, weight.to(torch.float32)
        self._pushforward = pushforward
        self._formats = list(formats)
        self.batch = batch or BatchSizes.complete(sample.tokens, sample.tokens)
        self.finishing = finishing(sample, micro_batches, self.batch)
        self.sizes = self.finishing.sizes
        self._quantized: dict[tuple[str, str, int, int | None], Tensor] = {}
        # Of the whole tensors that the sample is from, for scales that belong to a whole tensor.
        self._amaxes = dict(zip(("x", "g"), sample.amaxes, strict=True)) if sample.is_part and sample.amaxes else {}
        self._of_weight: dict[str, WeightErrors] = {}
        self._weight_errors = self._squared_weight_errors()
        # What eX meets: (n, O) x (O, I); and eG: (n, I) x (I, O).
        self.g_w = product(self.g, self.w)
        self._rough_x, self._rough_g, w = roughly(self.x), roughly(self.g), roughly(self.w)
        x_dots, g_dots = (list(map(roughly, dots)) for dots in (sample.x_dot, sample.grad_output_dot))
        meets_x = [rough_product(g_dot, w) for g_dot in g_dots]
        meets_g = [rough_product(x_dot, w.t()) for x_dot in x_dots]
        dots = zip(x_dots, g_dots, strict=True)
        self._probes = [(self._met_by_weight(*dot), x, g) for dot, x, g in zip(dots, meets_x, meets_g, strict=True)]

    def _squared_weight_errors(self) -> Tensor:
        """Returns the kinds of errors of each format after the other, (kinds, O, I).

        eW^2 where one quantized weight serves the forward and the grad_input GEMM. Else that of the forward GEMM, that
        of grad_input, and the product of both errors.
        """
        kinds = {name: self._kinds_of_weight_errors(name) for name in self._formats}
        found = self.w.new_empty(sum(map(len, kinds.values())), *self.w.shape)
        for name, of_format in kinds.items():
            rounded = [self.rounded("w", name, contracts) for contracts in (1, 0)[: len(of_format)]]
            self._of_weight[name] = weight_errors(self.w, rounded, found[of_format.start : of_format.stop])
        return found

    def _kinds_of_weight_errors(self, name: str) -> range:
        """Returns where these are in `_weight_errors`."""
        sizes = [1 if FORMATS[other].shares_weight else 3 for other in self._formats]
        index = self._formats.index(name)
        first = sum(sizes[:index])
        return range(first, first + sizes[index])

    def _on_weight(self, found: Tensor, name: str) -> Tensor:
        """Returns a format's part of what `_met_by_weight` returned, (3, 2): forward, grad_input, both."""
        where = self._kinds_of_weight_errors(name)
        kinds = found[where.start : where.stop]  # by a list of them, the host would wait for the device
        if len(kinds) == 1:
            return kinds[0]
        forward, grad_input, (of_first, of_second, of_both) = kinds
        # (a eW + b eW')^2 = a^2 eW^2 + b^2 eW'^2 + 2 a b eW eW', and 2 a b = (a + b)^2 - a^2 - b^2.
        both = forward[0] + grad_input[1] + of_both - of_first - of_second
        return torch.stack([forward[0], grad_input[1], both])

    def _met_by_weight(self, x_dot: Tensor, g_dot: Tensor) -> Tensor:
        """Returns what eW does along one probe's direction, in the forward GEMM, in grad_input and in both.

        These two add before the square, since the weight's error is the same for all tokens. (Kinds of errors, 3, 2):
        what `Sizes.of_pieces` takes.
        """
        x, x_dot = self._by_piece(self._rough_x), self._by_piece(x_dot)
        channels = zip(
            self._by_output(g_dot),
            self._by_output(self._rough_g),
            self._weight_errors.split(self._rows, 1),
            strict=True,
        )
        sums = []
        for g_dot_r, g_r, errors in channels:
            forward = rough_product(g_dot_r.mT, x, True)  # (R, O, L) x (R, L, I)
            grad_input = rough_product(g_r.mT, x_dot, True)  # (R, O, L) x (R, L, I)
            sums.append(error_squares(forward, grad_input, errors))
        return reduce(torch.add, sums)

    def _by_output(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Returns (n, O) as pieces (R, L, O), of so many outputs that their (R, O, I) products may be held at once."""
        return torch.split(self._by_piece(tensor), self._rows, 2)

    @property
    def _rows(self) -> int:
        return outputs_at_once(self.sizes.pieces, self.w.shape[1])

    def _by_piece(self, tensor: Tensor) -> Tensor:
        """Returns (n, C) as (R, L, C): pieces of the sample, as even as can be, shorter ones with zeros at the end."""
        pieces = self.sizes.pieces
        if tensor.shape[0] % pieces == 0:
            return tensor.view(pieces, tensor.shape[0] // pieces, tensor.shape[1])
        return pad_sequence(list(tensor.tensor_split(pieces)), batch_first=True)

    def weight_divergences(self, name: str, keys: tuple[int, int]) -> dict[str, Squares]:
        """Returns row (a GEMM or "layer") -> squared weight divergence; the mean over the probes' squares.

        Args:
            name: format.
            keys: of the random rounding of G, along O and along T, for formats that round it so.
        """
        return read_all([self.pending_weight_divergences(name, keys)])[0]

    def pending_weight_divergences(self, name: str, keys: tuple[int, int]) -> Pending[dict[str, Squares]]:
        """As `weight_divergences`, not waiting for the device."""
        return self.finishing.squares(name, self.divergence_sums(name, keys))

    def divergence_sums(self, name: str, keys: tuple[int, int]) -> Tensor:
        """Returns what `weight_divergences` is made from."""
        is_random = FORMATS[name].gradient.stochastic
        on_weight = [self._on_weight(found, name) for found, _, _ in self._probes]
        key = keys[0] if is_random else None
        figures, shared = [], []
        for (_, meets_x, meets_g), met in zip(self._probes, self._met_by_x, strict=True):
            of_x, of_g = self._met_errors("x", name, None, meets_x), self._met_errors("g", name, key, meets_g)
            figures += of_x.figures + of_g.figures[: 1 if is_random else None]
            shared.append(met.across_channels(self._by_piece(of_x.error), of_x.in_channel()))
        on_tokens = [norms(figures).square_()] if figures else []
        on_update = self._grad_weight_sums(name, keys[1] if is_random else None)
        return torch.cat([*(found.flatten() for found in on_weight), *shared, *on_tokens, on_update])

    @cached_property
    def _met_by_x(self) -> list[MetByChannels | MetByTokens]:
        """What eX meets along each probe's direction, with what all formats need of it."""
        return [met_by(self._by_piece(meets_x)) for _, meets_x, _ in self._probes]

    def _met_errors(self, operand: str, name: str, key: int | None, meets: Tensor) -> MetErrors:
        """Returns what the errors of "x" or "g" do, each of which meets a number, (n, channels)."""
        exact, rounded, pieces = getattr(self, operand), self.rounded(operand, name, 1, key), self.sizes.pieces
        if meets_by_kernel(exact, pieces):
            return met_errors_by_kernel(exact, rounded, meets, pieces)
        error = rounded - exact
        products = meets * error
        channels = self._by_piece(products).sum(1)
        return MetErrors(error, [products, products.sum(1), channels, channels.sum(0)])

    def _grad_weight_sums(self, name: str, key: int | None) -> Tensor:
        """Returns what `Sizes.of_pieces` takes, for J (Q(G)^T Q(X) - G^T X), no derivative of the model needed."""
        if self._pushforward is None or not (FORMATS[name].gradient.quantized or FORMATS[name].activation.quantized):
            return self.w.new_zeros(2)
        left, right = self.gradient_error(name, key)
        if isinstance(self._pushforward, Tensor):
            parts = zip(left.split(self._rows, 2), self._pushforward.split(self._rows), strict=True)
            # (R, O, 2 L) x (R, 2 L, I)
            found = (scaled_squares(rough_product(g_r.mT, right, True), factors) for g_r, factors in parts)
            return reduce(torch.add, found)
        return self._function_sums(self._pushforward, left, right)

    def gradient_error(self, name: str, key: int | None) -> tuple[Tensor, Tensor]:
        """Returns operands by piece of Q(G)^T Q(X) - G^T X, one product of twice the length, not two to subtract.

        They are for `rough_product`, in FP32 or BF16.
        """
        g, x = self.rounded("g", name, 0, key), self.rounded("x", name, 0)
        if not is_split(g, x):
            return self._joined(g, -self.g), self._joined(x, self.x)
        # The same as eG^T Q(X) + G^T eX, all of whose terms are small: one BF16 product will do.
        pieces = self.sizes.pieces
        if len(x) % pieces == 0:
            return joined_errors(self.g, g, pieces, True), joined_errors(self.x, x, pieces, False)
        return self._joined(g - self.g, self.g), self._joined(x, x - self.x)

    def _joined(self, first: Tensor, second: Tensor) -> Tensor:
        """Returns two (n, C) by piece, one after the other, (R, 2 L, C)."""
        return torch.cat([self._by_piece(first), self._by_piece(second)], 1)

    def _function_sums(self, pushforward: Callable[[Tensor], Tensor], left: Tensor, right: Tensor) -> Tensor:
        """As `_grad_weight_sums`, of a function of whole changes, which are products of left and right by piece."""
        own: list[Tensor] = []
        totals: list[Tensor] = []
        at_once = max(1, AT_ONCE // max(1, self.w.numel()))
        for g_r, x_r in zip(left.split(at_once), right.split(at_once), strict=True):
            changes = rough_product(g_r.mT, x_r)  # (R, O, 2 L) x (R, 2 L, I)
            of_gradient = norms([changes]), changes.sum(0)
            for change in changes:
                change.copy_(pushforward(change))
            own.append(torch.cat([of_gradient[0], norms([changes])]).square_())
            totals.append(torch.stack([of_gradient[1], changes.sum(0)]))
        change, moved = reduce(torch.add, totals)
        # (2, 2): of the gradient's change and of the update's; own and total.
        sums = torch.stack([reduce(torch.add, own), norms([change, moved]).square_()], 1)
        if isinstance(pushforward, UpdateChange):
            return sums[1] * bend(self.sizes, pushforward, change, sums[0], sums[1, 1])
        return sums[1]

    def loss_divergence(self, name: str, form: str) -> float:
        """Returns the loss divergence (not yet relative to the loss) of quantizing the forward GEMM.

        Args:
            name: format.
            form: one of `SnipConfig.loss_estimator`.
        """
        return read_all([self.pending_loss_divergence(name, form)])[0]

    def pending_loss_divergence(self, name: str, form: str) -> Pending[float]:
        """As `loss_divergence`, not waiting for the device."""
        return self.finishing.loss_divergence(form, self.loss_sum(name, form))

    def loss_sum(self, name: str, form: str) -> Tensor:
        """Returns what a form that needs no gradient of the whole step is made from, (1,)."""
        return self.saliency_sums[name] if form == "saliency" else self.fisher_sum(name)

    @cached_property
    def saliency_sums(self) -> dict[str, Tensor]:
        """Format -> sum over the weight's elements of |G^T X * eW|, (1,). The gradient is made once, and not kept."""
        gradient = product(self.g.t(), self.x)  # (O, n) x (n, I)
        errors = ((name, self.rounded("w", name, 1) - self.w) for name in self._formats)
        return {name: error.mul_(gradient).abs_().sum()[None] for name, error in errors}

    def fisher_sum(self, name: str) -> Tensor:
        """Returns the sum over tokens of (G_t . E_t)^2, with E = Q(X) Q(W)^T - X W^T, (1,)."""
        x, w = self.rounded("x", name, 1), self.rounded("w", name, 1)
        if is_split(self.g, w):  # E = Q(X) eW^T + eX W^T
            error = self._of_weight[name].first
            along = rough_product(self._rough_g, w - self.w if error is None else error)
            along = rises_of_tokens(along, self.g_w, self.x, x)
        else:
            along = product(self.g, w).mul_(x).addcmul_(self.g_w, self.x, value=-1).sum(1)
        return along.square_().sum()[None]

    def errors(self, name: str) -> dict[str, tuple[float, float]]:
        """Returns row -> (absolute, relative) error of its operands, rounded to nearest."""
        return read_all([self.pending_errors(name)])[0]

    def pending_errors(self, name: str) -> Pending[dict[str, tuple[float, float]]]:
        """As `errors`, not waiting for the device."""
        return self.finishing.errors(self.error_norms(name))

    def error_norms(self, name: str) -> Tensor:
        """Returns the norms that `errors` is made from."""
        of_weight = torch.stack([self.weight_error(name, contracts) for contracts in (1, 0)]).sqrt_()
        of_operands = [
            error_norms(x, [self.rounded(operand, name, contracts) for contracts in (1, 0)])
            for operand, x in (("x", self.x), ("g", self.g))
        ]
        return torch.cat([of_weight, *of_operands, self._norms])

    @cached_property
    def _norms(self) -> Tensor:
        """Of W, X and G."""
        return norms([self.w, self.x, self.g])

    def weight_error(self, name: str, contracts: int = 1) -> Tensor:
        """Returns |eW|^2, of the weight as the GEMM sees it that contracts this dimension of it."""
        sums = self._of_weight[name].sums
        return sums[1 if contracts == 0 and len(sums) > 1 else 0]

    def mean_square_of_update(self) -> Tensor:
        """Returns |J|^2 / (O I), (): the mean square of the elements of the update's derivative, relative to |W|.

        Where J is not elementwise, from one random direction, whose mean over directions it is. 0 without an update.
        """
        if self._pushforward is None:
            return self.w.new_zeros(())
        if isinstance(self._pushforward, Tensor):
            return self._pushforward.square().mean()
        return self._pushforward(normal(0, self.w.shape, self.w.device)).square().mean()

    def take_rounded(self, name: str, keys: tuple[int, int], rounded: Sequence[Tensor]) -> None:
        """Takes the randomly rounded G of a format, as `whole_layer` rounded it, in place of rounding it."""
        for contracts, key, one in zip((1, 0), keys, rounded, strict=True):
            self._quantized["g", name, contracts, key] = one

    def rounded(self, operand: str, name: str, contracts: int, key: int | None = None) -> Tensor:
        """Returns "x", "g" or "w" as a GEMM sees it that contracts this dimension of it; each is rounded once."""
        at = (operand, name, contracts, key)
        if at not in self._quantized:
            kind, amax = OPERANDS[operand], self._amaxes.get(operand)
            self._quantized[at] = fake_quantize(getattr(self, operand), FORMATS[name], kind, contracts, key, 0, 1, amax)
        return self._quantized[at]


def outputs_at_once(pieces: int, inputs: int) -> int:
    """Returns of how many outputs products (R, O, I) may be held at once.

    If it can be, a multiple of 128: where rows of BF16 begin off multiples of 16 bytes, cuBLAS takes slow kernels.
    """
    most = max(1, AT_ONCE // max(1, pieces * inputs))
    return most - most % TILE if most >= TILE else most


def finishing(sample: LayerSample, micro_batches: int, batch: BatchSizes) -> Finishing:
    """Returns what makes results from the sums of a sample."""
    count = sample.x.shape[0]
    pieces = min(max(1, count), max(2, min(MOST_PIECES, count // TILE)))
    # A part of a micro-batch, of the mean loss of its own, is to the step what one of more micro-batches is.
    sizes = Sizes(sample.tokens / max(1, count), sample.scale, pieces, micro_batches * batch.parts)
    return Finishing(sizes, batch, len(sample.x_dot))


def bend(sizes: Sizes, pushforward: UpdateChange, change: Tensor, sums: Tensor, moved: Tensor) -> Tensor:
    """Returns |h(g + d) - h(g)|^2 / |J d|^2 for an error d of a whole step.

    d is the sample's error, drawn out to the norm that the step's error has.

    Args:
        sizes: of the sample.
        pushforward: of h.
        change: the sample's error in the gradient.
        sums: of it, as `Sizes.of_pieces` takes them.
        moved: |J change|^2.
    """
    weights = [sizes.of_pieces(*one).step for one in ((1.0, 0.0), (0.0, 1.0))]
    step = weights[0] * sums[0] + weights[1] * sums[1]
    scale = torch.where(sums[1] > 0, step / sums[1], 0.0).clamp(min=0.0)
    in_full = norms([pushforward.in_full(scale.sqrt() * change)]).square_()[0]
    to_first_order = scale * moved
    return torch.where(to_first_order > 0, in_full / to_first_order, 1.0)
