"""The policy "snip-paper": the SNIP paper's own estimator, from noise and Frobenius norms alone.

What is known of it (arXiv:2602.01410; its abstract and summaries, not its formulas or its code): per refresh three
passes over one micro-batch, one as it is, one with Gaussian noise in the forward pass, one with noise in the backward
pass; Frobenius norms of activations, weights, gradients, their quantization errors and AdamW's state; a loss divergence
relative to the loss, a weight divergence relative to the weight, Q = dL + dW for each linear; and the integer program.

Legend: X (T, I), W (O, I), G (T, O) of one linear, g = G^T X its weight's gradient, r = |e| / |.| the relative error
of an operand, J the derivative of the optimizer's update, |.| the Frobenius norm, T tokens.

    dL = sqrt( |G W|^2 |eX|^2 / (T I) + |g|^2 |eW|^2 / (O I) ) / Loss
    dW = |J| / sqrt(O I) * |dg| / |W|,   |dg|^2 = a^2 (rX^2 + rW^2) + b^2 (rG^2 + rW^2)

a is |change of g| in the pass with noise on inputs, b the same with noise on output gradients, each per unit of the
noise's relative size.

Our readings, where the sources leave holes:

1.  Noise is added in all linears of one pass, to each one's own input (or output gradient), with a root mean square of
    1% of its tensor's. The weight's own gradient is taken with the noisy input (or output gradient), as with a
    quantized one.
2.  A linear's dW is the change of its own update. What its errors do to the updates of others is not told apart from
    what theirs do to its own: the noise is everywhere at once.
3.  Responses are linear in the size: a relative error r of Gaussian kind changes g by r times what unit noise does.
    A pass without noise is one side of the difference, since the paper has three passes.
4.  No pass has noise on weights. An error of the weight counts as one of the input of equal relative size in the
    forward pass, and as one of the output gradient in the backward pass: for errors without a pattern both change the
    product by as much.
5.  Errors of different operands add as squares. So do the two terms of dL, which is the first-order change of the loss
    for errors in a random direction.
6.  J meets the change of g in norm only: the root mean square of J's elements times |dg|. For Adam, AdamW and SGD J is
    elementwise and known; for others |J| is taken from one random direction.
7.  eG is rounded as training does it, at random in FP4, along O; eX and eW along I, as in the forward GEMM.
8.  Q adds dL and dW as they are. There is no
    division by totals, as the objectives of "snip" have it.
9.  Beyond one micro-batch of one process: the tokens of all ranks are one micro-batch; changes of g in different
    micro-batches of a step, in different parts of one, and in tokens that are not sampled are independent. With
    `probes` above 1, squares of several draws of noise are averaged.

Rows of single GEMMs hold the two terms of |dg|: that with a under "forward", that with b under "grad_input", 0 under
"grad_weight", whose own errors both passes include. They are no divergences of single GEMMs, and so granularity "gemm"
is refused. So are layers of several matrices and frozen ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter

import torch
from torch import Tensor

from ..config import ALL, SnipConfig
from ..estimation.criterion import LayerCriterion
from ..estimation.extrapolation import Squares
from ..estimation.layer_sums import Deferred
from ..estimation.products import product
from ..estimation.samples import PLACES, LayerSample
from ..estimation.table import LAYER, Divergence, DivergenceTable
from ..layers.layer import SnipLayer
from ..numerics.formats import FORMATS
from .registry import Policy, first_total, register_policy

# Relative size of the noise (ours): small against the relative error of FP4 (about 10%), large against FP32's.
RELATIVE_NOISE = 1e-2


class PaperEstimate(LayerCriterion):
    """Both divergences of one linear by its norms and its gradient's responses to noise."""

    noise = RELATIVE_NOISE

    @classmethod
    def check_layers(cls, layers: Mapping[str, SnipLayer], is_trained: Callable[[Tensor], bool]) -> None:
        for name, layer in layers.items():
            if len(layer.matrices(torch.empty(layer.weight.shape, device="meta"))) > 1:
                raise ValueError(
                    f"policy='snip-paper' cannot judge layer {name!r}, which has several matrices; expected linears of "
                    "one matrix. Leave such layers out with skip_modules, or use policy='snip'."
                )
            if not is_trained(layer.weight):
                raise ValueError(
                    f"policy='snip-paper' goes by the update of every swapped weight, but layer {name!r} is not "
                    "trained; expected all of them to be. Leave it out with skip_modules, or use policy='snip'."
                )

    @classmethod
    def trace_of(cls, layer: str, sample: LayerSample, directions: Sequence[Tensor]) -> Tensor:
        return squared_responses(sample, RELATIVE_NOISE)

    def weight_divergences(self, name: str, keys: tuple[int, int]) -> Deferred[dict[str, Squares]]:
        sums = self.sums
        key = keys[0] if FORMATS[name].gradient.stochastic else None
        operands = {"x": sums.x, "w": sums.w, "g": sums.g}
        roundings = {"x": None, "w": None, "g": key}
        squares = [
            square.sum()
            for operand, tensor in operands.items()
            for square in (
                tensor.square(),
                (sums.rounded(operand, name, 1, roundings[operand]) - tensor).square(),
            )
        ]
        responses = sums.w.new_zeros(len(PLACES)) if self.trace is None else self.trace
        # From the sample to all tokens, and from one micro-batch to the mean over those of the step.
        scale = sums.sizes.scale / sums.sizes.micro_batches
        factor = scale * sums.mean_square_of_update()
        return Deferred(torch.cat([torch.stack(squares), responses * factor]), _rows_of)

    def loss_divergence(self, name: str, form: str) -> Deferred[float]:
        sums = self.sums
        # T of the formula is the tokens of the batch; sums of |G|^2 fall with the number of labels in the mean loss.
        elements = max(1, sums.batch.tokens) * sums.x.shape[1] * sums.batch.parts
        on_x = sums.g_w.square().sum() * (sums.rounded("x", name, 1) - sums.x).square().sum() / elements
        on_w = product(sums.g.t(), sums.x).square().sum() * sums.weight_error(name) / sums.w.numel()
        return Deferred((sums.sizes.token_ratio * (on_x + on_w).sqrt())[None], itemgetter(0))


def squared_responses(sample: LayerSample, relative: float) -> Tensor:
    """Returns |change of the sampled gradient|^2 per square of the noise's relative size, by `PLACES`, (2,).

    The mean over the draws of noise; zeros of none.

    Args:
        sample: with the differences that passes with noise showed.
        relative: the noise's size.
    """
    found = []
    for x_dot, g_dot in zip(sample.x_dot, sample.grad_output_dot, strict=True):
        # (G + r g)^T (X + r x) - G^T X = r (g^T X + (G + r g)^T x)
        left = torch.cat([g_dot, sample.grad_output + relative * g_dot])
        found.append(product(left.t(), torch.cat([sample.x, x_dot])).square().sum())  # (O, 2 n) x (2 n, I)
    if not found:
        return sample.x.new_zeros(len(PLACES))
    return torch.stack(found).view(-1, len(PLACES)).mean(0)


def _rows_of(figures: list[float]) -> dict[str, Squares]:
    """Returns row -> squared weight divergence, from squares of norms and errors, and of the update's responses."""
    x, ex, w, ew, g, eg, on_input, on_gradient = figures
    errors = {
        "x": _ratio(ex, x),
        "w": _ratio(ew, w),
        "g": _ratio(eg, g),
    }
    forward = on_input * (errors["x"] + errors["w"])
    backward = on_gradient * (errors["g"] + errors["w"])
    squares = {"forward": forward, "grad_input": backward, "grad_weight": 0.0, LAYER: forward + backward}
    return {row: Squares(square, 0.0) for row, square in squares.items()}


def _ratio(error: float, norm: float) -> float:
    return error / norm if norm > 0 else 0.0


def quality(config: SnipConfig, table: DivergenceTable) -> Callable[[Divergence], float]:
    """Returns Q = dL + dW of a row, by its total with everything in the least precise format: solvers like size."""
    total = first_total(config, table, _sum_of) or 1.0
    return lambda row: _sum_of(row) / total


def _sum_of(row: Divergence) -> float:
    return row.loss_divergence + row.weight_divergence


def _check(config: SnipConfig) -> None:
    if config.fixed_plan is not None:
        return
    if config.decides != ALL:
        raise ValueError(
            f"decides={config.decides!r} with policy='snip-paper' cannot work: the paper's estimate is one figure per "
            "linear, and does not tell its forward GEMM apart. Set decides='all', or policy='snip'."
        )


register_policy(
    Policy(
        name="snip-paper",
        cost=quality,
        granularities=("layer",),
        criterion=PaperEstimate,
        weighs_updates=True,
        check=_check,
    )
)
