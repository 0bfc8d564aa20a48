"""Whether the gradients that the optimizer is about to use are those of the loss that was probed, not of a multiple."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from .distributed import squares
from .probe import LayerSample
from .products import product

# Samples of tokens, sums over micro-batches and terms added to the loss change a gradient's norm by less; the loss
# scale of FP16 begins at 65,536.
_MOST = 1000.0


def check_scale(
    samples: Mapping[str, LayerSample], gradients: Mapping[str, Tensor], trained: list[str], gradient_scale: float
) -> None:
    """Compares the gradient of one layer, the last one, with what the probe saw there. Collective where it is sharded.

    Args:
        samples: layer -> sample, of the layers that this rank owns.
        gradients: layer -> the optimizer's gradient, (O, I).
        trained: layers with a gradient, the same on all ranks that share them.
        gradient_scale: what clipping multiplied the gradients by.

    Raises:
        ValueError: they differ by a factor that no batch explains.
    """
    if not trained:
        return
    name = trained[-1]
    norm = squares([gradients[name]])[0] ** 0.5 / (gradient_scale or 1.0)
    sample = samples.get(name)
    if sample is None or not sample.x.shape[0]:
        return
    # (O, n) x (n, I), from the sample to all tokens.
    of_loss = float(product(sample.grad_output.t(), sample.x).norm()) * sample.tokens / sample.x.shape[0]
    if not (of_loss > 0 and norm > 0 and math.isfinite(of_loss)):
        return
    ratio = norm / of_loss
    if not 1 / _MOST < ratio < _MOST:
        raise ValueError(
            f"The gradients are about {ratio:.2g} times those of the model's loss (norms at layer {name!r}), expected "
            "about 1. With a GradScaler, unscale them (scaler.unscale_(optimizer)) before before_optimizer_step; "
            "otherwise train on the loss that the model returns."
        )
