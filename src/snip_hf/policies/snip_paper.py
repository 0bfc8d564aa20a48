"""The policy "snip-paper": the SNIP paper's own estimator, which needs only added noise and Frobenius norms.

We know the method from the paper's abstract and summaries (arXiv:2602.01410), not its formulas or code. Each refresh
runs three passes over one micro-batch: one unchanged, one with Gaussian noise in the forward pass, and one with noise
in the backward pass. The estimator uses Frobenius norms of activations, weights, gradients, their quantization errors
and AdamW's state. For each linear it computes a loss divergence relative to the loss, a weight divergence relative to
the weight, and their sum Q = dL + dW, which the integer program minimizes.

Legend: X (T, I), W (O, I), G (T, O) of one linear, g = G^T X its weight gradient, r = |e| / |.| the relative error of
an operand, J the derivative of the optimizer's update, |.| the Frobenius norm, T tokens.

    dL = sqrt( |G W|^2 |eX|^2 / (T I) + |g|^2 |eW|^2 / (O I) ) / Loss
    dW = |J| / sqrt(O I) * |dg| / |W|,   |dg|^2 = a^2 (rX^2 + rW^2) + b^2 (rG^2 + rW^2)

a is |change of g| in the pass with noise on inputs, b is the same with noise on output gradients. Both are divided by
the relative size of the noise.

Our readings, where the sources leave gaps:

1.  One pass adds noise in all linears at once, to the input (or output gradient) of each. Its root mean square is 1% of
    the tensor's. A linear's own weight gradient uses the noisy input (or output gradient), as it uses a quantized one.
2.  A linear's dW is the change of its own update. The noise is everywhere at once, so effects of other linears on this
    update stand in for this linear's effects on theirs.
3.  Responses are linear in the noise: a relative error r changes g by r times the change from unit noise. The paper has
    three passes, so differences are one-sided: noisy pass minus unchanged pass.
4.  No pass adds noise to weights. In the forward pass, an error of the weight counts like an input error of equal
    relative size; in the backward pass, like an error of the output gradient. Unstructured errors of either operand
    change the product by equal amounts.
5.  Squared errors of different operands add up, and so do the squares of the two terms of dL. dL is the first-order
    change of the loss for errors in a random direction.
6.  J and the change of g are combined by their norms only: the root mean square of J's elements times |dg|. For Adam,
    AdamW and SGD, J is elementwise and known. For others, |J| is estimated from one random direction.
7.  eG is rounded as in training along O, stochastically in FP4. eX and eW are rounded along I, as in the forward GEMM.
8.  Q adds dL and dW without dividing them by totals first, unlike the objectives of "snip".
9.  Beyond one micro-batch of one process: the tokens of all ranks form one micro-batch. Changes of g are independent
    between micro-batches of a step, between parts of one, and for tokens that are not sampled. If `probes` is above 1,
    the squares of several noise draws are averaged.

Rows of single GEMMs hold the two terms of |dg|^2: "forward" has the term with a, "grad_input" the term with b, and
"grad_weight" 0, because both terms already include its errors. These rows are not divergences of single GEMMs, so the
policy refuses granularity "gemm". It also refuses layers with several matrices, and frozen layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter

import torch
from torch import Tensor

from ..config import SnipConfig
from ..estimation.criterion import LayerCriterion
from ..estimation.extrapolation import Squares
from ..estimation.layer_sums import Deferred
from ..estimation.noise import PLACES
from ..estimation.products import product
from ..estimation.samples import LayerSample
from ..estimation.table import LAYER, Divergence, DivergenceTable
from ..layers.layer import SnipLayer
from ..numerics.formats import FORMATS
from .registry import Policy, first_total, register_policy

# Relative size of the noise (ours): small against the relative error of FP4 (about 10%), large against FP32's.
RELATIVE_NOISE = 1e-2


class PaperEstimate(LayerCriterion):
    """Both divergences of one linear, from norms and from the response of its gradient to noise."""

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
                    f"policy='snip-paper' needs the update of every swapped weight, but layer {name!r} is not "
                    "trained. Leave it out with skip_modules, or use policy='snip'."
                )

    @classmethod
    def trace_of(cls, layer: str, sample: LayerSample, directions: Sequence[Tensor]) -> Tensor:
        """Returns |change of the sampled gradient|^2 / (relative noise size)^2 for each of `PLACES`, (2,).

        Averages over the noise draws; zeros if there are none.
        """
        found = []
        for x_dot, g_dot in zip(sample.x_dot, sample.grad_output_dot, strict=True):
            # (G + r g)^T (X + r x) - G^T X = r (g^T X + (G + r g)^T x)
            left = torch.cat([g_dot, sample.grad_output + RELATIVE_NOISE * g_dot])
            found.append(product(left.t(), torch.cat([sample.x, x_dot])).square().sum())  # (O, 2 n) x (2 n, I)
        if not found:
            return sample.x.new_zeros(len(PLACES))
        return torch.stack(found).view(-1, len(PLACES)).mean(0)

    def weight_divergences(self, name: str, keys: tuple[int, int]) -> Deferred[dict[str, Squares]]:
        sums = self.sums
        key = keys[0] if FORMATS[name].gradient.stochastic else None
        operands = {"x": sums.x, "w": sums.w, "g": sums.g}
        roundings = {"x": None, "w": None, "g": key}
        squares = [
            square.sum()
            for operand, tensor in operands.items()
            for square in (tensor.square(), (sums.rounded(operand, name, 1, roundings[operand]) - tensor).square())
        ]
        responses = sums.w.new_zeros(len(PLACES)) if self.trace is None else self.trace
        # Scales from the sampled tokens to all tokens, and from one micro-batch to the mean over the step's.
        scale = sums.sizes.scale / sums.sizes.micro_batches
        factor = scale * sums.mean_square_of_update()
        return Deferred(torch.cat([torch.stack(squares), responses * factor]), _rows_of)

    def loss_divergence(self, name: str, form: str) -> Deferred[float]:
        sums = self.sums
        # T is the number of tokens of the batch; sums of |G|^2 fall with the number of labels in the mean loss.
        elements = max(1, sums.batch.tokens) * sums.x.shape[1] * sums.batch.parts
        on_x = sums.g_w.square().sum() * (sums.rounded("x", name, 1) - sums.x).square().sum() / elements
        on_w = product(sums.g.t(), sums.x).square().sum() * sums.weight_error(name) / sums.w.numel()
        return Deferred((sums.sizes.token_ratio * (on_x + on_w).sqrt())[None], itemgetter(0))


def _rows_of(values: list[float]) -> dict[str, Squares]:
    """Returns row -> squared weight divergence, from squared norms, errors and responses of the update."""
    x, ex, w, ew, g, eg, on_input, on_gradient = values
    errors = {"x": _ratio(ex, x), "w": _ratio(ew, w), "g": _ratio(eg, g)}
    forward = on_input * (errors["x"] + errors["w"])
    backward = on_gradient * (errors["g"] + errors["w"])
    squares = {"forward": forward, "grad_input": backward, "grad_weight": 0.0, LAYER: forward + backward}
    return {row: Squares(square, 0.0) for row, square in squares.items()}


def _ratio(error: float, norm: float) -> float:
    return error / norm if norm > 0 else 0.0


def quality(config: SnipConfig, table: DivergenceTable) -> Callable[[Divergence], float]:
    """Returns Q = dL + dW of a row, divided by the total with everything in the least precise format.

    The common divisor changes no plan, but keeps costs near 1 for the solver.
    """
    total = first_total(config, table, _sum_of) or 1.0
    return lambda row: _sum_of(row) / total


def _sum_of(row: Divergence) -> float:
    return row.loss_divergence + row.weight_divergence


def _check(config: SnipConfig) -> None:
    if config.objective == "gradients":
        raise ValueError(
            "policy='snip-paper' measures the optimizer's update; got objective='gradients'. Leave objective out, or "
            "use policy='snip'."
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
