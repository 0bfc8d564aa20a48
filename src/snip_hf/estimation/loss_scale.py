"""The loss scale: a check that the optimizer's gradients are those of the probed loss, and not of a multiple of it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from ..parallel.ranks import Attempt, Ranks
from ..parallel.sharding import squares
from .products import product
from .samples import LayerSample

# Samples of tokens, sums over micro-batches and terms added to the loss change a gradient's norm by less; the loss
# scale of FP16 begins at 65,536.
_MOST = 1000.0


def without_loss_scale(
    clip_factor: float,
    samples: Mapping[str, LayerSample],
    gradients: Mapping[str, Tensor],
    trained: list[str],
    data: Ranks,
    attempt: Attempt,
) -> float:
    """Returns what clipping alone multiplied the gradients by, also if a loss scale was divided out at the same time.

    The gradient of the last layer is compared with what the probe saw there. Collective.

    Args:
        clip_factor: norm of the gradients that the optimizer uses / norm of those of the backward pass.
        samples: layer -> sample, of the layers that this rank owns.
        gradients: layer -> the optimizer's gradient, laid out as the weight.
        trained: layers with a gradient, the same on all ranks that share them.
        data: those ranks.
        attempt: gets a ValueError if the gradients are those of a multiple of the loss, by a factor that no batch
            explains.
    """
    ratio = None
    with attempt:
        ratio = _ratio(samples, gradients, trained)
    known = [found for found in data.gather(ratio) if found is not None]
    if not known:
        return clip_factor
    before, after = known[0] / (clip_factor or 1.0), known[0]
    with attempt:
        if not math.isfinite(before):
            raise ValueError(
                f"The norm of the gradients is {clip_factor} times what it was after the backward pass; expected a "
                "finite factor. What clips or scales the gradients made them so."
            )
        if after > _MOST or before < 1 / _MOST:
            raise ValueError(
                f"The gradients are about {after if after > _MOST else before:.2g} times those of the model's loss "
                f"(norms at layer {trained[-1]!r}), expected about 1. With a GradScaler, unscale them "
                "(scaler.unscale_(optimizer)) before before_optimizer_step; otherwise train on the loss that the model "
                "returns."
            )
    # Loss scales are powers of two.
    return clip_factor if before <= _MOST else clip_factor * 2.0 ** round(math.log2(before))


def _ratio(samples: Mapping[str, LayerSample], gradients: Mapping[str, Tensor], trained: list[str]) -> float | None:
    """Returns norm of the optimizer's gradient / norm of the loss's; None where this rank does not know it."""
    if not trained:
        return None
    norm, sample = squares([gradients[trained[-1]]])[0] ** 0.5, samples.get(trained[-1])
    if sample is None or not sample.x.shape[0]:
        return None
    # (O, n) x (n, I), from the sample to all tokens.
    of_loss = float(product(sample.grad_output.t(), sample.x).norm()) * sample.tokens / sample.x.shape[0]
    return norm / of_loss if of_loss > 0 and norm > 0 and math.isfinite(of_loss) else None
