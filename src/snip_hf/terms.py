"""What does a format do to one layer? Sums over what the probe sampled there.

Legend: T tokens of the micro-batch, n of them sampled, I in_features, O out_features. X (n, I), G (n, O) and W (O,
I) are the layer's input, output gradient and weight in high precision; eX, eG, eW their quantization errors; Xdot, Gdot
the derivatives along the probe's direction. Formulas: docs/method.md, sections 2 and 3.

A divergence has two parts. What a rounding error does to the update on the average over tokens comes back at every step
(the bias); the rest is drawn anew with every batch. The sample is cut into pieces: products of different pieces tell
the bias, because what is random in them is independent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .formats import FORMATS, GEMMS, TILE
from .probe import LayerSample
from .quantize import COLUMN_TILE, ROW_TILE, SQUARE_TILE, fake_quantize

LAYER = "layer"
ROWS = (*GEMMS, LAYER)
# Pieces of a sample, at most; more separate bias from noise better and cost more products.
_MOST_PIECES = 8


@dataclass(frozen=True)
class Squares:
    """Squared divergence of one step, and the part of it that comes back at every step.

    Both hold differences of noisy sums, and may come out below 0 where the true figure is small.
    """

    step: float
    bias: float

    def __add__(self, other: Squares) -> Squares:
        return Squares(self.step + other.step, self.bias + other.bias)

    @classmethod
    def mean(cls, squares: Sequence[Squares]) -> Squares:
        """Returns the mean; zeros of none."""
        count = max(1, len(squares))
        return cls(sum(one.step for one in squares) / count, sum(one.bias for one in squares) / count)


class _Errors(NamedTuple):
    """What rounding to one format does to the operands."""

    weight_squared: Tensor
    """(O, I)"""
    x: Tensor
    """(n, I), rows tiled along I"""
    g: Tensor
    """(n, O), rows tiled along O"""
    g_is_random: bool


class LayerTerms:
    """The sums of one layer, prepared once for all formats.

    Args:
        sample: what the probe kept of the layer.
        weight: (O, I).
        pushforward: how a gradient's change (O, I) changes the optimizer's update, relative to |W|; None for a layer
            that is not trained.
        micro_batches: micro-batches of the optimizer step; the sampled one stands for all.
    """

    def __init__(
        self,
        sample: LayerSample,
        weight: Tensor,
        pushforward: Callable[[Tensor], Tensor] | None,
        micro_batches: int,
    ) -> None:
        self.x, self.g, self.w = sample.x, sample.grad_output, weight.to(torch.float32)
        self._pushforward = pushforward
        self._micro_batches = micro_batches
        self._tokens = sample.tokens
        count = self.x.shape[0]
        self._scale = sample.scale
        self._token_ratio = sample.tokens / max(1, count)
        # Sums of squares over independent tokens: from the sample to all tokens, and to the mean of all micro-batches.
        self._token_scale = self._scale / micro_batches
        pieces = torch.arange(count).tensor_split(max(2, min(_MOST_PIECES, count // TILE)))
        self._pieces = [slice(int(piece[0]), int(piece[-1]) + 1) for piece in pieces if len(piece)]
        self._g_w = self.g @ self.w  # (n, O) x (O, I)
        self._quantized: dict[tuple[str, str, tuple[int, int], int | None], Tensor] = {}
        self._probes = [self._meetings(*dots) for dots in zip(sample.x_dot, sample.grad_output_dot, strict=True)]

    def _meetings(self, x_dot: Tensor, g_dot: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        """Returns what the errors meet along one probe's direction.

        For eW in the forward GEMM, in grad_input and in both, which add before the square since one quantized weight
        serves both: (sum over pieces of squares, square of the sum), (O, I) each. Then what eX and eG meet: (n, I) and
        (n, O).
        """
        pairs = [[torch.zeros_like(self.w), torch.zeros_like(self.w)] for _ in range(3)]
        for piece in self._pieces:
            forward = g_dot[piece].t() @ self.x[piece]  # (O, n) x (n, I)
            grad_input = self.g[piece].t() @ x_dot[piece]  # (O, n) x (n, I)
            for (own, total), part in zip(pairs, (forward, grad_input, forward + grad_input), strict=True):
                own.addcmul_(part, part)
                total += part
        on_weight = [(own, total.square_()) for own, total in pairs]
        return (*on_weight, (g_dot @ self.w, x_dot @ self.w.t()))  # (n, O) x (O, I), (n, I) x (I, O)

    def weight_divergences(self, name: str, keys: tuple[int, int]) -> dict[str, Squares]:
        """Returns row (a GEMM or "layer") -> squared weight divergence; the mean over the probes' squares.

        Args:
            name: format.
            keys: of the random rounding of G in FP4, along O and along T.
        """
        is_random = name == "fp4"
        errors = _Errors(
            (self._rounded("w", name, SQUARE_TILE) - self.w).square_(),
            self._rounded("x", name, ROW_TILE) - self.x,
            self._rounded("g", name, ROW_TILE, keys[0] if is_random else None) - self.g,
            is_random,
        )
        forward, grad_input, both = [], [], []
        for on_forward, on_grad_input, on_both, (meets_x, meets_g) in self._probes:
            of_x = self._of_tokens(meets_x * errors.x)
            of_g = self._of_tokens(meets_g * errors.g, errors.g_is_random)
            forward.append(of_x + self._of_weight(on_forward, errors))
            grad_input.append(of_g + self._of_weight(on_grad_input, errors))
            both.append(of_x + of_g + self._of_weight(on_both, errors))
        grad_weight = self._grad_weight(name, keys[1] if is_random else None)
        return {
            "forward": Squares.mean(forward),
            "grad_input": Squares.mean(grad_input),
            "grad_weight": grad_weight,
            LAYER: Squares.mean(both) + grad_weight,
        }

    def _of_weight(self, met: tuple[Tensor, Tensor], errors: _Errors) -> Squares:
        """The error of a weight meets the same sum over tokens everywhere; elements are independent."""
        own, total = (float((square * errors.weight_squared).sum()) for square in met)
        return self._extrapolate(own, total)

    def _of_tokens(self, products: Tensor, is_random: bool = False) -> Squares:
        """The errors of activations: elements are independent but for what they share with their token or channel.

        Args:
            products: error times what it meets, (n, channels).
            is_random: stochastic rounding, which makes every element independent and unbiased.
        """
        elements = float(products.square().sum())
        if is_random:
            return Squares(self._token_scale * elements, 0.0)
        by_token = self._token_scale * (float(products.sum(1).square().sum()) - elements)
        channels = products.new_zeros(len(self._pieces), products.shape[1])
        for index, piece in enumerate(self._pieces):
            channels[index] = products[piece].sum(0)
        by_channel = self._extrapolate(float(channels.square().sum()), float(channels.sum(0).square().sum()))
        # Elements are in both sums, and count once.
        return Squares(by_channel.step + by_token, by_channel.bias)

    def _grad_weight(self, name: str, key: int | None) -> Squares:
        """Returns |J (Q(G)^T Q(X) - G^T X)|^2, no derivative of the model needed."""
        if self._pushforward is None:
            return Squares(0.0, 0.0)
        g, x = self._rounded("g", name, COLUMN_TILE, key), self._rounded("x", name, COLUMN_TILE)
        own, total = 0.0, torch.zeros_like(self.w)
        for piece in self._pieces:
            moved = self._pushforward(g[piece].t() @ x[piece] - self.g[piece].t() @ self.x[piece])
            own += float(moved.square().sum())
            total += moved
        return self._extrapolate(own, float(total.square().sum()))

    def _extrapolate(self, own: float, total: float) -> Squares:
        """From the pieces of the sample to all tokens of all micro-batches.

        Args:
            own: sum over the R pieces of |c_r|^2.
            total: |sum of c_r|^2. Its cross terms are R (R - 1) times the square of what a piece does on the average.
        """
        pieces = len(self._pieces)
        mean = (total - own) / (pieces * (pieces - 1)) if pieces > 1 else 0.0
        count = pieces * self._scale
        # Over k micro-batches there are k * count pieces, each of 1 / k the weight.
        batches = self._micro_batches
        step = count * own / (max(1, pieces) * batches) + count * (count - 1 / batches) * mean
        return Squares(step, count**2 * mean)

    def loss_divergence(self, name: str, form: str, gradient: Tensor | None = None) -> float:
        """Returns the estimated rise of the loss (not yet relative) from quantizing the forward GEMM.

        Args:
            name: format.
            form: "token-fisher", "taylor" or "norm".
            gradient: of the weight, (O, I), over all that the step has seen; for "taylor".
        """
        x, w = self._rounded("x", name, ROW_TILE), self._rounded("w", name, SQUARE_TILE)
        if form == "norm":
            grad_weight = self.g.t() @ self.x
            on_x = self._g_w.square().sum() * (x - self.x).square().sum() / (self._tokens * self.x.shape[1])
            on_w = grad_weight.square().sum() * (w - self.w).square().sum() / self.w.numel()
            return self._token_ratio * math.sqrt(on_x + on_w)
        # G_t . E_t with E = Q(X) Q(W)^T - X W^T
        along = ((self.g @ w) * x - self._g_w * self.x).sum(1)
        fisher = float(self._tokens / 2 * self._scale * along.square().sum())
        return fisher + (float((gradient * (w - self.w)).sum()) if form == "taylor" and gradient is not None else 0.0)

    def errors(self, name: str) -> dict[str, tuple[float, float]]:
        """Returns row -> (absolute, relative) error of its operands, rounded to nearest."""
        x_row, x_column = self._error("x", name, ROW_TILE), self._error("x", name, COLUMN_TILE)
        g_row, g_column = self._error("g", name, ROW_TILE), self._error("g", name, COLUMN_TILE)
        w = self._error("w", name, SQUARE_TILE)
        pairs = {"forward": (x_row, w), "grad_input": (g_row, w), "grad_weight": (g_column, x_column)}
        sums = {gemm: (left[0] + right[0], left[1] + right[1]) for gemm, (left, right) in pairs.items()}
        return {**sums, LAYER: (sum(value[0] for value in sums.values()), sum(value[1] for value in sums.values()))}

    def _error(self, operand: str, name: str, tile: tuple[int, int]) -> tuple[float, float]:
        """Returns the Frobenius norm of an operand's rounding error, for all tokens, and relative to the operand."""
        x = getattr(self, operand)
        absolute = float(torch.linalg.vector_norm(self._rounded(operand, name, tile) - x))
        norm = float(torch.linalg.vector_norm(x))
        ratio = 1.0 if operand == "w" else self._token_ratio
        return absolute * ratio**0.5, absolute / norm if norm > 0 else 0.0

    def _rounded(self, operand: str, name: str, tile: tuple[int, int], key: int | None = None) -> Tensor:
        """Returns "x", "g" or "w" as a GEMM in this format sees it; each is rounded once."""
        at = (operand, name, tile, key)
        if at not in self._quantized:
            self._quantized[at] = fake_quantize(getattr(self, operand), FORMATS[name], tile, key)
        return self._quantized[at]
