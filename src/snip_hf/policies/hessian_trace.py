"""The policy "hessian-trace": mean curvature times the weight's squared error. Source: docs/policies.md.

H is the Hessian of the micro-batch's mean loss with respect to one layer's weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..estimation.criterion import LayerCriterion, Rows, forward_only
from ..estimation.layer_sums import Deferred
from ..estimation.products import product
from ..estimation.samples import LayerSample
from .registry import register_criterion


class HessianTrace(LayerCriterion):
    """Mean eigenvalue of H, tr H / numel, times |eW|^2; a negative trace counts as 0."""

    along_noise = True

    @classmethod
    def trace_of(cls, layer: str, sample: LayerSample, directions: Sequence[Tensor]) -> Tensor:
        """Estimates tr H by Hutchinson's method: the mean over the probes of <z, H z>, (1,).

        H z is the derivative of the weight gradient G^T X when all weights move along z. Cross terms with the
        directions of other layers have mean zero. The sum over the sampled tokens is scaled by the token count, because
        terms have either sign.

        Args:
            layer: name of the layer, for errors.
            sample: holds the derivatives along `directions`.
            directions: probe -> z ~ N(0, 1), (O, I).

        Raises:
            ValueError: a direction has no derivative.
        """
        if len(sample.x_dot) != len(directions):
            raise ValueError(
                f"Layer {layer!r} has derivatives along only {len(sample.x_dot)} of {len(directions)} directions, "
                "because a router sent it other tokens, so its Hessian trace is unknown. Use another policy for this "
                "model."
            )
        products = []
        for z, x_dot, g_dot in zip(directions, sample.x_dot, sample.grad_output_dot, strict=True):
            left, right = torch.cat([g_dot, sample.grad_output]), torch.cat([sample.x, x_dot])
            products.append((product(left.t(), right) * z).sum())  # (O, 2 n) x (2 n, I)
        return sample.tokens / max(1, sample.x.shape[0]) * torch.stack(products).mean(0, keepdim=True)

    def rows(self, name: str) -> Deferred[Rows]:
        sums = self.sums
        trace = sums.w.new_zeros(1) if self.trace is None else self.trace
        return Deferred(trace.clamp(min=0.0) / sums.w.numel() * sums.weight_error(name), forward_only)


register_criterion("hessian-trace", HessianTrace)
